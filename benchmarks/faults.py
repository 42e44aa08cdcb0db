"""Random faults, many of them: kills and flipped bits while data are packed and trained on.

Bad is what no user should meet: wrong data without a word, a source that was changed, a run that cannot go on
afterwards, an error that is no message (a raw traceback, a crash), or one that hangs.

    python benchmarks/faults.py [--rounds 100] [--seed 0] [--only WORD]
"""

import argparse
import contextlib
import hashlib
import importlib
import io
import logging
import multiprocessing
import os
import random
import shutil
import signal
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
from lightning_feed.storage import PackedDataset, pack

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))
import test_resume_everywhere as resume_cases  # type: ignore[import-not-found]  # which lies among the tests

CLASSES = ("crow", "wren")
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
    arguments = parser.parse_args()
    importlib.import_module("lmdb")  # once, here: a kill is to meet the work, not its imports
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as work:
        os.environ["XDG_CACHE_HOME"] = f"{work}/cache"
        place = Path(work)
        source = made_photos(Path(work) / "photos")
        for name, (family, share) in FAMILIES.items():
            if arguments.only in name:
                rows.append(try_family(name, family(source, place), arguments, max(1, int(share * arguments.rounds))))
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
        path = root / CLASSES[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded.getvalue())
    return root


def content(root: Path) -> dict[str, str]:
    """Digests of all files below a folder."""
    paths = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha1(path.read_bytes()).hexdigest() for path in paths}


def check_pack(path: Path, source: Path) -> None:
    """Hold every sample of a pack against its file. A sample that is refused with a message is none of the wrong."""
    packed = PackedDataset(path)
    files = sorted(source.rglob("*.jpg"))
    if len(packed) != len(files) or tuple(packed.classes) != CLASSES:
        raise WrongData(f"{len(packed)} samples of {packed.classes}")
    for number, file in enumerate(files):
        try:
            sample, label = packed[number]
        except FeedError:
            continue
        if bytes(sample) != file.read_bytes() or CLASSES[label] != file.parent.name:
            raise WrongData(f"sample {number}")


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


def pack_killed(source: Path, place: Path) -> Callable[[random.Random], bool]:
    """``pack``, killed and called again."""
    before, dest = content(source), place / "killed.pack"
    work = partial(pack, source, dest)
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


def pack_flipped(source: Path, place: Path) -> Callable[[random.Random], bool]:
    """A bit of a pack, in any of its files."""
    sound, damaged = place / "sound", place / "damaged"
    must(partial(pack, source, sound), "packed")

    def fault(draw: random.Random) -> bool:
        clear(damaged)
        shutil.copytree(sound, damaged)
        files = sorted(path for path in damaged.rglob("*") if path.is_file() and path.stat().st_size)
        where = flip(draw.choice(files), draw)
        must(partial(check_pack, damaged, source), where, may_refuse=True)
        return True

    return fault


# --- resumed from any place -------------------------------------------------------------------------------------------


def resumed(_: Path, place: Path) -> Callable[[random.Random], bool]:
    """A fit goes on from a checkpoint of any place, changed or not: the same samples, or ResumeError."""
    return partial(resume_fault, place / "resumed", several=False)


def resumed_by_ranks(_: Path, place: Path) -> Callable[[random.Random], bool]:
    """The same with several ranks, or another number of them."""
    return partial(resume_fault, place / "resumed", several=True)


def resume_fault(folder: Path, draw: random.Random, *, several: bool) -> bool:
    """Train, resume and compare one random case. False: no checkpoint was written."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clear(folder)
    seed = draw.randrange(10**9)  # the tests take the first few
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            ranks = resume_cases.draw_ranks(seed) if several else (1, 1)
            return str(resume_cases.check(seed, folder, ranks)) != "no checkpoint"
    except Exception as error:
        raise Bad(f"combination {seed}: {error!r:.2000}") from error


Family = tuple[Callable[[Path, Path], Callable[[random.Random], bool]], float]
"""A kind of fault, and its rounds for each of ``--rounds``."""
FAMILIES: dict[str, Family] = {
    "kill: pack": (pack_killed, 1),
    "kill: fit, resumed": (fit_killed, 0.4),
    "flipped bit: pack": (pack_flipped, 2),
    "resumed: any place, changed or not": (resumed, 4),
    "resumed: several ranks": (resumed_by_ranks, 0.4),
}
if __name__ == "__main__":
    sys.exit(main())
