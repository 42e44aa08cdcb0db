"""All claims that need a CUDA device, checked by one command.

Each part is a process of its own with a time limit: an error or a hang on the device ends that part only. The most
important parts come first, and what does not fit into the given minutes is skipped, and said. One line for each claim
shows what was measured, what the goal is, and whether it is met ("-": not measured, or a figure without a goal).
Results go to a JSON file after each part; several calls may use the same one, and a part that is measured again is
replaced there. Beside it are the same as Markdown tables, and a folder with what the parts printed.

    python benchmarks/gpu_day.py [PART ...] [--minutes 15] [--out gpu_day.json]

Where no command may take longer than ten minutes, keep gpu_day.json between two calls:

    python benchmarks/gpu_day.py --minutes 9 programs share memory same nvjpeg overhead
    python benchmarks/gpu_day.py --minutes 9 gpu-tests overlap

Exit code: 0 when every claim is met or could not be measured here, 1 otherwise.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_claims import Claim, number_text, write_whole

HERE = Path(__file__).parent
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
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def _part(program: str, name: str, what: str, about_s: float, limit_s: float) -> Part:
    command = (sys.executable, str(HERE / program), name)
    return Part(name=name, what=what, command=command, about_s=about_s, limit_s=limit_s)


PARTS = (
    _part("gpu_programs.py", "programs", "programs as users write them get the right verdict", 220, 330),
    _part("gpu_hand_over.py", "hand-over", "batches in slots beside torch's", 100, 200),
    _part("gpu_feed.py", "feed", "images decoded by the device and by the CPUs", 120, 150),
    _part("gpu_checks.py", "share", "starved_pct is what a profiler trace shows", 30, 90),
    _part("gpu_checks.py", "memory", "few batches lie on the device", 20, 60),
    _part("gpu_checks.py", "same", "weights are the same to the bit", 30, 90),
    _part("gpu_checks.py", "nvjpeg", "decoding on the device is fast", 20, 60),
    _part("gpu_scripts.py", "overhead", "host time that the callbacks cost", 110, 170),
    _part("gpu_scripts.py", "gpu-tests", "the tests that need a device", 330, 420),
    _part("gpu_checks.py", "overlap", "a step takes no longer than its slowest part", 90, 240),
)
"""The most important first."""


def main() -> None:
    """Run the parts that were asked for."""
    epilog = "\n".join(["parts:", *(f"  {part.name:20} {part.what}" for part in PARTS)])
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, epilog=epilog)
    parser.add_argument("names", nargs="*", metavar="PART", help="run these only")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all parts together")
    parser.add_argument("--out", type=Path, default=Path("gpu_day.json"))
    options = parser.parse_args()
    unknown = set(options.names) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}. The parts are {', '.join(part.name for part in PARTS)}")
    chosen = [part for part in PARTS if not options.names or part.name in options.names]
    sys.exit(run_day(chosen, seconds=60 * options.minutes, out=options.out))


def run_day(parts: Iterable[Part], *, seconds: float, out: Path) -> int:
    """Run parts in the given order, and keep their results.

    Args:
        parts: the most important first.
        seconds: for all of them together.
        out: the JSON file for the results.

    Returns:
        The exit code.
    """
    end_s = time.monotonic() + seconds
    results = read_results(out)
    logs = out.with_name(f"{out.stem}_logs")
    logs.mkdir(parents=True, exist_ok=True)
    claims: list[Claim] = []
    for part in parts:
        remaining_s = end_s - time.monotonic()
        if remaining_s < part.about_s:
            detail = f"no time: it needs about {part.about_s:.0f} s, and {max(0, remaining_s):.0f} s are left"
            outcome = Outcome(claims=[Claim(claim=part.what, detail=detail)])
        else:
            outcome = _run(part, min(part.limit_s, remaining_s), logs / f"{part.name}.log")
        _keep(results, part, outcome)
        write_whole(out, {"parts": results})
        out.with_suffix(".md").write_text(tables(results))
        for claim in outcome.claims:
            print(f"{part.name:20} {claim.line()}", flush=True)
        claims += outcome.claims
    missed = [claim for claim in claims if claim.passed is False]
    met = sum(claim.passed is True for claim in claims)
    silent = len(claims) - met - len(missed)
    print(f"\n{len(claims)} claims: {met} met, {len(missed)} not met, {silent} without a verdict")
    for claim in missed:
        print(claim.line())
    print(f"results: {out}", flush=True)
    return int(bool(missed))


def read_results(path: Path) -> dict[str, Any]:
    """Results of earlier calls, by the names of their parts."""
    if not path.exists():
        return {}
    return dict(json.loads(path.read_text())["parts"])


def tables(results: dict[str, Any]) -> str:
    """All claims, and the rows of each part, as Markdown."""
    machines = dict.fromkeys(f"- {_in_words(result)}" for result in results.values())
    lines = [*machines, "", "| part | claim | measured | goal | met |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for claim in (Claim(**fields) for fields in result["claims"]):
            met = {True: "yes", False: "**no**", None: ""}[claim.passed]
            lines.append(f"| {name} | {claim.claim} | {claim.value()} | {claim.goal} | {met} |")
    for name, result in results.items():
        if result["rows"]:
            columns = list(result["rows"][0])
            lines += ["", f"{name}: {result['what']}", ""]
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            cells = [[number_text(row.get(column)) for column in columns] for row in result["rows"]]
            lines += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(lines) + "\n"


def _in_words(result: dict[str, Any]) -> str:
    """The machine and the day of a result."""
    facts = [f"{name} {value}" for name, value in result["machine"].items() if value is not None]
    return ", ".join([*facts, result["date"][:10]])


def _keep(results: dict[str, Any], part: Part, outcome: Outcome) -> None:
    """What could not be measured does not take the place of figures."""
    if part.name in results and all(claim.passed is None for claim in outcome.claims):
        return
    results[part.name] = {
        "what": part.what,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": outcome.machine,
        "seconds": round(outcome.seconds, 1),
        "claims": [asdict(claim) for claim in outcome.claims],
        "rows": outcome.rows,
    }


def _run(part: Part, limit_s: float, log: Path) -> Outcome:
    """Run a part in a process. What it had claimed until it failed stands."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        command = [*part.command, "--out", str(report), "--limit", f"{limit_s:.0f}"]
        problem = _run_process(command, log, limit_s)
        results = json.loads(report.read_text()) if report.exists() else {}
    claims = [Claim(**fields) for fields in results.get("claims", [])]
    if not claims and not problem:
        problem = "it claims nothing"
    if problem:
        detail = f"{problem}; {_last_line(log)[:200]}".rstrip("; ")
        claims.append(Claim(claim=part.what, passed=False, detail=detail))
    seconds = time.monotonic() - began_s
    return Outcome(claims=claims, rows=results.get("rows", []), machine=results.get("machine", {}), seconds=seconds)


def _run_process(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run a command until it ends, or its time is over. Nothing that it started outlives it.

    Returns:
        What went wrong; empty when nothing did.
    """
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # the package need not be installed
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a process group of its own, which can be killed as a whole
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else ""


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main()
