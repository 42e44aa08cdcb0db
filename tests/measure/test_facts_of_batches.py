"""What a real fit tells of its batches and of the loaders that they come from."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from measure.small_fits import make_trainer
from torch.utils.data import DataLoader, Dataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.datasets import ImageFolder

from lightning_feed import GPUStarvationCallback
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.slot_loaders import put_in_slots
from lightning_feed.measure.facts import loader_facts
from lightning_feed.measure.measurements import LoopFacts, Measurements
from lightning_feed.measure.stats import LoaderStats

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",  # what Lightning says of small runs without workers
    # A LightningModule that logs nothing still imports a deprecated part of torch in 2.4.0.
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:DeprecationWarning",
)


class Photos(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.zeros(3, 2, 4, dtype=torch.uint8), "label": index}


class DecodesItself(ImageFolder):
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, 8, 8), index


class Unseen:
    """Batches of a loader that nobody knows."""

    def __iter__(self) -> Iterator[Any]:
        return iter([{"image": torch.zeros(2, 3, 2, 4)}] * 12)

    def __len__(self) -> int:
        return 12


class Model(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.ones(2, 32)).sum()


class Hooked(Model):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "image": batch["image"].float().div(255)}


def _measured(callback: GPUStarvationCallback, model: BoringModel, loader: Any, epochs: int = 1) -> Measurements:
    make_trainer(callback, max_epochs=epochs).fit(model, loader)
    return callback.report().measurements


def _facts(callback: GPUStarvationCallback, model: BoringModel, epochs: int = 1) -> LoopFacts:
    return _measured(callback, model, DataLoader(Photos(), batch_size=2), epochs).facts


@pytest.mark.parametrize("epochs", [1, 2])
def test_batch_facts_count_tensors_and_bytes(quiet: GPUStarvationCallback, epochs: int) -> None:
    facts = _facts(quiet, Model(), epochs)
    assert (facts.batch.tensors, facts.batch.size_bytes, facts.batch_hooks) == (2, 2 * 24 + 2 * 8, False)


def test_batch_hooks_is_true_if_the_model_overrides_a_transfer_hook(quiet: GPUStarvationCallback) -> None:
    assert _facts(quiet, Hooked()).batch_hooks is True


def test_loader_facts_are_none_beside_a_loader_of_unknown_kind(quiet: GPUStarvationCallback) -> None:
    one = DataLoader(Photos(), batch_size=2, num_workers=0)
    measured = _measured(quiet, Model(), CombinedLoader({"a": one, "b": Unseen()}, "min_size"))
    facts, loaders = measured.facts.loader, measured.loaders
    assert (facts.num_workers, facts.prefetch_factor, facts.workers, facts.ours) == (None, None, None, False)
    assert loaders.handover_pct is None
    assert (loaders.queue_ready, loaders.queue_capacity) == (None, None)
    alone = _measured(GPUStarvationCallback(report=False), Model(), one)
    assert (alone.facts.loader.num_workers, alone.loaders.queue_ready) == (0, 0)
    assert isinstance(alone.loaders, LoaderStats)


@pytest.mark.parametrize("version", ["transforms", "transforms.v2"])
def test_decodes_whole_is_true_for_image_folders_cropped_after_decoding(class_folders: Path, version: str) -> None:
    made = importlib.import_module(f"torchvision.{version}")
    crop, flip = made.RandomResizedCrop(8), made.RandomHorizontalFlip()

    def decodes_whole(transform: Any, kind: type[ImageFolder] = ImageFolder) -> bool | None:
        dataset = Subset(kind(class_folders, transform), [0, 1])
        return loader_facts([DataLoader(dataset)]).decodes_whole

    assert decodes_whole(made.Compose([crop, flip])) is True
    assert decodes_whole(crop) is True
    assert decodes_whole(made.Compose([flip, crop])) is False  # what comes first wants the whole image
    assert decodes_whole(None) is False
    assert decodes_whole(crop, DecodesItself) is False
    assert loader_facts([DataLoader(Photos())]).decodes_whole is False


def _in_slots(loader: DataLoader[Any]) -> DataLoader[Any]:
    put_in_slots(loader)
    return loader


WITH_WORKERS: dict[str, Any] = {"batch_size": 2, "num_workers": 1}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 under torch 2.13 and later
@pytest.mark.parametrize(
    ("make", "in_place", "may_use_slots"),
    [
        (lambda: [DataLoader(Photos(), **WITH_WORKERS)], False, True),
        (lambda: [_in_slots(DataLoader(Photos(), **WITH_WORKERS))], True, False),
        (lambda: [FeedLoader(Photos(), **WITH_WORKERS)], True, False),
        (lambda: [FeedLoader(Photos(), hand_over="torch", **WITH_WORKERS)], False, False),  # as the user wants it
        (lambda: [FeedLoader(Photos(), workers="thread", **WITH_WORKERS)], None, None),
        (lambda: [DataLoader(Photos(), batch_size=2)], None, None),
        (lambda: [StatefulDataLoader(Photos(), **WITH_WORKERS)], False, False),
        (lambda: [FeedLoader(Photos(), **WITH_WORKERS), DataLoader(Photos(), **WITH_WORKERS)], False, True),
    ],
)
def test_loader_facts_say_whether_batches_are_in_place_or_could_be(
    make: Any, in_place: bool | None, may_use_slots: bool | None
) -> None:
    facts = loader_facts(make())
    assert (facts.in_place, facts.may_use_slots) == (in_place, may_use_slots)
