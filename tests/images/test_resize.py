"""The resize on uint8 is torchvision's, and that is Pillow's within a grey level or so."""

import sys

import numpy as np
import pytest
import torch
from images.made_images import waves
from PIL import Image
from torchvision.transforms.v2 import functional

from lightning_feed.errors import MissingExtraError
from lightning_feed.images import decoders
from lightning_feed.images.choose import psnr_db
from lightning_feed.images.decoders import Pixels, resize

SHAPES = [(61, 47), (500, 375), (32, 32), (1, 1), (300, 10), (224, 224)]


def _pillow(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize(size[::-1], Image.Resampling.BILINEAR))


def _pixels(image: torch.Tensor) -> Pixels:
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("antialias", [True, False])
def test_resize_gives_uint8_images_with_channels_last(antialias: bool) -> None:
    for shape in SHAPES:
        image = resize(waves(3, *shape), (32, 48), antialias=antialias)
        assert image.shape == (3, 32, 48)
        assert image.dtype == torch.uint8
        assert image.permute(1, 2, 0).is_contiguous(), "the channels lie last"


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_resize_is_within_a_grey_level_of_torchvision_and_pillow(shape: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image = resize(noise, (32, 48))
    planes = torch.from_numpy(noise).permute(2, 0, 1).contiguous()
    kernel = torch.nn.functional.interpolate(planes[None], size=(32, 48), mode="bilinear", antialias=True)[0]
    assert torch.equal(image, kernel), "the layout changed pixels"
    # torchvision goes by way of floats where it takes the CPU to be without AVX2: then it rounds otherwise.
    torchvisions = functional.resize(planes, [32, 48], antialias=True)
    assert (image.int() - torchvisions.int()).abs().max() <= 1
    apart = np.abs(_pixels(image).astype(int) - _pillow(noise, (32, 48)))
    assert apart.max() <= 1


def test_resize_accepts_a_noncontiguous_cut() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 80, 3), dtype=np.uint8)
    cut = noise[7:70, 11:60]
    for antialias in (True, False):
        image = resize(cut, (20, 30), antialias=antialias)
        assert torch.equal(image, resize(np.ascontiguousarray(cut), (20, 30), antialias=antialias))
        assert image.permute(1, 2, 0).is_contiguous(), "the channels lie last"


def test_resize_accepts_read_only_pixels() -> None:
    pixels = waves(3, 90, 80)
    pixels.setflags(write=False)
    for antialias in (True, False):
        assert torch.equal(
            resize(pixels, (20, 30), antialias=antialias), resize(pixels.copy(), (20, 30), antialias=antialias)
        )


def test_resize_to_the_same_size_returns_a_copy() -> None:
    pixels = waves(3, 20, 30)
    for antialias in (True, False):
        image = resize(pixels, (20, 30), antialias=antialias)
        assert np.array_equal(_pixels(image), pixels)
        assert not np.shares_memory(pixels, image.numpy())


def test_linear_resize_matches_pillow_only_when_enlarging() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    assert psnr_db(_pixels(resize(noise, (150, 140), antialias=False)), _pillow(noise, (150, 140))) > 50
    assert psnr_db(_pixels(resize(noise, (30, 30), antialias=False)), _pillow(noise, (30, 30))) < 30


def test_linear_resize_needs_opencv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    decoders.open_cv2.cache_clear()
    with pytest.raises(MissingExtraError, match=r"needs cv2.*lightning-feed\[images\]"):
        resize(waves(), (8, 8), antialias=False)
