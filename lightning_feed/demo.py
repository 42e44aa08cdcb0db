"""The demo trains one model three times on the same images: the usual way, fed, and as the first report advises."""

import copy
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from lightning_feed.callbacks.prefetch import PrefetchCallback
from lightning_feed.callbacks.starvation import GPUStarvationCallback
from lightning_feed.data.datamodule import FastDataModule
from lightning_feed.data.images import ImageFolderDataModule
from lightning_feed.diagnosing.restoring import quiet
from lightning_feed.diagnosing.run import measure_loaders
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.extras import require
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.cpu_time import others_pct_now
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.report.document import make_report
from lightning_feed.report.files import as_text, check_writable, mark_colour, page_template, write_report, write_whole
from lightning_feed.report.report import Report
from lightning_feed.report.sections import advice_sections, step_sections
from lightning_feed.verdict.decide import decide
from lightning_feed.verdict.diagnosis import Remedy
from lightning_feed.wording import plural

PIXELS = 64
"""Side of the model's input: small, so that the demo ends soon on two CPU cores."""
BATCH_SIZE = 16
"""Batch size: small, so that a few hundred images are enough steps for a verdict."""
SIDES = (768, 1024)
"""Smallest and largest side of the images that are made, in pixels. Today's photos are even larger. With thumbnails of
300 pixels, little decoding could be saved."""
IMAGES = 512
EPOCHS = 3
MOST_IMAGES = 100_000
TRIAL_S = 12.0
TRIALS = ("crops", "workers")
"""Seconds for the trials after the plain run, and these trials: decoding whole images and only crops in turn, and
loading with other numbers of workers."""
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
    """Write ``count`` JPEGs of 768 to 1,024 pixels a side, one class folder per source photograph; reuse finished ones.

    The folder is written under a temporary name beside its final path, and renamed when it is complete.

    Args:
        out: the folder for ``pictures-<count>``.
        count: number of images, 1 to 100,000.

    Raises:
        SettingsError: if ``count`` is out of range.
        DatasetError: if the images cannot be written.
        MissingExtraError: if scikit-image is not installed.
    """
    if not 1 <= count <= MOST_IMAGES:
        raise SettingsError(f"images={count}: the demo needs between 1 and {MOST_IMAGES:,} images.")
    target = out / f"pictures-{count}"
    if target.exists():
        return target
    data = require("skimage.data", extra="demo", why="making the demo's images")
    photographs = {name: Image.fromarray(getattr(data, name)()).convert("RGB") for name in SOURCES[:count]}
    try:
        out.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=out))
        try:
            for name in photographs:
                (unfinished / name).mkdir()
            for index in tqdm(range(count), desc="making images", unit="image", disable=None):
                name = SOURCES[index % len(photographs)]
                (unfinished / name / f"{index:06d}.jpg").write_bytes(_varied_jpeg(photographs[name], index))
            unfinished.chmod(0o755)  # only the owner can open a folder of mkdtemp
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # no longer there if it was renamed
    except OSError as error:
        raise DatasetError(
            f"the images could not be written to {out}: {error}. Choose another folder with --out."
        ) from error
    return target


def _varied_jpeg(photograph: Image.Image, seed: int) -> bytes:
    """A random crop, perhaps mirrored, lighter or darker, as a JPEG of random quality: no two files are alike.

    Photographs smaller than the crop are padded with their mirror image. Enlarging them would blur them, so that their
    JPEGs would be smaller, and faster to decode, than real JPEGs of that size.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        height, width = torch.randint(SIDES[0], SIDES[1] + 1, (2,)).tolist()
        crop = v2.RandomCrop((height, width), pad_if_needed=True, padding_mode="symmetric")
        flip = v2.RandomHorizontalFlip()
        varied = v2.Compose([crop, flip, v2.ColorJitter(brightness=0.3)])(photograph)
        buffer = io.BytesIO()
        varied.save(buffer, format="JPEG", quality=int(torch.randint(75, 96, ())))
    return buffer.getvalue()


def find_images(root: Path, most: int) -> ImageFolder:
    """The images of a folder of class folders. If there are more than ``most``, takes ``most`` images, evenly spaced.

    Raises:
        SettingsError: if ``most`` is below 1.
        DatasetError: if the folder is missing or holds no class folders with images.
    """
    if most < 1:
        raise SettingsError(f"images={most}: at least 1 image is needed.")
    try:
        folder = ImageFolder(root, loader=_open_image, allow_empty=True)
    except OSError as error:
        reason = (error.strerror or str(error)).rstrip(".")
        raise DatasetError(
            f"--data {root} cannot be used: {reason}. Give a folder that holds one folder of images for each class."
        ) from error
    if not folder.samples:
        raise DatasetError(f"the folders in {root} hold no images. Put them into one folder for each class.")
    folder.samples = [folder.samples[index] for index in _evenly(len(folder.samples), most)]
    return folder


def _evenly(length: int, most: int) -> list[int]:
    taken = min(most, length)
    return [index * length // taken for index in range(taken)]


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


class SmallModel(LightningModule):
    """torchvision's ShuffleNetV2, untrained, with SGD.

    The model is small, because a CPU may have to stand in for a GPU: a large model would limit training, so that no
    loader could make an epoch shorter. Yet a step takes longer than a worker needs to decode the crops of a batch, so
    that a loader can keep up.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.network = models.shufflenet_v2_x1_0(num_classes=classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy of (batch, 3, PIXELS, PIXELS) float32 images against (batch,) int64 classes."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


def plain_transform() -> v2.Compose:
    """RandomResizedCrop and flip, to normalised float32 images."""
    crop = v2.RandomResizedCrop(PIXELS)
    flip = v2.RandomHorizontalFlip()
    floats = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)
    return v2.Compose([crop, flip, *floats])


def plain_loader(images: ImageFolder) -> DataLoader[Any]:
    """A DataLoader as most people first write it: normalised float32 images, no workers."""
    return DataLoader(_transformed(images, plain_transform()), batch_size=BATCH_SIZE, shuffle=True)


class FedImages(FastDataModule):
    """The images and transforms of the plain run, in uint8 until they are on the device."""

    def __init__(self, images: ImageFolder) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        self._images = images

    def make_dataset(self, split: str) -> ImageFolder | None:
        """The training images; there are no other splits."""
        if split != "train":
            return None
        transform = v2.Compose([v2.RandomResizedCrop(PIXELS), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        return _transformed(self._images, transform)

    def device_transform(self, batch: tuple[Tensor, Tensor], split: str) -> tuple[Tensor, Tensor]:
        """Convert (batch, 3, PIXELS, PIXELS) uint8 images to float32 from -1 to 1, on the device.

        Uses plain numbers, not constant tensors: copying a tensor to the device in each step would make the host wait.
        """
        images, classes = batch
        return images.float().div_(127.5).sub_(1), classes


class AdvisedImages(ImageFolderDataModule):
    """The plain run's images and transform, but decoding only the crop, as that run's report advises."""

    def __init__(self, images: ImageFolder, advice: Remedy | None) -> None:
        settings = LoaderSettings()
        workers = re.search(r"num_workers=(\d+)", advice.code if advice is not None else "")
        if workers is not None:
            settings = LoaderSettings(num_workers=int(workers[1]))
        super().__init__(images.root, BATCH_SIZE, transform=plain_transform(), val_fraction=0, loader=settings)
        self._most = len(images)

    def make_dataset(self, split: str) -> Any:
        """The training images, as many as the other runs have; there are no other splits."""
        dataset = super().make_dataset(split)
        if dataset is None or len(dataset) <= self._most:
            return dataset
        return Subset(dataset, _evenly(len(dataset), self._most))


class Course(Callback):
    """Times the epochs of a run, and draws their progress on stderr where that is a terminal.

    Lightning's own bar goes to stdout, which is for the table alone.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._made = time.perf_counter()
        self.setup_s = 0.0
        self.epochs_s = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time of the set-up, which has a row of its own in the table."""
        self._began = time.perf_counter()
        self.setup_s = self._began - self._made
        steps = int(trainer.num_training_batches) * (trainer.max_epochs or 1)
        self._bar = tqdm(total=steps, desc=f"{self._name:8}", unit="step", disable=None)

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """Count a step."""
        self._bar.update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the device, which may still work on the last steps."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.epochs_s = time.perf_counter() - self._began
        self._bar.close()


Figures = dict[str, float | str | None]
"""Measurements of a run, by name with unit; None if the run was too short to measure one."""


class Run(NamedTuple):
    """The results of a run."""

    figures: Figures
    report: Report
    path: Path
    """The report's HTML page."""


def _train(name: str, data: Any, images: ImageFolder, epochs: int, logs: Path) -> Run:
    seed_everything(0, workers=True, verbose=False)
    course = Course(name)
    starvation = GPUStarvationCallback(report=False)  # the demo prints all results at its end
    callbacks = [starvation, course]
    if name == "fed":
        callbacks.insert(0, PrefetchCallback())
    trainer = Trainer(
        max_epochs=epochs,
        devices=1,
        logger=TensorBoardLogger(logs, name=name),
        callbacks=callbacks,
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    try:
        trainer.fit(SmallModel(len(images.classes)), data)
    except SystemExit as stopped:
        if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1, which is ours for a FeedError
            raise KeyboardInterrupt from stopped
        raise
    diagnosis = starvation.report()
    if name == "plain":
        # The trials, as `lightning-feed diagnose` makes them.
        session = Session(train_loaders=data, measured=diagnosis.measurements)
        measure_loaders(session, budget_s=TRIAL_S, only=TRIALS)
        diagnosis = decide(replace(diagnosis.measurements, experiments=session.results, diagnosed=True))
    report = make_report(diagnosis)
    written = write_report(report, Path(trainer.log_dir or logs))
    page = next(path for path in written if path.suffix == ".html")
    return Run(_figures(report, course.setup_s, course.epochs_s / epochs, len(images)), report, page)


def _advice(report: Report) -> Remedy | None:
    """The remedy in the plain run's report that the advised run follows; None if there is no such remedy."""
    return next((remedy for remedy in report.diagnosis.remedies if remedy.form == "replacement"), None)


def _figures(report: Report, setup_s: float, epoch_s: float, images: int) -> Figures:
    stats = report.diagnosis.stats
    return {
        "step_ms": stats.step_ms,
        "compute_ms": stats.compute_ms,
        "data_ms": stats.data_ms,
        "copy_ms": stats.copy_ms,
        "other_ms": stats.other_ms,
        "starved_pct": stats.starved_pct,
        "first_batch_s": stats.epoch_start_s,
        "setup_s": setup_s,
        "epoch_s": epoch_s,
        "samples_per_s": images / epoch_s,  # the start of the workers included
        "verdict": verdict_words(report),
    }


def verdict_words(report: Report) -> str:
    """Bottleneck and grade of a run."""
    diagnosis = report.diagnosis
    if diagnosis.bottleneck == "unknown":
        return diagnosis.grade
    return f"{diagnosis.bottleneck}: {diagnosis.grade}"


# --- all runs -----------------------------------------------------------------------------------------------------

Outcome: TypeAlias = dict[str, Any]
"""The output of ``--json``, as returned by :func:`run_demo`."""
RUNS = ("plain", "fed", "advised")
ROWS = {
    "step_ms": ("step ms", ".1f"),
    "compute_ms": ("  compute", ".1f"),
    "data_ms": ("  data", ".1f"),
    "copy_ms": ("  copy", ".1f"),
    "other_ms": ("  other", ".1f"),
    "starved_pct": ("starved %", ".1f"),
    "first_batch_s": ("first batch s", ".2f"),
    "setup_s": ("set-up s", ".2f"),
    "epoch_s": ("epoch s", ".2f"),
    "samples_per_s": ("samples/s", ".0f"),
    "verdict": ("verdict", ""),
}
"""For each figure, its name in the table and its format."""


def demo_text(outcome: Outcome) -> str:
    """The results of :func:`run_demo` as text: a report, a table of all runs, and paths."""
    meanings = "".join(f"{name + ':':8} {meaning}\n" for name, meaning in _meanings(outcome).items())
    epochs_s = " : ".join(f"{outcome[name]['epoch_s']:.2f}" for name in RUNS)
    return (
        f"{_what(outcome)}\n{meanings}\n"
        f"The report of the plain run:\n\n{outcome['plain_report']}\n\n{_table(outcome)}\n\n"
        f"seconds per epoch, plain : fed : advised = {epochs_s}\n"
        f"advised is {outcome['ratio']:.2f} times as fast as plain\n\n"
        f"{_on_the_device(outcome)}\n\n"
        f"Report:       {outcome['report']}\n"
        + "".join(f"  {name:9}   {outcome['reports'][name]}\n" for name in RUNS)
        + f"TensorBoard:  tensorboard --logdir {outcome['logs']}"
    )


def _what(outcome: Outcome) -> str:
    return (
        f"ShuffleNetV2, {outcome['pictures']:,} images at {PIXELS} x {PIXELS}, batches of {BATCH_SIZE}, "
        f"{plural(outcome['epochs'], 'epoch')} each, on {outcome['device']} with {plural(outcome['cpus'], 'CPU')}"
    )


def _meanings(outcome: Outcome) -> dict[str, str]:
    how = "which decodes only what the crop needs" if outcome["decoder"] == "turbo-region" else "the fastest here"
    return {
        "plain": "DataLoader as most people write it (float32, no workers)",
        "fed": f"FastDataModule (uint8, {plural(outcome['workers'], 'worker')}) and PrefetchCallback",
        "advised": f"ImageFolderDataModule (decoder {outcome['decoder']!r}, {how})",
    }


def _on_the_device(outcome: Outcome) -> str:
    """The waiting times of the GPU in each run, if measured; without a GPU, a note on the CPU that stands in for it."""
    if outcome["device"] == "CPU":
        return (
            "There is no GPU here. As a stand-in, training has half of the CPUs, in all runs. The fed and advised\n"
            "runs load on the other half. Gains on a GPU will differ."
        )
    starved = ", ".join(f"{_in_words(outcome[name]['starved_pct'], '.1f')} % ({name})" for name in RUNS)
    return f"Of each step the GPU waited for data: {starved}"


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", *RUNS)]
    for name, (label, form) in ROWS.items():
        rows.append((label, *(_in_words(outcome[run][name], form) for run in RUNS)))
    return rows


def _in_words(value: float | str | None, form: str) -> str:
    if value is None:
        return "not measured"
    return format(value, form)


def _table(outcome: Outcome) -> str:
    rows = _rows(outcome)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def run_demo(*, data: Path | None, out: Path, images: int = IMAGES, epochs: int = EPOCHS) -> Outcome:
    """Train three times and compare.

    Args:
        data: a folder of class folders, or one that holds such a folder named ``train``; None makes images in ``out``,
            or reuses those made before.
        images: number of images to make, or to take from ``data`` at most.
        epochs: epochs of each run, 1 or more.
        out: folder for images, reports and TensorBoard logs.

    Raises:
        SettingsError: if ``images`` or ``epochs`` is out of range.
        DatasetError: if ``data`` holds no readable images, or a file cannot be read.
        ReportError: if nothing can be written into ``out``.
        MissingExtraError: if the extra ``demo`` is not installed.
        KeyboardInterrupt: on Ctrl-C, also where Lightning turns it into an exit.

    Returns:
        The figures of all runs, the images, settings and device that they used, and the paths of their reports.
    """
    if epochs < 1:
        raise SettingsError(f"epochs={epochs}: at least 1 is needed.")
    require("tensorboard", extra="demo", why="writing the demo's logs")
    check_writable(out)
    _say_if_busy()
    pictures = _images_of(data, out, images)
    logs = out / "logs"
    fed = FedImages(pictures)
    with quiet(), _half_the_cpus():
        _warm_up(len(pictures.classes))
        runs = {"plain": _train("plain", plain_loader(pictures), pictures, epochs, logs)}
        runs["fed"] = _train("fed", fed, pictures, epochs, logs)
        advised = AdvisedImages(pictures, _advice(runs["plain"].report))
        runs["advised"] = _train("advised", advised, pictures, epochs, logs)
    choice = advised.decoder_choice
    figures = {name: run.figures for name, run in runs.items()}
    outcome = {
        **figures,
        "ratio": float(figures["plain"]["epoch_s"] or 0.0) / float(figures["advised"]["epoch_s"] or 1.0),
        "plain_report": as_text(runs["plain"].report.diagnosis),
        "reports": {name: run.path for name, run in runs.items()},
        "pictures": len(pictures),
        "epochs": epochs,
        "cpus": read_machine().usable_cpus,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "workers": fed.recommendations["train"].setting.num_workers,
        "decoder": "" if choice is None else choice.name,
        "report": out / "report.html",
        "logs": logs,
    }
    write_whole(out / "report.html", demo_page(outcome, {name: run.report for name, run in runs.items()}))
    return outcome


def _images_of(data: Path | None, out: Path, images: int) -> ImageFolder:
    if data is None:
        return find_images(make_images(out, images), images)
    train = data / "train"
    return find_images(train if train.is_dir() else data, images)


def demo_page(outcome: Outcome, reports: Mapping[str, Report]) -> str:
    """The HTML page of the demo: the steps of all runs as bars, the gain, the first report's advice, and the table."""
    advice = [section for section in advice_sections(reports["plain"].diagnosis, ()) if section.form == "remedies"]
    fix = "the fix of the first report" if _advice(reports["plain"]) is not None else "ImageFolderDataModule"
    return page_template("demo.html").render(
        title=f"{outcome['ratio']:.2f} times as fast with {fix}",
        colour=mark_colour(reports["advised"].diagnosis),
        what=_what(outcome),
        tiles=[(_in_words(outcome[name]["step_ms"], ".1f"), "ms", f"a step of {name}") for name in RUNS],
        bars=_bars(outcome, reports),
        advice=[replace(section, title="What the report of plain advises") for section in advice],
        rows=_rows(outcome),
        note=_on_the_device(outcome),
    )


def _bars(outcome: Outcome, reports: Mapping[str, Report]) -> list[dict[str, Any]]:
    """The values from which the page draws a bar for the step of each run."""
    times = {name: float(outcome[name]["step_ms"] or 0.0) for name in RUNS}
    return [
        {
            "name": name,
            "meaning": meaning,
            "report": os.path.relpath(outcome["reports"][name], Path(outcome["report"]).parent),
            "step_ms": times[name],
            "scale": times[name] / (max(times.values()) or 1.0),
            "parts": [row for section in step_sections(reports[name].diagnosis) for row in section.rows],
        }
        for name, meaning in _meanings(outcome).items()
    ]


def _say_if_busy() -> None:
    """Warn on stderr if other programs keep the CPUs busy, because that changes the figures of the runs."""
    taken_pct = others_pct_now(read_machine().usable_cpus) or 0.0
    if taken_pct >= OTHERS_PCT:
        tqdm.write(
            f"Other programs take {taken_pct:.0f} % of the CPUs: runs are slower and gain less than on an idle "
            "machine. Ctrl-C stops the demo.",
            file=sys.stderr,
        )


def _warm_up(classes: int) -> None:
    """Run some steps first, so that the cost of the device's first use does not count against the plain run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SmallModel(classes).network.to(device)
    for _ in range(3):
        model(torch.zeros(BATCH_SIZE, 3, PIXELS, PIXELS, device=device)).sum().backward()


@contextmanager
def _half_the_cpus() -> Iterator[None]:
    """Context manager to give training on the CPU only half of torch's threads, as a stand-in for a separate device.

    With all threads, training would compete with the workers for the same cores. OpenMP's threads wait for each other
    in every layer, so if one core is taken away for a moment, all threads are delayed: the same step was seen to take
    several times as long.
    """
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
