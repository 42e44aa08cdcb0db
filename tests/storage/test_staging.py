"""A staged copy equals its source, whatever happens to either, and what cannot be staged is refused with a reason."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_feed import storage
from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.storage import stage, stage_copy, unstage
from lightning_feed.storage.staging import StagePlace, release


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


def listing(root: Path) -> dict[str, tuple[bytes, int] | None]:
    """Everything below a folder: contents and times of files, None for folders."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in root.rglob("*")
    }


def is_clean(target: Path) -> bool:
    """No part of a file is left, and nobody is said to be copying."""
    return not StagePlace(target).parts.exists() and is_complete(target)


def is_complete(target: Path) -> bool:
    record = StagePlace(target).read()
    return record is not None and record.checked_s is not None


# --- equal --------------------------------------------------------------------------------------------------------


def test_a_folder_is_copied_with_names_times_and_modes(source: Path, dest: Path) -> None:
    (source / "val/1.jpg").chmod(0o440)
    done = stage(source, dest)
    assert listing(done.path) == listing(source)
    assert (done.path / "val/1.jpg").stat().st_mode & 0o777 == 0o400
    assert done.path == dest / "birds"
    assert (done.files, done.copied_files, done.removed) == (5, 5, 0)
    assert done.total_bytes == done.copied_bytes == sum(p.stat().st_size for p in source.rglob("*") if p.is_file())
    assert is_clean(done.path)


def test_a_single_file_is_copied(source: Path, dest: Path) -> None:
    done = stage(source / "val/1.jpg", dest)
    assert done.path == dest / "1.jpg"
    assert done.path.read_bytes() == (source / "val/1.jpg").read_bytes()
    assert stage(source / "val/1.jpg", dest).copied_files == 0
    (source / "val/1.jpg").write_bytes(b"new")
    assert stage(source / "val/1.jpg", dest).copied_files == 1
    assert done.path.read_bytes() == b"new"


def test_nothing_is_copied_twice(source: Path, dest: Path) -> None:
    stage(source, dest)
    again = stage(source, dest)
    assert (again.files, again.copied_files, again.copied_bytes, again.removed) == (5, 0, 0, 0)


def test_a_copy_that_an_earlier_version_made_is_taken(source: Path, dest: Path) -> None:
    stage(source, dest)
    place = StagePlace(dest / "birds")
    record = {
        "source": str(source),
        "boot_id": "7f",
        "remove_at_exit": False,
        "files": 5,
        "total_bytes": 7,
        "checked_s": 9.5,
    }
    place.record.write_text(json.dumps({**record, "hashed": False, "version": 1}))
    assert stage(source, dest).copied_files == 0


def test_changed_added_and_deleted_files_are_brought_up_to_date(source: Path, dest: Path) -> None:
    stage(source, dest)
    (source / "val/1.jpg").write_bytes(b"changed")
    (source / "new").mkdir()
    (source / "new/2.jpg").write_bytes(b"added")
    shutil.rmtree(source / "train/zürich")
    (source / "train/a b.jpg").unlink()
    (source / "train/a b.jpg").mkdir()  # a folder where a file was
    done = stage(source, dest)
    assert (done.copied_files, done.removed) == (2, 3)
    assert listing(done.path) == listing(source)


def test_what_does_not_belong_into_the_copy_goes(source: Path, dest: Path, tmp_path: Path) -> None:
    done = stage(source, dest)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (done.path / "link").symlink_to(precious)
    (done.path / "val/1.jpg").write_bytes(b"damaged")
    stage(source, dest)
    assert listing(done.path) == listing(source)
    assert (precious / "file").exists()


def test_links_are_followed(source: Path, dest: Path, tmp_path: Path) -> None:
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
    assert stage(source, dest).copied_files == 0


def test_contents_are_no_longer_compared_on_request(source: Path, dest: Path) -> None:
    with pytest.raises(SettingsError, match="sizes and modification times are compared"):
        stage(source, dest, hash=True)


@pytest.mark.parametrize("name", ["StagedPath", "stage_in_background"])
def test_names_that_went_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} was removed: stage"):
        getattr(storage, name)


def test_a_file_system_without_modes_takes_a_copy(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "val/1.jpg").chmod(0o500)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    assert stage(source, dest).copied_files == 5
    assert stage(source, dest).copied_files == 0


# --- refused ------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_ours_is_refused_and_replaced_only_by_force(source: Path, dest: Path) -> None:
    (dest / "birds").mkdir(parents=True)
    (dest / "birds/mine.txt").touch()
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
    assert (dest / "birds/mine.txt").exists()
    assert [path.name for path in dest.iterdir()] == ["birds"]
    stage(source, dest, force=True)
    assert listing(dest / "birds") == listing(source)


def test_two_sources_of_one_name_do_not_mix(source: Path, dest: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "birds"
    shutil.copytree(source, other)
    stage(source, dest)
    with pytest.raises(ArchiveError, match=r"is a copy of .*data/birds\. Choose another DEST"):
        stage(other, dest)
    with pytest.raises(ArchiveError, match="is not a staged copy of"):
        unstage(other, dest)


@pytest.mark.parametrize(
    ("given", "to"), [("data/birds", "data"), ("data/birds", "data/birds"), ("data/birds", "data/birds/val")]
)
def test_one_in_the_other_is_refused(source: Path, tmp_path: Path, given: str, to: str) -> None:
    before = listing(tmp_path)
    with pytest.raises(ArchiveError, match="one is inside the other"):
        stage(tmp_path / given, tmp_path / to)
    assert listing(tmp_path) == before


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
        ("val/loop", "", r"val/loop is a symbolic link to a folder above it"),
        ("val/dead.jpg", "gone", r"dead\.jpg cannot be read.*leads nowhere"),
    ],
)
def test_links_without_an_end_or_a_file_are_refused(
    source: Path, dest: Path, link: str, leads_to: str, words: str
) -> None:
    (source / link).symlink_to(source / leads_to)
    with pytest.raises(ArchiveError, match=words):
        stage(source, dest)
    assert list(dest.iterdir()) == []


def test_nothing_to_stage_is_refused(tmp_path: Path, dest: Path) -> None:
    with pytest.raises(ArchiveError, match="No such file"):
        stage(tmp_path / "missing", dest)
    (tmp_path / "hollow").mkdir()
    with pytest.raises(ArchiveError, match="There are no files"):
        stage(tmp_path / "hollow", dest)
    assert list(dest.iterdir()) == []


def test_a_destination_that_cannot_be_made_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="cannot be made"):
        stage(source, tmp_path / "no" / "such")
    (tmp_path / "file").touch()
    with pytest.raises(ArchiveError, match="cannot be made"):
        stage(source, tmp_path / "file")


def test_a_destination_of_another_user_is_refused(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(source, dest)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ArchiveError, match="belongs to another user"):
        stage(source, dest)


def test_a_destination_that_is_read_only_is_refused(source: Path, small_tmpfs: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_tmpfs)], check=True)
    with pytest.raises(ArchiveError, match="Read-only file system"):
        stage(source, small_tmpfs)


# --- broken off ---------------------------------------------------------------------------------------------------


def test_an_unreadable_file_is_named_and_the_others_kept(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str, *args: object, **options: object) -> int:
        if str(path) == str(source / "val/1.jpg"):
            raise PermissionError(13, "Permission denied", path)
        return real_open(path, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ArchiveError, match=r"val/1\.jpg could not be copied .*: Permission denied"):
            stage(source, dest)
    assert not is_complete(dest / "birds")
    done = stage(source, dest)
    assert done.copied_files >= 1
    assert is_clean(done.path)


@pytest.mark.parametrize("at", ["wait", "ThreadPoolExecutor.submit"])
def test_ctrl_c_ends_the_copying_at_once(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    with (source / "large").open("wb") as file:
        file.truncate(1 << 30)
    real, calls = stage_copy.ThreadPoolExecutor.submit, iter(range(10))

    def interrupted(*args: object, **options: object) -> object:
        if at == "wait" or next(calls) == 1:  # one thread copies the large file by then
            raise KeyboardInterrupt
        return real(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_feed.storage.stage_copy.{at}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stage(source, dest)
    assert not is_complete(dest / "birds")
    assert not (dest / "birds/large").exists()
    assert list(StagePlace(dest / "birds").parts.iterdir()) == []


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_a_source_that_changes_while_it_is_copied_is_an_error(
    change: str, source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(mirror: stage_copy.Mirror) -> None:
        (source / "val/1.jpg").unlink()
        if change == "rewritten":
            (source / "val/1.jpg").write_bytes(b"changed")
        real(mirror)

    real = stage_copy.Mirror.apply
    with monkeypatch.context() as patch:
        patch.setattr(stage_copy.Mirror, "apply", apply)
        with pytest.raises(ArchiveError, match=r"val/1\.jpg could not be copied .*: (it changed|No such file)"):
            stage(source, dest)
    assert not is_complete(dest / "birds")
    done = stage(source, dest)
    assert listing(done.path) == listing(source)
    assert is_clean(done.path)


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
    release(StagePlace(point / "birds"))
    subprocess.run(["umount", str(point)], check=True)


def test_a_file_that_changed_needs_no_room_beside_its_old_version(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "large").write_bytes(bytes(1 << 20))
    stage(source, dest)
    (source / "large").write_bytes(b"x" * (1 << 20))
    asked: list[int] = []
    monkeypatch.setattr(stage_copy, "check_room", lambda new_bytes, *_: asked.append(new_bytes))
    stage(source, dest)
    stage(source, dest, force=True)
    assert asked == [0, 0]


def test_half_files_of_a_process_that_was_killed_take_no_room(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = StagePlace(stage(source, dest).path)
    place.parts.mkdir()
    (place.parts / "1").write_bytes(b"half")
    (source / "val/2.jpg").write_bytes(b"new")
    left: list[bool] = []
    monkeypatch.setattr(stage_copy, "check_room", lambda *_: left.append(place.parts.exists()))
    stage(source, dest)
    assert left == [False]


def test_what_does_not_fit_is_refused_before_a_byte_is_written(source: Path, small_tmpfs: Path) -> None:
    (source / "large").write_bytes(bytes(5 << 20))
    with pytest.raises(ArchiveError, match=r"5\.1 MiB are to be copied .* leaves 4\.0 MiB, .*\n.*mount -t tmpfs"):
        stage(source, small_tmpfs)
    assert list(small_tmpfs.iterdir()) == []


def test_a_disk_full_in_the_middle_leaves_whole_files_and_is_gone_on_with(
    source: Path, small_tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (source / f"{number}.jpg").write_bytes(bytes([number]) * (1 << 20))
    with monkeypatch.context() as patch:
        # Somebody else takes the space after the check.
        patch.setattr(stage_copy, "check_room", lambda *need: None)
        with pytest.raises(ArchiveError, match=r"No space left on device\. Make room.* and stage again"):
            stage(source, small_tmpfs)
    target = small_tmpfs / "birds"
    assert not is_complete(target)
    expected = listing(source)
    there = {name: found for name, found in listing(target).items() if found}
    assert there
    assert all(expected[name] == found for name, found in there.items())
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_tmpfs)], check=True)
    done = stage(source, small_tmpfs)
    assert done.copied_files == 10 - len(there)
    assert listing(target) == expected
    assert is_clean(target)


# --- removed ------------------------------------------------------------------------------------------------------


def test_unstage_removes_the_copy_and_all_beside_it(source: Path, dest: Path) -> None:
    stage(source, dest)
    assert unstage(source, dest) is True
    assert list(dest.iterdir()) == []
    assert unstage(source, dest) is False
    assert len(listing(source)) == 8
