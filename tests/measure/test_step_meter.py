"""Step accounting, to the nanosecond: fake clocks on the host, a queue of work on the device."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.device import MS, Event, SimulatedDevice

from lightning_feed.measure.step_meter import BACKWARD, FORWARD, OPTIMIZER, StepMeter, StepTimes


class Loop:
    """Calls the meter as Lightning's training loop would, and moves the clocks."""

    def __init__(self, *, on_device: bool = False, size: int = 512) -> None:
        self.device = SimulatedDevice()
        self.steps: list[StepTimes] = []
        keep = self.steps.append
        self.meter = self.device.meter(keep, size=size) if on_device else StepMeter(keep, clock=self.device.clock)
        self.starts: list[float] = []
        self.meter.on_epoch_start = self.starts.append

    def fetch(self, ms: float) -> None:
        self.meter.fetch_began()
        self.device.host(ms)
        self.meter.fetch_ended()

    def look_ahead(self, fetch: float, stage: float) -> None:
        self.meter.look_ahead_began()
        self.device.host(stage / 2)
        self.fetch(fetch)
        self.device.host(stage / 2)
        self.meter.look_ahead_ended()

    def transfer(self, ms: float) -> None:
        self.device.host(ms)
        self.meter.arrived()

    def run(self, ms: float, work: float = 0) -> None:
        self.meter.step_began()
        self.device.launch(work)
        self.device.host(ms)
        self.meter.step_ended()

    def step(self, other: float, fetch: float, copy: float, compute: float, work: float = 0) -> None:
        self.device.host(other)
        self.fetch(fetch)
        self.transfer(copy)
        self.run(compute, work)


def ms(step: StepTimes) -> tuple[float, ...]:
    """other, data, copy, compute, host wait."""
    return tuple(value / MS for value in step[:5])


# --- the host's clock ---------------------------------------------------------------------------------------------


def test_four_marks_divide_a_step_into_its_parts() -> None:
    loop = Loop()
    loop.step(other=1, fetch=2, copy=3, compute=4)
    loop.step(other=5, fetch=6, copy=7, compute=8)
    assert [ms(step) for step in loop.steps] == [(1, 2, 3, 4, 2), (5, 6, 7, 8, 6)]


def test_the_first_step_of_an_epoch_is_timed_as_epoch_start_and_not_counted() -> None:
    loop = Loop()
    loop.step(1, 2, 3, 4)
    loop.step(1, 2, 3, 4)
    loop.device.host(500)
    loop.meter.begin(epoch=True)
    loop.step(250, 750, 3, 4)
    loop.step(1, 2, 3, 4)
    assert [step.counted for step in loop.steps] == [False, True, False, True]
    assert loop.starts == [pytest.approx(1.0)]
    assert ms(loop.steps[2]) == (250, 750, 3, 4, 750)


def test_a_step_after_a_validation_is_not_counted() -> None:
    loop = Loop()
    for _ in range(3):
        loop.step(1, 1, 1, 1)
    loop.meter.leave_out_step()
    for _ in range(4):
        loop.device.host(100)
        loop.meter.arrived()  # batches of the validation pass E2 too
    loop.step(1, 1, 1, 1)
    loop.step(1, 1, 1, 1)
    assert [step.counted for step in loop.steps] == [False, True, True, False, True]
    assert ms(loop.steps[3]) == (401, 1, 1, 1, 1)


def test_a_look_ahead_after_the_step_belongs_to_the_next_step() -> None:
    loop = Loop()
    loop.step(1, 2, 3, 4)
    loop.device.host(1)
    loop.look_ahead(fetch=20, stage=6)
    loop.step(other=2, fetch=0, copy=0.5, compute=4)
    assert ms(loop.steps[1]) == (3, 20, 6.5, 4, 20)


def test_compute_time_resumes_after_a_look_ahead_inside_the_step() -> None:
    loop = Loop()
    loop.step(1, 2, 3, 4)
    loop.device.host(1)
    loop.fetch(0)
    loop.transfer(0.5)
    loop.meter.step_began()
    loop.device.host(10)
    loop.look_ahead(fetch=20, stage=6)
    loop.device.host(5)
    loop.meter.step_ended()
    assert ms(loop.steps[1]) == (1, 20, 6.5, 15, 20)


def test_a_look_ahead_of_several_batches_adds_up_their_fetches() -> None:
    loop = Loop()
    loop.step(1, 2, 3, 4)
    loop.meter.look_ahead_began()
    for _ in range(3):
        loop.fetch(10)
        loop.device.host(2)
    loop.meter.look_ahead_ended()
    loop.step(1, 0, 0, 4)
    assert ms(loop.steps[1]) == (1, 30, 6, 4, 30)


def test_fetches_inside_the_training_step_count_as_fetch_time() -> None:
    loop = Loop()
    for _ in range(2):
        loop.device.host(1)
        loop.meter.step_began()
        loop.fetch(10)
        loop.device.host(5)
        loop.fetch(10)
        loop.device.host(6)
        loop.meter.step_ended()
    assert ms(loop.steps[1]) == (1, 20, 0, 11, 20)


def test_a_batch_without_a_step_is_counted_with_the_next_step() -> None:
    loop = Loop()
    loop.step(1, 1, 1, 1)
    loop.device.host(1)
    loop.fetch(5)
    loop.transfer(1)  # the batch was None
    loop.step(1, 5, 1, 4)
    assert ms(loop.steps[1]) == (1, 10, 2, 5, 10)


def test_a_fetch_that_finds_the_end_of_the_epoch_is_dropped() -> None:
    loop = Loop()
    loop.step(1, 1, 1, 1)
    loop.fetch(9)
    loop.device.host(9)
    loop.meter.begin(epoch=True)
    loop.step(1, 2, 3, 4)
    assert ms(loop.steps[1]) == (1, 2, 3, 4, 2)


def test_marks_that_began_before_the_meter_are_ignored() -> None:
    loop = Loop()
    loop.meter.look_ahead_ended()
    loop.meter.fetch_ended()
    loop.step(1, 2, 3, 4)
    assert ms(loop.steps[0]) == (1, 2, 3, 4, 2)


moments = st.floats(0, 50)


@given(
    steps=st.lists(st.tuples(moments, moments, moments, moments, moments), min_size=1, max_size=12),
    ahead=st.sampled_from(["no", "after", "inside"]),
    on_device=st.booleans(),
)
def test_step_parts_add_up_to_the_elapsed_time(
    steps: list[tuple[float, float, float, float, float]], ahead: str, on_device: bool
) -> None:
    loop = Loop(on_device=on_device)
    device = loop.device
    began = device.now
    for other, fetch, copy, compute, work in steps:
        device.host(other)
        loop.fetch(0 if ahead == "after" else fetch)
        loop.transfer(copy)
        loop.meter.step_began()
        device.launch(work)
        if ahead == "inside":
            loop.look_ahead(fetch, copy)
        device.host(compute)
        loop.meter.step_ended()
        if ahead == "after":
            loop.look_ahead(fetch, copy)
    if ahead == "after":
        loop.step(0, 0, 0, 0)
    ended = max(device.now, device.compute.free_at) if on_device else device.now
    loop.meter.end()
    assert len(loop.steps) == len(steps) + (ahead == "after")
    parts = sum(step.step_ns for step in loop.steps)
    assert parts == pytest.approx(ended - began, abs=1, rel=1e-9)
    assert all(value >= -1e-3 for step in loop.steps for value in step[:5])


# --- the device's clock -------------------------------------------------------------------------------------------


def test_a_host_too_far_ahead_of_the_device_counts_lost_steps() -> None:
    loop = Loop(on_device=True, size=16)
    for _ in range(20):
        loop.step(0, 0, 0, 0, work=10)
    loop.meter.end()
    assert loop.meter.lost == 20 - len(loop.steps)
    assert 0 < len(loop.steps) < 20


def test_a_step_whose_events_cannot_be_compared_is_lost() -> None:
    loop = Loop(on_device=True)
    loop.step(0, 1, 1, 1, work=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Event, "query", lambda event: not event.at or event.at > 0)  # passed, says the device ...
        patch.setattr(Event, "elapsed_time", _not_ready)  # ... and knows of no time between
        loop.step(0, 1, 1, 1, work=1)
        loop.meter.catch_up()
    loop.meter.end()
    assert len(loop.steps) + loop.meter.lost == 2
    assert loop.meter.lost > 0


def _not_ready(event: Event, end_event: Event) -> float:
    raise RuntimeError("device not ready")


# --- what lies inside computing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_forward_and_backward_lie_inside_the_optimizer_step(on_device: bool) -> None:
    """As with automatic optimisation, where the optimizer calls the closure."""
    loop = Loop(on_device=on_device)

    def part(category: int, ms: float) -> None:
        loop.meter.part_began(category)
        loop.device.launch(ms if on_device else 0)
        loop.device.host(0 if on_device else ms)
        loop.meter.part_ended()

    for _ in range(2):
        loop.fetch(1)
        loop.transfer(1)
        loop.meter.step_began()
        loop.meter.part_began(OPTIMIZER)
        part(FORWARD, 2)
        part(BACKWARD, 3)
        loop.device.launch(4 if on_device else 0)
        loop.device.host(0 if on_device else 4)
        loop.meter.part_ended()
        loop.meter.step_ended()
    loop.meter.end()
    for step in loop.steps:
        assert (step.forward_ns, step.backward_ns, step.optimizer_ns) == (2 * MS, 3 * MS, 4 * MS)
        assert step.compute_ns == 9 * MS


def test_a_forward_outside_of_a_step_counts_as_other_time() -> None:
    """As ``training_step`` called by a tuner of the user's between two steps."""
    loop = Loop()
    loop.meter.part_began(FORWARD)
    loop.device.host(2)
    loop.meter.part_ended()
    loop.step(1, 1, 1, 1)
    assert (loop.steps[0].forward_ns, loop.steps[0].other_ns) == (0, 3 * MS)


def test_a_step_records_which_loader_it_came_from() -> None:
    loop = Loop()
    for source in (0, 0, 1):
        loop.meter.source = source
        loop.step(1, 1, 1, 1)
    assert [step.source for step in loop.steps] == [0, 0, 1]
