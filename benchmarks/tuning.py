"""Does the tuner find what an exhaustive search finds, and for how much less time? And what do the usual rules find?

Seven workloads (``tuning_workloads.py``). For each, in this order and in one run:

1. the tuner, nothing remembered. Its trials measure for an eighth of ``--budget``, two seconds at most: by default
   1.25 s, so that the whole stays within minutes; with the 30 s that users get, 2 s;
2. the whole grid, workers x prefetch_factor (and threads where the loader has them), in a random order;
3. the three best of the grid, the tuner's choice, and each rule's, in turns, ``--rounds`` times. These are the figures
   that are compared: the best of many noisy figures is noise, so the grid only says who is in the final.

A rate is measured over whole rounds of the workers, for at least ``--seconds`` and two rounds, after a warm-up of two
(``load/throughput.py``), the same for the grid and for the final. With a demand (a training step of so many ms) more
than that is worth nothing, and a loader without workers takes turns with the training. Shown is what each gets of the
best; ``cost`` is the tuner's time over that of the grid. ``hit``: 95 % of the best, or more.

    python benchmarks/tuning.py [--only NAME ...] [--seconds 0.8] [--rounds 2]
                                [--budget 10]
"""

import argparse
import os
import platform
import random
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import suggested_max_num_workers
from tuning_workloads import WORKLOADS, Workload

from lightning_feed.errors import FeedError
from lightning_feed.load.machine import read_machine
from lightning_feed.trials.cloning import RoundLimits, burst_of, time_loader
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting
from lightning_feed.trials.tune_loader import tune_loader

HIT = 0.95
COST = 0.15
CPUS = read_machine().usable_cpus
RULES = {
    "0": 0,
    "2": 2,
    "4": 4,
    "8": 8,
    "cores": CPUS,
    "cores - 1": CPUS - 1,
    "cores - 2": CPUS - 2,
    "Lightning": suggested_max_num_workers(1),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is tried, and how long."""

    seconds: float
    rounds: int
    workers: tuple[int, ...]
    prefetch: tuple[int, ...]
    budget_s: float

    def settings(self, workload: Workload) -> list[Setting]:
        """The grid of a workload."""
        found = [Setting(num_workers=0, prefetch_factor=None)]
        for count in self.workers:
            found += [Setting(num_workers=count, prefetch_factor=ahead) for ahead in self.prefetch if count]
            if count and workload.ours:
                found.append(Setting(num_workers=count, prefetch_factor=2, workers="thread"))
        return found


@dataclass
class Outcome:
    """What came of one workload."""

    workload: Workload
    tuned: Tuned
    tuner_s: float
    sweep_s: float
    best: Setting
    """Of all in the final."""
    rates: dict[Setting, float]
    """Of the final, by setting: batches per second that training gets."""
    rules: dict[str, Setting]

    def share(self, setting: Setting) -> float:
        """Of the best, 0 to 1."""
        return self.rates.get(setting, 0.0) / self.rates[self.best]


def given(rate: float, setting: Setting, workload: Workload) -> float:
    """What training gets of a loader's batches per second."""
    if (demand := workload.demand_per_s) is None:
        return rate
    return min(demand, rate) if setting.num_workers else 1 / (1 / rate + 1 / demand)


def measure(workload: Workload, dataset: Any, setting: Setting, seconds: float) -> float:
    """Batches per second of a loader; 0 where it cannot run."""
    loader = workload.loader(dataset, setting)
    limits = RoundLimits(min_s=seconds, max_s=20)
    try:
        return time_loader(lambda: iter(loader), burst=burst_of(loader), limits=limits).batches_per_s
    except (FeedError, RuntimeError, OSError) as error:
        print(f"{workload.name}: {setting} cannot run: {error}", file=sys.stderr)
        return 0.0


def in_turns(
    workload: Workload, dataset: Any, settings: Sequence[Setting], plan: Plan, rounds: int
) -> dict[Setting, float]:
    """The median over rounds, each round in another order."""
    seen: dict[Setting, list[float]] = {setting: [] for setting in settings}
    order = random.Random(0)
    for _ in range(rounds):
        turn = list(seen)
        order.shuffle(turn)
        for setting in turn:
            rate = measure(workload, dataset, setting, plan.seconds)
            seen[setting].append(given(rate, setting, workload) if rate else 0.0)
    return {setting: statistics.median(rates) for setting, rates in seen.items()}


def run(workload: Workload, plan: Plan) -> Outcome:
    """One workload."""
    dataset = workload.make()
    began = time.perf_counter()
    tuned = run_tuner(workload, dataset, plan)
    tuner_s = time.perf_counter() - began
    began = time.perf_counter()
    grid = in_turns(workload, dataset, plan.settings(workload), plan, 1)
    sweep_s = time.perf_counter() - began
    finalists = sorted(grid, key=lambda one: -grid[one])[:3]
    rules = {name: _plain(workers) for name, workers in RULES.items() if workers >= 0}
    chosen = _bare(tuned.setting)
    candidates = [*finalists, chosen, *rules.values()]
    rates = in_turns(workload, dataset, list(dict.fromkeys(candidates)), plan, plan.rounds)
    return Outcome(
        workload=workload,
        tuned=tuned,
        tuner_s=tuner_s,
        sweep_s=sweep_s,
        best=max(rates, key=lambda one: rates[one]),
        rates=rates,
        rules=rules,
    )


def _plain(workers: int) -> Setting:
    """What one gets who sets num_workers alone."""
    return Setting(num_workers=workers, prefetch_factor=2 if workers else None)


def _bare(setting: Setting) -> Setting:
    """Without what does not change the rate of a loader that is drained on the CPU."""
    return Setting(
        num_workers=setting.num_workers,
        prefetch_factor=setting.prefetch_factor,
        workers=setting.workers if setting.num_workers else "process",
        in_order=setting.in_order,
    )


def run_tuner(workload: Workload, dataset: Any, plan: Plan) -> Tuned:
    """What ours finds."""
    goal = Goal(demand_per_s=workload.demand_per_s, budget_s=plan.budget_s)
    return tune_loader(workload.loader(dataset), goal)


def table(outcomes: list[Outcome]) -> str:
    """Markdown."""
    names = list(next(iter(outcomes)).rules)
    head = ["workload", "best", "tuner", "of the best", "hit", "tuner / grid", "cost", *names]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for one in outcomes:
        batches = f"{one.rates[one.best]:,.1f}/s"
        demand = one.workload.demand_per_s
        wanted = f" of {demand:,.0f} wanted" if demand is not None else ""
        share = one.share(_bare(one.tuned.setting))
        cells = [
            one.workload.name,
            f"{_short(one.best)}: {batches}{wanted}",
            _short(one.tuned.setting),
            f"{share:.0%}",
            "yes" if share >= HIT else "no",
            f"{one.tuner_s:.1f} s / {one.sweep_s:.0f} s",
            f"{one.tuner_s / one.sweep_s:.0%}",
            *(f"{one.share(one.rules[name]):.0%}" for name in names),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    hits = sum(one.share(_bare(one.tuned.setting)) >= HIT for one in outcomes)
    cost = sum(one.tuner_s for one in outcomes) / sum(one.sweep_s for one in outcomes)
    lines += [
        "",
        f"At least {HIT:.0%} of the best in {hits} of {len(outcomes)}; the tuner's time is {cost:.0%} of the grid's "
        f"in all (goal: {COST:.0%}), {max(len(one.tuned.trials) for one in outcomes)} trials at most.",
        "",
        f"{CPUS} CPUs ({platform.processor() or platform.machine()}), Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {os.getloadavg()[0]:.1f} at the end.",
    ]
    return "\n".join(lines)


def _short(setting: Setting) -> str:
    if not setting.num_workers:
        return "0"
    kind = "t" if setting.workers == "thread" else ""
    return f"{setting.num_workers}{kind} x {setting.prefetch_factor}" + ("" if setting.in_order else ", any order")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=[one.name for one in WORKLOADS], help="these workloads alone")
    parser.add_argument("--seconds", type=float, default=0.8, help="measured per setting, at least")
    parser.add_argument("--rounds", type=int, default=2, help="turns of the final")
    parser.add_argument("--budget", type=float, default=10.0, help="seconds that the tuner may take")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # tried on purpose
    warnings.filterwarnings("ignore", message="This process .* is multi-threaded")
    plan = Plan(
        seconds=asked.seconds,
        rounds=asked.rounds,
        workers=tuple(sorted({1, 2, 3, 4, 6, 8, 16, CPUS, 2 * CPUS})),
        prefetch=(1, 2, 4, 8),
        budget_s=asked.budget,
    )
    outcomes = []
    for workload in WORKLOADS:
        if asked.only and workload.name not in asked.only:
            continue
        began = time.perf_counter()
        outcomes.append(run(workload, plan))
        print(f"{workload.name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(table(outcomes))


if __name__ == "__main__":
    main()
