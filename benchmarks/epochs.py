"""How long training waits for the first batch of an epoch, beside the wait of a steady step.

The model is imitated: a step only lasts a while, as on a device that computes by itself. Loading is real: each sample
takes CPU time in worker processes, and a batch takes less of it than a step lasts, so that a steady step waits for the
hand-over alone. Sides, in turns: Lightning with torch's DataLoader and persistent workers, ours with workers that rest
between epochs, and ours.

    python benchmarks/epochs.py [--rounds N] [--out FILE.json]
"""

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset

from lightning_feed import FastDataModule, LoaderSettings, _host

STEPS = (8, 16, 32, 64)
BATCH = 8
WORKERS = 2
SAMPLE_S = 0.0008
"""CPU time of a sample."""
STEP_S = 0.008
"""Duration of a step: two workers need half of it for a batch."""
EPOCHS = 5
VALIDATION_STEPS = 4


class Samples(Dataset[torch.Tensor]):
    """Samples that take CPU time."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + SAMPLE_S
        while time.thread_time() < end:
            pass
        return torch.full((3, 64, 64), index % 256, dtype=torch.uint8)


class Model(LightningModule):
    """Lasts as long as a step on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        time.sleep(STEP_S)
        loss: torch.Tensor = self.layer(batch.flatten()[:1].float()).mean()
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        time.sleep(STEP_S)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


class Plain(LightningDataModule):
    """Torch's loaders."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def train_dataloader(self) -> Any:
        return self._loader(self.steps, shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(VALIDATION_STEPS, shuffle=False)

    @staticmethod
    def _loader(steps: int, *, shuffle: bool) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(steps), BATCH, shuffle=shuffle, num_workers=WORKERS, persistent_workers=True)


class Ours(FastDataModule):
    """Our loaders of the same samples."""

    def __init__(self, steps: int) -> None:
        super().__init__(BATCH, loader=LoaderSettings(num_workers=WORKERS))
        self.steps = steps

    def make_dataset(self, split: str) -> Any:
        return Samples({"train": self.steps, "val": VALIDATION_STEPS}[split]) if split in ("train", "val") else None


@dataclass
class Waits(Callback):
    """Waits for batches in milliseconds: from the end of one step, or the start of an epoch, to the next batch."""

    first: list[float] = field(default_factory=list)
    """First batches of epochs, without the first epoch, in which workers start."""
    first_of_validation: list[float] = field(default_factory=list)
    steady: list[float] = field(default_factory=list)
    _since: float = 0.0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch:
            waits = self.steady if batch_idx else self.first
            waits.append(1e3 * (time.perf_counter() - self._since))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._since = time.perf_counter()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._since = time.perf_counter()

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if trainer.current_epoch and not batch_idx:
            self.first_of_validation.append(1e3 * (time.perf_counter() - self._since))


@contextmanager
def resting() -> Iterator[None]:
    """Let workers rest between epochs."""
    before = _host.next_epoch
    _host.next_epoch = lambda *_: None
    try:
        yield
    finally:
        _host.next_epoch = before


def train(data: Any, *, validate: bool) -> Waits:
    """Train some epochs, and return the waits."""
    seed_everything(7, verbose=False)
    waits = Waits()
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[waits],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1.0 if validate else 0,
    )
    trainer.fit(Model(), datamodule=data)
    return waits


def run(steps: int, *, validate: bool) -> dict[str, Waits]:
    """Each side once."""
    found = {"torch": train(Plain(steps), validate=validate)}
    with resting():
        found["ours, resting"] = train(Ours(steps), validate=validate)
    found["ours"] = train(Ours(steps), validate=validate)
    return found


def middle(values: list[float]) -> str:
    """The median with its quartiles."""
    if len(values) < 2:
        return "-"
    low, mid, high = statistics.quantiles(values, n=4)
    return f"{mid:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="fits of each side")
    parser.add_argument("--out", type=Path, help="file for all waits, as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_feed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    kept: list[dict[str, Any]] = []
    print(f"{platform.processor()}, torch {torch.__version__}; {STEP_S * 1e3:.0f} ms steps, {WORKERS} workers")
    print("medians and quartiles, in ms\n")
    print("| steps | validation | loaders | steady step | first batch | ratio | first of a validation |")
    print("|---|---|---|---|---|---|---|")
    for validate in (False, True):
        for steps in STEPS:
            sides: dict[str, Waits] = defaultdict(Waits)
            for _ in range(options.rounds):
                for side, waits in run(steps, validate=validate).items():
                    sides[side].first += waits.first
                    sides[side].steady += waits.steady
                    sides[side].first_of_validation += waits.first_of_validation
            for side, waits in sides.items():
                ratio = statistics.median(waits.first) / statistics.median(waits.steady)
                row = (middle(waits.steady), middle(waits.first), f"{ratio:.1f}", middle(waits.first_of_validation))
                print(f"| {steps} | {'yes' if validate else 'no'} | {side} | {' | '.join(row)} |", flush=True)
                kept.append({"steps": steps, "validate": validate, "side": side, **asdict(waits)})
    if options.out is not None:
        options.out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
