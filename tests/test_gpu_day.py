"""The day on a GPU machine: its parts and their faults."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu_checks
import gpu_day
import gpu_scripts
import gpu_trace
from gpu_claims import Report
from gpu_day import Part, run_day

# Only the imports above need it.
del sys.path[0]

BENCHMARKS = Path(gpu_day.__file__).parent

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
    "print('the reason'); sys.exit(3)": "ended with exit code 3; the reason",
    "raise ValueError('no such kernel')": "ended with exit code 1; ValueError: no such kernel",
    "os.kill(os.getpid(), signal.SIGSEGV)": "ended by SIGSEGV",
    "json.dump({'claims': []}, open(out, 'w'))": "it claims nothing",
}

pytestmark = pytest.mark.nightly


def part(code: str, name: str = "part", *, about_s: float = 0, limit_s: float = 30) -> Part:
    command = (sys.executable, "-c", START + code)
    return Part(name=name, what=f"what {name} shows", command=command, about_s=about_s, limit_s=limit_s)


def claims(out: Path, name: str = "part") -> list[dict[str, Any]]:
    return list(json.loads(out.read_text())["parts"][name]["claims"])


def run(*parts: Part, out: Path, seconds: float = 60) -> int:
    return run_day(parts, seconds=seconds, out=out)


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


def test_a_missed_claim_does_not_stop_the_other_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "day.json"
    assert run(part(MISSES, "first"), part(GOOD, "second"), out=out) == 1
    assert claims(out, "second")[0]["passed"] is True
    told = capsys.readouterr().out
    assert "first                FAIL  a claim: 3, goal <= 2" in told
    assert "2 claims: 1 met, 1 not met, 0 without a verdict" in told


@pytest.mark.parametrize("code", FAULTS)
def test_a_failing_part_is_named_and_does_not_stop_the_others(code: str, tmp_path: Path) -> None:
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
    assert killed["detail"] == "killed after 3 s"
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()))
    assert claims(out, "good")[0]["passed"] is True


def test_a_part_too_long_for_the_time_left_is_skipped(tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    assert run(part(GOOD, "long", about_s=600), part(GOOD, "short"), out=out) == 0
    assert claims(out, "long")[0]["passed"] is None
    assert claims(out, "long")[0]["detail"].startswith("no time: it needs about 600 s")
    assert claims(out, "short")[0]["passed"] is True


def test_results_of_several_calls_are_merged(tmp_path: Path) -> None:
    out = tmp_path / "day.json"
    run(part(MISSES, "first"), out=out)
    run(part(GOOD, "second"), out=out)
    assert claims(out, "first")[0]["passed"] is False
    run(part(GOOD, "first"), out=out)
    assert claims(out, "first")[0]["passed"] is True
    # What cannot be measured now does not take the place of what was.
    run(part(GOOD, "first", about_s=600), out=out)
    assert claims(out, "first")[0]["passed"] is True


ON_A_CPU_TOO = ("programs", "hand-over", "feed")
"""Parts that run without a device, too, for minutes."""


def test_every_part_reports_a_missing_cuda_device(tmp_path: Path) -> None:
    """The command itself, as users give it."""
    out = tmp_path / "gpu_day.json"
    names = [each.name for each in gpu_day.PARTS if each.name not in ON_A_CPU_TOO]
    command = [sys.executable, str(BENCHMARKS / "gpu_day.py"), "--out", str(out), *names]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for name in names:
        (line,) = (line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert "not measured (needs a CUDA device)" in line
    assert list(json.loads(out.read_text())["parts"]) == names
    assert all(claim["passed"] is None for name in names for claim in claims(out, name))


def test_gpu_day_runs_every_part_of_the_gpu_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {
        "gpu_checks.py": set(gpu_checks.CHECKS),
        "gpu_scripts.py": set(gpu_scripts.PARTS),
        "gpu_programs.py": {"programs"},
        "gpu_hand_over.py": {"hand-over"},
        "gpu_feed.py": {"feed"},
    }
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


def test_the_cost_of_the_callbacks_is_that_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []
    row = {"callbacks": "both", "added_cpu_us": [50.0], "added_us": [60.0], "median_us": 50.0, "goal_us": 60.0}
    results = {"plain": [(900.0, 1000.0)], "rows": [row], "calls_us": {}}
    monkeypatch.setattr(gpu_scripts, "_benchmark", lambda limit_s, *options: asked.append(options) or results)
    report = Report(tmp_path / "out.json")
    gpu_scripts.overhead(report, 100.0)
    [options] = asked
    assert options[options.index("--device") + 1] == "cuda"


# --- traces and tests -------------------------------------------------------------------------------------------------


def test_read_trace_sorts_the_events_of_a_profiler_trace(tmp_path: Path) -> None:
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
