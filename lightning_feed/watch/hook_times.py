"""Hook times, and the profiler through which a loop announces what it starts and ends."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


Calls = dict[str, Callable[[], object]]
"""Name of an action -> what to call."""


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
        does_nothing: ``start`` and ``stop`` of this profiler are empty. ``profile`` then passes over them for names
            that nobody wants, which wins back more than the tap costs; not once another tool has wrapped them.
        hooks: may have every action timed for a step; while it does not, it costs nothing.

    Returns:
        What takes the tap out. A tap that another tool has wrapped in its turn stays, and is dead.
    """
    starts, stops, own = dict(on_start), dict(on_stop), vars(profiler)
    shadowed = {name: own[name] for name in ("start", "stop", "profile") if name in own}
    original_start, original_stop, original_profile = profiler.start, profiler.stop, profiler.profile
    started, stopped, wanted = starts.get, stops.get, {*starts, *stops}

    def start(action_name: str) -> None:
        original_start(action_name)
        if (call := started(action_name)) is not None:
            call()

    def stop(action_name: str) -> None:
        if (call := stopped(action_name)) is not None:
            call()
        original_stop(action_name)

    def profile(action_name: str) -> AbstractContextManager[Any]:
        if action_name in wanted or own.get("start") is not start or own.get("stop") is not stop:
            return original_profile(action_name)  # type: ignore[no-any-return]
        return nullcontext(action_name)

    taps: dict[str, Any] = {"start": start, "stop": stop}
    if does_nothing and not shadowed:
        taps["profile"] = profile
    hooks = hooks or HookTimes(lambda: False)
    before, announce = taps.get("profile", own.get("profile")), taps.get("profile", original_profile)
    timed = hooks.tap = _TimedProfile(own, hooks, before, announce)
    own.update(taps)  # last: where anything above failed, nothing is left in the profiler

    def untap() -> None:
        starts.clear()
        stops.clear()
        timed.off()
        _take_out(own, taps, shadowed)
        hooks.stop()
        hooks.tap = None

    return untap


class _TimedProfile:
    """A ``profile`` that times everything, in the place of the one that a profiler has now, and back."""

    def __init__(self, own: dict[str, Any], hooks: HookTimes, before: Any, announce: Callable[..., Any]) -> None:
        self._own, self._hooks, self._before, self._announce = own, hooks, before, announce
        self._timed = self._profile  # one object: each look at a method makes another

    def on(self) -> bool:
        """Nothing is changed once another tool has put its own ``profile`` there."""
        if self._own.get("profile") is not self._before:
            return False
        self._own["profile"] = self._timed
        return True

    def off(self) -> None:
        """What is there now is left if it is another tool's."""
        if self._own.get("profile") is not self._timed:
            return
        if self._before is None:
            del self._own["profile"]
        else:
            self._own["profile"] = self._before

    def _profile(self, action_name: str) -> AbstractContextManager[Any]:
        action: AbstractContextManager[Any] = self._announce(action_name)
        return self._hooks.measure(self._hooks.timed, action_name, action) or action


def _take_out(own: dict[str, Any], taps: dict[str, Any], shadowed: dict[str, Any]) -> None:
    for name, tap in taps.items():
        if own.get(name) is not tap:
            continue
        if name in shadowed:
            own[name] = shadowed[name]
        else:
            del own[name]
