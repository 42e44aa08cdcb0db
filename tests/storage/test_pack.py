"""Packs: what goes in comes out, in every format and process; what is impossible is refused."""

import io
import multiprocessing
import os
import pickle
import shutil
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_feed.errors import ArchiveError, DatasetError, SettingsError
from lightning_feed.storage import PackedDataset, pack
from lightning_feed.storage.folder import FolderSource, SampleSource, is_pack, scan_classes
from lightning_feed.storage.packed_dataset import DATA_FILES, FORMATS
from lightning_feed.storage.splits import Splits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``photos``, ten files in two classes with spaces and umlauts, and a pack of them in each format. Read only."""
    root = tmp_path_factory.mktemp("made")
    rng = np.random.default_rng(0)
    for label, name in enumerate(("crow black", "würger")):
        (root / "photos" / name).mkdir(parents=True)
        for index in range(5):
            pixels = rng.integers(0, 256, (30 + 9 * index, 50 + label, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "photos" / name / f"{index} ö.{'png' if index == 4 else 'jpg'}")
    for format in FORMATS:
        pack(root / "photos", root / format, format=format)
        pack(root / "photos", root / f"{format} pixels", format=format, decoded=True)
    return root


@pytest.fixture
def photos(made: Path, tmp_path: Path) -> Path:
    """A copy of the photos that a test may change."""
    return Path(shutil.copytree(made / "photos", tmp_path / "photos"))


def contents(source: Any) -> list[tuple[bytes, int]]:
    return [(bytes(source.read(i)), int(source.labels[i])) for i in range(len(source))]


def folder(root: Path) -> FolderSource:
    return FolderSource(root, scan_classes(root))


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_packed_files_are_read_back_byte_for_byte(format: Any, photos: Path, tmp_path: Path) -> None:
    for name in range(40):  # more than are read together
        (photos / "crow black" / f"x{name}.jpg").write_bytes(os.urandom(name * 37))
    report = pack(photos, tmp_path / "packed", format=format, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert contents(packed) == contents(folder(photos))
    assert (report.samples, report.total_bytes) == (50, sum(path.stat().st_size for path in photos.rglob("*.*")))
    assert packed.classes == ("crow black", "würger")
    assert packed[-1] == packed[49]
    assert packed.name(44).endswith(":crow black/x9.jpg")
    assert isinstance(packed, SampleSource)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "photos"]
    assert sorted(path.name for path in (tmp_path / "packed" / "all").iterdir()) == [DATA_FILES[format], "index.npz"]
    with pytest.raises(IndexError, match="no sample 50 among 50"):
        packed[50]


@pytest.mark.parametrize("format", FORMATS)
def test_split_folders_become_parts_of_the_pack(format: Any, photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    root.mkdir()
    photos.rename(root / "train")
    (root / "valid" / "würger").mkdir(parents=True)
    (root / "train" / "würger" / "0 ö.jpg").rename(root / "valid" / "würger" / "v.jpg")
    pack(root, tmp_path / "packed", format=format)
    assert contents(PackedDataset(tmp_path / "packed", "train")) == contents(folder(root / "train"))
    assert PackedDataset(tmp_path / "packed", "val").labels.tolist() == [1]  # as in training, not 0
    with pytest.raises(SettingsError, match="has no part None"):
        PackedDataset(tmp_path / "packed")
    with pytest.raises(SettingsError, match="has no part 'test'"):
        PackedDataset(tmp_path / "packed", "test")
    assert Splits().source(tmp_path / "packed", "test") is None


def test_short_side_resizes_larger_images_and_keeps_smaller_ones(made: Path, tmp_path: Path) -> None:
    pack(made / "photos", tmp_path / "packed", short_side=40)
    packed = PackedDataset(tmp_path / "packed")
    for (data, _), (before, _) in zip(contents(packed), contents(folder(made / "photos")), strict=True):
        size, size_before = (Image.open(BytesIO(each)).size for each in (data, before))
        if min(size_before) <= 40:
            assert data == before
        else:
            assert min(size) == 40
            assert abs(size[0] / size[1] - size_before[0] / size_before[1]) < 0.05


@pytest.mark.parametrize("format", FORMATS)
def test_decoded_pixels_equal_those_of_pillow(format: str, made: Path) -> None:
    packed = PackedDataset(made / f"{format} pixels")
    source = folder(made / "photos")
    for index in range(len(packed)):
        pixels, label = packed[index]
        expected = np.array(Image.open(source.name(index)).convert("RGB"))
        assert (pixels == expected).all()
        assert label == source.labels[index]


@pytest.mark.parametrize("name", ["flat", "lmdb", "hdf5", "flat pixels"])
def test_a_data_module_gives_equal_batches_from_a_pack_and_its_folder(name: str, made: Path) -> None:
    from lightning_feed import ImageFolderDataModule, LoaderSettings

    batches = []
    for root in (made / "photos", made / name):
        torch.manual_seed(0)
        module = ImageFolderDataModule(
            root,
            batch_size=3,
            image_size=24,
            val_fraction=0.3,
            decoder="pillow",
            loader=LoaderSettings(num_workers=2, seed=0),
        )
        loaders = (module.train_dataloader(), module.val_dataloader())
        batches.append([(images.clone(), labels.clone()) for loader in loaders for images, labels in loader])
        assert module.classes == ("crow black", "würger")
    for ours, theirs in zip(*batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("format", FORMATS)
def test_files_that_are_empty_or_have_non_utf8_names_are_packed(format: Any, tmp_path: Path) -> None:
    (tmp_path / "odd" / "a").mkdir(parents=True)
    (tmp_path / "odd" / "a" / os.fsdecode(b"\xff.jpg")).write_bytes(b"")
    pack(tmp_path / "odd", tmp_path / "packed", format=format, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert packed[0] == (b"", 0)
    assert packed.name(0).endswith(r":a/\xff.jpg") or packed.name(0).endswith(":a/\udcff.jpg")


# --- processes and threads --------------------------------------------------------------------------------------------


def _read_all(packs: list[PackedDataset], answers: Any) -> None:
    answers.put([contents(packed) for packed in packs])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_pack_can_be_read_in_other_processes(method: str, made: Path) -> None:
    packs = [PackedDataset(made / f"{format}{kind}") for format in FORMATS for kind in ("", " pixels")]
    expected = [contents(packed) for packed in packs]  # opened in this process
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_read_all, args=(packs, answers))
    process.start()
    assert answers.get(timeout=120) == expected
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("format", FORMATS)
def test_threads_can_read_one_pack_concurrently(format: Any, made: Path) -> None:
    packed = PackedDataset(made / format)
    expected = contents(folder(made / "photos"))
    wrong: list[Any] = []

    def read(first: int) -> None:
        try:
            for step in range(100):
                index = (first + step) % len(packed)
                if packed.read(index) != expected[index][0]:
                    wrong.append(index)
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_pickled_pack_holds_its_path_but_not_its_index(made: Path) -> None:
    packed = PackedDataset(made / "flat")
    assert len(pickle.dumps(packed)) < 1000
    assert contents(pickle.loads(pickle.dumps(packed))) == contents(packed)


# --- bad images and refusals ------------------------------------------------------------------------------------------


def test_broken_images_are_left_out_with_on_error_skip(photos: Path, tmp_path: Path) -> None:
    broken = photos / "crow black" / "1 ö.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(file, "PNG")
    raw = bytearray(file.getvalue())
    at = raw.index(b"IDAT", raw.index(b"IDAT") + 4)
    raw[at : at + 4] = b"\x00\xff\x01\x02"  # which Pillow calls a SyntaxError
    (photos / "crow black" / "z.png").write_bytes(raw)
    (photos / "würger" / "gone.jpg").symlink_to("nowhere")
    report = pack(photos, tmp_path / "packed", short_side=20, on_error="skip", verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert report.samples == len(packed) == 9
    names = ("1 ö.jpg (sample 1)", "z.png (sample 5)", "gone.jpg (sample 11)")
    assert all(name in line for name, line in zip(names, report.skipped, strict=True))
    assert packed.labels.tolist() == [0] * 4 + [1] * 5
    assert packed.name(1).endswith("2 ö.jpg")


def test_a_file_that_is_not_an_image_is_reported_by_name(photos: Path, tmp_path: Path) -> None:
    (photos / "würger" / "9.jpg").write_bytes(b"no image")
    with pytest.raises(ArchiveError, match=r"9\.jpg .* Pillow does not know its format\. Fix the file"):
        pack(photos, tmp_path / "packed", short_side=20)


def test_two_folders_of_one_split_are_refused(photos: Path, tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        shutil.copytree(photos / "würger", tmp_path / "root" / name / "würger")
    with pytest.raises(DatasetError, match="has val and valid, which all mean the split 'val'"):
        pack(tmp_path / "root", tmp_path / "packed")
    with pytest.raises(DatasetError, match="Rename all but one"):
        Splits().source(tmp_path / "root", "val")


def test_is_pack_tells_a_pack_from_an_image_folder(made: Path) -> None:
    assert not is_pack(made / "photos")
    assert is_pack(made / "flat")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "zip"}, "format='zip'"),
        ({"short_side": 0}, "short_side=0"),
        ({"short_side": True}, "short_side=True"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_invalid_pack_options_are_refused(given: dict[str, Any], words: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        pack(made / "photos", tmp_path / "packed", **given)
