"""Does the verdict name the fault? Plants one fault after the other in real fits, and compares.

Each scenario is a fit on two CPUs of this machine with real worker processes (or threads), whose verdict, bottleneck
and cause, is held against what was planted. The device is simulated: the step blocks for some milliseconds. A good run
has the label right in 95 % of the scenarios, and the same label in each repeat. Let nothing else run beside it: a fit
in which other processes took more than 12 % of the CPUs is repeated, `--patience` times at most, each after waiting
up to 20 s for them.

With `--beside` the fits run beside programs that compute. A label is then right, or the verdict names the other
programs ("batches are ready; other programs have the CPUs"), or says that it cannot tell, or is wrong. A good run has
none wrong.

    python benchmarks/verdicts.py [--repeat 3] [--only head,jitter] [--beside "1 program"] [--data DIR] [--json FILE]
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from verdict_fits import hush, run_fit, two_cpus
from verdict_quiet import BESIDE, QUIET_PCT, Others, programs_beside, wait_until_quiet
from verdict_scenarios import SCENARIOS
from verdict_work import calibrate, make_files

from lightning_feed.verdict.diagnosis import Diagnosis

GOAL_PCT = 95.0
PATIENCE_S = 20.0


def main() -> int:
    """Run the scenarios and print the tables. Exit code 1: fewer labels agree than should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="rounds through all scenarios")
    parser.add_argument("--only", default="", help="names or families, or parts of them, with commas between")
    parser.add_argument("--data", type=Path, help="folder on a disk for the files to read; default: temporary")
    parser.add_argument("--patience", type=int, default=3, help="repeats of a fit that others disturbed")
    parser.add_argument("--beside", choices=BESIDE, default="nothing", help="programs that compute beside each fit")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    wanted = [part for part in arguments.only.split(",") if part]
    names = [
        name
        for name, one in SCENARIOS.items()
        if not wanted or any(part in name or part in one.family for part in wanted)
    ]
    hush()
    calibrate()
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{len(names)} scenarios, {arguments.repeat} rounds\n",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    quiet = arguments.beside == "nothing"
    with tempfile.TemporaryDirectory(dir=arguments.data) as files, programs_beside(arguments.beside):
        make_files(Path(files))
        began = time.monotonic()
        print("| scenario | expected | found | starved, % | confidence | agrees | s | others, % |")
        print("|---|---|---|---:|---|---|---:|---:|")
        for number in range(arguments.repeat):
            for name in names:
                rows.append(_run(name, Path(files), number, arguments.patience if quiet else -1))
                _show(rows[-1])
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(rows, indent=1))
        seconds = time.monotonic() - began
    agreed = _summarise(rows)
    disturbed = sum(row["others_pct"] > QUIET_PCT for row in rows)
    repeats = sum(row["repeats"] for row in rows)
    print(f"{seconds / arguments.repeat:.0f} s a round; {repeats} fits repeated, {disturbed} disturbed all the same")
    if quiet:
        return 0 if agreed >= GOAL_PCT else 1
    return int(any(not row["agrees"] and not row["instead"] for row in rows))


def _run(name: str, files: Path, number: int, patience: int) -> dict[str, Any]:
    if patience < 0:
        return _try(name, files, number)
    wait_until_quiet(PATIENCE_S)
    row = _try(name, files, number)
    for repeats in range(1, patience + 1):
        if row["others_pct"] <= QUIET_PCT:
            break
        wait_until_quiet(PATIENCE_S)
        row = _try(name, files, number) | {"repeats": repeats}
    return row


def _try(name: str, files: Path, number: int) -> dict[str, Any]:
    scenario, began, others = SCENARIOS[name], time.monotonic(), Others()
    diagnosis = run_fit(scenario, files)
    seconds, others_pct = time.monotonic() - began, others.took_pct()
    measured = diagnosis.measurements
    return {
        "scenario": name,
        "family": scenario.family,
        "round": number,
        "expected": "/".join(scenario.expect),
        "found": f"{diagnosis.bottleneck}/{diagnosis.cause}",
        "agrees": _agrees(diagnosis, scenario.expect),
        "instead": _instead(diagnosis),
        "confidence": diagnosis.confidence,
        "seconds": seconds,
        "others_pct": others_pct,
        "repeats": 0,
        "evidence": diagnosis.evidence,
        "starved_pct": measured.stats.starved_pct,
    }


def _agrees(found: Diagnosis, expect: tuple[str, str]) -> bool:
    """Of a model that takes the time, "batches are ready; other programs have the CPUs" is right, too."""
    return (found.bottleneck, found.cause) == expect or (expect[0] == "compute" and _instead(found) == "names others")


def _instead(found: Diagnosis) -> str:
    """What a verdict says instead of a cause, if it says so."""
    if found.bottleneck == "unknown":
        return "cannot tell"
    others = found.measurements.facts.crowded and (found.bottleneck, found.cause) == ("compute", "oversubscribed")
    return "names others" if others else ""


def _show(row: dict[str, Any]) -> None:
    starved = row["starved_pct"]
    label = "yes" if row["agrees"] else row["instead"] or "**no**"
    print(
        f"| {row['scenario']} | {row['expected']} | {row['found']} | {'' if starved is None else f'{starved:.0f}'} | "
        f"{row['confidence']} | {label} | {row['seconds']:.1f} | "
        f"{row['others_pct']:.0f} |",
        flush=True,
    )


def _summarise(rows: list[dict[str, Any]]) -> float:
    """Print what was taken for what. Returns the share that agrees, 0 to 100."""
    found: dict[str, Counter[str]] = {}
    labels: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["expected"], Counter())[row["found"]] += 1
        labels.setdefault(row["scenario"], set()).add(row["found"])
    print("\n| planted | runs | named | taken for |\n|---|---:|---:|---|")
    for expected, counts in found.items():
        others = ", ".join(f"{label} {count}" for label, count in counts.most_common() if label != expected)
        print(f"| {expected} | {counts.total()} | {counts[expected]} | {others} |")
    agreed = 100.0 * sum(bool(row["agrees"]) for row in rows) / max(1, len(rows))
    instead = Counter(row["instead"] or "wrong" for row in rows if not row["agrees"])
    steady = sum(len(each) == 1 for each in labels.values())
    print(
        f"\n{agreed:.1f} % agree (goal {GOAL_PCT:.0f}), {instead['names others']} name the other programs, "
        f"{instead['cannot tell']} cannot tell, {instead['wrong']} wrong; the same label in each round: {steady} of "
        f"{len(labels)}"
    )
    return agreed


if __name__ == "__main__":
    torch.set_num_threads(1)
    with two_cpus():
        raise SystemExit(main())
