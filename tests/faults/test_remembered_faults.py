"""Remembered files that went stale in silence, were damaged, planted by another user, or have no home."""

import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_feed.storage import file_system
from lightning_feed.storage import folder as folders
from lightning_feed.storage.folder import index_of
from lightning_feed.storage.system import cache_folder

STRANGER = 65534
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")


def unpack(root: Path, *names: str) -> Path:
    """The files, and folders whose modification time never changes, as from an archive with constant times."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        os.utime(folder, (1e9, 1e9))
    return root


def remember(root: Path) -> Path:
    """The file of an index that was just remembered."""
    index_of(root, now_ns=lambda: 10**19)
    (kept,) = (cache_folder() / "index").iterdir()
    return kept


def files_of(root: Path) -> list[str]:
    index = index_of(root)
    return [index.path(i) for i in range(len(index))]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return unpack(tmp_path / "photos", *(f"{name}/{i}.jpg" for name in "ab" for i in range(3)))


# --- a folder unpacked anew, with the same modification times -----------------------------------------------------


def test_more_files_at_the_same_modification_times_are_found(photos: Path) -> None:
    remember(photos)
    unpack(photos, *(f"{name}/{i}.jpg" for name in "ab" for i in range(25)))
    assert len(files_of(photos)) == 50


def test_another_folder_in_its_place_is_found(photos: Path, tmp_path: Path) -> None:
    remember(photos)
    other = unpack(tmp_path / "other", "a/9.jpg", "b/9.jpg")
    photos.rename(tmp_path / "old")
    other.rename(photos)
    assert files_of(photos) == ["a/9.jpg", "b/9.jpg"]


def test_on_fuse_nothing_is_remembered(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """s3fs and its like show the same times whatever is in a folder."""
    mounts = f"30 24 0:30 / {photos} rw - fuse.s3fs s3fs rw\n"
    monkeypatch.setattr(file_system, "read_text", lambda path: mounts)
    index_of(photos, now_ns=lambda: 10**19)
    assert not cache_folder().exists()


# --- damage -------------------------------------------------------------------------------------------------------


def test_an_index_with_any_bit_flipped_is_made_again(photos: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, expected = remember(photos), files_of(photos)
    sound, draw = kept.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(sound)
        damaged[draw.randrange(len(sound))] ^= 1 << draw.randrange(8)
        kept.write_bytes(damaged)
        caplog.clear()
        assert files_of(photos) == expected
        assert "is damaged. The folder is listed again" in caplog.text
    remember(photos)
    assert kept.read_bytes() == sound


# --- other users ---------------------------------------------------------------------------------------------------


def make_foreign(kept: Path) -> None:
    os.chown(kept, STRANGER, STRANGER)


def make_writable(kept: Path) -> None:
    kept.chmod(0o666)


def make_link(kept: Path) -> None:
    target = kept.with_name("planted")
    kept.rename(target)
    kept.symlink_to(target)


def make_fifo(kept: Path) -> None:
    kept.unlink()
    os.mkfifo(kept)  # opened without care, it is waited for


@pytest.mark.parametrize("plant", [pytest.param(make_foreign, marks=root_only), make_writable, make_link, make_fifo])
def test_what_another_user_may_have_planted_is_not_used(
    plant: Callable[[Path], None], photos: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = remember(photos)
    arrays = folders.load_arrays(kept)
    assert arrays is not None
    assert len(arrays["labels"]) == 6
    folders.save_arrays(kept, **{**arrays, "labels": arrays["labels"][::-1].copy()})
    assert index_of(photos).labels.tolist() == [1, 1, 1, 0, 0, 0]  # it would be believed
    plant(kept)
    with caplog.at_level(logging.INFO):
        assert index_of(photos).labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert f"The remembered index {kept} is not used" in caplog.text


# --- no home -------------------------------------------------------------------------------------------------------


@root_only
def test_a_user_without_a_home_can_train() -> None:
    """As containers run: a number for a user, no HOME, no line in /etc/passwd."""
    code = (
        "import os, sys, zipfile; from pathlib import Path; from lightning_feed.storage.folder import index_of;"
        "from lightning_feed.storage.system import cache_folder; os.setuid(54321);"
        "index_of(Path(sys.argv[1]), now_ns=lambda: 10**19);"
        "print(cache_folder(), oct(cache_folder().stat().st_mode), len(list(cache_folder().glob('index/*'))))"
    )
    environment = {name: os.environ[name] for name in os.environ if name not in ("HOME", "XDG_CACHE_HOME")}
    with tempfile.TemporaryDirectory() as folder:  # pytest's is closed to other users
        photos = unpack(Path(folder) / "photos", "a/1.jpg", "b/1.jpg")
        Path(folder).chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", code, str(photos)],
            env={**environment, "TMPDIR": folder},
            capture_output=True,
            text=True,
        )
    assert done.stderr == ""
    assert done.stdout.split() == [f"{folder}/lightning_feed-54321", "0o40700", "1"]
