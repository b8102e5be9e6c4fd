"""The texts of the benchmarks: what counts as overlap, and that the committed documents are apart from each other."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def texts() -> ModuleType:
    """scripts/benchmarks/texts.py, which lies outside of the package."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "texts.py"
    spec = importlib.util.spec_from_file_location("benchmark_texts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_copied_passage_counts_in_any_layout(texts: ModuleType, held_out_documents: dict[str, list[str]]) -> None:
    for documents in held_out_documents.values():
        first, second, *_ = documents
        words = second.split()
        copy = "\n\t".join(words[: len(words) // 2]) + " " + first
        assert texts.overlap(second, [first]) < 0.05
        assert 0.3 < texts.overlap(second, [copy]) < 0.7
        assert texts.without_overlap([first, second], [copy]) == []
        assert texts.without_overlap([second], [first]) == [second]


def test_common_phrases_are_no_overlap(texts: ModuleType) -> None:
    # twelve equal words in a row are one too few
    shared = "a b c d e f g h i j k l"
    assert texts.overlap(f"x {shared} y", [f"z {shared} w"]) == 0.0
    assert texts.overlap(f"x {shared} y", [f"z {shared} y"]) == 0.5


def test_chinese_is_counted_in_characters(texts: ModuleType) -> None:
    text = "天还没有全亮菜市场已经热闹起来了"
    assert texts.overlap(text, ["前面有别的话，" + text]) == 1.0
    assert texts.overlap(text, [text[:12]]) == 0.0


def test_committed_documents_are_apart(texts: ModuleType) -> None:
    for domain in texts.DOMAINS:
        documents = texts.committed_documents(domain)
        for n, document in enumerate(documents):
            assert texts.without_overlap([document], documents[:n] + documents[n + 1 :]) == [document]
