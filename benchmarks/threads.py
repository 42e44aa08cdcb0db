"""Steps on the CPU with one thread of torch and with one for each CPU, beside programs that compute.

    python benchmarks/threads.py [--rounds 4]

Both sides take turns in one process. A step is forward, backward and SGD on random images of 64 x 64. The first three
steps of a turn do not count. Let nothing else run beside it. Takes about four minutes on two CPUs.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn
from torchvision import models

MODELS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "two convolutions, batches of 4": (
        4,
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        ),
    ),
    "ShuffleNetV2, batches of 16": (16, lambda: models.shufflenet_v2_x1_0(num_classes=10)),
    "ResNet-18, batches of 16": (16, lambda: models.resnet18(num_classes=10)),
}
STEPS, WARM_UP = 13, 3


BESIDE = {"nothing": (0, False), "1 program": (1, False), "3 programs": (3, False), "comes and goes": (1, True)}
"""Name -> programs that compute meanwhile, and whether they pause for 3 s after every 3 s."""
COMPUTE = """
import os, sys, time
began = time.monotonic()
while os.getppid() == int(sys.argv[2]):
    sum(range(20_000))
    if sys.argv[1] == "pauses" and time.monotonic() - began > 3:
        time.sleep(3)
        began = time.monotonic()
"""


@contextmanager
def programs_beside(count: int, *, pauses: bool = False) -> Iterator[None]:
    """Programs that compute on the same CPUs meanwhile, without a pause or with some, as long as this one lives."""
    command = [sys.executable, "-c", COMPUTE, "pauses" if pauses else "goes on", str(os.getpid())]
    programs = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds, cpus = parser.parse_args().rounds, len(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {cpus} CPUs, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}\n")
    print(f"| beside | model | 1 thread, ms | {cpus} threads, ms |\n|---|---|---:|---:|")
    for beside, (count, pauses) in BESIDE.items():
        for name, (size, make) in MODELS.items():
            with programs_beside(count, pauses=pauses):
                turns = [[_step_ms(make(), size, threads) for threads in (1, cpus)] for _ in range(rounds)]
            cells = (f"{median(one):.1f} [{min(one):.1f}, {max(one):.1f}]" for one in zip(*turns, strict=True))
            print(f"| {beside} | {name} | {' | '.join(cells)} |", flush=True)


def _step_ms(model: nn.Module, size: int, threads: int) -> float:
    """Mean step of one turn."""
    torch.set_num_threads(threads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(size, 3, 64, 64), torch.randint(0, 10, (size,))
    began = 0.0
    for number in range(STEPS):
        if number == WARM_UP:
            began = time.perf_counter()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return 1e3 * (time.perf_counter() - began) / (STEPS - WARM_UP)


if __name__ == "__main__":
    main()
