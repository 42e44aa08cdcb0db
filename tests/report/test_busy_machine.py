"""Reports of runs beside other programs: the figures of the headline are those of the verdict."""

from typing import Any

import pytest
from verdict.cases import READY, measured

from lightning_feed.errors import ReportError
from lightning_feed.report.compare import check_starved
from lightning_feed.report.document import make_report
from lightning_feed.report.files import as_text
from lightning_feed.report.report import if_free
from lightning_feed.verdict.decide import diagnose

BUSY_MACHINE: dict[str, Any] = {"num_workers": 2, "usable_cpus": 2, "others_cpu_pct": 60.0, "step": 60.0, "data": 15.0}
FALL_BEHIND = {"workers_on_cpu_pct": 70.0, "workers_run_queue_pct": 20.0, "workers_blocked_pct": 10.0}


def _first_lines(text: str) -> str:
    return " ".join(text.split())


def test_the_wait_for_a_cpu_is_not_called_waiting_for_data() -> None:
    ready = diagnose(measured(loaders=READY, load_queue_ms=14.0, host_queue_ms=30.0, **BUSY_MACHINE))
    said = _first_lines(as_text(ready))
    assert said.startswith(
        "FEED limited by other programs, which have 60 % of the CPUs: training waits 2 % of each step for data, and "
        "23 % for a free CPU while a batch is ready (confidence low, 412 steps)"
    )
    assert if_free(ready) == "if data were free: 1.02 x as fast"
    assert "run again when the machine is idle" in said


def test_what_is_left_of_the_waiting_is_graded() -> None:
    found = diagnose(measured(loaders=FALL_BEHIND, load_queue_ms=10.0, host_queue_ms=20.0, **BUSY_MACHINE))
    said = _first_lines(as_text(found))
    assert said.startswith(
        "FEED slightly data-bound: training waits 8 % of each step for data, and 17 % for a free CPU while a batch is "
        "ready"
    )


def test_cannot_tell_says_why_and_what_to_do() -> None:
    close = FALL_BEHIND | {"workers_run_queue_pct": 43.0, "workers_on_cpu_pct": 47.0}
    found = diagnose(measured(loaders=close, load_queue_ms=1.0, host_queue_ms=16.0, **BUSY_MACHINE))
    said = _first_lines(as_text(found))
    assert said.startswith("FEED cannot tell: other programs have 60 % of the CPUs: training waits 23 % of each step")
    assert "run again when the machine is idle" in said


def test_the_gate_does_not_count_what_other_programs_took() -> None:
    ready = make_report(diagnose(measured(loaders=READY, load_queue_ms=14.0, host_queue_ms=30.0, **BUSY_MACHINE)))
    assert "waits for data 1.67 % of step time (starved_pct, less the wait for a CPU)" in check_starved(
        ready, above_pct=5.0
    )
    alone = make_report(diagnose(measured(loaders=READY, load_queue_ms=14.0, **BUSY_MACHINE | {"others_cpu_pct": 0.0})))
    with pytest.raises(ReportError, match="too long"):
        check_starved(alone, above_pct=5.0)
