"""One epoch of reading all bytes in random order: a folder of files against each format of a pack, cold and warm.

Cold: the pages of all files are dropped from the page cache before each epoch (posix_fadvise DONTNEED); what stayed
nevertheless is shown, as ``mincore`` tells it. A virtual machine's host may still have it cached. All sides take turns.

    python benchmarks/pack.py [--data DIR] [--files 20000] [--bytes 4000] [--rounds 5]
"""

import argparse
import ctypes
import gc
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_feed.storage import PackedDataset, pack
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packed_dataset import FORMATS

CLASSES = 20


def main() -> None:
    """Make the packs, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of class folders (default: made files)")
    parser.add_argument("--files", type=int, default=20_000, help="files to make")
    parser.add_argument("--bytes", type=int, default=4_000, help="size of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to make files and packs: on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        measure(arguments, Path(work))


def measure(arguments: argparse.Namespace, work: Path) -> None:
    """Measure all sides in turns."""
    root = arguments.data or made_files(work / "files", arguments.files, arguments.bytes)
    index = scan_classes(root)
    # Opened anew for each epoch: pages that a process has mapped cannot be dropped.
    sides: dict[str, tuple[Callable[[], Any], Path]] = {"folder": (lambda: FolderSource(root, index), root)}
    for form in FORMATS:
        pack(root, work / form, format=form)
        sides[form] = (partial(PackedDataset, work / form), work / form)
    count = len(index)
    order = np.random.default_rng(0).permutation(count)
    seconds: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    left: dict[str, list[float]] = {name: [] for name in sides}
    os.sync()  # pages that are not yet written cannot be dropped
    for _ in range(arguments.rounds):
        for state in ("cold", "warm"):
            for name, (make, path) in sides.items():
                gc.collect()
                if state == "cold":
                    left[name].append(drop_from_cache(path))
                source = make()
                began, began_cpu = time.perf_counter(), time.process_time()
                read_all(source.read, order)
                seconds.setdefault((state, name), []).append(time.perf_counter() - began)
                cpu.setdefault((state, name), []).append(time.process_time() - began_cpu)
                del source
    total = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    print(f"{count} files, {total / 1e6:.1f} MB, {arguments.rounds} rounds in turns: median [min, max]")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}\n")
    print("| page cache | source | samples/s | CPU us a sample | x folder | still cached, % |")
    print("|---|---|---:|---:|---:|---:|")
    for state in ("cold", "warm"):
        base = seconds[state, "folder"]
        for name in sides:
            rates = [count / took for took in seconds[state, name]]
            ratio = statistics.median(a / b for a, b in zip(base, seconds[state, name], strict=True))
            micro = statistics.median(cpu[state, name]) / count * 1e6
            cached = f"{statistics.median(left[name]):.0f}" if state == "cold" else ""
            print(
                f"| {state} | {name} | {statistics.median(rates):.0f} [{min(rates):.0f}, {max(rates):.0f}] "
                f"| {micro:.1f} | {ratio:.2f} | {cached} |"
            )


def made_files(root: Path, files: int, size: int) -> Path:
    """Files of random bytes in class folders."""
    rng = np.random.default_rng(0)
    for label in range(CLASSES):
        (root / f"class_{label:02}").mkdir(parents=True)
    for number in range(files):
        (root / f"class_{number % CLASSES:02}" / f"{number:07}.jpg").write_bytes(rng.bytes(size))
    return root


def read_all(read: Callable[[int], Any], order: "np.ndarray[Any, Any]") -> None:
    """Read each sample once."""
    for index in order:
        read(int(index))


def drop_from_cache(path: Path) -> float:
    """Drop all files under ``path`` from the page cache. Gives the share of their pages that stayed, in percent."""
    there = kept = 0
    for file in sorted(path.rglob("*")):
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                pages, cached = cached_pages(opened.fileno())
            there, kept = there + pages, kept + cached
    return 100 * kept / max(1, there)


def cached_pages(descriptor: int) -> tuple[int, int]:
    """Pages of a file, and how many of them are in the page cache, by mincore(2)."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), states)
        del view
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return pages, sum(state & 1 for state in states)


if __name__ == "__main__":
    main()
