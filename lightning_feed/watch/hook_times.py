"""What hooks take between the steps: in a few steps, every action that a loop announces is timed on the host."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from lightning_feed.watch.clocks import Clock, host_clock
from lightning_feed.watch.guard import call_plainly
from lightning_feed.watch.verdict.diagnosis import HookTime

FIRST_LOOK, FIRST_LOOKS = 3, 5
"""The steps after this one are looked at, so many, so that short runs have some."""
EVERY = 47
"""Steps from one look to the next afterwards: a prime, so that what is done every 10 or 50 steps is met as often as it
happens, neither always nor never."""


class HookTap(Protocol):
    """Has the actions of a profiler timed."""

    def on(self) -> bool:
        """From now on; False where that cannot be done."""

    def off(self) -> None:
        """No longer."""


class HookTimes:
    """Sums what each action takes by itself, without those inside it, if it begins between the steps.

    Switched on for a step, and off again, by :meth:`step`, which is to be called when ``finished`` has reached
    ``next_look``: a step without a look costs that comparison and nothing else. ``tap_profiler`` does the switching.

    Args:
        between: whether the loop is between two steps now, neither fetching, nor copying, nor running a step.
        clock: the host's clock.
        measure: calls what it is given with its arguments, and may keep what fails in it from the loop.
    """

    def __init__(
        self,
        between: Callable[[], bool],
        clock: Clock = host_clock,
        *,
        measure: Callable[..., Any] = call_plainly,
    ) -> None:
        self.next_look = FIRST_LOOK
        """The number of finished steps at which :meth:`step` wants to be called."""
        self.tap: HookTap | None = None
        """Has every action timed, or none. Set by ``tap_profiler``."""
        self.measure = measure
        self._between, self._clock = between, clock
        self._looks = self._steps = 0
        self._on = self._left_out = False
        self._sums: defaultdict[str, int] = defaultdict(int)
        self._fresh: defaultdict[str, int] = defaultdict(int)
        self._stack: list[list[Any]] = []

    def step(self, finished: int) -> None:
        """Begin to look, or end the look at the step that is over.

        Args:
            finished: steps that ended so far.
        """
        if self._on:
            self.stop()
            early = self._looks < FIRST_LOOKS
            self.next_look = finished if early else finished + EVERY - 1
            if not early:
                return
        self._fold()
        if self.tap is None or not self.tap.on():
            self.next_look = finished + EVERY
            return
        self._on, self._looks = True, self._looks + 1
        self.next_look = finished + 1

    def leave_out_step(self) -> None:
        """Do not count the look that is on: a validation, or a new epoch, lies in it."""
        self._left_out = self._on

    def stop(self) -> None:
        """End a look, if one is on."""
        if self._on and self.tap is not None:
            self.tap.off()
            self._steps += not self._left_out
            for around in self._stack[:-1]:  # goes on into the next step, as an epoch that began in this look does
                around[0] = None
        self._on = False

    def result(self) -> tuple[HookTime, ...]:
        """Milliseconds a step of each action, the dearest first; empty before the first look is over."""
        if not self._on:
            self._fold()
        if not self._steps:
            return ()
        sums = sorted(self._sums.items(), key=lambda item: (-item[1], item[0]))
        return tuple(HookTime(name=name, ms_per_step=ns * 1e-6 / self._steps) for name, ns in sums if ns > 0)

    def timed(self, name: str, action: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """``action``, timed."""
        return _Timed(self, name, action)

    def entered(self, name: str) -> None:
        """An action begins."""
        self._stack.append([name if self._between() else None, self._clock(), 0])

    def left(self) -> None:
        """The innermost action ends. It may end after the look does, which was switched off inside it."""
        if not self._stack:
            return
        name, began, inside = self._stack.pop()
        took = self._clock() - began
        if self._stack:
            self._stack[-1][2] += took
        if name is not None:
            self._fresh[name] += took - inside

    def _fold(self) -> None:
        """Count the last look in, or drop it."""
        if not self._left_out:
            for name, ns in self._fresh.items():
                self._sums[name] += ns
        self._fresh.clear()
        self._left_out = False


class _Timed:
    __slots__ = ("_action", "_hooks", "_name")

    def __init__(self, hooks: HookTimes, name: str, action: AbstractContextManager[Any]) -> None:
        self._hooks, self._name, self._action = hooks, name, action

    def __enter__(self) -> Any:
        given = self._action.__enter__()
        self._hooks.measure(self._hooks.entered, self._name)
        return given

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._hooks.measure(self._hooks.left)
        return self._action.__exit__(kind, error, trace)
