"""Cost of the callbacks for the host: microseconds a step, on a model so small that nothing hides them.

Fits with and without a callback take turns, so that a machine that gets slower does so for all. Each round gives a
difference to the fit beside it; shown are the median over the rounds and [least, most], by the CPU time of the training
thread and by the wall. What counts is the difference of the least CPU times of all rounds: other programs only add.

* ``an empty callback``  over a plain fit: what Lightning takes to call any callback at all
* ``GPUStarvationCallback``  over an empty one, with windows logged every 50 steps to a logger that drops them; goal
  <= 30 us of CPU time
* ``PrefetchCallback``  over an empty one, with a stream that does nothing, so that the whole injection runs on the CPU;
  goal <= 60 us of CPU time
* ``FeedLoader``  over torch's DataLoader, a batch of two small samples in the training process, with all that a data
  module sets: seeded order, counting, the watchdog; goal <= 15 us of CPU time

On a CUDA device the first rows are measured there too, events and streams included.

A round that would not end within ``--seconds`` is left out; the first one always runs. Starting takes a few more.

    python benchmarks/overhead.py [--seconds 40] [--rounds 10] [--steps 500] [--device cpu|cuda] [--json FILE]
"""

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feed import GPUStarvationCallback, PrefetchCallback
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.watchdog import Watch
from lightning_feed.transfer.prefetcher import SideStream

WARM_UP = 100
GOALS_US = {"GPUStarvationCallback": 30.0, "PrefetchCallback": 60.0, "FeedLoader": 15.0}


class Tiny(LightningModule):
    """Takes the thread's CPU time and the wall time at the start of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.stamps: list[tuple[int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.stamps.append((time.thread_time_ns(), time.perf_counter_ns()))
        loss: Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Batches:
    """The same host batch, as often as asked for: loading costs nothing."""

    def __init__(self, steps: int, device: str) -> None:
        batch = torch.ones(2, 4)
        self.batch, self.steps = batch.pin_memory() if device == "cuda" else batch, steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        return iter([self.batch] * self.steps)


class Drop(Logger):
    """A logger that drops what it gets."""

    name = "drop"
    version = 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class NullPrefetch(PrefetchCallback):
    """The injection without a stream to copy on, where the device has none."""

    def open_stream(self, device: torch.device) -> SideStream:
        return super().open_stream(device) or SideStream()


PLAIN, EMPTY = "plain", "an empty callback"
ROWS: dict[str, Callable[[], list[Callback]]] = {
    PLAIN: list,
    EMPTY: lambda: [Callback()],
    "GPUStarvationCallback": lambda: [GPUStarvationCallback(report=False)],
    "PrefetchCallback": lambda: [NullPrefetch()],
    "both": lambda: [NullPrefetch(), GPUStarvationCallback(report=False)],
}


def step_us(callbacks: list[Callback], steps: int, device: str) -> tuple[float, float]:
    """Mean CPU and wall time between the starts of two steps, windows and logging included."""
    model = Tiny()
    trainer = Trainer(
        accelerator=device,
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=Drop(),
        log_every_n_steps=50,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    gc.collect()
    gc.disable()
    try:
        trainer.fit(model, Batches(steps + WARM_UP, device))
    finally:
        gc.enable()
    first, last, count = model.stamps[WARM_UP], model.stamps[-1], len(model.stamps) - 1 - WARM_UP
    return (last[0] - first[0]) / count / 1e3, (last[1] - first[1]) / count / 1e3


def feed_loader(dataset: Any) -> FeedLoader:
    """A loader as FastDataModule builds it, without workers."""
    order = EpochOrder(seed=1, epoch=lambda: 0)
    return FeedLoader(dataset, batch_size=2, shuffle=True, order=order, watch=Watch("train", 60.0))


LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "DataLoader": lambda dataset: DataLoader(dataset, batch_size=2, shuffle=True),
    "FeedLoader": feed_loader,
}


def batch_us(make: Callable[[Any], DataLoader[Any]], batches: int) -> tuple[float, float]:
    """Mean CPU and wall time of a batch, without the first ones."""
    loader = iter(make(torch.utils.data.TensorDataset(torch.ones(2 * (batches + WARM_UP), 4))))
    for _ in range(WARM_UP):
        next(loader)
    gc.collect()
    gc.disable()
    cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
    for _ in range(batches):
        next(loader)
    found = (time.thread_time_ns() - cpu) / batches / 1e3, (time.perf_counter_ns() - wall) / batches / 1e3
    gc.enable()
    return found


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):+8.1f} [{min(values):+7.1f}, {max(values):+7.1f}]"


def measure(rounds: int, steps: int, seconds: float, device: str) -> dict[str, list[tuple[float, float]]]:
    """Mean CPU and wall time of a step, for each row and round."""
    found: dict[str, list[tuple[float, float]]] = {row: [] for row in (*ROWS, *LOADERS)}
    began_s = time.monotonic()
    step_us([], 100, device)  # what the first fit of a process pays
    longest_s = 0.0
    for done in range(rounds):
        round_began_s = time.monotonic()
        if done and round_began_s + longest_s > began_s + seconds:
            break
        for row, make in ROWS.items():
            found[row].append(step_us(make(), steps, device))
        for row, loader in LOADERS.items():
            found[row].append(batch_us(loader, steps))
        longest_s = max(longest_s, time.monotonic() - round_began_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="for all rounds together")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--steps", type=int, default=500, help="of each fit, behind 100 that do not count")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_feed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(
        f"{where}, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}"
    )
    rounds = measure(options.rounds, options.steps, options.seconds, options.device)
    print(f"{len(rounds[PLAIN])} rounds of {options.steps} steps")
    print(f"{'':24} {'least CPU':>9} {'CPU time, us':>28} {'wall, us':>28}")
    plain, rows = [cpu for cpu, _ in rounds[PLAIN]], []
    print(f"{'plain step':24} {min(plain):9.1f} {spread(plain)} {spread([us for _, us in rounds[PLAIN]])}")
    over = {row: PLAIN if row == EMPTY else EMPTY for row in ROWS if row != PLAIN}
    for row, beside in {**over, "FeedLoader": "DataLoader"}.items():
        pairs = list(zip(rounds[row], rounds[beside], strict=True))
        cpu, wall = ([with_it[at] - without[at] for with_it, without in pairs] for at in (0, 1))
        least = min(rounds[row])[0] - min(rounds[beside])[0]
        goal = GOALS_US.get(row)
        verdict = "" if goal is None else f"  goal <= {goal:.0f} us: {'met' if least <= goal else 'MISSED'}"
        print(f"{row:24} {least:+9.1f} {spread(cpu)} {spread(wall)}{verdict}")
        rows.append(
            {
                "callbacks": row,
                "over": beside,
                "least_us": least,
                "added_cpu_us": cpu,
                "added_us": wall,
                "goal_us": goal,
            }
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"plain": rounds[PLAIN], "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
