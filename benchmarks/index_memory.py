"""The cost of an index of many files: memory of each forked worker, and, with real files, time to the first batch.

Reading a Python object writes its reference count, so that the page it lies in is copied for the worker that reads it.
With --folder, real files (JPEGs of 633 bytes) are made below that folder, loaded, and removed.

    python benchmarks/index_memory.py --files 1281167
    python benchmarks/index_memory.py --files 1000000 --folder /data/scratch
"""

import argparse
import gc
import io
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.storage.file_system import find_mount
from lightning_feed.storage.folder import FolderIndex

CLASSES = 1000
WORKERS, BATCH = 2, 256
SIDES = ("torchvision", "ours")
FIGURES = {"index, s": "index_s", "first batch, s": "first_s", "USS of a worker, MB": "uss_mb", "PSS": "pss_mb"}


def main() -> None:
    """Measure both, in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_281_167, help="default: ImageNet's training images")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="make real files below it")
    parser.add_argument("--batches", type=int, default=200, help="loaded before memory is measured, with --folder")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    if arguments.side is not None:
        print(json.dumps(load(arguments.side, arguments.folder, arguments.batches)))
        return
    if arguments.folder is not None:
        with_files(arguments)
        return

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
        paths=np.array(encoded),
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


def private_mb(process: int | str = "self", counted: str = r"Private_\w+") -> float:
    """Memory of a process that it shares with no other, in MB (1e6 bytes); or another entry of smaps_rollup."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(rf"^{counted}:\s+(\d+) kB", rollup, re.MULTILINE)) * 1024 / 1e6


# --- real files -------------------------------------------------------------------------------------------------------


def with_files(arguments: argparse.Namespace) -> None:
    """Make the files, load them in a process for each side and round, print a table, and remove them."""
    disk = os.statvfs(arguments.folder)
    if disk.f_files and disk.f_favail < 1.1 * arguments.files:
        sys.exit(f"{arguments.folder} has {disk.f_favail} inodes free, for {arguments.files} files.")
    if disk.f_bavail * disk.f_frsize < 2 * 4096 * arguments.files:
        sys.exit(f"{arguments.folder} has no room for {arguments.files} files of a block each.")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="many-files-") as made:
        began = time.perf_counter()
        make_files(Path(made) / "data", arguments.files)
        print(f"made in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        for number in range(arguments.rounds):
            for side in SIDES:
                call = [sys.executable, __file__, "--side", side, "--folder", f"{made}/data"]
                call += ["--batches", str(arguments.batches)]
                done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True)
                found[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(number, side, found[side][-1], file=sys.stderr)
        began = time.perf_counter()
        shutil.rmtree(made, ignore_errors=True)
        print(f"removed in {time.perf_counter() - began:.0f} s", file=sys.stderr)
        Path(made).mkdir(exist_ok=True)  # for the end of the block
    mount = find_mount(arguments.folder)
    print(
        f"\n{arguments.files} files on {mount.kind if mount else '?'}, {CLASSES} classes, {WORKERS} workers, batches "
        f"of {BATCH}, {arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}, median [min, max]\n"
    )
    print(f"| side | {' | '.join(FIGURES)} |\n|---|{'---:|' * len(FIGURES)}")
    for side, rounds in found.items():
        cells = [[one[name] for one in rounds] for name in FIGURES.values()]
        spread = (f"{statistics.median(cell):.1f} [{min(cell):.1f}, {max(cell):.1f}]" for cell in cells)
        print(f"| {side} | {' | '.join(spread)} |")


def make_files(root: Path, files: int) -> None:
    """JPEGs in class folders."""
    content = io.BytesIO()
    Image.new("RGB", (16, 16), (3, 90, 30)).save(content, "JPEG")
    for label in range(CLASSES):
        folder = root / f"n{label:08d}"
        folder.mkdir(parents=True)
        for number in range(label, files, CLASSES):
            (folder / f"n{label:08d}_{number:07d}.JPEG").write_bytes(content.getvalue())


def load(side: str, root: Path, batches: int) -> dict[str, float]:
    """Index the files and load some, in random order; what it took."""
    began = time.perf_counter()
    loader: Any
    if side == "torchvision":
        from torch.utils.data import DataLoader
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        began = time.perf_counter()  # the imports of both sides are not what is measured
        crop = v2.Compose([v2.RandomResizedCrop(16), v2.PILToTensor()])
        dataset = ImageFolder(str(root), crop)
        index_s = time.perf_counter() - began
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)
    else:
        settings = LoaderSettings(num_workers=WORKERS)
        datamodule = ImageFolderDataModule(root, BATCH, image_size=16, val_fraction=0.0, loader=settings)
        datamodule.dataset("train")
        index_s = time.perf_counter() - began
        loader = datamodule.train_dataloader()
    passing = iter(loader)
    next(passing)
    first_s = time.perf_counter() - began
    for _ in range(batches):
        next(passing)
    workers = [process.pid for process in multiprocessing.active_children()]
    assert len(workers) == WORKERS
    uss_mb = statistics.mean(private_mb(worker) for worker in workers)
    pss_mb = statistics.mean(private_mb(worker, "Pss") for worker in workers)
    return {"index_s": index_s, "first_s": first_s, "uss_mb": uss_mb, "pss_mb": pss_mb}


if __name__ == "__main__":
    main()
