"""Random faults, many of them: kills, flipped bits, full disks, while data are packed, staged, trained on.

Bad is what no user should meet: wrong data without a word, a source that was changed, a run that cannot go on
afterwards, an error that is no message (a raw traceback, a crash), or one that hangs. Full disks are small tmpfs in a
private mount namespace, which takes root or user namespaces; without them they are left out.

    python benchmarks/faults.py [--rounds 100] [--seed 0] [--only WORD]
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch.utils.data import TensorDataset

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.errors import FeedError
from lightning_feed.storage import PackedDataset, pack, stage, verify_pack
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packed_dataset import FORMATS

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
from test_resume_everywhere import check as resume_check

FILES, SAMPLES = 40, 64
LIMIT_S = 120.0
"""Whatever takes longer, hangs."""
DONE, TOLD, WRONG, RAW = 0, 10, 11, 12
NAMES = {TOLD: "told", WRONG: "wrong data", RAW: "raw error"}
FORK = multiprocessing.get_context("fork")


class WrongData(Exception):
    """What was read is not what was written."""


class Bad(Exception):
    """What no user should meet."""


def main() -> int:
    """Try all families of faults, and print a table. Gives 1 where something was bad."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="of each family; some have a multiple of it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="families with this in their names")
    parser.add_argument("--small-disk", type=Path, help=argparse.SUPPRESS)  # called again, in a mount namespace
    arguments = parser.parse_args()
    families = ON_SMALL_DISKS if arguments.small_disk else FAMILIES
    for library in ("lmdb", "h5py"):  # once, here: a kill is to meet the work, not its imports
        importlib.import_module(library)
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        place = arguments.small_disk or Path(work)
        source = made_photos(Path(work) / "photos")
        for name, (family, share) in families.items():
            if arguments.only in name:
                rows.append(try_family(name, family(source, place), arguments, max(1, int(share * arguments.rounds))))
    if arguments.small_disk:
        print(json.dumps(rows))
        return 0
    rows += small_disks(arguments)
    print("\n| fault | tried | bad |\n|---|---:|---:|")
    for name, tried, bad in [*rows, ["all", sum(row[1] for row in rows), sum(row[2] for row in rows)]]:
        print(f"| {name} | {tried} | {bad} |")
    print(f"\n{time.monotonic() - began:.0f} s, seed {arguments.seed}")
    return int(any(row[2] for row in rows))


def try_family(
    name: str, fault: Callable[[random.Random], bool], arguments: argparse.Namespace, rounds: int
) -> list[Any]:
    """One fault after the other; those that came too late to be any are not counted."""
    tried = bad = 0
    for number in range(3 * rounds):
        if tried == rounds:
            break
        try:
            tried += fault(random.Random(f"{arguments.seed} {name} {number}"))
        except Bad as error:
            tried, bad = tried + 1, bad + 1
            print(f"BAD: {name}, round {number}: {error}", file=sys.stderr)
    print(f"{name}: {tried} tried, {bad} bad", file=sys.stderr)
    return [name, tried, bad]


def small_disks(arguments: argparse.Namespace) -> list[list[Any]]:
    """The families that need small file systems of their own, in a process that may mount them."""
    script = 'mount -t tmpfs -o size=64m none "$1" && shift && exec "$@"'
    with tempfile.TemporaryDirectory() as folder:
        again = [sys.executable, __file__, "--small-disk", folder, "--rounds", str(arguments.rounds)]
        again += ["--seed", str(arguments.seed), "--only", arguments.only]
        unshare = [
            "unshare",
            "--mount",
            *(["--map-root-user"] if os.getuid() else []),
            "sh",
            "-c",
            script,
            "sh",
            folder,
        ]
        done = subprocess.run([*unshare, *again], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        print("Full disks were not tried: nothing can be mounted here.", file=sys.stderr)
        return []
    rows: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


# --- processes --------------------------------------------------------------------------------------------------------


class Child:
    """A call in a process of its own, with a group for the workers that it starts."""

    def __init__(self, call: Callable[[], object]) -> None:
        handle, told = tempfile.mkstemp()
        os.close(handle)
        self.told = Path(told)
        self.began = time.monotonic()
        self.process = FORK.Process(target=_run, args=(call, self.told))
        self.process.start()

    def kill(self, *, alone: bool) -> bool:
        """Kill it, with its workers or without. Tells whether it was still at work."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            (os.kill if alone else os.killpg)(self.process.pid, signal.SIGKILL)
        self.process.join()
        return self.process.exitcode == -signal.SIGKILL

    def end(self) -> tuple[int | None, str]:
        """Its exit code, None for one that hangs, and what it said; its workers are killed."""
        self.process.join(max(0.0, LIMIT_S - (time.monotonic() - self.began)))
        code = self.process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()
        text = self.told.read_text()
        self.told.unlink()
        return code, text


def _run(call: Callable[[], object], told: Path) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    code, text = DONE, ""
    try:
        call()
    except FeedError as error:
        code, text = TOLD, str(error)
    except WrongData as error:
        code, text = WRONG, str(error)
    except BaseException:  # noqa: BLE001  # a raw error is what is looked for
        code, text = RAW, traceback.format_exc()
    told.write_text(text)
    sys.exit(code)


def must(call: Callable[[], object], when: str, *, may_refuse: bool = False) -> bool:
    """Run a call to its end, or raise Bad. False: it refused, with a message."""
    code, text = Child(call).end()
    if code == DONE:
        return True
    if code == TOLD and may_refuse:
        return False
    how = "hangs" if code is None else NAMES.get(code) or f"ends with {code}"
    raise Bad(f"{when}: {how}: {text.strip()[-600:]}")


def killed(call: Callable[[], object], longest_s: float, draw: random.Random) -> bool:
    """Kill the call at a random moment. False: it was over before."""
    child = Child(call)
    time.sleep(draw.uniform(0, longest_s))
    was_at_work = child.kill(alone=draw.random() < 0.5)
    if not was_at_work:
        child.end()
        return False
    child.told.unlink()
    return True


def timed(call: Callable[[], object], *made: Path) -> float:
    """How long an undisturbed call takes in a process, the shortest of three; what it made at these paths goes."""
    taken = []
    for _ in range(3):
        clear(*made)
        began = time.monotonic()
        must(call, "undisturbed")
        taken.append(time.monotonic() - began)
    return min(taken)


# --- data -------------------------------------------------------------------------------------------------------------


def made_photos(root: Path) -> Path:
    """JPEGs in two class folders, the same each time."""
    for number in range(FILES):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 40 + number, 3), dtype=np.uint8)
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, "JPEG")
        path = root / ("crow" if number % 2 else "wren") / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded.getvalue())
    return root


def content(root: Path) -> dict[str, str]:
    """Digests of all files below a folder."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha1(path.read_bytes()).hexdigest() for path in paths}


def check_pack(path: Path, source: Path) -> None:
    """Verify a pack, and hold every sample against its file. A refusal with a message is none of the wrong."""
    verify_pack(path)
    given, packed = FolderSource(source, scan_classes(source)), PackedDataset(path)
    if len(packed) != len(given) or tuple(packed.classes) != given.classes:
        raise WrongData(f"{len(packed)} samples of {packed.classes}")
    for number in range(len(given)):
        sample, label = packed[number]
        if bytes(sample) != given.read(number) or label != given.labels[number]:
            raise WrongData(f"sample {number}")


def check_copy(copy: Path, source: Path) -> None:
    """Hold a staged copy against its source."""
    if content(copy) != content(source):
        raise WrongData(f"{copy} is not {source}")


def flip(path: Path, draw: random.Random) -> str:
    """Flip one bit of a file, and say which."""
    data = bytearray(path.read_bytes())
    at, bit = draw.randrange(len(data)), draw.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"bit {bit} of byte {at} of {path.name}"


def clear(*paths: Path) -> None:
    """Remove what there is of these, and what was made beside them."""
    for path in paths:
        for one in [*path.parent.glob(f"{path.name}*"), *path.parent.glob(f".{path.name}*")]:
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def unchanged(source: Path, before: dict[str, str]) -> None:
    """Raise Bad where the source is not what it was."""
    if content(source) != before:
        raise Bad("the source was changed")


# --- kills ------------------------------------------------------------------------------------------------------------


def pack_killed(source: Path, place: Path, *, format: str) -> Callable[[random.Random], bool]:
    """``pack``, killed and called again."""
    before, dest = content(source), place / "killed.pack"
    work = partial(pack, source, dest, format=format)
    longest_s = timed(work, dest)

    def fault(draw: random.Random) -> bool:
        clear(dest)
        if not killed(work, longest_s, draw):
            return False
        if not dest.exists():
            must(work, "called again")
        must(partial(check_pack, dest, source), "read")
        unchanged(source, before)
        return True

    return fault


def stage_killed(source: Path, place: Path) -> Callable[[random.Random], bool]:
    """``stage``, killed and called again."""
    before, dest = content(source), place / "ram"
    work = partial(stage, source, dest)
    longest_s = timed(work, dest)

    def fault(draw: random.Random) -> bool:
        clear(dest)
        if not killed(work, longest_s, draw):
            return False
        must(work, "called again")
        must(partial(check_copy, dest / source.name, source), "read")
        unchanged(source, before)
        return True

    return fault


class Numbers(FastDataModule):
    """Numbers, each of which moves the weights in its own way."""

    def make_dataset(self, split: str) -> Any:
        """All numbers for training, and nothing else."""
        return TensorDataset(torch.linspace(0, 1, SAMPLES).reshape(SAMPLES, 1)) if split == "train" else None


class Model(LightningModule):
    """One weight for each way to notice another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """A loss that depends on every sample."""
        return (self.layer(batch[0]) - torch.linspace(-1, 1, 8)).square().mean()

    def configure_optimizers(self) -> Any:
        """Momentum, so that the order of the steps counts."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(folder: Path) -> None:
    """Train, from the last checkpoint if there is one, as a job that is started again does."""
    seed_everything(1, verbose=False)
    last = folder / "last.ckpt"
    keep = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1, save_top_k=0)
    trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[keep], enable_progress_bar=False)
    model, data = Model(), Numbers(batch_size=4, loader=LoaderSettings(num_workers=1, pin_memory=False))
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    torch.save(model.state_dict(), folder / "weights.pt")


def check_weights(folder: Path, expected: Path) -> None:
    """Hold the weights of a resumed run against those of one that was never broken off, bit by bit."""
    found, right = (torch.load(one / "weights.pt") for one in (folder, expected))
    if not all(torch.equal(found[name], right[name]) for name in right):
        raise WrongData("other weights than without the kill")


def fit_killed(_: Path, place: Path) -> Callable[[random.Random], bool]:
    """A training that is killed and resumed in mid-epoch."""
    right, folder = place / "unbroken", place / "broken"
    longest_s = timed(partial(train, right), right)

    def fault(draw: random.Random) -> bool:
        clear(folder)
        if not killed(partial(train, folder), longest_s, draw):
            return False
        must(partial(train, folder), "resumed")
        must(partial(check_weights, folder, right), "compared")
        return True

    return fault


# --- flipped bits -----------------------------------------------------------------------------------------------------


def pack_flipped(source: Path, place: Path, *, format: str) -> Callable[[random.Random], bool]:
    """A bit of a pack, in any of its files."""
    sound, damaged = place / f"sound-{format}", place / f"damaged-{format}"
    must(partial(pack, source, sound, format=format), "packed")

    def fault(draw: random.Random) -> bool:
        clear(damaged)
        shutil.copytree(sound, damaged)
        files = sorted(path for path in damaged.rglob("*") if path.is_file() and path.stat().st_size)
        where = flip(draw.choice(files), draw)
        must(partial(check_pack, damaged, source), where, may_refuse=True)
        return True

    return fault


# --- full disks -------------------------------------------------------------------------------------------------------


def resize(disk: Path, size: int) -> None:
    """Give a tmpfs another size, not less than what it holds."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)


def disk_full(
    disk: Path, dest: Path, work: Callable[[], object], check: Callable[[], object]
) -> Callable[[random.Random], bool]:
    """Work on a disk that has no room, from the beginning or at a random moment on, and again when there is."""
    clear(*disk.iterdir())
    longest_s = timed(work, dest)
    needed = sum(path.stat().st_blocks * 512 for path in disk.rglob("*") if path.is_file())

    def fault(draw: random.Random) -> bool:
        clear(dest)
        kind = draw.choice(("small", "filled"))
        if kind == "small":
            resize(disk, max(4096, int(needed * draw.uniform(0.05, 2))))
        child = Child(work)
        filler = disk / "filler"
        if kind == "filled":
            time.sleep(draw.uniform(0, longest_s))
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                resize(disk, 4 << 20)
                while True:
                    file.write(bytes(64 << 10))
        code, text = child.end()
        filler.unlink(missing_ok=True)
        resize(disk, 64 << 20)
        if code not in (DONE, TOLD):
            raise Bad(f"{kind} disk: {NAMES.get(code or -1, code)}: {text[-600:]}")
        if code == TOLD:
            must(work, "called again, with room")
        must(check, "read")
        return code == TOLD

    return fault


def pack_on_full_disk(source: Path, disk: Path) -> Callable[[random.Random], bool]:
    """``pack`` to a small disk."""
    dest = disk / "full.pack"
    return disk_full(disk, dest, partial(pack, source, dest), partial(check_pack, dest, source))


def stage_on_full_disk(source: Path, disk: Path) -> Callable[[random.Random], bool]:
    """``stage`` to a small disk."""
    dest = disk / "ram"
    return disk_full(disk, dest, partial(stage, source, dest), partial(check_copy, dest / source.name, source))


Family = tuple[Callable[[Path, Path], Callable[[random.Random], bool]], float]
# --- resumed from any place -------------------------------------------------------------------------------------------


def resumed(_: Path, place: Path) -> Callable[[random.Random], bool]:
    """A fit goes on from a checkpoint of any place, changed or not: each sample once, or ResumeError."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    folder = place / "resumed"

    def fault(draw: random.Random) -> bool:
        clear(folder)
        seed = draw.randrange(10**9)  # the tests take the first few hundred
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return resume_check(seed, folder) != "no checkpoint"
        except Exception as error:
            raise Bad(f"combination {seed}: {error!r:.2000}") from error

    return fault


FAMILIES: dict[str, Family] = {
    **{f"kill: pack, {name}": (partial(pack_killed, format=name), 0.5) for name in FORMATS},
    "kill: stage": (stage_killed, 1),
    "kill: fit, resumed": (fit_killed, 0.4),
    **{f"flipped bit: pack, {name}": (partial(pack_flipped, format=name), 2) for name in FORMATS},
    "resumed: any place, changed or not": (resumed, 2),
}
ON_SMALL_DISKS: dict[str, Family] = {
    "full disk: pack": (pack_on_full_disk, 0.5),
    "full disk: stage": (stage_on_full_disk, 0.5),
}

if __name__ == "__main__":
    sys.exit(main())
