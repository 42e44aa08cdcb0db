"""Does a remedy give what was predicted? Diagnoses, takes the remedy, trains again, and compares the step times.

Each workload is diagnosed by experiment (``lightning_feed.diagnose``), then trained with and without the remedy in
turns, on two CPUs of this machine. Predicted is the remedy's ``predicted_step_ms``, achieved the mean step of the
run with it, as ``lightning-feed compare`` holds them against each other. The table has medians over the rounds. The
device is simulated where it says so: the step waits without CPU. A good run is within 10 % in every row. Let nothing
else run beside it: a round in which other processes took more than 12 % of the CPUs is repeated. With `--beside`
programs compute beside all three fits; a good run is then within 15 % in nine rows of ten.

    python benchmarks/predictions.py [--rounds 3] [--only "decode;blocking"] [--budget 30] [--beside "1 program"]
        [--data DIR] [--json FILE]
"""

import argparse
import json
import os
import platform
import tempfile
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer
from prediction_workloads import Data, Workload, make_workloads
from verdict_fits import hush, two_cpus
from verdict_quiet import BESIDE, QUIET_PCT, Others, programs_beside, wait_until_quiet

from lightning_feed import GPUStarvationCallback, diagnose
from lightning_feed.report.compare import compare
from lightning_feed.report.document import make_report
from lightning_feed.verdict.diagnosis import Diagnosis, Remedy

GOAL_PCT, GOAL_BESIDE_PCT = 10.0, 15.0
PATIENCE_S = 20.0
STEPS = 150
"""Of a run with or without the remedy; at least this many, warm-up included."""


def main() -> int:
    """Run the workloads and print the table. Exit code 1: a prediction is further off than it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of names, with semicolons between")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of each diagnosis")
    parser.add_argument("--data", type=Path, help="folder on a disk for the files to read; default: temporary")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory")
    parser.add_argument("--patience", type=int, default=2, help="repeats of a round that others disturbed")
    parser.add_argument("--beside", choices=BESIDE, default="nothing", help="programs that compute beside each fit")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    quiet = arguments.beside == "nothing"
    hush()
    print(
        f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{arguments.rounds} rounds\n",
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(dir=arguments.data) as folder,
        tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        warnings.catch_warnings(),
        programs_beside(arguments.beside),
    ):
        warnings.simplefilter("ignore")  # of few workers, of no validation: that is what is measured here
        workloads = make_workloads(Path(folder), Path(memory))
        wanted = [part for part in arguments.only.split(";") if part]
        chosen = {
            name: one
            for name, one in workloads.items()
            if not wanted or any(p in name or p in one.remedy for p in wanted)
        }
        for number in range(arguments.rounds):
            for name, workload in chosen.items():
                for _ in range(1 + arguments.patience if quiet else 1):
                    if quiet:
                        wait_until_quiet(PATIENCE_S)
                    row = _round(name, workload, arguments.budget)
                    if row["others_pct"] <= QUIET_PCT:
                        break
                rows.append(row | {"round": number})
                print(f"round {number} {_line(rows[-1])}", flush=True)
                if arguments.json is not None:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    return _summarise(rows, GOAL_PCT if quiet else GOAL_BESIDE_PCT, least=1.0 if quiet else 0.9)


def _round(name: str, workload: Workload, budget_s: float) -> dict[str, Any]:
    """One diagnosis, then a run without and one with its remedy."""
    others = Others()
    workload.between()
    found = diagnose(_trainer(), workload.model(), workload.before(), budget_s=budget_s)
    row: dict[str, Any] = {"workload": name, "remedy": workload.remedy, "diagnosed_ms": found.stats.step_ms}
    row |= {"cause": found.cause, "changes": None, "predicted_ms": None, "achieved_ms": None, "error_pct": None}
    row["remedies"] = [(one.changes, one.predicted_step_ms) for one in found.remedies]
    remedy = next((one for one in found.remedies if one.changes.startswith(workload.changes)), None)
    workload.between()
    before = _fit(workload, workload.before())
    if remedy is not None:
        row |= _check(found, remedy, _fit(workload, workload.after(remedy)))
    return row | {"before_ms": before.stats.step_ms, "others_pct": others.took_pct()}


def _check(found: Diagnosis, remedy: Remedy, after: Diagnosis) -> dict[str, Any]:
    predicted, achieved = remedy.predicted_step_ms, after.stats.step_ms
    made = {"changes": remedy.changes, "predicted_ms": predicted, "achieved_ms": achieved}
    if predicted is None or achieved is None:
        return made
    checks = compare(make_report(found), make_report(after)).predictions
    told = next((one for one in checks if one.changes == remedy.changes), None)
    made["error_pct"] = 100 * (predicted - achieved) / achieved
    if told is not None and told.error_pct is not None and abs(told.error_pct - made["error_pct"]) > 1e-6:
        raise RuntimeError(f"the comparison of the reports says {told.error_pct} %")
    return made


def _fit(workload: Workload, data: Data) -> Diagnosis:
    """A run as a user's, and what its callback reports."""
    starvation = GPUStarvationCallback(nvml=False, report=False)
    _trainer([starvation], STEPS).fit(workload.model(), datamodule=data)
    return starvation.report()


def _trainer(callbacks: list[Any] | None = None, steps: int = -1) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _line(row: dict[str, Any]) -> str:
    cells = [row["workload"], row["changes"] or f"none of {row['remedies']}"]
    for key in ("diagnosed_ms", "before_ms", "predicted_ms", "achieved_ms", "error_pct", "others_pct"):
        cells.append("" if row[key] is None else f"{row[key]:.1f}")
    return "| " + " | ".join(cells) + " |"


def _summarise(rows: list[dict[str, Any]], goal_pct: float, *, least: float) -> int:
    """Print the table. Returns the exit code: 0 where at least a share ``least`` of the predictions is that near."""
    print("\n| workload | remedy | step before, ms | predicted, ms | achieved, ms | error, % | of each round |")
    print("|---|---|---:|---:|---:|---:|---|")
    within, predicted_rows, names = 0, 0, list(dict.fromkeys(row["workload"] for row in rows))
    for name in names:
        mine = [row for row in rows if row["workload"] == name and row["error_pct"] is not None]
        if not mine:
            print(f"| {name} | not offered | | | | | |")
            continue
        changes = ", ".join(dict.fromkeys(row["changes"] for row in mine))
        before, predicted, achieved = (
            median(row[key] for row in mine) for key in ("before_ms", "predicted_ms", "achieved_ms")
        )
        error = median(row["error_pct"] for row in mine)
        predicted_rows += 1
        within += abs(error) <= goal_pct
        each = ", ".join(f"{row['error_pct']:+.0f}" for row in mine)
        print(
            f"| {name} | {mine[0]['remedy']}: `{changes}` | {before:.1f} | {predicted:.1f} | {achieved:.1f} | "
            f"{error:+.1f} | {each} |"
        )
    disturbed = sum(row["others_pct"] > QUIET_PCT for row in rows)
    print(f"\n{within} of {predicted_rows} within {goal_pct:.0f} %; others disturbed {disturbed} of {len(rows)} rounds")
    whole = len(names) if least == 1.0 else predicted_rows
    return 0 if within >= least * whole else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    with two_cpus():
        raise SystemExit(main())
