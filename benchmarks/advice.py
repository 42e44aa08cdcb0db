"""Is the advice right? Each project of tests/zoo is trained as written, and with what its report says, literally.

Each case is a project as it is, or with one fault planted (see each ``row.json``). It runs once with both callbacks:
the remedies of its report are what is judged. The first is applied by machine (tests/zoo/apply.py), and the project
then trains without and with it in turns, in processes of their own, without our callbacks. A step is the mean time
from the end of one to the end of the next, with all that lies between: first batches, validation, checkpoints.

- right: the gain is beyond noise, and the step within 15 % of what was predicted, or shorter
- less than predicted: the gain is beyond noise, and smaller
- useless: no gain beyond noise
- harmful: slower beyond noise, other samples, another scale of inputs; cannot be pasted, changes nothing, does not run

The two runs of a round follow each other, so that a machine that gets slower does so for both. Noise is what the mean
of the rounds' differences may be off by, at 95 % (Student's t), and 2 % of a step at least. Where the two sides are no
further apart than that, there are more rounds, nine at most. Let nothing else run beside it, but what ``--beside``
starts. With ``--json FILE`` finished cases are kept, and not run again.

    python benchmarks/advice.py [--rounds 3] [--only timm,gan] [--steps 150] [--quick] [--beside "1 program"]
        [--json FILE]
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median, stdev
from types import SimpleNamespace
from typing import Any

import torch
from verdict_quiet import BESIDE, QUIET_PCT, Others, programs_beside, wait_until_quiet

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from zoo.apply import CannotApply, apply
from zoo.compare import differences, not_done
from zoo.harness import Outcome, Project, copy_of, projects, run

CLOSE = 1.15
"""Times the predicted step that a step may take."""
LEAST_NOISE = 0.02
MOST_ROUNDS = 9
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31}
"""Student's t at 95 %, two-sided, for the mean of so many values."""
PATIENCE_S = 20.0
JUDGEMENTS = ("right", "less than predicted", "useless", "harmful")
AS_WRITTEN = "as written"


def main() -> int:
    """Run all cases and print the table. Exit code 1: a remedy is harmful, or fewer than 90 % are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="at least; more where they do not decide")
    parser.add_argument("--steps", type=int, default=150, help="training steps of each run")
    parser.add_argument("--only", default="", help="parts of projects' names, with commas between")
    parser.add_argument("--quick", action="store_true", help="one round of few steps on little data, to try the script")
    parser.add_argument("--beside", choices=BESIDE, default="nothing", help="programs that compute beside each run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps = 1, 60
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{arguments.rounds} rounds of {arguments.steps} steps\n",
        flush=True,
    )
    done: list[dict[str, Any]] = []
    if arguments.json is not None and arguments.json.exists():
        done = json.loads(arguments.json.read_text())
    known = {(row["project"], row["fault"]) for row in done}
    wanted = [part for part in arguments.only.split(",") if part]
    for name, project in projects().items():
        if wanted and not any(part in name for part in wanted):
            continue
        for fault in (AS_WRITTEN, *project.faults):
            if (name, fault) in known:
                continue
            if arguments.beside == "nothing":
                wait_until_quiet(PATIENCE_S)
            others = Others()
            with programs_beside(arguments.beside):
                row = _case(project, fault, arguments)
            done.append(row | {"others_pct": others.took_pct()})
            print(_line(done[-1]), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(done, indent=1))
    return _summarise(done)


def _case(project: Project, fault: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is printed of a project with a fault, and what comes of the first remedy."""
    row: dict[str, Any] = {"project": project.name, "fault": fault, "remedies": [], "judged": None, "reason": ""}
    with tempfile.TemporaryDirectory() as scratch:
        before = _planted(project, fault, Path(scratch) / "before" / project.name)
        told = _run(project, before, arguments, feed=True)
        report = told.ranks[0]["report"] if told.fine else None
        if report is None:
            return row | {"judged": "harmful", "reason": "no report: " + told.printed[-500:]}
        row |= {"cause": f"{report['bottleneck']}: {report['cause']}", "reported_ms": report["step_ms"]}
        row["remedies"] = report["remedies"]
        if not report["remedies"]:
            return row
        remedy = SimpleNamespace(**report["remedies"][0])
        after = _planted(project, fault, Path(scratch) / "after" / project.name)
        try:
            overrides = apply(remedy, after[0], project.program)
        except CannotApply as reason:
            return row | {"judged": "harmful", "reason": f"cannot be pasted: {reason}"}
        return row | _judged(project, remedy, before, (after[0], [*after[1], *overrides]), arguments, report["step_ms"])


def _planted(project: Project, fault: str, folder: Path) -> tuple[Path, list[str]]:
    """A copy of the project with the fault in it, and what to append to its command line."""
    folder.parent.mkdir()
    copy_of(project, folder)
    overrides: list[str] = []
    if fault != AS_WRITTEN:
        forms, codes = (part.split("; ") for part in project.faults[fault])
        for form, code in zip(forms, codes, strict=True):
            overrides += apply(SimpleNamespace(form=form, code=code, where=""), folder, project.program)
    return folder, overrides


def _run(project: Project, at: tuple[Path, list[str]], arguments: argparse.Namespace, *, feed: bool = False) -> Outcome:
    size = "quick" if arguments.quick else "full"
    return run(project, at[0], feed=feed, steps=arguments.steps, size=size, overrides=at[1])


def _judged(
    project: Project, remedy: Any, before: Any, after: Any, arguments: argparse.Namespace, reported_ms: float
) -> dict[str, Any]:
    """The project without the remedy and with it, in turns."""
    without: list[float] = []
    with_it: list[float] = []
    noise, apart = 0.0, 0.0
    while len(without) < arguments.rounds or (apart <= noise and len(without) < MOST_ROUNDS):
        pair = [_run(project, at, arguments) for at in (before, after)]
        found = differences(project, *pair, any_order=project.reshuffles or "in_order=False" in remedy.code)
        found += not_done(remedy, pair[1])
        if found:
            return {"judged": "harmful", "reason": "; ".join(found)[-500:]}
        for times, outcome in zip((without, with_it), pair, strict=True):
            times.append(outcome.step_ms())
        noise, apart = noise_ms(without, with_it), abs(median(without) - median(with_it))
    was, became = median(without), median(with_it)
    expected = None
    if remedy.predicted_step_ms is not None:  # of the steps alone: here validation and first batches count, too
        expected = was - max(0.0, reported_ms - remedy.predicted_step_ms)
    elif remedy.predicted_gain_pct is not None:
        expected = was * (1 - remedy.predicted_gain_pct / 100)
    judged = "useless" if became > was - noise else "right"
    if judged == "right" and expected is not None and became > CLOSE * expected:
        judged = "less than predicted"
    if became > was + noise:
        judged = "harmful"
    figures = {"before_ms": without, "after_ms": with_it, "expected_ms": expected, "noise_ms": noise}
    return {"judged": judged, "reason": "slower" if judged == "harmful" else "", **figures}


def noise_ms(without: list[float], with_it: list[float]) -> float:
    """What two sides of the same rounds may be apart by chance."""
    gains = [one - other for one, other in zip(without, with_it, strict=True)]
    error = T_95[min(len(gains), MOST_ROUNDS)] * stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else 0.0
    return max(LEAST_NOISE * median(without), error)


def _line(row: dict[str, Any]) -> str:
    """A row of the table."""
    first = row["remedies"][0] if row["remedies"] else None
    cells = [row["project"], row["fault"], row.get("cause", ""), f"`{first['code']}`" if first else "none"]
    for key in ("before_ms", "expected_ms", "after_ms"):
        value = row.get(key)
        if isinstance(value, list):
            cells.append(f"{median(value):.1f} [{min(value):.1f}, {max(value):.1f}]")
        else:
            cells.append("" if value is None else f"{value:.1f}")
    judged = row["judged"] or ""
    cells.append(f"{judged}: {row['reason'].splitlines()[-1]}" if row["reason"] else judged)
    return "| " + " | ".join(cells) + " |"


def _summarise(rows: list[dict[str, Any]]) -> int:
    """Print table and counts. Returns the exit code."""
    print("\n| project | fault | limited by | first remedy | step before, ms | predicted | with it | |")
    print("|---|---|---|---|---:|---:|---:|---|")
    for row in rows:
        print(_line(row))
    counts = Counter(row["judged"] for row in rows if row["judged"])
    printed, judged = sum(len(row["remedies"]) for row in rows), sum(counts.values())
    by_kind = ", ".join(f"{kind} {counts[kind]}" for kind in JUDGEMENTS)
    disturbed = sum(row["others_pct"] > QUIET_PCT for row in rows)
    print(
        f"\n{len(rows)} cases, {printed} remedies printed, {judged} of them first and applied: {by_kind}; "
        f"others disturbed {disturbed} cases"
    )
    return 0 if not counts["harmful"] and counts["right"] >= 0.9 * judged else 1


if __name__ == "__main__":
    raise SystemExit(main())
