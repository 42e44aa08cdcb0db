"""SampleCache: one buffer for all processes, whole samples or none, bounded, and gone in the end."""

import contextlib
import copy
import errno
import fcntl
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from lightning_feed.errors import ArchiveError, SettingsError
from lightning_feed.storage import shared_cache, system
from lightning_feed.storage.shared_cache import PREFIX, CacheStats, SampleCache
from lightning_feed.storage.system import parse_limit

METHODS = ["fork", "spawn"]
MIB = 1 << 20

# Python warns of a fork beside threads; that it is safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning")


def _files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory that must be empty again when the test has let go of its caches."""
    yield tmp_path
    for cache in list(shared_cache._open_files.values()):
        if cache.path.parent == tmp_path:
            cache.close()
    assert _files(tmp_path) == []


def _cache(directory: Path, size: int = 16, limit: int = MIB, **options: Any) -> SampleCache:
    return SampleCache(size, limit, **{"kind": "decoded", "name": "test", "directory": directory, **options})


def _sample(index: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(index).integers(0, 255, (index + 1, 50, 3), dtype=np.uint8)


def _python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program that knows nothing of this one."""
    preamble = (
        "import os, signal, sys\nimport numpy as np\nfrom pathlib import Path\n"
        "from lightning_feed.storage import shared_cache\n"
        "from lightning_feed.storage.shared_cache import SampleCache\n"
        "cache = SampleCache(16, 1 << 20, kind='decoded', name='test', directory=sys.argv[1])\n"
    )
    command = [sys.executable, "-c", preamble + code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- one sample ---------------------------------------------------------------------------------------------------


@given(
    array=arrays.arrays(
        st.one_of(
            arrays.boolean_dtypes(),
            arrays.integer_dtypes(),
            arrays.floating_dtypes(),
            arrays.complex_number_dtypes(),
            arrays.datetime64_dtypes(),
            arrays.unicode_string_dtypes(),
        ),
        arrays.array_shapes(min_dims=0, max_dims=7, min_side=0, max_side=3),
    ),
    turned=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_what_comes_out_is_what_went_in(
    array: npt.NDArray[Any], turned: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = _cache(tmp_path_factory.getbasetemp(), name="property")
    given_array = array.T if turned else array
    assert cache.get(3) is None
    assert cache.put(3, given_array)
    found = cache.get(3)
    assert found is not None
    assert found.dtype == given_array.dtype
    assert found.shape == given_array.shape
    assert found.tobytes() == given_array.tobytes()
    assert cache.get(4) is None
    cache.close()


def test_a_sample_cannot_be_written_to(place: Path) -> None:
    cache = _cache(place)
    cache.put(0, _sample(0))
    found = cache.get(0)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0


def test_the_first_to_come_stays(place: Path) -> None:
    cache = _cache(place)
    assert cache.put(1, _sample(1))
    before = cache.stats()
    assert cache.put(1, _sample(2))
    np.testing.assert_array_equal(cache.get(1), _sample(1))
    assert cache.stats().stored_bytes == before.stored_bytes


@pytest.mark.parametrize("array", [np.array([object()]), np.zeros(2, dtype=[("a", "i4")])])
def test_what_cannot_be_shared_is_refused(place: Path, array: npt.NDArray[Any]) -> None:
    with pytest.raises(ArchiveError, match=r"Sample 2 is of dtype .*Only numeric arrays"):
        _cache(place).put(2, array)


# --- many processes -----------------------------------------------------------------------------------------------


def _fill_and_read(cache: SampleCache, first: int, step: int) -> None:
    for index in range(first, cache.size, step):
        if cache.get(index) is None:
            cache.put(index, _sample(index))
    for index in range(first, cache.size, step):
        found = cache.get(index)
        assert found is not None
        assert (found == _sample(index)).all()


@pytest.mark.parametrize("method", METHODS)
def test_processes_of_any_start_fill_one_cache(place: Path, method: str) -> None:
    cache = _cache(place)
    context = multiprocessing.get_context(method)
    workers = [context.Process(target=_fill_and_read, args=(cache, number, 2)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    assert cache.stats() == CacheStats(
        hits=16, misses=16, entries=16, stored_bytes=_space(range(16)), limit_bytes=MIB, full=False
    )
    for index in range(16):
        np.testing.assert_array_equal(cache.get(index), _sample(index))


def _space(indices: Any) -> int:
    """Bytes of the records of samples: heads of 64, rounded up to 64."""
    return sum(64 + -(-_sample(index).nbytes // 64) * 64 for index in indices)


def test_threads_fill_one_cache_and_are_counted_exactly(place: Path) -> None:
    cache = _cache(place, size=64, limit=4 * MIB)
    threads = [threading.Thread(target=_fill_and_read, args=(cache, number, 8)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries) == (64, 64, 64)


def test_two_threads_that_count_at_once_are_both_counted(place: Path) -> None:
    cache = _cache(place)
    cache.get(0)
    slots, meeting = cache._slots, threading.Barrier(2)

    class Meeting:
        """Lets both threads read before one of them writes, if they can."""

        def __getitem__(self, place: int) -> int:
            value = slots[place]
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(0.1)
            return value

        def __setitem__(self, place: int, value: int) -> None:
            slots[place] = value

    cache._slots = Meeting()  # type: ignore[assignment]
    threads = [threading.Thread(target=cache.get, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache._slots = slots
    assert cache.stats().misses == 3


def test_one_process_at_a_time_takes_space(place: Path) -> None:
    cache = _cache(place)
    worker = multiprocessing.get_context("fork").Process(target=_exit_7_where_it_is_locked, args=(str(cache.path),))
    with cache._file.locked():
        worker.start()
        worker.join(300)
    assert worker.exitcode == 7


def _exit_7_where_it_is_locked(path: str) -> None:
    with open(path, "r+b") as file:  # noqa: PTH123
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except BlockingIOError:
            os._exit(7)


def test_space_taken_for_what_somebody_else_stored_is_given_back(place: Path) -> None:
    cache = _cache(place)
    with cache._file.locked():
        first, second = cache._file.take(640), cache._file.take(640)
    assert (first, second) == (0, 640)
    cache._publish(3, 0, 640)
    cache._publish(3, 640, 640)
    stats = cache.stats()
    assert (stats.entries, stats.stored_bytes) == (1, 640)
    assert cache.growth_bytes == MIB - 640


def test_all_at_once_on_the_same_samples_store_each_once(place: Path) -> None:
    cache = _cache(place, size=64, limit=16 * MIB)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_fill_and_read, args=(cache, 0, 1)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    stats = cache.stats()
    assert stats.entries == 64
    assert stats.stored_bytes == _space(range(64))
    assert stats.hits + stats.misses == 4 * 2 * 64


def test_processes_that_share_only_a_name_see_each_others_samples(place: Path) -> None:
    cache = _cache(place)
    cache.put(0, _sample(0))
    done = _python(
        "assert cache.get(0)[0, 0, 0] == int(sys.argv[2]); cache.put(1, np.arange(7))", place, _sample(0)[0, 0, 0]
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(cache.get(1), np.arange(7))
    assert cache.stats() == CacheStats(
        hits=2, misses=0, entries=2, stored_bytes=64 + 192 + 128, limit_bytes=MIB, full=False
    )


def test_a_fork_beside_a_thread_that_holds_the_locks_does_not_hang(place: Path) -> None:
    cache = _cache(place)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with system.process_lock:
            held.set()
            release.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    worker = multiprocessing.get_context("fork").Process(target=_fill_and_read, args=(cache, 0, 1))
    worker.start()
    worker.join(300)
    release.set()
    thread.join()
    assert worker.exitcode == 0
    assert cache.stats().entries == 16


def test_a_copy_and_a_pickle_read_the_same_samples(place: Path) -> None:
    cache = _cache(place, memory_left=_plenty)
    cache.put(5, _sample(5))
    assert copy.deepcopy(cache) is cache
    other = pickle.loads(pickle.dumps(cache))
    np.testing.assert_array_equal(other.get(5), _sample(5))
    assert other._file is cache._file  # a POSIX lock would be lost with a second descriptor


def _plenty() -> int:
    return 1 << 40


# --- killed -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("SampleCache._publish = die", id="before it is published"),
        pytest.param("shared_cache._CacheFile.take = die", id="while it holds the lock"),
        pytest.param("pwrite = os.pwrite; os.pwrite = lambda *a: die(pwrite(*a))", id="in the middle of writing"),
    ],
)
def test_a_writer_that_is_killed_leaves_nothing_half_written(place: Path, moment: str) -> None:
    cache = _cache(place)
    cache.put(0, _sample(0))
    die = "def die(*_): os.kill(os.getpid(), signal.SIGKILL)\n"
    done = _python(f"{die}{moment}\ncache.put(1, np.full(999, 7))", place)
    assert done.returncode == -signal.SIGKILL
    assert cache.get(1) is None
    assert cache.stats().entries == 1
    assert cache.put(1, _sample(1))
    assert cache.put(2, _sample(2))
    for index in range(3):
        np.testing.assert_array_equal(cache.get(index), _sample(index))


def test_what_a_killed_run_leaves_is_removed_by_the_next(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert _python("cache.put(1, np.arange(9)); os.kill(os.getpid(), signal.SIGKILL)", place).returncode < 0
    assert _files(place) == [f"{PREFIX}{os.getuid()}-test"]
    with caplog.at_level(logging.INFO):
        _cache(place, name="next")
    assert "left behind by an earlier run" in caplog.text


def test_what_a_live_run_uses_is_not_removed(place: Path) -> None:
    cache = _cache(place)
    code = "from lightning_feed.storage.system import remove_leftovers; remove_leftovers(Path(sys.argv[1]), '*')"
    assert _python(code, place).returncode == 0
    assert cache.path.exists()


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_lives_as_long_as_its_last_user(place: Path, method: str) -> None:
    cache = _cache(place)
    context = multiprocessing.get_context(method)
    go = context.Event()
    worker = context.Process(target=_wait_and_fill, args=(cache, go))
    worker.start()
    go.set()
    worker.join(300)
    assert worker.exitcode == 0
    assert cache.path.exists(), "a worker's end must not take the cache from the others"
    np.testing.assert_array_equal(cache.get(0), _sample(0))


def _wait_and_fill(cache: SampleCache, go: Any) -> None:
    go.wait(60)
    _fill_and_read(cache, 0, 4)


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise RuntimeError", "del cache"])
def test_nothing_is_left_when_a_program_ends(place: Path, end: str) -> None:
    _python(f"cache.put(1, np.arange(9)); view = cache.get(1)\n{end}", place)
    assert _files(place) == []


_WITH_DAEMONS = """
import multiprocessing, sys, time
import numpy as np
from lightning_feed.storage.shared_cache import SampleCache

def work(cache, index, done):
    cache.put(index, np.arange(index))
    done.set()
    time.sleep(600)

if __name__ == "__main__":
    cache = SampleCache(16, 1 << 20, kind="decoded", name="test", directory=sys.argv[1])
    for index, method in enumerate(multiprocessing.get_all_start_methods()):
        context = multiprocessing.get_context(method)
        done = context.Event()
        context.Process(target=work, args=(cache, index, done), daemon=True).start()
        assert done.wait(60)
        assert cache.get(index).size == index
"""


def test_nothing_is_left_beside_workers_that_live_until_the_exit(place: Path) -> None:
    program = place / "program.py"
    program.write_text(_WITH_DAEMONS)
    done = subprocess.run([sys.executable, program, place], capture_output=True, text=True, timeout=60, check=False)
    program.unlink()
    assert (done.returncode, done.stderr) == (0, "")
    assert _files(place) == []


def test_a_view_outlives_its_cache(place: Path) -> None:
    cache = _cache(place)
    cache.put(3, _sample(3))
    found = cache.get(3)
    late = os.open(cache.path, os.O_RDWR)  # by somebody who does not know yet that it is about to be removed
    cache.close()
    cache.close()
    assert _files(place) == []
    fcntl.flock(late, fcntl.LOCK_SH | fcntl.LOCK_NB)  # who waits for the lock must not wait for the view
    os.close(late)
    assert cache.put(4, _sample(4)), "a thread that is still at it writes into this file, and into no other"
    np.testing.assert_array_equal(cache.get(4), _sample(4))
    np.testing.assert_array_equal(found, _sample(3))
    assert _cache(place).get(3) is None


def _open_in(directory: Path) -> list[str]:
    links = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            links.append(str(number.readlink()))
    return [link for link in links if link.startswith(str(directory))]


@pytest.mark.parametrize("close", [True, False])
def test_every_descriptor_is_closed(place: Path, close: bool) -> None:
    cache = _cache(place)
    cache.put(0, _sample(0))
    assert len(_open_in(place)) == 2, "ours, and that of the mapping"
    if close:
        cache.close()
    del cache
    gc.collect()
    assert _open_in(place) == []


def test_a_file_that_is_removed_while_it_is_opened_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, removed = place / f"{PREFIX}{os.getuid()}-test", fcntl.flock, []

    def remove_first(fd: int, operation: int) -> None:
        if not removed:
            path.unlink()
            removed.append(path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    cache = _cache(place)
    assert cache.put(0, _sample(0))
    assert path.exists()


# --- bounds -------------------------------------------------------------------------------------------------------


def test_a_full_cache_says_so_once_and_goes_on(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = _cache(place, limit=64 << 10)
    big, small = np.ones(30_000, np.uint8), np.ones(100, np.uint8)
    assert [cache.put(index, big) for index in range(4)] == [True, True, False, False]
    assert cache.put(4, small), "what still fits is still taken"
    stats = cache.stats()
    assert stats.full
    assert stats.entries == 3
    assert stats.stored_bytes <= stats.limit_bytes == 64 << 10
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "holds 2 of 16 samples in 0 MiB, and the limit is reached" in said[0]


@given(sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=60), limit=st.integers(1, 200_000))
@settings(deadline=None, max_examples=40)
def test_it_never_holds_more_than_its_limit(
    sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = _cache(tmp_path_factory.getbasetemp(), name="bound", size=len(sizes), limit=limit)
    kept = {index for index, size in enumerate(sizes) if cache.put(index, np.full(size, index, np.uint8))}
    stats = cache.stats()
    assert stats.stored_bytes <= stats.limit_bytes <= -(-limit // 4096) * 4096
    assert stats.entries == len(kept)
    assert stats.full == (len(kept) < len(sizes))
    for index, size in enumerate(sizes):
        found = cache.get(index)
        assert (found is not None) == (index in kept)
        assert found is None or (found.shape == (size,) and (found == index).all())
    cache.close()


def test_memory_is_taken_as_samples_come(place: Path) -> None:
    limit = 256 * MIB
    cache = _cache(place, limit=limit)
    taken = cache.path.stat().st_blocks * 512
    assert taken < MIB, "the index only"
    for index in range(12):
        cache.put(index, np.ones(3 * MIB, np.uint8))
    assert 36 * MIB <= cache.path.stat().st_blocks * 512 <= 37 * MIB + taken
    assert cache.growth_bytes == limit - cache.stats().stored_bytes == limit - 12 * (3 * MIB + 64)


def test_it_stops_where_memory_gets_short(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = [1 << 40]
    cache = _cache(place, limit=64 * MIB, memory_left=lambda: left[0])
    assert cache.put(0, np.ones(MIB, np.uint8))
    left[0] = 100 * MIB
    fitting = sum(cache.put(index, np.ones(MIB, np.uint8)) for index in range(1, 16))
    assert fitting == 14, "asked again when 16 MiB were filled"
    assert cache.stats().limit_bytes == cache.stats().stored_bytes == 15 * (MIB + 64)
    assert "memory is short (100 MiB can still be taken)" in caplog.text


def test_the_limit_is_cut_to_what_memory_there_is(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = _cache(place, limit=1 << 33, memory_left=lambda: 200 * MIB)
    assert cache.stats().limit_bytes == 72 * MIB
    assert "limited to 72 MiB instead of 8192 MiB" in caplog.text
    assert "200 MiB of memory can still be taken" in caplog.text


def test_any_other_error_of_the_disk_is_raised(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "broken")

    cache = _cache(place)
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(OSError, match="broken"):
        cache.put(0, _sample(0))
    assert cache.get(0) is None


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted = []

    def mount(size: str) -> Path:
        path = tmp_path / f"tmpfs-{size}"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_tmpfs_that_fills_up_under_it_makes_it_full_and_does_not_kill(
    small_tmpfs: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    directory = small_tmpfs("8m")
    cache = _cache(directory, size=100, limit=6 * MIB)
    assert cache.put(0, np.full(100_000, 0, np.uint8))
    free = os.statvfs(directory)
    (directory / "somebody").write_bytes(b"x" * (free.f_bavail * free.f_frsize - 250_000))
    kept = [index for index in range(100) if cache.put(index, np.full(100_000, index, np.uint8))]
    assert kept == [0, 1, 2]
    assert caplog.text.count(f"{directory} is full") == 1
    (directory / "somebody").unlink()
    assert not cache.put(99, np.ones(9, np.uint8)), "full is for good"
    assert cache.stats().limit_bytes < MIB
    for index in range(100):
        found = cache.get(index)
        assert (found is not None) == (index in kept)
        assert found is None or (found == index).all()
    cache.close()


def test_a_small_tmpfs_cuts_the_limit_and_says_how_to_enlarge_it(
    small_tmpfs: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    cache = _cache(small_tmpfs("4m"), limit=1 << 30)
    assert 3 * MIB < cache.stats().limit_bytes < 4 * MIB
    assert "limited to 3 MiB instead of 1024 MiB" in caplog.text
    assert "--shm-size" in caplog.text
    kept = sum(cache.put(index, np.ones(500_000, np.uint8)) for index in range(16))
    assert kept == cache.stats().limit_bytes // 500_096
    cache.close()


def test_no_room_for_the_index_is_an_error(small_tmpfs: Callable[[str], Path]) -> None:
    directory = small_tmpfs("1m")
    with pytest.raises(ArchiveError, match=r"no room for the index of the cache \(\d+ bytes\)\. Enlarge it"):
        _cache(directory, size=1_000_000)
    assert _files(directory) == []


# --- strangers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{"size": 17}, {"kind": "bytes"}])
@pytest.mark.parametrize("same_process", [True, False])
def test_a_name_in_use_for_other_data_is_refused(place: Path, other: dict[str, Any], same_process: bool) -> None:
    cache = _cache(place)
    if not same_process:
        shared_cache._open_files.clear()
    with pytest.raises(ArchiveError, match="is in use for other data"):
        _cache(place, **other)
    assert cache.put(0, _sample(0))


def test_the_first_comers_limit_holds(place: Path) -> None:
    _keep = _cache(place, limit=MIB)
    done = _python(
        "cache.close(); c = SampleCache(16, 9 << 20, kind='decoded', name='test', directory=sys.argv[1]);"
        "print(c.stats().limit_bytes)",
        place,
    )
    assert done.stdout.split() == [str(MIB)], done.stderr


def test_a_file_of_another_version_is_refused(place: Path) -> None:
    path = place / f"{PREFIX}{os.getuid()}-test"
    path.write_bytes(b"not ours" + bytes(8192))
    with pytest.raises(ArchiveError, match="by another version of this package"):
        _cache(place)
    assert not path.exists(), "nobody uses it"


def test_a_file_that_its_maker_did_not_finish_is_made_again(place: Path) -> None:
    (place / f"{PREFIX}{os.getuid()}-test").write_bytes(bytes(100))
    cache = _cache(place)
    assert cache.put(15, _sample(15))
    assert cache._file.words[shared_cache._LIMIT] == MIB


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
def test_a_file_of_another_user_is_refused(place: Path) -> None:
    path = place / f"{PREFIX}{os.getuid()}-test"
    path.write_bytes(bytes(100))
    os.chown(path, 12345, 12345)
    with pytest.raises(ArchiveError, match="belongs to another user"):
        _cache(place)
    path.unlink()


def test_a_link_is_not_followed(place: Path) -> None:
    path, victim = place / f"{PREFIX}{os.getuid()}-test", place / "victim"
    victim.write_text("precious")
    path.symlink_to(victim)
    with pytest.raises(ArchiveError, match="cannot be opened"):
        _cache(place)
    assert victim.read_text() == "precious"
    path.unlink()
    victim.unlink()


def test_leftovers_of_others_are_left_alone(place: Path) -> None:
    foreign = place / f"{PREFIX}{os.getuid() + 1}-test"
    foreign.write_bytes(bytes(100))
    _keep = _cache(place)
    assert foreign.exists()
    foreign.unlink()


# --- the ways to write a limit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1, 1),
        ("123", 123),
        ("10b", 10),
        ("2 kB", 2000),
        ("2KiB", 2048),
        ("1.5 gib", 3 * 2**29),
        ("8G", 8 * 10**9),
        ("1TiB", 2**40),
        ("50%", 500),
        (" 100 % ", 1000),
        ("0.5%", 5),
    ],
)
def test_limits_are_read(limit: int | str, expected: int) -> None:
    assert parse_limit(limit, 1000) == expected


@pytest.mark.parametrize(
    "limit", [0, -1, True, 1.5, None, "", "GiB", "-5", "0", "0%", "101%", "5 %%", "8 Gib of it", "1e9", "50%B", "٣"]
)
def test_what_is_no_limit_is_refused(limit: object) -> None:
    with pytest.raises(SettingsError, match="is not possible"):
        parse_limit(limit, 1000)  # type: ignore[arg-type]


def test_a_share_of_an_unknown_amount_is_refused() -> None:
    with pytest.raises(SettingsError, match="unknown on this machine"):
        parse_limit("50%", None)
    assert parse_limit("1MiB", None) == 2**20


@given(st.integers(1, 100), st.integers(100, 2**45))
def test_a_share_is_never_more_than_there_is(percent: int, available: int) -> None:
    share = parse_limit(f"{percent}%", available)
    assert share <= available
    assert abs(share - available * percent / 100) <= 1
