"""Takes secrets and personal data out of traffic before it becomes token ids.

Owns which kinds are looked for and what stands in their place: a placeholder per kind, such as `<EMAIL>`, so that the
sentence around it stays a sentence. Secrets of known shapes are found with the plugins of detect-secrets (its kept
fork, bc-detect-secrets), telephone numbers with phonenumbers; what those two lack is added as further plugins of
detect-secrets. None of it needs a model or the network: the plugins' online verification is never called.

Names and postal addresses stay: finding them takes a model. Every pattern has bounded repeats, so that a line of
megabytes takes time linear in its length.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from datetime import date
from functools import lru_cache

import phonenumbers
from detect_secrets.plugins.aws import AWSKeyDetector
from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
from detect_secrets.plugins.base import RegexBasedDetector
from detect_secrets.plugins.discord import DiscordBotTokenDetector
from detect_secrets.plugins.github_token import GitHubTokenDetector
from detect_secrets.plugins.jwt import JwtTokenDetector
from detect_secrets.plugins.mailchimp import MailchimpDetector
from detect_secrets.plugins.npm import NpmDetector
from detect_secrets.plugins.sendgrid import SendGridDetector
from detect_secrets.plugins.slack import SlackDetector
from detect_secrets.plugins.square_oauth import SquareOAuthDetector
from detect_secrets.plugins.stripe import StripeDetector
from detect_secrets.plugins.twilio import TwilioKeyDetector

MIN_GROUP_CHARS = 20
PHONE_REGIONS = ("GB", "DE", "FR", "IN", "JP", "CN")
Span = tuple[int, int, str]

# Words end where Chinese, Japanese or Korean text begins, though `\b` does not say so.
_CJK = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


class PrivateKeyBlock(RegexBasedDetector):
    """The whole armoured block; the library's own plugin stops at a line break."""

    secret_type = "PRIVATE_KEY"
    denylist = (
        re.compile(
            r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r"(?:(?!-----)[A-Za-z0-9+/=\s\\:,.()-]){0,20000}(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
        ),
        # cut off in the log: the header and the base64 that follows it
        re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:\s|\\n|[A-Za-z0-9+/=]{16,200}){0,2000}"),
    )


class BoundedJwt(JwtTokenDetector):
    """The library's pattern, tried once per word: on `eyJeyJeyJ...` it takes time in the square of the length."""

    secret_type = "JWT"
    denylist = [  # noqa: RUF012 (the base class declares it so)
        re.compile(
            r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_=-]{5,8000}\.[A-Za-z0-9_=-]{5,8000}(?:\.[A-Za-z0-9_.+/=-]{0,8000})?"
        ),
    ]


class AuthorizationHeader(RegexBasedDetector):
    """Values of headers that carry credentials, bearer tokens, and `user:password@` in addresses."""

    secret_type = "CREDENTIALS"
    denylist = (
        re.compile(
            r"(?i)\b(?:proxy-)?authorization[\"']?\s{0,4}[:=]\s{0,4}[\"']?"
            r"(?P<secret>(?:(?:bearer|basic|digest|token|apikey)\s{1,4}|(?=\S{0,200}\d))[^\s\"'`,;{}()$<>]{8,4000})(?![\w.(])"
        ),
        re.compile(
            r"(?i)\bx-(?:api|auth)-(?:key|token)[\"']?\s{0,4}[:=]\s{0,4}[\"']?(?P<secret>[^\s\"'`,;{}$<>]{8,4000})"
        ),
        re.compile(r"(?i)\bbearer\s{1,4}(?P<secret>(?=[^\s]{0,200}\d)[A-Za-z0-9_~+/.=-]{16,4000})"),
        re.compile(r"(?i)\b(?:set-)?cookie:\s{0,4}(?P<secret>[\w.-]{1,100}=[^\r\n\"'{}]{6,4000})"),
        re.compile(r"(?<=://)(?P<secret>[^\s/:@\"'{}<>$]{1,100}:[^\s/@\"'{}<>$]{1,200})(?=@)"),
    )


class ApiKey(RegexBasedDetector):
    """Keys of known shapes that the library has no plugin for."""

    secret_type = "API_KEY"
    denylist = (
        re.compile(
            r"(?<![A-Za-z0-9_-])(?:sk|pk|rk)-(?:[a-z]{2,10}\d{0,2}-){0,3}(?=[A-Za-z_-]{0,200}\d)[A-Za-z0-9_-]{20,400}"
        ),
        re.compile(r"(?<![A-Za-z0-9])(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,200}"),
        re.compile(
            r"(?<![A-Za-z0-9])(?:github_pat|glpat|gldt|hf|dop_v1|shpat|pypi)[-_][A-Za-z0-9_-]{16,400}(?<=[A-Za-z0-9])"
        ),
        re.compile(r"(?<![A-Za-z0-9])AIza[A-Za-z0-9_-]{35}"),
        re.compile(r"(?<![A-Za-z0-9])LTAI[A-Za-z0-9]{12,24}(?![A-Za-z0-9])"),
    )


class AssignedSecret(RegexBasedDetector):
    """`password=...`, `"api_key": "..."`, `密码：...`; a value that looks like code or a plain word stays."""

    secret_type = "PASSWORD"
    denylist = (
        re.compile(
            r"(?i)(?:password|passwd|passphrase|pwd|密码|口令)[\"']?\s{0,4}(?:[:=]|=>|:=|是|为)\s{0,4}"
            r"(?P<secret>\"[^\s\"{}<>]{6,200}(?=\")|'[^\s'{}<>]{6,200}(?=')"
            r"|(?=[^\s\d]{0,200}\d)(?=[^\sA-Za-z]{0,200}[A-Za-z])[^\s\"'`,;，。；<>(){}\[\]]{6,200})"
        ),
        re.compile(
            r"(?i)(?:secret|token|api_?-?key|access_?-?key|private_?-?key|密钥)[\"']?\s{0,4}(?:[:=]|=>|:=|是|为)\s{0,4}"
            r"[\"']?(?P<secret>(?=(?:[^\s\d]{0,200}\d){3})(?=[^\sA-Za-z]{0,200}[A-Za-z])[A-Za-z0-9_~+/=.-]{16,400})"
        ),
    )


class Email(RegexBasedDetector):
    secret_type = "EMAIL"
    denylist = (
        re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w-])"),
    )


class IpAddress(RegexBasedDetector):
    """Addresses of machines; loopback, unspecified, netmasks and multicast name no one."""

    secret_type = "IP"
    denylist = (
        re.compile(r"(?<![\w.-])(?<!ersion )(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)"),
        re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{1,4}:{1,2}){3,7}(?:[0-9A-Fa-f]{1,4})?(?![\w:])"),
    )

    @staticmethod
    def accepts(value: str) -> bool:
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            return False
        return not (address.is_loopback or address.is_unspecified or address.is_multicast or address.is_reserved)


class CardNumber(RegexBasedDetector):
    """Payment cards: the groups as printed, or 13 to 19 digits; the Luhn sum must hold."""

    secret_type = "CARD"
    denylist = (
        re.compile(r"(?<![\w.,-])[3-6]\d{3}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?(?![\w-]|\.\d)"),
        re.compile(r"(?<![\w.,-])3[47]\d{2}([ -])\d{6}\1\d{5}(?![\w-]|\.\d)"),
        re.compile(r"(?<![\w.,-])[3-6]\d{12,18}(?![\w-]|\.\d)"),
    )

    @staticmethod
    def accepts(value: str) -> bool:
        digits = [int(c) for c in reversed(value) if c.isdigit()]
        doubled = (sum(divmod(2 * d, 10)) for d in digits[1::2])
        return len(set(digits)) > 1 and (sum(digits[::2]) + sum(doubled)) % 10 == 0


class Iban(RegexBasedDetector):
    secret_type = "IBAN"
    denylist = (re.compile(r"(?<!\w)[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?!\w)"),)

    @staticmethod
    def accepts(value: str) -> bool:
        compact = value.replace(" ", "")
        return int("".join(str(int(c, 36)) for c in compact[4:] + compact[:4])) % 97 == 1


class ChineseIdCard(RegexBasedDetector):
    """18 characters with a date of birth and the check character of GB 11643 (ISO 7064, MOD 11-2)."""

    secret_type = "ID_CARD"
    denylist = (re.compile(r"(?<![\w.-])[1-9]\d{16}[\dXx](?![\w-])"),)

    @staticmethod
    def accepts(value: str) -> bool:
        try:
            born = date(int(value[6:10]), int(value[10:12]), int(value[12:14]))
        except ValueError:
            return False
        total = sum(int(c) * (2 ** (17 - i) % 11) for i, c in enumerate(value[:17]))
        return born.year >= 1900 and value[17].upper() == "10X98765432"[total % 11]


class ChineseMobile(RegexBasedDetector):
    """11 digits in Chinese text, or in the groups that people write; bare ones elsewhere may be any count."""

    secret_type = "PHONE"
    denylist = (re.compile(r"(?<![\w.,-])(?:\+?86[- ]?)?1[3-9]\d([- ]?)\d{4}\1\d{4}(?![\w-]|[.,]\d)"),)


_ASSIGNED = AssignedSecret()
_CHINESE_MOBILE = ChineseMobile()
# The first of two that overlap wins.
_DETECTORS: tuple[RegexBasedDetector, ...] = (
    PrivateKeyBlock(),
    AuthorizationHeader(),
    BoundedJwt(),
    ApiKey(),
    AWSKeyDetector(),
    AzureStorageKeyDetector(),
    DiscordBotTokenDetector(),
    GitHubTokenDetector(),
    MailchimpDetector(),
    NpmDetector(),
    SendGridDetector(),
    SlackDetector(),
    SquareOAuthDetector(),
    StripeDetector(),
    TwilioKeyDetector(),
    _ASSIGNED,
    Email(),
    Iban(),
    ChineseIdCard(),
    CardNumber(),
    IpAddress(),
)


def redact(text: str) -> tuple[str, Counter[str]]:
    """Text with placeholders for secrets and personal data, and how many of each kind were replaced."""
    pieces: list[str] = []
    counts: Counter[str] = Counter()
    end = 0
    for start, stop, kind in _without_overlaps(_spans(text)):
        pieces += (text[end:start], f"<{kind}>")
        counts[kind] += 1
        end = stop
    pieces.append(text[end:])
    return "".join(pieces), counts


def _spans(text: str) -> Iterator[Span]:
    """Start, end and kind of all that is found, the most certain detectors first."""
    plain = text.translate(_FULL_WIDTH)
    # same length: the places found here are places in the text
    separated = _CJK.sub(" ", plain)
    for detector in _DETECTORS:
        yield from _matches(detector, plain if detector is _ASSIGNED else separated)
    chinese = separated != plain
    for start, stop, kind in _matches(_CHINESE_MOBILE, separated):
        if chinese or not text[start:stop].isdigit():
            yield start, stop, kind
    yield from _telephones(separated)


def _matches(detector: RegexBasedDetector, text: str) -> Iterator[Span]:
    kind = str(detector.secret_type) if type(detector).__module__ == __name__ else "API_KEY"
    accepts = getattr(detector, "accepts", None)
    for pattern in detector.denylist:
        group = "secret" if "secret" in pattern.groupindex else 0
        for match in pattern.finditer(text):
            start, stop = match.span(group)
            # the library's groups are the secret itself in some patterns, only its prefix in others
            if kind == "API_KEY" and match.lastindex and len(match[1] or "") >= MIN_GROUP_CHARS:
                start, stop = match.span(1)
            if accepts is None or accepts(match[0]):
                # a quoted secret keeps its opening quote
                start += text[start] in "\"'"
                yield start, stop, kind


# International, the American groups, or a trunk prefix and groups. Bare digits are counts, not numbers to call.
_TELEPHONE_LIKE = re.compile(
    r"(?<![\w.,:/=+-])(?:\+\d(?:[ .()/-]{0,2}\d){7,14}"
    r"|(?P<american>\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}([ .-])\d{3}\2\d{4})"
    r"|\(?0\d{1,4}\)?(?:[ /-]\d{2,8}){1,4})(?![\w-]|[.,:/]\d)"
)


def _telephones(text: str) -> Iterator[Span]:
    for candidate in _TELEPHONE_LIKE.finditer(text):
        regions = ("US",) if candidate["american"] else PHONE_REGIONS
        # one point is that of a decimal number
        if candidate[0].count(".") != 1 and _is_telephone(candidate[0], regions):
            yield candidate.start(), candidate.end(), "PHONE"


@lru_cache(maxsize=4096)
def _is_telephone(written: str, regions: tuple[str, ...]) -> bool:
    for region in regions:
        try:
            if phonenumbers.is_valid_number(phonenumbers.parse(written, region)):
                return True
        except phonenumbers.NumberParseException:
            continue
    return False


def _without_overlaps(spans: Iterator[Span]) -> list[Span]:
    """Spans in the order of the text; of two that overlap, the one that came first."""
    taken: list[Span] = []
    covered: set[int] = set()
    for start, stop, kind in spans:
        if stop > start and covered.isdisjoint(range(start, stop)):
            covered.update(range(start, stop))
            taken.append((start, stop, kind))
    return sorted(taken)
