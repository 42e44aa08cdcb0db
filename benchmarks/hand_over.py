"""Time to hand a batch over from the workers to training: torch's DataLoader, slots, and worker threads.

A sample costs almost nothing to make, so a batch takes as long as stacking it and handing it over. The consumer reads
one number of each memory page, as a copy to a device reads all of them. Each run begins after as many batches as the
workers hold ready twice. The sides of a case run in turns.

    python benchmarks/hand_over.py [--quick] [--rounds N] [--out FILE.json]
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors

from lightning_feed.images.image_dataset import collate_images
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.processes import shut_down_workers, worker_processes

SAMPLES = 32
"""Samples in a batch."""
SIDES = ("torch", "slots", "threads")
SIZES_MB = (0.1, 1.0, 10.0, 38.5, 100.0)
PREFETCH = 2
PAGE = 4096
WIDTH = 256
"""Of images, in pixels."""
LEAST_BATCHES = 8
RUN_S = 0.3
FILLING_S = 0.15
"""Time in which the workers fill the queue, where memory is measured."""


@dataclass(frozen=True)
class Case:
    """One kind of batch, and the number of workers."""

    mb: float
    workers: int = 2
    tensors: int = 1
    dtype: str = "uint8"
    kind: str = "tensors"
    """``tensors``, or one of ``KINDS``."""

    def __str__(self) -> str:
        what = f"{self.mb:g} MB, {self.dtype}"
        if self.tensors > 1:
            what += f", {self.tensors} tensors"
        if self.kind != "tensors":
            what += f", {self.kind}"
        return f"{what} | {self.workers}"


KINDS = (USERS, TORCHVISION, OURS) = ("the user's collate", "torchvision's images", "ImageFolderDataModule's images")
CASES = (
    *(Case(mb, workers) for mb in SIZES_MB for workers in (1, 2, 4)),
    *(Case(mb, dtype="float32") for mb in SIZES_MB),
    *(Case(mb, tensors=tensors) for mb in (1.0, 38.5) for tensors in (8, 64)),
    *(Case(mb, kind=kind) for kind in KINDS for mb in (1.0, 38.5, 100.0)),
)
QUICK = (Case(0.1), Case(1.0), Case(38.5), Case(38.5, tensors=64), *(Case(38.5, kind=kind) for kind in KINDS))


class Given(Dataset[list[Tensor]]):
    """Always the same sample."""

    def __init__(self, case: Case) -> None:
        dtype = getattr(torch, case.dtype)
        numbers = int(case.mb * 1e6 / SAMPLES / case.tensors / dtype.itemsize)
        self.sample = [torch.ones(numbers, dtype=dtype) for _ in range(case.tensors)]
        if case.kind in (TORCHVISION, OURS):
            height = numbers // (3 * WIDTH)
            image = torch.ones(height, WIDTH, 3, dtype=dtype).permute(2, 0, 1)  # channels last, as decoded
            self.sample = [tv_tensors.Image(image.contiguous()) if case.kind == TORCHVISION else image]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.sample


def by_hand(samples: list[list[Tensor]]) -> dict[str, Tensor]:
    """A collate function that does not call torch's."""
    return {str(number): torch.stack(tensors) for number, tensors in enumerate(zip(*samples, strict=True))}


@dataclass(frozen=True)
class Figures:
    """Means over the batches of one run."""

    wall_ms: float
    main_cpu_ms: float
    """CPU time of all threads of the main process, so of the worker threads, too."""


def make_loader(case: Case, side: str) -> DataLoader[Any]:
    options: dict[str, Any] = {"batch_size": SAMPLES, "num_workers": case.workers, "prefetch_factor": PREFETCH}
    if case.kind == USERS:
        options["collate_fn"] = by_hand
    elif case.kind == OURS:
        options["collate_fn"] = collate_images
    if side == "torch":
        return DataLoader(Given(case), **options)
    return FeedLoader(Given(case), workers="thread" if side == "threads" else "process", **options)


def touch(batch: Any) -> None:
    """Read each page of a batch."""
    for tensor in batch.values() if isinstance(batch, dict) else batch:
        torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())[:: PAGE // tensor.element_size()].sum()


def run(case: Case, side: str) -> Figures:
    loader = make_loader(case, side)
    batches = iter(loader)
    for _ in range(2 * case.workers * (PREFETCH + 1)):
        touch(next(batches))
    count = 0
    cpu_s = time.process_time()
    began_s = time.perf_counter()
    while count < LEAST_BATCHES or time.perf_counter() - began_s < RUN_S:
        for _ in range(case.workers):
            touch(next(batches))
        count += case.workers
    wall_s = time.perf_counter() - began_s
    cpu_s = time.process_time() - cpu_s
    end(loader, batches)
    return Figures(1e3 * wall_s / count, 1e3 * cpu_s / count)


def end(loader: DataLoader[Any], batches: Any) -> None:
    """End a pass and its workers."""
    shut_down_workers(getattr(batches, "source", batches))
    close = getattr(loader, "close", None)
    if close is not None:
        close()
    gc.collect()


# --- memory -------------------------------------------------------------------------------------------------------


def own_mb(pids: list[int]) -> float:
    """Memory of processes without shared memory: a page in several of them counts once."""
    lines = [line.split() for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    sizes_kb = {"Pss_Anon:": 0, "Pss_File:": 0}
    for line in lines:
        if line[0] in sizes_kb:
            sizes_kb[line[0]] += int(line[1])
    return sum(sizes_kb.values()) / 1e3


def shared_mb() -> float:
    """Shared memory of the whole machine. A batch of torch's that waits in a queue is mapped by no process."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Shmem"].split()[0]) / 1e3


def peak_mb(case: Case, side: str, batches_read: int = 24) -> tuple[float, float]:
    """Largest memory while the queue is full: of the processes above the program's own, and shared memory."""
    own_before = own_mb([os.getpid()])
    shared_before = shared_mb()
    loader = make_loader(case, side)
    batches: Iterator[Any] = iter(loader)
    own = 0.0
    shared = 0.0
    for _ in range(batches_read):
        batch = next(batches)
        touch(batch)
        time.sleep(FILLING_S)
        workers = [] if side == "threads" else worker_processes(batches)
        own = max(own, own_mb([os.getpid(), *(process.pid for process in workers)]) - own_before)
        shared = max(shared, shared_mb() - shared_before)
    end(loader, batches)
    return own, shared


# --- tables -------------------------------------------------------------------------------------------------------


def middle(values: list[float]) -> str:
    """The median with its least and largest value."""
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


def time_cases(cases: tuple[Case, ...], rounds: int) -> list[dict[str, Any]]:
    print("| batch | workers | torch, ms | slots, ms | threads, ms | torch : slots | main CPU: torch, ms | slots, ms |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    kept = []
    for case in cases:
        found: dict[str, list[Figures]] = defaultdict(list)
        for turn in range(rounds):
            for place in range(len(SIDES)):
                side = SIDES[(turn + place) % len(SIDES)]
                found[side].append(run(case, side))
        walls = {side: [one.wall_ms for one in found[side]] for side in SIDES}
        cpus = {side: [one.main_cpu_ms for one in found[side]] for side in SIDES}
        ratios = [one / other for one, other in zip(walls["torch"], walls["slots"], strict=True)]
        cells = [middle(walls[side]) for side in SIDES] + [middle(ratios)]
        cells += [middle(cpus["torch"]), middle(cpus["slots"])]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)
        kept.append({**asdict(case), **{side: [asdict(one) for one in found[side]] for side in SIDES}})
    return kept


def measure_memory() -> list[dict[str, Any]]:
    print("\n| MB of the processes + of shared memory | workers | torch | slots | threads |")
    print("|---|---:|---:|---:|---:|")
    kept = []
    for case in (Case(1.0), Case(38.5), Case(100.0), Case(38.5, workers=4)):
        peaks = {side: peak_mb(case, side) for side in SIDES}
        cells = " | ".join(f"{own:.0f} + {shared:.0f}" for own, shared in peaks.values())
        print(f"| {case} | {cells} |", flush=True)
        kept.append({**asdict(case), **peaks})
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases, about a minute")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--out", type=Path, help="file for all runs, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, torch {torch.__version__}")
    print(f"medians [least, most] of {options.rounds} runs, for one batch of {SAMPLES} samples\n")
    times = time_cases(QUICK if options.quick else CASES, options.rounds)
    memory = measure_memory()
    if options.out is not None:
        options.out.write_text(json.dumps({"times": times, "memory": memory}))


if __name__ == "__main__":
    main()
