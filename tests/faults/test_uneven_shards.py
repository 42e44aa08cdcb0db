"""Ranks with shards of different lengths under ``max_steps``: saved after any step and resumed, each where it stood."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.test_preempted import in_processes
from lightning.pytorch import Callback
from recording import Numbers
from resuming import run
from torch.utils.data import IterableDataset

from lightning_feed import FastDataModule, LoaderSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning, and of lengths that differ
]
LENGTHS, SIZE, STEPS = (12, 8), 2, 14


def rank() -> int:
    return int(os.environ["SLURM_PROCID"])


class Stream(IterableDataset[torch.Tensor]):
    """A shard without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.full((4,), 1000.0 * rank() + number) for number in range(LENGTHS[rank()])])


class Data(FastDataModule):
    def __init__(self, *, stream: bool) -> None:
        super().__init__(SIZE, loader=LoaderSettings(num_workers=0, seed=4))
        self.stream = stream

    def make_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return Stream() if self.stream else Numbers(LENGTHS[rank()], first=1000 * rank())


class Saving(Callback):
    """Notes each batch with its epoch and number, and saves after each."""

    def __init__(self, folder: Path, *, save: bool) -> None:
        self.folder, self.save = folder, save
        self.trained: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append((trainer.current_epoch, batch_idx, batch[:, 0].tolist()))
        if self.save:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.trained, self.folder / f"rank{trainer.global_rank}.pt")


def go(folder: Path, *, stream: bool, **options: Any) -> list[list[Any]]:
    folder.mkdir()
    saving = Saving(folder, save="ckpt_path" not in options)
    ranks: dict[str, Any] = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}

    def work(rank: int) -> None:
        run(
            lambda: {"datamodule": Data(stream=stream)},
            [saving],
            **{**ranks, "max_steps": STEPS, "max_epochs": -1, **options},
        )

    assert in_processes(2, work) == [0, 0]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("stream", [True, False])
def test_each_rank_goes_on_where_it_stood(stream: bool, tmp_path: Path) -> None:
    whole = go(tmp_path / "whole", stream=stream)
    assert [trained[-1][:2] for trained in whole] == [(2, 1), (3, 1)]
    # In the first epoch; at the end of rank 1's, in the next of rank 1, at the end of rank 0's, and in other epochs.
    for step in (3, 4, 5, 6, 7, 12):
        after = go(tmp_path / str(step), stream=stream, ckpt_path=tmp_path / "whole" / f"{step}.ckpt")
        assert after == [trained[step:] for trained in whole], step
