"""The demo: one model trained twice on the same pictures, in the usual way and fed, and both reports side by side."""

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_feed.demo_pictures import PictureFolder, find_pictures, make_pictures
from lightning_feed.demo_training import BATCH_SIZE, PIXELS, FedPictures, PlainPictures, SmallResNet
from lightning_feed.errors import SettingsError
from lightning_feed.extras import require
from lightning_feed.load.machine import read_machine
from lightning_feed.prefetch_callback import PrefetchCallback
from lightning_feed.starvation_callback import GPUStarvationCallback
from lightning_feed.watch.verdict.diagnosis import Diagnosis

LOG_EVERY_N_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """What one of the two runs measured. None: the run was too short to measure it."""

    step_ms: float | None
    compute_ms: float | None
    data_ms: float | None
    """The part of a step in which the device had nothing to do because no batch was there."""
    h2d_ms: float | None
    other_ms: float | None
    starved_pct: float | None
    """``data_ms`` as a share of the step, 0 to 100."""
    samples_per_s: float
    """Pictures trained per second of the whole fit, the start of the workers included."""
    epoch_s: float
    """Seconds of the whole fit divided by its epochs."""
    verdict: str


@dataclass(frozen=True, kw_only=True)
class DemoOutcome:
    """Both runs, and what they ran on."""

    plain: DemoRun
    fed: DemoRun
    pictures: int
    epochs: int
    cpus: int
    device: str
    workers: int
    """Worker processes that were chosen for the second run."""
    logs: Path

    def as_json(self) -> str:
        """The figures for a program; what was not measured is null."""
        return json.dumps(asdict(self), default=str, indent=2)

    def as_text(self) -> str:
        """The figures as a table, and how to open the logs."""
        rows = [
            ("", "plain", "fed"),
            *(self._row(label, name, digits) for label, name, digits in _ROWS),
            ("verdict", self.plain.verdict, self.fed.verdict),
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"{label:<{widths[0]}}  {left:<{widths[1]}}  {right}".rstrip() for label, left, right in rows]
        ratio = self.plain.epoch_s / self.fed.epoch_s
        said = [
            f"ResNet-18, {self.pictures:,} pictures at {PIXELS} x {PIXELS}, batches of {BATCH_SIZE}, "
            f"{self.epochs} epoch{'s' if self.epochs > 1 else ''} each, on {self.device} with {self.cpus} CPUs",
            "plain: DataLoader as most people write it (float32, no workers)",
            f"fed:   FastDataModule (uint8, {self.workers} workers) and PrefetchCallback",
            "",
            *table,
            "",
            f"seconds per epoch, plain : fed = {ratio:.2f} : 1",
        ]
        if self.device == "CPU":
            said.append(
                "There is no GPU here. As a stand-in, training has half of the CPUs, in both runs; the fed loader\n"
                "uses the others, which the plain one leaves idle. What a GPU gains only a GPU can show."
            )
        return "\n".join([*said, "", f"TensorBoard:  tensorboard --logdir {self.logs}"])

    def _row(self, label: str, name: str, digits: int) -> tuple[str, str, str]:
        values = (getattr(self.plain, name), getattr(self.fed, name))
        left, right = ("not measured" if value is None else f"{value:.{digits}f}" for value in values)
        return label, left, right


_ROWS = (
    ("step ms", "step_ms", 1),
    ("  compute", "compute_ms", 1),
    ("  data", "data_ms", 1),
    ("  h2d", "h2d_ms", 1),
    ("  other", "other_ms", 1),
    ("starved %", "starved_pct", 1),
    ("samples/s", "samples_per_s", 0),
    ("epoch s", "epoch_s", 2),
)


def run_demo(*, data: Path | None, images: int, epochs: int, out: Path) -> DemoOutcome:
    """Train twice and compare.

    Args:
        data: a folder of class folders; None makes pictures in ``out``, or reuses those made before.
        images: how many pictures to make, or to take from ``data`` at most.
        epochs: of each run, 1 or more.
        out: where pictures and TensorBoard logs go.

    Raises:
        SettingsError: when ``images`` or ``epochs`` is out of range.
        DatasetError: when ``data`` holds no readable pictures, or a file cannot be read.
        MissingExtraError: without the extra ``demo``.
        KeyboardInterrupt: on Ctrl-C, also where Lightning turns it into an exit.
    """
    if epochs < 1:
        raise SettingsError(f"--epochs {epochs}: at least 1 is needed.")
    require("tensorboard", extra="demo", why="writing the demo's logs")
    folder = find_pictures(data if data is not None else make_pictures(out, images), images)
    logs = out / "logs"
    with _quiet_lightning(), _half_the_cpus():
        _warm_up(len(folder.classes))
        plain = _train("plain", PlainPictures(folder), [], folder, epochs, logs)
        fed_data = FedPictures(folder)
        fed = _train("fed", fed_data, [PrefetchCallback()], folder, epochs, logs)
    return DemoOutcome(
        plain=plain,
        fed=fed,
        pictures=len(folder.samples),
        epochs=epochs,
        cpus=read_machine().usable_cpus,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        workers=fed_data.recommendations["train"].num_workers,
        logs=logs,
    )


def _train(
    name: str, data: LightningDataModule, callbacks: list[Callback], folder: PictureFolder, epochs: int, logs: Path
) -> DemoRun:
    seed_everything(0, workers=True, verbose=False)
    starvation = GPUStarvationCallback(report=False)  # as_text shows both reports together
    trainer = Trainer(
        max_epochs=epochs,
        devices=1,
        logger=TensorBoardLogger(logs, name=name),
        callbacks=[*callbacks, starvation],
        log_every_n_steps=LOG_EVERY_N_STEPS,
        enable_checkpointing=False,
        enable_model_summary=False,
        # Lightning draws its bar on stdout; a redirected stdout is for the table alone.
        enable_progress_bar=sys.stderr.isatty() and sys.stdout.isatty(),
    )
    began = time.perf_counter()
    try:
        trainer.fit(SmallResNet(len(folder.classes)), datamodule=data)
    except SystemExit as stopped:
        if trainer.interrupted:  # Lightning turns Ctrl-C into exit code 1, which is ours for a FeedError
            raise KeyboardInterrupt from stopped
        raise
    seconds = time.perf_counter() - began
    return _measured(starvation.report(), seconds=seconds, samples=epochs * len(folder.samples), epochs=epochs)


def _measured(diagnosis: Diagnosis, *, seconds: float, samples: int, epochs: int) -> DemoRun:
    stats = diagnosis.stats
    return DemoRun(
        step_ms=stats.step_ms,
        compute_ms=stats.compute_ms,
        data_ms=stats.data_idle_ms,
        h2d_ms=stats.h2d_ms,
        other_ms=stats.other_ms,
        starved_pct=stats.starved_pct,
        samples_per_s=samples / seconds,
        epoch_s=seconds / epochs,
        verdict=diagnosis.grade if diagnosis.bottleneck == "unknown" else f"{diagnosis.bottleneck}: {diagnosis.grade}",
    )


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


@contextmanager
def _quiet_lightning() -> Iterator[None]:
    """Without Lightning's notes on hardware, and its advice against the plain loader, which is plain on purpose."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers")
            warnings.filterwarnings("ignore", message="The number of training batches .* is smaller than the logging")
            warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # between Lightning and torch
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
