"""What an index of 1.28 million files costs each forked worker: flat arrays against the usual list of tuples.

Reading a Python object writes its reference count, so that the page it lies in is copied for the worker that reads it.

    python benchmarks/index_memory.py --files 1281167
"""

import argparse
import gc
import multiprocessing
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_feed.archive.folder import FolderIndex

CLASSES = 1000


def main() -> None:
    """Measure both, in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_281_167, help="default: ImageNet's training images")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    paths = [f"n{i % CLASSES:08d}/n{i % CLASSES:08d}_{i:07d}.JPEG" for i in range(arguments.files)]
    samples = [(path, i % CLASSES) for i, path in enumerate(paths)]
    index = as_index(paths)
    sides: dict[str, tuple[Any, Callable[[Any, int], Any]]] = {
        "list of (path, label)": (samples, lambda made, i: made[i]),
        "FolderIndex": (index, lambda made, i: (made.path(i), int(made.labels[i]))),
    }
    growth: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.rounds):
        for name, (made, read) in sides.items():
            growth[name].append(growth_of_a_worker(made, read, arguments.files))
    print(f"{arguments.files} files, each read once in a forked worker, {arguments.rounds} rounds, median [min, max]\n")
    print("| index | private memory that a worker gains, MB |\n|---|---:|")
    for name, found in growth.items():
        print(f"| {name} | {statistics.median(found):.1f} [{min(found):.1f}, {max(found):.1f}] |")


def as_index(paths: list[str]) -> FolderIndex:
    """The paths as a FolderIndex, without files on a disk."""
    encoded = [path.encode() for path in paths]
    return FolderIndex(
        classes=tuple(f"n{i:08d}" for i in range(CLASSES)),
        labels=np.arange(len(paths)) % CLASSES,
        names=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in encoded]),
        folders=(),
    )


def growth_of_a_worker(made: Any, read: Callable[[Any, int], Any], files: int) -> float:
    """MB of private memory that a forked process gains while it reads each entry once, in random order."""
    gc.freeze()  # the collector's own marks are not what is measured
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def work() -> None:
        order = np.random.default_rng(0).permutation(files)
        before = private_mb()
        for i in order:
            read(made, int(i))
        theirs.send(private_mb() - before)

    process = context.Process(target=work)
    process.start()
    grown: float = ours.recv()
    process.join()
    return grown


def private_mb() -> float:
    """Memory of this process that it shares with no other, in MB (1e6 bytes)."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", rollup, re.MULTILINE)) * 1024 / 1e6


if __name__ == "__main__":
    main()
