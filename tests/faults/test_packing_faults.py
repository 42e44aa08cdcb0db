"""Packing with others in the way: planted links, crashes that zero files, writers, full disks, kills at the renames."""

import ctypes
import json
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

from lightning_feed.archive import PackedDataset, is_pack, pack, pack_partial, packing
from lightning_feed.archive.folder_index import scan_classes
from lightning_feed.archive.folder_source import FolderSource
from lightning_feed.archive.pack_spool import RECORD
from lightning_feed.archive.splits import Splits
from lightning_feed.errors import ArchiveError

FORMATS = ["lmdb", "hdf5", "litdata"]
NOBODY = 65534

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:litdata.*")
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


def broken_off(files: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, after: int = 32) -> None:
    """A pack that ends after so many samples."""
    taken = packing._payloads

    def some(*given: Any) -> Iterator[Any]:
        for number, payload in enumerate(taken(*given)):
            if number == after:
                raise KeyboardInterrupt
            yield payload

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_payloads", some)
        with pytest.raises(KeyboardInterrupt):
            pack(files, dest, workers=0)


def killed(work: Callable[[], Any]) -> None:
    """Do the work in a process that kills itself in it."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- another user's folder --------------------------------------------------------------------------------------------


@as_root
def test_a_link_of_another_user_in_dest_partial_overwrites_nothing(files: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    partial = tmp_path / "x.pack.partial"
    partial.mkdir()
    partial.chmod(0o777)
    (partial / "plan.json").symlink_to(victim)
    for path in (partial, partial / "plan.json"):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ArchiveError, match=r"x\.pack\.partial belongs to another user \(number 65534\)"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert victim.read_text() == "years of work"
    assert [path.name for path in partial.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("name", ["plan.json", "pack.json.tmp", "all/spool/payloads"])
def test_links_in_ones_own_dest_partial_are_not_followed(link: str, name: str, files: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    planted = tmp_path / "x.pack.partial" / name
    planted.parent.mkdir(parents=True)
    getattr(planted, link)(victim)
    with pytest.raises(ArchiveError, match=r"is a link, or another user's"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert victim.read_text() == "years of work"


def test_a_dest_partial_that_is_a_link_is_not_followed(files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x.pack.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match=r"x\.pack\.partial cannot be made or written to"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_nobody_else_reads_or_writes_a_pack_in_the_making(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.pack.partial").mkdir()
    (tmp_path / "x.pack.partial").chmod(0o777)
    broken_off(files, tmp_path / "x.pack", monkeypatch)
    assert stat.S_IMODE((tmp_path / "x.pack.partial").stat().st_mode) == 0o700
    pack(files, tmp_path / "x.pack", workers=0)
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
def test_a_dest_that_cannot_be_written_is_told(dest: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ArchiveError, match=r"\.partial cannot be made or written to: .* give another DEST"):
        pack(files, tmp_path / dest, workers=0)


# --- a spool after a crash of the machine -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "begin", "end"),
    [
        ("records", 20 * RECORD.itemsize, 32 * RECORD.itemsize),
        ("records", 0, 32 * RECORD.itemsize),
        ("payloads", 18 * 20_000 + 7, 32 * 20_000),
        ("payloads", 100, 200),
    ],
)
def test_zeros_in_a_spool_lose_and_change_no_sample(
    file: str, begin: int, end: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(files, tmp_path / "x.pack", monkeypatch)
    with (tmp_path / "x.pack.partial" / "all" / "spool" / file).open("r+b") as spool:
        spool.seek(begin)
        spool.write(bytes(end - begin))
    first = begin // (RECORD.itemsize if file == "records" else 20_000)
    report = pack(files, tmp_path / "x.pack", workers=0, verify=True)
    assert (report.samples, report.resumed_at) == (40, first)
    assert right(tmp_path / "x.pack", files)


def test_a_damaged_index_or_data_file_does_not_fail_every_call(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_check_source", kill)
        killed(lambda: pack(files, tmp_path / "x.pack", workers=0))
    os.truncate(tmp_path / "x.pack.partial" / "all" / "index.npz", 100)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_verify_new", kill)
        killed(lambda: pack(files, tmp_path / "x.pack", workers=0, verify=True))
    data = tmp_path / "x.pack.partial" / "all" / "data" / "data.mdb"
    whole = bytearray(data.read_bytes())
    whole[100_000] ^= 1
    data.write_bytes(whole)
    with pytest.raises(ArchiveError, match="is not what was packed"):
        pack(files, tmp_path / "x.pack", workers=0, verify=True)
    assert pack(files, tmp_path / "x.pack", workers=0, verify=True).resumed_at == 40
    assert right(tmp_path / "x.pack", files)


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
    assert not (tmp_path / "x.pack").exists()
    assert pack(files, tmp_path / "x.pack", workers=0).resumed_at == 25
    assert right(tmp_path / "x.pack", files)


def test_a_file_that_is_emptied_and_filled_later_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied, fill = files / "cat" / "03.jpg", packing._fill
    emptied.write_bytes(b"")

    def then_filled(*given: Any) -> int:
        done = fill(*given)
        emptied.write_bytes(b"whole again")
        return done

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_fill", then_filled)
        with pytest.raises(ArchiveError, match=r"cat/03\.jpg \(sample 3\) changed while it was packed"):
            pack(files, tmp_path / "x.pack", workers=0)
    pack(files, tmp_path / "x.pack", workers=0)
    assert PackedDataset(tmp_path / "x.pack").read(3) == b"whole again"


def test_a_file_that_cannot_be_read_is_left_out_and_no_change(files: Path, tmp_path: Path) -> None:
    (files / "cat" / "99.jpg").symlink_to("nowhere")
    report = pack(files, tmp_path / "x.pack", workers=0, on_error="skip")
    assert (report.samples, len(report.skipped)) == (40, 1)


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


@pytest.mark.parametrize("format", FORMATS)
def test_a_disk_that_fills_up_while_the_format_is_written_is_told(
    format: Any, files: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2_700_000))  # the spool, 0.8 MB, fits, and the data do not fit beside it
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # the room went after it was looked at
    with pytest.raises(ArchiveError) as told:
        pack(files, small_disk / "x.pack", format=format, workers=0)
    assert f"The disk of {small_disk} is full. What is packed so far is kept in" in str(told.value)
    assert f"free some space there and pack to {small_disk / 'x.pack'} again" in str(told.value)
    ballast.unlink()
    assert pack(files, small_disk / "x.pack", format=format, workers=0).resumed_at == 40
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
        with pytest.raises(ArchiveError, match=r"p\.pack lies in .*Give a DEST outside of it"):
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
    assert "p.pack lies in" in answer
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


@pytest.mark.parametrize("at", ["_exchanged", "_clear_up", "rmtree", "unlink"])
def test_there_is_a_whole_pack_at_dest_whenever_force_is_killed(
    at: str, replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(path: Path, **_: Any) -> None:
        if path.name == "replaced":
            (path / "pack.json").unlink()
            kill()

    with monkeypatch.context() as patch:
        if at == "rmtree":
            patch.setattr(pack_partial.shutil, "rmtree", half)
        elif at == "unlink":
            unlink = Path.unlink
            patch.setattr(Path, "unlink", lambda path, **_: kill() if path.name == "plan.json" else unlink(path, **_))
        else:
            patch.setattr(pack_partial, at, kill)
        killed(lambda: pack(files, replaced, workers=0, force=True))
    assert len(PackedDataset(replaced)) == (20 if at == "_exchanged" else 40)
    with pytest.raises(ArchiveError, match=r"x\.pack exists\. Give another DEST, or --force"):
        pack(files, replaced, workers=0)
    if at == "_exchanged":
        assert pack(files, replaced, workers=0, force=True).resumed_at == 40
    assert left_behind(tmp_path) == TIDY
    assert right(replaced, files)


def test_without_an_exchange_the_next_call_puts_the_old_pack_back(
    replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_partial, "_exchanged", lambda *paths: False)  # NFS, some of FUSE
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, to: kill() if path.name == "x.pack.partial" else rename(path, to))
        killed(lambda: pack(files, replaced, workers=0, force=True))
    assert not replaced.exists()
    with pytest.raises(ArchiveError, match=r"x\.pack exists\. Give another DEST, or --force"):
        pack(files, replaced, workers=0)
    assert len(PackedDataset(replaced)) == 20
    assert pack(files, replaced, workers=0, force=True).resumed_at == 40
    assert left_behind(tmp_path) == TIDY
    assert right(replaced, files)


def test_what_a_living_process_clears_up_is_left_to_it(
    replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear = pack_partial._clear_up

    def meanwhile(*paths: Path) -> None:
        with pytest.raises(ArchiveError, match="Another process is packing to"):
            pack(files, replaced, workers=0, force=True)
        clear(*paths)

    monkeypatch.setattr(pack_partial, "_clear_up", meanwhile)
    pack(files, replaced, workers=0, force=True)
    assert left_behind(tmp_path) == TIDY


@as_root
def test_a_pack_planted_at_dest_has_nothing_removed(files: Path, tmp_path: Path) -> None:
    partial, planted = tmp_path / "x.pack.partial", tmp_path / "x.pack"
    for folder in (partial, planted):
        folder.mkdir()
        (folder / "pack.json").write_text(json.dumps({}))
    (partial / "thesis.txt").write_text("years of work")
    (planted / "plan.json").write_text("{}")
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(ArchiveError, match="exists"):
        pack(files, planted, workers=0)
    assert is_pack(partial)
    assert (partial / "thesis.txt").exists()
