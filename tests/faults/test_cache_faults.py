"""What other users can do to a shared cache, and a killed worker to the loader."""

import multiprocessing
import os
import signal
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data._utils import signal_handling

from lightning_feed.archive.shared_cache import PREFIX, SampleCache
from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader

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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("background", [0, 2])
def test_a_worker_that_is_killed_with_a_batch_on_its_way_is_named(
    persistent: bool, background: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection breaks before torch can know that it is dead: ConnectionResetError, and its siblings lived on."""
    # Its handler of SIGCHLD raises anywhere in the main thread, also in pytest, as soon as it is told.
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", lambda: None)
    threads = set(threading.enumerate())
    loader = FeedLoader(
        list(range(400)), batch_size=2, num_workers=2, persistent_workers=persistent, background=background
    )
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    source: Any = batches.source
    workers = list(source._workers)

    def break_off() -> None:
        os.kill(workers[0].pid, signal.SIGKILL)
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(source, "_next_data", break_off)
    with pytest.raises(LoaderError, match=rf"\(pid {workers[0].pid}\) was killed by SIGKILL.*memory ran out"):
        for _ in batches:
            pass
    assert not any(worker.is_alive() for worker in workers)
    for thread in set(threading.enumerate()) - threads:
        thread.join(10)  # told to end, without being waited for
        assert not thread.is_alive()
    assert sum(len(batch) for batch in loader) == 400


def test_an_error_of_the_users_own_connection_stays_what_it_is() -> None:
    class Remote:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            raise ConnectionResetError(104, "the bucket is gone")

    with pytest.raises(ConnectionResetError, match="the bucket is gone"):
        list(FeedLoader(Remote(), batch_size=2, num_workers=1))
