"""One strong fault of each family in a real fit, with real workers: the verdict names it.

The scenarios are those of ``benchmarks/verdicts.py``, which runs all of them. Injected waits are several times the
step, and shares are of the same clock, so that a slow machine gives the same labels.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import in_gate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from verdict_fits import run_fit, two_cpus
from verdict_quiet import QUIET_PCT, Others
from verdict_scenarios import SCENARIOS
from verdict_work import calibrate, make_files

# Only the imports above need it.
del sys.path[0]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="causes are told by /proc, on Linux"),
]

FAULTS = (
    "sleep, 2 workers",
    "O_DIRECT, 2 workers",
    "spin, 1 worker",
    "8 workers",
    "one slow in twenty, 4 workers",
    "spin, no workers",
    "50 tensors in a batch",
    "all stall now and then, 1 worker",
    "callback sleeps",
    "transfer_batch_to_device",
    "epochs of 5, slow start of workers",
    "light, no workers",
    "rank 1 of 2 slow",
    "small kernels",
    "progress bar reads the loss",
    "copies from pageable memory",
    "validation takes longer",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    with two_cpus():
        calibrate()
        yield folder


IN_GATE = (
    "sleep, 2 workers",
    "spin, 1 worker",
    "one slow in twenty, 4 workers",
    "spin, no workers",
    "callback sleeps",
    "rank 1 of 2 slow",
    "copies from pageable memory",
    "validation takes longer",
)
"""The gate decides all of them from made-up measurements (tests/verdict); these, from real ones, too."""


@pytest.mark.parametrize("name", in_gate(FAULTS, IN_GATE))
def test_the_verdict_names_the_fault(name: str, files: Path) -> None:
    if name.startswith("O_DIRECT"):
        _require_direct_reads(files / "large")
    scenario = SCENARIOS[name]
    others_pct = 0.0
    for _ in range(3):
        others = Others()
        diagnosis = run_fit(scenario, files)
        if (diagnosis.bottleneck, diagnosis.cause) == scenario.expect:
            return
        others_pct = others.took_pct()
        if others_pct <= QUIET_PCT:
            break
    if others_pct > QUIET_PCT and diagnosis.cause == "oversubscribed":
        # Then workers did lack a CPU, whatever was injected beside that.
        pytest.skip(f"other processes took {others_pct:.0f} % of the CPUs")
    assert (diagnosis.bottleneck, diagnosis.cause) == scenario.expect, (diagnosis.evidence, diagnosis.measurements)


def test_the_tested_faults_cover_every_family() -> None:
    assert {SCENARIOS[name].family for name in FAULTS} == {scenario.family for scenario in SCENARIOS.values()}
    assert len(SCENARIOS) >= 39


def _require_direct_reads(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip(f"the file system of {path} is memory: nothing there is ever read from a disk")
