"""The verdict is a pure function of the figures; the report is that verdict in words."""

from typing import Any

import pytest
from verdict.cases import BUSY, kinds, loop_facts, measured, under

from lightning_feed.measure.measurements import HookTime, LoopFacts, Measurements
from lightning_feed.measure.stats import MIN_STEPS, StarvationStats
from lightning_feed.measure.wall import Part, WallPart, WallStats
from lightning_feed.report.report import headline
from lightning_feed.report.words import share_text
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Diagnosis, Note
from lightning_feed.verdict.shares import is_toy_step
from lightning_feed.verdict.thresholds import (
    CLOSE_SHARE,
    COPY_PCT,
    DATA_PCT,
    FRAMEWORK_PCT,
    HEADLINE_PCT,
    HIGH_PCT,
    MODERATE_PCT,
    TOY_STEP_MS,
)


def _stats(other: float = 0, data: float = 0, copy: float = 0, compute: float = 100, **changes: Any) -> StarvationStats:
    step = other + data + copy + compute
    figures: dict[str, Any] = {
        "steps": 412,
        "confidence": "high",
        "step_ms": step,
        "other_ms": other,
        "data_ms": data,
        "copy_ms": copy,
        "compute_ms": compute,
        "starved_pct": 100 * data / step,
        "input_pct": 100 * (data + copy) / step,
        "speedup_if_free": step / (step - data),
        "next_wait_ms": data,
        "hidden_wait_ms": 0.0,
    }
    return StarvationStats(**(figures | changes))


def _diagnose(facts: LoopFacts | None = None, **parts: Any) -> Diagnosis:
    return decide(Measurements(stats=_stats(**parts), facts=facts or LoopFacts()))


@pytest.mark.parametrize(
    ("other", "data", "copy", "bottleneck"),
    [
        (FRAMEWORK_PCT, 0, 0, "framework"),
        (under(FRAMEWORK_PCT), 0, 0, "compute"),
        (0, 0, COPY_PCT, "compute"),  # a small part is no headline
        (0, 0, HEADLINE_PCT, "copy"),
        (0, 0, under(COPY_PCT), "compute"),
        (0, DATA_PCT, 0, "compute"),
        (0, HEADLINE_PCT, 0, "data"),
        (0, under(DATA_PCT), 0, "compute"),
        (0, 0, 0, "compute"),
        (10, 10, 10, "framework"),  # the first of equals
        (0, 10, 10, "copy"),
        (12, 60, 6, "data"),  # the dearest of those over their limit
        (9, 6, 40, "copy"),
    ],
)
def test_bottleneck_follows_from_shares_of_the_step(other: float, data: float, copy: float, bottleneck: str) -> None:
    diagnosis = _diagnose(other=other, data=data, copy=copy, compute=100 - other - data - copy)
    assert diagnosis.bottleneck == bottleneck


@pytest.mark.parametrize(
    ("data", "grade"),
    [
        (0, "OK"),
        (under(DATA_PCT), "OK"),
        (DATA_PCT, "slightly data-bound"),
        (under(MODERATE_PCT), "slightly data-bound"),
        (MODERATE_PCT, "moderately data-bound"),
        (under(HIGH_PCT), "moderately data-bound"),
        (HIGH_PCT, "highly data-bound"),
        (100, "highly data-bound"),
    ],
)
def test_grade_follows_from_the_share_of_data_waits(data: float, grade: str) -> None:
    stats = _stats(data=data, compute=100 - data) if data < 100 else _stats(data=100, compute=1e-9)
    assert decide(Measurements(stats=stats)).grade == grade


def test_a_few_steps_give_no_verdict() -> None:
    diagnosis = _diagnose(data=90, steps=MIN_STEPS - 1)
    assert (diagnosis.bottleneck, diagnosis.grade, diagnosis.confidence, diagnosis.remedies) == (
        "unknown",
        "not measured",
        "low",
        (),
    )
    assert diagnosis.evidence == (Note.of("too few steps", steps=MIN_STEPS - 1, needed=MIN_STEPS),)


def test_zero_steps_give_no_verdict() -> None:
    assert decide(Measurements(stats=StarvationStats(steps=0, confidence="low"))).bottleneck == "unknown"


def test_every_part_over_its_limit_gets_evidence_and_parts_of_the_step_get_notes() -> None:
    diagnosis = _diagnose(loop_facts(num_workers=0, usable_cpus=4), other=12, data=60, copy=6, compute=22)
    parts = [(note.names["part"], note.figures["ms"]) for note in diagnosis.evidence[:3]]
    assert parts == [("data", 60.0), ("framework", 12.0), ("copy", 6.0)]
    assert diagnosis.remedies == ()
    assert {"profile hooks", "move hooks"} <= set(kinds(diagnosis.notes))


def test_a_normalisation_that_the_user_has_not_written_is_not_to_be_moved() -> None:
    facts = loop_facts(device_type="cpu", num_workers=1, device_transform=True, normalizes=True)
    diagnosis = _diagnose(facts, copy=40, compute=60)
    assert (diagnosis.bottleneck, diagnosis.cause, diagnosis.notes) == ("copy", "transfer hooks", ())
    assert Note.of("normalised here") in diagnosis.evidence


def test_evidence_names_a_slow_epoch_start() -> None:
    assert Note.of("slow epoch start", s=2.0) in _diagnose(epoch_start_s=2.0).evidence


def test_notes_name_device_syncs_between_steps() -> None:
    several = LoopFacts(device_type="cuda", world_size=2, syncs=("prog_bar", "sigterm_broadcast"))
    diagnosis = _diagnose(several, other=20, compute=80)
    assert diagnosis.remedies == ()
    assert diagnosis.notes == (
        Note.of("avoid waits", sync="prog_bar"),
        Note.of("avoid waits", sync="sigterm_broadcast"),
        Note.of("profile hooks"),
    )


def test_a_verdict_from_low_confidence_figures_has_low_confidence() -> None:
    assert _diagnose(data=50, confidence="low").confidence == "low"


def test_evidence_mentions_hidden_waits_and_lost_steps() -> None:
    diagnosis = _diagnose(next_wait_ms=30.0, hidden_wait_ms=30.0, lost_steps=7)
    assert Note.of("hidden wait", hidden_ms=30.0, ms=30.0) in diagnosis.evidence
    assert Note.of("lost steps", steps=7) in diagnosis.evidence


@pytest.mark.parametrize(
    ("other", "copy", "confidence"),
    [
        (FRAMEWORK_PCT * (1 - 0.9 * CLOSE_SHARE), 0.0, "medium"),
        (FRAMEWORK_PCT * (1 + 0.9 * CLOSE_SHARE), 0.0, "medium"),
        (FRAMEWORK_PCT * (1 - 1.1 * CLOSE_SHARE), 0.0, "high"),
        (FRAMEWORK_PCT * (1 + 1.1 * CLOSE_SHARE), 0.0, "high"),
        (0.0, COPY_PCT * (1 - 0.9 * CLOSE_SHARE), "medium"),
    ],
)
def test_a_share_close_to_its_limit_lowers_confidence(other: float, copy: float, confidence: str) -> None:
    assert decide(measured(data=0.0, other=other, copy=copy)).confidence == confidence


@pytest.mark.parametrize(
    ("step", "toy", "noted"),
    [
        (under(TOY_STEP_MS), True, False),
        (TOY_STEP_MS, False, True),
        (under(2 * TOY_STEP_MS), False, True),
        (2 * TOY_STEP_MS, False, False),
    ],
)
def test_short_steps_get_a_note_on_larger_batches(step: float, toy: bool, noted: bool) -> None:
    diagnosis = decide(measured(data=0.3 * step, step=step, loaders=BUSY))
    assert is_toy_step(step) == toy
    assert ("short steps" in kinds(diagnosis.notes)) == noted


def test_notes_begin_with_the_longest_part() -> None:
    hooks = [HookTime(name="[Callback]Slow.on_train_batch_end", ms_per_step=12.0)]
    pinned = {"device_type": "cuda", "pin_memory": False}
    small = decide(measured(data=0.0, other=12.0, copy=30.0, hooks=hooks, **pinned))
    large = decide(measured(data=0.0, other=30.0, copy=12.0, hooks=hooks, **pinned))
    assert kinds(small.notes) == ["pin", "rarer hook"]
    assert kinds(large.notes) == ["rarer hook", "pin"]


def test_time_between_steps_and_its_share_are_one_figure() -> None:
    run = measured(data=0.0, copy=20.0, other=30.0, device_type="cpu", batch_hooks=False, num_workers=2)
    diagnosis = decide(run)
    assert diagnosis.bottleneck == "framework"
    (part,) = [note for note in diagnosis.evidence if note.kind == "part of the step"]
    assert (part.names["part"], part.figures["ms"], part.figures["pct"]) == ("framework", 50.0, 50.0)
    assert "50 % of each step between the steps" in headline(diagnosis)


def test_trials_are_no_part_of_the_run_in_shares() -> None:
    parts: dict[Part, float] = {"train": 10.0, "trials": 60.0, "validation": 30.0}
    wall = WallStats(wall_s=100.0, parts=tuple(WallPart(name=name, seconds=s, times=1) for name, s in parts.items()))
    assert wall.run_s == 40.0
    diagnosis = decide(measured(data=0.0, wall=wall))
    assert diagnosis.bottleneck == "validation"
    assert diagnosis.evidence == (Note.of("share of the run"),)
    assert share_text(diagnosis.measurements) == "validation takes 75 % of the run"
