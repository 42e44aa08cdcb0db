"""Staging beside other users and planted files: the source stays, and what is wrong is said."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_feed.cli import main
from lightning_feed.errors import ArchiveError
from lightning_feed.machine.file_system import find_caveats
from lightning_feed.machine.private_files import cache_folder, read_json, write_json
from lightning_feed.storage import stage, staging, whole
from lightning_feed.storage.whole import Workshop

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files of another user can be made by root alone")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "birds"
    for name in ("1.jpg", "val/2.jpg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() * 100)
    return root


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "fast"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


# --- other users --------------------------------------------------------------------------------------------------


def test_a_copy_of_public_files_is_accessible_only_to_its_owner(source: Path, dest: Path) -> None:
    source.chmod(0o755)
    (source / "1.jpg").chmod(0o644)
    assert stat.S_IMODE(stage(source, dest).path.stat().st_mode) == 0o700
    assert stat.S_IMODE(stage(source / "1.jpg", dest).path.stat().st_mode) == 0o600
    assert stat.S_IMODE(dest.stat().st_mode) == 0o700


def plant(folder: Path) -> None:
    """Another user's folder that all may write to."""
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o777)


@as_root
def test_another_users_folder_in_place_of_a_removed_copy_is_refused(source: Path, dest: Path) -> None:
    shutil.rmtree(stage(source, dest).path)
    plant(dest / "birds")
    (dest / "birds/theirs").write_bytes(b"theirs")
    with pytest.raises(ArchiveError, match="is not a staged copy"):
        stage(source, dest)
    assert contents(dest / "birds") == {"theirs": b"theirs"}


@as_root
def test_another_users_folder_beside_the_copy_is_not_used(source: Path, dest: Path) -> None:
    dest.mkdir()
    plant(dest / ".birds.staging")
    with pytest.raises(ArchiveError, match="it belongs to another user"):
        stage(source, dest)
    assert list((dest / ".birds.staging").iterdir()) == []


@as_root
def test_a_dest_in_which_others_can_replace_the_copy_is_reported(tmp_path: Path) -> None:
    assert not any("Other users" in caveat for caveat in find_caveats(str(tmp_path)))
    tmp_path.chmod(0o777)
    assert "Other users can replace a copy" in find_caveats(str(tmp_path))[0]
    tmp_path.chmod(0o1777)
    assert not any("Other users" in caveat for caveat in find_caveats(str(tmp_path)))
    os.chown(tmp_path, NOBODY, NOBODY)
    assert "/dev/shm/<user>" in find_caveats(str(tmp_path))[0]
    os.chown(tmp_path, 0, 0)


# --- documents kept between runs ----------------------------------------------------------------------------------


def make_foreign(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def make_writable(path: Path) -> None:
    path.chmod(0o666)


def make_link(path: Path) -> None:
    target = path.with_name("planted")
    path.rename(target)
    path.symlink_to(target)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # opened without care, it is waited for


@pytest.mark.parametrize("planting", [pytest.param(make_foreign, marks=as_root), make_writable, make_link, make_fifo])
def test_a_document_that_another_user_may_have_planted_is_not_used(planting: object, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "result.json"
    write_json(path, {"workers": 4})
    assert read_json(path) == {"workers": 4}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    planting(path)  # type: ignore[operator]
    assert read_json(path) == {}


def test_a_user_without_a_home_gets_a_private_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As containers run: a number for a user, no HOME, no line in /etc/passwd."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache_folder() == tmp_path / f"lightning_feed-{os.getuid()}"
    write_json(cache_folder() / "tuning" / "x.json", {})
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


# --- waiting ------------------------------------------------------------------------------------------------------


def test_the_stage_command_reports_waiting_for_another_process(
    source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "_SAY_AFTER_S", 0.02)
    dest.mkdir()
    command = [sys.executable, "-m", "lightning_feed", "stage", str(source), str(dest)]
    with Workshop(dest / "birds", "staging").claimed(wait=True):
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None
        assert "Waiting for " in waiting.stderr.readline()
    assert ", copied, " in waiting.communicate()[0]
    assert waiting.returncode == 0


# --- a DEST that cannot be --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad", ["/proc", "n" * 300, "d/" * 2040, "dangling/deep", "loop", "loop/in", "file", "/dev/null"]
)
def test_an_invalid_dest_is_reported_and_nothing_is_written(
    source: Path, tmp_path: Path, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    assert main(["stage", str(source), str(tmp_path / bad)]) == 1
    assert capsys.readouterr().err.startswith("lightning-feed: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "data", "file", "loop"]


def test_a_source_name_too_long_for_the_working_folder_is_reported(source: Path, dest: Path) -> None:
    long = source.rename(source.parent / ("b" * 250))
    with pytest.raises(ArchiveError, match=r"File name too long"):
        stage(long, dest)


# --- what is no file ----------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["/dev/zero", "fifo"])
def test_special_files_are_not_staged(source: Path, dest: Path, tmp_path: Path, special: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (source / "x.jpg").symlink_to(tmp_path / special)
    with pytest.raises(ArchiveError, match=r"x\.jpg: it is not a file"):
        stage(source, dest)
    with pytest.raises(ArchiveError, match="it is not a file"):
        stage(source / "x.jpg", dest)


def test_copy_threads_stop_after_the_first_error(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (source / "large").open("wb") as file:
        file.truncate(4 * staging._CHUNK_BYTES)
    real = staging._LocalSource._copy_file
    copied: list[int] = []

    class WaitsForTheError:
        """A progress bar: after its first chunk, the large file goes on when the other has failed."""

        def __init__(self, origin: staging._LocalSource) -> None:
            self.origin = origin

        def update(self, size: int) -> None:
            copied.append(size)
            assert self.origin._stop.wait(60)

    def copy_file(origin: staging._LocalSource, path: str, copy: str, bar: object) -> None:
        if path.endswith("1.jpg"):
            raise OSError(5, "Input/output error", path)
        real(origin, path, copy, WaitsForTheError(origin) if path.endswith("large") else bar)

    monkeypatch.setattr(staging._LocalSource, "_copy_file", copy_file)
    with pytest.raises(ArchiveError, match=r"1\.jpg: Input/output error"):
        stage(source, dest)
    assert copied in ([], [staging._CHUNK_BYTES])  # nothing if the other file failed before
    assert not list((dest / ".birds.staging").glob("whole*"))
