"""Does the tuner choose workers with which steps are as short as with the best of the whole grid?

For each workload of ``tuning_workloads.py``, in one run:

1. the tuner, with nothing remembered;
2. the whole grid, workers x prefetch_factor, in a random order;
3. the three best of the grid, the tuner's choice and each usual rule in turns, ``--rounds`` times, by a clock of this
   script: real loaders, with a training step that is imitated between two batches. Only these figures are compared: the
   best of many noisy figures is noise, so the grid only says who takes part.

A row shows how much longer steps are than those of the best. The tuner has found it where they are 5 % longer at most.
``told`` is the step time that the tuner gave for its choice, against that of the final. All of it runs beside each
number of busy programs in ``--beside``.

    python benchmarks/tuning.py [--only NAME ...] [--seconds 0.8] [--rounds 3] [--budget 30] [--beside 0 1 3]
"""

import argparse
import math
import os
import platform
import random
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from lightning.fabric.utilities.data import suggested_max_num_workers
from threads import programs_beside
from torch.utils.data import DataLoader
from tuning_workloads import WORKLOADS, Workload

from lightning_feed.load.settings import Setting
from lightning_feed.machine.limits import read_machine
from lightning_feed.trials.training_work import ImitatedTraining, TrainingWork
from lightning_feed.trials.tune_loader import Goal, Tuned, tune_loader

FOUND_PCT = 5.0
TOLD_PCT = 15.0
CPUS = read_machine().usable_cpus
GRID_WORKERS = sorted({1, 2, 3, 4, 6, 8, 16, CPUS, 2 * CPUS})
GRID_PREFETCH = (2, 4, 8)
RULES = {
    "0": 0,
    "2": 2,
    "4": 4,
    "8": 8,
    "cores": CPUS,
    "cores - 1": CPUS - 1,
    "Lightning": suggested_max_num_workers(1),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long is measured, and how often."""

    seconds: float
    rounds: int
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one workload."""

    workload: Workload
    beside: int
    """Busy programs."""
    tuned: Tuned
    chosen: Setting
    tuner_s: float
    grid_s: float
    steps_ms: dict[Setting, float]
    """Of the final."""

    @property
    def best(self) -> Setting:
        return min(self.steps_ms, key=lambda setting: self.steps_ms[setting])

    def longer_pct(self, setting: Setting) -> float:
        """How much longer steps are with a setting than with the best."""
        return 100 * (self.steps_ms[setting] / self.steps_ms[self.best] - 1)

    @property
    def told_pct(self) -> float:
        """How much longer steps are than the tuner told; infinite if it told nothing."""
        if not self.tuned.step_s:
            return math.inf
        return 100 * (self.steps_ms[self.chosen] / (1e3 * self.tuned.step_s) - 1)


def with_workers(number: int, prefetch_factor: int = 2) -> Setting:
    if number == 0:
        return Setting(num_workers=0)
    return Setting(num_workers=number, prefetch_factor=prefetch_factor)


def grid() -> list[Setting]:
    return [with_workers(0), *(with_workers(number, ahead) for number in GRID_WORKERS for ahead in GRID_PREFETCH)]


def mean_step_ms(loader: DataLoader[Any], work: TrainingWork, seconds: float) -> float:
    """Mean time of a step, over whole rounds of the workers, after the first batch and two rounds."""
    training = ImitatedTraining(work)
    burst = max(1, loader.num_workers)
    counted = -2 * burst
    began_s = 0.0
    for _ in loader:
        now_s = time.perf_counter()
        if counted <= 0:
            began_s = now_s
        whole_rounds = counted >= 2 * burst and counted % burst == 0
        if whole_rounds and now_s - began_s >= seconds:
            return 1e3 * (now_s - began_s) / counted
        training.train()
        counted += 1
    raise SystemExit("A dataset is too short for this: shorten --seconds.")


def in_turns(
    workload: Workload, dataset: Any, settings: list[Setting], plan: Plan, rounds: int
) -> dict[Setting, float]:
    """The median step of each setting over the rounds, each of which has another order."""
    steps_ms: dict[Setting, list[float]] = {setting: [] for setting in settings}
    order = random.Random(0)
    for _ in range(rounds):
        turn = list(steps_ms)
        order.shuffle(turn)
        for setting in turn:
            loader = workload.loader(dataset, setting)
            steps_ms[setting].append(mean_step_ms(loader, workload.work, plan.seconds))
    return {setting: statistics.median(measured) for setting, measured in steps_ms.items()}


def run(workload: Workload, plan: Plan, beside: int) -> Outcome:
    """Tune one workload, measure the grid, and compare, beside busy programs."""
    dataset = workload.make()
    began_s = time.perf_counter()
    goal = Goal(work=workload.work, budget_s=plan.budget_s)
    tuned = tune_loader(workload.loader(dataset, with_workers(0)), goal)
    tuner_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    swept = in_turns(workload, dataset, grid(), plan, rounds=1)
    grid_s = time.perf_counter() - began_s
    finalists = sorted(swept, key=lambda setting: swept[setting])[:3]
    chosen = with_workers(tuned.setting.num_workers, tuned.setting.prefetch_factor or 2)
    settings = [*finalists, chosen, *(with_workers(number) for number in RULES.values())]
    return Outcome(
        workload=workload,
        beside=beside,
        tuned=tuned,
        chosen=chosen,
        tuner_s=tuner_s,
        grid_s=grid_s,
        steps_ms=in_turns(workload, dataset, settings, plan, plan.rounds),
    )


def table(outcomes: list[Outcome]) -> str:
    """The results as Markdown."""
    heads = ["workload", "beside", "step alone, ms", "best", "step, ms", "tuner", "longer", "told", "tuner / grid"]
    heads += RULES
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for outcome in outcomes:
        cells = [
            outcome.workload.name,
            str(outcome.beside),
            f"{1e3 * outcome.workload.work.step_s:.3g}",
            in_short(outcome.best),
            f"{outcome.steps_ms[outcome.best]:.3g}",
            in_short(outcome.chosen),
            f"{outcome.longer_pct(outcome.chosen):.0f} %",
            f"{outcome.told_pct:+.0f} %",
            f"{outcome.tuner_s:.1f} s / {outcome.grid_s:.0f} s",
            *(f"{outcome.longer_pct(with_workers(number)):.0f} %" for number in RULES.values()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    found = sum(outcome.longer_pct(outcome.chosen) <= FOUND_PCT for outcome in outcomes)
    told = sum(abs(outcome.told_pct) <= TOLD_PCT for outcome in outcomes)
    cost_pct = 100 * sum(outcome.tuner_s for outcome in outcomes) / sum(outcome.grid_s for outcome in outcomes)
    most_trials = max(len(outcome.tuned.trials) for outcome in outcomes)
    lines += [
        "",
        f"At most {FOUND_PCT:.0f} % longer than the best in {found} of {len(outcomes)}, the step told within "
        f"{TOLD_PCT:.0f} % in {told}; the tuner took {cost_pct:.0f} % of the grid's time, and tried {most_trials} "
        "settings at most.",
        "",
        f"{CPUS} CPUs ({platform.processor() or platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f} at the end.",
    ]
    return "\n".join(lines)


def in_short(setting: Setting) -> str:
    if not setting.num_workers:
        return "0"
    return f"{setting.num_workers} x {setting.prefetch_factor}"


def main() -> None:
    """Run the workloads, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these workloads alone")
    parser.add_argument("--seconds", type=float, default=0.8, help="measured per setting, at least")
    parser.add_argument("--rounds", type=int, default=3, help="turns of the final")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds that the tuner may take")
    parser.add_argument("--beside", nargs="+", type=int, default=[0], help="numbers of busy programs to run beside")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # tried on purpose
    plan = Plan(seconds=options.seconds, rounds=options.rounds, budget_s=options.budget)
    outcomes = []
    workloads = [workload for workload in WORKLOADS if workload.name in options.only]
    for workload, beside in product(workloads, options.beside):
        with programs_beside(beside):
            outcomes.append(run(workload, plan, beside))
        print(f"{workload.name} beside {beside}: {outcomes[-1].tuned}", file=sys.stderr, flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    main()
