"""Packing that is interrupted, and with others in the way: kills, crashes, full disks, planted links, writers."""

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

from lightning_feed.archive import PackedDataset, pack, pack_partial, packing
from lightning_feed.archive.folder import FolderSource, scan_classes
from lightning_feed.archive.pack_samples import Payload, Payloads
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


def broken_off(files: Any, dest: Path, monkeypatch: pytest.MonkeyPatch, after: int = 32, **options: Any) -> None:
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
            pack(files, dest, workers=0, **options)


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
from lightning_feed.archive import packing
from lightning_feed.archive.pack_partial import Store
packing._COMMIT_BYTES = 16 * 20_000
append = Store.append
def killing(self, payloads):
    append(self, payloads)
    os.kill(os.getpid(), signal.SIGKILL)
Store.append = killing
packing.pack(sys.argv[1], sys.argv[2], format=sys.argv[3], workers=2)
"""


@pytest.mark.parametrize("format", ["lmdb", "hdf5"])
def test_a_killed_pack_is_resumed_and_its_workers_end(
    format: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", KILLED, str(files), str(tmp_path / "x.pack"), format]
    process = subprocess.Popen(command, pass_fds=[writing], start_new_session=True)
    os.close(writing)
    assert process.wait(120) == -signal.SIGKILL
    assert not (tmp_path / "x.pack").exists()
    assert os.read(reading, 1) == b""  # once the last process that holds the other end is gone
    os.close(reading)
    read: list[int] = []
    original = Payloads.__getitem__
    monkeypatch.setattr(Payloads, "__getitem__", lambda self, index: read.append(index) or original(self, index))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # it reads samples, too
    report = pack(files, tmp_path / "x.pack", format=format, workers=0, verify=True)
    assert report.resumed_at == 16
    assert read == list(range(16, 40))
    assert right(tmp_path / "x.pack", files)


def test_what_waited_for_a_while_is_committed(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow sources lose no more than seconds of work to a kill."""
    now, append = iter(range(0, 10_000, 2)), pack_partial.Store.append
    monkeypatch.setattr(packing.time, "monotonic", lambda: float(next(now)))

    def kill_after(store: pack_partial.Store, payloads: list[Payload]) -> None:
        append(store, payloads)
        if len(store.lines) > 30:
            kill()

    with monkeypatch.context() as patch:
        patch.setattr(pack_partial.Store, "append", kill_after)
        killed(lambda: pack(files, tmp_path / "x.pack", workers=0))
    assert 30 < pack(files, tmp_path / "x.pack", workers=0).resumed_at < 40


def test_a_pack_of_another_source_is_begun_anew(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(files, tmp_path / "x.pack", monkeypatch)
    (files / "dog" / "99.jpg").write_bytes(b"new")
    assert pack(files, tmp_path / "x.pack", workers=0).resumed_at == 0
    assert right(tmp_path / "x.pack", files)


class Numbers:
    def __init__(self, value: int) -> None:
        self.value = value

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"value": self.value}


def test_two_datasets_of_one_class_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_off(Numbers(1), tmp_path / "x.pack", monkeypatch)
    assert pack(Numbers(2), tmp_path / "x.pack", workers=0).resumed_at == 0
    assert [PackedDataset(tmp_path / "x.pack")[index]["value"] for index in range(40)] == [2] * 40


def test_a_pack_that_was_killed_while_it_was_renamed_is_not_done_again(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *others: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pack(files, tmp_path / "x.pack", workers=0)
    assert pack(files, tmp_path / "x.pack", workers=0, verify=True).resumed_at == 40
    assert left_behind(tmp_path) == TIDY


def test_reasons_are_told_once(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "cat" / "03.jpg").unlink()
    (files / "cat" / "03.jpg").symlink_to("nowhere")
    (files / "dog" / os.fsdecode(b"\xff.jpg")).symlink_to("nowhere")
    broken_off(files, tmp_path / "x.pack", monkeypatch, on_error="skip")
    report = pack(files, tmp_path / "x.pack", workers=0, on_error="skip")
    assert [("03.jpg" in line, r"\xff.jpg" in line) for line in report.skipped] == [(True, False), (False, True)]
    assert (report.samples, report.resumed_at) == (39, 32)


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
    with pytest.raises(ArchiveError, match=r"x\.pack\.partial is a link, or another user's"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert victim.read_text() == "years of work"
    assert [path.name for path in partial.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
@pytest.mark.parametrize("name", ["plan.json", "pack.json.tmp", "all/data/data.mdb"])
def test_links_in_ones_own_dest_partial_are_not_followed(link: str, name: str, files: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    planted = tmp_path / "x.pack.partial" / name
    planted.parent.mkdir(parents=True)
    getattr(planted, link)(victim)
    with pytest.raises(ArchiveError, match="is a link, or another user's"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert victim.read_text() == "years of work"


def test_a_dest_partial_that_is_a_link_is_not_followed(files: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "x.pack.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match=r"x\.pack\.partial is a link"):
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
    with pytest.raises(ArchiveError, match=r"\.partial cannot be made or written to: .* Give another DEST"):
        pack(files, tmp_path / dest, workers=0)


# --- after a crash of the machine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "lines"), [(0, 32), (20, 12), (31, 1)])
def test_zeros_in_a_journal_lose_and_change_no_sample(
    line: int, lines: int, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(files, tmp_path / "x.pack", monkeypatch)
    journal = tmp_path / "x.pack.partial" / "all" / "journal"
    written = journal.read_bytes().splitlines(keepends=True)
    assert len(written) == 32
    zeros = bytes(len(b"".join(written[line : line + lines])))
    journal.write_bytes(b"".join(written[:line]) + zeros + b"".join(written[line + lines :]))
    report = pack(files, tmp_path / "x.pack", workers=0, verify=True)
    assert (report.samples, report.resumed_at) == (40, line)
    assert right(tmp_path / "x.pack", files)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("harm", ["one sample", "zeros", "cut", "no page", "gone"])
def test_damaged_payloads_of_a_pack_in_the_making_are_packed_again(
    harm: str, format: Any, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(files, tmp_path / "x.pack", monkeypatch, format=format)
    (data,) = (tmp_path / "x.pack.partial" / "all").rglob("data.mdb")
    whole = bytearray(data.read_bytes())
    if harm == "one sample":
        whole[whole.index((files / "cat" / "18.jpg").read_bytes()[:100]) + 50] ^= 1
    elif harm == "zeros":
        whole[100_000:] = bytes(len(whole) - 100_000)
    elif harm == "cut":
        del whole[100_000:]
    elif harm == "no page":
        whole[: 2 * 4096] = bytes(2 * 4096)
    data.unlink() if harm == "gone" else data.write_bytes(whole)
    report = pack(files, tmp_path / "x.pack", format=format, workers=0, verify=True)
    assert report.samples == 40
    assert harm == "zeros" or report.resumed_at == (18 if harm == "one sample" else 0)
    assert right(tmp_path / "x.pack", files)


def test_a_pack_that_does_not_verify_is_mended_by_the_next_call(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "x.pack.partial" / "all" / "data" / "data.mdb"

    def flip(store: Any) -> None:
        whole = bytearray(data.read_bytes())
        whole[whole.index((files / "cat" / "18.jpg").read_bytes()[:100]) + 50] ^= 1
        data.write_bytes(whole)

    with monkeypatch.context() as patch:
        patch.setattr(pack_partial.Store, "check_source", flip)
        with pytest.raises(ArchiveError, match=r"cat/18\.jpg is not what was packed"):
            pack(files, tmp_path / "x.pack", workers=0, verify=True)
    (tmp_path / "x.pack.partial" / "all" / "index.npz").write_bytes(b"cut")
    assert pack(files, tmp_path / "x.pack", workers=0, verify=True).resumed_at == 18
    assert right(tmp_path / "x.pack", files)


# --- the source changes -----------------------------------------------------------------------------------------------


def test_what_changed_in_the_source_is_packed_again(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_off(files, tmp_path / "x.pack", monkeypatch)
    stamp = (files / "cat" / "05.jpg").stat().st_mtime_ns
    (files / "cat" / "05.jpg").write_bytes(b"another")
    os.utime(files / "cat" / "05.jpg", ns=(stamp, stamp))  # as a copy that keeps times would
    assert pack(files, tmp_path / "x.pack", workers=0).resumed_at == 5
    assert PackedDataset(tmp_path / "x.pack").read(5) == b"another"


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


def test_no_room_is_told_before_anything_is_written(files: Path, small_disk: Path) -> None:
    for name in range(5):
        (files / "dog" / f"z{name}.jpg").write_bytes(os.urandom(1_000_000))
    with pytest.raises(ArchiveError, match=r"Packing needs about 0\.01 GB .* and 0\.00 GB are free"):
        pack(files, small_disk / "x.pack", workers=0)
    assert not list(small_disk.rglob("data.mdb"))


@pytest.mark.parametrize(
    ("format", "free"), [("lmdb", 400_000), ("hdf5", 400_000), ("hdf5", 1_200_000), ("litdata", 1_200_000)]
)
def test_a_disk_that_fills_up_is_told_and_the_pack_resumed(
    format: Any, free: int, files: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1.2 MB free the payloads, 0.8 MB, fit, and those of the other format do not fit beside them."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes((4 << 20) - free))
    monkeypatch.setattr(packing, "_check_room", lambda *others: None)  # the room went after it was looked at
    monkeypatch.setattr(packing, "_COMMIT_BYTES", 150_000)
    with pytest.raises(ArchiveError) as told:
        pack(files, small_disk / "x.pack", format=format, workers=0)
    assert f"The disk of {small_disk} is full. What is packed so far is kept in" in str(told.value)
    assert f"free some space there and pack to {small_disk / 'x.pack'} again" in str(told.value)
    assert not (small_disk / "x.pack").exists()
    ballast.unlink()
    resumed_at = pack(files, small_disk / "x.pack", format=format, workers=0, verify=True).resumed_at
    assert resumed_at == 40 if free > 1_000_000 else 8 <= resumed_at < 40
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


# --- others at the same place -----------------------------------------------------------------------------------------


def test_nothing_is_replaced_unasked_and_only_packs_at_all(files: Path, tmp_path: Path) -> None:
    pack(files, tmp_path / "x.pack", workers=0)
    with pytest.raises(ArchiveError, match=r"exists. Give another DEST, or --force"):
        pack(files, tmp_path / "x.pack", workers=0)
    (files / "dog" / "00.jpg").unlink()
    assert pack(files, tmp_path / "x.pack", workers=0, force=True).samples == 39
    assert len(PackedDataset(tmp_path / "x.pack")) == 39
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for other in (tmp_path / "folder", tmp_path / "file"):
        with pytest.raises(ArchiveError, match="is no pack, so it is not replaced"):
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


def test_a_folder_of_someone_elses_is_not_emptied(files: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pack.partial").mkdir()
    (tmp_path / "x.pack.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(ArchiveError, match=r"holds 'thesis\.txt', which is of no pack"):
        pack(files, tmp_path / "x.pack", workers=0)
    assert (tmp_path / "x.pack.partial" / "thesis.txt").read_text() == "years of work"


def test_a_pack_that_appeared_meanwhile_is_not_replaced(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = packing._parts_of

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(packing, "_parts_of", listed)
        pack(files, tmp_path / "x.pack", workers=0)
        return listed(*given)

    monkeypatch.setattr(packing, "_parts_of", slowly)
    with pytest.raises(ArchiveError, match=r"x\.pack exists\. Give another DEST"):
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


@pytest.mark.parametrize("at", ["_exchanged", "rmtree", "unlink"])
def test_there_is_a_whole_pack_at_dest_whenever_force_is_killed(
    at: str, replaced: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        if at == "_exchanged":
            patch.setattr(pack_partial, "_exchanged", kill)
        elif at == "rmtree":
            patch.setattr(pack_partial.shutil, "rmtree", lambda path, **_: ((path / "pack.json").unlink(), kill()))
        else:
            unlink = Path.unlink
            patch.setattr(Path, "unlink", lambda path, **_: kill() if path.name == "plan.json" else unlink(path, **_))
        killed(lambda: pack(files, replaced, workers=0, force=True))
    assert len(PackedDataset(replaced)) == (20 if at == "_exchanged" else 40)
    with pytest.raises(ArchiveError, match=r"x\.pack exists\. Give another DEST, or --force"):
        pack(files, replaced, workers=0)
    assert pack(files, replaced, workers=0, force=True).resumed_at == (40 if at == "_exchanged" else 0)
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
