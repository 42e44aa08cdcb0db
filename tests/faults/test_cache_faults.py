"""What other users can do to a cache, and crashes and full disks; what a killed worker can do to the loader."""

import asyncio
import errno
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data._utils import signal_handling

from lightning_feed.errors import ArchiveError, LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.storage.read_through import ReadThrough
from lightning_feed.storage.shared_cache import PREFIX, SampleCache

STRANGER = 65534


LIMIT = 40 * 4096


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


# --- a cache of remote files ------------------------------------------------------------------------------------------


def put(cache: ReadThrough, key: str, data: bytes) -> None:
    with cache._claimed(key) as part:
        if part is not None:
            cache._put(key, part, data)


def fill(folder: Path, seed: int, count: int = 10**6) -> None:
    draw, cache = random.Random(seed), ReadThrough(folder, LIMIT)
    for _ in range(count):
        put(cache, f"{draw.randrange(256):02x}{draw.randrange(10**6)}", bytes(draw.randrange(30_000)))


def taken_bytes(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.glob("read-through/??/*"))


@pytest.mark.parametrize("processes", [1, 3])
def test_a_cache_is_within_its_limit_after_any_kill(tmp_path: Path, processes: int) -> None:
    draw, fork = random.Random(processes), multiprocessing.get_context("fork")
    for number in range(8):
        writers = [fork.Process(target=fill, args=(tmp_path, 10 * number + other)) for other in range(processes)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.01, 0.15))
        for writer in writers:
            writer.kill()
            writer.join()
        assert taken_bytes(tmp_path) <= LIMIT
        cache = ReadThrough(tmp_path, LIMIT)
        assert cache.used_bytes() == taken_bytes(tmp_path) <= LIMIT
        assert not list(cache.folder.glob("??/*.part"))
        del cache  # who opens it next is alone


@pytest.mark.parametrize("left", [b"", b"\0" * 8, b"\xff" * 8, b"\x01"], ids=repr)
def test_a_cache_is_within_its_limit_after_a_crash_of_the_machine(tmp_path: Path, left: bytes) -> None:
    """The count is not synced: the disk has what it was at any time, or nothing."""
    fill(tmp_path, 1, 60)
    before = taken_bytes(tmp_path)
    (tmp_path / "read-through/used_bytes").write_bytes(left)
    assert ReadThrough(tmp_path, LIMIT).used_bytes() == before
    fill(tmp_path, 2, 60)
    assert taken_bytes(tmp_path) <= LIMIT


@pytest.mark.parametrize("left", [b"\0" * 8, b"\xff" * 8], ids=repr)
def test_a_count_that_is_damaged_in_use_ends_no_run(tmp_path: Path, left: bytes) -> None:
    fill(tmp_path, 1, 60)
    cache = ReadThrough(tmp_path, LIMIT)
    (tmp_path / "read-through/used_bytes").write_bytes(left)
    for number in range(100):
        put(cache, f"00{number}", bytes(4000))
    assert taken_bytes(tmp_path) <= LIMIT
    assert cache.used_bytes() == taken_bytes(tmp_path)


@pytest.mark.parametrize("inner", ["", "00"])
def test_a_folder_that_others_could_write_to_is_refused(tmp_path: Path, inner: str) -> None:
    folder = ReadThrough(tmp_path, LIMIT).folder / inner
    folder.chmod(0o777)
    with pytest.raises(ArchiveError, match=r"others may write to it \(mode 0777\), and may have\. Remove it"):
        ReadThrough(tmp_path, LIMIT)


@pytest.mark.parametrize("inner", ["read-through", "read-through/00"])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, inner: str) -> None:
    (tmp_path / inner).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / inner).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArchiveError, match="is not a folder"):
        ReadThrough(tmp_path, LIMIT)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("plant", [os.mkfifo, plant_link, plant_folder])
@pytest.mark.parametrize("name", ["00a", "00a.part"])
def test_nothing_in_a_cache_is_waited_for_or_followed(tmp_path: Path, name: str, plant: Callable[[Path], None]) -> None:
    cache = ReadThrough(tmp_path, LIMIT)
    path = cache.folder / name[:2] / name[2:]
    plant(path)
    assert cache.read("00a", 5) is None
    assert cache.keep("00a") == os.path.lexists(cache.folder / "00/a")

    async def fetch() -> bytes:
        return b"hello"

    assert asyncio.run(asyncio.wait_for(cache.through("00a", 5, fetch), 10)) == b"hello"
    if plant is not plant_folder:
        if not os.path.lexists(path):
            plant(path)
        del cache
        cache = ReadThrough(tmp_path, LIMIT)
        assert not path.is_fifo()  # nothing of it is left when it is opened
        assert not path.is_symlink()
        put(cache, "00a", b"hello")
        assert cache.read("00a", 5) == b"hello"


def test_a_link_in_place_of_a_file_in_the_making_is_not_written_through(tmp_path: Path) -> None:
    cache = ReadThrough(tmp_path, LIMIT)
    (tmp_path / "precious").write_bytes(b"precious")
    (cache.folder / "00/a.part").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links") as found:
        put(cache, "00a", b"hello")
    assert found.value.errno == errno.ELOOP  # told once, and the sample is read from its source
    assert (tmp_path / "precious").read_bytes() == b"precious"
