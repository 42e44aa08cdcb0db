"""What hooks and loggers take between the steps: hooks are timed in a few steps, calls of loggers in all."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
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
LEAST_MS = 0.05
"""What takes less of a step is not worth a name: most hooks do nothing at all."""
OWN = "]GPUStarvationCallback."
"""In the names of our own hooks, which are no advice to anyone."""


class HookTap(Protocol):
    """Has the actions of a profiler timed."""

    def on(self) -> bool:
        """From now on; False where that cannot be done."""

    def off(self) -> None:
        """No longer."""


class HookTimes:
    """Sums what each action takes by itself, without those inside it, if it begins between the steps.

    Loggers are called in some steps only, say every 50, and may take long then: each of their calls is timed, with
    :meth:`call`, and counted by :meth:`count_step`.

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
        self._calls: defaultdict[str, int] = defaultdict(int)
        self._fresh_calls: defaultdict[str, int] = defaultdict(int)
        self._counted, self._leaves_out_calls = 0, False

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function gives, timed in any step."""
        self.measure(self.entered, name, every=True)
        try:
            return function(*args, **kwargs)
        finally:
            self.measure(self.left)

    def count_step(self) -> None:
        """A step is over, whose calls count unless it was left out."""
        if not self._leaves_out_calls:
            self._counted += 1
            for name, ns in self._fresh_calls.items():
                self._calls[name] += ns
        self._fresh_calls.clear()
        self._leaves_out_calls = False

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
        """Do not count this step: a validation, or a new epoch, lies in it."""
        self._left_out |= self._on  # a look that is over, and not counted in yet, stays as it is
        self._leaves_out_calls = True

    def stop(self) -> None:
        """End a look, if one is on."""
        if self._on and self.tap is not None:
            self.tap.off()
            self._steps += not self._left_out
            for around in self._stack[:-1]:  # goes on into the next step, as an epoch that began in this look does
                around[0] = None
        self._on = False

    def result(self) -> tuple[HookTime, ...]:
        """Milliseconds a step of each action that takes any worth a name, the slowest first."""
        if not self._on:
            self._fold()
        found = {name: ns / self._steps for name, ns in self._sums.items() if OWN not in name}
        found |= {name: ns / self._counted for name, ns in self._calls.items()}
        times = [HookTime(name=name, ms_per_step=ns * 1e-6) for name, ns in found.items() if ns >= LEAST_MS * 1e6]
        return tuple(sorted(times, key=attrgetter("ms_per_step"), reverse=True))

    def timed(self, name: str, action: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """``action``, timed."""
        return _Timed(self, name, action)

    def entered(self, name: str, *, every: bool = False) -> None:
        """An action begins; ``every``: it is one that is timed in every step."""
        sums = self._fresh_calls if every else self._fresh
        self._stack.append([name if self._between() else None, self._clock(), 0, sums])

    def left(self) -> None:
        """The innermost action ends. It may end after the look does, which was switched off inside it."""
        if not self._stack:
            return
        name, began, inside, sums = self._stack.pop()
        took = self._clock() - began
        if self._stack:
            self._stack[-1][2] += took
        if name is not None:
            sums[name] += took - inside

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
