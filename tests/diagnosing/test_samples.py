"""The planted slow step is found by its name, however the pipeline is built, and the pipeline stays as it was."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import albumentations
import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from diagnosing.made_data import Images, Slow, Stream, burn, shuffled_part, without_transforms
from torch import nn
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed.diagnosing.samples import StepTimer, find_sites, name_of, replaced, sample_costs, timed
from lightning_feed.images.crop import Recipe, TrainRecipe, UserTransform
from lightning_feed.images.decoders import PillowDecoder
from lightning_feed.images.image_dataset import ImageDataset
from lightning_feed.measure.experiment_results import NamedCost
from lightning_feed.storage.folder import FolderSource, scan_classes

SLOW_S = 0.004


def _costs(dataset: Any, samples: int = 5) -> dict[str, NamedCost]:
    found = sample_costs(shuffled_part(dataset), 20, samples=samples)
    assert len({cost.name for cost in found}) == len(found)
    return {cost.name: cost for cost in found}


class SlowModule(nn.Module):
    def forward(self, image: Any) -> Any:
        burn(SLOW_S)
        return image


class Slow16:
    """Of a PIL image makes a tensor, slowly."""

    def __call__(self, image: Any) -> Any:
        burn(SLOW_S)
        return v1.functional.pil_to_tensor(image)


def slow_function(image: Any) -> Any:
    burn(SLOW_S)
    return image


class Slotted:
    __slots__ = ()

    def __call__(self, image: Any) -> Any:
        burn(SLOW_S)
        return image


PIPELINES = {
    "v1": (v1.Compose([v1.Resize(12), Slow(SLOW_S), v1.RandomHorizontalFlip()]), "Slow"),
    "v2": (v2.Compose([v2.Resize(12), SlowModule(), v2.RandomHorizontalFlip()]), "SlowModule"),
    "sequential": (nn.Sequential(v1.Resize(12), SlowModule(), v1.CenterCrop(8)), "SlowModule"),
    "nested": (v1.Compose([v1.Resize(12), v1.Compose([v1.CenterCrop(8), Slow(SLOW_S)])]), "Slow"),
    "a single step": (Slow(SLOW_S), "Slow"),
    "a function": (slow_function, "slow_function"),
    "a function in a list": (v1.Compose([v1.Resize(12), slow_function]), "slow_function"),
    "slots": (v1.Compose([Slotted(), v1.Resize(12)]), "Slotted"),
    "by chance": (v1.Compose([v1.RandomApply([SlowModule()], p=1.0), v1.Resize(12)]), "RandomApply"),
    "twice": (v1.Compose([v1.Resize(12), v1.Resize(14), Slow(SLOW_S)]), "Slow"),
}


@pytest.mark.parametrize("name", list(PIPELINES))
def test_slow_transform_is_found_by_name(name: str) -> None:
    pipeline, slow = PIPELINES[name]
    costs = _costs(Images(pipeline))
    assert max(costs.values(), key=lambda cost: cost.cpu_ms).name == slow
    assert costs[slow].cpu_ms == pytest.approx(SLOW_S * 1e3, rel=0.5)
    assert costs[slow].wall_ms >= 0.9 * costs[slow].cpu_ms
    assert next(iter(costs)) == "load"
    assert costs["load"].cpu_ms < SLOW_S * 1e3 / 2  # what the steps took is not counted a second time


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(10)), lambda d: ConcatDataset([Images(), d, d])])
def test_transforms_are_timed_inside_wrapped_datasets(wrap: Any) -> None:
    dataset = wrap(Images(v1.Compose([Slow(SLOW_S)])))
    part = shuffled_part(dataset, sampler=range(len(dataset) - 5, len(dataset)), shuffle=None)
    assert [cost.name for cost in sample_costs(part, 20, samples=4)] == ["load", "Slow"]


def test_transforms_of_iterable_datasets_are_timed() -> None:
    costs = _costs(Stream(v1.Compose([Slow(SLOW_S)])))
    assert list(costs) == ["load", "Slow"]
    assert costs["Slow"].cpu_ms == pytest.approx(SLOW_S * 1e3, rel=0.5)


def test_timing_samples_leaves_dataset_and_random_states_unchanged() -> None:
    slow = Slow(0.0)
    pipeline = v1.Compose([v1.Resize(12), slow])
    dataset = Images(pipeline)
    steps = list(pipeline.transforms)
    torch.set_num_threads(2)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    sample_costs(shuffled_part(dataset, num_workers=1), 20, samples=4)
    without_transforms(dataset)
    assert dataset.transform is pipeline
    assert pipeline.transforms == steps
    assert [type(step) for step in steps] == [v1.Resize, Slow]
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()
    assert torch.get_num_threads() == 2


def augment(image: Any) -> Any:
    """Called as a step of our own datasets is."""
    return image


def test_costs_of_an_image_folder_list_reading_and_decoding_separately(class_folders: Path) -> None:
    dataset = ImageFolder(class_folders, transform=v1.Compose([v1.RandomResizedCrop(16), Slow(SLOW_S)]))
    dataset.transform.transforms.insert(1, v1.ToTensor())
    assert list(_costs(dataset)) == ["read", "decode", "RandomResizedCrop", "ToTensor", "Slow"]
    assert list(_costs(Subset(dataset, range(1, 8)))) == ["read", "decode", "RandomResizedCrop", "ToTensor", "Slow"]
    dataset.transform = augment
    assert list(_costs(dataset)) == ["read", "decode", "augment"]


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        (TrainRecipe(size=16), ["TrainRecipe"]),
        (UserTransform(v1.Compose([v1.RandomResizedCrop(16), Slow16()])), ["RandomResizedCrop", "Slow16"]),
    ],
)
def test_image_dataset_costs_name_read_decode_and_transforms(
    class_folders: Path, recipe: Recipe, names: list[str]
) -> None:
    source = FolderSource(class_folders, scan_classes(class_folders))
    dataset = ImageDataset(source, PillowDecoder(), recipe)
    costs = _costs(dataset)
    assert list(costs) == ["read", "decode", *names]
    assert all(cost.cpu_ms > 0 for cost in costs.values())
    assert dataset.recipe is recipe
    assert (without_transforms(dataset) or 0) > 0
    assert dataset.recipe is recipe


DECODED: list[int] = []


class Counting(PillowDecoder):
    def decode(self, data: Any) -> Any:
        DECODED.append(len(data))
        return super().decode(data)


def test_timed_copy_of_transforms_gives_the_same_images() -> None:
    torch.manual_seed(0)
    pipeline = v2.Compose([v2.RandomCrop(5), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    image = torch.arange(3 * 8 * 8, dtype=torch.uint8).reshape(3, 8, 8)
    twin = timed(pipeline, StepTimer(on=True))
    for seed in range(5):
        torch.manual_seed(seed)
        expected = pipeline(image)
        torch.manual_seed(seed)
        assert torch.equal(twin(image), expected)
    assert isinstance(twin, v2.Compose)
    assert all(isinstance(step, type(was)) for step, was in zip(twin.transforms, pipeline.transforms, strict=True))


def _albumentations() -> Any:
    inner = [albumentations.GaussianBlur(p=1.0), albumentations.HorizontalFlip(p=0.5)]
    return albumentations.Compose(
        [
            albumentations.RandomResizedCrop((16, 16)),
            albumentations.ColorJitter(p=1.0),  # keeps its four functions under the name `transforms`
            albumentations.Sequential(inner, p=1.0),
            albumentations.OneOf([albumentations.Blur(p=1.0), albumentations.MedianBlur(p=1.0)], p=1.0),
            albumentations.Normalize(),
        ],
        seed=3,
    )


class Photos(Images):
    def __getitem__(self, index: int) -> Any:
        assert self.transform is not None
        photo = np.full((32, 32, 3), index, np.uint8)
        return self.transform(image=photo)["image"]  # type: ignore[call-arg]


def test_timed_copy_of_albumentations_gives_the_same_images_unregistered() -> None:
    photo = np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3)
    registry = dict(albumentations.core.serialization.SERIALIZABLE_REGISTRY)
    plain, twin = _albumentations(), timed(_albumentations(), StepTimer(on=True))
    for _ in range(5):
        assert np.array_equal(plain(image=photo)["image"], twin(image=photo)["image"])
    assert isinstance(twin, albumentations.Compose)
    assert isinstance(twin.transforms[2], albumentations.Sequential)
    assert registry == albumentations.core.serialization.SERIALIZABLE_REGISTRY


def test_transform_sites_are_found_and_named() -> None:
    assert name_of(Slow(0).__call__) == "__call__"
    assert name_of(lambda image: image) == "lambda"
    assert name_of(partial(slow_function)) == "partial"
    dataset = Images(slow_function)
    dataset.helper = slow_function  # type: ignore[attr-defined]
    dataset.collate_fn = slow_function  # type: ignore[attr-defined]
    assert [(site.owner, site.attribute) for site in find_sites(dataset)] == [(dataset, "transform")]
    with pytest.raises(KeyboardInterrupt), replaced(dict.fromkeys(find_sites(dataset))):
        raise KeyboardInterrupt
    assert dataset.transform is slow_function
