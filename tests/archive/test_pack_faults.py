"""Packs when things go wrong around them: kills, changes between two calls, others at the same place, odd files."""

import io
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lightning_feed.archive import PackedDataset, pack, packing
from lightning_feed.archive.pack_sample import from_bytes, to_bytes
from lightning_feed.archive.splits import Splits
from lightning_feed.errors import ArchiveError, SettingsError

FORMATS = ["lmdb", "hdf5", "litdata"]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:litdata.*")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Sixty files of 50 kB in two classes; not images, which is nothing to a pack that keeps bytes."""
    root = tmp_path / "files"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number in range(30):
            (root / name / f"{number:02}.jpg").write_bytes(np.random.default_rng([ord(name), number]).bytes(50_000))
    return root


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (30, 40), (number, 0, 0)).save(root / "a" / f"{number:02}.jpg")
    return root


def broken_off(source: Any, dest: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """A pack that ends after 16 samples."""
    taken = packing._payloads

    def some(part: Any, first: int, workers: Any) -> Any:
        for number, payload in enumerate(taken(part, first, workers)):
            if number == 16:
                raise KeyboardInterrupt
            yield payload

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_payloads", some)
        with pytest.raises(KeyboardInterrupt):
            pack(source, dest, workers=0, **options)


# --- going on ---------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from lightning_feed.archive import pack, pack_spool
append = pack_spool.Spool.append
def killing(self, *payload):
    append(self, *payload)
    if self.done == 17:
        os.kill(os.getpid(), signal.SIGKILL)
pack_spool.Spool.append = killing
pack(sys.argv[1], sys.argv[2], workers=2)
"""


def test_workers_of_a_killed_pack_end_and_do_not_hold_its_lock(files: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(files), str(tmp_path / "packed")], pass_fds=[writing], start_new_session=True
    )
    os.close(writing)
    assert killed.wait(120) == -signal.SIGKILL
    assert pack(files, tmp_path / "packed", workers=0, verify=True).resumed_at == 16
    assert os.read(reading, 1) == b""  # once the last process that holds the other end is gone
    os.close(reading)


def test_what_changed_in_the_source_is_packed_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(images, tmp_path / "packed", monkeypatch)
    stamp = (images / "a" / "05.jpg").stat().st_mtime_ns
    (images / "a" / "05.jpg").write_bytes(b"another")
    os.utime(images / "a" / "05.jpg", ns=(stamp, stamp))  # as a copy that keeps times would
    assert pack(images, tmp_path / "packed", workers=0).resumed_at == 5
    assert PackedDataset(tmp_path / "packed").read(5) == b"another"


class Numbers:
    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"value": self.value}


def test_two_datasets_of_one_class_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(Numbers(1), tmp_path / "packed", monkeypatch)
    assert pack(Numbers(2), tmp_path / "packed", workers=0).resumed_at == 0
    assert [PackedDataset(tmp_path / "packed")[index]["value"] for index in range(30)] == [2] * 30


def test_a_pack_that_was_killed_while_it_was_renamed_is_not_done_again(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *others: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack(files, tmp_path / "packed", workers=0)
    assert pack(files, tmp_path / "packed", workers=0, verify=True).resumed_at == 60
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == ["all", "pack.json"]


def test_reasons_are_told_once(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (images / "a" / "03.jpg").write_text("no image")
    (images / "a" / os.fsdecode(b"\xff.jpg")).write_text("no image either")
    broken_off(images, tmp_path / "packed", monkeypatch, decoded=True, on_error="skip")
    with (tmp_path / "packed.partial/all/spool/skipped.txt").open("a") as reasons:
        reasons.write("of a sample whose record was lost in the kill\n")
    report = pack(images, tmp_path / "packed", workers=0, decoded=True, on_error="skip")
    assert [("03.jpg" in line, r"\xff.jpg" in line) for line in report.skipped] == [(True, False), (False, True)]
    assert report.samples == 19


# --- others at the same place -----------------------------------------------------------------------------------------


def test_a_folder_of_someone_elses_is_not_emptied(files: Path, tmp_path: Path) -> None:
    (tmp_path / "packed.partial").mkdir()
    (tmp_path / "packed.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArchiveError, match=r"holds 'thesis\.txt', which is not of a pack in the making"):
        pack(files, tmp_path / "packed", workers=0)
    assert (tmp_path / "packed.partial" / "thesis.txt").read_text() == "years of work"


def test_a_pack_that_appeared_meanwhile_is_not_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = packing._parts_of

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(packing, "_parts_of", listed)
        pack(files, tmp_path / "packed", workers=0)
        return listed(*given)

    monkeypatch.setattr(packing, "_parts_of", slowly)
    with pytest.raises(ArchiveError, match=r"packed exists\. Give another DEST"):
        pack(files, tmp_path / "packed", workers=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "packed"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_replaced_pack_is_read_anew_while_the_old_one_is_open(format: Any, images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "packed", format=format, workers=0)
    old = PackedDataset(tmp_path / "packed")
    before = old.read(0)
    (images / "a" / "00.jpg").write_bytes(b"another")
    pack(images, tmp_path / "packed", format=format, workers=0, force=True, verify=True)
    assert PackedDataset(tmp_path / "packed").read(0) == b"another"
    if format != "litdata":  # which opens chunks by name
        assert old.read(0) == before


class Moving:
    """A place that moves when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def current(self) -> Path:
        return self.path


@pytest.mark.parametrize("format", FORMATS)
def test_a_pack_is_read_from_its_copy_once_that_is_complete(format: Any, images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "packed", format=format, workers=0)
    place = Moving(tmp_path / "packed")
    source = Splits(val_fraction=0).source(place, "train")
    assert source is not None
    before = [source.read(index) for index in range(20)]
    subprocess.run(["cp", "-r", tmp_path / "packed", tmp_path / "copy"], check=True)
    subprocess.run(["rm", "-r", tmp_path / "packed"], check=True)
    place.path = tmp_path / "copy"
    assert [source.read(index) for index in range(20)] == before
    assert [pickle.loads(pickle.dumps(source)).read(index) for index in range(20)] == before


# --- odd files and values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_names_that_are_no_utf8_and_files_of_nothing(format: Any, tmp_path: Path) -> None:
    (tmp_path / "odd" / "a").mkdir(parents=True)
    (tmp_path / "odd" / "a" / os.fsdecode(b"\xff.jpg")).write_bytes(b"")
    pack(tmp_path / "odd", tmp_path / "packed", format=format, workers=0, verify=True)
    packed = PackedDataset(tmp_path / "packed")
    assert packed[0] == (b"", 0)
    assert packed.name(0).endswith(":a/\udcff.jpg")


def test_a_png_that_pillow_calls_a_syntax_error_is_left_out(images: Path, tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)).save(file, "PNG")
    raw = bytearray(file.getvalue())
    at = raw.index(b"IDAT", raw.index(b"IDAT") + 4)
    raw[at : at + 4] = b"\x00\xff\x01\x02"
    (images / "a" / "z.png").write_bytes(raw)
    report = pack(images, tmp_path / "packed", decoded=True, workers=0, on_error="skip")
    assert (report.samples, len(report.skipped)) == (20, 1)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_data_file_is_told_before_it_is_read(format: Any, damage: str, images: Path, tmp_path: Path) -> None:
    pack(images, tmp_path / "packed", format=format, workers=0)
    largest = max((tmp_path / "packed" / "all" / "data").iterdir(), key=lambda path: path.stat().st_size)
    if damage == "cut":
        os.truncate(largest, largest.stat().st_size - 1)
    else:
        largest.unlink()
    with pytest.raises(ArchiveError, match=r"cut short or damaged|No such file"):
        PackedDataset(tmp_path / "packed")


def test_litdata_alone_gives_the_label(files: Path, tmp_path: Path) -> None:
    litdata = pytest.importorskip("litdata")
    pack(files, tmp_path / "packed", format="litdata", workers=0)
    stream = litdata.StreamingDataset(str(tmp_path / "packed" / "all" / "data"))
    assert [stream[index]["label"] for index in (0, 29, 30, 59)] == [0, 0, 1, 1]
    assert bytes(stream[31]["data"]) == (files / "b" / "01.jpg").read_bytes()


@pytest.mark.parametrize("value", [np.float64(1.5), np.float32(1.5), np.int64(3), np.bool_(True)])
def test_numbers_of_numpy_stay_such(value: Any) -> None:
    found = from_bytes(to_bytes(value))
    assert type(found) is type(value)
    assert found == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": -1}, "workers=-1"),
        ({"quality": 80, "decoded": True}, "quality=80 .* would have no effect"),
        ({"quality": 80, "short_side": 20, "decoded": True}, "quality=80 .* would have no effect"),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, Any], words: str, images: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=words):
        pack(images, tmp_path / "packed", **given)
