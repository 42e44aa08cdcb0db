"""DALI behind a loader of encoded batches: what backend="torch" gives, whatever comes, whenever it is broken off."""

import gc
import logging
import math
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import warm
from images.made_images import BROKEN, WHOLE, encoded
from lightning.pytorch.utilities.memory import is_oom_error
from made_samples import dataset, jpegs, photo
from torch import Tensor

pytest.importorskip("nvidia.dali")

from lightning_feed.errors import DecodeError, LoaderError
from lightning_feed.images import dali_decoder as image_decoder
from lightning_feed.images.crop import EvalRecipe, TrainRecipe
from lightning_feed.images.dali_binding import DaliOptions
from lightning_feed.images.dali_decoder import (
    DaliImageDecoder,
    ImagePipeline,
    PipelineSpec,
    largest_of_some,
    why_on_host,
)
from lightning_feed.images.device_decode import decode_on_cpu
from lightning_feed.images.image_dataset import EncodedBatch, ImageDataset, collate_encoded

TRAIN, EVAL = TrainRecipe(size=32), EvalRecipe(size=32, short_side=37)
SILENT = "JPEG cut in the middle"
"""DALI would fill it up with grey."""
LOUD = "PNG cut"
"""DALI fails at it."""


def psnr_db(ours: Tensor, expected: Tensor) -> float:
    error = (ours.double() - expected.double()).pow(2).mean().item()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def spec(**options: Any) -> PipelineSpec:
    given: dict[str, Any] = {
        "batch_size": 1,
        "device": torch.device("cpu"),
        "threads": 1,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "half": False,
    }
    chosen = {name: options.pop(name) for name in ("prefetch", "largest_image") if name in options}
    if "largest_image" in chosen:
        chosen["device"] = "gpu"
    return PipelineSpec(options=DaliOptions(**chosen), **{**given, **options})


def decoder(made: ImageDataset, *, keep: bool = True, **options: Any) -> DaliImageDecoder:
    return DaliImageDecoder(made, spec(**options), keep=keep)


def batches(made: ImageDataset, size: int, seed: int = 0) -> list[EncodedBatch]:
    torch.manual_seed(seed)
    samples = [made[index] for index in range(len(made))]
    return [collate_encoded(samples[start : start + size]) for start in range(0, len(samples), size)]


def fail(monkeypatch: pytest.MonkeyPatch, where: str, said: str) -> list[int]:
    """Have a method of the pipeline raise what DALI would; the list grows with each call."""
    calls: list[int] = []

    def fails(self: ImagePipeline, *given: Any) -> None:
        calls.append(1)
        raise RuntimeError(said)

    monkeypatch.setattr(ImagePipeline, where, fails)
    return calls


def assert_like_torch(decoded: list[Any], given: list[EncodedBatch], made: ImageDataset, db: float = 40) -> None:
    """Structure, shape, dtype, memory, order and labels are the same, and pixels nearly."""
    assert len(decoded) == len(given)
    for ours, batch in zip(decoded, given, strict=True):
        theirs = decode_on_cpu(batch, made)
        assert type(ours) is type(theirs) is list
        assert [part.shape for part in ours] == [part.shape for part in theirs]
        assert [part.dtype for part in ours] == [part.dtype for part in theirs]
        assert ours[0].stride() == theirs[0].stride()
        assert torch.equal(ours[1], theirs[1])
        for image, expected in zip(ours[0], theirs[0], strict=True):
            assert psnr_db(image, expected) > db


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "prefetch"), [(TRAIN, 1), (EVAL, 2), (EvalRecipe(size=32, short_side=32), 3)])
def test_dali_batches_match_the_torch_backend_in_order_and_length(recipe: Any, prefetch: int) -> None:
    made = dataset(jpegs(11), recipe)
    given = batches(made, 4)
    decoded = list(decoder(made, prefetch=prefetch).run(iter(given), 0))
    assert [len(labels) for _, labels in decoded] == [4, 4, 3]
    assert_like_torch(decoded, given, made)


@pytest.mark.parametrize("recipe", [TRAIN, EVAL])
def test_every_kind_of_image_matches_the_torch_backend(recipe: Any) -> None:
    for kind in WHOLE.values():
        made = dataset([jpegs(1)[0], kind, jpegs(2)[1]], recipe, decoder="pillow")
        given = batches(made, 3)
        assert_like_torch(list(decoder(made).run(iter(given), 0)), given, made)


def test_windows_and_flips_match_the_torch_backend_to_the_pixel() -> None:
    """Steps of one pixel: a box that is off by one, or not flipped, would be far away."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    made = dataset([encoded(_image(pixels), "PNG")] * 8, TrainRecipe(size=32, scale=(0.1, 1.0)))
    given = batches(made, 8)
    assert given[0].plan[:, 12].tolist() not in ([0] * 8, [1] * 8)
    assert_like_torch(list(decoder(made).run(iter(given), 0)), given, made)
    cut = dataset([encoded(_image(pixels), "PNG")], EvalRecipe(size=31, short_side=64))  # 16.5 is rounded to 16
    given = batches(cut, 1)
    decoded = list(decoder(cut).run(iter(given), 0))
    assert torch.equal(decoded[0][0], decode_on_cpu(given[0], cut)[0])


def _image(pixels: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(pixels)


def test_why_on_host_names_the_images_that_dali_does_not_decode() -> None:
    reasons = {name: why_on_host(data) for name, data in {**WHOLE, **BROKEN}.items()}
    assert {name: why for name, why in reasons.items() if why} == {
        "CMYK": "a CMYK JPEG",
        "bytes after the end": (after := "a JPEG that is cut short, or has data after its end marker"),
        "16 bit PNG": "a PNG of 16 bits a channel",
        "GIF": "an image of the kind GIF",
        "TIFF": "an image of the kind TIFF",
        "0 bytes": (unknown := "an image of the kind unknown"),
        "2 bytes": unknown,
        "text named .jpg": unknown,
        "JPEG cut in the header": (headless := "a JPEG without a frame header"),
        "JPEG that is all header": headless,
        "JPEG cut in the middle": after,
        "JPEG cut shortly before the end": after,
        "progressive JPEG cut": after,
    }


# --- passes -----------------------------------------------------------------------------------------------------------


def test_a_kept_pipeline_is_rebuilt_only_for_larger_batches() -> None:
    made = dataset(jpegs(9))
    ours = decoder(made)
    for size, built in ((3, 1), (3, 1), (2, 1), (4, 2), (3, 2)):
        given = batches(made, size)
        assert_like_torch(list(ours.run(iter(given), 0)), given, made)
        assert ours.built == built
        assert ours._pipeline is not None


def test_a_pipeline_that_is_not_kept_is_released_after_its_pass() -> None:
    made = dataset(jpegs(6))
    ours = decoder(made, keep=False)
    given = batches(made, 2)
    assert ours._pipeline is None
    run = ours.run(iter(given), 0)
    next(run)
    assert ours._pipeline is not None
    assert len(list(run)) == 2
    assert ours._pipeline is None
    run = ours.run(iter(given), 0)
    next(run)
    run.close()
    assert ours._pipeline is None


@pytest.mark.parametrize("handed_out", [0, 1, 2])
def test_a_pass_after_a_closed_one_starts_over_and_reuses_the_pipeline(handed_out: int) -> None:
    made = dataset(jpegs(8))
    ours = decoder(made)
    given = batches(made, 2)
    run = ours.run(iter(given), 0)
    for _ in range(handed_out):
        next(run)
    run.close()
    assert not ours._pipeline  # nothing is on its way
    assert_like_torch(list(ours.run(iter(given), 0)), given, made)
    assert ours.built == 1


def test_a_pass_continues_where_it_was_after_a_release() -> None:
    made = dataset(jpegs(8))
    ours = decoder(made)
    given = batches(made, 2)
    run = ours.run(iter(given), 0)
    decoded = [next(run)]
    ours.release()
    assert ours._pipeline is None
    assert_like_torch(decoded + list(run), given, made)
    assert ours.built == 2


def test_interleaved_passes_do_not_mix_their_batches() -> None:
    made = dataset(jpegs(12))
    ours = decoder(made)
    small, large = batches(made, 2, seed=1), batches(made, 3, seed=2)
    first, second = ours.run(iter(small), 0), ours.run(iter(large), 0)
    decoded = [(next(first), next(second)) for _ in range(4)]
    assert_like_torch([each for each, _ in decoded] + list(first), small, made)
    assert_like_torch([each for _, each in decoded] + list(second), large, made)


def test_an_error_of_the_loader_is_raised_and_the_next_pass_is_complete() -> None:
    made = dataset(jpegs(8))
    given = batches(made, 2)

    def failing() -> Iterator[EncodedBatch]:
        yield from given[:3]
        raise OSError("the disk is gone")

    ours, decoded = decoder(made), []
    run = ours.run(failing(), 0)
    with pytest.raises(OSError, match="the disk is gone"):
        decoded.extend(iter(lambda: next(run), None))
    assert_like_torch(decoded, given[: len(decoded)], made)
    assert_like_torch(list(ours.run(iter(given), 0)), given, made)


def test_kept_batches_do_not_change_after_the_pipeline_continues_and_ends() -> None:
    made = dataset(jpegs(40))
    ours = decoder(made)
    kept = list(ours.run(iter(batches(made, 2)), 0))
    before = [images.clone() for images, _ in kept]
    list(ours.run(iter(batches(made, 2, seed=1)), 0))
    ours.release()
    gc.collect()
    torch.rand(1 << 20)
    assert all(torch.equal(images, copy) for (images, _), copy in zip(kept, before, strict=True))


def test_decoder_is_pickled_without_its_pipeline() -> None:
    made = dataset(jpegs(4))
    ours = decoder(made)
    given = batches(made, 2)
    run = ours.run(iter(given), 0)
    next(run)
    copy = pickle.loads(pickle.dumps(ours))
    assert ours._pipeline is not None
    assert copy._pipeline is None
    assert_like_torch(list(copy.run(iter(given), 0)), given, made)
    run.close()


# --- images that cannot be decoded ------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [SILENT, LOUD])
def test_a_broken_image_is_named(broken: str) -> None:
    made = dataset([*jpegs(5), BROKEN[broken]])
    run = decoder(made).run(iter(batches(made, 2)), 0)
    assert [next(run)[1].tolist(), next(run)[1].tolist()] == [[0, 10], [20, 30]]
    with pytest.raises(DecodeError, match=r"photos/5.jpg \(sample 5\)"):
        next(run)


@pytest.mark.parametrize(
    ("broken", "on_error", "place"), [(SILENT, "skip", 0), (LOUD, "substitute", 1), (LOUD, "skip", 6)]
)
def test_replacement_images_equal_those_of_the_torch_backend(broken: str, on_error: str, place: int) -> None:
    files = jpegs(8)
    files[place] = BROKEN[broken]
    made = dataset(files, EVAL, on_error=on_error)
    given = batches(made, 3)
    ours = decoder(made)
    decoded = list(ours.run(iter(given), 0))
    assert made.bad_samples.failures == 1
    assert ours.built == (2 if broken == LOUD else 1)
    assert_like_torch(decoded, given, made)
    assert_like_torch(list(ours.run(iter(given), 0)), given, made)
    assert ours.built == (2 if broken == LOUD else 1)  # it is known by now


def test_an_image_that_only_dali_fails_at_is_decoded_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As DALI's own refusals are hard to come by, one is planted."""
    made = dataset(jpegs(6))
    given = batches(made, 2)
    hated = bytes(jpegs(6)[3])
    feed = ImagePipeline.feed

    def fails(self: ImagePipeline, files: Any, cuts: Any) -> None:
        feed(self, [b"no image" if bytes(file) == hated else file for file in files], cuts)

    monkeypatch.setattr(ImagePipeline, "feed", fails)
    ours = decoder(made)
    with caplog.at_level(logging.WARNING):
        assert_like_torch(list(ours.run(iter(given), 0)), given, made)
    assert ours.built == 2
    [record] = [record for record in caplog.records if "photos/3.jpg" in record.getMessage()]
    assert "DALI failed on it" in record.getMessage()
    assert sum(made.cpu_fallback.as_dict().values()) == 1


def test_a_failure_not_caused_by_an_image_raises_a_loader_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(jpegs(4))
    take = ImagePipeline.take

    def fails(self: ImagePipeline) -> Tensor:
        if self.spec.batch_size > 1 and self.owner is not None:
            raise RuntimeError("the driver is tired")
        return take(self)

    monkeypatch.setattr(ImagePipeline, "take", fails)
    with pytest.raises(LoaderError, match=r"each of them separately. It said: the driver is tired") as raised:
        list(decoder(made).run(iter(batches(made, 2)), 0))
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "said", ["CUDA allocation failed", "Can't allocate 123 bytes on device 0.", "std::bad_alloc", "out of memory"]
)
@pytest.mark.parametrize("where", ["__init__", "take"])
def test_a_lack_of_memory_raises_at_once_and_blames_no_image(
    said: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is no image's fault, as decoding each of them alone might make it look."""
    made = dataset(jpegs(4))
    calls = fail(monkeypatch, where, f"Error in CPU operator, encountered:\n{said}")
    with pytest.raises(LoaderError, match=rf"not have enough memory. It said: {said}.*smaller batch_size"):
        list(decoder(made).run(iter(batches(made, 2)), 0))
    assert len(calls) == 1
    assert made.cpu_fallback.as_dict() == {}


def test_a_lack_of_device_memory_raises_the_out_of_memory_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's batch size finder goes by that."""
    made = dataset(jpegs(2))
    fail(monkeypatch, "__init__", "CUDA allocation failed")
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory in DALI: CUDA allocation") as raised:
        list(decoder(made, device=torch.device("cuda", 0), largest_image=(9, 9)).run(iter(batches(made, 2)), 0))
    assert is_oom_error(raised.value)


def test_a_pipeline_that_cannot_be_built_raises_a_loader_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = dataset(jpegs(2))
    fail(monkeypatch, "__init__", "CUDA runtime API error cudaErrorInsufficientDriver (35)")
    with pytest.raises(LoaderError, match=r"cannot build its pipeline: .*Driver \(35\) See .*doctor"):
        list(decoder(made).run(iter(batches(made, 2)), 0))


def test_largest_of_some_reads_a_sample_of_the_image_headers() -> None:
    files = [None, b"no image", *jpegs(3), encoded(photo(300, 200)), *jpegs(2)]
    assert largest_of_some(dataset(files, decoder="pillow")) == (300, 200)
    assert largest_of_some(dataset([None], decoder="pillow")) is None
    many = dataset([*jpegs(1) * 300, encoded(photo(300, 200))], decoder="pillow")
    reads: list[int] = []
    many.source.read = lambda index: reads.append(index) or jpegs(1)[0]
    assert largest_of_some(many) == (60, 80)
    assert image_decoder._HEADERS <= len(reads) <= 2 * image_decoder._HEADERS


# --- other processes, and the end of this one -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_closing_a_pass_of_the_parent_in_a_forked_process_does_not_hang() -> None:
    """The threads of its pipeline are not there: to wait for what is on its way would never end."""
    made = dataset(jpegs(8))
    given = batches(made, 2)
    ours = decoder(made)
    going = ours.run(iter(given), 0)
    first = next(going)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        going.close()
        os._exit(1 if ours._pipeline is None else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert_like_torch([first, *going], given, made)


LEAVES_A_PASS = """
from made_samples import dataset, jpegs
from images.test_dali_decoder import batches, decoder

made = dataset(jpegs(8))
going = decoder(made).run(iter(batches(made, 2)), 0)
next(going)
held = [going]
held.append(held)
"""


@pytest.mark.slow
def test_a_program_ends_cleanly_in_the_middle_of_a_pass() -> None:
    """DALI ends its pipelines before Python lets go of the pass."""
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = warm.run(["-c", LEAVES_A_PASS], env=os.environ | paths)
    assert (ended.returncode, ended.stderr) == (0, "")
