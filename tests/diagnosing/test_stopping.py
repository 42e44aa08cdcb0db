"""Ctrl-C and SIGTERM end a diagnosis, also where Python drops the KeyboardInterrupt; an exit is the user's."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from diagnosing.small_runs import (
    PACKAGES,
    Numbers,
    make_parts,
    make_trainer,
    short_diagnosis,
    state_of_module,
    state_of_process,
)

from lightning_feed.diagnosing import diagnose, plan
from lightning_feed.diagnosing.data import measure_loader
from lightning_feed.diagnosing.outcomes import DiagnosisInterrupted
from lightning_feed.diagnosing.plan import QUICK_RUN_STEPS
from lightning_feed.diagnosing.stopping import StopSignals
from lightning_feed.errors import LoaderError
from lightning_feed.watch.reports.document import read_document
from lightning_feed.watch.windows import WARM_UP_STEPS

pytestmark = [
    # The fits are small on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode"),
    pytest.mark.usefixtures("as_in_a_shell"),
]

IN_A_REPLAY = QUICK_RUN_STEPS + WARM_UP_STEPS + 20
"""Steps."""


@pytest.fixture
def as_in_a_shell() -> Iterator[None]:
    """Handlers as a program finds them that is started in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python drops: "Exception ignored in"."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: found.append(one.exc_type))
    return found


class Dies:
    """Gets a signal in its ``__del__``, as a loader does that is given up: what the handler raises is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


def at_call(number: int, then: Callable[[], object], calls: list[int] | None = None) -> Callable[[int], None]:
    """Something to be called in a step: does ``then`` in one of the calls, which are counted in ``calls``."""
    calls = [] if calls is None else calls

    def called(_: int) -> None:
        calls.append(1)
        if len(calls) == number:
            then()

    return called


def interrupted(model: Any, data: Any, package: str = "lightning.pytorch", **options: Any) -> DiagnosisInterrupted:
    before = state_of_process(), state_of_module(model)
    with pytest.raises(DiagnosisInterrupted) as stop:
        short_diagnosis(make_trainer(package), model, data, **options)
    assert (state_of_process(), state_of_module(model)) == before
    return stop.value


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("package", PACKAGES)
def test_a_signal_that_is_lost_in_a_step(package: str, number: int, dropped: list[Any], tmp_path: Path) -> None:
    Module, Data = make_parts(package)
    model, steps = Module(), []
    model.during = at_call(20, lambda: Dies(number), steps)
    stop = interrupted(model, Data(Numbers(400)), package, out=tmp_path)  # one epoch
    assert dropped == [KeyboardInterrupt]
    assert len(steps) == 20
    assert stop.signal_number == number
    assert 10 <= stop.diagnosis.stats.steps <= 20
    assert read_document(tmp_path).diagnosis.stats.steps == stop.diagnosis.stats.steps


def test_one_that_is_lost_in_a_replay(dropped: list[Any]) -> None:
    Module, Data = make_parts()
    model = Module()
    model.during = at_call(IN_A_REPLAY, lambda: Dies(signal.SIGINT))
    stop = interrupted(model, Data())
    assert dropped == [KeyboardInterrupt]
    assert stop.diagnosis.stats.steps > 50
    assert stop.diagnosis.measurements.experiments.model_per_s is None
    assert stop.diagnosis.measurements.experiments.left_out == ()


def lost_after_the_first_experiment(*arguments: Any) -> Iterator[Any]:
    """In the place of the experiments with the loader."""
    for found in measure_loader(*arguments):
        Dies(signal.SIGINT)
        yield found


@pytest.mark.parametrize("only", ["X3,X7", "X7"])
def test_one_that_is_lost_while_the_loader_is_driven(
    only: str, dropped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure_loader", lost_after_the_first_experiment)
    _, Data = make_parts()
    with pytest.raises(DiagnosisInterrupted) as stop:
        diagnose(None, None, Data(), budget_s=4.0, only=only)
    assert dropped == [KeyboardInterrupt]
    found = stop.value.diagnosis.measurements.experiments
    assert (found.loader_per_s is None, found.ceiling_per_s is None) == ("X3" not in only, "X3" in only)


@pytest.mark.usefixtures("dropped")
@pytest.mark.parametrize("count", [2, 20, IN_A_REPLAY])
def test_a_loader_that_fails_of_ctrl_c(count: int) -> None:
    Module, Data = make_parts()
    model = Module()

    def worker_dies_of_it() -> None:
        Dies(signal.SIGINT)
        raise RuntimeError("DataLoader worker (pid 7) exited unexpectedly")

    model.during = at_call(count, worker_dies_of_it)
    stop = interrupted(model, Data())
    assert stop.diagnosis.measurements.experiments.left_out == ()


def test_a_loader_that_fails_of_ctrl_c_before_anything_was_measured(
    dropped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Iterator[Any]:
        Dies(signal.SIGINT)
        raise LoaderError("a worker exited")
        yield

    monkeypatch.setattr(plan, "measure_loader", fails)
    _, Data = make_parts()
    with pytest.raises(DiagnosisInterrupted) as stop:
        diagnose(None, None, Data(), budget_s=4.0, only="X3")
    assert dropped == [KeyboardInterrupt]
    assert stop.value.signal_number == signal.SIGINT


@pytest.mark.parametrize("package", PACKAGES)
def test_sigterm_in_a_step(package: str) -> None:
    Module, Data = make_parts(package)
    model = Module()
    model.during = at_call(20, lambda: signal.raise_signal(signal.SIGTERM))
    assert interrupted(model, Data(), package).signal_number == signal.SIGTERM


def test_sigterm_while_the_loader_is_driven(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_to_end(*arguments: Any) -> Iterator[Any]:
        yield next(measure_loader(*arguments))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(plan, "measure_loader", told_to_end)
    _, Data = make_parts()
    with pytest.raises(DiagnosisInterrupted) as stop:
        diagnose(None, None, Data(), budget_s=4.0, only="X3")
    assert stop.value.signal_number == signal.SIGTERM
    assert stop.value.diagnosis.measurements.experiments.loader_per_s > 0


@pytest.mark.parametrize("package", PACKAGES)
def test_sigterm_with_a_handler_of_the_users_own(package: str) -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    Module, Data = make_parts(package)
    model = Module()
    model.during = at_call(20, lambda: signal.raise_signal(signal.SIGTERM))
    stop = interrupted(model, Data(), package)
    assert heard == [signal.SIGTERM]
    assert stop.signal_number == signal.SIGTERM


@pytest.mark.parametrize("package", PACKAGES)
def test_an_exit_of_the_users_code_is_theirs(package: str) -> None:
    Module, Data = make_parts(package)
    model = Module()
    model.during = at_call(20, lambda: sys.exit(3))
    with pytest.raises(SystemExit) as end:
        short_diagnosis(make_trainer(package), model, Data())
    assert end.value.code == 3


# --- the handlers -------------------------------------------------------------------------------------------------


def listening() -> StopSignals:
    stops = StopSignals()
    stops.listen()
    return stops


def test_nothing_came() -> None:
    stops = listening()
    stops.look()
    assert stops.number is None


def test_only_the_first_counts() -> None:
    stops = listening()
    for number in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert stops.number == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        stops.look()


def test_what_is_held_back_raises_nothing() -> None:
    stops = listening()
    stops.hold_back()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert stops.number == signal.SIGTERM


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stops = listening()
    signal.raise_signal(signal.SIGINT)
    stops.hold_back()
    signal.raise_signal(signal.SIGINT)
    assert stops.number is None


def test_a_handler_of_the_users_own_decides() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    stops = listening()
    signal.raise_signal(signal.SIGINT)
    assert heard == [signal.SIGINT]
    assert stops.number is None


def test_in_another_thread_nothing_is_heard() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def listen_and_hold_back() -> None:
        listening().hold_back()

    thread = threading.Thread(target=listen_and_hold_back)
    thread.start()
    thread.join()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_worker_that_was_just_forked_ends_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = listening()
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    signal.raise_signal(signal.SIGTERM)
    assert killed == [(7, signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert stops.number is None
