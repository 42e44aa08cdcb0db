"""Two reports side by side: what changed, and how many times as fast the later run was."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from report.any_reports import any_report
from report.sample_reports import (
    nothing_measured,
    sample,
    sample_environment,
    sample_facts,
    sample_report,
    sample_stats,
)

from lightning_feed.report.compare import Comparison, compare, comparison_text
from lightning_feed.report.document import to_plain
from lightning_feed.report.report import Report, RunIdentity

FED = sample_stats(
    step_ms=60.0, data_ms=2.0, starved_pct=3.3, starved_low_pct=2.0, starved_high_pct=5.0, epoch_start_s=None
)


def _after(stats: Any = FED, **facts: Any) -> Report:
    found = sample(stats=stats, facts=sample_facts(**facts), bottleneck="compute", cause="compute", grade="OK")
    return sample_report(found)


# --- what changed -------------------------------------------------------------------------------------------------


def _changes(found: Comparison) -> dict[str, tuple[object, object]]:
    return {one.name: (one.before, one.after) for one in found.changed}


def test_compare_lists_changed_settings_and_versions() -> None:
    after = _after(replace(FED, prefetch_active=True), num_workers=14, persistent_workers=None)
    after = replace(after, environment=sample_environment(torch="2.16.0", free_shm_bytes=5))
    assert _changes(compare(sample_report(), after)) == {
        "num_workers": (6, 14),
        "prefetch_callback": (False, True),
        "torch": ("2.15.0", "2.16.0"),
    }
    assert _changes(compare(sample_report(), sample_report())) == {}


def test_compare_warns_if_the_runs_are_not_alike() -> None:
    after = replace(_after(), environment=sample_environment(cpu="Other CPU"))
    assert [one.split(",")[0] for one in compare(sample_report(), after).cautions] == ["they ran on different machines"]
    assert compare(sample_report(), sample_report()).cautions == ()
    programs = [replace(sample_report(), run=RunIdentity(program=name)) for name in ("a.py", "b.py")]
    assert "different programs, a.py and b.py" in compare(*programs).cautions[0]
    assert compare(programs[0], programs[0]).cautions == ()
    low = sample_report(sample(confidence="low"))
    assert compare(low, sample_report(nothing_measured())).cautions[-2:] == (
        "the earlier report's figures are of low confidence",
        "the later report's figures are of low confidence",
    )


# --- text ---------------------------------------------------------------------------------------------------------


def test_comparison_text_lists_result_verdict_and_figures() -> None:
    text = comparison_text(compare(sample_report(), _after(num_workers=14, pin_memory=False)))
    assert text.splitlines() == [
        "before   the earlier report",
        "after    the later report",
        "result   1.45 times as fast",
        "verdict  data, cpu, highly data-bound -> compute, compute, OK",
        "changed  num_workers 6 -> 14; pin_memory True -> False",
        "                   before      after",
        "samples_per_s       367.0      533.3",
        "step_ms              87.2       60.0",
        "compute_ms           52.9       52.9",
        "data_ms              29.6        2.0",
        "copy_ms               1.1        1.1",
        "other_ms              3.6        3.6",
        "next_wait_ms         31.6       31.6",
        "starved_pct          33.9        3.3",
        "input_pct            35.2       35.2",
        "epoch_start_s         0.8          -",
    ]


def _times(before: tuple[float, float, float], after: tuple[float, float, float]) -> Comparison:
    """Of two mean steps with their intervals."""
    steps = [sample_stats(step_low_ms=low, step_ms=mean, step_high_ms=high) for low, mean, high in (before, after)]
    return compare(*(sample_report(sample(stats=stats)) for stats in steps))


@pytest.mark.parametrize(
    ("after", "noise"), [((54.0, 60.0, 90.0), True), ((79.0, 80.0, 81.0), True), ((95.0, 100.0, 105.0), False)]
)
def test_a_speed_up_within_noise_is_called_noise(after: tuple[float, float, float], noise: bool) -> None:
    assert ("result   within noise: " in comparison_text(_times((76.0, 80.0, 84.0), after))) == noise


def test_the_same_step_with_twice_as_many_samples_is_no_noise() -> None:
    before, after = (
        sample_report(
            sample(
                stats=sample_stats(step_low_ms=76.0, step_ms=80.0, step_high_ms=84.0),
                facts=sample_facts(batch_size=size),
            )
        )
        for size in (32, 64)
    )
    assert "result   2.00 times as fast" in comparison_text(compare(before, after))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(any_report(finite=False), any_report(finite=False))
def test_any_two_reports_can_be_compared(before: Report, after: Report) -> None:
    found = compare(before, after)
    assert comparison_text(found).startswith("before")
    json.dumps(to_plain(found), allow_nan=False)
