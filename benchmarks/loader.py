"""Images a second and CPU time per image of ways to load JPEGs for training, side by side.

All do RandomResizedCrop(224) and a flip on the same files, in batches of 64, with two workers: processes (w2) or
threads (t2). Each runs in a process of its own and lives through all rounds; in each round all take their turn, in an
order that rotates. The first epochs of each are not counted. CPU is user and system time of it and all that it
started. What is not installed is skipped, with a word.

    python benchmarks/loader.py --data DIR [--rounds 6] [--repeat 4] [--only exact,simplejpeg]
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import loader_rows as rows
import torch
from loader_process import Feed, Job, Pass, Skip, serve

from lightning_feed.extras import installed_version

REFERENCE = "Pillow, float, w2: the standard recipe"
SUFFIXES = (".jpg", ".jpeg")
PATIENCE_S = 120


@dataclass(frozen=True)
class Row:
    """A contender."""

    fidelity: str
    """``aa``: antialiased resize; ``linear``, ``area``; as documented."""
    out: str
    make: Callable[[Job], Feed]


ROWS: dict[str, Row] = {
    REFERENCE: Row("aa", "f32", partial(rows.pillow, floats=True)),
    "Pillow, w2": Row("aa", "u8", partial(rows.pillow, floats=False)),
    "torchvision.io + v2, w2": Row("aa", "u8", rows.torchvision_v2),
    "OpenCV, w2": Row("linear", "u8", partial(rows.dataloader, crop=rows.opencv)),
    "simplejpeg + v2, w2": Row("aa", "u8", partial(rows.dataloader, crop=rows.simplejpeg_v2)),
    "simplejpeg + v2, plain threads, t2": Row("aa", "u8", partial(rows.thread_pool, crop=rows.simplejpeg_v2)),
    "SPDL + simplejpeg, t2": Row("aa", "u8", partial(rows.spdl, crop=rows.simplejpeg_v2)),
    "LitData + simplejpeg, w2": Row("aa", "u8", partial(rows.litdata, crop=rows.simplejpeg_v2)),
    "DALI CPU, t2": Row("aa", "u8", partial(rows.dali, antialias=True)),
    "ours exact, w2": Row("aa", "u8", partial(rows.ours, workers="process")),
    "ours exact, t2": Row("aa", "u8", rows.ours),
    "ours fast, t2": Row("linear", "u8", partial(rows.ours, quality="fast")),
}


@dataclass
class Contender:
    """A row's process, and what it did."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    skipped: str = ""
    passes: list[Pass] = field(default_factory=list)

    def ask(self, what: str) -> None:
        """Run one epoch and keep what it took."""
        try:
            if what:
                self.connection.send(what)
            if not self.connection.poll(PATIENCE_S):
                self.skipped = f"silent for {PATIENCE_S} s"
                return
            answer = self.connection.recv()
        except (EOFError, BrokenPipeError):
            self.skipped = "its process died"
            return
        if isinstance(answer, Skip):
            self.skipped = str(answer).splitlines()[0][:100]
        elif isinstance(answer, Pass):
            self.passes.append(answer)

    def stop(self) -> None:
        """End the process."""
        if self.process.is_alive():
            try:
                self.connection.send("stop")
            except BrokenPipeError:
                self.skipped = self.skipped or "its process died"
            self.process.join(10)
            self.process.kill()


def main() -> None:
    """Run all contenders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder with JPEGs at any depth")
    parser.add_argument("--images", type=int, help="at most so many of them")
    parser.add_argument("--repeat", type=int, default=1, help="each file so many times in an epoch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="", help="names, or parts of them, with commas between")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        link(arguments, folder)
        taken = chosen(arguments)
        contenders = run(taken, folder, Path(scratch), arguments.rounds)
    show(taken, contenders, arguments)


def chosen(arguments: argparse.Namespace) -> dict[str, Row]:
    """The rows to run; the first is the one that ratios are to."""
    wanted = [part for part in arguments.only.split(",") if part]
    return {
        name: row
        for name, row in ROWS.items()
        if name == REFERENCE or not wanted or any(part in name for part in wanted)
    }


def link(arguments: argparse.Namespace, folder: Path) -> None:
    """Class folders of links to the files."""
    files = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in SUFFIXES)[: arguments.images]
    for label in range(2):
        (folder / "train" / f"class_{label}").mkdir(parents=True)
    for number in range(len(files) * arguments.repeat):
        target = folder / "train" / f"class_{number % 2}" / f"{number:06}.jpg"
        target.symlink_to(files[number % len(files)].resolve())


def run(taken: dict[str, Row], folder: Path, scratch: Path, rounds: int) -> dict[str, Contender]:
    """All rounds."""
    names = list(taken)
    context = multiprocessing.get_context("spawn")
    contenders: dict[str, Contender] = {}
    for number, name in enumerate(names):
        place = scratch / f"{number}"
        place.mkdir()
        here, there = context.Pipe()
        job = Job(folder=folder, scratch=place)
        process = context.Process(target=serve, args=(there, taken[name].make, job, place / "log"))
        process.start()
        contenders[name] = contender = Contender(process, here)
        contender.ask("")
        for asked in ("warm", "memory"):  # the first fills caches; neither counts for time
            if not contender.skipped:
                contender.ask(asked)
        print(f"{name}: {contender.skipped or 'ready'}", flush=True)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if not contenders[name].skipped:
                contenders[name].ask("run")
    for contender in contenders.values():
        contender.stop()
    return contenders


def show(taken: dict[str, Row], contenders: dict[str, Contender], arguments: argparse.Namespace) -> None:
    """Print the table, and write the figures."""
    runs = {name: contender.passes[2:] for name, contender in contenders.items()}
    base = runs[next(iter(taken))]
    print(
        f"\n{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; {base[0].images} images an epoch, "
        f"{arguments.rounds} rounds in turns: median [min, max]"
    )
    print(", ".join(f"{name} {found}" for name in PACKAGES if (found := installed_version(name))), "\n")
    print("| pipeline | fidelity | out | images/s | x | CPU ms | x CPU | first batch, ms | memory, MB |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name, contender in contenders.items():
        row = taken[name]
        if contender.skipped or not runs[name]:
            print(f"| {name} | {row.fidelity} | {row.out} | skipped: {contender.skipped} | | | | | |")
            continue
        rates = [one.images / one.wall_s for one in runs[name]]
        cpu = [one.cpu_s / one.images * 1e3 for one in runs[name]]
        faster = statistics.median(a.wall_s / b.wall_s for a, b in zip(base, runs[name], strict=True))
        cheaper = statistics.median(a.cpu_s / b.cpu_s for a, b in zip(base, runs[name], strict=True))
        print(
            f"| {name} | {row.fidelity} | {row.out} | {statistics.median(rates):.0f} [{min(rates):.0f}, "
            f"{max(rates):.0f}] | {faster:.2f} | {statistics.median(cpu):.2f} | {cheaper:.2f} | "
            f"{statistics.median(one.first_s for one in runs[name]) * 1e3:.0f} | "
            f"{contender.passes[1].memory_mb or math.nan:.0f} |"
        )
    if arguments.json is not None:
        figures = {name: [one._asdict() for one in passes] for name, passes in runs.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))


PACKAGES = (
    *("torch", "torchvision", "pillow", "simplejpeg", "opencv-python-headless", "turbojpeg"),
    *("nvidia-dali-cuda130", "spdl-core", "litdata"),
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
