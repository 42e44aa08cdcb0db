"""Rates with less work in the transforms, and the costs of whole images and of their crops."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.transforms as v1
from diagnosing.made_data import Images, Slow, session_of, shuffled_part, without_transforms
from PIL import Image
from torch.utils.data import RandomSampler, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_feed.diagnosing import less_work
from lightning_feed.diagnosing.less_work import (
    UntilSized,
    folder_to_crop,
    measure_as_uint8,
    measure_crops,
)


def test_without_transforms_the_loader_is_as_fast_as_if_they_were_free() -> None:
    slow = Images(v1.Compose([Slow(0.01), v1.Resize(12)]))
    assert (without_transforms(slow) or 0) > 10 * (1 / (4 * 0.01))
    assert without_transforms(Images()) is None


# --- pixel work left to the device ------------------------------------------------------------------------------------

TO_FLOATS = {v1: [v1.ToTensor()], v2: [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]}


def _as_uint8(dataset: Any) -> float | None:
    session = session_of(shuffled_part(dataset).loader)
    measure_as_uint8(session)
    return session.results.as_uint8_per_s


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[UntilSized]:
    """The pipelines that were timed."""
    made: list[UntilSized] = []

    class Kept(UntilSized):
        def __init__(self, steps: list[Any]) -> None:
            super().__init__(steps)
            made.append(self)

    monkeypatch.setattr(less_work, "UntilSized", Kept)
    return made


@pytest.mark.parametrize("version", [v1, v2])
def test_steps_up_to_the_last_that_changes_the_size_stay(class_folders: Path, version: Any, seen: Any) -> None:
    steps = [version.Resize((20, 30)), version.RandomCrop(16), version.RandomHorizontalFlip(), *TO_FLOATS[version]]
    transform = version.Compose([*steps, version.Normalize([0.5] * 3, [0.5] * 3)])
    dataset = ImageFolder(str(class_folders), transform)
    assert (_as_uint8(dataset) or 0) > 0
    assert seen[0].steps == steps[:2]
    made = seen[0](dataset.loader(dataset.samples[0][0]))
    assert made.dtype == torch.uint8
    assert made.shape == (3, 16, 16)
    assert dataset.transform is transform
    assert dataset.transforms.transform is transform


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
    assert _as_uint8(dataset) is None
    assert dataset.transform is transform


class Pairs(Images):
    """Pictures with masks, which the transform gets together."""

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.rand(3, 8, 8), torch.rand(3, 8, 8))  # type: ignore[misc]


def test_pictures_with_masks_are_left_alone() -> None:
    assert _as_uint8(Pairs(v2.Compose([v2.Resize(4)]))) is None


# --- only the crops decoded -------------------------------------------------------------------------------------------

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


def _folder(root: Path, **changed: Any) -> ImageFolder:
    return ImageFolder(str(root), **{"transform": CROP, **changed})


def test_crops_are_timed_in_turn_with_whole_images(class_folders: Path) -> None:
    folder = _folder(class_folders)
    session = session_of(shuffled_part(Subset(folder, range(9))).loader)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure_crops(session)
    found = session.results.crops
    assert found is not None
    assert (found.folder, found.val_fraction) == (str(class_folders), 0.25)
    assert found.whole_ms > 0 < found.crop_ms
    assert torch.equal(torch.get_rng_state(), before)
    assert folder.transform is CROP


def test_the_samples_are_those_of_the_folder(class_folders: Path) -> None:
    folder = _folder(class_folders)
    cropping = less_work._cropping(Subset(folder, [7, 2]), folder)
    for index in range(2):
        torch.manual_seed(3)
        image, label = Subset(folder, [7, 2])[index]
        torch.manual_seed(3)
        cropped, same = cropping[index]
        assert label == same
        assert torch.allclose(image, cropped, atol=0.1)


def test_a_folder_of_splits_is_given_as_a_whole(class_folders: Path) -> None:
    train = class_folders.rename(class_folders.parent / "train")
    session = session_of(shuffled_part(_folder(train)).loader)
    measure_crops(session)
    assert session.results.crops is not None
    assert session.results.crops.folder == str(train.parent)
    assert session.results.crops.val_fraction is None


@pytest.mark.parametrize(
    ("folder", "loader"),
    [
        ({"transform": v1.Compose([v1.Resize((16, 16)), v1.ToTensor()])}, {}),
        ({"target_transform": str}, {}),
        ({"loader": lambda path: Image.open(path).convert("L").convert("RGB")}, {}),
        ({}, {"shuffle": False}),
        ({}, {"collate_fn": list}),
        ({}, {"batch_size": None, "shuffle": None}),
        ({}, {"sampler": RandomSampler(range(12), replacement=True), "shuffle": None}),
    ],
)
def test_loaders_that_the_data_module_does_not_replace(class_folders: Path, folder: Any, loader: Any) -> None:
    assert folder_to_crop(shuffled_part(_folder(class_folders, **folder), **loader).loader) is None
    assert folder_to_crop(shuffled_part(_folder(class_folders)).loader) is not None
