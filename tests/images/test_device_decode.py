"""The road of a batch on a device, with the CPU as the device: all of it but nvJPEG itself."""

import json
import logging
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from images.made_images import BROKEN, WHOLE, encoded
from made_samples import batch_of, dataset, jpegs, noise, obvious, photo, torn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_feed.errors import DecodeError, LoaderError
from lightning_feed.images import nvjpeg as device_decode
from lightning_feed.images.choose import psnr_db
from lightning_feed.images.crop import QUALITIES, CropSpec, EvalRecipe, TrainRecipe
from lightning_feed.images.decoders import Region
from lightning_feed.images.image_dataset import decode_on_cpu
from lightning_feed.images.nvjpeg import crop_on_device, decode_batch
from lightning_feed.load.collate import BadSamples

TRAIN = TrainRecipe(size=32)
EVAL = EvalRecipe(size=32, short_side=37)
BAD_INSIDE = torn(jpegs(9)[8])
"""Only decoding finds out."""


class Decoder:
    """Decodes many at once, as nvJPEG does: if one cannot be decoded, it fails for all, and does not say which."""

    def __init__(self, refused: bytes | None = None) -> None:
        self.refused = refused
        self.status = 3
        self.calls: list[int] = []

    def __call__(self, files: list[Tensor]) -> list[Tensor]:
        self.calls.append(len(files))
        if any(bytes(file.numpy()) == self.refused for file in files):
            raise RuntimeError(f"Failed to decode batch: {self.status}")
        return [torch.ops.image.decode_jpeg(file, 3, False) for file in files]


def assert_same(found: Any, expected: Any) -> None:
    """Torch 2.6 resizes planes and channels last within a grey level of each other, and 2.15 to the bit."""
    assert len(found) == len(expected) == 2
    assert (found[0].int() - expected[0].int()).abs().max() <= 1
    assert torch.equal(found[1], expected[1])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


def broken_batch(on_error: str, files: list[bytes]) -> Any:
    made = dataset(files, EVAL, on_error=on_error, decoder="pillow")
    return batch_of(made), made


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [TRAIN, EVAL, TrainRecipe(size=32, quality="near")], ids=["train", "eval", "near"])
def test_device_batches_equal_those_of_the_cpu_with_the_same_decoder(recipe: Any) -> None:
    """With one decoder for both: box, resize, window, flip, order, strides and labels."""
    made = dataset(jpegs(12), recipe)
    batch = batch_of(made)
    decode = Decoder()
    assert_same(decode_batch(batch, made, decode), decode_on_cpu(batch, made))
    assert decode.calls == [12]
    assert made.cpu_fallback.as_dict() == {}


@pytest.mark.parametrize(("height", "bound"), [(60, 45), (170, 20), (600, 20)])
def test_fast_quality_is_as_close_to_exact_as_on_the_cpu(height: int, bound: float) -> None:
    pytest.importorskip("cv2", reason="the CPU's fast resize")
    files = [encoded(photo(height, height * 4 // 3, shift), quality=95) for shift in range(6)]
    fast = dataset(files, TrainRecipe(size=48, quality="fast"), decoder="turbo-region")
    exact = dataset(files, TrainRecipe(size=48), decoder="turbo-region")
    batch = batch_of(fast)
    ours, theirs, true = (
        made[0].numpy()
        for made in (decode_batch(batch, fast, Decoder()), decode_on_cpu(batch, fast), decode_on_cpu(batch, exact))
    )
    assert psnr_db(ours, true) > psnr_db(theirs, true) - 0.5
    assert psnr_db(ours, theirs) > bound  # the same pixels where nothing shrinks to less than half


# --- the resize: many boxes at once, against torchvision's of each ----------------------------------------------------


def crop_image(wholes: dict[int, Tensor], crops: dict[int, CropSpec], quality: Any, size: tuple[int, int]) -> Tensor:
    """int, shape (B, 3, height, width)."""
    pixels = torch.empty((len(crops), *size, 3), dtype=torch.uint8)
    crop_on_device(wholes, crops, quality, pixels)
    return pixels.permute(0, 3, 1, 2).int()


@st.composite
def cuts_of_any_kind(draw: st.DrawFn, size: tuple[int, int]) -> tuple[tuple[int, int], CropSpec]:
    """(height, width) of an image, and a cut whose window has ``size``."""
    side = st.one_of(st.integers(1, 8), st.integers(1, 400))
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


@settings(deadline=None, max_examples=100)
@given(data=st.data(), quality=st.sampled_from(QUALITIES), size=st.tuples(st.integers(1, 32), st.integers(1, 32)))
def test_crop_image_is_within_a_grey_level_of_torchvision(data: st.DataObject, quality: Any, size: Any) -> None:
    drawn = data.draw(st.lists(cuts_of_any_kind(size), min_size=1, max_size=4))
    torch.manual_seed(0)
    wholes = {place: noise(*whole) for place, (whole, _) in enumerate(drawn)}
    found = crop_image(wholes, {place: cut for place, (_, cut) in enumerate(drawn)}, quality, size)
    for place, (_, cut) in enumerate(drawn):
        shrink = max(cut.region.height / cut.resized[0], cut.region.width / cut.resized[1])
        antialias = quality != "fast" or shrink > 2
        assert (found[place] - obvious(wholes[place], cut, antialias=antialias).int()).abs().max() <= 1
        exact = obvious(wholes[place], cut, antialias=antialias, exact=True)
        assert (found[place] - exact).abs().max() < 1 / 2 + 1 / 3  # of rounding, and of float16


@pytest.mark.parametrize("resized", [(50, 50), (50, 49), (49, 50)])
@pytest.mark.parametrize("quality", QUALITIES)
def test_fast_quality_skips_antialiasing_down_to_half_size(quality: Any, resized: tuple[int, int]) -> None:
    torch.manual_seed(0)
    whole = noise(100, 100)
    cut = CropSpec(region=Region(0, 0, 100, 100), resized=resized, window=Region(0, 0, 16, 16), flipped=False)
    found = crop_image({0: whole}, {0: cut}, quality, (16, 16))[0]
    far = {way: int((found - obvious(whole, cut, antialias=way).int()).abs().max()) for way in (True, False)}
    antialias = quality != "fast" or resized != (50, 50)
    assert far[antialias] <= 1
    assert far[not antialias] > 20


def test_white_images_stay_white_when_resized() -> None:
    """The sums of rounded weights are not 1 to the bit, and 256 would be black."""
    white = torch.full((3, 97, 61), 255, dtype=torch.uint8)
    crops = {
        place: CropSpec(region=Region(0, 0, 97, 61), resized=(side, side), window=Region(0, 0, 16, 16), flipped=False)
        for place, side in enumerate((16, 37, 61, 224))
    }
    assert (crop_image(dict.fromkeys(crops, white), crops, "exact", (16, 16)) == 255).all()


def test_autocast_does_not_change_resized_pixels() -> None:
    torch.manual_seed(0)
    cut = CropSpec(region=Region(0, 0, 90, 70), resized=(32, 32), window=Region(0, 0, 32, 32), flipped=False)
    whole = noise(90, 70)
    plain = crop_image({0: whole}, {0: cut}, "exact", (32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(crop_image({0: whole}, {0: cut}, "exact", (32, 32)), plain)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_crop_image_adds_few_torch_operations_for_each_image() -> None:
    """All else is done for many at once, and nothing waits for the device."""

    def asked(count: int) -> Counter[str]:
        generator = torch.Generator().manual_seed(0)
        crops = {place: TRAIN.spec(60, 80, generator) for place in range(count)}
        with Operations() as operations:
            crop_image(dict.fromkeys(crops, torch.zeros((3, 60, 80), dtype=torch.uint8)), crops, "exact", (32, 32))
        return operations.names

    one = asked(1)
    many = asked(101)
    assert one.total() < 90
    assert many.total() - one.total() == 3 * 100
    assert "aten._local_scalar_dense.default" not in many


def test_boxes_of_any_shape_are_resized_in_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where one is high and another is wide."""
    shapes = [(2000, 3), (3, 2000), (60, 80), (1, 1), (600, 400)] * 6
    window = Region(0, 0, 16, 16)
    crops = {
        place: CropSpec(region=Region(0, 0, *shape), resized=(16, 16), window=window, flipped=False)
        for place, shape in enumerate(shapes)
    }
    monkeypatch.setattr(device_decode, "MOST_BYTES", most := 2**22)
    groups = list(device_decode._groups(crops, 16, 16))
    assert sorted(place for group, _, _ in groups for place in group) == list(crops)
    for group, high, wide in groups:
        assert all(crops[place].region.height <= high and crops[place].region.width <= wide for place in group)
        boxes = 6 * high * wide
        weights = 6 * 16 * (high + wide)
        assert len(group) * (boxes + weights) <= most
    assert len(groups) < len(crops) / 2
    wholes = {place: noise(*shape) for place, shape in enumerate(shapes)}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        crop_image(wholes, crops, "exact", (16, 16))
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    held = [*accumulate(event["args"]["Bytes"] for event in events if event["name"] == "[memory]")]
    assert most / 2 < max(held) < most


def test_large_images_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(jpegs(7))
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)
    sizes = [3 * height * width for _, (height, width), *_ in batch.images()]
    for most, calls in ((sum(sizes), [7]), (sum(sizes[:3]), [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr(device_decode, "MOST_BYTES", most)
        decode = Decoder()
        assert_same(decode_batch(batch, made, decode), expected)
        assert decode.calls == calls


# --- what is left to the CPU ------------------------------------------------------------------------------------------


def test_unsupported_images_are_decoded_on_the_cpu_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    others = ["palette PNG", "WebP", "CMYK", "RGB inside", "RGBA PNG", "bytes after the end", "16 bit PNG", "GIF"]
    files = [file for name, jpeg in zip(others, jpegs(8), strict=True) for file in (WHOLE[name], jpeg)]
    made = dataset(files, decoder="torchvision")
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)
    decode = Decoder()
    with caplog.at_level(logging.WARNING, "lightning_feed"):
        caplog.clear()
        assert_same(decode_batch(batch, made, decode), expected)
        assert_same(decode_batch(batch, made, decode), expected)
    assert decode.calls == [8, 8]
    counts = made.cpu_fallback.as_dict()
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 6]
    assert counts["nvJPEG decodes only JPEG, and the image is of the kind PNG"] == 6
    said = [record.getMessage() for record in caplog.records if "in the training process" in record.getMessage()]
    assert len(said) == len(counts)
    assert (
        "photos/0.jpg, and others like it, in the training process: nvJPEG decodes only JPEG, and the image" in said[0]
    )
    assert 'backend="torch" is faster' in said[0]


def test_an_image_above_the_pixel_limit_never_reaches_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(jpegs(2), EVAL, on_error="skip", decoder="pillow")
    batch = batch_of(made)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 60 * 80 // 2 - 1)  # the first has 60 x 80, the other fewer
    decode = Decoder()
    labels = decode_batch(batch, made, decode)[1]
    assert decode.calls == [1]
    assert labels.tolist() == [10, 10]
    assert made.cpu_fallback.as_dict() == {"the image is too large, or its header is broken": 1}


# --- images that the device fails on ----------------------------------------------------------------------------------


def test_an_image_that_the_device_fails_on_is_not_sent_there_again(caplog: pytest.LogCaptureFixture) -> None:
    files = jpegs(5)
    made = dataset(files)
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)
    decode = Decoder(refused=files[3])
    assert_same(decode_batch(batch, made, decode), expected)
    assert decode.calls == [5, 1, 1, 1, 1, 1]
    decode.calls.clear()
    assert "photos/3.jpg" in caplog.text
    caplog.clear()
    assert_same(decode_batch(batch, made, decode), expected)
    assert decode.calls == [4]
    assert made.cpu_fallback.as_dict() == {"nvJPEG failed on the JPEG": 2}
    assert caplog.text == ""


def test_a_corrupt_image_is_named() -> None:
    batch, made = broken_batch("raise", [*jpegs(2), BAD_INSIDE, jpegs(3)[2]])
    with pytest.raises(DecodeError, match=r"photos/2\.jpg \(sample 2\): "):
        decode_batch(batch, made, Decoder(refused=BAD_INSIDE))


@pytest.mark.parametrize("broken", [BAD_INSIDE, BROKEN["JPEG cut in the middle"]], ids=["inside", "cut"])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_corrupt_image_is_handled_by_on_error(on_error: str, broken: bytes) -> None:
    good = jpegs(4)
    batch, made = broken_batch(on_error, [good[0], broken, good[1], broken, good[2], good[3]])
    expected = decode_on_cpu(batch, made)
    failures = made.bad_samples.failures
    made.bad_samples = BadSamples(made.bad_samples.on_error, made.bad_samples.max_failures)
    images, labels = decode_batch(batch, made, Decoder(refused=BAD_INSIDE))
    assert torch.equal(labels, expected[1])
    assert labels.tolist()[::2] == [0, 20, 40]
    assert labels.dtype == torch.int64
    assert psnr_db(images.numpy(), expected[0].numpy()) > 45  # Pillow and torchvision's libjpeg
    assert made.bad_samples.failures == failures >= 2
    if on_error == "skip":
        assert labels.tolist() == [0, 0, 20, 20, 40, 50]
        assert torch.equal(images[1], images[0])
        assert torch.equal(images[3], images[2])


def test_an_image_whose_size_differs_from_its_header_is_left_to_the_cpu() -> None:
    made = dataset(jpegs(3))
    batch = batch_of(made)

    def turning(files: list[Tensor]) -> list[Tensor]:
        first, *others = Decoder()(files)
        return [first.transpose(1, 2), *others]

    assert_same(decode_batch(batch, made, turning), decode_on_cpu(batch, made))
    assert made.cpu_fallback.as_dict() == {"nvJPEG failed on the JPEG": 1}


# --- errors of the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2 GiB"),
        RuntimeError("Error while decoding JPEG images: CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
    ids=["memory", "memory, by torchvision", "device"],
)
def test_device_errors_are_raised_and_not_blamed_on_images(error: Exception) -> None:
    made = dataset(jpegs(3))
    calls: list[int] = []

    def failing(files: list[Tensor]) -> list[Tensor]:
        calls.append(len(files))
        raise error

    with pytest.raises(RuntimeError) as caught:
        decode_batch(batch_of(made), made, failing)
    assert caught.value is error
    assert calls == [3]


def test_nvjpeg_memory_errors_are_raised_as_out_of_memory_errors() -> None:
    """It allocates beside torch, and torchvision passes on the bare status: NVJPEG_STATUS_ALLOCATOR_FAILURE is 5."""
    made = dataset(jpegs(3))

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Error while decoding JPEG images: Failed to decode jpeg stream: 5")

    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory: nvJPEG.*3 JPEGs.*: 5\).*batch_size"):
        decode_batch(batch_of(made), made, failing)
    assert made.cpu_fallback.known == {}


@pytest.mark.parametrize("status", [3, 15, 51])
def test_other_nvjpeg_errors_are_blamed_on_the_file(status: int) -> None:
    files = jpegs(3)
    made = dataset(files)
    decode = Decoder(refused=files[1])
    decode.status = status
    decode_batch(batch_of(made), made, decode)
    assert list(made.cpu_fallback.known) == [1]


def test_a_device_that_decodes_no_image_raises_a_loader_error() -> None:
    made = dataset(jpegs(3))

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Failed to initialize batch decoding: 7")

    with pytest.raises(LoaderError, match=r"none of the first 3 JPEGs.*batch decoding: 7.*backend=\"torch\""):
        decode_batch(batch_of(made), made, failing)
