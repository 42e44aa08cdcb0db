"""Listening to a profiler without being in its way, or in that of another tool."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_feed.measure.hook_times import tap_profiler


class Recorder:
    """A profiler that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def start(self, action_name: str) -> None:
        self.told.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.told.append(f"stop {action_name}")

    @contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        try:
            self.start(action_name)
            yield action_name
        finally:
            self.stop(action_name)


class Idle(Recorder):
    """One that does nothing."""

    def start(self, action_name: str) -> None:
        pass

    def stop(self, action_name: str) -> None:
        pass


def _use(profiler: Any) -> None:
    for name in ("wanted", "other"):
        with profiler.profile(name) as given:
            assert given == name


@pytest.mark.parametrize("does_nothing", [True, False])
@pytest.mark.parametrize("kind", [Recorder, Idle])
def test_tap_reports_the_given_actions_and_untap_restores_the_profiler(
    kind: type[Recorder], does_nothing: bool
) -> None:
    profiler, heard = kind(), []
    before = dict(vars(profiler))
    untap = tap_profiler(
        profiler,
        {"wanted": lambda: heard.append("start")},
        {"wanted": lambda: heard.append("stop")},
        does_nothing=does_nothing,
    )
    _use(profiler)
    assert heard == ["start", "stop"]
    untap()
    assert vars(profiler) == before
    _use(profiler)
    assert heard == ["start", "stop"]


def test_tap_callbacks_run_between_the_profilers_start_and_stop() -> None:
    profiler = Recorder()
    tap_profiler(
        profiler, {"wanted": lambda: profiler.told.append("mark")}, {"wanted": lambda: profiler.told.append("mark")}
    )
    with profiler.profile("wanted"):
        pass
    assert profiler.told == ["start wanted", "mark", "mark", "stop wanted"]


def test_a_failing_action_still_calls_its_stop_callback() -> None:
    profiler, heard = Idle(), []
    tap_profiler(profiler, {}, {"wanted": lambda: heard.append("stop")}, does_nothing=True)
    with pytest.raises(ValueError, match="inside"), profiler.profile("wanted"):
        raise ValueError("inside")
    assert heard == ["stop"]


def test_a_tool_that_wraps_the_tapped_profiler_sees_every_action() -> None:
    profiler, heard, theirs = Idle(), [], []
    untap = tap_profiler(profiler, {"wanted": lambda: heard.append("start")}, {}, does_nothing=True)
    inner = profiler.start

    def start(action_name: str) -> None:
        theirs.append(action_name)
        inner(action_name)

    profiler.start = start  # type: ignore[method-assign]
    _use(profiler)
    assert theirs == ["wanted", "other"]
    untap()
    _use(profiler)
    assert theirs == ["wanted", "other"] * 2
    assert heard == ["start"]
    assert set(vars(profiler)) == {"told", "start"}


def test_an_earlier_profiler_wrapper_stays_after_untap() -> None:
    profiler, theirs = Idle(), []
    profiler.start = theirs.append  # type: ignore[method-assign]
    untap = tap_profiler(profiler, {}, {}, does_nothing=True)
    _use(profiler)
    untap()
    _use(profiler)
    assert theirs == ["wanted", "other"] * 2
    assert profiler.start == theirs.append
