"""Claims from other scripts of this repository: the tests that need a CUDA device, and the benchmarks.

Parts of gpu_day.py, which says what each is for. One alone, its results in FILE:

    python benchmarks/gpu_scripts.py PART --out FILE --limit SECONDS
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from gpu_claims import Report, at_most, run_part

HERE = Path(__file__).parent
ROOT = HERE.parent
MARGIN_S = 30.0
"""Before the time limit, so that what was found until then can be written down."""
LEAST_S = 10.0


# --- tests ------------------------------------------------------------------------------------------------------------


def device_tests(report: Report, limit_s: float) -> None:
    """The tests with the mark ``gpu``.

    Not under torch's CUDA sanitizer: it asks for the current stream at every operation, which ends forked workers, and
    takes captured graphs for races.
    """
    what = "tests that need a device: failed"
    files = sorted(
        (path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()),
        key=lambda path: (path.parent.name not in ("gpu", "watch"), path),  # the claims first, should time run out
    )
    environment = {**os.environ, "LIGHTNING_FEED_REQUIRE_GPU": "1"}
    session_s = max(LEAST_S, limit_s - MARGIN_S)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "tests.xml"
        options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        limits = ["--timeout=120", f"--session-timeout={session_s:.0f}"]
        command = [sys.executable, "-m", "pytest", *map(str, files), *options, *limits, f"--junitxml={found}"]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        if not found.exists():
            raise SystemExit(f"pytest ended with exit code {code}, and without results")
        outcomes = read_junit(found)
    failed = {name: message for name, (outcome, message) in outcomes.items() if outcome == "failed"}
    count = {kind: sum(outcome == kind for outcome, _ in outcomes.values()) for kind in ("passed", "skipped")}
    over = time.monotonic() - began > session_s
    reasons = sorted({message for outcome, message in outcomes.values() if outcome == "skipped"})
    detail = f"{count['passed']} passed, {count['skipped']} skipped{', then no time' if over else ''}"
    detail = "; ".join([detail, *reasons])
    claim = at_most(what, len(failed), 0, "tests", detail)
    if not count["passed"]:
        claim = replace(claim, passed=False)
    elif over and not failed:
        claim = replace(claim, passed=None)
    report.add(claim)
    for name, message in failed.items():
        report.row(test=name, message=message)


def read_junit(file: Path) -> dict[str, tuple[str, str]]:
    """Test -> passed, failed or skipped, and the first line of the message. Errors at set-up are failures."""
    outcomes: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is None:
            outcomes.setdefault(name, ("passed", ""))
        else:
            message = (bad.get("message") or "").strip().partition("\n")[0][:200]
            outcomes[name] = ("skipped" if bad.tag == "skipped" else "failed", message)
    return outcomes


# --- benchmarks -------------------------------------------------------------------------------------------------------


def _benchmark(limit_s: float, script: str, *options: str) -> dict[str, Any]:
    """The JSON that a benchmark writes; where it does not end in time, what it had written until then."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [sys.executable, str(HERE / script), *options, "--json", str(out)]
        try:
            code = subprocess.run(command, cwd=ROOT, check=False, timeout=max(LEAST_S, limit_s - MARGIN_S)).returncode
            ended = f"ended with exit code {code}"
        except subprocess.TimeoutExpired as error:
            code, ended = 0, f"was not done after {error.timeout:.0f} s"
        if code or not out.exists():
            raise SystemExit(f"{script} {ended}")
        return dict(json.loads(out.read_text()))


def _spread(values: list[float]) -> str:
    return f"[{min(values):.3g}, {max(values):.3g}]"


def overhead(report: Report, limit_s: float) -> None:
    """Host time of the callbacks, on the device with its streams and events."""
    found = _benchmark(limit_s, "overhead.py", "--device", "cuda", "--rounds", "5", "--steps", "1000")
    plain = [cpu_us for cpu_us, _ in found["plain"]]
    report.row(callbacks="plain step", us=median(plain), spread=_spread(plain))
    for row in found["rows"]:
        added = row["least_us"]
        report.row(callbacks=row["callbacks"], us=added, spread=_spread(row["added_cpu_us"]))
        if row["goal_us"] is not None:
            detail = f"of {len(row['added_cpu_us'])} rounds {_spread(row['added_cpu_us'])}"
            report.add(at_most(f"host time, {row['callbacks']}", added, row["goal_us"], "us a step", detail))


def overlap(report: Report, limit_s: float) -> None:
    """The step over its slowest part alone."""
    for row in _benchmark(limit_s, "overlap.py", "--rounds", "2", "--steps", "40")["rows"]:
        middle = {key: median(row[key]) for key in ("compute", "loader", "copy", "plain", "ours")}
        floor = max(middle["compute"], middle["loader"], middle["copy"])
        batch = f"{row['batch']} {row['dtype'].removeprefix('torch.')}"
        ratios = {name: middle[name] / floor for name in ("plain", "ours")}
        detail = f"plain Lightning {ratios['plain']:.2f}"
        report.add(at_most(f"step over its slowest part, {row['model']}, {batch}", ratios["ours"], 1.02, "", detail))
        report.row(
            model=row["model"],
            batch=batch,
            **{f"{key}_ms": value for key, value in middle.items()},
            plain_ratio=ratios["plain"],
            ours_ratio=ratios["ours"],
        )


PARTS: dict[str, Callable[[Report, float], None]] = {
    "gpu-tests": device_tests,
    "overhead": overhead,
    "overlap": overlap,
}

if __name__ == "__main__":
    run_part(PARTS)
