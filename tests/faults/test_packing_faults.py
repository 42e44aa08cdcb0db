"""Packing that is interrupted, and with others in the way: kills, full disks, planted links, writers."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import PackedDataset, pack, packing
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packing import PartWriter
from lightning_feed.storage.splits import Splits

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Forty files in two classes."""
    root = tmp_path / "files"
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(20):
            (root / name / f"{number:02}.jpg").write_bytes(np.random.default_rng([label, number]).bytes(20_000))
    return root


def right(packed: Path, files: Path) -> bool:
    source, found = FolderSource(files, scan_classes(files)), PackedDataset(packed)
    return [found[index] for index in range(len(found))] == [
        (source.read(index), source.labels[index]) for index in range(len(source))
    ]


def killed(work: Callable[[], Any]) -> None:
    """Do the work in a process that kills itself in it."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- interrupted ------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from lightning_feed.storage import packing
from lightning_feed.storage.packing import PartWriter
packing._WRITTEN_BYTES = 16 * 20_000
append = PartWriter.append
def killing(self, payloads):
    append(self, payloads)
    os.kill(os.getpid(), signal.SIGKILL)
PartWriter.append = killing
packing.pack(sys.argv[1], sys.argv[2], format=sys.argv[3], workers=2)
"""


@pytest.mark.parametrize("format", ["lmdb", "hdf5"])
def test_a_killed_pack_begins_again_and_its_workers_end(format: Any, files: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", KILLED, str(files), str(tmp_path / "x.pack"), format]
    process = subprocess.Popen(command, pass_fds=[writing], start_new_session=True)
    os.close(writing)
    assert process.wait(120) == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.pack.partial", "files"]
    assert os.read(reading, 1) == b""  # once the last process that holds the other end is gone
    os.close(reading)
    (files / "dog" / "99.jpg").write_bytes(b"new")
    pack(files, tmp_path / "x.pack", format=format, workers=0, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "x.pack"]
    assert right(tmp_path / "x.pack", files)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArchiveError])
def test_a_pack_that_is_broken_off_leaves_nothing(
    error: type[BaseException], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("now")

    monkeypatch.setattr(PartWriter, "finish", fail)
    with pytest.raises(error):
        pack(files, tmp_path / "x.pack", workers=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]


def test_what_an_earlier_version_broke_off_is_left_alone_with_a_sentence(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.pack.partial").mkdir()
    (tmp_path / "x.pack.partial" / "plan.json").write_text("...")
    pack(files, tmp_path / "x.pack", workers=0)
    assert "x.pack.partial was left by an earlier version, and is not resumed. Remove it." in caplog.text
    assert (tmp_path / "x.pack.partial" / "plan.json").exists()


# --- another user's folder --------------------------------------------------------------------------------------------


def planted(tmp_path: Path, kind: str) -> Path:
    """What stands in the place of the folder that a pack is made in."""
    partial = tmp_path / ".x.pack.partial"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        partial.symlink_to(tmp_path / "elsewhere")
        return tmp_path / "elsewhere"
    partial.mkdir(mode=0o700)
    (partial / "thesis.txt").write_text("years of work")
    if kind == "open":
        partial.chmod(0o777)
    else:
        os.chown(partial, NOBODY, NOBODY)
    return partial


@pytest.mark.parametrize("kind", ["link", "open", pytest.param("foreign", marks=as_root)])
def test_a_folder_that_others_may_have_made_is_not_packed_to(kind: str, files: Path, tmp_path: Path) -> None:
    place = planted(tmp_path, kind)
    before = sorted(place.iterdir())
    with pytest.raises(
        ArchiveError, match=r"x\.pack\.partial cannot be made .*(is not a folder|another user|others may)"
    ):
        pack(files, tmp_path / "x.pack", workers=0)
    assert sorted(place.iterdir()) == before


def test_links_in_what_a_killed_pack_left_are_not_followed(files: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    data = tmp_path / ".x.pack.partial" / "all" / "data"
    data.mkdir(parents=True)
    (tmp_path / ".x.pack.partial").chmod(0o700)
    (data / "data.mdb").symlink_to(victim)
    (data.parents[1] / "pack.json").symlink_to(victim)
    pack(files, tmp_path / "x.pack", workers=0)
    assert victim.read_text() == "years of work"
    assert right(tmp_path / "x.pack", files)


def test_nobody_else_reads_or_writes_a_pack_in_the_making(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes, append = list[int](), PartWriter.append
    partial = tmp_path / ".x.pack.partial"

    def note(writer: PartWriter, payloads: Any) -> None:
        modes.append(stat.S_IMODE(partial.stat().st_mode))
        append(writer, payloads)

    monkeypatch.setattr(PartWriter, "append", note)
    pack(files, tmp_path / "x.pack", workers=0)
    assert modes == [0o700]
    assert (tmp_path / "x.pack").stat().st_mode == files.stat().st_mode  # as the umask has it


@as_root
def test_a_pack_in_a_folder_of_a_group_is_of_that_group(files: Path, tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    os.chown(tmp_path / "team", 0, NOBODY)
    (tmp_path / "team").chmod(0o2775)
    pack(files, tmp_path / "team" / "x.pack", workers=0)
    made = [tmp_path / "team" / "x.pack", *(tmp_path / "team" / "x.pack").rglob("*")]
    assert {path.stat().st_gid for path in made} == {NOBODY}
    assert made[0].stat().st_mode & stat.S_ISGID


@pytest.mark.parametrize("dest", ["a file/x.pack", "x" * 300, "/proc/x.pack"])
def test_a_dest_that_cannot_be_written_is_reported(dest: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ArchiveError, match=r"\.partial cannot be made or written to: .* Choose another DEST"):
        pack(files, tmp_path / dest, workers=0)


# --- the source changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("same_size", [False, True])
def test_a_file_that_is_rewritten_while_it_is_packed_is_named(
    same_size: bool, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FolderSource.read

    def torn(source: FolderSource, index: int) -> bytes:
        data = read(source, index)
        if index != 25:
            return data
        new = bytes(20_000 if same_size else 30_000)
        Path(source.name(index)).write_bytes(new)
        return data[:9_000] + new[9_000:]

    with monkeypatch.context() as patch:
        patch.setattr(FolderSource, "read", torn)
        with pytest.raises(ArchiveError, match=r"dog/05\.jpg \(sample 25\) changed while it was packed"):
            pack(files, tmp_path / "x.pack", workers=0, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]


def test_a_file_that_is_emptied_and_filled_later_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, fill = files / "cat" / "03.jpg", packing._fill
    emptied.write_bytes(b"")

    def then_filled(*given: Any) -> None:
        fill(*given)
        emptied.write_bytes(b"whole again")

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_fill", then_filled)
        with pytest.raises(ArchiveError, match=r"cat/03\.jpg \(sample 3\) changed while it was packed"):
            pack(files, tmp_path / "x.pack", workers=0)
    pack(files, tmp_path / "x.pack", workers=0)
    assert PackedDataset(tmp_path / "x.pack").read(3) == b"whole again"


# --- where it is written ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_no_room_is_reported_before_anything_is_written(files: Path, small_disk: Path) -> None:
    for name in range(5):
        (files / "dog" / f"z{name}.jpg").write_bytes(os.urandom(1_000_000))
    with pytest.raises(ArchiveError, match=r"Packing needs about 0\.01 GB .* but only 0\.00 GB are free"):
        pack(files, small_disk / "x.pack", workers=0)
    assert not list(small_disk.rglob("data.mdb"))


@pytest.mark.parametrize(("format", "free"), [("lmdb", 400_000), ("hdf5", 400_000), ("hdf5", 1_200_000)])
def test_a_disk_that_fills_up_is_reported_and_nothing_is_left(
    format: Any, free: int, files: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1.2 MB free the payloads, 0.8 MB, fit, and do not fit twice."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((4 << 20) - free))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # the room went after it was looked at
    monkeypatch.setattr(packing, "_WRITTEN_BYTES", 150_000)
    with pytest.raises(ArchiveError, match=f"The disk of {small_disk} is full. Free some space there, and pack again"):
        pack(files, small_disk / "x.pack", format=format, workers=0)
    assert sorted(small_disk.iterdir()) == [ballast]
    ballast.unlink()
    pack(files, small_disk / "x.pack", format=format, workers=0, verify=True)
    assert right(small_disk / "x.pack", files)


def test_a_pack_is_not_made_in_what_is_packed(files: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(files)
    (tmp_path / "splits").mkdir()
    shutil.copytree(files, tmp_path / "splits" / "train")
    for source, dest in (
        (files, files / "p.pack"),
        (files, tmp_path / "alias" / "p.pack"),
        (tmp_path / "alias", files / "cat" / "p.pack"),
        (tmp_path / "splits", tmp_path / "splits" / "train" / "p.pack"),
    ):
        with pytest.raises(ArchiveError, match=r"p\.pack is inside .*Choose a DEST outside of it"):
            pack(source, dest, workers=0)
    assert sorted(path.name for path in files.iterdir()) == ["cat", "dog"]
    pack(tmp_path / "splits", tmp_path / "splits" / "p.pack", workers=0)  # beside train: no class
    assert len(PackedDataset(tmp_path / "splits" / "p.pack")) == 40


@as_root
def test_a_pack_is_not_made_in_another_mount_of_what_is_packed(files: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers, alias = context.Queue(), tmp_path / "alias"
    alias.mkdir()

    def in_mounts_of_its_own() -> None:
        if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
            return answers.put("not permitted")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", files, alias], check=True)
        try:
            pack(files, alias / "p.pack", workers=0)
        except ArchiveError as error:
            answers.put(str(error))

    process = context.Process(target=in_mounts_of_its_own)
    process.start()
    answer = answers.get(timeout=60)
    process.join(60)
    if answer == "not permitted":
        pytest.skip("mounting is not permitted here")
    assert "p.pack is inside" in answer
    assert sorted(path.name for path in files.iterdir()) == ["cat", "dog"]


def test_a_pack_that_lies_in_its_source_is_no_class(files: Path, tmp_path: Path) -> None:
    pack(files, tmp_path / "p.pack", workers=0)
    (tmp_path / "p.pack").rename(files / "p.pack")  # where an earlier version would make it
    source = Splits(val_fraction=0).source(files, "train")
    assert source is not None
    assert (source.classes, len(source)) == (("cat", "dog"), 40)


def test_packing_without_standard_error(files: Path, tmp_path: Path) -> None:
    command = 'exec "$0" -m lightning_feed pack "$1" "$2" --workers 0 --verify 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, files, tmp_path / "x.pack"], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "40 samples" in done.stdout
    assert right(tmp_path / "x.pack", files)


def test_packing_from_python_without_standard_error(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    pack(files, tmp_path / "x.pack", workers=0, verify=True)
    assert right(tmp_path / "x.pack", files)


# --- others at the same place -----------------------------------------------------------------------------------------


def test_nothing_is_replaced_unasked_and_only_packs_at_all(files: Path, tmp_path: Path) -> None:
    pack(files, tmp_path / "x.pack", workers=0)
    with pytest.raises(ArchiveError, match=r"exists. Choose another DEST, or --force"):
        pack(files, tmp_path / "x.pack", workers=0)
    (files / "dog" / "00.jpg").unlink()
    assert pack(files, tmp_path / "x.pack", workers=0, force=True).samples == 39
    assert len(PackedDataset(tmp_path / "x.pack")) == 39
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for other in (tmp_path / "folder", tmp_path / "file"):
        with pytest.raises(ArchiveError, match="is not a pack, so it is not replaced"):
            pack(files, other, workers=0, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "files", "folder", "x.pack"]


def test_two_do_not_pack_to_one_place(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = packing._check_room

    def meanwhile(*others: Any) -> None:
        monkeypatch.setattr(packing, "_check_room", original)
        with pytest.raises(ArchiveError, match="Another process is packing"):
            pack(files, tmp_path / "x.pack", workers=0)

    monkeypatch.setattr(packing, "_check_room", meanwhile)
    assert pack(files, tmp_path / "x.pack", workers=0, verify=True).samples == 40


def test_a_pack_that_appeared_meanwhile_is_not_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = packing._parts_of

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(packing, "_parts_of", listed)
        pack(files, tmp_path / "x.pack", workers=0)
        return listed(*given)

    monkeypatch.setattr(packing, "_parts_of", slowly)
    with pytest.raises(ArchiveError, match=r"x\.pack exists\. Choose another DEST"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "x.pack"]


# --- killed while a pack is replaced ----------------------------------------------------------------------------------


@pytest.fixture
def replaced(files: Path, tmp_path: Path) -> Path:
    """A pack of fewer files, which is to be replaced."""
    fewer = tmp_path / "fewer"
    shutil.copytree(files / "cat", fewer / "cat")
    pack(fewer, tmp_path / "x.pack", workers=0)
    shutil.rmtree(fewer)
    return tmp_path / "x.pack"


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir()), sorted(  # type: ignore[return-value]
        str(path.relative_to(tmp_path / "x.pack")) for path in (tmp_path / "x.pack").rglob("*")
    )


TIDY = (["files", "x.pack"], ["all", "all/data", "all/data/data.mdb", "all/index.npz", "pack.json"])


@pytest.mark.parametrize("at", ["x.pack", ".x.pack.partial", "rmtree"])
@pytest.mark.parametrize("force", [False, True])
def test_a_whole_pack_is_there_again_after_force_was_killed(
    at: str, force: bool, replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first rename, between the two, and after both."""
    rename = Path.rename
    with monkeypatch.context() as patch:
        if at == "rmtree":
            patch.setattr(packing.shutil, "rmtree", lambda path, **_: kill())
        else:
            patch.setattr(Path, "rename", lambda path, to: kill() if path.name == at else rename(path, to))
        killed(lambda: pack(files, replaced, workers=0, force=True))
    assert replaced.exists() == (at != ".x.pack.partial")
    if force:
        pack(files, replaced, workers=0, force=True)
    else:
        with pytest.raises(ArchiveError, match=r"x\.pack exists\. Choose another DEST, or --force"):
            pack(files, replaced, workers=0)
    assert len(PackedDataset(replaced)) == (40 if force or at == "rmtree" else 20)
    if force:
        assert left_behind(tmp_path) == TIDY


def test_the_old_pack_stays_where_the_new_one_cannot_take_its_place(
    replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(path: Path, to: Path) -> Any:
        if path.name == ".x.pack.partial":
            raise OSError("now")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="now"):
        pack(files, replaced, workers=0, force=True)
    assert len(PackedDataset(replaced)) == 20
    assert left_behind(tmp_path) == TIDY
