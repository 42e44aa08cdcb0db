"""nvJPEG on a CUDA device: the pixels of the CPU within a bound, bounded memory, right beside other streams."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from images.made_images import WHOLE, encoded
from made_samples import batch_of, noise, nvjpeg_dataset, obvious, photo, torn
from on_cuda import Seen, fitted, spin, warm_up
from torch import Tensor

from lightning_feed import ImageFolderDataModule, LoaderSettings, PrefetchCallback
from lightning_feed.errors import DecodeError
from lightning_feed.images.choose import psnr_db
from lightning_feed.images.crop import CropSpec, EvalRecipe, TrainRecipe
from lightning_feed.images.decode_ahead import NvJpegOptions
from lightning_feed.images.device_decode import decode_batch, decode_on_cpu
from lightning_feed.images.nvjpeg import nvjpeg
from lightning_feed.images.ragged_crop import crop_ragged, has_triton

CUDA = torch.device("cuda", 0)
LEAST_DB = 35
"""nvJPEG rounds its inverse DCT and spreads subsampled chroma otherwise than libjpeg, in the hardware most of all.
libjpeg's crudest way, with the fast DCT and chroma that is only repeated, is at 44 dB or more on these images after the
recipe; 9 dB are left for chroma that is put half a pixel elsewhere. Two images of a batch are below 12 dB apart."""
RECIPES: list[TrainRecipe | EvalRecipe] = [TrainRecipe(size=64), EvalRecipe(size=64, short_side=73)]


def on_gpu(made: Any, seed: int = 0) -> tuple[Tensor, Tensor]:
    images, labels = decode_batch(batch_of(made, seed), made, CUDA)
    assert images.is_cuda
    assert labels.is_cuda
    assert images.dtype == torch.uint8
    assert images.is_contiguous(memory_format=torch.channels_last)
    return images.cpu(), labels.cpu()


def large_jpegs(count: int, **options: Any) -> list[bytes]:
    return [
        encoded(photo(*((375, 500), (500, 333), (480, 640))[k % 3], k), **{"quality": 90, **options})
        for k in range(count)
    ]


@pytest.mark.gpu(twin="images/test_device_decode.py::test_device_batches_equal_those_of_the_cpu_with_the_same_decoder")
@pytest.mark.parametrize("recipe", RECIPES, ids=["train", "eval"])
@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"subsampling": 1}, {"restart_marker_blocks": 4}],
    ids=["4:2:0", "4:4:4", "4:2:2", "restart markers"],
)
def test_gpu_pixels_match_cpu_pixels_within_a_bound(recipe: Any, options: dict[str, Any]) -> None:
    made = nvjpeg_dataset(large_jpegs(12, **options), recipe, decoder="pillow")
    images, labels = on_gpu(made)
    expected, expected_labels = decode_on_cpu(batch_of(made), made)
    assert torch.equal(labels, expected_labels)
    for ours, theirs in zip(images, expected, strict=True):
        assert psnr_db(ours.numpy(), theirs.numpy()) > LEAST_DB
    assert made.cpu_fallback.as_dict() == {}


@pytest.mark.gpu(
    twin="images/test_device_decode.py::test_unsupported_images_are_decoded_by_the_workers_and_logged_once"
)
@pytest.mark.parametrize("recipe", RECIPES, ids=["train", "eval"])
def test_formats_left_to_the_cpu_match_its_pixels_exactly(recipe: Any) -> None:
    left = ["palette PNG", "WebP", "CMYK", "RGB inside", "16 bit PNG", "progressive", "GIF"]
    names = [*left, "greyscale", "EXIF-rotated"]
    files = [WHOLE[name] for name in names] + large_jpegs(3)
    made = nvjpeg_dataset(files, recipe, decoder="pillow")
    images, labels = on_gpu(made)
    expected, expected_labels = decode_on_cpu(batch_of(made), made)
    assert torch.equal(labels, expected_labels)
    for name, ours, theirs in zip([*names, *"abc"], images, expected, strict=True):
        if name in left:
            assert torch.equal(ours, theirs), name
        else:
            assert psnr_db(ours.numpy(), theirs.numpy()) > LEAST_DB, name
    assert made.cpu_fallback.as_dict() == {}
    assert sum(made.cpu_part.refused.as_dict().values()) == 12  # in two batches


@pytest.mark.gpu(twin="images/test_device_decode.py::test_a_corrupt_image_is_named")
def test_a_corrupt_image_is_named_and_the_next_batch_is_unaffected() -> None:
    files = large_jpegs(4)
    made = nvjpeg_dataset([*files, torn(files[0])], RECIPES[1], decoder="pillow")
    with pytest.raises(DecodeError, match=r"photos/4\.jpg \(sample 4\): "):
        on_gpu(made)
    images, _ = on_gpu(nvjpeg_dataset(files, RECIPES[1], decoder="pillow"))
    expected, _ = decode_on_cpu(batch_of(nvjpeg_dataset(files, RECIPES[1], decoder="pillow")), made)
    assert psnr_db(images.numpy(), expected.numpy()) > LEAST_DB


@pytest.mark.gpu(twin="images/test_device_decode.py::test_a_corrupt_image_is_handled_by_on_error")
def test_a_file_that_nvjpeg_refuses_leaves_the_rest_of_its_batch_intact() -> None:
    files = large_jpegs(4)
    made = nvjpeg_dataset([*files[:2], torn(files[2]), files[3]], RECIPES[1], decoder="pillow", on_error="skip")
    images, labels = on_gpu(made)
    assert labels.tolist() == [0, 10, 0, 30]
    whole = nvjpeg_dataset(files, RECIPES[1], decoder="pillow")
    expected, _ = decode_on_cpu(batch_of(whole), whole)
    for place in (0, 1, 3):
        assert psnr_db(images[place].numpy(), expected[place].numpy()) > LEAST_DB


@pytest.mark.gpu(no_twin="nvJPEG allocates by itself, which only the driver sees")
def test_device_memory_does_not_grow_over_200_batches() -> None:
    made = nvjpeg_dataset([*large_jpegs(15), WHOLE["WebP"]], RECIPES[0])
    batch = batch_of(made)

    def in_use() -> tuple[int, int]:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(CUDA)
        return torch.cuda.memory_reserved(CUDA), total - free

    for _ in range(20):
        decode_batch(batch, made, CUDA)
    before = in_use()
    for _ in range(200):
        decode_batch(batch, made, CUDA)
    after = in_use()
    slack = 64 * 2**20  # of two batches' decoded images: how far the device is behind the host is chance
    assert after[0] <= before[0] + slack  # torch's pools
    assert after[1] <= before[1] + slack  # and what nvJPEG allocates by itself


# --- the resize alone -------------------------------------------------------------------------------------------------


def random_crops() -> tuple[dict[int, Tensor], dict[int, CropSpec]]:
    """Random crops of 31 images, and the middle of one of 12 megapixels."""
    torch.manual_seed(0)
    wholes = {place: noise(*((375, 500), (500, 333), (480, 640), (1200, 1600))[place % 4]) for place in range(31)}
    crops = {place: RECIPES[0].spec(*whole.shape[1:]) for place, whole in wholes.items()}
    wholes[31] = torch.from_numpy(np.array(photo(3000, 4000))).permute(2, 0, 1).contiguous()
    crops[31] = RECIPES[1].spec(3000, 4000)
    return {place: whole.to(CUDA) for place, whole in wholes.items()}, crops


def resized(wholes: dict[int, Tensor], crops: dict[int, CropSpec]) -> Tensor:
    """uint8, shape (B, 64, 64, 3)."""
    assert has_triton()
    pixels = torch.empty((len(crops), 64, 64, 3), dtype=torch.uint8, device=CUDA)
    rows = [
        [*wholes[place].shape[1:], *cut.region, *cut.resized, *cut.window, int(cut.flipped), 0, 0]
        for place, cut in crops.items()
    ]
    crop_ragged([wholes[place] for place in crops], torch.tensor(rows), "exact", pixels, list(range(len(crops))))
    return pixels


@pytest.mark.gpu(twin="images/test_ragged_crop.py::test_crops_are_within_a_grey_level_of_torchvision")
def test_gpu_crops_are_within_a_grey_level_of_those_of_torchvision() -> None:
    wholes, crops = random_crops()
    found = resized(wholes, crops).permute(0, 3, 1, 2).int().cpu()
    for place, cut in crops.items():
        true, coarse = (obvious(wholes[place].cpu(), cut, antialias=way).int() for way in (True, False))
        assert (found[place] - true).abs().max() <= 1, cut
        assert (found[place] - coarse).abs().max() > 50, cut  # the control


@pytest.mark.gpu(
    twin="simulated/test_images_and_resident_data.py::test_decoding_makes_only_waits_that_torchs_sync_debug_mode_allows"
)
def test_resizing_adds_no_device_sync() -> None:
    wholes, crops = random_crops()
    expected = resized(wholes, crops)  # makes the memory that is used again below
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = resized(wholes, crops)
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):  # the control
            found.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.mark.gpu(
    twin="simulated/test_images_and_resident_data.py::test_decoding_makes_only_waits_that_torchs_sync_debug_mode_allows"
)
def test_decoding_passes_the_sync_debug_mode_of_torch() -> None:
    """The host does wait for nvJPEG, by an event, and torchvision does by a call of its own."""
    made = nvjpeg_dataset([*large_jpegs(3), WHOLE["WebP"]], RECIPES[1])
    batch = batch_of(made)
    decode_batch(batch, made, CUDA)  # makes the memory that is used again below
    try:
        torch.cuda.set_sync_debug_mode("error")
        images, _ = decode_batch(batch, made, CUDA)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert images.is_cuda


@pytest.mark.gpu(no_twin="memory that a kernel takes is the driver's")
def test_resizing_takes_no_memory_but_for_a_table() -> None:
    wholes = dict.fromkeys(range(16), noise(3000, 4000).to(CUDA))
    crops = dict.fromkeys(wholes, RECIPES[1].spec(3000, 4000))
    resized(wholes, crops)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    resized(wholes, crops)
    assert torch.cuda.max_memory_allocated() - before < 2**20


# --- beside other streams ---------------------------------------------------------------------------------------------

BYTES = 500 * 375 * 3


def times_corrupted(decode: Any, files: list[Tensor]) -> int:
    """In how many of 20 rounds memory that queued kernels still had to read was written to by ``decode``."""
    warm_up()
    decode(files)
    found = 0
    for _ in range(20):
        values = [torch.full((BYTES,), 7, dtype=torch.uint8, device=CUDA) for _ in range(16)]
        torch.cuda.synchronize()
        spin(25)
        sums = [value.sum(dtype=torch.int64) for value in values]
        del values  # the size of an image: the allocator gives it to the images
        images = decode(files)
        torch.cuda.synchronize()
        found += {int(total) for total in sums} != {7 * BYTES}
        del images
    return found


@pytest.mark.gpu(
    twin="simulated/test_images_and_resident_data.py::test_decoding_on_the_device_is_race_free_with_and_without_prefetching"
)
def test_decoding_does_not_overwrite_memory_that_queued_kernels_read() -> None:
    """Nor where the pool of streams gives ours to somebody else. The control is torchvision's call alone."""
    files = [torch.frombuffer(bytearray(encoded(photo(375, 500, k))), dtype=torch.uint8) for k in range(8)]
    ours = nvjpeg(CUDA)
    assert times_corrupted(ours, files) == 0
    pool = [torch.cuda.Stream(CUDA, priority=-1) for _ in range(64)]  # of 32, which are given out in turn
    (twin, *_) = [stream for stream in pool if stream.cuda_stream == ours._stream.cuda_stream]
    with torch.cuda.stream(twin):
        assert times_corrupted(ours, files) == 0
    if not times_corrupted(lambda files: torch.ops.image.decode_jpegs_cuda(files, 3, CUDA), files):
        pytest.skip("torchvision's decoder keeps the order of streams on this GPU, so the guard is unproven")


@pytest.mark.gpu(twin="simulated/test_images_and_resident_data.py::test_decoding_runs_in_parallel_with_the_step")
def test_decoding_waits_for_no_other_stream() -> None:
    """The step's kernels may still run when the batch is there."""
    made = nvjpeg_dataset(large_jpegs(8), RECIPES[0])
    batch = batch_of(made)
    side = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(side):
        decode_batch(batch, made, CUDA)  # makes the memory that is used again below
    warm_up()
    spin(1000)
    busy = torch.cuda.Event()
    busy.record()
    with torch.cuda.stream(side):
        decode_batch(batch, made, CUDA)
    side.synchronize()
    assert not busy.query()
    torch.cuda.synchronize()
    assert busy.query()


def fit(photos: Path, backend: Any, *callbacks: Any) -> list[tuple[Tensor, Tensor]]:
    module = ImageFolderDataModule(
        photos,
        batch_size=4,
        image_size=64,
        val_fraction=0.0,
        decoder="pillow",
        backend=backend,
        loader=LoaderSettings(num_workers=2, seed=1),
    )
    model: Seen = fitted(Seen(), module, *callbacks, max_epochs=3)
    return model.batches()


@pytest.mark.gpu(twin="images/test_decode_ahead.py::test_only_a_share_that_is_not_fixed_moves")
def test_a_fit_with_a_fixed_share_of_the_workers_can_be_repeated_to_the_bit(photos: Path) -> None:
    half = NvJpegOptions(cpu_share=0.5)
    once, again, ahead = fit(photos, half), fit(photos, half), fit(photos, half, PrefetchCallback())
    assert len(once) == 12
    for batches in zip(once, again, ahead, strict=True):
        assert all(
            torch.equal(one, other) for batch in batches[1:] for one, other in zip(batches[0], batch, strict=True)
        )


@pytest.mark.gpu(no_twin="both decoders are those of the device")
def test_torchcodec_and_torchvision_decode_alike() -> None:
    pytest.importorskip("torchcodec")
    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in large_jpegs(4)]
    ours = nvjpeg(CUDA)
    assert ours.library == "torchcodec"
    theirs = torch.ops.image.decode_jpegs_cuda(files, 3, CUDA)
    assert all(torch.equal(one, other) for one, other in zip(ours(files), theirs, strict=True))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of eight smooth JPEGs; noise would be far apart between decoders."""
    for label, name in enumerate("ab"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index, data in enumerate(large_jpegs(16)[label::2]):
            (tmp_path / "photos" / name / f"{index}.jpg").write_bytes(data)
    return tmp_path / "photos"


@pytest.mark.gpu(twin="data/test_image_backends.py::test_prefetched_nvjpeg_batches_equal_those_of_the_torch_backend")
def test_prefetched_batches_equal_those_without_the_callback(photos: Path) -> None:
    prefetch = PrefetchCallback()
    ahead, plain = fit(photos, "nvjpeg", prefetch), fit(photos, "nvjpeg")
    assert prefetch.active
    assert len(ahead) == len(plain) == 12
    for ours, theirs in zip(ahead, plain, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.gpu(twin="simulated/test_every_setting.py::test_a_value_of_a_setting_reaches_the_device")
def test_nvjpeg_batches_of_a_fit_match_those_of_the_torch_backend(photos: Path) -> None:
    for ours, theirs in zip(fit(photos, "nvjpeg", PrefetchCallback()), fit(photos, "torch"), strict=True):
        assert torch.equal(ours[1], theirs[1])
        # In normalised values a grey level is about 0.017.
        assert (ours[0] - theirs[0]).abs().mean() < 0.1
