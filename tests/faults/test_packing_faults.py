"""Packing that is interrupted, and with others in the way: kills, full disks, planted links."""

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
import warm

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import PackedDataset, pack, packing, whole
from lightning_feed.storage.folder import FolderSource, scan_classes
from lightning_feed.storage.packed_dataset import FORMATS
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
    source, dataset = FolderSource(files, scan_classes(files)), PackedDataset(packed)
    return [dataset[index] for index in range(len(dataset))] == [
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
append = PartWriter.append
def killing(self, sample, label, name):
    append(self, sample, label, name)
    if name == b"dog/03.jpg":
        os.kill(os.getpid(), signal.SIGKILL)
PartWriter.append = killing
packing.pack(sys.argv[1], sys.argv[2], format=sys.argv[3])
"""


@pytest.mark.parametrize("format", FORMATS)
def test_packing_restarts_after_being_killed(format: Any, files: Path, tmp_path: Path) -> None:
    assert warm.run(["-c", KILLED, files, tmp_path / "x.pack", format]).returncode == -signal.SIGKILL
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.pack.packing", "files"]
    (files / "dog" / "99.jpg").write_bytes(b"new")
    pack(files, tmp_path / "x.pack", format=format, verify=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "x.pack"]
    assert right(tmp_path / "x.pack", files)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArchiveError])
def test_interrupted_packing_leaves_nothing_behind(
    error: type[BaseException], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("now")

    monkeypatch.setattr(PartWriter, "finish", fail)
    with pytest.raises(error):
        pack(files, tmp_path / "x.pack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files"]


# --- another user's folder --------------------------------------------------------------------------------------------


def planted(tmp_path: Path, kind: str) -> Path:
    """What stands in the place of the folder that a pack is made in."""
    partial = tmp_path / ".x.pack.packing"
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
def test_a_working_folder_that_others_may_have_made_is_refused(kind: str, files: Path, tmp_path: Path) -> None:
    place = planted(tmp_path, kind)
    before = sorted(place.iterdir())
    with pytest.raises(
        ArchiveError, match=r"x\.pack\.packing cannot be created .*(is not a folder|another user|others may)"
    ):
        pack(files, tmp_path / "x.pack")
    assert sorted(place.iterdir()) == before


def test_links_in_the_leftovers_of_a_killed_pack_are_not_followed(files: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    part = tmp_path / ".x.pack.packing" / "whole" / "all"
    part.mkdir(parents=True)
    (tmp_path / ".x.pack.packing").chmod(0o700)
    (part / "data.bin").symlink_to(victim)
    (part.parent / "pack.json").symlink_to(victim)
    pack(files, tmp_path / "x.pack")
    assert victim.read_text() == "years of work"
    assert right(tmp_path / "x.pack", files)


def test_an_unfinished_pack_is_accessible_only_to_its_owner(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = set[int]()
    append = PartWriter.append

    def note(writer: PartWriter, *sample: Any) -> None:
        modes.add(stat.S_IMODE((tmp_path / ".x.pack.packing").stat().st_mode))
        append(writer, *sample)

    monkeypatch.setattr(PartWriter, "append", note)
    pack(files, tmp_path / "x.pack")
    assert modes == {0o700}
    assert (tmp_path / "x.pack").stat().st_mode == files.stat().st_mode  # as the umask has it


@as_root
def test_a_pack_in_a_setgid_folder_belongs_to_its_group(files: Path, tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    os.chown(tmp_path / "team", 0, NOBODY)
    (tmp_path / "team").chmod(0o2775)
    pack(files, tmp_path / "team" / "x.pack")
    made = [tmp_path / "team" / "x.pack", *(tmp_path / "team" / "x.pack").rglob("*")]
    assert {path.stat().st_gid for path in made} == {NOBODY}
    assert made[0].stat().st_mode & stat.S_ISGID


@pytest.mark.parametrize("dest", ["a file/x.pack", "x" * 300, "/proc/x.pack"])
def test_a_dest_that_cannot_be_written_is_reported(dest: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ArchiveError, match=r"cannot be created.*: .* Choose another DEST"):
        pack(files, tmp_path / dest)


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


def test_a_lack_of_disk_space_is_reported_before_anything_is_written(files: Path, small_disk: Path) -> None:
    for name in range(5):
        (files / "dog" / f"z{name}.jpg").write_bytes(os.urandom(1_000_000))
    with pytest.raises(ArchiveError, match=r"MiB are needed in .*, but the .* leaves 4\.0 MiB.* Nothing was written"):
        pack(files, small_disk / "x.pack")
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(
    ("format", "free"), [("flat", 400_000), ("lmdb", 400_000), ("hdf5", 400_000), ("hdf5", 1_200_000)]
)
def test_a_disk_that_fills_up_is_reported_and_nothing_is_left_behind(
    format: Any, free: int, files: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1.2 MB free the payloads, 0.8 MB, fit, and do not fit twice."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((4 << 20) - free))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # the room went after it was looked at
    monkeypatch.setattr(packing, "_COMMITTED_BYTES", 150_000)
    with pytest.raises(ArchiveError, match=f"{small_disk} is full. Make room there, and start again"):
        pack(files, small_disk / "x.pack", format=format)
    assert sorted(small_disk.iterdir()) == [ballast]
    ballast.unlink()
    pack(files, small_disk / "x.pack", format=format, verify=True)
    assert right(small_disk / "x.pack", files)


def test_a_dest_inside_the_source_is_refused(files: Path, tmp_path: Path) -> None:
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
            pack(source, dest)
    assert sorted(path.name for path in files.iterdir()) == ["cat", "dog"]


def test_a_pack_inside_an_image_folder_is_not_taken_as_a_class(files: Path, tmp_path: Path) -> None:
    pack(files, tmp_path / "p.pack")
    (tmp_path / "p.pack").rename(files / "p.pack")  # where an earlier version would make it
    source = Splits(val_fraction=0).source(files, "train")
    assert source is not None
    assert (source.classes, len(source)) == (("cat", "dog"), 40)


def test_the_pack_command_works_without_standard_error(files: Path, tmp_path: Path) -> None:
    command = 'exec "$0" -m lightning_feed pack "$1" "$2" --verify 2>&-'
    done = subprocess.run(
        ["sh", "-c", command, sys.executable, files, tmp_path / "x.pack"], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "40 samples" in done.stdout
    assert right(tmp_path / "x.pack", files)


def test_packing_from_python_works_without_standard_error(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    pack(files, tmp_path / "x.pack", verify=True)
    assert right(tmp_path / "x.pack", files)


# --- others at the same place -----------------------------------------------------------------------------------------


def test_only_packs_are_replaced_and_only_with_force(files: Path, tmp_path: Path) -> None:
    pack(files, tmp_path / "x.pack")
    with pytest.raises(ArchiveError, match=r"already exists. Choose another DEST, or pass --force"):
        pack(files, tmp_path / "x.pack")
    (files / "dog" / "00.jpg").unlink()
    assert pack(files, tmp_path / "x.pack", force=True).samples == 39
    assert len(PackedDataset(tmp_path / "x.pack")) == 39
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for other in (tmp_path / "folder", tmp_path / "file"):
        with pytest.raises(ArchiveError, match="is not a pack, so it is not replaced"):
            pack(files, other, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "files", "folder", "x.pack"]


def test_packing_to_a_dest_that_is_being_packed_to_is_refused(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = packing._check_room

    def meanwhile(*others: Any) -> None:
        monkeypatch.setattr(packing, "_check_room", original)
        with pytest.raises(ArchiveError, match="Another process is writing"):
            pack(files, tmp_path / "x.pack")

    monkeypatch.setattr(packing, "_check_room", meanwhile)
    assert pack(files, tmp_path / "x.pack", verify=True).samples == 40


def test_a_pack_that_appears_during_packing_is_not_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = packing._sources_in

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(packing, "_sources_in", listed)
        pack(files, tmp_path / "x.pack")
        return listed(*given)

    monkeypatch.setattr(packing, "_sources_in", slowly)
    with pytest.raises(ArchiveError, match=r"x\.pack already exists\. Choose another DEST"):
        pack(files, tmp_path / "x.pack")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "x.pack"]


# --- killed while a pack is replaced ----------------------------------------------------------------------------------


@pytest.fixture
def replaced(files: Path, tmp_path: Path) -> Path:
    """A pack of fewer files, which is to be replaced."""
    fewer = tmp_path / "fewer"
    shutil.copytree(files / "cat", fewer / "cat")
    pack(fewer, tmp_path / "x.pack")
    shutil.rmtree(fewer)
    return tmp_path / "x.pack"


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir()), sorted(  # type: ignore[return-value]
        str(path.relative_to(tmp_path / "x.pack")) for path in (tmp_path / "x.pack").rglob("*")
    )


TIDY = (["files", "x.pack"], ["all", "all/data.bin", "all/index.npz", "pack.json"])


@pytest.mark.parametrize("at", ["x.pack", "whole", "rmtree"])
def test_a_killed_replacement_leaves_only_complete_packs(
    at: str, replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the first rename, between the two, and after both."""
    rename = Path.rename
    with monkeypatch.context() as patch:
        if at == "rmtree":
            patch.setattr(whole.shutil, "rmtree", lambda path, **_: kill())
        else:
            patch.setattr(Path, "rename", lambda path, to: kill() if path.name == at else rename(path, to))
        killed(lambda: pack(files, replaced, force=True))
    if replaced.exists():
        assert len(PackedDataset(replaced)) == (40 if at == "rmtree" else 20)
    pack(files, replaced, force=True)
    assert len(PackedDataset(replaced)) == 40
    assert left_behind(tmp_path) == TIDY
