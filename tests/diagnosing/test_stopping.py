"""Ctrl-C and SIGTERM end a diagnosis, also where Python drops the KeyboardInterrupt; an exit is the user's."""

import signal
import sys
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

from lightning_feed.diagnosing.failures import DiagnosisInterrupted
from lightning_feed.measure.windows import WARM_UP_STEPS
from lightning_feed.report.document import read_document

pytestmark = pytest.mark.usefixtures("as_in_a_shell")

IN_A_REPLAY = 20 + WARM_UP_STEPS + 10
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


@pytest.mark.parametrize(("package", "number"), [(PACKAGES[0], signal.SIGINT), (PACKAGES[1], signal.SIGTERM)])
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
    assert stop.diagnosis.stats.steps > 10
    assert stop.diagnosis.measurements.experiments.model_per_s is None
    assert stop.diagnosis.measurements.experiments.left_out == ()


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
