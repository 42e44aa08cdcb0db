"""Hook times, and the profiler through which a loop announces what it starts and ends."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

from lightning_feed.measure.guard import call_plainly
from lightning_feed.measure.measurements import HookTime
from lightning_feed.measure.step_meter import Clock, host_clock

FIRST_LOOK, FIRST_LOOKS = 3, 5
"""The steps after this one are looked at, so many, so that short runs have some."""
EVERY = 47
"""Steps from one look to the next afterwards: a prime, so that what is done every 10 or 50 steps is met as often as it
happens, neither always nor never."""
LEAST_MS = 0.05
"""What takes less of a step is not worth a name: most hooks do nothing at all."""
OWN = "]GPUStarvationCallback."
"""In the names of our own hooks, which are no advice to anyone."""


class HookTimes:
    """Sums what each action takes by itself, without those inside it, if it begins between the steps.

    Loggers are called in some steps only, say every 50, and may take long then: each of their calls is timed, with
    :meth:`call`. All other actions are timed in a step now and then, while :attr:`looking`.

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
        self.looking = False
        """Whether all actions are timed now."""
        self.measure = measure
        self._between, self._clock = between, clock
        self._next_turn = FIRST_LOOK
        self._begun = self._looks = self._steps = 0
        """Looks that began, those that count, and steps whose calls count."""
        self._left_out = self._leaves_out_calls = False
        self._sums: Counter[str] = Counter()
        self._fresh: Counter[str] = Counter()
        """Of the last look, which may still be left out."""
        self._calls: Counter[str] = Counter()
        self._fresh_calls: Counter[str] = Counter()
        """Of the present step, which may still be left out."""
        self._stack: list[list[Any]] = []

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function gives, timed in any step."""
        self.measure(self.entered, name, every=True)
        try:
            return function(*args, **kwargs)
        finally:
            self.measure(self.left)

    def step_ended(self, finished: int) -> None:
        """A step is over, with which ``finished`` have ended: begin to look, or end the look at it."""
        if not self._leaves_out_calls:
            self._steps += 1
            self._calls.update(self._fresh_calls)
        self._fresh_calls.clear()
        self._leaves_out_calls = False
        if finished < self._next_turn:
            return
        if self.looking:
            self.stop()
            if self._begun >= FIRST_LOOKS:
                self._next_turn = finished + EVERY - 1
                return
        self._fold()
        self.looking, self._begun, self._next_turn = True, self._begun + 1, finished + 1

    def leave_out_step(self) -> None:
        """Do not count this step: a validation, or a new epoch, lies in it."""
        self._left_out |= self.looking  # a look that is over, and not counted in yet, stays as it is
        self._leaves_out_calls = True

    def stop(self) -> None:
        """End a look, if one is on."""
        if self.looking:
            self.looking = False
            self._looks += not self._left_out
            for around in self._stack[:-1]:  # goes on into the next step, as an epoch that began in this look does
                around[0] = None

    def result(self) -> tuple[HookTime, ...]:
        """Milliseconds a step of each action that takes any worth a name, the slowest first."""
        if not self.looking:
            self._fold()
        found = {name: ns / self._looks for name, ns in self._sums.items() if OWN not in name}
        found |= {name: ns / self._steps for name, ns in self._calls.items()}
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
            self._sums.update(self._fresh)
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

    def __exit__(self, *error: Any) -> bool | None:
        self._hooks.measure(self._hooks.left)
        return self._action.__exit__(*error)


Calls = dict[str, Callable[[], object]]
"""Name of an action -> what to call."""


class _Announced(AbstractContextManager[str]):
    """An action of a profiler that does nothing, for those who want to know of it."""

    __slots__ = ("_begins", "_ends", "_name")

    def __init__(self, name: str, begins: Callable[[], object] | None, ends: Callable[[], object] | None) -> None:
        self._name, self._begins, self._ends = name, begins, ends

    def __enter__(self) -> str:
        if self._begins is not None:
            self._begins()
        return self._name

    def __exit__(self, *error: object) -> None:
        if self._ends is not None:
            self._ends()


class _Actions(dict[str, AbstractContextManager[Any]]):
    """A context for each name; for one that is not wanted an empty one, made once: some thirty are asked for in a
    step."""

    def __missing__(self, name: str) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = nullcontext(name)
        self[name] = made
        return made


def tap_profiler(
    profiler: Any, on_start: Calls, on_stop: Calls, *, does_nothing: bool = False, hooks: HookTimes | None = None
) -> Callable[[], None]:
    """Call back when ``profiler``, on this one instance, starts and stops an action of one of these names.

    What the profiler takes itself falls outside of the action. Some thirty to fifty actions are announced in a step, so
    a name that is not wanted costs one look-up.

    Args:
        profiler: has ``start(action_name)``, ``stop(action_name)``, and the context manager ``profile(action_name)``.
        on_start: called after the profiler has started the action.
        on_stop: called before the profiler stops the action.
        does_nothing: ``start`` and ``stop`` of this profiler are empty. ``profile`` then passes over them, which wins
            back more than the tap costs; not where another tool has wrapped them.
        hooks: has every action timed while it looks.

    Returns:
        What takes the tap out. A tap that another tool has wrapped in its turn stays, and is dead.
    """
    starts, stops, own = dict(on_start), dict(on_stop), vars(profiler)
    actions = _Actions({name: _Announced(name, starts.get(name), stops.get(name)) for name in {**starts, **stops}})
    shadowed = {name: own[name] for name in ("start", "stop", "profile") if name in own}
    passes_over, timing = does_nothing and not shadowed, hooks or HookTimes(lambda: False)
    original_start, original_stop, original_profile = profiler.start, profiler.stop, profiler.profile
    started, stopped = starts.get, stops.get

    def start(action_name: str) -> None:
        original_start(action_name)
        if (call := started(action_name)) is not None:
            call()

    def stop(action_name: str) -> None:
        if (call := stopped(action_name)) is not None:
            call()
        original_stop(action_name)

    def profile(action_name: str) -> AbstractContextManager[Any]:
        if passes_over and own.get("start") is start and own.get("stop") is stop:
            action = actions[action_name]
        else:
            action = original_profile(action_name)
        return timing.measure(timing.timed, action_name, action) or action if timing.looking else action

    taps: dict[str, Any] = {"start": start, "stop": stop, "profile": profile}
    own.update(taps)  # last: where anything above failed, nothing is left in the profiler

    def untap() -> None:
        for calls in (starts, stops, actions):
            calls.clear()
        timing.stop()
        _take_out(own, taps, shadowed)

    return untap


def _take_out(own: dict[str, Any], taps: dict[str, Any], shadowed: dict[str, Any]) -> None:
    for name in [name for name, tap in taps.items() if own.get(name) is tap]:
        del own[name]
        own.update({name: shadowed[name]} if name in shadowed else {})
