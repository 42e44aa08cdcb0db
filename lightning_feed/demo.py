"""The demo trains one model three times on the same images: the usual way, fed, and as the first report advises."""

import copy
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from lightning_feed import (
    FastDataModule,
    GPUStarvationCallback,
    ImageFolderDataModule,
    LoaderSettings,
    PrefetchCallback,
)
from lightning_feed.demo_images import make_images
from lightning_feed.diagnosing.restoring import quiet
from lightning_feed.diagnosing.run import measure_loaders, measurements_of
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError
from lightning_feed.extras import require
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.cpu_time import others_pct_now
from lightning_feed.measure.measurements import OTHERS_PCT
from lightning_feed.report.document import make_report
from lightning_feed.report.files import as_text, check_writable, mark_colour, page_template, write_report, write_whole
from lightning_feed.report.report import Report
from lightning_feed.report.sections import advice_sections, step_sections
from lightning_feed.verdict.decide import decide
from lightning_feed.wording import plural

PIXELS = 64
"""Side of the model's input: small, so that the demo ends soon on two CPU cores."""
BATCH_SIZE = 16
"""Batch size: small, so that a few hundred images are enough steps for a verdict."""
IMAGES = 512
EPOCHS = 3


# --- images -------------------------------------------------------------------------------------------------------


def find_images(root: Path, most: int) -> ImageFolder:
    """Return the images of a folder of class folders, or of its subfolder ``train``. Takes ``most`` images at most,
    evenly spaced.

    Raises:
        DatasetError: if the folder is missing or holds no class folders with images.
    """
    if (root / "train").is_dir():
        root = root / "train"
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
            return image
    except OSError as error:  # Pillow's own errors are OSErrors too
        raise DatasetError(
            f"{path} cannot be read as an image ({error}). Delete it or replace it, then start again."
        ) from error


def _transformed(images: ImageFolder, transform: v2.Compose) -> ImageFolder:
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
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    return v2.Compose([v2.RandomResizedCrop(PIXELS), v2.RandomHorizontalFlip(), *floats])


def plain_loader(images: ImageFolder) -> DataLoader[Any]:
    """Return a DataLoader as most people first write it: normalised float32 images, no workers."""
    return DataLoader(_transformed(images, plain_transform()), batch_size=BATCH_SIZE, shuffle=True)


class FedImages(FastDataModule):
    """The images and transforms of the plain run, in uint8 until they are on the device."""

    def __init__(self, images: ImageFolder) -> None:
        super().__init__(batch_size=BATCH_SIZE)
        self._images = images

    def make_dataset(self, split: str) -> ImageFolder | None:
        """Return the training images; there are no other splits."""
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
    """The plain run's images and transform, but decoding only the crop, as that run's report advises.

    Args:
        images: the plain run's images.
        advice: code in the report, from which the number of workers is taken, if it has one.
    """

    def __init__(self, images: ImageFolder, advice: str) -> None:
        workers = re.search(r"num_workers=(\d+)", advice)
        settings = LoaderSettings(num_workers=int(workers[1]) if workers else "auto")
        super().__init__(images.root, BATCH_SIZE, transform=plain_transform(), val_fraction=0, loader=settings)
        self._most = len(images)

    def make_dataset(self, split: str) -> Any:
        """Return the training images, as many as the other runs have; there are no other splits."""
        dataset = super().make_dataset(split)
        if dataset is None or len(dataset) <= self._most:
            return dataset
        return Subset(dataset, _evenly(len(dataset), self._most))


def _train(name: str, data: Any, classes: int, logs: Path, *more: Callback) -> Report:
    """Train from the start, and write the report. Draws the progress on stderr: Lightning draws it on stdout, which is
    for the table alone."""
    seed_everything(0, workers=True, verbose=False)
    starvation = GPUStarvationCallback(report=False)  # the demo prints all results at its end
    with tqdm(desc=f"{name:8}", unit="step", disable=None, delay=1e-3) as bar:  # drawn when training starts
        progress = LambdaCallback(
            on_train_start=lambda trainer, _: bar.reset(int(trainer.num_training_batches) * EPOCHS),
            on_train_batch_end=lambda *_: bar.update(),
        )
        trainer = Trainer(
            max_epochs=EPOCHS,
            devices=1,
            logger=TensorBoardLogger(logs, name=name),
            callbacks=[*more, starvation, progress],
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        try:
            trainer.fit(SmallModel(classes), data)
        except SystemExit as stopped:
            if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1, which is ours for a FeedError
                raise KeyboardInterrupt from stopped
            raise
    diagnosis = starvation.report()
    if name == "plain":
        # Some trials of `lightning-feed diagnose`: whole images and only crops decoded in turn, and other workers.
        session = Session(train_loaders=data, measured=diagnosis.measurements)
        measure_loaders(session, budget_s=12.0, only=("crops", "workers"))
        diagnosis = decide(measurements_of(session))
    report = make_report(diagnosis)
    *_, page = write_report(report, Path(trainer.log_dir or logs))
    return replace(report, path=page)


def _advice(report: Report) -> str:
    """Code in the plain run's report that the advised run follows; empty if there is no such remedy."""
    return next((remedy.code for remedy in report.diagnosis.remedies if remedy.form == "replacement"), "")


def verdict_words(report: Report) -> str:
    """Return the bottleneck, if known, and grade of a run."""
    return f"{report.diagnosis.bottleneck}: {report.diagnosis.grade}".removeprefix("unknown: ")


def _figures(report: Report, images: int) -> dict[str, Any]:
    """Measurements of a run, by name with unit; None if the run was too short to measure one."""
    stats = report.diagnosis.stats
    wall = report.diagnosis.measurements.wall
    assert wall is not None
    epoch_s = wall.seconds("train", "epoch starts") / EPOCHS
    return {
        "step_ms": stats.step_ms,
        "compute_ms": stats.compute_ms,
        "data_ms": stats.data_ms,
        "copy_ms": stats.copy_ms,
        "other_ms": stats.other_ms,
        "starved_pct": stats.starved_pct,
        "first_batch_s": stats.epoch_start_s,
        "setup_s": wall.seconds("set-up"),
        "epoch_s": epoch_s,
        "samples_per_s": images / epoch_s,  # the start of the workers included
        "verdict": verdict_words(report),
    }


# --- all runs -----------------------------------------------------------------------------------------------------

Outcome = dict[str, Any]
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
    """Return the results of :func:`run_demo` as text: a report, a table of all runs, and paths."""
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
    """Return the waiting times of the GPU in each run, if measured; without a GPU, a note on the CPU that stands in for
    it."""
    if outcome["device"] == "CPU":
        return (
            "There is no GPU here. As a stand-in, training has half of the CPUs, in all runs. The fed and advised\n"
            "runs load on the other half. Gains on a GPU will differ."
        )
    starved = ", ".join(f"{_in_words(outcome[name]['starved_pct'], '.1f')} % ({name})" for name in RUNS)
    return f"Of each step the GPU waited for data: {starved}"


def _rows(outcome: Outcome) -> list[tuple[str, ...]]:
    figures = [(label, *(_in_words(outcome[run][name], form) for run in RUNS)) for name, (label, form) in ROWS.items()]
    return [("", *RUNS), *figures]


def _in_words(value: float | str | None, form: str) -> str:
    if value is None:
        return "not measured"
    return format(value, form)


def _table(outcome: Outcome) -> str:
    rows = _rows(outcome)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def run_demo(*, data: Path | None, out: Path, images: int = IMAGES) -> Outcome:
    """Train three times and compare.

    Args:
        data: a folder of class folders, or one that holds such a folder named ``train``; None makes images in ``out``,
            or reuses those made before.
        images: number of images to make, or to take from ``data`` at most.
        out: folder for images, reports and TensorBoard logs.

    Raises:
        DatasetError: if ``data`` holds no readable images, or a file cannot be read.
        ReportError: if nothing can be written into ``out``.
        MissingExtraError: if the extra ``demo`` is not installed.
        KeyboardInterrupt: on Ctrl-C, also where Lightning turns it into an exit.

    Returns:
        The figures of all runs, the images, settings and device that they used, and the paths of their reports.
    """
    require("tensorboard", extra="demo", why="writing the demo's logs")
    check_writable(out)
    _say_if_busy()
    pictures = find_images(data or make_images(out, images), images)
    classes = len(pictures.classes)
    logs = out / "logs"
    with quiet(), _half_the_threads():
        _warm_up(classes)
        plain = _train("plain", plain_loader(pictures), classes, logs)
        fed = _train("fed", FedImages(pictures), classes, logs, PrefetchCallback())
        advised = _train("advised", AdvisedImages(pictures, _advice(plain)), classes, logs)
    reports = {"plain": plain, "fed": fed, "advised": advised}
    figures = {name: _figures(report, len(pictures)) for name, report in reports.items()}
    outcome = {
        **figures,
        "ratio": figures["plain"]["epoch_s"] / figures["advised"]["epoch_s"],
        "plain_report": as_text(plain.diagnosis),
        "reports": {name: report.path for name, report in reports.items()},
        "pictures": len(pictures),
        "epochs": EPOCHS,
        "cpus": plain.environment.usable_cpus,
        "device": plain.environment.device or "CPU",
        "workers": fed.diagnosis.measurements.facts.loader.num_workers,
        "decoder": advised.diagnosis.measurements.facts.datamodule.decoder,
        "report": out / "report.html",
        "logs": logs,
    }
    write_whole(out / "report.html", demo_page(outcome, reports))
    return outcome


def demo_page(outcome: Outcome, reports: dict[str, Report]) -> str:
    """Return the HTML page of the demo: the steps of all runs as bars, the gain, the first report's advice, and the
    table."""
    advice = [section for section in advice_sections(reports["plain"].diagnosis, ()) if section.form == "remedies"]
    fix = "the fix of the first report" if _advice(reports["plain"]) else "ImageFolderDataModule"
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


def _bars(outcome: Outcome, reports: dict[str, Report]) -> list[dict[str, Any]]:
    """Return the values from which the page draws a bar for the step of each run."""
    times = {name: float(outcome[name]["step_ms"] or 0.0) for name in RUNS}
    return [
        {
            "name": name,
            "meaning": meaning,
            "report": Path(outcome["reports"][name]).relative_to(Path(outcome["report"]).parent),
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


@contextmanager
def _half_the_threads() -> Iterator[None]:
    """Context manager to give training on the CPU, as a stand-in for a separate device, half of torch's threads.

    With all of them it would compete with the workers for the same cores. OpenMP's threads wait for each other in every
    layer, so if one core is taken away for a moment, all threads are delayed: the same step was seen to take several
    times as long.
    """
    threads = torch.get_num_threads()
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _warm_up(classes: int) -> None:
    """Run some steps first, so that the cost of the device's first use does not count against the plain run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = SmallModel(classes).network.to(device)
    for _ in range(3):
        network(torch.zeros(BATCH_SIZE, 3, PIXELS, PIXELS, device=device)).sum().backward()
