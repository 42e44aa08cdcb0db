"""Crops of images of different sizes in one batch: by torch, and by the kernel, against torchvision's of each."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cells import in_gate
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import noise, obvious
from torch import Tensor

from lightning_feed.images import ragged_crop
from lightning_feed.images.crop import QUALITIES, CropSpec
from lightning_feed.images.decoders import Region
from lightning_feed.images.ragged_crop import crop_ragged, normalization_of

Crop = Callable[..., None]
KERNEL = "lightning_feed.images.ragged_kernel"


def by_kernel(
    images: list[Tensor], plan: Tensor, quality: Any, out: Tensor, positions: list[int], normalization: Any = None
) -> None:
    with np.errstate(invalid="ignore"):  # beside the image, in a block at its edge, the weights are 0
        ragged_crop._crop_by_kernel(images, plan.numpy().astype(np.float64), quality, out, positions, normalization)


@pytest.fixture(scope="module", params=["torch", "kernel"])
def crop(request: pytest.FixtureRequest) -> Iterator[Crop]:
    """Both ways; the kernel is interpreted, which Triton decides when the module is imported."""
    if request.param == "torch":
        yield crop_ragged
        return
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, KERNEL, raising=False)
        patch.setattr("lightning_feed.images.ragged_kernel", importlib.import_module(KERNEL), raising=False)
        yield by_kernel
        sys.modules.pop(KERNEL, None)


def row_of(size: tuple[int, int], cut: CropSpec) -> list[int]:
    return [*size, *cut.region, *cut.resized, *cut.window, int(cut.flipped), 0, 0]


def cropped(crop: Crop, wholes: list[Tensor], cuts: list[CropSpec], quality: Any = "exact") -> Tensor:
    """int, shape (B, 3, height, width)."""
    _, _, height, width = cuts[0].window
    out = torch.zeros((len(cuts), height, width, 3), dtype=torch.uint8)
    plan = torch.tensor(
        [row_of((whole.shape[1], whole.shape[2]), cut) for whole, cut in zip(wholes, cuts, strict=True)]
    )
    crop(wholes, plan, quality, out, list(range(len(cuts))))
    return out.permute(0, 3, 1, 2).int()


@st.composite
def cuts_of_any_kind(draw: st.DrawFn, size: tuple[int, int]) -> tuple[tuple[int, int], CropSpec]:
    """(height, width) of an image, and a cut whose window has ``size``."""
    side = st.one_of(st.integers(1, 8), st.integers(1, 150))
    whole = []
    region = []
    resized = []
    window = []
    for kept in size:
        whole.append(draw(side))
        region.append(draw(st.integers(1, whole[-1])))
        # At least 2: to one column, torch's own kernels for the CPU fail or are wrong (seen in 2.15).
        resized.append(max(2, kept + draw(st.integers(0, 40))))
        window.append(draw(st.integers(0, resized[-1] - kept)))
    corner = (draw(st.integers(0, outer - inner)) for outer, inner in zip(whole, region, strict=True))
    return (whole[0], whole[1]), CropSpec(
        region=Region(*corner, *region),
        resized=(resized[0], resized[1]),
        window=Region(*window, *size),
        flipped=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=12)
@given(data=st.data(), quality=st.sampled_from(QUALITIES), size=st.tuples(st.integers(1, 24), st.integers(1, 24)))
def test_crops_are_within_a_grey_level_of_torchvision(crop: Crop, data: st.DataObject, quality: Any, size: Any) -> None:
    drawn = data.draw(st.lists(cuts_of_any_kind(size), min_size=1, max_size=3))
    torch.manual_seed(0)
    wholes = [noise(*whole) for whole, _ in drawn]
    found = cropped(crop, wholes, [cut for _, cut in drawn], quality)
    for made, whole, (_, cut) in zip(found, wholes, drawn, strict=True):
        shrink = max(cut.region.height / cut.resized[0], cut.region.width / cut.resized[1])
        antialias = quality != "fast" or shrink > 2
        assert (made - obvious(whole, cut, antialias=antialias).int()).abs().max() <= 1
        exact = obvious(whole, cut, antialias=antialias, exact=True)
        assert (made - exact).abs().max() < 1 / 2 + 1 / 100  # of rounding, and of float32


@pytest.mark.parametrize("resized", [(50, 50), pytest.param((50, 49), marks=pytest.mark.nightly), (49, 50)])
@pytest.mark.parametrize("quality", QUALITIES)
def test_fast_quality_skips_antialiasing_down_to_half_size(crop: Crop, quality: Any, resized: tuple[int, int]) -> None:
    torch.manual_seed(0)
    whole = noise(100, 100)
    cut = CropSpec(region=Region(0, 0, 100, 100), resized=resized, window=Region(0, 0, 16, 16), flipped=False)
    found = cropped(crop, [whole], [cut], quality)[0]
    far = {way: int((found - obvious(whole, cut, antialias=way).int()).abs().max()) for way in (True, False)}
    antialias = quality != "fast" or resized != (50, 50)
    assert far[antialias] <= 1
    assert far[not antialias] > 20


def test_white_images_stay_white(crop: Crop) -> None:
    """The sums of rounded weights are not 1 to the bit, and 256 would be black."""
    white = torch.full((3, 97, 61), 255, dtype=torch.uint8)
    whole = Region(0, 0, 97, 61)
    cuts = [
        CropSpec(region=whole, resized=(side, side), window=Region(0, 0, 16, 16), flipped=False)
        for side in (16, 37, 61, 224)
    ]
    assert (cropped(crop, [white] * len(cuts), cuts) == 255).all()


def test_large_images_that_shrink_a_lot_are_averaged(crop: Crop) -> None:
    torch.manual_seed(0)
    whole = noise(90, 60)
    cut = CropSpec(region=Region(0, 0, 90, 60), resized=(4, 4), window=Region(0, 0, 4, 4), flipped=True)
    assert (cropped(crop, [whole], [cut])[0] - obvious(whole, cut, antialias=True).int()).abs().max() <= 1


def test_crops_go_to_their_positions_and_leave_the_others(crop: Crop) -> None:
    torch.manual_seed(0)
    whole = noise(20, 20)
    cut = CropSpec(region=Region(0, 0, 20, 20), resized=(8, 8), window=Region(0, 0, 8, 8), flipped=False)
    out = torch.full((4, 8, 8, 3), 7, dtype=torch.uint8)
    crop([whole, whole], torch.tensor([row_of((20, 20), cut)] * 2), "exact", out, [3, 1])
    assert torch.equal(out[3], out[1])
    assert (out[[0, 2]] == 7).all()
    assert not (out[1] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normalized_crops_are_those_of_the_grey_levels(crop: Crop, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wholes = [noise(40, 30), noise(25, 60)]
    cuts = [
        CropSpec(region=Region(2, 3, 20, 22), resized=(16, 12), window=Region(1, 2, 13, 9), flipped=flipped)
        for flipped in (False, True)
    ]
    plan = torch.tensor([row_of((40, 30), cuts[0]), row_of((25, 60), cuts[1])])
    levels = torch.zeros((2, 13, 9, 3), dtype=torch.uint8)
    crop(wholes, plan, "exact", levels, [0, 1])
    normalization = normalization_of((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), dtype, torch.device("cpu"))
    values = torch.zeros((2, 13, 9, 3), dtype=dtype)
    crop(wholes, plan, "exact", values, [0, 1], normalization)
    means, stds = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
    torch.testing.assert_close(values.float(), (levels / 255 - means) / stds, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(values, normalization(levels))  # but for a fused multiplication and addition


def test_missing_triton_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ragged_crop.importlib.util, "find_spec", lambda _: None)
    ragged_crop.has_triton.cache_clear()
    assert not ragged_crop.has_triton()
    assert not ragged_crop.has_triton()
    ragged_crop.has_triton.cache_clear()
    assert caplog.text.count("pip install triton") == 1


@pytest.mark.parametrize("out", in_gate(["*u8", "*bf16", "*fp16", "*fp32"], ["*u8", "*bf16"]))
def test_the_kernel_compiles_for_a_gpu(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without one can tell: to machine code for compute capability 9.0."""
    pytest.importorskip("triton", minversion="3.3")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    kernel = importlib.import_module(KERNEL)
    kinds = {"images": "*i64", "boxes": "*i32", "filters": "*fp32", "scaling": "*fp32", "out": out}
    kinds |= {"height": "i32", "width": "i32"}
    constants = {"NORMALIZE": out != "*u8", "ROWS": kernel.ROWS, "COLUMNS": kernel.COLUMNS}
    source = ASTSource(kernel.crop_kernel, kinds | dict.fromkeys(constants, "constexpr"), constants)
    made = compile(source, target=GPUTarget("cuda", 90, 32))
    assert "ld.global" in made.asm["ptx"]
    assert made.asm["cubin"]
