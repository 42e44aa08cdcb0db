"""Images a second and CPU time per image of ways to load JPEGs for training, side by side.

All do RandomResizedCrop(224) and a flip on the same files, in batches of 64, with two workers: processes (w2) or
threads (t2). Each runs in a process of its own and lives through all rounds; in each round all take their turn, in an
order that rotates. The first epochs of each are not counted. CPU is user and system time of it and all that it
started. What is not installed is skipped, with a word.

    python benchmarks/loader.py --data DIR [--rounds 6] [--repeat 4] [--only exact,simplejpeg]
"""

import argparse
import multiprocessing
import os
import platform
import signal
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import loader_rows as rows
import torch
from loader_process import Feed, Pass, RunFacts, Skip, serve

from lightning_feed.extras import installed_version

REFERENCE = "Pillow, float, w2: the standard recipe"
SUFFIXES = (".jpg", ".jpeg")
PATIENCE_S = 120
PACKAGES = (
    "torch",
    "torchvision",
    "pillow",
    "simplejpeg",
    "opencv-python-headless",
    "turbojpeg",
    "nvidia-dali-cuda130",
    "spdl-core",
    "litdata",
)


@dataclass(frozen=True)
class Row:
    """A contender."""

    fidelity: str
    """``aa``: antialiased resize; ``linear``, ``area``; as documented."""
    out: str
    make: Callable[[RunFacts], Feed]


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
    "ours exact, w2, handed over as torch does it": Row(
        "aa", "u8", partial(rows.ours, workers="process", hand_over="torch")
    ),
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
        """Ask for an epoch, and keep what it took; what was skipped stays so."""
        if self.skipped:
            return
        try:
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
        else:
            self.passes.append(answer)


def main() -> None:
    """Run all contenders in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder with JPEGs at any depth")
    parser.add_argument("--images", type=int, help="at most so many of them")
    parser.add_argument("--repeat", type=int, default=1, help="each file so many times in an epoch")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", default="", help="names, or parts of them, with commas between")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    names = [name for name in ROWS if name == REFERENCE or any(part in name for part in wanted)]
    with tempfile.TemporaryDirectory() as scratch:
        link(arguments, Path(scratch) / "data")
        contenders = run(names, Path(scratch), arguments.rounds)
    show(contenders, arguments.rounds)


def link(arguments: argparse.Namespace, folder: Path) -> None:
    """Class folders of links to the files."""
    files = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in SUFFIXES)[: arguments.images]
    for label in range(2):
        (folder / "train" / f"class_{label}").mkdir(parents=True)
    for number in range(len(files) * arguments.repeat):
        target = folder / "train" / f"class_{number % 2}" / f"{number:06}.jpg"
        target.symlink_to(files[number % len(files)].resolve())


def run(names: list[str], scratch: Path, rounds: int) -> dict[str, Contender]:
    """All rounds."""
    context = multiprocessing.get_context("spawn")
    contenders: dict[str, Contender] = {}
    for number, name in enumerate(names):
        own = scratch / f"{number}"
        own.mkdir()
        here, there = context.Pipe()
        job = RunFacts(folder=scratch / "data", scratch=own)
        process = context.Process(target=serve, args=(there, ROWS[name].make, job, own / "log"))
        process.start()
        contenders[name] = Contender(process, here)
        contenders[name].ask("warm")  # this fills caches
        contenders[name].ask("memory")  # nor does this one count for time
        print(f"{name}: {contenders[name].skipped or 'ready'}", flush=True)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contenders[name].ask("run")
    for contender in contenders.values():
        with suppress(ProcessLookupError):
            os.killpg(contender.process.pid or 0, signal.SIGKILL)  # with its workers
        contender.process.join()
    return contenders


def show(contenders: dict[str, Contender], rounds: int) -> None:
    """Print the table."""
    base = contenders[REFERENCE].passes[2:]
    print(
        f"\n{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; {base[0].images} images an epoch, "
        f"{rounds} rounds in turns: median [min, max]"
    )
    versions = {name: installed_version(name) for name in PACKAGES}
    print(", ".join(f"{name} {version}" for name, version in versions.items() if version), "\n")
    print("| pipeline | fidelity | out | images/s | x | CPU ms | x CPU | first batch, ms | memory, MB |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    for name, contender in contenders.items():
        row = ROWS[name]
        passes = contender.passes[2:]
        if contender.skipped:
            print(f"| {name} | {row.fidelity} | {row.out} | skipped: {contender.skipped} | | | | | |")
            continue
        rates = [each.images / each.wall_s for each in passes]
        cpu_ms = [1e3 * each.cpu_s / each.images for each in passes]
        faster = statistics.median(other.wall_s / each.wall_s for other, each in zip(base, passes, strict=True))
        cheaper = statistics.median(other.cpu_s / each.cpu_s for other, each in zip(base, passes, strict=True))
        print(
            f"| {name} | {row.fidelity} | {row.out} | {statistics.median(rates):.0f} [{min(rates):.0f}, "
            f"{max(rates):.0f}] | {faster:.2f} | {statistics.median(cpu_ms):.2f} | {cheaper:.2f} | "
            f"{1e3 * statistics.median(each.first_s for each in passes):.0f} | {contender.passes[1].memory_mb:.0f} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
