"""A loader warns once if each of its workers gives all samples of a stream, and never if the workers divide it."""

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_feed import FastDataModule, LoaderSettings
from lightning_feed.load.loader import FeedLoader

_WORDS = "each of the 2 workers reads the same samples, so each sample comes 2 times in an epoch. Divide the stream"


class Numbers(IterableDataset[Any]):
    """Each worker gives all numbers."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, self.numbers())

    def numbers(self) -> Iterator[float]:
        return (float(number) for number in range(24))


class Divided(Numbers):
    def numbers(self) -> Iterator[float]:
        info: Any = get_worker_info()
        return itertools.islice(super().numbers(), info and info.id, None, info and info.num_workers)


class Constant(Numbers):
    def numbers(self) -> Iterator[float]:
        return itertools.repeat(1.0, 24)


class ConstantAtFirst(Divided):
    """Divided, and it begins with equal samples, one for each worker."""

    def numbers(self) -> Iterator[float]:
        return itertools.chain([0.0], super().numbers())


class Drawn(Numbers):
    """Random numbers, which each worker draws differently."""

    def numbers(self) -> Iterator[float]:
        return iter(torch.rand(24).tolist())


class Short(Numbers):
    """One batch in each worker."""

    def numbers(self) -> Iterator[float]:
        return iter([1.0, 2.0])


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "reads the same samples" in record.getMessage()]


@pytest.mark.parametrize(
    ("dataset", "workers", "count"),
    [
        (Numbers(), 2, 1),
        (Numbers(), 1, 0),
        (Numbers(), 0, 0),
        (Divided(), 2, 0),
        (Constant(), 2, 0),
        (ConstantAtFirst(), 2, 0),
        (Drawn(), 2, 0),
        (Short(), 2, 0),
        (IterableWrapper(range(24)), 2, 0),  # torch divides DataPipes, or does not, by their class
        (range(24), 2, 0),
    ],
)
def test_a_loader_warns_once_of_a_stream_that_its_workers_do_not_divide(
    dataset: Any, workers: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = FeedLoader(dataset, batch_size=2, num_workers=workers)
    for _ in range(1 + count):
        list(loader)
    assert len(_warnings(caplog)) == count
    assert all(_WORDS in message for message in _warnings(caplog))


@pytest.mark.parametrize("options", [{"in_order": False}, {"background": 2}])
def test_batches_are_compared_only_if_workers_give_them_in_turn(options: Any, caplog: pytest.LogCaptureFixture) -> None:
    list(FeedLoader(Numbers(), batch_size=2, num_workers=2, **options))
    assert len(_warnings(caplog)) == ("background" in options)


class Fast(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return Numbers() if split in ("train", "val") else None


class Own(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=2)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch[:, None]).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Fast(batch_size=2, loader=LoaderSettings(num_workers=2)), ["train", "val"]),
        (lambda: FastDataModule.wrap(Own()), []),
    ],
    ids=["fast", "wrap"],
)
def test_a_fit_warns_once_for_each_undivided_stream(
    make: Any, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), datamodule=make())
    assert sorted(_warnings(caplog)) == [message for message in sorted(_warnings(caplog)) if _WORDS in message]
    assert sorted(message.partition(":")[0] for message in _warnings(caplog)) == names
