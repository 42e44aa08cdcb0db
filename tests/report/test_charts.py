"""The charts of a page: what they draw, and which values stand on their axes."""

from dataclasses import replace

import pytest
from report.sample_reports import sample_timeline

from lightning_feed.measure.stats import Bin, Stretch, Timeline
from lightning_feed.report.charts import Chart, charts


def _charts(timeline: Timeline) -> tuple[Chart, Chart]:
    waiting, times = charts(timeline)
    return waiting, times


def test_waiting_chart_has_a_column_for_each_stretch() -> None:
    waiting, _ = _charts(sample_timeline())
    assert [column.waiting for column in waiting.columns] == pytest.approx([0.2, 0.3, 0.4, 0.46])
    assert [column.left for column in waiting.columns] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert [tick.text for tick in waiting.across] == ["0", "100", "200", "300", "400"]
    assert [tick.text for tick in waiting.up] == ["0", "50", "100"]
    assert waiting.columns[1].words == "steps 104 to 206: 30 % waiting for data, 87.2 ms a step"
    assert waiting.words == (
        "103 steps in each column. Training waits 20 % to 46 % of their time: 20 % at first, 46 % at last."
    )


def test_histogram_divides_each_column_by_the_waiting() -> None:
    _, times = _charts(sample_timeline())
    assert [column.waiting for column in times.columns] == pytest.approx([0, 0.015, 0.5])
    assert [column.waiting + column.other for column in times.columns] == pytest.approx([1, 0.06, 1])
    assert [column.width for column in times.columns] == pytest.approx([1 / 3] * 3)
    assert times.words == "Half of the steps take up to 90 ms, 95 % up to 135 ms, the longest 135 ms."
    assert [tick.text for tick in times.across] == ["40", "60", "80", "100", "120"]


def test_times_of_several_magnitudes_have_a_logarithmic_axis() -> None:
    bins = (
        Bin(from_ms=3.0, to_ms=4.0, steps=50, starved_pct=0.0),
        Bin(from_ms=900.0, to_ms=1200.0, steps=1, starved_pct=100.0),
    )
    _, times = _charts(replace(sample_timeline(), bins=bins))
    assert [tick.text for tick in times.across] == ["10", "100", "1000"]
    bins = (replace(bins[0], from_ms=1e-6, to_ms=2e-6), replace(bins[1], from_ms=5e11, to_ms=1e12))
    _, times = _charts(replace(sample_timeline(), bins=bins))
    assert len(times.across) <= 6


def test_few_steps_and_impossible_figures_give_no_charts() -> None:
    assert charts(None) == []
    assert charts(Timeline(stretches=(), bins=())) == []
    few = (Stretch(steps=9, step_ms=1.0, starved_pct=0.0),)
    assert charts(replace(sample_timeline(), stretches=few)) == []
    impossible = tuple(replace(one, starved_pct=float("nan")) for one in sample_timeline().bins)
    assert charts(replace(sample_timeline(), bins=impossible)) == []
