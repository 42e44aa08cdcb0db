"""Print the files of ours that are passed on two roads: a batch to its training step, and diagnose to its report.

Run it by itself: python tests/traced_files.py. A file is passed when one of its functions is called in this process.
"""

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_feed import FastDataModule
from lightning_feed.cli import main

PACKAGE = Path(__file__).parents[1] / "lightning_feed"


class Model(LightningModule):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def in_memory(rows: int) -> TensorDataset:
    """Rows of four numbers."""
    return TensorDataset(torch.zeros(rows, 4))


class Fed(FastDataModule):
    """A dataset in memory, in a FastDataModule."""

    def make_dataset(self, split: str) -> Any:
        return in_memory(64) if split == "train" else None


class Plain(LightningDataModule):
    """A dataset in memory, in a plain loader."""

    def train_dataloader(self) -> Any:
        return DataLoader(in_memory(4096), batch_size=8)


def target() -> tuple[Model, Plain]:
    """The module and the data module to diagnose."""
    return Model(), Plain()


@contextlib.contextmanager
def passed() -> Iterator[set[str]]:
    """A context that collects the files of which a function is called, in any thread."""
    root, files = f"{PACKAGE}{os.sep}", set[str]()

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(root):
            files.add(code.co_filename.removeprefix(root))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def a_batch() -> None:
    """Train one epoch with a FastDataModule and nothing else of ours."""
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **options)
    trainer.fit(Model(), Fed(batch_size=8))


def a_diagnosis() -> None:
    """The command, from its arguments to its report."""
    sys.modules.setdefault("traced_files", sys.modules[__name__])
    with tempfile.TemporaryDirectory() as folder:
        main(["diagnose", "traced_files:target", "--quick", "--accelerator", "cpu", "--out", folder])


def trace(road: Callable[[], None]) -> set[str]:
    """The files that a road passes. What it prints is dropped."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), passed() as files:
        road()
    return files


if __name__ == "__main__":
    for road in (a_batch, a_diagnosis):
        files = sorted(trace(road))
        folders = sorted({str(Path(name).parent) for name in files})
        sys.stdout.write(f"{road.__name__}: {len(files)} files\n")
        for folder in folders:
            names = ", ".join(Path(name).name for name in files if str(Path(name).parent) == folder)
            sys.stdout.write(f"  {folder}: {names}\n")
