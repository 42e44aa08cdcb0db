"""Encoded batches: nothing is lost on the way, and decoded they are those of backend="torch"."""

import logging
import pickle
import struct
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from images.made_images import BROKEN, encoded
from made_samples import batch_of, dataset, jpegs, noise, photo
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_feed.errors import DecodeError, SettingsError
from lightning_feed.images.crop import CropSpec, EvalRecipe, TrainRecipe
from lightning_feed.images.decoders import Region
from lightning_feed.images.device_decode import decode_on_cpu
from lightning_feed.images.header import clear_orientation
from lightning_feed.images.image_dataset import (
    EncodedBatch,
    EncodedSample,
    ImageDataset,
    collate_encoded,
    collate_images,
)
from lightning_feed.load import slot_batches
from lightning_feed.load.slots import SlotMemory

RECIPES = [TrainRecipe(size=32), EvalRecipe(size=32, short_side=37)]
CUT_SHORT = BROKEN["JPEG cut in the middle"]
"""Its header is whole: only decoding finds out."""


def torch_batch(made: ImageDataset, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    return list(collate_images([made[index] for index in range(len(made))]))


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


# --- there and back ---------------------------------------------------------------------------------------------------


def made_image(index: int, data: Any) -> EncodedSample:
    cut = CropSpec(
        region=Region(index, 2, 3 + index, 4), resized=(5 + index, 6), window=Region(7, 8, 9, index), flipped=index == 1
    )
    return EncodedSample(data=data, size=(100 + index, 200), crop=cut, label=50 - index, index=2**40 + index)


def test_collated_images_come_out_of_the_batch_unchanged() -> None:
    kinds = [b"first", bytearray(b"2"), memoryview(b"third one"), np.frombuffer(b"4th", np.uint8)]
    images = [made_image(index, data) for index, data in enumerate(kinds)]
    batch = collate_encoded(images)
    assert len(batch) == 4
    assert batch.labels.tolist() == [50, 49, 48, 47]
    assert batch.labels.dtype == torch.int64
    for found, given in zip(batch.images(), images, strict=True):
        assert bytes(found.data) == bytes(given.data)
        assert found[1:] == given[1:]


def test_pin_memory_pins_only_what_is_copied_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvJPEG reads pageable memory, and pinning the files would be a copy of them."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor, *args: Any) -> Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    batch = batch_of(dataset(jpegs(2)))
    found = torch.utils.data._utils.pin_memory.pin_memory(batch)
    assert isinstance(found, EncodedBatch)
    assert [id(tensor) for tensor in pinned] == [id(batch.labels), id(batch.pixels)]
    assert found.labels is not batch.labels
    assert found.files is batch.files


@pytest.mark.parametrize("recipe", RECIPES, ids=["train", "eval"])
@pytest.mark.parametrize("decoder", ["pillow", "torchvision", "turbo-region"])
def test_batches_decoded_on_the_cpu_equal_those_of_the_torch_backend(recipe: Any, decoder: str) -> None:
    files = [*jpegs(4), encoded(photo(), "PNG")]
    made = dataset(files, recipe, decoder=decoder)
    expected = torch_batch(dataset(files, recipe, encoded=False, decoder=decoder))
    assert_same(decode_on_cpu(batch_of(made), made), expected)


# --- through the workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_worker_processes_hand_over_whole_encoded_batches(start_method: str) -> None:
    made = dataset(jpegs(6), EvalRecipe(size=32, short_side=37))
    loader = DataLoader(
        made, batch_size=4, num_workers=1, collate_fn=collate_encoded, multiprocessing_context=start_method
    )
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 2]
    assert all(isinstance(batch, EncodedBatch) for batch in batches)
    expected = torch_batch(made=dataset(jpegs(6), EvalRecipe(size=32, short_side=37), encoded=False))
    decoded = [torch.cat(parts) for parts in zip(*(decode_on_cpu(batch, made) for batch in batches), strict=True)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(decoded, expected, strict=True))


def test_files_and_crops_are_written_straight_into_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is small is made elsewhere, and copied."""
    window = Region(0, 0, 32, 40)
    crop = CropSpec(region=Region(0, 0, 64, 64), resized=(64, 64), window=window, flipped=False)
    rows = {1: noise(32, 40).permute(1, 2, 0).contiguous().permute(2, 0, 1)}
    files = jpegs(3)
    images = [
        EncodedSample(
            data=b"" if index in rows else data, size=(64, 64), crop=crop, label=7, index=index, pixels=rows.get(index)
        )
        for index, data in enumerate(files)
    ]
    copied: list[int] = []
    writer = slot_batches._SlotWriter
    place = writer._place_storage

    def noting(self: Any, storage: torch.UntypedStorage) -> Any:
        if storage._cdata not in self._storages:
            copied.append(storage.nbytes())
        return place(self, storage)

    monkeypatch.setattr(writer, "_place_storage", noting)
    monkeypatch.setattr(slot_batches, "get_worker_info", lambda: "a worker")
    memory = SlotMemory(2)
    sent = pickle.loads(ForkingPickler.dumps(slot_batches.SlotCollate(collate_encoded, memory, usual=2)(images)))
    assert sorted(copied) == [1 * 8, 3 * 8, 4 * 8, 3 * 15 * 8]
    found = sent.images()
    assert [bytes(image.data) for image in found] == [files[0], b"", files[2]]
    assert torch.equal(found[1].pixels, rows[1])
    expected = collate_encoded(images)
    for name, part in vars(expected).items():
        assert torch.equal(getattr(sent, name), part), name


def test_a_pickled_dataset_keeps_its_recipe_and_decoder() -> None:
    made = dataset(jpegs(3))
    copy = pickle.loads(pickle.dumps(made))
    assert copy.encoded
    assert_same(decode_on_cpu(batch_of(copy), copy), decode_on_cpu(batch_of(made), made))


# --- images that cannot be read or decoded ----------------------------------------------------------------------------


def test_a_file_found_broken_during_decoding_is_named() -> None:
    made = dataset([*jpegs(2), CUT_SHORT])
    batch = batch_of(made)
    with pytest.raises(DecodeError, match=r"photos/2\.jpg \(sample 2\): "):
        decode_on_cpu(batch, made)


@pytest.mark.parametrize("broken", [b"this is no image", b""])
def test_a_file_without_a_header_is_named_in_the_worker(broken: bytes) -> None:
    with pytest.raises(DecodeError, match=r"photos/1\.jpg \(sample 1\): "):
        dataset([jpegs(1)[0], broken])[1]


def test_skipped_images_are_replaced_by_others_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    good = jpegs(2)
    made = dataset([good[0], CUT_SHORT, None, good[1]], RECIPES[1], on_error="skip")
    with caplog.at_level(logging.WARNING):
        images, labels = decode_on_cpu(batch_of(made), made)
    assert labels.tolist() == [0, 0, 0, 30]
    assert torch.equal(images[1], images[0])
    assert torch.equal(images[2], images[0])
    assert not torch.equal(images[3], images[0])
    assert made.bad_samples.failures == 2
    assert "photos/1.jpg" in caplog.text
    assert "photos/2.jpg" in caplog.text


def test_a_substitute_comes_with_its_own_label() -> None:
    files = [jpegs(1)[0], CUT_SHORT, jpegs(2)[1]]
    made = dataset(files, RECIPES[1], on_error="substitute")
    images, labels = decode_on_cpu(batch_of(made), made)
    assert labels.tolist()[::2] == [0, 20]
    assert labels[1] in (0, 20)
    assert torch.equal(images[1], images[int(labels[1]) // 10])
    assert made.bad_samples.failures == 1


def test_a_substitute_does_not_advance_the_random_state_of_training() -> None:
    made = dataset([*jpegs(3), CUT_SHORT], on_error="substitute")
    batch = batch_of(made)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = decode_on_cpu(batch, made)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert_same(decode_on_cpu(batch, made), first)  # and the same ones in a run that is repeated
    other = decode_on_cpu(batch_of(made, seed=1), made)
    assert not torch.equal(other[0][3], first[0][3])  # other boxes in another epoch


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
def test_samples_that_are_already_pixels_are_refused_for_any_on_error(on_error: Any) -> None:
    made = dataset([np.zeros((8, 8, 3), np.uint8)], on_error=on_error)
    with pytest.raises(SettingsError, match=r'photos/0\.jpg \(sample 0\) already holds pixels.*backend="torch"'):
        made[0]


# --- images that workers decode ---------------------------------------------------------------------------------------


class EverySecond:
    """A part of the CPU."""

    def takes(self, data: Any, size: tuple[int, int], index: int, name: str) -> bool:
        return index % 2 == 1


def test_images_of_the_cpus_part_are_decoded_where_they_are_read() -> None:
    files = jpegs(5)
    made = dataset(files)
    made.cpu_part = EverySecond()
    batch = batch_of(made)
    assert batch.decoded.tolist() == [1, 3]
    assert batch.offsets.diff().tolist() == [len(files[0]), 0, len(files[2]), 0, len(files[4])]
    assert_same(decode_on_cpu(batch, made), torch_batch(dataset(files, encoded=False)))


def exif_of(*entries: tuple[int, int]) -> bytes:
    """An APP1 segment, big-endian, with short values."""
    directory = struct.pack(">H", len(entries)) + b"".join(
        struct.pack(">HHIHH", tag, 3, 1, value, 0) for tag, value in entries
    )
    body = b"Exif\0\0" + b"MM\0*" + struct.pack(">I", 8) + directory + bytes(4)
    return b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body


def test_the_orientation_is_cleared_in_the_batch_and_not_in_the_source() -> None:
    """torchcodec's nvJPEG decoder would rotate the image."""
    plain = jpegs(1)[0]
    turned = plain[:2] + exif_of((0x0100, 7), (0x0112, 6), (0x0103, 6)) + plain[2:]
    upright = plain[:2] + exif_of((0x0100, 7), (0x0112, 1), (0x0103, 6)) + plain[2:]
    batch = batch_of(dataset([turned, plain, turned]))
    assert [bytes(image.data) for image in batch.images()] == [upright, plain, upright]


@pytest.mark.parametrize("cut", [3, 12, 17, 25, 40])
def test_a_broken_exif_segment_is_left_as_it_is(cut: int) -> None:
    plain = jpegs(1)[0]
    exif = exif_of((0x0112, 6))[:cut]
    broken = np.frombuffer(bytearray(plain[:2] + exif + b"\xff" * (40 - cut) + plain[2:]), np.uint8)
    before = broken.copy()
    clear_orientation(broken)
    assert (broken != before).sum() <= 2
