"""What the meter reads on a simulated device is what happened there, also where the host's waiting says otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.device import MS
from simulated.training import Production
from watch.timeline import Step, Timeline

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
    parts = sum(sum(step[:4]) for step in timeline.steps)
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


def test_of_a_wait_of_80_percent_33_cost_time() -> None:
    timeline = run(Timeline(), Step(fetch=24, launch=6, work=20))
    stats = timeline.stats(SETTLED)
    assert host_wait_pct(timeline) == pytest.approx(80)
    assert timeline.device_idle_pct(SETTLED) == pytest.approx(100 / 3)
    # Work is queued before the host's 6 ms: it is done 14 ms into the wait, and nothing but the wait is in its way.
    assert stats.starved_pct == pytest.approx(100 / 3)
    assert stats.speedup_if_free == pytest.approx(1.5)


def test_an_unpinned_copy_idles_the_device_without_any_wait() -> None:
    timeline = run(Timeline(), Step(fetch=0, copy=6, pinned=False, launch=0.5, work=20))
    stats = timeline.stats(SETTLED)
    assert host_wait_pct(timeline) == 0
    assert stats.starved_pct == 0
    assert stats.input_pct == pytest.approx(100 * 6 / 26)  # 23 %
    assert stats.h2d_ms == pytest.approx(6)


def test_where_each_step_synchronises_the_two_agree() -> None:
    timeline = run(Timeline(), Step(fetch=10, launch=1, work=20, synchronize=True))
    stats = timeline.stats(SETTLED)
    assert host_wait_pct(timeline) == pytest.approx(100 / 3)
    assert stats.starved_pct == pytest.approx(100 / 3)
    assert stats.hidden_wait_ms == pytest.approx(0)


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
def test_a_loader_of_constant_rate_starves_by_what_it_lacks(period: float, workers: int, idle_ms: float) -> None:
    timeline = run(Timeline(Production([period], workers=workers), ahead=2), Step(launch=1, work=20), steps=200)
    last = timeline.stats(99)
    assert last.data_idle_ms == pytest.approx(idle_ms, abs=0.01)
    assert last.step_ms == pytest.approx(max(20, period / workers), abs=0.01)


def test_a_full_queue_hides_a_slow_loader_until_it_is_empty() -> None:
    """Q / (1 - rho) steps: 16 / (1 - 20 / 24) = 96."""
    timeline = Timeline(Production([24], prefetch=16), ahead=1)
    filled = Step(before=2000, work=20, launch=1)
    timeline.run([filled] + [Step(launch=1, work=20)] * 199)
    assert_true(timeline)
    idle = [step.data_ns / MS for step in timeline.steps]
    first_idle = next(number for number, ms in enumerate(idle[1:], 1) if ms > 1)
    assert first_idle == pytest.approx(96, abs=6)  # a batch is in hand while its step computes
    assert idle[120:] == pytest.approx([4.0] * 80)


def test_jitter_costs_only_what_the_queue_cannot_bridge() -> None:
    periods = [10.0] * 19 + [150.0]
    shallow = run(Timeline(Production(periods, prefetch=2), ahead=1), Step(work=20, launch=1), steps=300)
    deep = run(Timeline(Production(periods, prefetch=12), ahead=1), Step(work=20, launch=1), steps=300)
    spike = shallow.stats(99).data_idle_ms
    assert spike is not None
    assert spike == pytest.approx((150 - 2 * 20) / 20, abs=1.1)
    assert deep.stats(99).data_idle_ms == pytest.approx(0)


def test_one_slow_batch_holds_up_those_behind_it() -> None:
    timeline = run(Timeline(Production([5.0] * 19 + [400.0], workers=4), ahead=1), Step(work=20, launch=1), steps=300)
    waits = [step.data_ns / MS for step in timeline.steps[100:]]
    assert sum(wait > 1 for wait in waits) == 10  # one batch in twenty
    assert max(waits) == pytest.approx(400 - 8 * 20, abs=21)  # eight were ready, or nearly


# --- the prefetcher -----------------------------------------------------------------------------------------------


def test_a_look_ahead_hides_the_wait_and_the_copy() -> None:
    step = Step(fetch=8, copy=6, launch=1, work=20)
    without, ahead = run(Timeline(ahead=1), step).stats(SETTLED), run(Timeline(look_ahead=True), step).stats(SETTLED)
    assert without.h2d_ms == pytest.approx(6)
    assert ahead.input_pct == pytest.approx(0)
    assert ahead.step_ms == pytest.approx(20)


def test_a_look_ahead_cannot_hide_a_loader_that_is_slower_than_the_device() -> None:
    timeline = run(Timeline(Production([30]), look_ahead=True, ahead=1), Step(copy=2, launch=1, work=20))
    stats = timeline.stats(SETTLED)
    # 30 ms a batch: 20 of work, 8 of waiting, and the copy, which begins when the batch is there.
    assert stats.step_ms == pytest.approx(30)
    assert stats.compute_ms == pytest.approx(20)
    assert stats.h2d_ms == pytest.approx(2)
    assert stats.data_idle_ms == pytest.approx(8)


# --- what is not data ---------------------------------------------------------------------------------------------


def test_a_callback_that_idles_the_device_is_not_data() -> None:
    stats = run(Timeline(), Step(before=15, fetch=3, launch=1, work=10)).stats(SETTLED)
    assert stats.step_ms == pytest.approx(19)
    assert stats.other_ms == pytest.approx(6)  # 15, less the 9 that the work still lasts
    assert stats.data_idle_ms == pytest.approx(3)


def test_a_validation_in_between_is_left_out() -> None:
    step = Step(fetch=24, launch=6, work=20)
    timeline = Timeline()
    timeline.run([step] * STEPS, lambda number: timeline.validate(4, load=50, work=5) if number % 10 == 9 else None)
    assert_true(timeline)
    stats = timeline.stats(SETTLED)
    assert stats.steps == 80 - 8
    assert stats.starved_pct == pytest.approx(100 / 3)
    assert stats.other_ms == pytest.approx(0)


def test_gradient_accumulation() -> None:
    """10 ms of work in each step, and 12 of the optimizer in one of four; the loader takes 15 ms for each batch."""
    steps = [Step(fetch=15, launch=0, work=10 + 12 * (number % 4 == 3)) for number in range(STEPS)]
    timeline = Timeline()
    timeline.run(steps)
    assert_true(timeline)
    # 60 ms for 52 of work: the optimizer hides two of the waits and most of the third.
    assert [round(step.data_ns / MS) for step in timeline.steps[40:48]] == [0, 0, 3, 5, 0, 0, 3, 5]


def test_waiting_for_another_rank_is_computing() -> None:
    """The gradient exchange spins on the device until the slowest rank has come."""
    stats = run(Timeline(ahead=1), Step(fetch=0, launch=1, work=20 + 30)).stats(SETTLED)
    assert stats.starved_pct == 0
    assert stats.compute_ms == pytest.approx(50)


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
def test_the_meter_reads_the_truth_of_any_timeline(
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
def test_the_meter_reads_the_truth_of_any_loader(
    periods: list[float], workers: int, work: float, look_ahead: bool
) -> None:
    run(
        Timeline(Production(periods, workers=workers), look_ahead=look_ahead, ahead=2),
        Step(work=work, copy=1),
        steps=40,
    )
