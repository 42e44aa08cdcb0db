"""backend="dali-gpu" on a CUDA device: torch's batches but for the pixels, on the device, and its memory given back."""

import gc
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dali_batches import active_in, assert_nearly_the_same, write
from images.made_images import BROKEN, WHOLE, encoded
from made_samples import jpegs, photo
from on_cuda import Seen, fitted, spin, warm_up
from PIL import Image
from torch import Tensor

from lightning_feed import ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.errors import DecodeError
from lightning_feed.images.dali_binding import DaliOptions, upsamples_like_libjpeg

pytest.importorskip("nvidia.dali")

THREADS = LoaderSettings(num_workers=2, workers="thread", seed=1)


class Noting(Seen):
    """Notes which pipelines there were, too."""

    def __init__(self, module: ImageFolderDataModule) -> None:
        super().__init__()
        self.module = [module]
        self.active: set[tuple[str, tuple[str, ...]]] = set()
        self.kinds: set[Any] = set()

    def see(self, split: str, batch: Any) -> Tensor:
        images, labels = batch
        channels_last = images.is_contiguous(memory_format=torch.channels_last)
        self.kinds.add((type(batch), images.dtype, labels.dtype, channels_last))
        self.active.add((split, active_in(self.module[0])))
        return super().see(split, batch)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten JPEGs to train with and five to validate with, in two classes.

    They are 4:4:4, so that no pixel depends on how the chroma is upsampled.
    """
    return write(tmp_path / "photos", train=jpegs(10, subsampling=0), val=jpegs(5, subsampling=0))


def made(photos: Path, backend: Any = "dali-gpu", **options: Any) -> ImageFolderDataModule:
    given = {"batch_size": 4, "image_size": 32, "decoder": "pillow", "loader": THREADS, **options}
    return ImageFolderDataModule(photos, backend=backend, **given)


def fit(module: ImageFolderDataModule, *callbacks: Any, **options: Any) -> Noting:
    model: Noting = fitted(Noting(module), module, *callbacks, **options)
    return model


@pytest.mark.gpu(twin="simulated/test_dali_images.py::test_dali_batches_of_a_fit_match_those_of_the_torch_backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dali_batches_of_a_fit_match_those_of_the_torch_backend(photos: Path, dtype: torch.dtype) -> None:
    ours, theirs = fit(made(photos, dtype=dtype)), fit(made(photos, "torch", dtype=dtype))
    assert ours.kinds == theirs.kinds == {(tuple, dtype, torch.int64, True)}
    assert_nearly_the_same(ours.batches(), theirs.batches())
    assert_nearly_the_same(ours.batches("val"), theirs.batches("val"))
    assert [len(labels) for _, labels in ours.batches()] == [4, 4, 2] * 2


@pytest.mark.gpu(no_twin="the chroma is upsampled by nvJPEG, and by libjpeg on the CPU")
def test_images_with_subsampled_chroma_match_those_of_the_torch_backend(tmp_path: Path) -> None:
    """Repeated chroma is 28 dB from interpolated chroma on these pictures (libjpeg-turbo, crops as here)."""
    root = write(tmp_path / "photos", train=jpegs(10), val=jpegs(5))
    ours, theirs = fit(made(root)), fit(made(root, "torch"))
    db = 35 if upsamples_like_libjpeg() else 25
    assert_nearly_the_same(ours.batches(), theirs.batches(), db)
    assert_nearly_the_same(ours.batches("val"), theirs.batches("val"), db)


@pytest.mark.gpu(no_twin="the warnings were those of nvImageCodec's GPU decoders")
def test_decoding_writes_nothing_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """nvImageCodec wrote a warning for every image with subsampled chroma."""
    module = made(write(tmp_path / "photos", train=jpegs(256), val=jpegs(2)), batch_size=64)
    capfd.readouterr()
    count = sum(len(labels) for _, labels in module.train_dataloader())
    torch.cuda.synchronize()
    assert count == 256
    assert capfd.readouterr().err == ""


@pytest.mark.gpu(twin="simulated/test_dali_images.py::test_dali_batches_of_a_fit_match_those_of_the_torch_backend")
def test_prefetch_callback_does_nothing_for_batches_already_on_the_device(
    photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = PrefetchCallback()
    with caplog.at_level(logging.INFO):
        ours = fit(made(photos), callback)
    assert not callback.active
    said = "PrefetchCallback does nothing: the loader yields tensors that are on the device already."
    assert caplog.messages.count(said) == 1
    assert_nearly_the_same(ours.batches(), fit(made(photos)).batches())


@pytest.mark.gpu(twin="simulated/test_every_setting.py::test_a_value_of_a_setting_reaches_the_device")
def test_dali_cpu_batches_are_prefetched_and_match_the_torch_backend(photos: Path) -> None:
    callback = PrefetchCallback()
    ours = fit(made(photos, "dali-cpu"), callback)
    assert callback.active
    assert_nearly_the_same(ours.batches(), fit(made(photos, "torch")).batches())


@pytest.mark.gpu(
    twin="images/test_dali_decoder.py::test_kept_batches_do_not_change_after_the_pipeline_continues_and_ends"
)
def test_batches_in_use_are_not_overwritten_by_the_pipeline(photos: Path) -> None:
    """They are read late, and let go before that, while the pipeline goes on through several epochs."""
    module = made(photos)

    def sums(late_ms: float) -> list[float]:
        warm_up()
        found = []
        for _ in range(20):
            for images, _ in module.val_dataloader():
                spin(late_ms)
                found.append(images.double().sum())
                del images
                if not late_ms:
                    torch.cuda.synchronize()
        return [one.item() for one in found]

    expected = sums(0)
    assert sums(20) == expected
    assert len(set(expected)) == 2


@pytest.mark.gpu(
    twin="simulated/test_dali_images.py::test_validation_pipeline_exists_only_during_validation_unless_kept"
)
@pytest.mark.parametrize("limit", [1, None])
@pytest.mark.parametrize("keep", [False, True])
def test_validation_pipeline_exists_only_during_validation_unless_kept(
    photos: Path, limit: int | None, keep: bool
) -> None:
    module = made(photos, DaliOptions(device="gpu", keep_eval_pipelines=keep))
    model = fit(module, limit_val_batches=limit, val_check_interval=2, num_sanity_val_steps=0)
    training = {active for name, active in model.active if name == "train"}
    assert training == ({("train",), ("train", "val")} if keep else {("train",)})
    assert {active for name, active in model.active if name == "val"} == {("train", "val")}
    assert active_in(module) == ()


@pytest.mark.gpu(twin="simulated/test_dali_images.py::test_images_of_other_kinds_among_jpegs_are_trained_on")
@pytest.mark.parametrize("name", ["CMYK", "greyscale", "RGBA PNG", "WebP", "16 bit PNG", "one pixel", "EXIF-rotated"])
def test_other_image_kinds_among_jpegs_match_the_torch_backend(photos: Path, name: str) -> None:
    (photos / "val" / "a" / "0.jpg").write_bytes(WHOLE[name])
    ours, theirs = fit(made(photos), max_epochs=1), fit(made(photos, "torch"), max_epochs=1)
    assert_nearly_the_same(ours.batches("val"), theirs.batches("val"))


@pytest.mark.gpu(twin="simulated/test_dali_images.py::test_an_image_larger_than_largest_image_is_decoded_correctly")
def test_an_image_larger_than_largest_image_is_decoded_correctly(photos: Path) -> None:
    (photos / "val" / "a" / "0.jpg").write_bytes(encoded(photo(3000, 4000)))
    module = made(photos, DaliOptions(device="gpu", largest_image=(64, 64)))
    assert_nearly_the_same(fit(module).batches("val"), fit(made(photos, "torch")).batches("val"))


@pytest.mark.gpu(twin="simulated/test_dali_images.py::test_a_broken_image_is_named_or_replaced")
@pytest.mark.parametrize("broken", ["JPEG cut in the middle", "PNG cut"])
def test_a_broken_image_is_named_or_replaced(photos: Path, broken: str) -> None:
    (photos / "train" / "a" / "2.jpg").write_bytes(BROKEN[broken])
    with pytest.raises(DecodeError, match=r"train/a/2\.jpg \(sample 1\)"):
        fit(made(photos))
    module = made(photos, on_error="skip")
    assert_nearly_the_same(fit(module).batches(), fit(made(photos, "torch", on_error="skip")).batches())
    assert module.failures() == 2


@pytest.mark.gpu(twin="data/test_dali_images.py::test_pipeline_rebuilds_do_not_leak_memory")
def test_fifty_rebuilds_do_not_grow_device_memory(photos: Path) -> None:
    module = made(photos, image_size=224)
    loader = module.val_dataloader()
    decoder = module._images_run.pipelines["val"]

    def used_mb() -> float:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 1e6

    def validate() -> None:
        for images, _ in loader:
            assert images.is_cuda
        assert active_in(module) == ()

    for _ in range(5):
        validate()
    before = used_mb()
    for _ in range(50):
        validate()
    assert decoder.built == 55
    assert used_mb() - before < 32


@pytest.mark.gpu(twin="images/test_dali_pipeline.py::test_dali_normalisation_matches_the_device_transform")
def test_black_and_white_images_are_normalised_exactly(photos: Path) -> None:
    """Of a black image and a white one, known to the last bit but rounding."""
    for value in (0, 255):
        picture = Image.fromarray(np.full((40, 40, 3), value, np.uint8))
        (photos / "val" / "a" / f"{value}.png").write_bytes(encoded(picture, "PNG"))
    module = made(photos, eval_batch_size=16)
    [(images, _)] = [module.device_transform(batch, "val") for batch in module.val_dataloader()]
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    ends = sorted((image.mean((1, 2)).cpu() for image in images), key=lambda each: each[0].item())
    assert torch.allclose(ends[0], -mean / std, atol=1e-4)
    assert torch.allclose(ends[-1], (1 - mean) / std, atol=1e-4)
