"""A staged copy equals its source, whatever happens to either, and what cannot be staged is refused with a reason."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_feed.errors import ArchiveError
from lightning_feed.storage import stage, staging


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "birds"
    for name in ("train/a b.jpg", "train/zürich/ñ.jpg", "val/1.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 1000)
    (root / os.fsdecode(b"val/\xff\xfe.jpg")).write_bytes(b"undecodable name")
    (root / "val/empty").touch()
    return root


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "fast"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def is_clean(target: Path) -> bool:
    """Nothing but the record and the lock is left beside the copy."""
    return {path.name for path in (target.parent / f".{target.name}.staging").iterdir()} <= {"record.json", "lock"}


# --- equal --------------------------------------------------------------------------------------------------------


def test_a_folder_is_copied_with_all_names_and_contents(source: Path, dest: Path) -> None:
    done = stage(source, dest)
    assert contents(done.path) == contents(source)
    assert done.path == dest / "birds"
    assert (done.files, done.copied) == (5, True)
    assert done.total_bytes == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    assert is_clean(done.path)


def test_a_single_file_is_copied(source: Path, dest: Path) -> None:
    done = stage(source / "val/1.jpg", dest)
    assert done.path == dest / "1.jpg"
    assert done.path.read_bytes() == (source / "val/1.jpg").read_bytes()
    assert not stage(source / "val/1.jpg", dest).copied
    (source / "val/1.jpg").write_bytes(b"new")
    assert stage(source / "val/1.jpg", dest).copied
    assert done.path.read_bytes() == b"new"


def test_an_unchanged_source_is_not_copied_again(source: Path, dest: Path) -> None:
    inode = stage(source, dest).path.stat().st_ino
    again = stage(source, dest)
    assert (again.files, again.copied, again.path.stat().st_ino) == (5, False, inode)


def test_a_changed_source_replaces_its_copy(source: Path, dest: Path) -> None:
    stage(source, dest)
    (source / "new").mkdir()
    (source / "new/2.jpg").write_bytes(b"added")
    shutil.rmtree(source / "train/zürich")
    (source / "train/a b.jpg").unlink()
    (source / "train/a b.jpg").mkdir()  # a folder where a file was
    (source / "train/a b.jpg/1.jpg").write_bytes(b"deeper")
    done = stage(source, dest)
    assert done.copied
    assert contents(done.path) == contents(source)
    assert is_clean(done.path)


def test_a_file_with_equal_size_but_another_mtime_is_copied_again(source: Path, dest: Path) -> None:
    stage(source, dest)
    size = (source / "val/1.jpg").stat().st_size
    (source / "val/1.jpg").write_bytes(b"x" * size)
    os.utime(source / "val/1.jpg", (10**9, 10**9))
    assert stage(source, dest).copied
    assert contents(dest / "birds") == contents(source)


def test_a_modified_copy_is_made_again(source: Path, dest: Path, tmp_path: Path) -> None:
    done = stage(source, dest)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (done.path / "link").symlink_to(precious)
    (done.path / "val/1.jpg").write_bytes(b"damaged")
    assert stage(source, dest).copied
    assert contents(done.path) == contents(source)
    assert (precious / "file").exists()


def test_a_removed_copy_is_made_again(source: Path, dest: Path) -> None:
    shutil.rmtree(stage(source, dest).path)
    assert stage(source, dest).copied
    assert contents(dest / "birds") == contents(source)


def test_symbolic_links_are_replaced_by_copies_of_their_targets(source: Path, dest: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "3.jpg").write_bytes(b"three")
    (source / "val/link.jpg").symlink_to(elsewhere / "3.jpg")
    (source / "more").symlink_to(elsewhere)
    done = stage(source, dest)
    for name in ("val/link.jpg", "more/3.jpg"):
        assert not (done.path / name).is_symlink()
        assert (done.path / name).read_bytes() == b"three"
    assert not (done.path / "more").is_symlink()
    assert not stage(source, dest).copied


# --- URLs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(source: Path) -> Iterator[str]:
    """The same files in fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    names = [name for name in contents(source) if name.isprintable()]
    for name in names:
        system.pipe_file(f"/bucket/birds/{name}", (source / name).read_bytes())
    yield "memory://bucket/birds"
    system.rm("/bucket", recursive=True)


def test_a_folder_at_a_url_is_copied_whole_and_only_once(url: str, source: Path, dest: Path) -> None:
    done = stage(url, dest)
    expected = {name: data for name, data in contents(source).items() if name.isprintable()}
    assert done.path == dest / "birds"
    assert contents(done.path) == expected
    assert (done.files, done.total_bytes) == (len(expected), sum(map(len, expected.values())))
    assert not stage(f"{url}/", dest).copied
    fsspec.filesystem("memory").pipe_file("/bucket/birds/val/2.jpg", b"new")
    assert stage(url, dest).copied
    assert contents(done.path) == {**expected, "val/2.jpg": b"new"}


def test_a_file_at_a_url_is_copied(url: str, source: Path, dest: Path) -> None:
    done = stage(f"{url}/val/1.jpg", dest)
    assert done.path == dest / "1.jpg"
    assert done.path.read_bytes() == (source / "val/1.jpg").read_bytes()


def test_a_failed_download_leaves_nothing_behind(url: str, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    real = MemoryFileSystem.get_file

    def broken(system: Any, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith("1.jpg"):
            raise RuntimeError("the connection was reset")
        return real(system, path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "get_file", broken)
        with pytest.raises(ArchiveError, match=r"birds cannot be copied: RuntimeError: the connection was reset"):
            stage(url, dest)
    assert not (dest / "birds").exists()
    assert is_clean(dest / "birds")
    assert stage(url, dest).copied


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("memory://bucket/none", "There are no files at memory://bucket/none"),
        ("nosuch://bucket/x", "nosuch://bucket/x cannot be opened: Protocol not known"),
    ],
)
def test_a_url_without_files_or_of_unknown_protocol_is_refused(bad: str, words: str, dest: Path) -> None:
    with pytest.raises(ArchiveError, match=words):
        stage(bad, dest)


def test_names_that_escape_the_destination_are_refused(url: str, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    found = {"/bucket/birds/../../evil": {"size": 3}}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "find", lambda *_, **__: found)
        with pytest.raises(ArchiveError, match=r"'\.\./\.\./evil' .* would be written outside of the copy"):
            stage(url, dest)


def test_secrets_are_removed_from_urls() -> None:
    assert staging._without_secrets("https://me:secret@host/a/b.zip?signature=x") == "https://host/a/b.zip"


def test_errors_do_not_show_the_signature_of_a_url(dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(_: object, path: str) -> bool:
        raise RuntimeError(f"403 for {path}?signature=x")

    monkeypatch.setattr(MemoryFileSystem, "isfile", refuse)
    with pytest.raises(ArchiveError, match=r"memory://bucket/a\.zip cannot be listed: RuntimeError\.$"):
        stage("memory://bucket/a.zip?signature=x", dest)


def test_a_file_url_is_staged_as_a_local_path(source: Path, dest: Path) -> None:
    done = stage(f"file://{source}", dest)
    assert done.source == str(source)
    assert contents(done.path) == contents(source)


# --- refused ------------------------------------------------------------------------------------------------------


def test_a_destination_folder_that_is_not_a_staged_copy_is_refused(source: Path, dest: Path) -> None:
    (dest / "birds").mkdir(parents=True)
    (dest / "birds/mine.txt").touch()
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
    assert contents(dest / "birds") == {"mine.txt": b""}


def test_a_folder_put_in_the_place_of_a_copy_is_kept(source: Path, dest: Path) -> None:
    stage(source, dest).path.rename(dest / "moved")
    (dest / "birds").mkdir()
    (dest / "birds/mine.txt").touch()
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
    assert contents(dest / "birds") == {"mine.txt": b""}


def test_a_second_source_of_the_same_name_is_refused(source: Path, dest: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "birds"
    shutil.copytree(source, other)
    stage(source, dest)
    with pytest.raises(ArchiveError, match=r"is not a staged copy of .*other/birds\. Remove it, or choose another"):
        stage(other, dest)


@pytest.mark.parametrize(
    ("given", "to"), [("data/birds", "data"), ("data/birds", "data/birds"), ("data/birds", "data/birds/val")]
)
def test_a_destination_overlapping_its_source_is_refused(source: Path, tmp_path: Path, given: str, to: str) -> None:
    before = contents(tmp_path)
    with pytest.raises(ArchiveError, match="one is inside the other"):
        stage(tmp_path / given, tmp_path / to)
    assert contents(tmp_path) == before


def test_a_source_inside_its_copy_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "birds").mkdir()
    with pytest.raises(ArchiveError, match="one is inside the other"):
        stage(source / "birds", tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    with pytest.raises(ArchiveError, match="one is inside the other"):
        stage(source, tmp_path / "link")


@pytest.mark.parametrize(
    ("link", "leads_to", "words"),
    [
        ("val/loop", "", r"val/loop: it is a symbolic link to a folder above it"),
        ("val/dead.jpg", "gone", r"dead\.jpg: No such file"),
    ],
)
def test_link_cycles_and_dead_links_are_refused(source: Path, dest: Path, link: str, leads_to: str, words: str) -> None:
    (source / link).symlink_to(source / leads_to)
    with pytest.raises(ArchiveError, match=words):
        stage(source, dest)
    assert not dest.exists()  # nothing was begun


def test_a_missing_or_empty_source_is_refused(tmp_path: Path, dest: Path) -> None:
    with pytest.raises(ArchiveError, match="No such file"):
        stage(tmp_path / "missing", dest)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ArchiveError, match="There are no files"):
        stage(tmp_path / "hollow", dest)
    assert not dest.exists()  # nothing was begun


def test_a_destination_that_cannot_be_made_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="was not staged to"):
        stage(source, tmp_path / "no" / "such")
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError, match="was not staged to"):
        stage(source, tmp_path / "file")


def test_a_read_only_destination_is_refused(source: Path, small_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs)], check=True)
    with pytest.raises(ArchiveError, match="Read-only file system"):
        stage(source, small_tmpfs)


# --- broken off ---------------------------------------------------------------------------------------------------


def test_an_unreadable_file_is_reported_and_nothing_is_left_behind(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, *args: object, **options: object) -> int:
        if str(path) == str(source / "val/1.jpg"):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ArchiveError, match=r"val/1\.jpg: Permission denied"):
            stage(source, dest)
    assert not (dest / "birds").exists()
    assert is_clean(dest / "birds")
    assert stage(source, dest).copied


def test_the_old_copy_is_kept_when_its_update_is_interrupted(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(stage(source, dest).path)
    (source / "val/2.jpg").write_bytes(b"new")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging._LocalSource, "_copy_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage(source, dest)
    assert contents(dest / "birds") == before
    assert is_clean(dest / "birds")
    stage(source, dest)
    assert contents(dest / "birds") == contents(source)


def test_a_copy_interrupted_before_it_is_put_in_place_is_made_again(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(source, dest)
    (source / "val/2.jpg").write_bytes(b"new")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(staging.Workshop, "put_in_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage(source, dest)
    assert stage(source, dest).copied
    assert contents(dest / "birds") == contents(source)
    assert not stage(source, dest).copied


@pytest.mark.parametrize("change", ["rewritten", "removed", "added"])
def test_a_source_that_changes_while_being_copied_is_reported(
    change: str, source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = staging._LocalSource.copy

    def copy(origin: Any, listing: Any, whole: Path) -> None:
        real(origin, listing, whole)
        if change == "removed":
            (source / "val/1.jpg").unlink()
        else:
            (source / f"val/{1 if change == 'rewritten' else 2}.jpg").write_bytes(b"changed")

    with monkeypatch.context() as patch:
        patch.setattr(staging._LocalSource, "copy", copy)
        with pytest.raises(ArchiveError, match=r"birds changed while it was copied\. Stage it again"):
            stage(source, dest)
    assert not (dest / "birds").exists()
    assert contents(stage(source, dest).path) == contents(source)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "small"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_leftovers_of_a_killed_process_are_removed_before_the_room_check(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stage(source, dest).path.parent / ".birds.staging" / "whole"
    whole.mkdir()
    (whole / "1").write_bytes(b"half")
    (source / "val/2.jpg").write_bytes(b"new")
    left: list[bool] = []
    monkeypatch.setattr(staging, "check_room", lambda *_: left.append(whole.exists()))
    stage(source, dest)
    assert left == [False]


def test_a_source_that_does_not_fit_is_refused_before_anything_is_written(source: Path, small_tmpfs: Path) -> None:
    (source / "large").write_bytes(bytes(5 << 20))
    with pytest.raises(ArchiveError, match=r"5\.\d MiB are needed in .* leaves 4\.0 MiB, .*\n.*mount -t tmpfs"):
        stage(source, small_tmpfs)
    assert not (small_tmpfs / "birds").exists()
    assert is_clean(small_tmpfs / "birds")


def test_a_disk_that_fills_up_while_copying_leaves_nothing_behind(
    source: Path, small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (source / f"{number}.jpg").write_bytes(bytes([number]) * (1 << 20))
    with monkeypatch.context() as patch:
        # Somebody else takes the space after the check.
        patch.setattr(staging, "check_room", lambda *need: None)
        with pytest.raises(ArchiveError, match=r"small is full\. Make room there, and start again"):
            stage(source, small_tmpfs)
    assert not (small_tmpfs / "birds").exists()
    assert is_clean(small_tmpfs / "birds")
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_tmpfs)], check=True)
    assert contents(stage(source, small_tmpfs).path) == contents(source)


def test_a_copy_with_a_damaged_record_is_refused(source: Path, dest: Path) -> None:
    stage(source, dest)
    record = dest / ".birds.staging" / "record.json"
    record.write_text(json.dumps({"source": 3}))
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
    record.write_text("[")
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
