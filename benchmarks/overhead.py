"""Cost of the callbacks for the host: microseconds a step, on steps of about a millisecond that nothing hides.

The model has as many small layers as make the host work for a millisecond in a step; a device needs less for them. A
round has one long fit of each row. The fits are in threads that take turns of 50 steps, one at a time: machines, and
virtual ones above all, change their speed by tens of per cent from one second to the next, and so they do it to all.
Each turn gives a difference to the turn of the fit beside it; shown are the median over all turns and [first, third
quartile], by the CPU time of the training thread and by the wall. The median of the CPU times is held against the goal.

* ``an empty callback``  over a plain fit: what Lightning takes to call any callback at all
* ``GPUStarvationCallback``  over an empty one, with windows logged every 50 steps to a logger that drops them
* ``PrefetchCallback``  over an empty one; on the CPU with a stream that does nothing, so that the whole injection runs
* ``both``  over an empty one; goal <= 60 us of CPU time
* ``FeedLoader``  over torch's DataLoader, a batch of two small samples in the training process, with all that a data
  module sets: seeded order, counting, the watchdog; goal <= 15 us of CPU time

On a CUDA device the first rows are measured there, events and streams included, and the calls of torch that the
callbacks make are timed one by one.

A round that would not end within ``--seconds`` is left out; the first one always runs. Starting takes a few more.

    python benchmarks/overhead.py [--seconds 60] [--rounds 10] [--steps 2000] [--device cpu|cuda] [--json FILE]
"""

import argparse
import gc
import json
import logging
import os
import platform
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
TURN = 50
"""Steps of a fit until the next one takes its turn. There is one window in them."""
STEP_US = 1000.0
"""Time of a plain step that the number of layers is chosen for."""
GOALS_US = {"both": 60.0, "FeedLoader": 15.0}


class Turns:
    """Lets fits in several threads take turns: one trains for some steps while the others wait.

    Args:
        count: number of fits.
    """

    def __init__(self, count: int) -> None:
        self._waiting = list(range(count))
        """The fits that are not over, the one whose turn it is first."""
        self._changed = threading.Condition()

    def wait(self, fit: int) -> None:
        """Wait for the turn of a fit."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting[0] == fit)

    def pass_on(self, fit: int) -> None:
        """End the turn of a fit, and wait for its next one."""
        with self._changed:
            self._waiting.append(self._waiting.pop(0))
            self._changed.notify_all()
        self.wait(fit)

    def leave(self) -> None:
        """End the turn of a fit that is over."""
        with self._changed:
            self._waiting.pop(0)
            self._changed.notify_all()


class Layers(LightningModule):
    """Takes the thread's CPU time and the wall time at the start and the end of each turn.

    Args:
        layers: number of small layers.
        turns: shared with the other fits.
        fit: number of this fit.
    """

    def __init__(self, layers: int, turns: Turns, fit: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))
        self.turns, self.fit = turns, fit
        self.blocks: list[tuple[float, float]] = []
        """Mean CPU and wall time of a step, in microseconds, for each turn."""
        self.began = (0, 0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx % TURN == 0:
            now = (time.thread_time_ns(), time.perf_counter_ns())
            if batch_idx:
                cpu_ns, wall_ns = now[0] - self.began[0], now[1] - self.began[1]
                self.blocks.append((cpu_ns / TURN / 1e3, wall_ns / TURN / 1e3))
            self.turns.pass_on(self.fit)
            self.began = (time.thread_time_ns(), time.perf_counter_ns())
        loss: Tensor = self.net(batch).sum()
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


def train(model: Layers, callbacks: list[Callback], steps: int, device: str) -> None:
    """Run one fit, with windows and logging, beginning when its turn comes."""
    model.turns.wait(model.fit)
    try:
        trainer = Trainer(
            accelerator=device,
            devices=1,
            max_epochs=1,
            callbacks=callbacks,
            logger=Drop(),
            log_every_n_steps=TURN,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, Batches(steps, device))
    finally:
        model.turns.leave()


def steps_us(rows: list[str], steps: int, device: str, layers: int) -> dict[str, list[tuple[float, float]]]:
    """Mean CPU and wall time of a step for each row and turn, without the first turns."""
    turns = Turns(len(rows))
    models = {row: Layers(layers, turns, fit) for fit, row in enumerate(rows)}
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(len(rows)) as threads:
            fits = [threads.submit(train, models[row], ROWS[row](), steps + 1, device) for row in rows]
            for fit in fits:
                fit.result()
    finally:
        gc.enable()
    return {row: model.blocks[WARM_UP // TURN :] for row, model in models.items()}


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


def layers_for(device: str) -> int:
    """The number of layers with which a plain step takes :data:`STEP_US`, or one if it takes longer anyway."""
    few_us, many_us = (
        statistics.median(cpu_us for cpu_us, _ in steps_us([PLAIN], 6 * TURN, device, layers)[PLAIN])
        for layers in (1, 21)
    )
    return 1 + max(0, round(20 * (STEP_US - few_us) / max(1.0, many_us - few_us)))


def spread(values: list[float]) -> str:
    """Median, and first and third quartile."""
    first, median, third = statistics.quantiles(values, n=4)
    return f"{median:+8.1f} [{first:+7.1f}, {third:+7.1f}]"


def measure(rounds: int, steps: int, seconds: float, device: str) -> dict[str, list[tuple[float, float]]]:
    """Mean CPU and wall time of a step or a batch, for each row and turn."""
    found: dict[str, list[tuple[float, float]]] = {row: [] for row in (*ROWS, *LOADERS)}
    began_s = time.monotonic()
    layers = layers_for(device)
    longest_s = 0.0
    for done in range(rounds):
        round_began_s = time.monotonic()
        if done and round_began_s + longest_s > began_s + seconds:
            break
        rows = list(ROWS)
        rows = [*rows[done % len(rows) :], *rows[: done % len(rows)]]
        for row, blocks in steps_us(rows, steps, device, layers).items():
            found[row] += blocks
        for _ in range(steps // 500):
            for row, loader in LOADERS.items():
                found[row].append(batch_us(loader, 500))
        longest_s = max(longest_s, time.monotonic() - round_began_s)
    return found


def calls_us(device: str, times: int = 2000) -> dict[str, float]:
    """CPU time of each call of torch that the callbacks make on a device in a steady step."""
    if device != "cuda":
        return {}
    side = torch.cuda.Stream()
    main_stream = torch.cuda.current_stream()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    last.record()
    last.synchronize()
    pinned = torch.ones(2, 4).pin_memory()
    tensor = pinned.to("cuda")

    def switch() -> None:
        with torch.cuda.stream(side):
            pass

    def enter() -> None:
        with side:  # only in newer versions of torch
            pass

    calls: dict[str, Callable[[], object]] = {
        "Event.record": first.record,
        "Event.query": last.query,
        "Event.elapsed_time": lambda: first.elapsed_time(last),
        "torch.cuda.current_stream": torch.cuda.current_stream,
        "with torch.cuda.stream": switch,
        "with Stream": enter,
        "Stream.wait_event": lambda: main_stream.wait_event(last),
        "Tensor.record_stream": lambda: tensor.record_stream(side),
        "Tensor.to, pinned": lambda: pinned.to("cuda", non_blocking=True),
        "time.perf_counter_ns": time.perf_counter_ns,
        "time.thread_time_ns": time.thread_time_ns,
    }
    found = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        rounds = []
        for _ in range(5):
            first.record()
            last.record()
            torch.cuda.synchronize()
            began = time.thread_time_ns()
            for _ in range(times // 5):
                call()
            rounds.append((time.thread_time_ns() - began) / (times // 5) / 1e3)
        found[name] = statistics.median(rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all rounds together")
    parser.add_argument("--rounds", type=int, default=10, help="at most")
    parser.add_argument("--steps", type=int, default=2000, help="of each fit, behind 100 that do not count")
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
    print(f"{len(rounds[PLAIN])} turns of {TURN} steps for each row")
    print(f"{'':24} {'CPU time, us':>28} {'wall, us':>28}")
    rows = []
    for row in (PLAIN, "DataLoader"):
        cpu, wall = ([figures[at] for figures in rounds[row]] for at in (0, 1))
        print(f"{row:24} {spread(cpu)} {spread(wall)}")
    over = {row: PLAIN if row == EMPTY else EMPTY for row in ROWS if row != PLAIN}
    for row, beside in {**over, "FeedLoader": "DataLoader"}.items():
        pairs = list(zip(rounds[row], rounds[beside], strict=True))
        cpu, wall = ([with_it[at] - without[at] for with_it, without in pairs] for at in (0, 1))
        median = statistics.median(cpu)
        goal = GOALS_US.get(row)
        verdict = "" if goal is None else f"  goal <= {goal:.0f} us: {'met' if median <= goal else 'MISSED'}"
        print(f"{row:24} {spread(cpu)} {spread(wall)}{verdict}")
        rows.append(
            {
                "callbacks": row,
                "over": beside,
                "median_us": median,
                "added_cpu_us": cpu,
                "added_us": wall,
                "goal_us": goal,
            }
        )
    calls = calls_us(options.device)
    for name, us in calls.items():
        print(f"{name:28} {us:6.2f} us of CPU time a call")
    if options.json is not None:
        options.json.write_text(json.dumps({"plain": rounds[PLAIN], "rows": rows, "calls_us": calls}, indent=1))


if __name__ == "__main__":
    main()
