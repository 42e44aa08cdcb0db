"""The cost of an index of many files: time to the first batch, and memory of each worker.

Real files (JPEGs of 633 bytes) are made below a folder, loaded with torchvision's ImageFolder and with ours in turn,
and removed. Reading a Python object writes its reference count, so that the page it lies in is copied for the worker
that reads it: a list of paths is copied into each worker, arrays are not.

    python benchmarks/index_memory.py --files 1000000 --folder /data/scratch
"""

import argparse
import io
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed import ImageFolderDataModule, LoaderSettings

CLASSES = 1000
WORKERS = 2
BATCH = 256
SIDES = ("torchvision", "ours")
FIGURES = {"index, s": "index_s", "first batch, s": "first_s", "USS of a worker, MB": "uss_mb", "PSS": "pss_mb"}


def main() -> None:
    """Make the files, load them in a process for each side and round, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, required=True, help="make the files below it")
    parser.add_argument("--batches", type=int, default=200, help="loaded before memory is measured")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps(load(options.side, options.folder, options.batches)))
        return
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="many-files-") as scratch:
        make_files(Path(scratch), options.files)
        for _ in range(options.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, "--side", side, "--folder", scratch]
                command += ["--batches", str(options.batches)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                measured[side].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"{options.files} files, {CLASSES} classes, {WORKERS} workers, batches of {BATCH}, {options.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}, median [min, max]\n"
    )
    print(f"| side | {' | '.join(FIGURES)} |\n|---|{'---:|' * len(FIGURES)}")
    for side, rounds in measured.items():
        cells = [[figures[name] for figures in rounds] for name in FIGURES.values()]
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
    began_s = time.perf_counter()
    loader: DataLoader[Any]
    if side == "torchvision":
        crop = v2.Compose([v2.RandomResizedCrop(16), v2.PILToTensor()])
        dataset = ImageFolder(str(root), crop)
        index_s = time.perf_counter() - began_s
        loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=WORKERS)
    else:
        settings = LoaderSettings(num_workers=WORKERS)
        datamodule = ImageFolderDataModule(root, BATCH, image_size=16, val_fraction=0.0, loader=settings)
        datamodule.dataset("train")
        index_s = time.perf_counter() - began_s
        loader = datamodule.train_dataloader()
    passing = iter(loader)
    next(passing)
    first_s = time.perf_counter() - began_s
    for _ in range(batches):
        next(passing)
    workers = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
    uss_mb = statistics.mean(memory_mb(worker, r"Private_\w+") for worker in workers)
    pss_mb = statistics.mean(memory_mb(worker, "Pss") for worker in workers)
    return {"index_s": index_s, "first_s": first_s, "uss_mb": uss_mb, "pss_mb": pss_mb}


def memory_mb(process: int, counted: str) -> float:
    """The entries of a process's smaps_rollup that are counted, in MB (1e6 bytes)."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(rf"^{counted}:\s+(\d+) kB", rollup, re.MULTILINE)) * 1024 / 1e6


if __name__ == "__main__":
    main()
