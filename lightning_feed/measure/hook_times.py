"""Hook times, and the tap on the profiler that reports the start and end of each action."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from lightning_feed.measure.guard import call_plainly
from lightning_feed.measure.measurements import HookTime
from lightning_feed.measure.step_meter import Clock, host_clock

T = TypeVar("T")

FIRST_TIMED = 3
FIRST_COUNT = 5
"""Number of steps before the first timed step, and number of steps that are then timed in a row, so that short runs
have timed steps, too."""
EVERY = 47
"""Number of steps from one timed step to the next, after the first timed steps. A prime, so that work done every 10 or
50 steps is sampled in proportion."""
LEAST_MS = 0.05
"""Hooks that take less time per step are not reported: most of them do nothing."""
OWN = "]GPUStarvationCallback."
"""Substring of the names of our own hooks, which are not reported."""


class HookTimes:
    """Sums the time of each profiler action that begins between the steps, without the actions nested in it.

    Loggers are called only in some steps, such as every 50th, and may be slow then: each of their calls is timed, with
    :meth:`call`. All other actions are timed only in some steps, while :attr:`timing` is True.

    Args:
        between: returns True while the loop is between two steps: it neither fetches, nor copies, nor runs a step.
        clock: the host's clock.
        measure: calls a function with its arguments, and may catch its failures.
    """

    def __init__(
        self,
        between: Callable[[], bool],
        clock: Clock = host_clock,
        *,
        measure: Callable[..., Any] = call_plainly,
    ) -> None:
        self.measure = measure
        self._between = between
        self._clock = clock
        self._stack: list[_Open] = []
        self.restart()

    def restart(self) -> None:
        """Forget all steps so far, and count them from 0 again."""
        self.timing = False
        """True while all actions are timed."""
        self._next_turn = FIRST_TIMED
        self._steps = 0
        """Number of steps that were not left out."""
        self._timed_steps = 0
        """Number of timed steps that were not left out."""
        self._begun = 0
        """Number of timed steps that began."""
        self._left_out = False
        """True if the last timed step does not count."""
        self._leaves_out_calls = False
        """True if calls of :meth:`call` in the current step do not count."""
        self._sums: Counter[str] = Counter()
        self._fresh: Counter[str] = Counter()
        """Times of the last timed step, which may still be discarded."""
        self._calls: Counter[str] = Counter()
        self._fresh_calls: Counter[str] = Counter()
        """Times of :meth:`call` in the current step, which may still be discarded."""
        for outer in self._stack:
            outer.name = None

    def call(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function and time it, in every step."""
        self.measure(self.enter, name, always=True)
        try:
            return function(*args, **kwargs)
        finally:
            self.measure(self.leave)

    def step_ended(self, finished: int) -> None:
        """End a step, and start or stop timing. ``finished``: number of steps that have ended, with this one."""
        if not self._leaves_out_calls:
            self._steps += 1
            self._calls.update(self._fresh_calls)
        self._fresh_calls.clear()
        self._leaves_out_calls = False
        if finished < self._next_turn:
            return
        was_timing = self.timing
        self.stop()
        if was_timing and self._begun >= FIRST_COUNT:
            self._next_turn = finished + EVERY - 1
            return
        self._fold()
        self.timing = True
        self._begun += 1
        self._next_turn = finished + 1

    def leave_out_step(self) -> None:
        """Do not count this step: it contains a validation or the start of an epoch."""
        self._left_out |= self.timing  # if this step is not timed, the last timed step, not added yet, still counts
        self._leaves_out_calls = True

    def stop(self) -> None:
        """Stop timing the current step, if it is timed."""
        if self.timing:
            self.timing = False
            self._timed_steps += not self._left_out
            for outer in self._stack[:-1]:  # these actions go on into the next step, such as an epoch that just began
                outer.name = None

    def result(self) -> tuple[HookTime, ...]:
        """Return the milliseconds per step of each action long enough to be reported, the slowest first."""
        if not self.timing:
            self._fold()
        per_step = {name: ns / self._timed_steps for name, ns in self._sums.items() if OWN not in name}
        per_step |= {name: ns / self._steps for name, ns in self._calls.items()}
        times = [HookTime(name=name, ms_per_step=ns * 1e-6) for name, ns in per_step.items() if ns >= LEAST_MS * 1e6]
        return tuple(sorted(times, key=attrgetter("ms_per_step"), reverse=True))

    @contextmanager
    def timed(self, name: str, action: AbstractContextManager[T]) -> Iterator[T]:
        """Enter the context manager ``action``, and measure how long it stays open."""
        with action as value:
            self.measure(self.enter, name)
            try:
                yield value
            finally:
                self.measure(self.leave)

    def enter(self, name: str, *, always: bool = False) -> None:
        """Begin an action; with ``always``, it is timed in every step."""
        sums = self._fresh_calls if always else self._fresh
        self._stack.append(_Open(name if self._between() else None, self._clock(), sums))

    def leave(self) -> None:
        """End the innermost action, possibly after timing was switched off inside it."""
        if not self._stack:
            return
        action = self._stack.pop()
        took = self._clock() - action.began
        if self._stack:
            self._stack[-1].inside += took
        if action.name is not None:
            action.sums[action.name] += took - action.inside

    def _fold(self) -> None:
        """Add the times of the last timed step to the sums, or drop them if the step is left out."""
        if not self._left_out:
            self._sums.update(self._fresh)
        self._fresh.clear()
        self._left_out = False


@dataclass(slots=True)
class _Open:
    """An action that has begun and not ended."""

    name: str | None
    """None if the action is not counted."""
    began: int
    sums: Counter[str]
    """Sums to which the action's time is added."""
    inside: int = 0
    """Nanoseconds of nested actions."""


Calls = dict[str, Callable[[], object]]
"""Name of an action -> function to call."""


class _Announced(AbstractContextManager[str]):
    """An action of a no-op profiler, with callbacks at its start and end."""

    __slots__ = ("_begins", "_ends", "_name")

    def __init__(self, name: str, begins: Callable[[], object] | None, ends: Callable[[], object] | None) -> None:
        self._name = name
        self._begins = begins
        self._ends = ends

    def __enter__(self) -> str:
        if self._begins is not None:
            self._begins()
        return self._name

    def __exit__(self, *error: object) -> None:
        if self._ends is not None:
            self._ends()


class _Actions(dict[str, AbstractContextManager[Any]]):
    """Context managers by action name. A new name gets an empty context, which is kept: a step asks for some thirty."""

    def __missing__(self, name: str) -> AbstractContextManager[Any]:
        self[name] = nullcontext(name)
        return self[name]


def tap_profiler(
    profiler: Any, on_start: Calls, on_stop: Calls, *, does_nothing: bool = False, hooks: HookTimes | None = None
) -> Callable[[], None]:
    """Call functions when this one instance of a profiler starts or stops an action with one of the given names.

    The profiler's own time is not part of the action. An action with another name costs only one look-up in a dict,
    because a step announces thirty to fifty actions.

    Args:
        profiler: has ``start(action_name)``, ``stop(action_name)``, and the context manager ``profile(action_name)``.
        on_start: functions to call after the profiler has started the action, by the action's name.
        on_stop: functions to call before the profiler stops the action, by the action's name.
        does_nothing: True if ``start`` and ``stop`` of this profiler are empty. ``profile`` then skips them, unless
            another tool has wrapped them. Skipping them saves more than the tap costs.
        hooks: times every action while it is :attr:`~HookTimes.timing`.

    Returns:
        A function that removes the tap. A tap that another tool has wrapped stays, but does nothing.
    """
    starts = dict(on_start)
    stops = dict(on_stop)
    own = vars(profiler)
    actions = _Actions({name: _Announced(name, starts.get(name), stops.get(name)) for name in {**starts, **stops}})
    shadowed = {name: own[name] for name in ("start", "stop", "profile") if name in own}
    skips = does_nothing and not shadowed
    hook_times = hooks or HookTimes(lambda: False)
    original_start = profiler.start
    original_stop = profiler.stop
    original_profile = profiler.profile
    started = starts.get
    stopped = stops.get

    def start(action_name: str) -> None:
        original_start(action_name)
        if (call := started(action_name)) is not None:
            call()

    def stop(action_name: str) -> None:
        if (call := stopped(action_name)) is not None:
            call()
        original_stop(action_name)

    def profile(action_name: str) -> AbstractContextManager[Any]:
        if skips and own.get("start") is start and own.get("stop") is stop:
            action = actions[action_name]
        else:
            action = original_profile(action_name)
        if not hook_times.timing:
            return action
        timed: AbstractContextManager[Any] = hook_times.measure(hook_times.timed, action_name, action) or action
        return timed

    taps: dict[str, Any] = {"start": start, "stop": stop, "profile": profile}
    own.update(taps)  # last: if anything above fails, the profiler is unchanged

    def untap() -> None:
        for calls in (starts, stops, actions):
            calls.clear()
        hook_times.stop()
        _take_out(own, taps, shadowed)

    return untap


def _take_out(own: dict[str, Any], taps: dict[str, Any], shadowed: dict[str, Any]) -> None:
    """Put back the profiler's own methods in place of the taps, except where another tool has wrapped a tap."""
    for name, tap in taps.items():
        if own.get(name) is tap:
            del own[name]
            if name in shadowed:
                own[name] = shadowed[name]
