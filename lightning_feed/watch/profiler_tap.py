"""Listens to the actions that a loop announces to its profiler, whichever profiler it is."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_feed.watch.hook_times import HookTimes

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
