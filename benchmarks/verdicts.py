"""Does the verdict name the fault? Plants one fault after the other in real fits, and compares.

Each scenario is a fit on two CPUs of this machine with real worker processes (or threads), whose verdict, bottleneck
and cause, is held against what was planted. The device is simulated: the step blocks for some milliseconds. A good run
has the label right in 95 % of the scenarios, and the same label in each repeat. Let nothing else run beside it: a fit
in which other processes took more than 12 % of the CPUs is repeated, `--patience` times at most, each after waiting
up to 20 s for them.

    python benchmarks/verdicts.py [--repeat 3] [--only head,jitter] [--data DIR]
"""

import argparse
import os
import platform
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from verdict_fits import hush, run_fit, two_cpus
from verdict_quiet import QUIET_PCT, Others, wait_until_quiet
from verdict_scenarios import SCENARIOS
from verdict_work import calibrate, make_files

GOAL_PCT = 95.0
PATIENCE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fit."""

    name: str
    planted: str
    label: str
    confidence: str
    seconds: float
    others_pct: float

    @property
    def agrees(self) -> bool:
        return self.planted == self.label


def main() -> int:
    """Run the scenarios and print the tables. Exit code 1: fewer labels agree than should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="rounds through all scenarios")
    parser.add_argument("--only", default="", help="names or families, or parts of them, with commas between")
    parser.add_argument("--data", type=Path, help="folder on a disk for the files to read; default: temporary")
    parser.add_argument("--patience", type=int, default=3, help="repeats of a fit that others disturbed")
    options = parser.parse_args()
    wanted = options.only.split(",")
    names = [
        name for name, scenario in SCENARIOS.items() if any(part in name or part in scenario.family for part in wanted)
    ]
    hush()
    calibrate()
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{len(names)} scenarios, {options.repeat} rounds\n",
        flush=True,
    )
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.data) as files:
        make_files(Path(files))
        print("| scenario | planted | label | confidence | agrees | s | others, % |\n|---|---|---|---|---|---:|---:|")
        for _ in range(options.repeat):
            for name in names:
                row = run(name, Path(files), options.patience)
                agrees = "yes" if row.agrees else "**no**"
                print(
                    f"| {name} | {row.planted} | {row.label} | {row.confidence} | {agrees} | {row.seconds:.1f} | "
                    f"{row.others_pct:.0f} |",
                    flush=True,
                )
                rows.append(row)
    agreed_pct = summarise(rows)
    return 0 if agreed_pct >= GOAL_PCT else 1


def run(name: str, files: Path, patience: int) -> Row:
    """Run one scenario, again while others disturb it."""
    row = run_once(name, files)
    for _ in range(patience):
        if row.others_pct <= QUIET_PCT:
            break
        wait_until_quiet(PATIENCE_S)
        row = run_once(name, files)
    return row


def run_once(name: str, files: Path) -> Row:
    scenario = SCENARIOS[name]
    began_s = time.monotonic()
    others = Others()
    diagnosis = run_fit(scenario, files)
    return Row(
        name=name,
        planted="/".join(scenario.expect),
        label=f"{diagnosis.bottleneck}/{diagnosis.cause}",
        confidence=diagnosis.confidence,
        seconds=time.monotonic() - began_s,
        others_pct=others.took_pct(),
    )


def summarise(rows: list[Row]) -> float:
    """Print what was taken for what. Returns the share that agrees, 0 to 100."""
    labels: dict[str, Counter[str]] = {}
    by_name: dict[str, set[str]] = {}
    for row in rows:
        labels.setdefault(row.planted, Counter())[row.label] += 1
        by_name.setdefault(row.name, set()).add(row.label)
    print("\n| planted | runs | named | taken for |\n|---|---:|---:|---|")
    for planted, counts in labels.items():
        others = ", ".join(f"{label} {count}" for label, count in counts.most_common() if label != planted)
        print(f"| {planted} | {counts.total()} | {counts[planted]} | {others} |")
    agreed_pct = 100.0 * sum(row.agrees for row in rows) / max(1, len(rows))
    steady = sum(len(each) == 1 for each in by_name.values())
    disturbed = sum(row.others_pct > QUIET_PCT for row in rows)
    print(
        f"\n{agreed_pct:.1f} % agree (goal {GOAL_PCT:.0f}); the same label in each round: {steady} of {len(by_name)}; "
        f"{disturbed} fits disturbed by others"
    )
    return agreed_pct


if __name__ == "__main__":
    torch.set_num_threads(1)
    with two_cpus():
        raise SystemExit(main())
