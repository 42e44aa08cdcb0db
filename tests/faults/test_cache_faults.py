"""What other users and killed workers can do to a shared cache, and to the workers beside them."""

import multiprocessing
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_feed.archive.cache_file import PREFIX
from lightning_feed.archive.shared_cache import SampleCache

STRANGER = 65534


def plant_file(path: Path) -> None:
    path.write_bytes(b"foreign")
    path.chmod(0o666)
    os.chown(path, STRANGER, STRANGER)


def plant_fifo(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)
    os.chown(path, STRANGER, STRANGER)


def plant_folder(path: Path) -> None:
    path.mkdir(mode=0o777)
    os.chown(path, STRANGER, STRANGER)


def plant_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def use_a_cache(directory: str, uid: int) -> None:
    os.setuid(uid)
    cache = SampleCache(4, 1 << 20, kind="bytes", name="run", directory=directory)
    assert cache.put(1, np.arange(8, dtype=np.uint8))
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    cache.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("plant", [plant_file, plant_fifo, plant_folder, plant_link])
def test_files_of_others_in_the_users_name_do_not_stop_a_run(plant: Callable[[Path], None]) -> None:
    victim = 54321
    shm = Path("/dev/shm") / f"lightning-feed-test-{os.getpid()}"
    shm.mkdir()
    planted = shm / f"{PREFIX}{victim}-deadbeef"
    try:
        shm.chmod(0o1777)  # as /dev/shm: all may write, and only remove what is theirs
        plant(planted)
        user = multiprocessing.get_context("fork").Process(target=use_a_cache, args=(str(shm), victim))
        user.start()
        user.join()
        assert user.exitcode == 0
        assert [path.name for path in shm.iterdir()] == [planted.name]
    finally:
        planted.rmdir() if planted.is_dir() and not planted.is_symlink() else planted.unlink()
        shm.rmdir()
