"""The demo: one model trained twice on the same images, in the usual way and fed, and both reports side by side."""

import copy
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.data.datamodule import FastDataModule
from lightning_feed.diagnosing.short_fits import quiet
from lightning_feed.errors import DatasetError, SettingsError, plural
from lightning_feed.extras import require
from lightning_feed.load.machine import read_machine

PIXELS = 32
"""Side of the model's input: small, so that the demo ends soon on two CPU cores."""
BATCH_SIZE = 64
MOST_IMAGES = 100_000
# Photographs in scikit-image's wheel (nothing is downloaded), freed for any use by their docstrings in skimage.data:
# public domain: astronaut (NASA), hubble_deep_field (NASA), rocket (SpaceX);
# CC0: brick, camera (Lav Varshney), chelsea (Stefan van der Walt), coffee (Rachel Michetti), grass, gravel,
#      retina (Mikael Haeggstroem).
# Left out: those without a licence note (moon, stereo_motorcycle) or with "no known restrictions" only.
SOURCES = (
    "astronaut", "brick", "camera", "chelsea", "coffee", "grass", "gravel", "hubble_deep_field", "retina", "rocket",
)  # fmt: skip


# --- images -------------------------------------------------------------------------------------------------------


def make_images(out: Path, count: int) -> Path:
    """Write ``count`` JPEGs of 280 to 480 pixels a side, one class folder per source photograph; reuse finished ones.

    The folder appears under its name only when it is complete: it is written beside it and renamed.

    Args:
        out: where the folder ``pictures-<count>`` goes.
        count: how many, 1 to 100,000.

    Raises:
        SettingsError: when ``count`` is out of range.
        DatasetError: when they cannot be written.
        MissingExtraError: without scikit-image.
    """
    if not 1 <= count <= MOST_IMAGES:
        raise SettingsError(f"--images {count}: the demo needs between 1 and {MOST_IMAGES:,} images.")
    target = out / f"pictures-{count}"
    if target.exists():
        return target
    data = require("skimage.data", extra="demo", why="making the demo's images")
    photographs = {name: Image.fromarray(getattr(data, name)()).convert("RGB") for name in SOURCES[:count]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
        try:
            _write_images(unfinished, count, photographs)
            unfinished.chmod(0o755)  # mkdtemp's is for the owner alone
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # gone already when the rename went through
    except OSError as error:
        raise DatasetError(
            f"the images could not be written to {out}: {error}. Choose another folder with --out."
        ) from error
    return target


def _write_images(folder: Path, count: int, photographs: dict[str, Image.Image]) -> None:
    for name in photographs:
        (folder / name).mkdir()
    for index in tqdm(range(count), desc="making images", unit="image", disable=not sys.stderr.isatty()):
        name = SOURCES[index % len(photographs)]
        (folder / name / f"{index:06d}.jpg").write_bytes(_varied_jpeg(photographs[name], index))


def _varied_jpeg(photograph: Image.Image, seed: int) -> bytes:
    """A random crop, perhaps mirrored, lighter or darker, as a JPEG of random quality: no two files are alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        height, width = (int(torch.randint(280, min(480, side) + 1, ())) for side in photograph.size[::-1])
        crop, flip = v2.RandomCrop((height, width)), v2.RandomHorizontalFlip()
        varied = v2.Compose([crop, flip, v2.ColorJitter(brightness=0.3)])(photograph)
        buffer = io.BytesIO()
        varied.save(buffer, format="JPEG", quality=int(torch.randint(75, 96, ())))
    return buffer.getvalue()


def find_images(root: Path, most: int) -> ImageFolder:
    """The images of a folder of class folders, at most ``most`` of them, taken evenly over the whole list.

    Raises:
        SettingsError: when ``most`` is below 1.
        DatasetError: when the folder is missing or holds no class folders with images.
    """
    if most < 1:
        raise SettingsError(f"--images {most}: at least 1 image is needed.")
    try:
        found = ImageFolder(root, loader=_open_image, allow_empty=True)
    except OSError as error:
        raise DatasetError(
            f"--data {root} cannot be used: {error}. Give a folder that holds one folder of images for each class."
        ) from error
    if not found.samples:
        raise DatasetError(f"the folders in {root} hold no images. Put them into one folder for each class.")
    taken = min(most, len(found.samples))
    found.samples = [found.samples[index * len(found.samples) // taken] for index in range(taken)]
    return found


def _open_image(path: str) -> Image.Image:
    try:
        with Image.open(path) as file:
            image: Image.Image = file.convert("RGB")
    except OSError as error:  # Pillow's own errors are OSErrors too
        raise DatasetError(
            f"{path} cannot be read as an image ({error}). Delete it or replace it, then start again."
        ) from error
    return image


def _transformed(images: ImageFolder, transform: Callable[[Image.Image], Tensor]) -> ImageFolder:
    images = copy.copy(images)
    images.transform = transform
    return images


# --- training -----------------------------------------------------------------------------------------------------


class SmallResNet(LightningModule):
    """torchvision's ResNet-18, untrained, with SGD."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = models.resnet18(num_classes=classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of (batch, 3, PIXELS, PIXELS) float32 images against (batch,) int64 classes."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def plain_loader(images: ImageFolder) -> DataLoader[Any]:
    """As most people write it first: normalised float32 images from the loader, no workers."""
    crop, flip = v2.RandomResizedCrop(PIXELS), v2.RandomHorizontalFlip()
    floats = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)
    dataset = _transformed(images, v2.Compose([crop, flip, *floats]))
    return DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)


class FedImages(FastDataModule):
    """The same images and the same transforms, in uint8 until they are on the device."""

    def __init__(self, images: ImageFolder) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        self._images = images

    def make_dataset(self, split: str) -> ImageFolder | None:
        """The training images; there are no other splits."""
        transform = v2.Compose([v2.RandomResizedCrop(PIXELS), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return _transformed(self._images, transform) if split == "train" else None

    def device_transform(self, batch: tuple[Tensor, Tensor], split: str) -> tuple[Tensor, Tensor]:
        """Make (batch, 3, PIXELS, PIXELS) uint8 images float32 from -1 to 1, on the device.

        Without a constant to copy to the device: such a copy in each step would make the host wait.
        """
        images, classes = batch
        return images.float().div_(127.5).sub_(1), classes


Figures = dict[str, float | str | None]
"""What one of the two runs measured, by name with unit; None: the run was too short to measure it."""


def _train(data: Any, callbacks: list[Callback], images: ImageFolder, logs: Path, epochs: int) -> Figures:
    seed_everything(0, workers=True, verbose=False)
    starvation = GPUStarvationCallback(report=False)  # both reports are shown together
    trainer = Trainer(
        max_epochs=epochs,
        devices=1,
        logger=TensorBoardLogger(logs, name="fed" if callbacks else "plain"),
        callbacks=[*callbacks, starvation],
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        # Lightning draws its bar on stdout; a redirected stdout is for the table alone.
        enable_progress_bar=sys.stderr.isatty() and sys.stdout.isatty(),
    )
    began = time.perf_counter()
    try:
        trainer.fit(SmallResNet(len(images.classes)), data)
    except SystemExit as stopped:
        if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1, which is ours for a FeedError
            raise KeyboardInterrupt from stopped
        raise
    seconds, found = time.perf_counter() - began, starvation.report()
    stats = found.stats
    return {
        "step_ms": stats.step_ms,
        "compute_ms": stats.compute_ms,
        "data_ms": stats.data_idle_ms,
        "h2d_ms": stats.h2d_ms,
        "other_ms": stats.other_ms,
        "starved_pct": stats.starved_pct,
        "samples_per_s": epochs * len(images) / seconds,  # of the whole fit, the start of the workers included
        "epoch_s": seconds / epochs,
        "verdict": found.grade if found.bottleneck == "unknown" else f"{found.bottleneck}: {found.grade}",
    }


# --- both runs ----------------------------------------------------------------------------------------------------

ROWS = {
    "step_ms": ("step ms", ".1f"),
    "compute_ms": ("  compute", ".1f"),
    "data_ms": ("  data", ".1f"),
    "h2d_ms": ("  h2d", ".1f"),
    "other_ms": ("  other", ".1f"),
    "starved_pct": ("starved %", ".1f"),
    "samples_per_s": ("samples/s", ".0f"),
    "epoch_s": ("epoch s", ".2f"),
    "verdict": ("verdict", ""),
}
"""Figure -> what it is called in the table, and its format."""


def demo_text(outcome: dict[str, Any]) -> str:
    """What :func:`run_demo` found as a table, and how to open the logs."""
    stand_in = (
        "\nThere is no GPU here. As a stand-in, training has half of the CPUs, in both runs; the fed loader\n"
        "uses the others, which the plain one leaves idle. What a GPU gains only a GPU can show."
    )
    return (
        f"ResNet-18, {outcome['pictures']:,} images at {PIXELS} x {PIXELS}, batches of {BATCH_SIZE}, "
        f"{plural(outcome['epochs'], 'epoch')} each, on {outcome['device']} with {outcome['cpus']} CPUs\n"
        "plain: DataLoader as most people write it (float32, no workers)\n"
        f"fed:   FastDataModule (uint8, {outcome['workers']} workers) and PrefetchCallback\n\n"
        f"{_table(outcome['plain'], outcome['fed'])}\n\n"
        f"seconds per epoch, plain : fed = {outcome['ratio']:.2f} : 1"
        f"{stand_in if outcome['device'] == 'CPU' else ''}\n\n"
        f"TensorBoard:  tensorboard --logdir {outcome['logs']}"
    )


def _table(plain: Figures, fed: Figures) -> str:
    cells = [("", "plain", "fed")]
    for name, (label, form) in ROWS.items():
        left, right = ("not measured" if one is None else format(one, form) for one in (plain[name], fed[name]))
        cells.append((label, left, right))
    first, second = (max(len(row[column]) for row in cells) for column in (0, 1))
    return "\n".join(f"{label:<{first}}  {left:<{second}}  {right}".rstrip() for label, left, right in cells)


def run_demo(*, data: Path | None, images: int, epochs: int, out: Path) -> dict[str, Any]:
    """Train twice and compare.

    Args:
        data: a folder of class folders; None makes images in ``out``, or reuses those made before.
        images: how many images to make, or to take from ``data`` at most.
        epochs: of each run, 1 or more.
        out: where images and TensorBoard logs go.

    Raises:
        SettingsError: when ``images`` or ``epochs`` is out of range.
        DatasetError: when ``data`` holds no readable images, or a file cannot be read.
        MissingExtraError: without the extra ``demo``.
        KeyboardInterrupt: on Ctrl-C, also where Lightning turns it into an exit.

    Returns:
        The figures of both runs, and what they ran on.
    """
    if epochs < 1:
        raise SettingsError(f"--epochs {epochs}: at least 1 is needed.")
    require("tensorboard", extra="demo", why="writing the demo's logs")
    found = find_images(data if data is not None else make_images(out, images), images)
    fed_data = FedImages(found)
    with quiet(), _half_the_cpus():
        _warm_up(len(found.classes))
        plain = _train(plain_loader(found), [], found, out / "logs", epochs)
        fed = _train(fed_data, [PrefetchCallback()], found, out / "logs", epochs)
    return {
        "plain": plain,
        "fed": fed,
        "pictures": len(found),
        "epochs": epochs,
        "cpus": read_machine().usable_cpus,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "workers": fed_data.recommendations["train"].num_workers,
        "ratio": float(plain["epoch_s"] or 0.0) / float(fed["epoch_s"] or 1.0),
        "logs": out / "logs",
    }


def _warm_up(classes: int) -> None:
    """Some steps beforehand: what the first use of the device costs must not count against the plain run, the first."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SmallResNet(classes).network.to(device)
    for _ in range(3):
        model(torch.zeros(BATCH_SIZE, 3, PIXELS, PIXELS, device=device)).sum().backward()


@contextmanager
def _half_the_cpus() -> Iterator[None]:
    """Training on the CPU gets half of its threads, in both runs, as a stand-in for a device of its own.

    With all of them, workers and training would compete for the same cores. OpenMP's threads wait for each other in
    every layer, so a core taken away for a moment stops all: the same step was seen to take several times as long.
    """
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
