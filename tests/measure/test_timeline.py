"""What the meter reads on a simulated device is what happened there, also where the host's waiting says otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure.timeline import Step, Timeline
from simulated.training import Production

STEPS, SETTLED = 120, 39
"""Steps of a run, and the one after which figures count."""


def run(timeline: Timeline, step: Step, steps: int = STEPS) -> Timeline:
    timeline.run([step] * steps)
    assert_true(timeline)
    return timeline


def assert_true(timeline: Timeline) -> None:
    """Each step's figure is the simulated truth, and the parts of all steps are the time that passed."""
    assert timeline.steps
    assert [step.data_ns for step in timeline.steps] == pytest.approx(timeline.idle_ns(), abs=5)
    parts = sum(step.step_ns for step in timeline.steps)
    assert parts == pytest.approx(timeline.ended - timeline.began, abs=1, rel=1e-9)


def host_wait_pct(timeline: Timeline) -> float:
    stats = timeline.stats(SETTLED)
    assert stats.next_wait_ms is not None
    assert stats.step_ms
    return 100 * stats.next_wait_ms / stats.step_ms


# --- the host's wait is not the device's --------------------------------------------------------------------------


@pytest.mark.parametrize(("load", "wait_pct"), [(6.4, 32), (8, 40)])
def test_queued_work_hides_the_wait(load: float, wait_pct: float) -> None:
    timeline = run(Timeline(ahead=2), Step(fetch=load, launch=1, work=20))
    stats = timeline.stats(SETTLED)
    assert host_wait_pct(timeline) == pytest.approx(wait_pct)
    assert timeline.device_idle_pct(SETTLED) == pytest.approx(0)
    assert stats.starved_pct == pytest.approx(0)
    assert stats.hidden_wait_ms == pytest.approx(load)


def test_an_unpinned_copy_idles_the_device_without_any_wait() -> None:
    timeline = run(Timeline(), Step(fetch=0, copy=6, pinned=False, launch=0.5, work=20))
    stats = timeline.stats(SETTLED)
    assert host_wait_pct(timeline) == 0
    assert stats.starved_pct == 0
    assert stats.input_pct == pytest.approx(100 * 6 / 26)  # 23 %
    assert stats.copy_ms == pytest.approx(6)


# --- loaders ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "workers", "idle_ms"),
    [
        (10, 1, 0),  # twice as fast as the device
        (20, 1, 0),  # just as fast
        (30, 1, 10),
        (80, 4, 0),
        (120, 4, 10),
    ],
)
def test_a_loader_of_constant_rate_idles_the_device_by_its_shortfall(
    period: float, workers: int, idle_ms: float
) -> None:
    timeline = run(Timeline(Production([period], workers=workers), ahead=2), Step(launch=1, work=20), steps=200)
    last = timeline.stats(99)
    assert last.data_ms == pytest.approx(idle_ms, abs=0.01)
    assert last.step_ms == pytest.approx(max(20, period / workers), abs=0.01)


# --- the prefetcher -----------------------------------------------------------------------------------------------


def test_a_look_ahead_hides_the_wait_and_the_copy() -> None:
    step = Step(fetch=8, copy=6, launch=1, work=20)
    without, ahead = run(Timeline(ahead=1), step).stats(SETTLED), run(Timeline(look_ahead=True), step).stats(SETTLED)
    assert without.copy_ms == pytest.approx(6)
    assert ahead.input_pct == pytest.approx(0)
    assert ahead.step_ms == pytest.approx(20)


# --- what is not data ---------------------------------------------------------------------------------------------


def test_a_validation_between_steps_is_left_out() -> None:
    step = Step(fetch=24, launch=6, work=20)
    timeline = Timeline()
    timeline.run([step] * STEPS, lambda number: timeline.validate(4, load=50, work=5) if number % 10 == 9 else None)
    assert_true(timeline)
    stats = timeline.stats(SETTLED)
    assert stats.steps == 80 - 8
    assert stats.starved_pct == pytest.approx(100 / 3)
    assert stats.other_ms == pytest.approx(0)


# --- any timeline -------------------------------------------------------------------------------------------------

moments = st.one_of(st.just(0.0), st.floats(0, 40))
any_step = st.builds(
    Step,
    before=moments,
    fetch=moments,
    copy=moments,
    pinned=st.booleans(),
    launch=moments,
    work=moments,
    synchronize=st.booleans(),
)


@given(
    steps=st.lists(any_step, min_size=1, max_size=25),
    look_ahead=st.booleans(),
    ahead=st.sampled_from([None, 1, 2, 4]),
    validations=st.integers(0, 5),
)
def test_the_meter_matches_the_simulated_device_on_any_timeline(
    steps: list[Step], look_ahead: bool, ahead: int | None, validations: int
) -> None:
    timeline = Timeline(look_ahead=look_ahead, ahead=ahead)

    def between(number: int) -> None:
        if validations and number % validations == 0:
            timeline.validate(2, load=3, work=1)

    timeline.run(steps, between)
    assert len(timeline.steps) == len(steps)
    assert_true(timeline)


@given(
    periods=st.lists(st.floats(0, 100), min_size=1, max_size=10),
    workers=st.integers(1, 4),
    work=st.floats(0, 40),
    look_ahead=st.booleans(),
)
def test_the_meter_matches_the_simulated_device_with_any_loader(
    periods: list[float], workers: int, work: float, look_ahead: bool
) -> None:
    run(
        Timeline(Production(periods, workers=workers), look_ahead=look_ahead, ahead=2),
        Step(work=work, copy=1),
        steps=40,
    )
