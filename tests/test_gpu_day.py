"""The day on a GPU machine: its parts and their faults, its checks on a simulated device, and its tables."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated.device import DEVICE, MS, SimulatedDevice
from simulated.training import fit
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_checks
import gpu_day
import gpu_scripts
import gpu_tables
import gpu_trace
from gpu_claims import Claim, Report
from gpu_day import Part, run_day

# Left there, benchmarks/decode.py would be what spawned workers of other tests take for the folder tests/decode.
del sys.path[0]

BENCHMARKS = Path(gpu_day.__file__).parent
PROBE = (sys.executable, "-c", """print('{"device": "a fake GPU", "cuda": "13.0"}')""")
NO_DEVICE = (sys.executable, "-c", """print('{"device": null}')""")

# --- parts, which are real processes ----------------------------------------------------------------------------------

START = """
import json, os, signal, subprocess, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
def claim(**fields):
    with open(out, "w") as file:
        json.dump({"claims": [{"claim": "a claim", **fields}], "rows": [{"x": 1}]}, file)
"""
GOOD = "claim(measured=1.0, passed=True)"
MISSES = "claim(measured=3.0, goal='<= 2', passed=False)"
HANGS = """
claim(measured=1.0, passed=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({pids!r}, "w") as file:
    print(os.getpid(), child.pid, file=file)
time.sleep(600)
"""
FAULTS = {
    "print('the reason'); sys.exit(3)": "ended with exit code 3; it left no results; the reason",
    "raise ValueError('no such kernel')": "ended with exit code 1; it left no results; ValueError: no such kernel",
    "os.kill(os.getpid(), signal.SIGSEGV)": "ended by SIGSEGV; it left no results",
    "open(out, 'w').write('{')": "its results cannot be read: ",
    "open(out, 'w').write('[]')": "its results cannot be read: it holds no list of claims",
    "claim(rating=5)": "its results cannot be read: its claims have other fields",
    "claim(measured=float('nan'))": "its results cannot be read: not a claim",
    "json.dump({'claims': []}, open(out, 'w'))": "it claims nothing",
}

pytestmark = pytest.mark.harness


def part(code: str, name: str = "part", *, about_s: float = 0, limit_s: float = 30) -> Part:
    command = (sys.executable, "-c", START + code)
    return Part(name=name, what=f"what {name} shows", command=command, about_s=about_s, limit_s=limit_s)


def claims(out: Path, name: str = "part") -> list[dict[str, Any]]:
    return list(json.loads(out.read_text())["parts"][name]["claims"])


def run(*parts: Part, out: Path, seconds: float = 60) -> int:
    return run_day(parts, seconds=seconds, out=out, probe=PROBE)


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "waited in vain"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """A zombie is not: whoever started it has not asked for it yet."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return False


def test_a_claim_that_is_missed_does_not_end_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "day.json"
    assert run(part(MISSES, "first"), part(GOOD, "second"), out=out) == 1
    assert claims(out, "second")[0]["passed"] is True
    told = capsys.readouterr().out
    assert "first                FAIL  a claim: 3, goal <= 2" in told
    assert "2 claims: 1 met, 1 not met, 0 without a verdict" in told


@pytest.mark.parametrize("code", FAULTS)
def test_a_part_that_fails_is_named_and_does_not_end_the_rest(code: str, tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    assert run(part(code, "bad"), part(GOOD, "good"), out=out) == 1
    (claim,) = claims(out, "bad")
    assert claim["claim"] == "what bad shows"
    assert claim["passed"] is False
    assert claim["detail"].startswith(FAULTS[code])
    assert claims(out, "good")[0]["passed"] is True


def test_a_part_that_hangs_is_killed_with_its_children_and_keeps_its_claims(tmp_path: Path) -> None:
    out, pids = tmp_path / "day.json", tmp_path / "pids"
    hangs = part(HANGS.format(pids=str(pids)), "hangs", limit_s=3)
    assert run(hangs, part(GOOD, "good"), out=out) == 1
    earlier, killed = claims(out, "hangs")
    assert earlier["passed"] is True
    assert killed["passed"] is False
    assert killed["detail"] == "killed after 3 s, its limit"
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
    assert claims(out, "good")[0]["passed"] is True


def test_what_does_not_fit_into_the_time_is_skipped_and_the_next_is_tried(tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    assert run(part(GOOD, "long", about_s=600), part(GOOD, "short"), out=out) == 0
    assert claims(out, "long")[0]["passed"] is None
    assert claims(out, "long")[0]["detail"].startswith("no time: it needs about 600 s")
    assert claims(out, "short")[0]["passed"] is True


def test_several_calls_share_the_results(tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    run(part(MISSES, "first"), out=out)
    run(part(GOOD, "second"), out=out)
    assert claims(out, "first")[0]["passed"] is False
    run(part(GOOD, "first"), out=out)
    assert claims(out, "first")[0]["passed"] is True
    # What cannot be measured now does not take the place of what was.
    run(part(GOOD, "first", about_s=600), out=out)
    run_day([part(GOOD, "first")], seconds=60, out=out, probe=NO_DEVICE)
    assert claims(out, "first")[0]["passed"] is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_whole_results_and_no_processes(number: signal.Signals, tmp_path: Path) -> None:
    out, pids = tmp_path / "day.json", tmp_path / "pids"
    codes = {"a": START + GOOD, "b": START + HANGS.format(pids=str(pids)), "c": START + GOOD}
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import sys\n"
        f"sys.path[:0] = [{str(BENCHMARKS)!r}]\n"
        f"from pathlib import Path\n"
        f"from gpu_day import Part, run_day\n"
        f"parts = [Part(name=name, what=name, command=(sys.executable, '-c', code), about_s=0, limit_s=300)\n"
        f"         for name, code in {codes!r}.items()]\n"
        f"sys.exit(run_day(parts, seconds=300, out=Path({str(out)!r}), probe={PROBE!r}))\n"
    )
    day = subprocess.Popen([sys.executable, str(driver)], stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
        day.send_signal(number)
        told, _ = day.communicate(timeout=30)
    finally:
        day.kill()
    assert day.returncode == 130
    assert "interrupted" in told
    assert set(json.loads(out.read_text())["parts"]) == {"a", "b"}
    assert claims(out, "a")[0]["passed"] is True
    earlier, interrupted = claims(out, "b")
    assert earlier["passed"] is True
    assert (interrupted["passed"], interrupted["detail"]) == (None, "interrupted")
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))


def test_without_a_device_every_part_says_so(tmp_path: Path) -> None:
    """The command itself, as users give it."""
    out = tmp_path / "gpu_day.json"
    command = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names = [each.name for each in gpu_day.PARTS]
    for name in names:
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert "not measured (needs a CUDA device)" in line
    assert list(json.loads(out.read_text())["parts"]) == names
    assert all(claim["passed"] is None for name in names for claim in claims(out, name))


def test_every_part_is_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {"gpu_checks.py": set(gpu_checks.CHECKS), "gpu_scripts.py": set(gpu_scripts.PARTS)}
    for each in gpu_day.PARTS:
        _, program, name = each.command
        assert name == each.name
        programs[Path(program).name].remove(name)
        assert each.about_s < each.limit_s < 600
    assert set().union(*programs.values()) == set()
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "contols"])
    with pytest.raises(SystemExit) as caught:
        gpu_day.main()
    assert caught.value.code == 2
    assert "unknown: contols" in capsys.readouterr().err


# --- checks, on a simulated device ------------------------------------------------------------------------------------


class Simulated:
    """What the checks need of a device. A wrong batch is an access that the simulation found to be unordered."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.fetches: list[gpu_trace.Span] = []
        self.fetch_seen = 1.0
        self.forget_memory()

    def fit(self, model: Any, loader: Any, *callbacks: Any) -> None:
        fit(self.sim, model, loader, *callbacks)

    def spin(self, ms: float) -> None:
        self.sim.launch(ms, what="spin")
        self.spin_ms = ms

    def wait(self, ms: float) -> None:
        self.sim.host(ms)

    def pin(self, tensor: Tensor) -> Tensor:
        return self.sim.pin(tensor)

    def count_wrong(self, flags: list[Tensor]) -> int:
        assert len(flags) == gpu_checks.BATCHES
        assert all(flag.device == DEVICE for flag in flags)
        races = len(self.sim.races)
        self.forget_memory()
        return races

    def forget_memory(self) -> None:
        self.sim = SimulatedDevice(**self.options)

    def peak_bytes(self) -> int:
        return self.sim.memory_bytes()

    @contextmanager
    def fetch(self, name: str) -> Iterator[None]:
        assert name == gpu_trace.FETCH
        began = self.sim.now / 1e3
        yield
        self.fetches.append((began, began + self.fetch_seen * (self.sim.now / 1e3 - began)))

    @contextmanager
    def profiled(self, into: list[gpu_trace.Trace]) -> Iterator[None]:
        """A trace of what takes time: copies of 1 ms, and spins. Streams that are held up are not at work."""
        self.forget_memory()
        self.fetches.clear()
        sim = self.sim  # a check may go on to another
        yield
        ahead = [span for stream in sim._pools if stream is not sim.compute for span in stream.busy]
        spins, copies = self.spans(sim.compute.busy, self.spin_ms), self.spans(ahead or sim.compute.busy, 1)
        into.append(gpu_trace.Trace(spins, copies, copies, spins, list(self.fetches)))

    @staticmethod
    def spans(busy: list[Any], ms: float) -> list[gpu_trace.Span]:
        """Those of this length, in microseconds."""
        return sorted((start / 1e3, end / 1e3) for start, end in busy if end - start == round(ms * MS))


@pytest.fixture
def small_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "BATCHES", 12)
    monkeypatch.setattr(gpu_checks, "IMAGES", (4, 3, 8, 8))


def checked(check: Callable[[Report, Any], None], folder: Path, device: Any = None) -> dict[str, Claim]:
    report = Report(folder / "report.json")
    check(report, device or Simulated())
    tables = {
        gpu_checks.CHECKS[name]: set(columns)
        for name, columns in gpu_tables.TABLES.items()
        if name in gpu_checks.CHECKS
    }
    assert all(set(row) == tables[check] for row in report.rows)
    return {claim.claim: claim for claim in report.claims}


def traced(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Simulated:
    device = Simulated(**options)
    monkeypatch.setattr(gpu_checks, "profiled", device.profiled)
    monkeypatch.setattr(torch.profiler, "record_function", device.fetch)
    return device


@pytest.mark.usefixtures("small_checks")
def test_the_controls_see_planted_faults_and_none_in_the_package(tmp_path: Path) -> None:
    found = checked(gpu_checks.controls, tmp_path)
    assert all(claim.passed for claim in found.values()), [claim.line() for claim in found.values()]
    planted = {name: claim.measured for name, claim in found.items() if name.startswith("control")}
    assert len(planted) == 2
    assert all(planted.values())
    assert not any(claim.measured for name, claim in found.items() if name not in planted)


@pytest.mark.usefixtures("small_checks")
def test_memory_is_bounded_and_the_control_sees_a_host_that_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks.streams, "RUN_AHEAD_BYTES", 0)  # batches that are large, as those on a GPU are
    found = checked(gpu_checks.memory, tmp_path, Simulated(copy_bytes_per_ms=4 * 3 * 8 * 8))  # a copy takes 1 ms
    assert all(claim.passed for claim in found.values()), [claim.line() for claim in found.values()]
    for depth in (1, 2, 3):  # what is documented, depth + 3, and plain Lightning has one of them
        assert found[f"memory beyond plain, depth {depth}"].measured == depth + 2


def test_the_share_of_waiting_is_that_of_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(gpu_checks.share, tmp_path, traced(monkeypatch))
    assert len(found) == 6
    assert all(claim.passed for claim in found.values()), [claim.line() for claim in found.values()]
    told = {name.partition(", ")[2]: claim.detail for name, claim in found.items()}
    assert told["data 8 ms, compute 20 ms"] == "told 0.0 %, in the trace 0.0 %"
    assert told["data 20 ms, compute 5 ms, prefetched"] == "told 75.0 %, in the trace 75.0 %"


def test_copies_under_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "IMAGES", (4, 3, 8, 8))
    device = traced(monkeypatch, copy_bytes_per_ms=4 * 3 * 8 * 8)
    plain, ours = checked(gpu_checks.overlap_trace, tmp_path, device).values()
    assert (plain.measured, plain.passed) == (0, True)
    assert plain.detail == "1.00 ms a copy, 21.00 ms a step"
    assert (ours.measured, ours.passed) == (100, True)
    assert ours.detail == "1.00 ms a copy, 20.00 ms a step"


# --- traces and tests -------------------------------------------------------------------------------------------------


def test_what_a_profiler_writes_is_read(tmp_path: Path) -> None:
    """The host's ranges are from a real profile; kernels and copies stand in the file as Kineto writes them."""
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_cpu) as profile, torch.profiler.record_function(gpu_trace.FETCH):
        torch.ones(1)
    file = tmp_path / "trace.json"
    profile.export_chrome_trace(str(file))
    trace = json.loads(file.read_text())
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    trace["traceEvents"] += [
        {"ph": "X", "cat": "kernel", "name": spin, "ts": 10.0, "dur": 5.0},
        {"ph": "X", "cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel", "ts": 1.0, "dur": 2.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 20.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "ts": 30.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 40.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": gpu_trace.FETCH, "ts": 0.0, "dur": 100.0},
    ]
    file.write_text(json.dumps(trace))
    found = gpu_trace.read_trace(file)
    assert len(found.fetches) == 1
    assert found.kernels == [(1, 3), (10, 15)]
    assert found.spins == [(10, 15)]
    assert found.to_device == [(20, 21)]
    assert found.other == [(20, 21), (30, 31), (40, 41)]


# --- tables -----------------------------------------------------------------------------------------------------------

MACHINE = {
    "device": "NVIDIA H100",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "torchvision": "0.26.0",
    "lightning": "2.6.6",
    "python": "3.12.1",
    "cpus": 16,
    "cpu": "a CPU",
}
RESULTS = {
    "memory": {
        "machine": MACHINE,
        "date": "2026-01-02T03:04:05+00:00",
        "claims": [
            {"claim": "beyond plain", "measured": 2.0, "unit": "batches", "goal": "<= 3", "passed": True, "detail": ""},
            {"claim": "a|b", "measured": 1234.5, "unit": "MB", "goal": "<= 3", "passed": False, "detail": ""},
        ],
        "rows": [{"run": "plain", "peak_mb": 50.3, "batches_beyond_plain": 0.0}, {"run": "depth 1", "peak_mb": 151.0}],
    }
}


def test_tables_are_filled_and_filled_again_alike() -> None:
    page = gpu_tables.PAGE.read_text()
    once = gpu_tables.fill(page, RESULTS)
    assert gpu_tables.fill(once, RESULTS) == once
    assert "- NVIDIA H100, driver 580.1, CUDA 13.0; 16 CPUs (a CPU); Python 3.12.1, torch 2.11.0" in once
    assert "| memory | beyond plain | 2 batches | <= 3 | yes |\n| memory | a\\|b | 1,234 MB | <= 3 | **no** |" in once
    assert "|  | peak, MB | batches beyond plain |\n|---|---:|---:|\n| plain | 50.3 | 0 |\n| depth 1 | 151 |  |" in once
    without = gpu_tables.fill(once, {})
    assert without.count(gpu_tables.NOT_MEASURED) == 1 + len(gpu_tables.TABLES)
    # All that is outside of the markers stands as it was.
    assert gpu_tables.BLOCK.sub("", once) == gpu_tables.BLOCK.sub("", page)
