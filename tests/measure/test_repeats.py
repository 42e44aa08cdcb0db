"""A stream that each worker gives as a whole is found by its first batches, and nothing else is taken for one."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_feed import GPUStarvationCallback
from lightning_feed.load.streams import RepeatedBatches
from lightning_feed.report.files import as_text


def _number(value: float) -> Tensor:
    return torch.full((4,), float(value))


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([1, 1, 2, 2], True),
        ([1, 2], False),
        ([1, 1, 2, 3], False),
        ([1, 1, 1], False),  # constant samples
        ([1, 1, 2], None),
        ([float("nan"), float("nan"), 2, 2], True),
        ([], None),
    ],
)
def test_batches_repeated_by_two_workers_are_found(batches: list[float], found: bool | None) -> None:
    repeats = RepeatedBatches(2)
    for value in batches:
        repeats.see({"x": [_number(value)]})
    assert repeats.repeated is found


def test_repeats_are_found_even_if_the_step_changes_its_batch() -> None:
    repeats = RepeatedBatches(3)
    for value in (1, 1, 1, 2, 2, 2):
        batch = _number(value)
        repeats.see(batch)
        batch.zero_()
    assert repeats.repeated is True


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (lambda value: [f"text {value}"], True),
        (lambda value: {"x": [np.full(3, value)]}, True),
        (lambda value: (value, "a"), True),
        (lambda value: torch.full((3,), value).to_sparse(), False),  # not compared
        (lambda value: object(), False),
        (lambda value: [], False),
    ],
)
def test_batches_of_any_kind_are_compared_if_they_have_values(kind: Any, found: bool) -> None:
    repeats = RepeatedBatches(2)
    for value in (1.0, 1.0, 2.0, 2.0):
        repeats.see(kind(value))
    assert repeats.repeated is found


def test_images_that_differ_anywhere_but_at_their_borders_are_not_repeats() -> None:
    repeats = RepeatedBatches(2)
    for value in (1, 2):
        image = torch.zeros(4, 3, 64, 64)
        image[3, :, 20:40, 20:40] = value
        repeats.see(image)
    assert repeats.repeated is False


class Whole(IterableDataset[Any]):
    """Each worker gives everything."""

    def __iter__(self) -> Iterator[Tensor]:
        return (_number(index) for index in range(20))


class Divided(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (_number(index) for index in range(first, 20, step))


class Indexed(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return _number(1.0)


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch.mul_(0.5)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _trainer(callback: GPUStarvationCallback, *, max_epochs: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )


@pytest.mark.parametrize(
    ("dataset", "workers", "repeated"),
    [(Whole(), 2, True), (Whole(), 1, None), (Divided(), 2, False), (Indexed(), 2, None)],
)
def test_the_report_of_a_fit_begins_with_repeated_samples(
    dataset: Any, workers: int, repeated: bool | None, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    starvation = GPUStarvationCallback(folder=tmp_path)
    trainer = _trainer(starvation, max_epochs=2)
    trainer.fit(Net(), DataLoader(dataset, batch_size=1, num_workers=workers))
    found = starvation.report()
    assert found.measurements.facts.loader.repeated is repeated
    text = as_text(found)
    assert ("FEED  every sample is trained 2 times an epoch: the stream is not divided" in text) == bool(repeated)
    assert ("next: divide the stream in its `__iter__`" in text) == bool(repeated)
    assert not (repeated and found.remedies)
    assert "batch_to_device" not in vars(trainer.strategy)  # nothing of ours is left
