"""backend="dali-gpu" in a Trainer on the simulated device, where DALI's pipelines run on the CPU: what tests/gpu looks
at on a GPU, but for the GPU's own pixels and memory."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dali_batches import active_in, assert_nearly_the_same, write
from images.made_images import BROKEN, WHOLE, encoded
from made_samples import jpegs, photo
from simulated.device import SimulatedDevice
from simulated.image_decoders import ImageDecoders, dali_on_cpu, image_decoders
from simulated.training import Model, fit
from torch import Tensor

from lightning_feed import DaliOptions, ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.errors import DecodeError

THREADS = LoaderSettings(num_workers=2, workers="thread", seed=1)


@pytest.fixture
def decoders() -> Iterator[ImageDecoders]:
    with image_decoders(SimulatedDevice()) as found, dali_on_cpu(found):
        yield found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten JPEGs to train with and five to validate with, in two classes."""
    return write(tmp_path / "photos", train=jpegs(10, subsampling=0), val=jpegs(5, subsampling=0))


def made(photos: Path, backend: Any = "dali-gpu", **options: Any) -> ImageFolderDataModule:
    given = {"batch_size": 4, "image_size": 32, "decoder": "pillow", "loader": THREADS, **options}
    return ImageFolderDataModule(photos, backend=backend, **given)


class Seeing(Model):
    """Keeps the batches that it is given, as they are on the device, and notes which pipelines there are."""

    def __init__(self, device: SimulatedDevice, module: ImageFolderDataModule) -> None:
        super().__init__(device)
        self.module = [module]
        self.given: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "val": []}
        self.active: dict[str, set[tuple[str, ...]]] = {"train": set(), "val": set()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = self.see("train", batch)
        return self.net(images.float().flatten()[:8]).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.see("val", batch)

    def see(self, split: str, batch: Any) -> Tensor:
        images, labels = batch
        assert images.is_contiguous(memory_format=torch.channels_last)
        self.sim.launch(self.compute_ms, what=f"a step of {split}", reads=batch)
        self.given[split].append((images, labels))
        self.active[split].add(active_in(self.module[0]))
        return images

    def batches(self, split: str) -> list[tuple[Tensor, Tensor]]:
        """What was given, as float32."""
        return [(self.sim.content(images).float(), self.sim.content(labels)) for images, labels in self.given[split]]


def trained(decoders: ImageDecoders, module: ImageFolderDataModule, *callbacks: Any, **options: Any) -> Seeing:
    model = Seeing(decoders.device, module)
    fit(decoders.device, model, module, *callbacks, **options)
    assert decoders.device.races == []
    return model


def on_cpu(photos: Path, split: str, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """The batches of backend="torch", from a data module that no Trainer has."""
    module = made(photos, "torch", **options)
    loader = module.train_dataloader() if split == "train" else module.val_dataloader()
    batches = [module.device_transform(batch, split) for batch in loader]
    return [(images.float(), labels) for images, labels in batches]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dali_batches_of_a_fit_match_those_of_the_torch_backend(
    decoders: ImageDecoders, photos: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """They are on the device when they come, so there is nothing to copy ahead, which is said once."""
    callback = PrefetchCallback()
    with caplog.at_level(logging.INFO):
        model = trained(decoders, made(photos, dtype=dtype), callback)
    assert {images.dtype for images, _ in model.given["train"]} == {dtype}
    assert_nearly_the_same(model.batches("train"), on_cpu(photos, "train", dtype=dtype))
    assert_nearly_the_same(model.batches("val"), on_cpu(photos, "val", dtype=dtype))
    assert not callback.active
    said = "PrefetchCallback does nothing: the loader yields tensors that are on the device already."
    assert caplog.messages.count(said) == 1


@pytest.mark.parametrize("keep", [False, True])
def test_validation_pipeline_exists_only_during_validation_unless_kept(
    decoders: ImageDecoders, photos: Path, keep: bool
) -> None:
    module = made(photos, DaliOptions(device="gpu", keep_eval_pipelines=keep))
    model = trained(decoders, module, val_check_interval=2, max_epochs=2)
    assert model.active["train"] == ({("train",), ("train", "val")} if keep else {("train",)})
    assert model.active["val"] == {("train", "val")}
    assert active_in(module) == ()


def test_images_of_other_kinds_among_jpegs_are_trained_on(decoders: ImageDecoders, photos: Path) -> None:
    """Some of them are decoded on the host, and normalised on the device."""
    kinds = ["CMYK", "greyscale", "RGBA PNG", "WebP", "16 bit PNG", "one pixel", "EXIF-rotated"]
    for name in kinds:
        (photos / "val" / "a" / f"{name}.jpg").write_bytes(WHOLE[name])
    model = trained(decoders, made(photos))
    assert sum(len(labels) for _, labels in model.given["val"]) == 5 + len(kinds)


def test_an_image_larger_than_largest_image_is_decoded_correctly(decoders: ImageDecoders, photos: Path) -> None:
    (photos / "val" / "a" / "0.jpg").write_bytes(encoded(photo(300, 400)))
    model = trained(decoders, made(photos, DaliOptions(device="gpu", largest_image=(64, 64))))
    assert {given["preallocate_height_hint"] for given in decoders.dali} == {64}
    assert_nearly_the_same(model.batches("val"), on_cpu(photos, "val"))


@pytest.mark.parametrize("broken", ["JPEG cut in the middle", "PNG cut"])
def test_a_broken_image_is_named_or_replaced(decoders: ImageDecoders, photos: Path, broken: str) -> None:
    (photos / "train" / "a" / "2.jpg").write_bytes(BROKEN[broken])
    with pytest.raises(DecodeError, match=r"train/a/2\.jpg \(sample 1\)"):
        trained(decoders, made(photos))
    module = made(photos, on_error="skip")
    model = trained(decoders, module, max_epochs=2)
    assert [len(labels) for _, labels in model.given["train"]] == [4, 4, 2] * 2
    assert module.failures() == 2
