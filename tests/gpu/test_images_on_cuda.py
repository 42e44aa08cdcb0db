"""ImageFolderDataModule on a CUDA device: the values of the CPU, from the host and from the device's own memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_cuda import Seen, fitted
from torch import Tensor

from lightning_feed import ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.data.images import IMAGENET_MEAN, IMAGENET_STD
from lightning_feed.images.ragged_crop import normalization_of


def as_tensor(image: Any) -> Tensor:
    """The image as it is: all are of one size, and nothing is random."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def fit(module: ImageFolderDataModule, *callbacks: Any) -> list[tuple[Tensor, Tensor]]:
    model: Seen = fitted(Seen(), module, *callbacks)
    assert {images.dtype for images, _ in model.given["train"]} == {module.dtype}
    return model.batches()


def made(photos: Path, **options: Any) -> ImageFolderDataModule:
    options.setdefault("loader", LoaderSettings(num_workers=2, seed=1))
    return ImageFolderDataModule(photos, batch_size=4, image_size=32, val_fraction=0.0, decoder="pillow", **options)


@pytest.mark.gpu(twin="simulated/test_every_setting.py::test_a_value_of_a_setting_reaches_the_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workers", ["process", "thread"])
def test_prefetched_batches_match_those_made_on_the_cpu(class_folders: Path, dtype: torch.dtype, workers: Any) -> None:
    loader = LoaderSettings(num_workers=2, seed=1, workers=workers)
    batches = fit(made(class_folders, dtype=dtype, loader=loader, transform=as_tensor), PrefetchCallback())
    module = made(class_folders, dtype=dtype, loader=loader, transform=as_tensor)
    expected = [module.device_transform(batch, "train") for batch in module.train_dataloader()]
    for (images, labels), (host_images, host_labels) in zip(batches, expected, strict=False):
        torch.testing.assert_close(images, host_images.float(), atol=1e-2, rtol=1e-2)
        assert torch.equal(labels, host_labels)


@pytest.mark.gpu(
    twin="simulated/test_images_and_resident_data.py::test_decoding_makes_only_waits_that_torchs_sync_debug_mode_allows"
)
def test_normalisation_constants_are_made_without_a_device_sync() -> None:
    try:
        torch.cuda.set_sync_debug_mode("error")
        made = normalization_of.__wrapped__(IMAGENET_MEAN, IMAGENET_STD, torch.float32, torch.device("cuda", 0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = normalization_of.__wrapped__(IMAGENET_MEAN, IMAGENET_STD, torch.float32, torch.device("cpu"))
    assert torch.equal(made.factors.cpu(), expected.factors)


@pytest.mark.gpu(twin="data/test_images.py::test_a_dataset_on_the_device_gets_new_crops_in_each_epoch")
def test_a_dataset_on_the_device_is_cropped_anew_in_each_epoch(class_folders: Path) -> None:
    batches = fit(made(class_folders, on_device=True), PrefetchCallback())
    assert len(batches) == 6
    first, second = (torch.cat([images for images, _ in batches[k : k + 3]]) for k in (0, 3))
    assert first.shape == (12, 3, 32, 32)
    assert not torch.equal(first.sort(0).values, second.sort(0).values)
