"""The road of a batch on a device, with the CPU as the device: all of it but nvJPEG itself."""

import logging
from typing import Any

import pytest
import torch
from decode.made_images import BROKEN, WHOLE, encoded
from made_samples import batch_of, dataset, jpegs, photo, torn
from torch import Tensor

from lightning_feed.decode.decoder import Region
from lightning_feed.decode.fidelity import psnr_db
from lightning_feed.errors import DatasetError, DecodeError, LoaderError
from lightning_feed.load.cut import Cut
from lightning_feed.load.encoded_batch import decode_on_cpu
from lightning_feed.load.image_recipe import EvalRecipe, TrainRecipe
from lightning_feed.transfer import device_decode
from lightning_feed.transfer.device_decode import decode_batch

TRAIN, EVAL = TrainRecipe(size=32), EvalRecipe(size=32, short_side=37)
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
def test_the_batch_is_that_of_the_cpu(recipe: Any) -> None:
    """With one decoder for both: box, resize, window, flip, order, strides and labels."""
    made = dataset(jpegs(12), recipe)
    batch = batch_of(made)
    decode = Decoder()
    assert_same(decode_batch(batch, made, decode), decode_on_cpu(batch, made))
    assert decode.calls == [12]
    assert made.left_to_cpu.as_dict() == {}


@pytest.mark.parametrize(("height", "bound"), [(60, 45), (170, 20), (600, 20)])
def test_fast_pixels_are_no_further_from_exact_ones_than_on_the_cpu(height: int, bound: float) -> None:
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


def test_fast_leaves_the_antialiasing_out_down_to_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    resize = device_decode.resize_image

    def noting(image: Tensor, size: list[int], *, antialias: bool) -> Tensor:
        asked.append(antialias)
        return resize(image, size, antialias=antialias)

    monkeypatch.setattr(device_decode, "resize_image", noting)
    pixels = torch.zeros((3, 100, 100), dtype=torch.uint8)
    whole = Region(0, 0, 16, 16)
    for quality in ("exact", "near", "fast"):
        for resized in ((50, 50), (50, 49), (49, 50)):
            cut = Cut(region=Region(0, 0, 100, 100), resized=resized, window=whole, flipped=False)
            device_decode.cut_out_on_device(pixels, cut, quality)  # type: ignore[arg-type]
    assert asked == [True] * 3 + [True] * 3 + [False, True, True]


def test_on_the_cpu_it_is_the_batch_of_torch_itself() -> None:
    made = dataset([*jpegs(3), WHOLE["CMYK"]], decoder="pillow")
    batch = batch_of(made)
    assert_same(decode_batch(batch, made), decode_on_cpu(batch, made))
    assert made.left_to_cpu.as_dict() == {}


def test_floats_are_rounded_as_torchvision_rounds_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device has no resize of uint8: torchvision goes by float32 there, which is within a grey level."""
    made = dataset(jpegs(8))
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)[0]
    monkeypatch.setattr(
        "torchvision.transforms.v2.functional._geometry._do_native_uint8_resize_on_cpu", lambda interpolation: False
    )
    found = decode_batch(batch, made, Decoder())[0]
    assert 0 < (found.int() - expected.int()).abs().max() <= 1
    assert psnr_db(found.numpy(), expected.numpy()) > 50


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


def test_other_images_are_decoded_by_the_cpu_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
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
    counts = made.left_to_cpu.as_dict()
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 6]
    assert counts["nvJPEG decodes JPEG, and the image is of the kind PNG"] == 6
    said = [record.getMessage() for record in caplog.records if "in the training process" in record.getMessage()]
    assert len(said) == len(counts)
    assert "photos/0.jpg, and others like it, in the training process: nvJPEG decodes JPEG, and the image" in said[0]
    assert 'backend="torch" is faster' in said[0]


def test_a_batch_without_a_jpeg_never_calls_the_device() -> None:
    made = dataset([WHOLE["RGB PNG"], WHOLE["WebP"]])
    batch = batch_of(made)
    decode = Decoder()
    assert_same(decode_batch(batch, made, decode), decode_on_cpu(batch, made))
    assert decode.calls == []


def test_what_would_shrink_beyond_the_devices_kernel_is_left_to_the_cpu() -> None:
    files = [encoded(photo(1300, 1300)), encoded(photo(600, 600))]
    made = dataset(files, EvalRecipe(size=16, short_side=18))
    batch = batch_of(made)
    decode = Decoder()
    assert_same(decode_batch(batch, made, decode), decode_on_cpu(batch, made))
    assert decode.calls == [1]
    assert made.left_to_cpu.as_dict() == {"the image is to shrink to less than 1/64": 1}


def test_a_header_that_asks_for_all_memory_never_reaches_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(jpegs(2), EVAL, on_error="skip", decoder="pillow")
    batch = batch_of(made)
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 60 * 80 // 2 - 1)  # the first has 60 x 80, the other fewer
    decode = Decoder()
    labels = decode_batch(batch, made, decode)[1]
    assert decode.calls == [1]
    assert labels.tolist() == [10, 10]
    assert made.left_to_cpu.as_dict() == {"the image is too large, or its header is broken": 1}


# --- images that the device fails on ----------------------------------------------------------------------------------


def test_an_image_that_only_the_device_fails_on_is_found_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
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
    assert made.left_to_cpu.as_dict() == {"nvJPEG failed on the JPEG": 2}
    assert caplog.text == ""


def test_a_corrupt_image_is_named() -> None:
    batch, made = broken_batch("raise", [*jpegs(2), BAD_INSIDE, jpegs(3)[2]])
    with pytest.raises(DecodeError, match=r"photos/2\.jpg \(sample 2\): "):
        decode_batch(batch, made, Decoder(refused=BAD_INSIDE))


def test_of_several_corrupt_images_the_first_is_named() -> None:
    batch, made = broken_batch("raise", [BAD_INSIDE, BROKEN["JPEG cut in the middle"], *jpegs(1)])
    with pytest.raises(DecodeError, match=r"photos/0\.jpg"):
        decode_batch(batch, made, Decoder(refused=BAD_INSIDE))


@pytest.mark.parametrize("broken", [BAD_INSIDE, BROKEN["JPEG cut in the middle"]], ids=["inside", "cut"])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_corrupt_image_is_dealt_with_as_on_error_says(on_error: str, broken: bytes) -> None:
    good = jpegs(4)
    batch, made = broken_batch(on_error, [good[0], broken, good[1], broken, good[2], good[3]])
    expected = decode_on_cpu(batch, made)
    failures = made.bad_samples.failures
    made.bad_samples._slots.zero_()
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


def test_a_batch_of_corrupt_images_alone_cannot_be_filled() -> None:
    cut = BROKEN["JPEG cut in the middle"]
    batch, made = broken_batch("skip", [cut, cut])
    with pytest.raises(DatasetError, match="No sample of a batch of 2 could be read"):
        decode_batch(batch, made, Decoder())


def test_a_picture_of_another_size_than_its_header_says_is_left_to_the_cpu() -> None:
    made = dataset(jpegs(3))
    batch = batch_of(made)

    def turning(files: list[Tensor]) -> list[Tensor]:
        first, *others = Decoder()(files)
        return [first.transpose(1, 2), *others]

    assert_same(decode_batch(batch, made, turning), decode_on_cpu(batch, made))
    assert made.left_to_cpu.as_dict() == {"nvJPEG failed on the JPEG": 1}


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
def test_an_error_of_the_device_is_no_fault_of_the_images(error: Exception) -> None:
    made = dataset(jpegs(3))
    calls: list[int] = []

    def failing(files: list[Tensor]) -> list[Tensor]:
        calls.append(len(files))
        raise error

    with pytest.raises(RuntimeError) as caught:
        decode_batch(batch_of(made), made, failing)
    assert caught.value is error
    assert calls == [3]


def test_a_lack_of_memory_in_nvjpeg_is_no_fault_of_the_images() -> None:
    """It allocates beside torch, and torchvision passes on the bare status: NVJPEG_STATUS_ALLOCATOR_FAILURE is 5."""
    made = dataset(jpegs(3))

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Error while decoding JPEG images: Failed to decode jpeg stream: 5")

    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory: nvJPEG.*3 JPEGs.*: 5\).*batch_size"):
        decode_batch(batch_of(made), made, failing)
    assert made.left_to_cpu.known == {}


@pytest.mark.parametrize("status", [3, 15, 51])
def test_another_status_is_the_files(status: int) -> None:
    files = jpegs(3)
    made, decode = dataset(files), Decoder(refused=files[1])
    decode.status = status
    decode_batch(batch_of(made), made, decode)
    assert list(made.left_to_cpu.known) == [1]


def test_a_device_that_decodes_nothing_is_an_error_not_a_slow_run() -> None:
    made = dataset(jpegs(3))

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Failed to initialize batch decoding: 7")

    with pytest.raises(LoaderError, match=r"none of the first 3 JPEGs.*batch decoding: 7.*backend=\"torch\""):
        decode_batch(batch_of(made), made, failing)
