"""All claims that need a CUDA device, checked by one command.

Each part is a process of its own with a time limit: an error or a hang on the device ends that part only. The most
important parts come first, and what does not fit into the given minutes is skipped, and said. One line for each claim
shows what was measured, what the goal is, and whether it is met ("-": not measured, or a figure without a goal).
Results go to a JSON file; several calls may use the same one, and a part that is measured again is replaced there.
What the parts printed is in a folder beside it. gpu_tables.py puts the results into docs/benchmarks.md.

    python benchmarks/gpu_day.py [PART ...] [--minutes 30] [--out gpu_day.json]

Where no command may take longer than ten minutes, keep gpu_day.json between two calls:

    python benchmarks/gpu_day.py --minutes 9.5 controls share overlap-trace memory same nvjpeg nvml graphs overhead
    python benchmarks/gpu_day.py --minutes 9.5 gpu-tests overlap

It ends at once where something that it needs is missing, and says what; the list is at the end of the help. DALI, which
is large, may be missing: its tests are skipped.

Exit code: 0 when every claim is met or could not be measured here, 1 otherwise, 2 when something is missing, 130 when
interrupted.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from gpu_claims import Claim, read_report, write_whole

HERE = Path(__file__).parent
MACHINE_LIMIT_S = 120.0
KILLED_S = 20.0
"""Allowed to a killed process: the driver may hold on to it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One process, and how long it may take."""

    name: str
    what: str
    command: Sequence[str]
    """Called with ``--out FILE --limit SECONDS`` behind it."""
    about_s: float
    """Expected. With less time left the part is skipped."""
    limit_s: float


@dataclass
class Outcome:
    """What a part found."""

    claims: list[Claim]
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    cut_short: bool = False
    """Ended early, or not run, through no fault of its own."""


def _part(program: str, name: str, what: str, about_s: float, limit_s: float) -> Part:
    command = (sys.executable, str(HERE / program), name)
    return Part(name=name, what=what, command=command, about_s=about_s, limit_s=limit_s)


PARTS = (
    _part("gpu_checks.py", "controls", "no batch is corrupted, and planted faults are seen", 30, 120),
    _part("gpu_checks.py", "share", "starved_pct is what a profiler trace shows", 40, 150),
    _part("gpu_checks.py", "overlap-trace", "copies run under compute", 30, 120),
    _part("gpu_checks.py", "memory", "few batches lie on the device", 30, 120),
    _part("gpu_checks.py", "same", "weights are the same to the bit", 60, 180),
    _part("gpu_checks.py", "nvjpeg", "decoding on the device corrupts nothing, and is fast", 30, 120),
    _part("gpu_checks.py", "nvml", "NVML's figures of a busy and of an idle device", 20, 60),
    _part("gpu_checks.py", "graphs", "weights are the same with CUDA graphs", 60, 180),
    _part("gpu_scripts.py", "gpu-tests", "the tests that need a device", 100, 330),
    _part("gpu_scripts.py", "overhead", "host time that the callbacks cost", 60, 150),
    _part("gpu_scripts.py", "overlap", "a step takes no longer than its slowest part", 240, 540),
)
"""The most important first."""

NEEDED = {
    "torch": "torch>=2.6",
    "torchvision": "torchvision>=0.21",
    "lightning": "lightning>=2.4",
    "fsspec": "fsspec>=2024.2",
    "filelock": "filelock>=3.32",
    "jinja2": "jinja2>=3.0",
    "prefetch_generator": "prefetch_generator>=1.0.3",
    "pynvml": "nvidia-ml-py>=12.535",
    "cv2": "opencv-python-headless>=4.11",
    "simplejpeg": "simplejpeg>=1.8",
    "turbojpeg": "turbojpeg>=0.0.2",
    "pytest": "pytest>=8",
    "pytest_timeout": "pytest-timeout>=2.3",
    "hypothesis": "hypothesis>=6.100",
}
"""Modules that the parts import, and what pip is to be given for each."""


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            ["parts:", *(f"  {part.name:20} {part.what}" for part in PARTS), "needs:", f"  {' '.join(NEEDED.values())}"]
        ),
    )
    parser.add_argument("names", nargs="*", metavar="PART", help="run these only")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    options = parser.parse_args()
    if unknown := set(options.names) - {part.name for part in PARTS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. The parts are {', '.join(part.name for part in PARTS)}")
    if missing := what_is_missing():
        parser.error(
            f"missing: {', '.join(missing)}. Nothing was started, since parts would end where they import it. Install "
            "it. Of prefetch_generator there may be no wheel: pip wheel --no-deps prefetch_generator builds one."
        )
    chosen = [part for part in PARTS if not options.names or part.name in options.names]
    probe = (sys.executable, str(HERE / "gpu_machine.py"))
    sys.exit(run_day(chosen, seconds=60 * options.minutes, out=options.out, probe=probe))


def what_is_missing() -> list[str]:
    """Requirements that are not installed, or only in an older version."""
    missing = []
    for module, requirement in NEEDED.items():
        name, _, least = requirement.partition(">=")
        if module == "turbojpeg" and platform.machine() != "x86_64":
            continue  # there is none
        if importlib.util.find_spec(module) is None:
            missing.append(requirement)
            continue
        with suppress(importlib.metadata.PackageNotFoundError):  # the module is of another package, as cv2 may be
            found = importlib.metadata.version(name)
            if _numbers(found) < _numbers(least):
                missing.append(f"{requirement} ({found} is installed)")
    return missing


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def run_day(parts: Iterable[Part], *, seconds: float, out: Path, probe: Sequence[str]) -> int:
    """Run parts in the given order, and keep their results.

    Args:
        parts: the most important first.
        seconds: for all of them together.
        out: the JSON file for the results.
        probe: the command that prints the facts of the machine as JSON.

    Returns:
        The exit code.
    """
    ends = time.monotonic() + seconds
    results = read_results(out)
    logs = out.with_name(f"{out.stem}_logs")
    logs.mkdir(parents=True, exist_ok=True)
    claims: list[Claim] = []
    with _stop_on_signals() as stop:
        machine = _probe_machine(probe, logs, stop)
        print("; ".join(f"{name} {value}" for name, value in machine.items() if value is not None), flush=True)
        for part in parts:
            left = ends - time.monotonic()
            if stop.is_set():
                break
            if machine["device"] is None:
                outcome = _not_run(part, "needs a CUDA device")
            elif left < part.about_s:
                outcome = _not_run(
                    part, f"no time: it needs about {part.about_s:.0f} s, and {max(0, left):.0f} s are left"
                )
            else:
                outcome = _run(part, left, logs / f"{part.name}.log", stop)
            _keep(results, part, outcome, machine)
            write_whole(out, {"parts": results})
            for claim in outcome.claims:
                print(f"{part.name:20} {claim.line()}", flush=True)
            claims += outcome.claims
        interrupted = stop.is_set()
    missed = [claim for claim in claims if claim.passed is False]
    met = sum(claim.passed is True for claim in claims)
    print(
        f"\n{len(claims)} claims: {met} met, {len(missed)} not met, {len(claims) - met - len(missed)} without a verdict"
    )
    for line in [*(claim.line() for claim in missed), *(["interrupted"] if interrupted else []), f"results: {out}"]:
        print(line, flush=True)
    return 130 if interrupted else 1 if missed else 0


def read_results(path: Path) -> dict[str, Any]:
    """Results of earlier calls, by the names of their parts."""
    try:
        return dict(json.loads(path.read_text())["parts"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} does not hold results of gpu_day.py ({error!r}). Move it away.") from error


def _keep(results: dict[str, Any], part: Part, outcome: Outcome, machine: dict[str, Any]) -> None:
    """A result that was cut short does not take the place of one with figures."""
    earlier = results.get(part.name, {"claims": []})["claims"]
    if outcome.cut_short and any(claim["measured"] is not None for claim in earlier):
        return
    results[part.name] = {
        "what": part.what,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "seconds": round(outcome.seconds, 1),
        "claims": [asdict(claim) for claim in outcome.claims],
        "rows": outcome.rows,
    }


# --- one part ---------------------------------------------------------------------------------------------------------


def _not_run(part: Part, why: str) -> Outcome:
    return Outcome(claims=[Claim(claim=part.what, detail=why)], cut_short=True)


def _run(part: Part, left_s: float, log: Path, stop: threading.Event) -> Outcome:
    """Run a part within its own limit and the time that is left."""
    limit_s = min(part.limit_s, left_s)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        with log.open("wb") as output:
            command = [*part.command, "--out", str(report), "--limit", f"{limit_s:.0f}"]
            problem = _run_process(command, output, limit_s, stop)
        claims, rows, unread = _read(report)
    no_time = problem == KILLED and limit_s < part.limit_s
    cut_short = no_time or problem == INTERRUPTED
    if problem == KILLED:
        problem = f"{KILLED} after {limit_s:.0f} s, {'all that was left' if no_time else 'its limit'}"
    if problem or unread:
        # What it had claimed until then stands.
        detail = "; ".join(text for text in (problem, unread, _last_line(log)[:200]) if text)
        claims.append(Claim(claim=part.what, passed=None if cut_short else False, detail=detail))
    return Outcome(claims=claims, rows=rows, seconds=time.monotonic() - began, cut_short=cut_short)


KILLED, INTERRUPTED = "killed", "interrupted"


def _run_process(command: Sequence[str], output: IO[bytes], limit_s: float, stop: threading.Event) -> str:
    """Run a command until it ends, its time is over, or ``stop``. Nothing that it started outlives it.

    Returns:
        What went wrong; empty when nothing did.
    """
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # the package need not be installed
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,  # a process group of its own, which can be killed as a whole
    )
    ends = time.monotonic() + limit_s
    while process.poll() is None and not stop.is_set() and time.monotonic() < ends:
        time.sleep(0.05)
    code = process.returncode
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED_S)
    if code is None:
        return INTERRUPTED if stop.is_set() else KILLED
    return "" if code == 0 else f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _read(report: Path) -> tuple[list[Claim], list[dict[str, Any]], str]:
    """Claims, rows, and what is wrong with them."""
    try:
        claims, rows = read_report(report)
    except FileNotFoundError:
        return [], [], "it left no results"
    except ValueError as error:
        return [], [], f"its results cannot be read: {error}"
    return claims, rows, "" if claims else "it claims nothing"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _probe_machine(probe: Sequence[str], logs: Path, stop: threading.Event) -> dict[str, Any]:
    log = logs / "machine.log"
    with log.open("wb") as output:
        problem = _run_process(probe, output, MACHINE_LIMIT_S, stop)
    if problem == INTERRUPTED:
        return {"device": None}
    try:
        if not problem:
            return dict(json.loads(_last_line(log)))
    except ValueError:
        problem = "it printed no JSON"
    raise SystemExit(f"The machine cannot be looked at: {problem}; {_last_line(log)}")


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, in place of an exception at any point: results stay whole."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
