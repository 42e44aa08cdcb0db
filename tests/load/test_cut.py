"""A cut is drawn before the picture is decoded, and is what the recipe takes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_samples import photo
from torchvision.transforms import v2

from lightning_feed.decode.decoders import Pixels, Region
from lightning_feed.load.cut import Cut, cut_out
from lightning_feed.load.image_recipe import EvalRecipe, TrainRecipe, _logarithms
from lightning_feed.load.picture import DecodedPicture

PIXELS = np.array(photo())
CUT = Cut(region=Region(10, 20, 40, 50), resized=(24, 30), window=Region(2, 3, 16, 20), flipped=False)


class Asked(DecodedPicture):
    """Notes what is asked of it."""

    def region(self, region: Region, *, cover: tuple[int, int] | None = None) -> Pixels:
        seen.append((region, cover))
        return super().region(region, cover=cover)


seen: list[Any] = []


def test_a_cut_is_the_box_resized_and_the_window_of_that() -> None:
    box = torch.from_numpy(PIXELS).permute(2, 0, 1)[:, 10:50, 20:70]
    resized = v2.functional.resize(box, [24, 30], antialias=True)
    found = cut_out(DecodedPicture(PIXELS), CUT, "exact")
    assert found.dtype == torch.uint8
    # Torch 2.6 resizes planes and channels last within a grey level of each other.
    assert (found.int() - resized[:, 2:18, 3:23].int()).abs().max() <= 1
    assert found.stride(0) == 1  # channels last
    flipped = Cut(region=CUT.region, resized=CUT.resized, window=CUT.window, flipped=True)
    assert torch.equal(cut_out(DecodedPicture(PIXELS), flipped, "exact"), found.flip(-1))


@pytest.mark.parametrize(("quality", "cover"), [("exact", None), ("near", (48, 60)), ("fast", (24, 30))])
def test_the_quality_says_how_small_the_picture_may_be_decoded(quality: Any, cover: Any) -> None:
    seen.clear()
    cut_out(Asked(PIXELS), CUT, quality)
    assert seen == [(CUT.region, cover)]


@given(seed=st.integers(0, 1000), height=st.integers(40, 90), width=st.integers(40, 90))
def test_the_recipe_is_its_cut(seed: int, height: int, width: int) -> None:
    picture = DecodedPicture(np.array(photo(height, width)))
    for recipe in (TrainRecipe(size=16), EvalRecipe(size=16, short_side=19)):
        torch.manual_seed(seed)
        expected = recipe(picture)
        torch.manual_seed(seed)
        assert torch.equal(cut_out(picture, recipe.cut(height, width), "exact"), expected)


@given(height=st.integers(1, 300), width=st.integers(1, 300), size=st.integers(1, 40))
def test_the_middle_is_that_of_torchvision(height: int, width: int, size: int) -> None:
    cut = EvalRecipe(size=size, short_side=size + 7).cut(height, width)
    resized = v2.functional.resize(torch.empty((1, height, width), device="meta"), [size + 7], antialias=True)
    assert cut.resized == tuple(resized.shape[1:])
    places = torch.arange(resized.shape[1] * resized.shape[2]).view(resized.shape)
    top, left, rows, columns = cut.window
    kept = places[:, top : top + rows, left : left + columns]
    assert torch.equal(kept, v2.functional.center_crop(places, [size, size]))


def test_a_generator_of_ones_own_is_drawn_from_alone() -> None:
    recipe = TrainRecipe(size=16)
    before = torch.get_rng_state()
    found = [recipe.cut(60, 80, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1]
    torch.manual_seed(3)
    assert recipe.cut(60, 80) == found[0]
    generator = torch.Generator().manual_seed(3)
    assert len({recipe.cut(60, 80, generator).region for _ in range(4)}) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_boxes_do_not_depend_on_the_default_type(dtype: torch.dtype) -> None:
    """precision="bf16-true" and "64-true" change it while a step runs, beside threads that draw."""
    _logarithms.cache_clear()
    expected = [_drawn(seed) for seed in range(20)]
    _logarithms.cache_clear()
    torch.set_default_dtype(dtype)
    try:
        assert [_drawn(seed) for seed in range(20)] == expected
    finally:
        torch.set_default_dtype(torch.float32)


def _drawn(seed: int) -> Cut:
    torch.manual_seed(seed)
    return TrainRecipe(size=32).cut(375, 500)
