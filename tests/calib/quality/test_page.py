from __future__ import annotations

import base64
import hashlib
import itertools
import math
import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from quality_report_sample import BROKEN_MODULE, full_report, quick_report

from harness.calib.quality.page import changed_first, render_page, side_by_side
from harness.calib.quality.report import QualityReport, TaskItem

VOID = {"meta", "br", "link", "img", "input", "hr"}
# What users, files and models may put into a report.
FREE_TEXT = frozenset(
    [
        *("name", "path", "machine", "arch", "backend", "recipe", "calibration", "engine_id", "domain", "where"),
        *("reason", "description", "source", "scorer", "id", "prompt", "expected", "answer", "answer_baseline"),
        *("remark", "module", "precision", "unit", "chosen", "notes", "license_notes"),
    ]
)
HOSTILE = "</title></style></script><img src=x onerror=alert(1)>\"'&\x00\x1b[31m\u202eevil\u2066\u200b{{7*7}}"


class Page(HTMLParser):
    """Tags with their attributes, checked to be balanced, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.paths: list[tuple[str, ...]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.paths.append((*self._open, tag))
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.paths.append((*self._open, tag))
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


def with_texts(report: QualityReport, suffix: str) -> QualityReport:
    """The report with a suffix on every text that is not ours."""

    def add(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {k: add(v, k) for k, v in value.items()}
        if isinstance(value, list):
            return [add(v, key) for v in value]
        return value + suffix if isinstance(value, str) and key in FREE_TEXT else value

    return QualityReport.model_validate(add(report.model_dump(), ""))


REPORTS = {"quick": quick_report(), "full": full_report(), "few layers": full_report(5), "experts": full_report(6, 8)}


@pytest.fixture(params=REPORTS)
def html(request: pytest.FixtureRequest) -> str:
    return render_page(REPORTS[request.param])


def test_page_is_balanced_and_its_links_lead_somewhere(html: str) -> None:
    page = Page(html)
    ids = Counter(a["id"] for _, a in page.tags if "id" in a)
    assert set(ids.values()) == {1}
    assert {a["href"] for a in page.all("a")} <= {f"#{name}" for name in ids}
    for _, attributes in page.tags:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_page_fetches_nothing_and_runs_nothing(html: str) -> None:
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "form", "base", "use"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name in ("src", "style", "srcset") or name.startswith("on")}
    (style,) = re.findall(r"<style>(.*?)</style>", html, flags=re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")


def test_page_can_be_read_without_seeing_it(html: str) -> None:
    page = Page(html)
    for path, (tag, attributes) in zip(page.paths, page.tags, strict=True):
        if tag == "table":
            assert path[-2] == "div"  # its own box to scroll in
        if tag == "th":
            assert attributes["scope"] in ("col", "row")
        if tag == "svg":
            assert "aria-hidden" in attributes or (attributes["role"] == "img" and attributes["aria-labelledby"])
    headings = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))


def test_texts_of_others_stay_text() -> None:
    """A page of hostile texts has the structure of one of harmless texts, and shows what they hold."""
    harmless, hostile = (render_page(with_texts(full_report(5), suffix)) for suffix in ("x" * len(HOSTILE), HOSTILE))
    pages = Page(harmless), Page(hostile)
    shapes = [[(tag, tuple(attributes)) for tag, attributes in page.tags if tag != "mark"] for page in pages]
    assert shapes[0] == shapes[1]
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u202a-\u202e\u2066-\u2069]", hostile)
    shown = "".join(pages[1].text)
    assert "onerror=alert(1)>\"'&␀␛[31m⟨U+202E⟩evil⟨U+2066⟩⟨U+200B⟩{{7*7}}" in shown


def test_long_answers_are_cut() -> None:
    report = full_report(5)
    task = report.tasks[0]
    long = task.differing[0].model_copy(update={"prompt": "p" * 10**6, "answer": "a" * 10**6, "answer_baseline": "b"})
    tasks = [task.model_copy(update={"differing": [long]}), *report.tasks[1:]]
    html = render_page(report.model_copy(update={"tasks": tasks}))
    assert len(html) < len(render_page(report)) + 10_000
    assert "996,000 characters left out" in html


@pytest.mark.parametrize(
    ("verdict", "said"),
    [("pass", "pass Yes."), ("warn", "warn Yes, but look at the warnings first."), ("fail", "fail No.")],
)
def test_verdict_is_a_word(verdict: str, said: str) -> None:
    page = Page(render_page(full_report(5).model_copy(update={"verdict": verdict})))
    assert said in " ".join("".join(page.text).split())


def test_a_failed_gate_leads_to_what_it_looked_at() -> None:
    html = render_page(full_report())
    findings = html[html.index('class="findings"') : html.index("Gates that decided")]
    assert f'<a href="#weights"><bdi>{BROKEN_MODULE}</bdi></a>' in findings
    assert '<a href="#domain-1"><bdi>chinese</bdi></a>' in findings
    assert '<a href="#task-0"><bdi>extraction</bdi></a>' in findings
    row = html[html.index('<tr id="domain-1"') :]
    assert row[: row.index("</th>")].endswith("chinese")


def test_hundreds_of_experts_are_one_mark_a_layer() -> None:
    html = render_page(full_report(30, 64))
    assert len(html) < 250_000
    start = html.index(">mlp.experts.*.down_proj</title>")
    panel = html[start : html.index("</svg>", start)]
    assert panel.count('class="mark') == 29  # layer 0 is dense


def test_default_calibration_set_is_labelled() -> None:
    label = "default set: not your traffic"
    assert label in render_page(full_report(5))
    assert label not in render_page(quick_report(5))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e-12, 1e9])
def test_any_figure_can_be_shown(value: float) -> None:
    """A broken engine gives figures that no plot was made for."""

    settings = ("seconds", "warn", "fail")

    def put(part: Any) -> Any:
        if isinstance(part, dict):
            return {k: v if k in settings or "score" in k or "bits" in k else put(v) for k, v in part.items()}
        if isinstance(part, list):
            return [put(v) for v in part]
        return value if isinstance(part, float) else part

    html = render_page(QualityReport.model_validate(put(full_report(5).model_dump())))
    for attribute in ("d", "x", "y", "transform", "width"):
        assert not re.search(rf' {attribute}="[^"]*(nan|inf)', html)


def test_answers_that_changed_their_score_come_first() -> None:
    order = [(i.score, i.score_baseline) for i in changed_first(full_report(5).tasks[0].differing)]
    assert order == [(0.0, 1.0), (0.667, 1.0), (1.0, 0.667), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("answer", "other", "marked"),
    [
        ("total: 120450 EUR", "total: 1204.5 EUR", "total: 1204<mark>50</mark> EUR"),
        ("aaa", "aaaa", "aaa<mark></mark>"),
        ("yes", "no", "yes"),
        ("", "no", "<em>empty</em>"),
        (" \n", "no", "<em>white space only: &#39; \\n&#39;</em>"),
        ("<b>1</b>", "<b>2</b>", "&lt;b&gt;<mark>1</mark>&lt;/b&gt;"),
    ],
)
def test_what_differs_is_marked(answer: str, other: str, marked: str) -> None:
    assert side_by_side(answer, other)[0] == marked


def test_colours_can_be_told_from_their_background() -> None:
    """WCAG 2.2: 4.5 for text, 3 for marks of plots, in both schemes."""
    css = re.findall(r"<style>(.*?)</style>", render_page(quick_report(5)), flags=re.DOTALL)[0]
    schemes = [
        dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S)
    ]
    assert len(schemes) == 2
    for colours in schemes:
        for ink in ("fg", "muted", "link", "pass", "warn", "fail"):
            assert contrast(colours[ink], colours["bg"]) >= 4.5
            assert contrast(colours[ink], colours["soft"]) >= 4.5
        assert contrast(colours["fg"], colours["mark"]) >= 4.5
        assert min(contrast(colours[ink], colours["bg"]) for ink in "abcdef") >= 3


def contrast(one: str, other: str) -> float:
    lights = sorted(map(luminance, (one, other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_items_keep_their_order_where_scores_are_alike() -> None:
    def item(name: str) -> TaskItem:
        return TaskItem(id=name, prompt="", expected="", answer="a", answer_baseline="b", score=0, score_baseline=0)

    assert [i.id for i in changed_first([item("2"), item("1")])] == ["2", "1"]
