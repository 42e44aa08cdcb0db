"""Packs that are damaged, cut short, replaced or made by a stranger: an error that names them, never wrong data."""

import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_feed.errors import ArchiveError, DatasetError
from lightning_feed.storage import PackedDataset, pack, verify_pack
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packed_dataset import PartIndex

FORMATS = ["lmdb", "hdf5"]


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve files in two classes, and a pack of it in each format."""
    root = tmp_path_factory.mktemp("packs")
    for label, name in enumerate(("cat", "dog")):
        (root / "files" / name).mkdir(parents=True)
        for number in range(6):
            (root / "files" / name / f"{number}.jpg").write_bytes(np.random.default_rng([label, number]).bytes(3000))
    for format in FORMATS:
        pack(root / "files", root / format, format=format, workers=0)  # type: ignore[arg-type]
    return root


@pytest.fixture
def packed(packs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A pack of a format that a test may damage."""

    def copy(format: str) -> Path:
        shutil.copytree(packs / format, tmp_path / format)
        return tmp_path / format

    return copy


def contents(root: Path) -> list[bytes]:
    source = FolderSource(root, scan_classes(root))
    return [source.read(index) for index in range(len(source))]


def as_earlier_versions_wrote_it(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "pack.json").read_text()) | changes
    for name in ("checksum", "indexes"):
        manifest.pop(name, None)
    (path / "pack.json").write_text(json.dumps(manifest))


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_of_a_sample_is_reported_when_it_is_read(
    format: str, earlier: bool, packs: Path, packed: Callable[[str], Path]
) -> None:
    path, samples = packed(format), contents(packs / "files")
    (file,) = [file for file in (path / "all" / "data").iterdir() if samples[7][100:300] in file.read_bytes()]
    flipped(file, file.read_bytes().index(samples[7][100:300]))
    if earlier:
        as_earlier_versions_wrote_it(path)
    found = PackedDataset(path)
    assert [found.read(index) for index in range(7)] == samples[:7]
    with pytest.raises(ArchiveError, match=r"dog/1\.jpg differs from the packed sample") as told:
        found[7]
    assert isinstance(told.value, DatasetError)  # a bad sample, which on_error="skip" leaves out
    with pytest.raises(ArchiveError, match="differs from the packed sample"):
        verify_pack(path)


def test_no_flipped_bit_in_an_index_goes_unseen_or_raises_anything_else(packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    index = path / "all" / "index.npz"
    whole, expected = index.read_bytes(), PartIndex.load(index)
    for at in range(0, len(whole), 31):
        flipped(index, at, at % 8)
        with pytest.raises(ArchiveError, match=r"index\.npz cannot be read"):
            PackedDataset(path)
        index.write_bytes(whole)
    as_earlier_versions_wrote_it(path)
    for at in range(0, len(whole), 31):  # without a digest, what zipfile's checksums let pass
        flipped(index, at, at % 8)
        try:
            found = PackedDataset(path).index
        except ArchiveError:
            continue
        finally:
            index.write_bytes(whole)
        assert (found.labels == expected.labels).all()
        assert (found.checksums == expected.checksums).all()


def test_flipped_bits_in_the_places_of_hdf5_change_nothing(packs: Path, packed: Callable[[str], Path]) -> None:
    h5py = pytest.importorskip("h5py")
    path, samples = packed("hdf5"), contents(packs / "files")
    file = path / "all" / "data" / "data.h5"
    whole = file.read_bytes()
    with h5py.File(file, "r") as opened:
        ends = opened["ends"].id.get_offset()
    for at in range(ends, ends + 8 * 12):
        flipped(file, at, at % 8)
        assert [PackedDataset(path).read(index) for index in range(12)] == samples  # the index tells where they lie
        file.write_bytes(whole)


def test_a_flipped_bit_renames_no_class(packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    manifest = path / "pack.json"
    whole, expected = manifest.read_bytes(), PackedDataset(path).manifest
    for at in range(0, len(whole), 5):
        flipped(manifest, at)
        try:
            assert PackedDataset(path).manifest == expected
        except ArchiveError:
            pass
        finally:
            manifest.write_bytes(whole)
    flipped(manifest, whole.index(b'"cat"') + 1)
    with pytest.raises(ArchiveError, match="its checksum does not match"):
        PackedDataset(path)


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_is_cut_short_before_a_process_opens_it_is_reported(
    format: str, packed: Callable[[str], Path]
) -> None:
    path = packed(format)
    found = PackedDataset(path)
    largest = max((path / "all" / "data").iterdir(), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 5000)
    with pytest.raises(ArchiveError, match=r"cut short|truncated"):
        found.read(11)


def test_a_data_file_that_is_cut_short_is_reported_before_it_is_read(packed: Callable[[str], Path]) -> None:
    for format in FORMATS:
        path = packed(format)
        largest = max((path / "all" / "data").iterdir(), key=lambda path: path.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 1)
        with pytest.raises(ArchiveError, match="cut short or damaged"):
            verify_pack(path)
        largest.unlink()
        with pytest.raises(ArchiveError, match="is missing, cut short or damaged"):
            verify_pack(path)


@pytest.mark.parametrize("file", ["pack.json", "all/index.npz"])
def test_a_manifest_or_index_that_is_cut_short_or_gone_is_reported(file: str, packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    os.truncate(path / file, (path / file).stat().st_size // 2)
    with pytest.raises(ArchiveError, match="cannot be read"):
        PackedDataset(path)
    (path / file).unlink()
    with pytest.raises(ArchiveError, match=r"cannot be read|is not a pack"):
        PackedDataset(path)


def test_another_version_is_reported(packed: Callable[[str], Path]) -> None:
    manifest = packed("lmdb") / "pack.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(ArchiveError, match="a pack of version 9, but only 1 can be read"):
        PackedDataset(manifest.parent)


# --- of a stranger ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"classes": 3},
        {"classes": [1, 2]},
        {"classes": {"cat": 1}},
        {"classes": ["cat"]},
        {"parts": ["all"]},
        {"parts": {}},
        {"parts": {"../all": 12}},
        {"parts": {"all": "12"}},
        {"parts": {"all": -1}},
        {"files": []},
        {"files": {"all/data/data.mdb": "long"}},
        {"kind": "pickles"},
        {"kind": []},
        {"format": ["lmdb"]},
        {"format": {}},
        {"total_bytes": "much"},
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused(change: dict[str, Any], packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    as_earlier_versions_wrote_it(path, **change)
    with pytest.raises(ArchiveError, match=r"pack\.json cannot be read|does not match its index"):
        PackedDataset(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 1}', "1", "\x00", '{"version": ' + "9" * 5000 + "}"])
def test_json_that_is_no_manifest_is_refused(text: str, packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    (path / "pack.json").write_text(text)
    with pytest.raises(ArchiveError):
        PackedDataset(path)


# --- replaced while it is read ----------------------------------------------------------------------------------------


def read_one(found: PackedDataset, answers: Any) -> None:
    try:
        answers.put(found[0])
    except Exception as error:  # noqa: BLE001 - what is asked for
        answers.put(error)


@pytest.mark.parametrize("format", FORMATS)
def test_new_data_never_come_with_old_labels(
    format: str, packs: Path, packed: Callable[[str], Path], tmp_path: Path
) -> None:
    path, samples = packed(format), contents(packs / "files")
    reading = PackedDataset(path)
    assert reading[0] == (samples[0], 0)
    (tmp_path / "other").mkdir()
    shutil.copytree(packs / "files" / "cat", tmp_path / "other" / "dog")
    shutil.copytree(packs / "files" / "dog", tmp_path / "other" / "cat")
    pack(tmp_path / "other", path, format=format, workers=0, force=True)  # type: ignore[arg-type]
    for index in range(12):
        assert reading[index] == (samples[index], index // 6)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    worker = context.Process(target=read_one, args=(reading, answers))
    worker.start()
    answer = answers.get(timeout=120)
    worker.join(60)
    assert isinstance(answer, ArchiveError)
    assert "was replaced during this run" in str(answer)
    with pytest.raises(ArchiveError, match="was replaced during this run"):
        pickle.loads(pickle.dumps(reading))[0]  # as spawned workers get it
    assert PackedDataset(path)[0] == (contents(tmp_path / "other")[0], 0)


def test_the_same_data_packed_again_are_the_same_pack(packs: Path, packed: Callable[[str], Path]) -> None:
    path = packed("lmdb")
    reading = PackedDataset(path)
    pack(packs / "files", path, workers=0, force=True)
    assert pickle.loads(pickle.dumps(reading))[3] == reading[3]


@pytest.mark.parametrize("format", FORMATS)
def test_packs_of_earlier_versions_are_read_as_before(format: str, packs: Path, packed: Callable[[str], Path]) -> None:
    path = packed(format)
    as_earlier_versions_wrote_it(path)
    found = pickle.loads(pickle.dumps(PackedDataset(path)))
    assert [found.read(index) for index in range(12)] == contents(packs / "files")
    assert found.labels.tolist() == [0] * 6 + [1] * 6
