"""Packs that are damaged, cut short or made by a stranger: an error that names them, never another's data."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_feed.errors import ArchiveError, DatasetError
from lightning_feed.storage import PackedDataset, pack, verify_pack
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packed_dataset import DATA_FILES, FORMATS, PartIndex


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve files in two classes, and a pack of it in each format."""
    root = tmp_path_factory.mktemp("packs")
    for label, name in enumerate(("cat", "dog")):
        (root / "files" / name).mkdir(parents=True)
        for number in range(6):
            (root / "files" / name / f"{number}.jpg").write_bytes(np.random.default_rng([label, number]).bytes(3000))
    for format in FORMATS:
        pack(root / "files", root / format, format=format)
    return root


@pytest.fixture
def packed(packs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A pack of a format that a test may damage."""

    def copy(format: str) -> Path:
        shutil.copytree(packs / format, tmp_path / format)
        return tmp_path / format

    return copy


def data_file(path: Path, format: Any) -> Path:
    return path / "all" / DATA_FILES[format]


def contents(root: Path) -> list[bytes]:
    source = FolderSource(root, scan_classes(root))
    return [source.read(index) for index in range(len(source))]


def flipped(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_flipped_bit_of_a_sample_is_reported_by_verify(
    format: str, packs: Path, packed: Callable[[str], Path]
) -> None:
    path = packed(format)
    samples = contents(packs / "files")
    file = data_file(path, format)
    assert verify_pack(path) == 12
    flipped(file, file.read_bytes().index(samples[7][100:300]))
    with pytest.raises(ArchiveError, match=r"dog/1\.jpg differs from the packed sample"):
        verify_pack(path)


def test_a_flipped_bit_in_the_name_of_a_class_is_reported_by_verify(packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    manifest = path / "pack.json"
    flipped(manifest, manifest.read_bytes().index(b'"cat"') + 1)
    with pytest.raises(ArchiveError, match=r"cat/0\.jpg differs from the packed sample"):
        verify_pack(path)


def test_pixels_with_a_damaged_shape_are_reported_as_a_bad_sample(packs: Path, tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.fromarray(np.zeros((5, 7, 3), np.uint8)).save(tmp_path / "photos" / "a" / "1.png")
    pack(tmp_path / "photos", tmp_path / "packed", decoded=True)
    flipped(data_file(tmp_path / "packed", "flat"), 0)
    with pytest.raises(ArchiveError, match=r"a/1\.png cannot be read") as raised:
        PackedDataset(tmp_path / "packed").read(0)
    assert isinstance(raised.value, DatasetError)  # which on_error="skip" leaves out


def test_a_flipped_bit_in_an_index_raises_archive_error_or_changes_nothing(packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    index = path / "all" / "index.npz"
    whole = index.read_bytes()
    expected = PartIndex.load(index, 2)
    for at in range(0, len(whole), 31):
        flipped(index, at, at % 8)
        try:
            found = PartIndex.load(index, 2)
        except ArchiveError:
            continue
        finally:
            index.write_bytes(whole)
        assert (found.labels == expected.labels).all()
        assert (found.ends == expected.ends).all()
        assert (found.checksums == expected.checksums).all()


@pytest.mark.parametrize("format", FORMATS)
def test_a_data_file_that_is_cut_short_or_gone_is_reported(format: str, packed: Callable[[str], Path]) -> None:
    path = packed(format)
    file = data_file(path, format)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ArchiveError, match="cut short or damaged"):
        PackedDataset(path)
    file.unlink()
    with pytest.raises(ArchiveError, match="is missing, cut short or damaged"):
        verify_pack(path)


@pytest.mark.parametrize("format", ["flat", "hdf5"])
def test_a_data_file_cut_short_while_being_read_is_reported(format: str, packed: Callable[[str], Path]) -> None:
    path = packed(format)
    found = PackedDataset(path)
    found.read(0)
    os.truncate(data_file(path, format), 20_000)
    with pytest.raises(ArchiveError, match="cut short"):
        found.read(11)


@pytest.mark.parametrize("file", ["pack.json", "all/index.npz"])
def test_a_manifest_or_index_that_is_cut_short_or_gone_is_reported(file: str, packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    os.truncate(path / file, (path / file).stat().st_size // 2)
    with pytest.raises(ArchiveError, match="cannot be read"):
        PackedDataset(path)
    (path / file).unlink()
    with pytest.raises(ArchiveError, match=r"cannot be read|is not a pack"):
        PackedDataset(path)


def test_a_pack_of_an_unknown_version_is_reported(packed: Callable[[str], Path]) -> None:
    manifest = packed("flat") / "pack.json"
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
        {"format": ["lmdb"]},
        {"format": {}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_hostile_manifest_is_refused(change: dict[str, Any], packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    manifest = json.loads((path / "pack.json").read_text()) | change
    (path / "pack.json").write_text(json.dumps(manifest))
    with pytest.raises(ArchiveError, match=r"cannot be read"):
        PackedDataset(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"version": 1}', "1", "\x00", '{"version": ' + "9" * 5000 + "}"])
def test_json_that_is_not_a_manifest_is_refused(text: str, packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    (path / "pack.json").write_text(text)
    with pytest.raises(ArchiveError):
        PackedDataset(path)


@pytest.mark.parametrize(
    "change",
    [{"ends": [5, 1] * 6}, {"labels": [0] * 11}, {"labels": [0.5] * 12}, {"labels": [7] * 12}, {"ends": [[1] * 12]}],
    ids=str,
)
def test_a_hostile_index_is_refused(change: dict[str, Any], packed: Callable[[str], Path]) -> None:
    path = packed("flat")
    with np.load(path / "all" / "index.npz") as stored:
        arrays = {**stored, **{name: np.array(values) for name, values in change.items()}}
    np.savez(path / "all" / "index.npz", **arrays)
    with pytest.raises(ArchiveError, match=r"index\.npz cannot be read"):
        PackedDataset(path)
