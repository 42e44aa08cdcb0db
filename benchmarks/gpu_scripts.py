"""Claims from other programs of this repository: the tests that need a CUDA device, and overhead.py.

Parts of gpu_day.py, which says what each is for. One alone, its results in FILE:

    python benchmarks/gpu_scripts.py PART --out FILE --limit SECONDS
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from gpu_claims import Claim, Report, at_most, run_part

HERE = Path(__file__).parent
ROOT = HERE.parent
MARGIN_S = 30.0
"""Before the time limit, so that what was found until then can be written down."""
LEAST_S = 10.0
START_S = 20.0
"""To import Lightning and start CUDA, before a benchmark's own time box begins."""


def device_tests(report: Report, limit_s: float) -> None:
    """The tests with the mark ``gpu``."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    files.sort(key=lambda path: (path.parent.name != "gpu", path))  # the claims first, should time run out
    session_s = max(LEAST_S, limit_s - MARGIN_S)
    options = ["-m", "gpu", "-n", "0", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    limits = ["--timeout=120", f"--session-timeout={session_s:.0f}"]
    environment = {**os.environ, "LIGHTNING_FEED_REQUIRE_GPU": "1"}
    command = [sys.executable, "-m", "pytest", *map(str, files), *options, *limits]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    lines = done.stdout.strip().splitlines() or ["pytest printed nothing"]
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    passed = done.returncode == 0
    summary = lines[-1].strip("= ")
    report.add(Claim(claim="tests that need a device", measured=summary, goal="none fails", passed=passed))
    for line in failed:
        report.row(test=line)


def _benchmark(limit_s: float, script: str, *options: str) -> dict[str, Any]:
    """The JSON that a benchmark writes; where it does not end in time, what it had written until then."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
        try:
            subprocess.run(command, cwd=ROOT, check=True, timeout=max(LEAST_S, limit_s - MARGIN_S))
        except subprocess.TimeoutExpired:
            print(f"{script} was not done in time")
        if not out.exists():
            raise SystemExit(f"{script} wrote no results")
        return dict(json.loads(out.read_text()))


def _spread(values: list[float]) -> str:
    return f"[{min(values):.3g}, {max(values):.3g}]"


def overhead(report: Report, limit_s: float) -> None:
    """Host time of the callbacks, on the device with its streams and events."""
    seconds = min(80.0, max(LEAST_S, limit_s - MARGIN_S - START_S))
    results = _benchmark(limit_s, "overhead.py", "--device", "cuda", "--seconds", f"{seconds:.0f}")
    plain = [cpu_us for cpu_us, _ in results["plain"]]
    report.row(callbacks="plain step", us=median(plain), spread=_spread(plain))
    for row in results["rows"]:
        spread = _spread(row["added_cpu_us"])
        wall_us = median(row["added_us"])
        report.row(callbacks=row["callbacks"], us=row["median_us"], spread=spread, wall_us=wall_us)
        if row["goal_us"] is not None:
            detail = f"of {len(row['added_cpu_us'])} rounds {spread}; by the wall {wall_us:.1f}"
            name = f"host time, {row['callbacks']}"
            report.add(at_most(name, row["median_us"], row["goal_us"], "us a step", detail))
    for name, us in results["calls_us"].items():
        report.row(callbacks=name, us=us)


PARTS = {"overhead": overhead, "gpu-tests": device_tests}

if __name__ == "__main__":
    run_part(PARTS)
