"""Packs: what goes in comes out, in every format and process; a kill, a full disk and damage lose nothing unseen."""

import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.archive import PackedDataset, is_pack, pack, packing, verify_pack
from lightning_feed.archive.folder_index import scan_classes
from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.pack_sample import from_bytes, to_bytes
from lightning_feed.archive.pack_samples import Payloads
from lightning_feed.archive.pack_spool import RECORD, Spool
from lightning_feed.archive.source import SampleSource
from lightning_feed.archive.splits import Splits
from lightning_feed.errors import ArchiveError, DatasetError, SettingsError

FORMATS = ["lmdb", "hdf5", "litdata"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:litdata.*")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten files in two classes: names with spaces and umlauts, a PNG, sizes from nothing to some kB."""
    root = tmp_path / "photos"
    rng = np.random.default_rng(0)
    for label, name in enumerate(("crow black", "würger")):
        (root / name).mkdir(parents=True)
        for index in range(5):
            pixels = rng.integers(0, 256, (30 + 9 * index, 50 + label, 3), dtype=np.uint8)
            suffix = "png" if index == 4 else "jpg"
            Image.fromarray(pixels).save(root / name / f"{index} ö.{suffix}")
    return root


def contents(source: Any) -> list[tuple[bytes, int]]:
    return [(bytes(source.read(i)), int(source.labels[i])) for i in range(len(source))]


def folder(root: Path) -> FolderSource:
    return FolderSource(root, scan_classes(root))


# --- round trip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_files_come_out_as_they_went_in(format: Any, workers: int, photos: Path, tmp_path: Path) -> None:
    for name in range(40):  # enough for two workers
        (photos / "crow black" / f"x{name}.jpg").write_bytes(os.urandom(name * 37))
    report = pack(photos, tmp_path / "packed", format=format, workers=workers, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert contents(packed) == contents(folder(photos))
    assert (report.samples, report.total_bytes) == (50, sum(path.stat().st_size for path in photos.rglob("*.*")))
    assert packed.classes == ("crow black", "würger")
    assert packed[-1] == packed[49]
    assert packed.name(44).endswith(":crow black/x9.jpg")
    assert isinstance(packed, SampleSource)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packed", "photos"]
    with pytest.raises(IndexError, match="no sample 50 among 50"):
        packed[50]


@pytest.mark.parametrize("format", FORMATS)
def test_splits_become_parts(format: Any, photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    root.mkdir()
    photos.rename(root / "train")
    (root / "valid" / "würger").mkdir(parents=True)
    (root / "train" / "würger" / "0 ö.jpg").rename(root / "valid" / "würger" / "v.jpg")
    pack(root, tmp_path / "packed", format=format, workers=0)
    assert contents(PackedDataset(tmp_path / "packed", "train")) == contents(folder(root / "train"))
    assert PackedDataset(tmp_path / "packed", "val").labels.tolist() == [1]  # as in training, not 0
    with pytest.raises(SettingsError, match="has the parts 'train', 'val'"):
        PackedDataset(tmp_path / "packed")
    with pytest.raises(SettingsError, match="has no part 'test'"):
        PackedDataset(tmp_path / "packed", "test")


def test_larger_images_are_resized_once_and_smaller_ones_kept(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", short_side=40, workers=0)
    packed = PackedDataset(tmp_path / "packed")
    for (data, _), (before, _) in zip(contents(packed), contents(folder(photos)), strict=True):
        size, size_before = (Image.open(BytesIO(each)).size for each in (data, before))
        if min(size_before) <= 40:
            assert data == before
        else:
            assert min(size) == 40
            assert abs(size[0] / size[1] - size_before[0] / size_before[1]) < 0.05


def test_quality_alone_writes_every_image_anew_at_its_size(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", quality=30, workers=0)
    packed, source = PackedDataset(tmp_path / "packed"), folder(photos)
    for (data, _), (before, _) in zip(contents(packed), contents(source), strict=True):
        image, image_before = Image.open(BytesIO(data)), Image.open(BytesIO(before))
        assert (image.format, image.size) == ("JPEG", image_before.size)
        assert len(data) < len(before)


def test_two_folders_of_one_split_are_refused(photos: Path, tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        (tmp_path / "root" / name).mkdir(parents=True)
        shutil.copytree(photos / "würger", tmp_path / "root" / name / "würger")
    with pytest.raises(DatasetError, match="has val and valid, which all mean the split 'val'"):
        pack(tmp_path / "root", tmp_path / "packed", workers=0)
    with pytest.raises(DatasetError, match="Rename or move all but one"):
        Splits().source(tmp_path / "root", "val")


def test_a_file_that_is_no_image_is_named_plainly(photos: Path, tmp_path: Path) -> None:
    (photos / "würger" / "9.jpg").write_bytes(b"no image")
    with pytest.raises(ArchiveError, match=r"9\.jpg .* it is of no format that Pillow knows\. What is packed"):
        pack(photos, tmp_path / "packed", short_side=20, workers=0)


def test_decoded_pixels_are_those_of_the_reference(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", decoded=True, workers=0, verify=True)
    packed, source = PackedDataset(tmp_path / "packed"), folder(photos)
    for index in range(len(packed)):
        pixels, label = packed[index]
        expected = np.array(Image.open(source.name(index)).convert("RGB"))
        assert (pixels == expected).all()
        assert label == source.labels[index]


@pytest.mark.parametrize("decoded", [False, True])
def test_a_data_module_reads_a_pack_as_it_reads_the_folder(decoded: bool, photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", decoded=decoded, workers=0)
    batches = []
    for root in (photos, tmp_path / "packed"):
        module = ImageFolderDataModule(
            root,
            batch_size=3,
            image_size=24,
            val_fraction=0.3,
            decoder="pillow",
            loader=LoaderSettings(num_workers=2, seed=0),
        )
        batches.append([(images.clone(), labels.clone()) for images, labels in module.val_dataloader()])
        assert module.classes == ("crow black", "würger")
    for ours, theirs in zip(*batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# --- any dataset ------------------------------------------------------------------------------------------------------


class Things(Dataset[Any]):
    """Samples of all that can be packed."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {
            "picture": torch.full((3, index), index, dtype=torch.bfloat16),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(index),
            "strided": torch.arange(12).view(3, 4).t(),
            "array": np.arange(index * 2, dtype=">f4").reshape(2, index),
            "number": np.float32(index / 3),
            "plain": [index, index / 7, f"näme {index}", None, True, b"\x00\xff"],
            "pair": (torch.tensor([True, False]), {"deep": [torch.ones(2, dtype=torch.complex64)]}),
        }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize("format", FORMATS)
def test_samples_of_a_dataset_come_out_as_they_went_in(format: Any, tmp_path: Path) -> None:
    pack(Things(), tmp_path / "packed", format=format, workers=0, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert len(packed) == 7
    assert all(same(packed[index], Things()[index]) for index in range(7))
    packed[3]["picture"].add_(1)  # one's own
    with pytest.raises(DatasetError, match="a pack of samples, not of images"):
        ImageFolderDataModule(tmp_path / "packed").dataset("train")


@pytest.mark.parametrize(
    ("sample", "place"),
    [
        ({"x": object()}, r"sample\['x'\] is a object"),
        ([1, {2: 3}], r"sample\[1\] is a dict"),
        ({1, 2}, "sample is a set"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_place(sample: Any, place: str) -> None:
    with pytest.raises(DatasetError, match=place):
        to_bytes(sample)


@pytest.mark.parametrize("cut", [0, 5, 30, 150])
def test_bytes_that_are_no_sample_are_refused(cut: int) -> None:
    with pytest.raises(ArchiveError, match="no packed sample"):
        from_bytes(to_bytes({"x": torch.arange(100)})[:cut])


# --- processes and threads --------------------------------------------------------------------------------------------


def _read_all(packed: PackedDataset, answers: Any) -> None:
    answers.put([packed.payload(index) for index in range(len(packed))])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes_read_what_was_opened_here(format: Any, method: str, photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", format=format, workers=0)
    packed = PackedDataset(tmp_path / "packed")
    expected = [packed.payload(index) for index in range(len(packed))]  # opened in this process
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_read_all, args=(packed, answers))
    process.start()
    assert answers.get(timeout=120) == expected
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("format", FORMATS)
def test_threads_read_at_the_same_time(format: Any, photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", format=format, workers=0)
    packed, expected = PackedDataset(tmp_path / "packed"), contents(folder(photos))
    wrong: list[Any] = []

    def read(first: int) -> None:
        try:
            for step in range(100):
                index = (first + step) % len(packed)
                if packed.payload(index) != expected[index][0]:
                    wrong.append(index)
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            wrong.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_pickle_holds_the_path_and_not_the_index(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", workers=0)
    packed = PackedDataset(tmp_path / "packed")
    assert len(pickle.dumps(packed)) < 1000
    assert contents(pickle.loads(pickle.dumps(packed))) == contents(packed)


# --- broken off -------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from lightning_feed.archive import pack
from lightning_feed.archive.pack_samples import Payloads
original = Payloads.__getitem__
def get(self, index):
    if index == 29:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, index)
Payloads._payload_before, Payloads.__getitem__ = original, get
from lightning_feed.archive import packing
packing._check_room = lambda *others: None  # it reads samples, too
pack(sys.argv[1], sys.argv[2], format=sys.argv[3], workers=0)
"""


@pytest.mark.parametrize("format", FORMATS)
def test_a_killed_pack_is_gone_on_with(
    format: Any, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(40):
        (photos / "crow black" / f"x{name:02}.jpg").write_bytes(os.urandom(20_000))
    killed = subprocess.run([sys.executable, "-c", KILLED, str(photos), str(tmp_path / "packed"), format], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "packed").exists()
    read: list[int] = []
    original = Payloads.__getitem__
    monkeypatch.setattr(Payloads, "__getitem__", lambda self, index: read.append(index) or original(self, index))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)
    report = pack(photos, tmp_path / "packed", format=format, workers=0, verify=True)
    assert report.resumed_at == 16  # whole hand-overs of a worker
    assert read == list(range(16, 50))
    assert contents(PackedDataset(tmp_path / "packed")) == contents(folder(photos))


def test_a_pack_of_something_else_is_begun_anew(photos: Path, tmp_path: Path) -> None:
    (photos / "würger" / "zz.jpg").write_text("no image")
    with pytest.raises(ArchiveError, match=r"zz\.jpg \(sample 10\) is not an image.*--on-error skip"):
        pack(photos, tmp_path / "packed", short_side=20, workers=0)
    (photos / "würger" / "zz.jpg").unlink()
    assert pack(photos, tmp_path / "packed", short_side=20, workers=0).resumed_at == 0


@pytest.mark.parametrize("cut", [1, 20, 1000, 3000])
def test_a_spool_that_was_cut_goes_on_after_its_last_whole_payload(cut: int, tmp_path: Path) -> None:
    payloads = [bytes([number]) * (number * 100) for number in range(10)]
    spool = Spool(tmp_path)
    for payload in payloads:
        spool.append(payload, 0)
    spool.close()
    file = tmp_path / "payloads"
    os.truncate(file, file.stat().st_size - cut)
    again = Spool(tmp_path)
    assert again.done < 10
    for payload in payloads[again.done :]:
        again.append(payload, 0)
    again.close()
    assert list(again.payloads()) == payloads
    os.truncate(tmp_path / "records", RECORD.itemsize * 4 + 3)
    last = Spool(tmp_path)
    last.close()
    assert last.done == 4


def test_broken_images_are_left_out_when_asked(photos: Path, tmp_path: Path) -> None:
    broken = photos / "crow black" / "1 ö.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    report = pack(photos, tmp_path / "packed", short_side=20, workers=0, on_error="skip", verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert report.samples == len(packed) == 9
    assert "1 ö.jpg (sample 1)" in report.skipped[0]
    assert packed.labels.tolist() == [0] * 4 + [1] * 5
    assert packed.name(1).endswith("2 ö.jpg")


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_no_room_is_told_before_anything_is_written(photos: Path, small_disk: Path) -> None:
    for name in range(5):
        (photos / "würger" / f"z{name}.jpg").write_bytes(os.urandom(1_000_000))
    with pytest.raises(ArchiveError, match=r"Packing needs about 0\.01 GB .* and 0\.00 GB are free"):
        pack(photos, small_disk / "packed", workers=0)
    assert not list(small_disk.rglob("payloads"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_is_told_and_the_pack_gone_on_with(
    format: Any, photos: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in range(20):
        (photos / "würger" / f"z{name:02}.jpg").write_bytes(os.urandom(75_000))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_300_000))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # the room went after it was looked at
    with pytest.raises(ArchiveError, match=r"is full\. What is packed so far is kept"):
        pack(photos, small_disk / "packed", format=format, workers=0)
    assert not (small_disk / "packed").exists()
    ballast.unlink()
    assert pack(photos, small_disk / "packed", format=format, workers=0, verify=True).samples == 30
    assert contents(PackedDataset(small_disk / "packed")) == contents(folder(photos))


# --- not over what is there, not two at once --------------------------------------------------------------------------


def test_nothing_is_replaced_unasked_and_only_packs_at_all(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", workers=0)
    with pytest.raises(ArchiveError, match=r"exists. Give another DEST, or --force"):
        pack(photos, tmp_path / "packed", workers=0)
    (photos / "würger" / "0 ö.jpg").unlink()
    assert pack(photos, tmp_path / "packed", workers=0, force=True).samples == 9
    assert len(PackedDataset(tmp_path / "packed")) == 9
    for other in (tmp_path / "folder", tmp_path / "file"):
        other.mkdir() if other.name == "folder" else other.write_text("mine")
        with pytest.raises(ArchiveError, match="is no pack, so it is not replaced"):
            pack(photos, other, workers=0, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "packed", "photos"]


def test_two_do_not_pack_to_one_place(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing._check_room

    def meanwhile(*others: Any) -> None:
        monkeypatch.setattr(packing, "_check_room", original)
        with pytest.raises(ArchiveError, match="Another process is packing"):
            pack(photos, tmp_path / "packed", workers=0)

    monkeypatch.setattr(packing, "_check_room", meanwhile)
    assert pack(photos, tmp_path / "packed", workers=0, verify=True).samples == 10


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_byte_is_found(format: Any, photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", format=format, workers=0)
    assert verify_pack(tmp_path / "packed") == 10
    payload = PackedDataset(tmp_path / "packed").payload(7)
    (file,) = [
        path for path in (tmp_path / "packed" / "all" / "data").iterdir() if payload[100:300] in path.read_bytes()
    ]
    data = bytearray(file.read_bytes())
    data[bytes(data).index(payload[100:300])] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArchiveError, match=r"sample 7 of 'all' \(.*2 ö\.jpg\) is not what was packed"):
        verify_pack(tmp_path / "packed")


@pytest.mark.parametrize("format", FORMATS)
def test_a_data_file_cut_short_is_an_error_and_not_the_end_of_the_process(
    format: Any, photos: Path, tmp_path: Path
) -> None:
    pack(photos, tmp_path / "packed", format=format, workers=0)
    largest = max((tmp_path / "packed" / "all" / "data").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    read = (
        "import sys; from lightning_feed.archive import PackedDataset; packed = PackedDataset(sys.argv[1]); "
        "[packed.payload(index) for index in range(10)]"
    )
    done = subprocess.run(
        [sys.executable, "-c", read, str(tmp_path / "packed")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Error" in done.stderr


@pytest.mark.parametrize("file", ["pack.json", "all/index.npz"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_index_is_told(file: str, damage: str, photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", workers=0)
    path = tmp_path / "packed" / file
    if damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    with pytest.raises(ArchiveError, match=r"cannot be read|is no pack"):
        PackedDataset(tmp_path / "packed")


def test_another_version_is_told(photos: Path, tmp_path: Path) -> None:
    pack(photos, tmp_path / "packed", workers=0)
    manifest = tmp_path / "packed" / "pack.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ArchiveError, match="a pack of version 9, and this lightning_feed reads version 1"):
        PackedDataset(tmp_path / "packed")


def test_what_is_a_pack(photos: Path, tmp_path: Path) -> None:
    assert not is_pack(photos)
    pack(photos, tmp_path / "packed", workers=0)
    assert is_pack(tmp_path / "packed")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "zip"}, "format='zip'"),
        ({"short_side": 0}, "short_side=0"),
        ({"quality": 101}, "quality=101"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
    ],
)
def test_what_is_impossible_is_refused(given: dict[str, Any], words: str, photos: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        pack(photos, tmp_path / "packed", **given)
    with pytest.raises(SettingsError, match="cannot be packed"):
        pack(3, tmp_path / "packed")
    with pytest.raises(SettingsError, match="for folders of images"):
        pack(Things(), tmp_path / "packed", decoded=True)
