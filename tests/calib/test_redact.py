"""Secrets go, code and tables stay. Every secret here is made up; several are put together so that no scanner trips."""

from __future__ import annotations

import sysconfig
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.calib.redact import redact

KEY = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA1\n2bc+/x==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to jo.doe+x@mail.example.co.uk.", "write to <EMAIL>."),
        ("邮箱zhang.san@qq.com，谢谢", "邮箱<EMAIL>，谢谢"),
        ("call +49 30 901820 or (212) 555-0187", "call <PHONE> or <PHONE>"),
        ("ring 020 7946 0018 after six", "ring <PHONE> after six"),
        ("电话13812345678，或138-1234-5678", "电话<PHONE>，或<PHONE>"),
        ("全角１３８１２３４５６７８号", "全角<PHONE>号"),
        ("身份证110101199003074610。", "身份证<ID_CARD>。"),
        ("server 10.20.30.40:8080 and 2001:db8:85a3::8a2e:370:7334", "server <IP>:8080 and <IP>"),
        ("card 4111 1111 1111 1111 or 378282246310005", "card <CARD> or <CARD>"),
        ("to DE89 3704 0044 0532 0130 00 or GB82WEST12345698765432", "to <IBAN> or <IBAN>"),
        (f"OPENAI=sk-proj-{KEY}", "OPENAI=<API_KEY>"),
        (f"key sk-{KEY}, ok", "key <API_KEY>, ok"),
        ("id AKIA" + "Z7" * 8, "id <API_KEY>"),
        (f"git clone with ghp_{KEY}", "git clone with <API_KEY>"),
        (f"token {JWT} end", "token <JWT> end"),
        (f"before\n{PEM}\nafter", "before\n<PRIVATE_KEY>\nafter"),
        (PEM.replace("\n", "\\n"), "<PRIVATE_KEY>"),
        (f"-H 'Authorization: Bearer {KEY}'", "-H 'Authorization: <CREDENTIALS>'"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "Authorization: <CREDENTIALS>"),
        ("postgres://admin:s3cr3t@db.internal/x", "postgres://<CREDENTIALS>@db.internal/x"),
        ("password=hunter2x and pwd: 'letmein'", "password=<PASSWORD> and pwd: '<PASSWORD>'"),
        ("密码：abc123456，谢谢", "密码：<PASSWORD>，谢谢"),
        ('{"api_key": "0123456789abcdef0123"}', '{"api_key": "<PASSWORD>"}'),
    ],
)
def test_secrets_and_personal_data_are_replaced(text: str, expected: str) -> None:
    assert redact(text)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3.4, v10.0.0.1, localhost 127.0.0.1, 0.0.0.0, mask 255.255.255.0",
        "x = values[1::2]; std::vector<int> a; at 12:30:45",
        "| 1234 | 5678 | 9012 | 3456 |\n| 2024-01-15 | 17179869184 | 3.14159265358979 |",
        "4111111111111112 1234567890123456 1700000000000",
        "110101199003074611",
        "password = getpass.getpass()\ntoken = tokenizer.next_token()\npassword: str\nsecret = os.environ['S']",
        "def f(token=None, password='', *, key=lambda x: x): ...",
        "@property\ndef email(self): return self @ other",
        "authorization = self.headers.get('Authorization')\nauthorization = authorization.split()",
        "headers['Authorization'] = f'Bearer {token}'",
        "https://example.com/path:8080/a@b",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "订单20250115000123456，共计1380元，第13章第8节",
        "Decimal('+35236450.6') and -1.5e10, +1 2 3",
        "GB2312 and ISO 8859 1 and DE00 3702 0044 0532 0130 00",
    ],
)
def test_code_tables_and_numbers_stay(text: str) -> None:
    assert redact(text) == (text, Counter())


def test_what_was_replaced_is_counted_by_kind() -> None:
    text = f"a@b.com, c@d.org, 10.0.0.9, {JWT}"
    assert redact(text)[1] == {"EMAIL": 2, "IP": 1, "JWT": 1}


def test_a_second_pass_finds_nothing() -> None:
    once, _ = redact(f"a@b.com 13812345678 手机 password=hunter2x Authorization: Bearer {KEY} {PEM}")
    assert redact(once) == (once, Counter())


def test_the_standard_library_survives() -> None:
    # mail addresses of authors and example addresses are there; beyond those nothing may be taken for a secret
    counts: Counter[str] = Counter()
    for name in ("argparse", "tokenize", "datetime", "decimal", "_pydecimal", "ssl", "hashlib", "secrets", "locale"):
        text = (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text(encoding="utf-8")
        counts += redact(text)[1]
    assert not set(counts) - {"EMAIL"}, counts


@pytest.mark.parametrize(
    "unit",
    ["a", "1", "a-", "1 ", "1-", "(1", "123-4567 ", "+1 ", "a@", "a.", "eyJ", "sk-", "password=", "bearer ", "ab:",
     "://a:", "-----BEGIN PRIVATE KEY-----", "aws key ", "A1b+/"],
)  # fmt: skip
def test_a_long_line_takes_linear_time(unit: str) -> None:
    def seconds(num_chars: int) -> float:
        start = time.process_time()
        redact((unit * num_chars)[:num_chars])
        return time.process_time() - start

    small = min(seconds(4_000) for _ in range(3))
    # linear is 8 times; the square would be 64 times
    assert seconds(32_000) < 32 * small + 0.2
