"""torch.set_default_device: what lies on the host stays there. The device is meta, where no tensor has values."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from images.made_images import WHOLE
from made_samples import batch_of, jpegs, nvjpeg_dataset, photo
from torch.utils.data import TensorDataset

from lightning_feed import FastDataModule, ImageFolderDataModule, LoaderSettings
from lightning_feed.images.device_decode import decode_batch
from lightning_feed.load.order import EpochOrder
from lightning_feed.transfer.resident import ResidentLoader, load_resident

NUMBERS = torch.arange(20.0)


class Numbers(FastDataModule):
    def make_dataset(self, split: str) -> Any:
        return TensorDataset(NUMBERS)


@contextmanager
def default_device(device: str | None) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).clear()  # else torch 2.6's get_default_device() fails from now on


def assert_same_under_a_default_device(make: Callable[[], Any]) -> None:
    expected = make()
    with default_device("meta"):
        found = make()
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one.device.type == "cpu"
            assert torch.equal(one, other)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / name).mkdir()
        for index in range(5):
            photo(40, 50, index).save(tmp_path / name / f"{index}.jpg")
    return tmp_path


WORKERS = {
    "main process": LoaderSettings(num_workers=0, seed=1),
    "threads": LoaderSettings(num_workers=2, workers="thread", seed=1),
    "processes": LoaderSettings(num_workers=1, seed=1),
}


@pytest.mark.parametrize("workers", WORKERS)
def test_data_module_batches_are_the_same_under_a_default_device(workers: str) -> None:
    assert_same_under_a_default_device(lambda: list(Numbers(4, loader=WORKERS[workers]).train_dataloader()))


@pytest.mark.parametrize("workers", WORKERS)
def test_image_batches_are_the_same_under_a_default_device(workers: str, photos: Path) -> None:
    def batches() -> list[Any]:
        torch.manual_seed(0)  # for the crops of the main process
        module = ImageFolderDataModule(
            photos, 4, image_size=16, val_fraction=0, decoder="pillow", loader=WORKERS[workers]
        )
        return [module.device_transform(batch, "train") for batch in module.train_dataloader()]

    assert_same_under_a_default_device(batches)


def test_resident_batches_are_the_same_under_a_default_device() -> None:
    def batches() -> list[Any]:
        data = load_resident(TensorDataset(NUMBERS), device=torch.device("cpu"))
        order = EpochOrder(seed=1, epoch=lambda: 0)
        return list(ResidentLoader(data, batch_size=4, shuffle=True, order=order))

    assert_same_under_a_default_device(batches)


def test_decoded_batches_are_the_same_under_a_default_device() -> None:
    def decode(files: list[Any]) -> list[Any]:
        return [torch.ops.image.decode_jpeg(file, 3, False) for file in files]

    def decoded() -> list[Any]:
        made = nvjpeg_dataset([*jpegs(3), WHOLE["WebP"], None], on_error="substitute")
        return [decode_batch(batch_of(made), made, torch.device("cpu"), decode=decode)]

    assert_same_under_a_default_device(decoded)
