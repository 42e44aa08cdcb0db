"""Loading on a Ray cluster: what Ray adds on the same CPUs, how long a dead node is felt, and what 8 GPUs would need.

The nodes are simulated: each is a Ray node daemon with its own object store on this machine, and what goes from one to
the other goes through the loopback interface. No more can be seen here than what Ray itself costs.

* rate: samples of 1 ms of CPU, batches of 1 MB, as many workers for each kind: worker processes of torch, Ray with one
  node, Ray with two. They take turns, so that a machine that gets slower does so for all. The first 100 batches, in
  which workers start, are not counted. Goal: 15 % less or better.
* CPU: of this process, for each batch; and of all processes of the machine, for each sample
* recovery: the second node is killed in the middle of an epoch, and not replaced. The longest wait for a batch, and
  when the last long one ended.
* need: CPUs and network for 8 GPUs of 4,000 images/s each, from the measured costs and those given by options

    python benchmarks/cluster.py [--quick] [--rounds 5] [--workers 2] [--image-ms 1.5] [--image-kb 150.5]
"""

import argparse
import itertools
import logging
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

BATCH = 32
BATCH_BYTES = 1 << 20
WARM_UP = 100
"""Batches that are not counted: Ray starts its workers, which import torch, during some of them."""
STORE_BYTES = 200 << 20
GPUS, IMAGES_PER_S = 8, 4000
"""The training machine of the calculation."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Busy(Dataset[torch.Tensor]):
    """Samples of 1 ms of CPU time."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + 1e-3
        while time.thread_time() < until:
            pass
        return torch.full((BATCH_BYTES // BATCH,), index % 251, dtype=torch.uint8)


def loader(size: int, workers: int, address: str | None) -> FeedLoader:
    return FeedLoader(
        Busy(size),
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=True,
        workers="process" if address is None else RayCluster(address),
        multiprocessing_context="fork" if address is None else None,  # also in a process that was spawned
    )


def machine_cpu_s() -> float:
    """CPU time of all processes of the machine since it started."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / TICKS_PER_S


def timed(batches: Iterator[Any], warm: int) -> tuple[float, float, float]:
    """Samples per second, own CPU ms per batch and the machine's CPU ms per sample, after the first batches."""
    for _ in itertools.islice(batches, warm):
        pass
    began, own, all_of_it, count = time.perf_counter(), time.process_time(), machine_cpu_s(), 0
    for _ in batches:
        count += 1
    rate = count * BATCH / (time.perf_counter() - began)
    own_ms = 1e3 * (time.process_time() - own) / count
    return rate, own_ms, 1e3 * (machine_cpu_s() - all_of_it) / (count * BATCH)


def start(nodes: int, workers: int) -> Cluster:
    each = {"num_cpus": -(-workers // nodes), "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**each)
    return cluster


def stop(cluster: Cluster) -> None:
    ray.shutdown()
    cluster.shutdown()


def rate(batches: int, workers: int, address: str | None = None) -> tuple[float, float, float]:
    return timed(iter(loader((WARM_UP + batches) * BATCH, workers, address)), WARM_UP)


def one_round(batches: int, workers: int) -> dict[str, tuple[float, float, float]]:
    # In a new process: workers that are forked from one that has used Ray may crash (seen).
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as new:
        found = {"worker processes": new.submit(rate, batches, workers).result()}
    for name, nodes in (("Ray, 1 node", 1), ("Ray, 2 nodes", 2)):
        cluster = start(nodes, workers)
        found[name] = rate(batches, workers, cluster.address)
        stop(cluster)
    return found


def rates(rounds: int, batches: int, workers: int) -> dict[str, list[float]]:
    """Medians of each kind: rate, own CPU ms per batch, machine's CPU ms per sample."""
    every = [one_round(batches, workers) for _ in range(rounds)]
    print(f"\n| {workers} workers | samples/s | this process, CPU ms per batch | machine, CPU ms per sample |")
    print("|---|---|---|---|")
    medians = {}
    for name in every[0]:
        columns = list(zip(*(found[name] for found in every), strict=True))
        medians[name] = [statistics.median(column) for column in columns]
        per_s, own, machine = medians[name]
        print(f"| {name} | {per_s:.0f} ({min(columns[0]):.0f} to {max(columns[0]):.0f}) | {own:.2f} | {machine:.2f} |")
    for name in list(every[0])[1:]:
        lost = sorted(100 * (1 - found[name][0] / found["worker processes"][0]) for found in every)
        print(f"{name}: {statistics.median(lost):.0f} % slower ({lost[0]:.0f} to {lost[-1]:.0f}); goal: 15 or less")
    return medians


def recovery(batches: int, workers: int) -> None:
    cluster = start(2, workers)
    second = next(iter(cluster.worker_nodes))
    stamps = []
    for number, _ in enumerate(loader(batches * BATCH, workers, cluster.address)):
        stamps.append(time.perf_counter())
        if number == batches // 3:
            cluster.remove_node(second, allow_graceful=False)
            killed = time.perf_counter()
    assert len(stamps) == batches
    stop(cluster)
    gaps = [later - earlier for earlier, later in itertools.pairwise(stamps) if later > killed]
    # Half the workers are left: the rate to come back to is that of the last third.
    usual = statistics.median(gaps[-batches // 3 :])
    late = [at for at, gap in zip((at for at in stamps if at > killed), gaps, strict=True) if gap > 5 * usual]
    print(f"\nSecond of two nodes killed: all {batches} batches came, in order; longest wait {max(gaps):.2f} s;")
    print(f"the last wait of over 5 times the usual ended {max(late, default=killed) - killed:.1f} s after the kill.")


def need(medians: dict[str, list[float]], image_ms: float, image_kb: float) -> None:
    images = GPUS * IMAGES_PER_S
    over = max(0.0, medians["Ray, 2 nodes"][2] / medians["worker processes"][2] - 1)
    cpus = images * image_ms / 1e3
    own = medians["Ray, 2 nodes"][1] / (BATCH_BYTES / 2**20)  # ms for each MB
    network = images * image_kb * 1e3
    print(f"\n{GPUS} GPUs of {IMAGES_PER_S} images/s, {image_ms} ms of CPU and {image_kb} KB for each image:")
    print(f"- {cpus:.0f} CPUs that load, and {over:.0%} for Ray: {cpus * (1 + over):.0f}")
    print(f"- {network / 1e9:.1f} GB/s ({8 * network / 1e9:.0f} Gbit/s) into the training machine")
    print(f"- {own * network / 2**20 / 1e3:.1f} CPUs of the training machine to take batches out of the object store,")
    print("  if each MB costs what a batch of 1 MB does; larger batches should cost less")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two minutes, to see that it runs: the figures are rough")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-ms", type=float, default=1.5, help="CPU time of one image")
    parser.add_argument("--image-kb", type=float, default=150.5, help="of one image as it is sent: 3 x 224 x 224 bytes")
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    rounds, batches = (1, 60) if given.quick else (given.rounds, 400)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(f"{os.cpu_count()} CPUs, torch {torch.__version__}, Ray {ray.__version__}; nodes simulated on this machine")
    medians = rates(rounds, batches, given.workers)
    recovery(300, given.workers)
    need(medians, given.image_ms, given.image_kb)


if __name__ == "__main__":
    main()
