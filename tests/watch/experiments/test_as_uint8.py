"""X5: what would stay in the workers if the device did the pixel work, and that the loader is as before afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms as v1
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from watch.experiments.made_data import Images, Slow

from lightning_feed.load.rounds import RoundLimits
from lightning_feed.watch.experiments import as_uint8
from lightning_feed.watch.experiments.as_uint8 import UntilSized, measure_as_uint8
from lightning_feed.watch.experiments.subject import Part

TO_FLOATS = {v1: [v1.ToTensor()], v2: [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]}
LIMITS = RoundLimits(min_s=0.0, max_s=20)


def _part(dataset: Any) -> Part:
    return Part("", DataLoader(dataset, batch_size=4))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[UntilSized]:
    """The pipelines that were timed."""
    made: list[UntilSized] = []

    class Kept(UntilSized):
        def __init__(self, steps: list[Any]) -> None:
            super().__init__(steps)
            made.append(self)

    monkeypatch.setattr(as_uint8, "UntilSized", Kept)
    return made


@pytest.mark.parametrize("version", [v1, v2])
def test_steps_up_to_the_last_that_changes_the_size_stay(class_folders: Path, version: Any, seen: Any) -> None:
    steps = [version.Resize((20, 30)), version.RandomCrop(16), version.RandomHorizontalFlip(), *TO_FLOATS[version]]
    transform = version.Compose([*steps, version.Normalize([0.5] * 3, [0.5] * 3)])
    dataset = ImageFolder(str(class_folders), transform)
    rate = measure_as_uint8((_part(dataset),), LIMITS)
    assert rate is not None
    assert rate.batches_per_s > 0
    assert seen[0].steps == steps[:2]
    made = seen[0](dataset.loader(dataset.samples[0][0]))
    assert made.dtype == torch.uint8
    assert made.shape == (3, 16, 16)
    assert dataset.transform is transform
    assert dataset.transforms.transform is transform


def test_tensors_of_floats_become_bytes(seen: Any) -> None:
    dataset = Images(nn.Sequential(v2.Resize(4), v2.Normalize([0.0] * 3, [2.0] * 3)))
    assert measure_as_uint8((_part(dataset),), LIMITS) is not None
    made = seen[0](torch.full((3, 8, 8), 0.5))
    assert made.dtype == torch.uint8
    assert made.shape == (3, 4, 4)
    assert made.unique().tolist() == [127]


def test_without_a_change_of_size_nothing_stays(seen: Any) -> None:
    slow = Slow(0.01)
    dataset = Images(v1.Compose([slow]))
    rate = measure_as_uint8((_part(dataset),), RoundLimits(min_s=0.05, max_s=20))
    assert seen[0].steps == []
    assert rate is not None
    assert rate.batches_per_s > 10 * (1 / (4 * 0.01))


@pytest.mark.parametrize(
    "transform",
    [
        None,
        lambda image: image,
        v2.Compose([v2.Resize(4), v2.ToDtype(torch.uint8, scale=True)]),  # uint8 already
        v1.Compose([lambda image: image.sum()]),  # a number
        v1.Compose([]),
    ],
)
def test_what_is_no_pipeline_of_pictures_has_no_rate(transform: Any) -> None:
    dataset = Images(transform)
    assert measure_as_uint8((_part(dataset),), LIMITS) is None
    assert dataset.transform is transform


class Pairs(Images):
    """Pictures with masks, which the transform gets together."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.rand(3, 8, 8), torch.rand(3, 8, 8))  # type: ignore[misc]


def test_pictures_with_masks_are_left_alone() -> None:
    assert measure_as_uint8((_part(Pairs(v2.Compose([v2.Resize(4)]))),), LIMITS) is None


def test_a_failing_step_leaves_the_pipeline_as_it_was() -> None:
    def fails(image: Any) -> Any:
        raise RuntimeError("planted")

    transform = v1.Compose([fails])
    dataset = Images(transform)
    with pytest.raises(RuntimeError, match="planted"):
        measure_as_uint8((_part(dataset),), LIMITS)
    assert dataset.transform is transform
