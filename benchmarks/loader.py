"""Images a second and CPU time per image of ways to load JPEGs for training, side by side.

All do RandomResizedCrop(224) and a flip on the same files, in batches of 64, with two workers: processes (w2) or
threads (t2). Each runs in a process of its own and lives through all rounds; in each round all take their turn, in an
order that rotates. The first epochs of each are not counted. CPU is user and system time of it and all that it
started. What is not installed is skipped, with a word. Fidelity is measured where a library takes a fixed crop: PSNR
against Pillow on the largest square in the middle, worst and median of 16 files.

With ``--backend`` the rows are those of ImageFolderDataModule's image backends, and ratios are to backend="torch" in
the same round.

    python benchmarks/loader.py --data DIR [--rounds 6] [--repeat 4] [--only exact,simplejpeg] [--large]
    python benchmarks/loader.py --data DIR --backend torch --backend dali-cpu --backend nvjpeg
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
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import loader_peers as peers
import torch
from loader_backends import BASE, backend_rows
from loader_ours import on_device, ours
from loader_process import Feed, Job, Pass, Ready, Skip, serve
from loader_recipes import dataloader, opencv, pillow, simplejpeg_v2, thread_pool, torchvision_v2
from PIL import Image

REFERENCE = "Pillow, float, w2: the standard recipe"
SUFFIXES = (".jpg", ".jpeg")
LARGE = (1600, 1200)
PATIENCE_S = 120


@dataclass(frozen=True)
class Row:
    """A contender."""

    fidelity: str
    """``aa``: antialiased resize; ``linear``, ``area``; as documented."""
    out: str
    make: Callable[[Job], Feed]


ROWS: dict[str, Row] = {
    REFERENCE: Row("aa", "f32", partial(pillow, floats=True)),
    "Pillow, w2": Row("aa", "u8", partial(pillow, floats=False)),
    "torchvision.io + v2, w2": Row("aa", "u8", torchvision_v2),
    "OpenCV, w2": Row("linear", "u8", partial(dataloader, crop=opencv)),
    "OpenCV INTER_AREA, w2": Row("area", "u8", partial(dataloader, crop=partial(opencv, area=True))),
    "OpenCV, plain threads, t2": Row("linear", "u8", partial(thread_pool, crop=opencv)),
    "simplejpeg + v2, w2": Row("aa", "u8", partial(dataloader, crop=simplejpeg_v2)),
    "simplejpeg + v2, plain threads, t2": Row("aa", "u8", partial(thread_pool, crop=simplejpeg_v2)),
    "torchdata.nodes + simplejpeg, t2": Row("aa", "u8", partial(peers.torchdata_nodes, crop=simplejpeg_v2)),
    "SPDL + simplejpeg, t2": Row("aa", "u8", partial(peers.spdl, crop=simplejpeg_v2)),
    "LitData + simplejpeg, w2": Row("aa", "u8", partial(peers.litdata, crop=simplejpeg_v2)),
    "webdataset + simplejpeg, w2": Row("aa", "u8", partial(peers.webdataset, crop=simplejpeg_v2)),
    "LMDB + simplejpeg, w2": Row("aa", "u8", partial(peers.lmdb, crop=simplejpeg_v2)),
    "DALI CPU, t2": Row("aa", "u8", partial(peers.dali, antialias=True)),
    "DALI CPU linear, t2": Row("linear", "u8", partial(peers.dali, antialias=False)),
    "TurboLoader, t2": Row("aa", "f32", peers.turboloader),
    "FFCV JPEG, t2": Row("area", "u8", peers.ffcv),
    "ours exact, w2": Row("aa", "u8", partial(ours, workers="process")),
    "ours exact, t2": Row("aa", "u8", ours),
    "ours exact + device_transform on the CPU, t2": Row("aa", "f32", partial(ours, floats=True)),
    "ours near, t2": Row("near aa", "u8", partial(ours, quality="near")),
    "ours fast, w2": Row("linear", "u8", partial(ours, quality="fast", workers="process")),
    "ours fast, t2": Row("linear", "u8", partial(ours, quality="fast")),
    "ours exact, pack of pixels, t2": Row("aa", "u8", partial(ours, decoded=True)),
    "ours fast, pack of pixels, t2": Row("linear", "u8", partial(ours, quality="fast", decoded=True)),
    "ours, on the device": Row("bilinear", "f32", partial(on_device, augmented=True)),
    "ours, on the device, gather alone": Row("", "u8", partial(on_device, augmented=False)),
}


@dataclass
class Contender:
    """A row's process, and what it did."""

    process: multiprocessing.process.BaseProcess
    connection: Connection
    ready: Ready | None = None
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
        elif isinstance(answer, Ready):
            self.ready = answer
        else:
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
    parser.add_argument(
        "--backend", action="append", choices=list(backend_rows()), help="rows of this backend instead; may be repeated"
    )
    parser.add_argument("--only", default="", help="names, or parts of them, with commas between")
    parser.add_argument("--without", default="", help="the same for rows to leave out")
    parser.add_argument("--large", action="store_true", help="images of 1600 x 1200, laid together from the files")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "data"
        link(arguments, folder)
        rows = chosen(arguments)
        contenders = run(rows, folder, Path(scratch), arguments.rounds)
    show(rows, contenders, arguments)


def chosen(arguments: argparse.Namespace) -> dict[str, Row]:
    """The rows to run; the first is the one that ratios are to."""
    rows, base = ROWS, REFERENCE
    if arguments.backend:
        found = backend_rows()
        named = [row for backend in dict.fromkeys(["torch", *arguments.backend]) for row in found[backend].items()]
        rows = {name: Row("aa", "f32" if "device_transform" in name else "u8", make) for name, make in named}
        base = BASE
    wanted = [part for part in arguments.only.split(",") if part]
    unwanted = [part for part in arguments.without.split(",") if part]
    names = [name for name in rows if name == base or not wanted or any(part in name for part in wanted)]
    return {name: rows[name] for name in names if not any(part in name for part in unwanted)}


def link(arguments: argparse.Namespace, folder: Path) -> None:
    """Class folders of links to the files, or of large images made of them."""
    files = sorted(path for path in arguments.data.rglob("*") if path.suffix.lower() in SUFFIXES)[: arguments.images]
    for label in range(2):
        (folder / "train" / f"class_{label}").mkdir(parents=True)
    if arguments.large:
        for number in range(max(64, len(files) // 4)):
            whole = Image.new("RGB", LARGE)
            for place in range(12):
                with Image.open(files[(number * 7 + place) % len(files)]) as image:
                    whole.paste(image.convert("RGB"), (place % 4 * 400, place // 4 * 400))
            whole.save(folder / "train" / f"class_{number % 2}" / f"{number:05}.jpg", quality=90)
        return
    for number in range(len(files) * arguments.repeat):
        target = folder / "train" / f"class_{number % 2}" / f"{number:06}.jpg"
        target.symlink_to(files[number % len(files)].resolve())


def run(rows: dict[str, Row], folder: Path, scratch: Path, rounds: int) -> dict[str, Contender]:
    """All rounds."""
    names = list(rows)
    context = multiprocessing.get_context("spawn")
    contenders: dict[str, Contender] = {}
    for number, name in enumerate(names):
        place = scratch / f"{number}"
        place.mkdir()
        here, there = context.Pipe()
        job = Job(folder=folder, scratch=place)
        process = context.Process(target=serve, args=(there, rows[name].make, job, place / "log"))
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


def show(rows: dict[str, Row], contenders: dict[str, Contender], arguments: argparse.Namespace) -> None:
    """Print the table, and write the figures."""
    runs = {name: contender.passes[2:] for name, contender in contenders.items()}
    base = runs[next(iter(rows))]
    print(
        f"\n{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}; {base[0].images} images an epoch, "
        f"{arguments.rounds} rounds in turns: median [min, max]"
    )
    print(", ".join(f"{name} {found}" for name in PACKAGES if (found := installed(name))), "\n")
    print("| pipeline | fidelity | out | images/s | x | CPU ms | x CPU | first batch, ms | memory, MB | PSNR dB |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---|")
    for name, contender in contenders.items():
        row = rows[name]
        if contender.skipped or not runs[name]:
            print(f"| {name} | {row.fidelity} | {row.out} | skipped: {contender.skipped} | | | | | | |")
            continue
        rates = [one.images / one.wall_s for one in runs[name]]
        cpu = [one.cpu_s / one.images * 1e3 for one in runs[name]]
        faster = statistics.median(a.wall_s / b.wall_s for a, b in zip(base, runs[name], strict=True))
        cheaper = statistics.median(a.cpu_s / b.cpu_s for a, b in zip(base, runs[name], strict=True))
        psnr = contender.ready.psnr_db if contender.ready is not None else None
        print(
            f"| {name} | {row.fidelity} | {row.out} | {statistics.median(rates):.0f} [{min(rates):.0f}, "
            f"{max(rates):.0f}] | {faster:.2f} | {statistics.median(cpu):.2f} | {cheaper:.2f} | "
            f"{statistics.median(one.first_s for one in runs[name]) * 1e3:.0f} | "
            f"{contender.passes[1].memory_mb or math.nan:.0f} | "
            f"{'' if psnr is None else f'{psnr[0]:.1f} / {psnr[1]:.1f}'} |"
        )
    if arguments.json is not None:
        figures = {name: [one._asdict() for one in passes] for name, passes in runs.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))


PACKAGES = (
    "torch",
    "torchvision",
    "pillow",
    "simplejpeg",
    "opencv-python-headless",
    "turbojpeg",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "spdl-core",
    "litdata",
    "webdataset",
    "torchdata",
    "turboloader",
    "ffcv",
)


def installed(name: str) -> str | None:
    """The version of a package, None where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
