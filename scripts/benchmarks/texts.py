"""Texts that the test models are trained on and that quality is measured on: code, English and Chinese.

Owns where the text comes from, how it becomes documents, and that no held-out document is in the training text. It
does not tokenize. All of it installs from a registry: Python's standard library (PSF), and Debian packages that
`apt-get download` brings without root. Package text is extracted when needed and never committed; what is committed,
in calib/suites/held_out, is PSF, public domain or our own.

A document is held out by a hash of its name, so that other releases of a package split alike. Overlap is counted in
runs of 13 words (a Chinese character is a word), the length that GPT-3 used to find contamination, arXiv 2005.14165.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import platform
import re
import subprocess
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

REPOSITORY = Path(__file__).resolve().parent.parent.parent
COMMITTED = REPOSITORY / "calib" / "suites" / "held_out"
CACHE = REPOSITORY / ".cache" / "texts"
DOMAINS = ("code", "english", "chinese")
LICENCES = {
    "jargon-text": "public domain",
    "fortunes": "BSD-3-Clause collection",
    "debian-reference-en": "GPL-2.0-or-later",
    "debian-reference-zh-cn": "GPL-2.0-or-later",
    "manpages-zh": "GFDL-1.2-or-later",
}

SHINGLE_WORDS = 13
MAX_OVERLAP = 0.05
_HELD_OUT_ONE_IN = 20
_CHARS = (200, 200_000)  # shorter ones say nothing, longer ones are tables
# fortunes about groups of people, and those quoted from books, songs and films that are in copyright
_SKIPPED_FORTUNES = {
    *("art", "drugs", "ethnic", "love", "men-women", "people", "politics", "pratchett", "songs-poems", "startrek"),
    *("ascii-art", "humorists", "translate-me"),
}


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file, page, entry or section; `name` tells which, and is stable between releases."""

    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Split:
    """Documents of a domain to train on, and those of the same sources that were kept back."""

    train: list[Document]
    held_out: list[Document]


def committed_documents(domain: str) -> list[str]:
    """The held-out documents that lie in the repository: the same everywhere, without network."""
    lines = (COMMITTED / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def held_out_documents(domain: str) -> list[str]:
    """The committed documents, then those kept back from the packages. Fetches the packages at the first call."""
    committed = committed_documents(domain)
    return committed + without_overlap([d.text for d in split(domain).held_out], committed)


@functools.cache
def split(domain: str) -> Split:
    """All documents of a domain, without duplicates.

    Training text loses what overlaps with the committed documents, held-out text what overlaps with training text.
    Fetches the packages at the first call.
    """
    documents = _distinct(_READERS[domain]())
    train = [d for d in documents if not _is_held_out(d.name)]
    train = _without_overlap(train, committed_documents(domain))
    held_out = [d for d in documents if _is_held_out(d.name)]
    return Split(train=train, held_out=_without_overlap(held_out, [d.text for d in train]))


def without_overlap(documents: Sequence[str], others: Iterable[str]) -> list[str]:
    """Those documents of which at most 5% of the runs of 13 words occur in any of the others."""
    kept = _without_overlap([Document(name="", text=text) for text in documents], others)
    return [document.text for document in kept]


def overlap(document: str, others: Iterable[str]) -> float:
    """Share of a document's runs of 13 words that occur in the others."""
    return _share(_shingles(document), _all_shingles(others))


def sources() -> list[dict[str, str]]:
    """What the text was read from, for a training record: name, version, licence, sha256 of the package."""
    packages = [
        {"name": name, "version": _deb(name).name.split("_")[1], "licence": licence, "sha256": sha256(_deb(name))}
        for name, licence in LICENCES.items()
    ]
    text = "".join(d.text for d in _code()).encode()
    standard_library = {
        "name": "Python standard library, with its tests",
        "version": platform.python_version(),
        "licence": "PSF-2.0",
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    return [standard_library, *packages]


def sha256(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# -- overlap -----------------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return re.findall(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+|[^\w\s]", text.lower())


def _shingles(text: str) -> npt.NDArray[np.uint64]:
    # the hash of a run is a sum over its words; a text shorter than a run counts as one
    words = np.array([zlib.crc32(word.encode()) for word in _words(text)] or [0], np.uint64)
    length = min(SHINGLE_WORDS, len(words))
    runs = np.zeros(len(words) - length + 1, np.uint64)
    for k in range(length):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + words[k : k + len(runs)]
    return np.unique(runs)


def _all_shingles(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    return np.unique(np.concatenate([np.empty(0, np.uint64), *map(_shingles, texts)]))


def _share(shingles: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> float:
    return float(np.isin(shingles, others, assume_unique=True).mean())


def _without_overlap(documents: Sequence[Document], others: Iterable[str]) -> list[Document]:
    known = _all_shingles(others)
    return [d for d in documents if _share(_shingles(d.text), known) <= MAX_OVERLAP]


def _distinct(documents: Iterable[Document]) -> list[Document]:
    # equal but for white space is equal
    first = {" ".join(d.text.split()): d for d in sorted(documents, key=lambda d: d.name, reverse=True)}
    return sorted(first.values(), key=lambda d: d.name)


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_ONE_IN == 0


# -- sources -----------------------------------------------------------------------------------------------------------


def _code() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" not in name and "lib2to3/tests/data" not in name:
            yield from _document(f"python/{name}", path.read_bytes())


def _english() -> Iterator[Document]:
    jargon = gzip.decompress((_package("jargon-text") / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes())
    text = re.sub(r"(?m)^   ", "", jargon.decode())
    for entry in re.split(r"(?m)^(?=:[^:\n]+:)", text)[1:]:
        yield from _document(f"jargon/{entry[1:].split(':')[0]}", entry)
    for path in sorted((_package("fortunes") / "usr/share/games/fortunes").iterdir()):
        if not path.suffix and path.name not in _SKIPPED_FORTUNES:
            for number, cookie in enumerate(path.read_text(encoding="utf-8").split("\n%\n")):
                yield from _document(f"fortunes/{path.name}/{number}", cookie)
    yield from _debian_reference("en")


def _chinese() -> Iterator[Document]:
    yield from _debian_reference("zh-cn")
    root = _package("manpages-zh") / "usr/share/man/zh_CN"
    for path in sorted(root.rglob("*.gz")):
        if path.is_file() and not path.is_symlink():
            page = _without_roff(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
            page = re.split(r"\n.*(?:中文版维护|中文手册页翻译|跋\n)", page)[0]  # the same credits end most pages
            if len(re.findall(r"[\u3400-\u9fff]", page)) > 0.2 * len(page):  # many pages are half translated
                yield from _document(f"manpages/{path.stem}", page)


_READERS = {"code": _code, "english": _english, "chinese": _chinese}


def _debian_reference(language: str) -> Iterator[Document]:
    folder = _package(f"debian-reference-{language}") / "usr/share/debian-reference"
    text = gzip.decompress((folder / f"debian-reference.{language}.txt.gz").read_bytes()).decode()
    for section in re.split(r"(?m)^(?=\d+\.\d+\.(?:\d+\.)?\s)", text):
        yield from _document(f"debian-reference-{language}/{section.split(maxsplit=1)[0]}", section)


def _document(name: str, content: bytes | str) -> Iterator[Document]:
    text = content if isinstance(content, str) else content.decode("utf-8", "replace")
    text = re.sub(r"\n{3,}", "\n\n", text.replace("\r\n", "\n")).strip()
    if _CHARS[0] <= len(text) <= _CHARS[1] and "\ufffd" not in text:
        yield Document(name=name, text=text)


_ROFF_ESCAPES = {r"\-": "-", r"\e": "\\", r"\ ": " ", r"\(aq": "'", r"\(bu": "*", r"\(co": "©", r"\(em": "—"}


def _without_roff(page: str) -> str:
    # headings and text stay, requests and fonts go
    lines = []
    for line in page.splitlines():
        heading = re.match(r"[.'](SH|SS)\s+(.*)", line)
        text = re.match(r"[.'](?:B|I|BR|RB|IR|RI|BI|IB|IP|TP|TH)\s+(.*)", line)
        if heading:
            line = f"\n{heading[2]}\n"
        elif text:
            line = text[1].replace('"', "")
        elif line.startswith((".", "'")):
            line = "" if line.startswith((".PP", ".P", ".LP", ".sp")) else "\0"
        line = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[,/&|^%:]|\\s[-+]?\d|\\\".*", "", line)
        lines.append(re.sub(r"\\(\(..|.)", lambda m: _ROFF_ESCAPES.get(m[0], ""), line))
    return "\n".join(line for line in lines if "\0" not in line)


def _package(name: str) -> Path:
    folder = CACHE / name
    if not folder.is_dir():
        subprocess.run(["dpkg-deb", "-x", str(_deb(name)), str(folder)], check=True)
    return folder


@functools.cache
def _deb(name: str) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    if not any(CACHE.glob(f"{name}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", name], cwd=CACHE, check=True)
    return next(CACHE.glob(f"{name}_*.deb"))
