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

from lightning_feed.diagnosing import less_work
from lightning_feed.diagnosing.less_work import folder_to_crop, measure_crops
from lightning_feed.diagnosing.parts import NotMeasurable
from lightning_feed.errors import MissingExtraError


def test_rate_without_transforms_excludes_their_time() -> None:
    slow = Images(v1.Compose([Slow(0.01), v1.Resize(12)]))
    assert (without_transforms(slow) or 0) > 10 * (1 / (4 * 0.01))
    assert without_transforms(Images()) is None


# --- only the crops decoded -------------------------------------------------------------------------------------------

CROP = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])


def _folder(root: Path, **changed: Any) -> ImageFolder:
    return ImageFolder(str(root), **{"transform": CROP, **changed})


def test_decoding_of_crops_and_of_whole_images_is_timed(class_folders: Path) -> None:
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


def test_crops_are_not_timed_without_a_decoder_of_parts(class_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side would decode whole images, too."""

    def missing(name: str) -> Any:
        raise MissingExtraError(f"{name} needs libturbojpeg 3")

    monkeypatch.setattr(less_work, "make_decoder", missing)
    session = session_of(shuffled_part(_folder(class_folders)).loader)
    with pytest.raises(NotMeasurable, match="turbo-region needs libturbojpeg 3"):
        measure_crops(session)
    assert session.results.crops is None
    session = session_of(shuffled_part(_folder(class_folders, transform=v1.ToTensor())).loader)
    measure_crops(session)  # has no crops


def test_cropping_dataset_gives_the_samples_of_the_image_folder(class_folders: Path) -> None:
    folder = _folder(class_folders)
    cropping = less_work._cropping(Subset(folder, [7, 2]), folder)
    for index in range(2):
        torch.manual_seed(3)
        image, label = Subset(folder, [7, 2])[index]
        torch.manual_seed(3)
        cropped, same = cropping[index]
        assert label == same
        assert torch.allclose(image, cropped, atol=0.1)


def test_crop_result_names_the_parent_folder_of_the_splits(class_folders: Path) -> None:
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
def test_folder_to_crop_is_none_for_unsupported_loaders(class_folders: Path, folder: Any, loader: Any) -> None:
    assert folder_to_crop(shuffled_part(_folder(class_folders, **folder), **loader).loader) is None
    assert folder_to_crop(shuffled_part(_folder(class_folders)).loader) is not None
