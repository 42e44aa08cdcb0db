"""The page is well-formed, needs nothing from outside, and takes any name for text."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from report.any_reports import any_report
from report.sample_reports import (
    HOSTILE,
    nothing_measured,
    sample,
    sample_experiments,
    sample_report,
    saying,
)

from lightning_feed.measure.experiment_results import KeyBytes, NamedCost
from lightning_feed.measure.measurements import HookTime
from lightning_feed.report.files import as_html
from lightning_feed.report.report import Report
from lightning_feed.report.sections import read_pipeline
from lightning_feed.verdict.diagnosis import (
    Bottleneck,
    Diagnosis,
    Grade,
    Note,
    Remedy,
)


class _Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what is on the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self._note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data.replace("\N{NO-BREAK SPACE}", " "))

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def _words(found: Diagnosis) -> str:
    return "".join(_Page(as_html(sample_report(found))).words)


def test_html_page_shows_the_content_of_the_report() -> None:
    words = _words(sample())
    for said in (
        "Highly data-bound",
        "GPU idle 34 % of each step waiting for data",
        "95 % CI 32-36",
        "Where a step of 87.2 ms goes",
        "29.6 ms",
        "FastDataModule(loader=LoaderSettings(num_workers=14))",
        "58.0 ms",
        "bottleneck",
        "slowest part",
        "3 040",
        "rank 1 (the slow one)",
        "[Callback]ModelCheckpoint.on_train_batch_end",
        "Example GPU",
        "lightning_feed 0.1.0",
    ):
        assert said in words, said


def test_html_page_without_measurements_shows_no_verdict() -> None:
    page = _Page(as_html(sample_report(nothing_measured())))
    assert "No verdict" in page.words
    assert "svg" not in page.tags


@pytest.mark.parametrize(
    ("bottleneck", "grade", "colour"),
    [
        ("compute", "OK", "good"),
        ("framework", "OK", "copy"),
        ("data", "slightly data-bound", "copy"),
        ("data", "moderately data-bound", "copy"),
        ("data", "highly data-bound", "data"),
        ("unknown", "not measured", "other"),
        ("unknown", "highly data-bound", "other"),
    ],
)
def test_html_verdict_mark_has_the_colour_of_the_grade(bottleneck: Bottleneck, grade: Grade, colour: str) -> None:
    page = as_html(sample_report(sample(bottleneck=bottleneck, grade=grade)))
    assert f'<i class="verdict {colour}">' in page


def test_html_page_puts_what_to_change_before_why() -> None:
    page = as_html(sample_report())
    places = [page.index(one) for one in ('class="stack"', "<b>next:</b>", "What to change", "<h2>Why</h2>")]
    assert places == sorted(places)


def test_html_page_formats_code_and_prefixes_rejected_fixes_with_not() -> None:
    vain = (Note.of("more workers in vain", ms=90.0, own_ms=87.2),)
    found = sample(notes=(Note.of("lock memory"),), why_not=vain, remedies=())
    page = as_html(sample_report(found))
    assert "<code><span>ulimit</span> <span>-l</span></code>" in page
    assert "<li>not more workers: " in page
    assert "`" not in page


def test_html_page_names_a_share_at_most_three_times() -> None:
    drawn = re.compile("<svg.*?</svg>", re.DOTALL)  # with what is shown under the pointer
    words = " ".join(_Page(drawn.sub("", as_html(sample_report(sample())))).words)
    assert len(re.findall(r"\b3(4|3\.9) %", words)) <= 3


def test_html_page_loads_nothing_from_outside() -> None:
    text = as_html(sample_report())
    page = _Page(text)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 1  # it makes the buttons that copy
    assert not {"src", "href", "srcset"} & {name for name, _ in page.attributes}
    assert not re.search(r"https?:|url\(|@import|fetch\(", text)


def test_html_step_bar_adds_up_to_100_percent() -> None:
    text = as_html(sample_report())
    (drawn,) = re.findall(r'<svg class="stack".*?</svg>', text, re.DOTALL)
    bars = ElementTree.fromstring(drawn).findall("rect")
    assert [one.get("class") for one in bars] == ["compute", "data", "copy", "other"]
    starts = [float(one.get("x") or 0) for one in bars]
    assert starts == pytest.approx([0, 60.7, 94.6, 95.9])
    ends = [start + float(one.get("width") or 0) for start, one in zip(starts, bars, strict=True)]
    assert ends[-1] == pytest.approx(100, abs=0.25)
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


def _boxes(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(box) for box in re.findall(r'<div class="copyable box">.*?</div>', text, re.DOTALL)]


def test_each_fix_is_in_a_box_whose_text_is_the_code() -> None:
    found = sample()
    codes = ["".join(box.itertext()) for box in _boxes(as_html(sample_report(found)))]
    assert codes == [remedy.code for remedy in found.remedies]


def test_code_can_be_broken_only_at_spaces() -> None:
    (box, *_) = _boxes(as_html(sample_report(sample(remedies=(Remedy(code="num_workers=2, a-b=c/d", why=()),)))))
    assert [word.text for word in box.iter("span")] == ["num_workers=2,", "a-b=c/d"]
    style = as_html(sample_report())
    assert "code span { white-space: pre; }" in style
    assert "anywhere" not in re.findall(r"^(?:code|pre|:not\(pre\)).*$", style, re.MULTILINE)


def test_pipeline_bars_are_as_long_as_the_time_of_a_batch() -> None:
    text = as_html(sample_report())
    drawn = re.findall(r'<rect class="\w+" x="0" y="0" width="([\d.]+)" height="10"/></svg>', text)
    widths = [float(width) for width in drawn]
    pipeline = read_pipeline(sample())
    assert pipeline is not None
    assert widths == pytest.approx([100 * bar.batch_ms / pipeline.longest_ms for bar in pipeline.bars], abs=0.01)
    assert max(widths) == 100


def test_html_page_folds_tables_and_shows_causes_and_remedies() -> None:
    text = as_html(sample_report())
    folded = re.findall("<summary>(.*?)</summary>", text)
    shown = re.findall("<h2>(.*?)</h2>", text)
    assert {"Ranks", "Slowest hooks", "What one sample costs"} <= set(folded)
    assert {"What to change", "Waiting for data over the run", "Step times", "Why", "Settings", "Machine"} <= set(shown)
    assert not set(shown) & set(folded)


def test_charts_have_axes_with_units_and_words() -> None:
    waiting, times = re.findall(r'<svg class="chart".*?</svg>', as_html(sample_report()), re.DOTALL)
    for drawn, axes in ((waiting, ("% of the time", "step")), (times, ("steps", "ms a step, log scale"))):
        chart = ElementTree.fromstring(drawn)
        assert chart.get("role") == "img"
        assert chart.findtext("title")
        assert chart.findtext("desc")
        assert set(axes) <= {text.text for text in chart.iter("text")}


def test_hostile_names_are_escaped_in_html() -> None:
    found = sample(
        evidence=(saying(HOSTILE),),
        remedies=(Remedy(code=HOSTILE, why=(saying(HOSTILE),), least_step_ms=60.0),),
    )
    experiments = replace(
        sample_experiments(),
        costs=(NamedCost(name=HOSTILE, cpu_ms=1.0, wall_ms=1.0),),
        keys=(KeyBytes(name=HOSTILE, bytes_per_batch=1),),
        left_out=((HOSTILE, HOSTILE),),
    )
    hooks = (HookTime(name=HOSTILE, ms_per_step=1.0),)
    found = replace(found, measurements=replace(found.measurements, experiments=experiments, hooks=hooks))
    report = sample_report(found)
    hostile = replace(
        report, written_at=HOSTILE, environment=replace(report.environment, cpu=HOSTILE, lightning_feed=HOSTILE)
    )
    page = _Page(as_html(hostile))
    assert page.tags.count("script") == 1  # our own
    assert (
        "".join(page.words).count(HOSTILE) == 13
    )  # every place that was given it; a bar has the last line of the code
    assert page.tags.count("title") == 5 + 2 + 4 + 3  # page, four parts of a step, two charts, and their columns


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(any_report(finite=False))
def test_any_report_gives_an_html_page(report: Report) -> None:
    _Page(as_html(report))
