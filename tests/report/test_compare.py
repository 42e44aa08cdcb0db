"""Two reports compared: what changed, and what became of the predictions."""

import json
import math
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

from lightning_feed.measure.measurements import LoopFacts
from lightning_feed.report.compare import Comparison, compare, comparison_text
from lightning_feed.report.document import as_document, from_document, to_plain
from lightning_feed.report.report import Report
from lightning_feed.verdict.diagnosis import Remedy

FED = sample_stats(
    step_ms=60.0, data_idle_ms=2.0, starved_pct=3.3, starved_low_pct=2.0, starved_high_pct=5.0, epoch_start_s=None
)


def _after(stats: Any = FED, **facts: Any) -> Report:
    found = sample(stats=stats, facts=sample_facts(**facts), bottleneck="compute", cause="compute", grade="OK")
    return sample_report(found)


def _with(changes: str, before: LoopFacts | None = None, after: LoopFacts | None = None, **stats: Any) -> Comparison:
    """The comparison of two runs with one remedy between them."""
    remedies = (Remedy(code="code", why="why", predicted_step_ms=57.6, changes=changes),)
    first = sample(facts=before, remedies=remedies)
    return compare(sample_report(first), sample_report(sample(facts=after, stats=sample_stats(**stats))))


# --- predictions --------------------------------------------------------------------------------------------------


def test_predicted_against_achieved() -> None:
    (check,) = compare(sample_report(), _after(num_workers=14)).predictions
    assert (check.changes, check.predicted_step_ms, check.achieved_step_ms) == ("num_workers=14", 57.6, 60.0)
    assert check.error_pct == pytest.approx(-4.0)  # 57.6 is 4 % less than 60: too much was predicted
    assert check.also_changed == ()


@pytest.mark.parametrize("workers", [6, 12, 15, None])
def test_a_remedy_that_was_not_followed(workers: int | None) -> None:
    assert compare(sample_report(), _after(num_workers=workers)).predictions == ()


@pytest.mark.parametrize(
    ("changes", "before", "after", "stats", "followed"),
    [
        ("pin_memory=True", {"pin_memory": False}, {"pin_memory": True}, {}, True),
        ("pin_memory=true", {"pin_memory": False}, {"pin_memory": True}, {}, True),
        ("pin_memory=True", {"pin_memory": True}, {"pin_memory": True}, {}, False),  # it was so before
        ("pin_memory=True", {"pin_memory": None}, {"pin_memory": True}, {}, False),  # perhaps it was so before
        ("in_order=False", {}, {"in_order": False}, {}, True),
        ("workers=thread", {}, {"workers": "thread"}, {}, True),
        ('decoder="turbo"', {"decoder": "pillow"}, {"decoder": "turbo"}, {}, True),
        ("ours=True", {}, {"ours": True}, {}, True),
        ("prefetch_callback=True", {}, {}, {"prefetch_active": True}, True),
        ("prefetch_callback=True", {}, {}, {"prefetch_active": False}, False),
        ("prefetch_callback=True", {}, {}, {}, False),
        ("prog_bar=False", {"syncs": ("prog_bar",)}, {"syncs": ()}, {}, True),
        ("prog_bar=False", {"syncs": ("prog_bar",)}, {"syncs": ("prog_bar",)}, {}, False),
        ("num_workers=8,prefetch_factor=4", {}, {"num_workers": 8, "prefetch_factor": 4}, {}, True),
        ("num_workers=8, prefetch_factor=4", {}, {"num_workers": 8}, {}, False),
        ("transform=uint8", {}, {"batch_bytes": 1}, {}, False),  # cannot be read off the facts
        ("", {}, {"num_workers": 8}, {}, False),
        ("num_workers", {}, {"num_workers": 8}, {}, False),
    ],
)
def test_whether_a_remedy_was_followed(
    changes: str, before: dict[str, Any], after: dict[str, Any], stats: dict[str, Any], followed: bool
) -> None:
    found = _with(changes, sample_facts(**before), sample_facts(**after), **stats)
    assert [one.changes for one in found.predictions] == ([changes] if followed else [])


def test_remedies_of_which_no_report_tells_are_named() -> None:
    changes = ("num_workers=8", "device_transform", "stage_to=/dev/shm", "device_transform", "")
    remedies = tuple(Remedy(code="code", why="why", changes=one) for one in changes)
    found = compare(sample_report(sample(remedies=remedies)), sample_report())
    assert found.unchecked == ("device_transform", "stage_to=/dev/shm")
    assert "whether these are in effect: device_transform; stage_to=/dev/shm" in comparison_text(found)


def test_the_report_card_is_part_of_the_next_report() -> None:
    found = sample(stats=FED, facts=sample_facts(num_workers=14))
    document = as_document(sample_report(found, previous=sample_report()))
    (row,) = document["report_card"]
    assert (row["changes"], row["predicted_step_ms"], row["achieved_step_ms"]) == ("num_workers=14", 57.6, 60.0)
    assert row["error_pct"] == pytest.approx(-4.0)
    again = from_document(json.loads(json.dumps(document)))
    assert again == sample_report(found, previous=sample_report())
    assert as_document(again) == document


# --- what changed -------------------------------------------------------------------------------------------------


def _changes(found: Comparison) -> dict[str, tuple[object, object]]:
    return {one.name: (one.before, one.after) for one in (*found.settings, *found.versions)}


def test_what_changed() -> None:
    after = _after(replace(FED, prefetch_active=True), num_workers=14, persistent_workers=None, syncs=("prog_bar",))
    after = replace(after, environment=sample_environment(torch="2.16.0", free_shm_bytes=5))
    assert _changes(compare(sample_report(), after)) == {
        "num_workers": (6, 14),
        "prefetch_callback": (None, True),
        "prog_bar": (False, True),
        "torch": ("2.15.0", "2.16.0"),
    }
    assert _changes(compare(sample_report(), sample_report())) == {}


@pytest.mark.parametrize(
    ("low", "high", "noise"),
    [(30.0, 32.1, True), (30.0, 32.0, False), (35.8, 40.0, True), (35.9, 40.0, False), (None, 40.0, None)],
)
def test_a_difference_within_noise(low: float | None, high: float, noise: bool | None) -> None:
    after = sample_report(sample(stats=sample_stats(starved_low_pct=low, starved_high_pct=high)))
    assert compare(sample_report(), after).starved_within_noise is noise


def test_the_verdict() -> None:
    found = compare(sample_report(), _after())
    assert (found.verdict_before, found.verdict_after) == ("data (cpu), highly data-bound", "compute, OK")
    assert found.verdict_changed
    assert not compare(sample_report(), sample_report()).verdict_changed
    assert compare(sample_report(), sample_report(sample(cause="waiting"))).verdict_changed


@pytest.mark.parametrize(
    ("code", "after", "also"),
    [
        ("num_workers=14, pin_memory=False", {"pin_memory": False}, ()),
        ('dataloader_kwargs={"num_workers": 14, "pin_memory": False}', {"pin_memory": False}, ()),
        ("num_workers=14, pin_memory=True", {"pin_memory": False}, ("pin_memory",)),  # not the value of the fix
        ("num_workers=14", {"workers": "thread"}, ("workers",)),
    ],
)
def test_all_settings_of_a_fix_belong_to_it(code: str, after: dict[str, Any], also: tuple[str, ...]) -> None:
    before = sample(facts=sample_facts(workers="process", pin_memory=True))
    earlier = sample_report(replace(before, remedies=(replace(before.remedies[0], code=code),)))
    (check,) = compare(earlier, _after(**{"num_workers": 14, "workers": "process"} | after)).predictions
    assert check.also_changed == also


@pytest.mark.parametrize(("before", "after"), [(None, 60.0), (3.0, 14.0), (60.0, None)])
def test_a_load_that_is_unknown_or_small_explains_nothing(before: float | None, after: float | None) -> None:
    reports = [sample_report(sample(facts=sample_facts(others_cpu_pct=taken))) for taken in (before, after)]
    found = compare(*reports)
    assert found.others_change_pct is None
    assert "while other programs" not in comparison_text(found)


def test_settings_are_named_in_words() -> None:
    before, after = (sample_report(sample(facts=sample_facts(ours=ours))) for ours in (False, True))
    assert "changed  FastDataModule False -> True" in comparison_text(compare(before, after))


def test_a_report_without_remedies_is_not_checked() -> None:
    advised, nothing = sample_report(), sample_report(sample(remedies=()))
    said = "none of the earlier report's remedies is in effect"
    assert said in comparison_text(compare(advised, advised))
    assert said not in comparison_text(compare(nothing, nothing))


def test_cautions() -> None:
    after = replace(_after(batch_size=64, world_size=2), environment=sample_environment(cpu="Other CPU"))
    assert [one.split(",")[0].split(":")[0] for one in compare(sample_report(), after).cautions] == [
        "they ran on different machines",
        "the batch sizes differ",
        "the runs used different numbers of ranks",
    ]
    assert compare(sample_report(), sample_report()).cautions == ()
    busy = sample_report(sample(facts=sample_facts(others_cpu_pct=63.0)))
    assert compare(busy, sample_report()).cautions == (
        "other programs took 63 % of the CPUs before and an unknown share after: steps depend on it",
    )
    low = sample_report(sample(confidence="low"))
    assert compare(low, sample_report(nothing_measured())).cautions[-2:] == (
        "the earlier report's figures are of low confidence",
        "the later run was not measured",
    )


# --- text ---------------------------------------------------------------------------------------------------------


def test_the_comparison_in_words() -> None:
    text = comparison_text(compare(sample_report(), _after(num_workers=14, pin_memory=False)))
    assert text.splitlines() == [
        "before   the earlier report",
        "after    the later report",
        "result   1.45 times as fast: 367.0 -> 533.3 samples/s",
        "verdict  data (cpu), highly data-bound -> compute, OK",
        "changed  num_workers 6 -> 14; pin_memory True -> False",
        "                   before      after",
        "samples_per_s       367.0      533.3     +45 %",
        "step_ms              87.2       60.0     -31 %",
        "compute_ms           52.9       52.9      +0 %",
        "data_idle_ms         29.6        2.0     -93 %",
        "h2d_ms                1.1        1.1      +0 %",
        "other_ms              3.6        3.6      +0 %",
        "next_wait_ms         31.6       31.6      +0 %",
        "starved_pct          33.9        3.3   -30.6 points",
        "input_pct            35.2       35.2    +0.0 points",
        "epoch_start_s         0.8          -",
        "noise    of starved_pct: the 95 % intervals do not overlap: more than noise; of step times it is not known",
        "check    num_workers=14: predicted step 57.6 ms, achieved 60.0 ms, error -4.0 % (also changed: pin_memory)",
    ]


def _times(before: tuple[float, float, float], after: tuple[float, float, float]) -> Comparison:
    """Of two mean steps with their intervals."""
    steps = [sample_stats(step_low_ms=low, step_ms=mean, step_high_ms=high) for low, mean, high in (before, after)]
    return compare(*(sample_report(sample(stats=stats)) for stats in steps))


def test_the_speed_up_has_an_interval_of_both_runs() -> None:
    found = _times((76.0, 80.0, 84.0), (54.0, 60.0, 66.0))
    assert found.times_as_fast == pytest.approx(80 / 60)
    down, up = math.hypot(math.log(80 / 76), math.log(66 / 60)), math.hypot(math.log(84 / 80), math.log(60 / 54))
    assert (found.times_low, found.times_high) == pytest.approx((80 / 60 / math.exp(down), 80 / 60 * math.exp(up)))
    text = comparison_text(found)
    assert "result   1.33 times as fast (1.20 to 1.50): 400.0 -> 533.3 samples/s" in text
    assert "of step times it is not known" not in text


@pytest.mark.parametrize(
    ("after", "noise"), [((54.0, 60.0, 90.0), True), ((79.0, 80.0, 81.0), True), ((95.0, 100.0, 105.0), False)]
)
def test_a_speed_up_within_noise(after: tuple[float, float, float], noise: bool) -> None:
    assert ("result   within noise: " in comparison_text(_times((76.0, 80.0, 84.0), after))) == noise


@pytest.mark.parametrize(
    ("steps", "others", "said"),
    [
        ((80.0, 40.0), (69.0, 51.0), "2.00 times as fast, while other programs took less of the CPUs: "),
        ((80.0, 160.0), (0.0, 51.0), "0.50 times as fast, while other programs took more of the CPUs: "),
        ((80.0, 40.0), (60.0, 69.0), "2.00 times as fast (1.81 to 2.21): "),  # such a share varies as much
    ],
)
def test_a_factor_beside_other_programs(steps: tuple[float, float], others: tuple[float, float], said: str) -> None:
    reports = [
        sample_report(
            sample(
                stats=sample_stats(step_low_ms=step * 0.93, step_ms=step, step_high_ms=step * 1.07),
                facts=sample_facts(others_cpu_pct=taken),
            )
        )
        for step, taken in zip(steps, others, strict=True)
    ]
    assert f"result   {said}" in comparison_text(compare(*reports))


def test_without_the_interval_of_one_run_the_factor_stands_for_itself() -> None:
    old = sample_report()  # as those of earlier versions
    found = compare(old, sample_report(sample(stats=sample_stats(step_low_ms=1.0, step_ms=2.0, step_high_ms=3.0))))
    assert (found.times_low, found.times_high) == (None, None)
    assert found.times_as_fast == pytest.approx(43.6)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example])
@given(any_report(finite=False), any_report(finite=False))
def test_any_two_reports_can_be_compared(before: Report, after: Report) -> None:
    found = compare(before, after)
    assert comparison_text(found).startswith("before")
    json.dumps(to_plain(found), allow_nan=False)
