"""Crops and recipes give what torchvision gives, draws and pixels; a transform of the user's runs as written."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision.transforms as v1
from hypothesis import given
from hypothesis import strategies as st
from made_samples import photo
from PIL import Image
from torchvision.transforms import v2

from lightning_feed.errors import SettingsError
from lightning_feed.images.crop import (
    CropSpec,
    EvalRecipe,
    SourceImage,
    TrainRecipe,
    UserTransform,
    crop_image,
)
from lightning_feed.images.decoders import PillowDecoder, Pixels, Region, draw_region
from lightning_feed.images.header import Encoded

PIXELS = np.array(photo())
CUT = CropSpec(region=Region(10, 20, 40, 50), resized=(24, 30), window=Region(2, 3, 16, 20), flipped=False)


def test_crop_image_resizes_the_box_and_cuts_out_the_window() -> None:
    box = torch.from_numpy(PIXELS).permute(2, 0, 1)[:, 10:50, 20:70]
    resized = v2.functional.resize(box, [24, 30], antialias=True)
    found = crop_image(SourceImage(PIXELS), CUT, "exact")
    assert found.dtype == torch.uint8
    # Torch 2.6 resizes planes and channels last within a grey level of each other.
    assert (found.int() - resized[:, 2:18, 3:23].int()).abs().max() <= 1
    assert found.stride(0) == 1  # channels last
    flipped = CropSpec(region=CUT.region, resized=CUT.resized, window=CUT.window, flipped=True)
    assert torch.equal(crop_image(SourceImage(PIXELS), flipped, "exact"), found.flip(-1))


@given(height=st.integers(1, 300), width=st.integers(1, 300), size=st.integers(1, 40))
def test_eval_recipe_has_the_centre_crop_of_torchvision(height: int, width: int, size: int) -> None:
    cut = EvalRecipe(size=size, short_side=size + 7).spec(height, width)
    resized = v2.functional.resize(torch.empty((1, height, width), device="meta"), [size + 7], antialias=True)
    assert cut.resized == tuple(resized.shape[1:])
    places = torch.arange(resized.shape[1] * resized.shape[2]).view(resized.shape)
    top, left, rows, columns = cut.window
    kept = places[:, top : top + rows, left : left + columns]
    assert torch.equal(kept, v2.functional.center_crop(places, [size, size]))


# --- recipes ----------------------------------------------------------------------------------------------------------


def smooth(height: int = 120, width: int = 161) -> np.ndarray:
    """Something smooth with edges, as photos are."""
    rows, columns = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(rows / 9 + k) * np.cos(columns / (7 + k)) for k in range(3)], axis=-1)
    pixels = np.clip(127 + 100 * waves, 0, 255).astype(np.uint8)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 20, 60)
    return pixels


def jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


DATA = jpeg(smooth())
PIL = Image.open(io.BytesIO(DATA)).convert("RGB")


class RegionByCutting(PillowDecoder):
    """A decoder of regions, the obvious way, which notes what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Region | str] = []

    def decode(self, data: Encoded) -> Pixels:
        self.asked.append("whole")
        return super().decode(data)

    def decode_region(self, data: Encoded, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        self.asked.append(region)
        top, left, height, width = region
        return super().decode(data)[top : top + height, left : left + width].copy()


def encoded(decoder: PillowDecoder | None = None) -> SourceImage:
    return SourceImage(DATA, decoder or PillowDecoder())


def decoded() -> SourceImage:
    pixels = np.array(PIL)
    pixels.flags.writeable = False  # as a cache gives them
    return SourceImage(pixels)


IMAGES: dict[str, Callable[[], Any]] = {
    "encoded": encoded,
    "regions": lambda: encoded(RegionByCutting()),
    "decoded": decoded,
}


def with_seed(seed: int, call: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(seed)
    return call(), torch.get_rng_state()


@pytest.mark.parametrize("name", IMAGES)
def test_train_recipe_matches_the_pixels_and_draws_of_torchvision(name: str) -> None:
    theirs = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(64, antialias=True), v2.RandomHorizontalFlip()])
    for seed in range(8):
        expected, state = with_seed(seed, lambda: theirs(PIL))
        found, state_after = with_seed(seed, lambda: TrainRecipe(size=64)(IMAGES[name]()))
        assert (found.dtype, found.shape) == (torch.uint8, (3, 64, 64))
        assert (found.int() - expected.int()).abs().max() <= 1
        assert torch.equal(state, state_after)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("shape", [(120, 161), (161, 120), (90, 90)])
def test_eval_recipe_matches_the_pixels_of_torchvision(name: str, shape: tuple[int, int], monkeypatch: Any) -> None:
    data = jpeg(smooth(*shape))
    image = Image.open(io.BytesIO(data)).convert("RGB")
    theirs = v2.Compose([v2.PILToTensor(), v2.Resize(73, antialias=True), v2.CenterCrop(64)])
    picture = SourceImage(np.array(image)) if name == "decoded" else SourceImage(data, PillowDecoder())
    found = EvalRecipe(size=64, short_side=73)(picture)
    assert found.shape == (3, 64, 64)
    assert (found.int() - theirs(image).int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("shape", "limits"),
    [
        ((375, 500), ((0.08, 1.0), (3 / 4, 4 / 3))),
        ((500, 375), ((0.9, 1.0), (0.1, 0.2))),
        ((7, 900), ((0.01, 0.02), (1.0, 1.0))),
        ((900, 7), ((0.08, 1.0), (3 / 4, 4 / 3))),
        ((1, 1), ((0.01, 0.02), (1.0, 1.0))),
    ],
)
def test_draw_region_matches_the_draws_of_torchvision(shape: tuple[int, int], limits: Any) -> None:
    for seed in range(100):
        shaped = torch.empty(()).expand(3, *shape)
        expected, state = with_seed(seed, lambda: v1.RandomResizedCrop.get_params(shaped, *map(list, limits)))  # noqa: B023
        found, state_after = with_seed(seed, lambda: draw_region(*shape, *limits))
        assert found == expected
        assert torch.equal(state, state_after)


def test_training_decodes_only_the_cropped_region() -> None:
    decoder = RegionByCutting()
    TrainRecipe(size=64)(encoded(decoder))
    UserTransform(v1.Compose([v1.RandomResizedCrop(64), v1.ToTensor()]))(encoded(decoder))
    assert len(decoder.asked) == 2
    assert "whole" not in decoder.asked


# --- the user's transforms --------------------------------------------------------------------------------------------

GIVEN: dict[str, tuple[Any, str]] = {
    "v1 on PIL": (v1.Compose([v1.RandomResizedCrop(48), v1.RandomHorizontalFlip(), v1.ToTensor()]), "pil"),
    "v1 without a crop": (v1.Compose([v1.Resize((40, 50)), v1.ToTensor(), v1.Normalize([0.5] * 3, [0.2] * 3)]), "pil"),
    "v1 on tensors": (v1.Compose([v1.RandomResizedCrop(48), v1.RandomHorizontalFlip()]), "tensor"),
    "v2 on PIL": (v2.Compose([v2.RandomResizedCrop(48), v2.PILToTensor()]), "pil"),
    "v2 on tensors": (
        v2.Compose(
            [
                v2.RandomResizedCrop(48, scale=(0.5, 1), antialias=True),
                v2.ColorJitter(0.2),
                v2.ToDtype(torch.float32, scale=True),
            ]
        ),
        "tensor",
    ),
    "v2 in random parts": (v2.Compose([v2.RandomApply([v2.GaussianBlur(3)]), v2.Resize((48, 48))]), "tensor"),
    "Sequential": (torch.nn.Sequential(v2.CenterCrop(48), v2.RandomHorizontalFlip()), "tensor"),
    "Lambda inside": (v1.Compose([v1.Resize((40, 50)), v1.Lambda(lambda image: np.array(image))]), "pil"),
    "a function": (lambda image: torch.tensor(np.array(image.resize((10, 12)))), "pil"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_user_transform_gives_the_same_result_through_our_recipe(name: str) -> None:
    transform, kind = GIVEN[name]
    recipe = UserTransform(transform)
    assert recipe.takes_pil == (kind == "pil")
    given = PIL if kind == "pil" else torch.from_numpy(np.array(PIL)).permute(2, 0, 1)
    for seed, make in enumerate(IMAGES.values()):
        expected, state = with_seed(seed, lambda: transform(given))
        found, state_after = with_seed(seed, lambda: recipe(make()))  # noqa: B023
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))
        assert torch.equal(state, state_after)


def test_user_transform_refuses_non_callables_and_unknown_kinds() -> None:
    with pytest.raises(SettingsError, match="transform=3 cannot be called"):
        UserTransform(3)  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="kind='numpy'"):
        UserTransform(lambda image: image, "numpy")  # type: ignore[arg-type]
