"""Loaders that are made again in a fit leave no workers behind while batches are drawn ahead."""

import gc
import multiprocessing
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule
from recording import NullStreamPrefetch, Numbers, fit
from torch.utils.data import DataLoader

from lightning_feed import FastDataModule, LoaderSettings


class Workers(Callback):
    """Counts the living workers in each epoch."""

    def __init__(self) -> None:
        self.alive: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.alive.append(len(multiprocessing.active_children()))


class Birds(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers(8) if split == "train" else None


class Plain(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(8), 2, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(8), 2)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("ours", [False, True])
def test_reloading_loaders_ends_the_workers_of_the_old_ones(*, ours: bool) -> None:
    """Without the garbage collector, which would hide a cycle."""
    workers = Workers()

    def loaders() -> dict[str, Any]:
        if ours:
            return {"datamodule": Birds(2, loader=LoaderSettings(num_workers=1))}
        return {"datamodule": Plain()}

    gc.collect()
    gc.disable()
    try:
        fit([NullStreamPrefetch(), workers], loaders, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    finally:
        gc.enable()
    assert workers.alive == [1, 1, 1, 1]
