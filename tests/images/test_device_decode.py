"""The road of a batch on a device, with the CPU as the device: all of it but nvJPEG itself."""

import logging
from typing import Any

import pytest
import torch
from images.made_images import BROKEN, WHOLE, encoded
from made_samples import batch_of, jpegs, nvjpeg_dataset, photo, torn
from torch import Tensor

from lightning_feed.errors import DecodeError, LoaderError
from lightning_feed.images import device_decode
from lightning_feed.images.choose import psnr_db
from lightning_feed.images.crop import EvalRecipe, TrainRecipe
from lightning_feed.images.device_decode import decode_batch, decode_on_cpu

CPU = torch.device("cpu")
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
    made = nvjpeg_dataset(files, EVAL, on_error=on_error, decoder="pillow")
    return batch_of(made), made


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [TRAIN, EVAL], ids=["train", "eval"])
def test_device_batches_equal_those_of_the_cpu_with_the_same_decoder(recipe: Any) -> None:
    """With one decoder for both: box, resize, window, flip, order, strides and labels."""
    made = nvjpeg_dataset(jpegs(12), recipe)
    batch = batch_of(made)
    decode = Decoder()
    assert_same(decode_batch(batch, made, CPU, decode=decode), decode_on_cpu(batch, made))
    assert decode.calls == [12]
    assert made.cpu_fallback.as_dict() == {}


@pytest.mark.parametrize(("height", "bound"), [(60, 45), (170, 20), (600, 20)])
def test_fast_quality_is_as_close_to_exact_as_on_the_cpu(height: int, bound: float) -> None:
    pytest.importorskip("cv2", reason="the CPU's fast resize")
    files = [encoded(photo(height, height * 4 // 3, shift), quality=95) for shift in range(6)]
    fast = nvjpeg_dataset(files, TrainRecipe(size=48, quality="fast"), decoder="turbo-region")
    exact = nvjpeg_dataset(files, TrainRecipe(size=48), decoder="turbo-region")
    batch = batch_of(fast)
    ours, theirs, true = (
        made[0].numpy()
        for made in (
            decode_batch(batch, fast, CPU, decode=Decoder()),
            decode_on_cpu(batch, fast),
            decode_on_cpu(batch, exact),
        )
    )
    assert psnr_db(ours, true) > psnr_db(theirs, true) - 0.5
    assert psnr_db(ours, theirs) > bound  # the same pixels where nothing shrinks to less than half


# --- parts ------------------------------------------------------------------------------------------------------------


def test_large_images_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvjpeg_dataset(jpegs(7))
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)
    sizes = [3 * height * width for _, (height, width), *_ in batch.images()]
    for most, calls in ((sum(sizes), [7]), (sum(sizes[:3]), [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setattr(device_decode, "MOST_BYTES", most)
        decode = Decoder()
        assert_same(decode_batch(batch, made, CPU, decode=decode), expected)
        assert decode.calls == calls


# --- what is left to the CPU ------------------------------------------------------------------------------------------


def test_unsupported_images_are_decoded_by_the_workers_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    others = ["palette PNG", "WebP", "CMYK", "RGB inside", "RGBA PNG", "bytes after the end", "16 bit PNG", "GIF"]
    files = [file for name, jpeg in zip(others, jpegs(8), strict=True) for file in (WHOLE[name], jpeg)]
    made = nvjpeg_dataset(files, decoder="torchvision")
    caplog.set_level(logging.INFO, "lightning_feed")
    batch = batch_of(made)
    assert batch.decoded.tolist() == list(range(0, 16, 2))
    assert batch.offsets.diff()[::2].tolist() == [0] * 8
    decode = Decoder()
    assert_same(decode_batch(batch, made, CPU, decode=decode), decode_on_cpu(batch, made))
    assert decode.calls == [8]
    batch_of(made)
    counts = made.cpu_part.refused.as_dict()
    assert sorted(counts.values()) == [2, 2, 2, 2, 2, 6]
    assert counts["nvJPEG decodes only JPEG, and the image is of the kind PNG"] == 6
    said = [record.getMessage() for record in caplog.records if "The workers decode" in record.getMessage()]
    assert len(said) == len(counts)
    assert "photos/0.jpg, and others like it: nvJPEG decodes only JPEG, and the image" in said[0]


def test_images_of_workers_equal_those_of_the_torch_backend() -> None:
    files = [WHOLE["CMYK"], *jpegs(3), WHOLE["palette PNG"]]
    images, labels = decode_batch(batch_of(nvjpeg_dataset(files)), nvjpeg_dataset(files), CPU, decode=Decoder())
    torch.manual_seed(0)
    plain = nvjpeg_dataset(files, encoded=False)
    expected = [plain[index] for index in range(len(files))]
    assert labels.tolist() == [label for _, label in expected]
    for position in (0, 4):
        assert torch.equal(images[position], expected[position][0])


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_above_the_pixel_limit_never_reaches_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nvjpeg_dataset(jpegs(2), EVAL, on_error="skip", decoder="pillow")
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", 60 * 80 // 2 - 1)  # the first has 60 x 80, the other fewer
    batch = batch_of(made)
    decode = Decoder()
    labels = decode_batch(batch, made, CPU, decode=decode)[1]
    assert decode.calls == [2]  # the other one twice: it replaces the first
    assert labels.tolist() == [10, 10]
    assert made.bad_samples.failures == 1


# --- images that the device fails on ----------------------------------------------------------------------------------


def test_an_image_that_the_device_fails_on_is_not_sent_there_again(caplog: pytest.LogCaptureFixture) -> None:
    files = jpegs(5)
    made = nvjpeg_dataset(files)
    batch = batch_of(made)
    expected = decode_on_cpu(batch, made)
    decode = Decoder(refused=files[3])
    assert_same(decode_batch(batch, made, CPU, decode=decode), expected)
    assert decode.calls == [5, 1, 1, 1, 1, 1]
    decode.calls.clear()
    assert "photos/3.jpg" in caplog.text
    caplog.clear()
    assert_same(decode_batch(batch, made, CPU, decode=decode), expected)
    assert decode.calls == [4]
    assert made.cpu_fallback.as_dict() == {"nvJPEG failed on the JPEG": 2}
    assert caplog.text == ""


def test_a_corrupt_image_is_named() -> None:
    batch, made = broken_batch("raise", [*jpegs(2), BAD_INSIDE, jpegs(3)[2]])
    with pytest.raises(DecodeError, match=r"photos/2\.jpg \(sample 2\): "):
        decode_batch(batch, made, CPU, decode=Decoder(refused=BAD_INSIDE))


@pytest.mark.parametrize("broken", [BAD_INSIDE, BROKEN["JPEG cut in the middle"]], ids=["inside", "cut"])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_a_corrupt_image_is_handled_by_on_error(on_error: str, broken: bytes) -> None:
    good = jpegs(4)
    batch, made = broken_batch(on_error, [good[0], broken, good[1], broken, good[2], good[3]])
    expected = decode_on_cpu(batch, made)
    images, labels = decode_batch(batch, made, CPU, decode=Decoder(refused=BAD_INSIDE))
    assert torch.equal(labels, expected[1])
    assert labels.tolist()[::2] == [0, 20, 40]
    assert labels.dtype == torch.int64
    assert psnr_db(images.numpy(), expected[0].numpy()) > 45  # Pillow and torchvision's libjpeg
    assert made.bad_samples.failures >= 2
    if on_error == "skip":
        assert labels.tolist() == [0, 0, 20, 20, 40, 50]
        assert torch.equal(images[1], images[0])
        assert torch.equal(images[3], images[2])


def test_an_image_whose_size_differs_from_its_header_is_left_to_the_cpu() -> None:
    made = nvjpeg_dataset(jpegs(3))
    batch = batch_of(made)

    def turning(files: list[Tensor]) -> list[Tensor]:
        first, *others = Decoder()(files)
        return [first.transpose(1, 2), *others]

    assert_same(decode_batch(batch, made, CPU, decode=turning), decode_on_cpu(batch, made))
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
    made = nvjpeg_dataset(jpegs(3))
    calls: list[int] = []

    def failing(files: list[Tensor]) -> list[Tensor]:
        calls.append(len(files))
        raise error

    with pytest.raises(RuntimeError) as caught:
        decode_batch(batch_of(made), made, CPU, decode=failing)
    assert caught.value is error
    assert calls == [3]


@pytest.mark.parametrize(
    "words",
    ["Error while decoding JPEG images: Failed to decode jpeg stream: 5", "nvjpegDecode failed: 5"],
    ids=["torchvision", "torchcodec"],
)
def test_nvjpeg_memory_errors_are_raised_as_out_of_memory_errors(words: str) -> None:
    """It allocates beside torch, and libraries pass on the bare status: NVJPEG_STATUS_ALLOCATOR_FAILURE is 5."""
    made = nvjpeg_dataset(jpegs(3))

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError(words)

    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory: nvJPEG.*3 JPEGs.*: 5\).*batch_size"):
        decode_batch(batch_of(made), made, CPU, decode=failing)
    assert made.cpu_fallback.known == {}


@pytest.mark.parametrize("status", [3, 15, 51])
def test_other_nvjpeg_errors_are_blamed_on_the_file(status: int) -> None:
    files = jpegs(3)
    made = nvjpeg_dataset(files)
    decode = Decoder(refused=files[1])
    decode.status = status
    decode_batch(batch_of(made), made, CPU, decode=decode)
    assert list(made.cpu_fallback.known) == [1]


@pytest.mark.parametrize("first", [0, 1], ids=["from the first batch on", "later"])
def test_a_device_that_decodes_nothing_any_more_raises_a_loader_error(first: int) -> None:
    """Else all images would be decoded in the training process."""
    made = nvjpeg_dataset(jpegs(3))
    for _ in range(first):
        decode_batch(batch_of(made), made, CPU, decode=Decoder())

    def failing(files: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("Failed to synchronize CUDA stream: 700")

    with pytest.raises(LoaderError, match=r"no JPEG, not even one .*: 700\. .*backend=\"torch\""):
        decode_batch(batch_of(made), made, CPU, decode=failing)


def test_a_first_batch_of_broken_files_is_not_blamed_on_the_device() -> None:
    batch, made = broken_batch("substitute", [BAD_INSIDE, BAD_INSIDE, *jpegs(2)])
    decode = Decoder(refused=BAD_INSIDE)
    for position in (2, 3):
        made.cpu_fallback.known[position] = "left out here, so that all that is decoded is broken"
    decode_batch(batch, made, CPU, decode=decode)
    assert decode.calls == [2, 1, 1, 1]  # together, each alone, and one that is known to be good
    assert made.bad_samples.failures >= 2
