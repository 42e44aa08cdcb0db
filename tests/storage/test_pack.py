"""Packs: what goes in comes out, in every format and process; what is impossible is refused."""

import io
import multiprocessing
import os
import pickle
import shutil
import threading
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from lightning_feed.errors import ArchiveError, DatasetError, SettingsError
from lightning_feed.storage import PackedDataset, is_pack, pack, verify_pack
from lightning_feed.storage.folder import FolderSource, SampleSource, scan_classes
from lightning_feed.storage.pack_samples import from_bytes, to_bytes
from lightning_feed.storage.splits import Splits

FORMATS = ["lmdb", "hdf5"]


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
        pack(root / "photos", root / format, format=format, workers=0)  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("format", "workers"), [("lmdb", 2), ("lmdb", 0), ("hdf5", 2)])
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
    assert sorted(path.name for path in (tmp_path / "packed" / "all").iterdir()) == ["data", "index.npz"]
    with pytest.raises(IndexError, match="no sample 50 among 50"):
        packed[50]


def test_splits_become_parts(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "birds"
    root.mkdir()
    photos.rename(root / "train")
    (root / "valid" / "würger").mkdir(parents=True)
    (root / "train" / "würger" / "0 ö.jpg").rename(root / "valid" / "würger" / "v.jpg")
    for format in FORMATS:
        pack(root, tmp_path / format, format=format, workers=0)  # type: ignore[arg-type]
        assert contents(PackedDataset(tmp_path / format, "train")) == contents(folder(root / "train"))
        assert PackedDataset(tmp_path / format, "val").labels.tolist() == [1]  # as in training, not 0
    with pytest.raises(SettingsError, match="has no part None"):
        PackedDataset(tmp_path / "lmdb")
    with pytest.raises(SettingsError, match="has no part 'test'"):
        PackedDataset(tmp_path / "lmdb", "test")


def test_larger_images_are_resized_once_and_smaller_ones_kept(made: Path, tmp_path: Path) -> None:
    pack(made / "photos", tmp_path / "packed", short_side=40, workers=0)
    packed = PackedDataset(tmp_path / "packed")
    for (data, _), (before, _) in zip(contents(packed), contents(folder(made / "photos")), strict=True):
        size, size_before = (Image.open(BytesIO(each)).size for each in (data, before))
        if min(size_before) <= 40:
            assert data == before
        else:
            assert min(size) == 40
            assert abs(size[0] / size[1] - size_before[0] / size_before[1]) < 0.05
    assert packed.manifest.options == {"short_side": 40, "quality": 95}


def test_quality_alone_reencodes_every_image_at_its_size(made: Path, tmp_path: Path) -> None:
    pack(made / "photos", tmp_path / "packed", quality=30, workers=0)
    packed, source = PackedDataset(tmp_path / "packed"), folder(made / "photos")
    for (data, _), (before, _) in zip(contents(packed), contents(source), strict=True):
        image, image_before = Image.open(BytesIO(data)), Image.open(BytesIO(before))
        assert (image.format, image.size) == ("JPEG", image_before.size)
        assert len(data) < len(before)


def test_decoded_pixels_are_those_of_the_reference(made: Path, tmp_path: Path) -> None:
    pack(made / "photos", tmp_path / "packed", decoded=True, workers=0, verify=True)
    packed, source = PackedDataset(tmp_path / "packed"), folder(made / "photos")
    for index in range(len(packed)):
        pixels, label = packed[index]
        expected = np.array(Image.open(source.name(index)).convert("RGB"))
        assert (pixels == expected).all()
        assert label == source.labels[index]


@pytest.mark.parametrize("decoded", [False, True])
def test_a_data_module_reads_a_pack_as_it_reads_the_folder(decoded: bool, made: Path, tmp_path: Path) -> None:
    from lightning_feed import ImageFolderDataModule, LoaderSettings

    pack(made / "photos", tmp_path / "packed", decoded=decoded, workers=0)
    batches = []
    for root in (made / "photos", tmp_path / "packed"):
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


def test_names_that_are_no_utf8_and_files_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "odd" / "a").mkdir(parents=True)
    (tmp_path / "odd" / "a" / os.fsdecode(b"\xff.jpg")).write_bytes(b"")
    for format in FORMATS:
        pack(tmp_path / "odd", tmp_path / format, format=format, workers=0, verify=True)  # type: ignore[arg-type]
        packed = PackedDataset(tmp_path / format)
        assert packed[0] == (b"", 0)
        assert packed.name(0).endswith(":a/\udcff.jpg")


@pytest.mark.parametrize("format", FORMATS)
def test_packs_written_by_an_earlier_version_are_read(format: str, tmp_path: Path) -> None:
    """Written before packs were made in LMDB, whatever their format."""
    extract_earlier_packs(tmp_path)
    for split, many in (("train", 3), ("val", 1)):
        packed = PackedDataset(tmp_path / f"files.{format}", split)
        assert contents(packed) == [
            (f"{split} {name} {number}".encode() * 40, label)
            for label, name in enumerate(("cat", "dog"))
            for number in range(many)
        ]
        assert packed.name(0).endswith(f"{split}:cat/0 ö.jpg")
    assert verify_pack(tmp_path / f"samples.{format}") == 3
    for number, sample in enumerate(PackedDataset(tmp_path / f"samples.{format}")[index] for index in range(3)):
        image = torch.full((2, number), number, dtype=torch.bfloat16)
        assert same(sample, {"x": image, "name": f"n{number}", "pair": (b"\0", [None, number / 2])})


def extract_earlier_packs(folder: Path) -> None:
    with zipfile.ZipFile(Path(__file__).with_name("earlier_packs.zip")) as packs:
        packs.extractall(folder)


def test_a_litdata_pack_of_an_earlier_version_is_refused_with_the_way_to_read_it(tmp_path: Path) -> None:
    extract_earlier_packs(tmp_path)
    with pytest.raises(ArchiveError, match=r"is a LitData pack of an earlier version.*litdata\.StreamingDataset"):
        PackedDataset(tmp_path / "files.litdata", "train")


# --- any dataset ------------------------------------------------------------------------------------------------------


class Things(Dataset[Any]):
    """Samples of all that can be packed."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return {
            "image": torch.full((3, index), index, dtype=torch.bfloat16),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(index),
            "strided": torch.arange(12).view(3, 4).t(),
            "array": np.arange(index * 2, dtype=">f4").reshape(2, index),
            "numbers": [np.float64(1.5), np.float32(index / 3), np.int64(3), np.bool_(True)],
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
    from lightning_feed import ImageFolderDataModule

    pack(Things(), tmp_path / "packed", format=format, workers=0, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert len(packed) == 7
    assert all(same(packed[index], Things()[index]) for index in range(7))
    packed[3]["image"].add_(1)  # one's own
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


def test_bytes_that_are_no_sample_are_refused() -> None:
    whole = to_bytes({"x": torch.arange(100)})
    headers = [b'{"tensor": "load", "shape": [1]}', b"[" * 50_000, b'{"tensor": "int64", "shape": [-1, 9]}', b"3"]
    hostile = [len(header).to_bytes(8, "little") + header + bytes(100) for header in headers]
    for data in (b"", whole[:5], whole[:30], whole[:150], *hostile):
        with pytest.raises(ArchiveError, match="not a valid packed sample"):
            from_bytes(data)


# --- processes and threads --------------------------------------------------------------------------------------------


def _read_all(packs: list[PackedDataset], answers: Any) -> None:
    answers.put([[packed.payload(index) for index in range(len(packed))] for packed in packs])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_what_was_opened_here(method: str, made: Path) -> None:
    packs = [PackedDataset(made / format) for format in FORMATS]
    expected = [[packed.payload(index) for index in range(len(packed))] for packed in packs]  # opened in this process
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    process = context.Process(target=_read_all, args=(packs, answers))
    process.start()
    assert answers.get(timeout=120) == expected
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("format", FORMATS)
def test_threads_read_at_the_same_time(format: Any, made: Path) -> None:
    packed, expected = PackedDataset(made / format), contents(folder(made / "photos"))
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


def test_a_pickle_holds_the_path_and_not_the_index(made: Path) -> None:
    packed = PackedDataset(made / "lmdb")
    assert len(pickle.dumps(packed)) < 1000
    assert contents(pickle.loads(pickle.dumps(packed))) == contents(packed)


# --- bad images and refusals ------------------------------------------------------------------------------------------


def test_broken_images_are_left_out_when_asked(photos: Path, tmp_path: Path) -> None:
    broken = photos / "crow black" / "1 ö.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(file, "PNG")
    raw = bytearray(file.getvalue())
    at = raw.index(b"IDAT", raw.index(b"IDAT") + 4)
    raw[at : at + 4] = b"\x00\xff\x01\x02"  # which Pillow calls a SyntaxError
    (photos / "crow black" / "z.png").write_bytes(raw)
    (photos / "würger" / "gone.jpg").symlink_to("nowhere")
    report = pack(photos, tmp_path / "packed", short_side=20, workers=0, on_error="skip", verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert report.samples == len(packed) == 9
    names = ("1 ö.jpg (sample 1)", "z.png (sample 5)", "gone.jpg (sample 11)")
    assert all(name in line for name, line in zip(names, report.skipped, strict=True))
    assert packed.labels.tolist() == [0] * 4 + [1] * 5
    assert packed.name(1).endswith("2 ö.jpg")


def test_a_file_that_is_no_image_is_named_plainly(photos: Path, tmp_path: Path) -> None:
    (photos / "würger" / "9.jpg").write_bytes(b"no image")
    with pytest.raises(ArchiveError, match=r"9\.jpg .* Pillow does not know its format\. Fix the file"):
        pack(photos, tmp_path / "packed", short_side=20, workers=0)


def test_two_folders_of_one_split_are_refused(photos: Path, tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        shutil.copytree(photos / "würger", tmp_path / "root" / name / "würger")
    with pytest.raises(DatasetError, match="has val and valid, which all mean the split 'val'"):
        pack(tmp_path / "root", tmp_path / "packed", workers=0)
    with pytest.raises(DatasetError, match="Rename all but one"):
        Splits().source(tmp_path / "root", "val")


def test_what_is_a_pack(made: Path) -> None:
    assert not is_pack(made / "photos")
    assert is_pack(made / "lmdb")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"format": "zip"}, "format='zip'"),
        ({"format": "litdata"}, r"format='litdata'.*litdata\.optimize"),
        ({"short_side": 0}, "short_side=0"),
        ({"short_side": True}, "short_side=True"),
        ({"quality": 101}, "quality=101"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"workers": -1}, "workers=-1"),
        ({"quality": 80, "decoded": True}, "quality=80 would have no effect"),
        ({"quality": 80, "short_side": 20, "decoded": True}, "quality=80 would have no effect"),
    ],
)
def test_what_is_impossible_is_refused(given: dict[str, Any], words: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        pack(made / "photos", tmp_path / "packed", **given)


def test_what_is_neither_folder_nor_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be packed"):
        pack(3, tmp_path / "packed")
    with pytest.raises(SettingsError, match="for folders of images"):
        pack(Things(), tmp_path / "packed", decoded=True)
