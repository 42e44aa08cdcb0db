"""Hooks are timed in a few steps; the others do not pay for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_feed.measure.hook_times import EVERY, FIRST_COUNT, FIRST_TIMED, HookTimes, tap_profiler


class Clock:
    """Stands still until it is told otherwise; counts how often it is asked."""

    def __init__(self) -> None:
        self.now = self.asked = 0

    def __call__(self) -> int:
        self.asked += 1
        return self.now


class Profiler:
    """As Lightning's: ``profile`` is ``start`` and ``stop``."""

    def start(self, action_name: str) -> None: ...

    def stop(self, action_name: str) -> None: ...

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)


class Loop:
    """A training loop with two hooks between its steps, one of them inside the other, and one in the step."""

    def __init__(self, *, does_nothing: bool = True) -> None:
        self.clock, self.profiler, self.in_step = Clock(), Profiler(), False
        self.hooks = HookTimes(lambda: not self.in_step, self.clock)
        self.untap = tap_profiler(
            self.profiler,
            {"step": lambda: setattr(self, "in_step", True)},
            {"step": lambda: setattr(self, "in_step", False)},
            does_nothing=does_nothing,
            hooks=self.hooks,
        )
        self.finished = 0

    def run(self, steps: int, during: Callable[[], object] = lambda: None) -> None:
        for _ in range(steps):
            with self.profiler.profile("step"), self.profiler.profile("forward"):
                self.clock.now += 9_000_000
            self.finished += 1
            with self.profiler.profile("outer"):
                self.clock.now += 1_000_000
                with self.profiler.profile("inner"):
                    self.clock.now += 2_000_000
            with self.profiler.profile("during"):
                during()
            with self.profiler.profile("ours"):  # GPUStarvationCallback.on_train_batch_end
                self.clock.now += 500_000
                self.hooks.step_ended(self.finished)


@pytest.mark.parametrize("does_nothing", [True, False])
def test_hooks_between_steps_are_listed_by_their_self_times(does_nothing: bool) -> None:
    loop = Loop(does_nothing=does_nothing)
    loop.run(FIRST_TIMED + FIRST_COUNT + 1)
    found = {one.name: one.ms_per_step for one in loop.hooks.result()}
    assert found == pytest.approx({"inner": 2, "outer": 1, "ours": 0.5})
    assert [one.name for one in loop.hooks.result()] == ["inner", "outer", "ours"]


def test_hooks_are_timed_in_one_step_of_many() -> None:
    loop = Loop()
    loop.run(FIRST_TIMED + FIRST_COUNT + 10 * EVERY)
    assert loop.hooks._timed_steps == FIRST_COUNT + 10
    assert {one.name: one.ms_per_step for one in loop.hooks.result()}["inner"] == pytest.approx(2)


def test_a_timed_step_with_a_validation_is_not_counted() -> None:
    loop = Loop()
    loop.run(FIRST_TIMED)
    assert loop.hooks.timing

    def validate() -> None:
        loop.clock.now += 10**12
        loop.hooks.leave_out_step()

    loop.run(1, validate)
    loop.run(FIRST_COUNT)
    found = {one.name: one.ms_per_step for one in loop.hooks.result()}
    # What switches the look off ends after it, and so counts with the next.
    assert found == pytest.approx({"inner": 2, "outer": 1, "ours": 0.5 * FIRST_COUNT / (FIRST_COUNT - 1)})
    assert loop.hooks._timed_steps == FIRST_COUNT - 1


def test_logger_calls_are_counted_except_in_steps_left_out() -> None:
    """Our own call of a slow logger leaves its step out: its time is not the user's."""
    loop = Loop()

    def log(ms: int) -> None:
        def write() -> None:
            loop.clock.now += ms * 1_000_000

        loop.hooks.call("logger Slow.log_metrics", write)

    def ours() -> None:
        log(40)
        loop.hooks.leave_out_step()

    loop.run(1, lambda: log(6))
    loop.run(1)
    loop.run(1, ours)
    loop.untap()
    assert [(one.name, one.ms_per_step) for one in loop.hooks.result()] == [("logger Slow.log_metrics", 3)]


def test_an_error_in_a_hook_is_not_swallowed() -> None:
    loop = Loop()

    def fail() -> None:
        raise ValueError("in the hook")

    loop.run(FIRST_TIMED)
    with pytest.raises(ValueError, match="in the hook"):
        loop.run(1, fail)
    assert not loop.hooks._stack
    loop.untap()
    assert vars(loop.profiler) == {}


@pytest.mark.parametrize("looking", [True, False])
@pytest.mark.parametrize("does_nothing", [True, False])
def test_untap_removes_all_patches_and_stops_the_timing(looking: bool, does_nothing: bool) -> None:
    loop = Loop(does_nothing=does_nothing)
    loop.run(FIRST_TIMED if looking else 1)
    loop.untap()
    assert vars(loop.profiler) == {}
    asked = loop.clock.asked
    loop.run(200)
    assert loop.clock.asked == asked


def test_another_tool_that_wraps_profile_is_left_alone() -> None:
    loop = Loop()
    theirs: list[str] = []
    inner: Any = loop.profiler.profile

    def profile(action_name: str) -> Any:
        theirs.append(action_name)
        return inner(action_name)

    loop.profiler.profile = profile  # type: ignore[method-assign]
    loop.run(FIRST_TIMED + 3)
    assert loop.profiler.profile is profile
    assert theirs.count("outer") == FIRST_TIMED + 3
    loop.untap()
    assert loop.profiler.profile is profile


def test_an_epoch_that_starts_in_a_timed_step_is_not_listed_as_a_hook() -> None:
    loop = Loop()
    loop.run(FIRST_TIMED + 2)  # the last call begins a look
    with loop.profiler.profile("epoch"):
        loop.run(1)
        loop.clock.now += 60_000_000_000
    loop.run(EVERY + FIRST_COUNT)
    names = {one.name for one in loop.hooks.result()}
    assert names == {"inner", "outer", "ours"}
