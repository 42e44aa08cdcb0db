"""Ctrl-C ends a diagnosis with what was measured; an exit is the user's."""

import signal
import sys
from collections.abc import Callable

import pytest
from diagnosing.small_runs import PACKAGES, make_parts, make_trainer, short_diagnosis, state_of_module, state_of_process

from lightning_feed.diagnosing.failures import DiagnosisInterrupted


def at_call(number: int, then: Callable[[], object]) -> Callable[[int], None]:
    """Something to be called in a step: does ``then`` in one of the calls."""
    calls: list[int] = []

    def called(_: int) -> None:
        calls.append(1)
        if len(calls) == number:
            then()

    return called


@pytest.mark.parametrize(("package", "count"), [(PACKAGES[0], 20), (PACKAGES[1], 20), (PACKAGES[0], 45)])
def test_ctrl_c_keeps_the_measurements_and_restores_the_state(package: str, count: int) -> None:
    Module, Data = make_parts(package)
    model = Module()
    model.during = at_call(count, lambda: signal.raise_signal(signal.SIGINT))
    before = state_of_process(), state_of_module(model)
    with pytest.raises(DiagnosisInterrupted) as stop:
        short_diagnosis(make_trainer(package), model, Data())
    assert (state_of_process(), state_of_module(model)) == before
    assert stop.value.diagnosis.stats.steps >= 10
    assert stop.value.diagnosis.measurements.experiments is not None
    assert stop.value.diagnosis.measurements.experiments.model_per_s is None


@pytest.mark.parametrize("package", PACKAGES)
def test_system_exit_in_user_code_is_raised_unchanged(package: str) -> None:
    Module, Data = make_parts(package)
    model = Module()
    model.during = at_call(20, lambda: sys.exit(3))
    with pytest.raises(SystemExit) as end:
        short_diagnosis(make_trainer(package), model, Data())
    assert end.value.code == 3
