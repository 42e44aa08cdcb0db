"""Remote files through a bounded cache on the local disk: read once, shared, within the limit, whole after any kill."""

import errno
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from object_store import ObjectStore, birds, running_store
from torch.utils.data import RandomSampler, Subset

from lightning_feed import ImageFolderDataModule, LoaderSettings
from lightning_feed.errors import ArchiveError
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.position import find_read_ahead
from lightning_feed.storage import remote, remote_folder
from lightning_feed.storage.read_ahead import ReadAhead
from lightning_feed.storage.read_through import ReadThrough
from lightning_feed.storage.remote import GoneError, RemotePlace
from lightning_feed.storage.remote_folder import RemoteFolder, RemoteSource, list_files

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:Unclosed:ResourceWarning")
_BLOCK = 4096
_MIB = 1 << 20


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with running_store() as found:
        found.client.create_bucket(Bucket="photos")
        found.put("photos", birds())
        yield found


@pytest.fixture
def store(running: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    running.proxy.reset()
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 0.01)
    return running


def source_of(store: ObjectStore, cache: ReadThrough | None, readahead: int = 0) -> RemoteSource:
    place = RemotePlace("s3://photos", store.options, cache=cache, timeout_s=10)
    place.readahead_bytes = readahead
    return RemoteSource.of(place, list_files(place), "train")


def wait_until(holds: Callable[[], bool], timeout_s: float = 20) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def held(cache: ReadThrough) -> int:
    return sum(1 for path in cache.folder.glob("??/*") if path.suffix != ".part")


# --- read once --------------------------------------------------------------------------------------------------------


def test_the_second_epoch_and_the_second_run_read_from_the_disk(store: ObjectStore, tmp_path: Path) -> None:
    def run() -> list[float]:
        datamodule = ImageFolderDataModule(
            "s3://photos", 5, image_size=16, decoder="pillow", storage_options=store.options, stage_to=tmp_path,
            stage_limit="1GiB", loader=LoaderSettings(num_workers=2, seed=1),
        )  # fmt: skip
        loader = datamodule.train_dataloader()
        return [float(images.float().sum()) for _ in range(2) for images, _ in loader]

    run()
    assert store.gets("train/") == 20  # each once, whoever wanted it first
    store.proxy.seen.clear()
    run()
    assert store.gets("train/") == 0


def test_files_by_name_go_through_it(store: ObjectStore, tmp_path: Path) -> None:
    folder = RemoteFolder(RemotePlace("s3://photos", store.options, cache=ReadThrough(tmp_path, _MIB)))
    for _ in range(2):
        assert folder.read_many(["train/crow/1.jpg", "val/wren/0.jpg"]) == [
            birds()["train/crow/1.jpg"],
            birds()["val/wren/0.jpg"],
        ]
    assert store.gets(".jpg") == 2


def test_processes_that_want_the_same_file_fetch_it_once(store: ObjectStore, tmp_path: Path) -> None:
    store.proxy.latency_s = 0.3
    source = source_of(store, ReadThrough(tmp_path, _MIB))
    readers = []
    for _ in range(3):
        readers.append(os.fork())
        if readers[-1] == 0:
            source.expect(range(10))
            os._exit(0 if all(len(source.read(i)) == source.sizes[i] for i in range(10)) else 1)
    assert [os.waitpid(reader, 0)[1] for reader in readers] == [0, 0, 0]
    assert store.gets("train/") == 10


# --- bounded ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    cache = ReadThrough(tmp_path, 4 * _BLOCK)
    for key in ("aa1", "bb2", "cc3", "dd4"):
        put(cache, key, b"x" * 100)
        time.sleep(0.01)
    assert cache.read("aa1", 100) == b"x" * 100
    put(cache, "ee5", b"x" * 100)
    assert [cache.holds(key) for key in ("aa1", "bb2", "cc3", "dd4", "ee5")] == [True, False, True, True, True]
    assert cache.used_bytes() == 4 * _BLOCK


def test_half_of_a_set_serves_half_of_its_shuffled_epochs(tmp_path: Path) -> None:
    cache, hits = ReadThrough(tmp_path, 50 * _BLOCK), 0
    for epoch in range(4):
        for index in torch.randperm(100, generator=torch.Generator().manual_seed(epoch)).tolist():
            key = f"{index:02x}{index}"
            if cache.read(key, 100, again_late=True) is None:
                put(cache, key, b"x" * 100)
                cache.read(key, 100, again_late=True)
            elif epoch:
                hits += 1
        assert held(cache) <= 50
    assert hits > 3 * 100 * 0.4  # with the least recently used first, 15 %


def test_a_file_that_is_larger_than_the_limit_is_read_and_not_kept(store: ObjectStore, tmp_path: Path) -> None:
    cache = ReadThrough(tmp_path, 100)
    source = source_of(store, cache)
    assert [len(source.read(0)) for _ in range(2)] == [source.sizes[0]] * 2
    assert held(cache) == cache.used_bytes() == 0


def test_a_limit_beyond_the_disk_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ReadThrough(tmp_path, 1 << 60)
    assert cache.limit_bytes < os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert "is limited to" in caplog.text


def test_a_disk_that_is_full_costs_speed_only(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReadThrough(tmp_path, _MIB)
    source, write = source_of(store, cache), os.pwrite

    def full(descriptor: int, data: Any, at: int) -> int:
        if len(data) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    assert [len(source.read(i)) for i in range(5)] == source.sizes[:5].tolist()
    assert caplog.text.count("is full") == 1
    assert held(cache) == cache.used_bytes() == 0
    assert not list(cache.folder.glob("??/*.part"))


def test_one_process_of_a_node_tells_of_a_full_disk_until_the_cache_is_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for runs in (1, 2):
        cache = ReadThrough(tmp_path, _MIB)
        for one in (cache, pickle.loads(pickle.dumps(cache)), cache):
            one._warn_once(OSError(errno.ENOSPC, "No space left on device"))
        assert caplog.text.count("is full") == runs
        del cache, one


def test_a_cache_that_is_removed_or_without_inodes_costs_speed_only(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReadThrough(tmp_path, _MIB)
    source, make = source_of(store, cache), os.open
    assert len(source.read(0)) == source.sizes[0]
    shutil.rmtree(cache.folder)
    assert [len(source.read(i)) for i in range(4)] == source.sizes[:4].tolist()
    assert caplog.text.count("cannot be used any more") == 1
    cache = ReadThrough(tmp_path, _MIB)
    source = source_of(store, cache)

    def full(path: Any, flags: int, *given: Any, **options: Any) -> int:
        if str(path).endswith(".part"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(path, flags, *given, **options)

    monkeypatch.setattr(os, "open", full)
    assert [len(source.read(i)) for i in range(4)] == source.sizes[:4].tolist()
    assert caplog.text.count("is full") == 1


def test_an_error_of_the_source_is_raised_as_it_is(store: ObjectStore, tmp_path: Path) -> None:
    source = source_of(store, ReadThrough(tmp_path, _MIB))
    store.proxy.faults = {"crow/3.jpg": [403, ...]}
    with pytest.raises(ArchiveError, match=r"Sample 3: s3://photos/train/crow/3\.jpg may not be read"):
        source.read(3)


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ArchiveError, match=r"cannot be used as a cache.*a folder that you own"):
        ReadThrough("/proc/none", _MIB)


# --- whole ------------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_read_again(store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = ReadThrough(tmp_path, _MIB)
    source = source_of(store, cache)
    good = source.read(0)
    for content in (b"", good[:50], bytes(len(good) + 4)):
        next(cache.folder.glob("??/*")).write_bytes(content)
        assert source.read(0) == good
        assert source.read(0) == good
    assert caplog.text.count("was damaged") == 3
    assert store.gets("train/") == 4


def test_a_kill_leaves_whole_files_and_no_lock(store: ObjectStore, tmp_path: Path) -> None:
    source = source_of(store, ReadThrough(tmp_path, _MIB))
    store.proxy.latency_s = 0.5
    reader = os.fork()
    if reader == 0:
        source.expect(range(20))
        time.sleep(60)
    wait_until(lambda: len(list(tmp_path.glob("*/??/*.part"))) > 5)
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    store.proxy.latency_s = 0
    source.expect(range(20))
    assert [len(source.read(index)) for index in range(20)] == source.sizes.tolist()
    assert held(ReadThrough(tmp_path, _MIB)) == 20


def test_what_a_kill_left_in_the_count_goes_when_room_is_made(tmp_path: Path) -> None:
    cache = ReadThrough(tmp_path, 10 * _BLOCK)
    cache._count(8 * _BLOCK)
    for index in range(12):
        put(cache, f"{index:02x}x", b"x" * 100)
    assert held(cache) >= 9
    assert cache.used_bytes() == held(cache) * _BLOCK


# --- replaced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_objects_replaced_in_mid_epoch_are_read_whole_and_as_new_by_the_next_run(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool
) -> None:
    monkeypatch.setattr(remote, "_connections", {})
    bucket = f"changing-{cached}".lower()
    store.client.create_bucket(Bucket=bucket)

    def put_all(version: int) -> None:
        """All but the last two keep their size."""
        sizes = [100_000 + version * (index > 3) for index in range(6)]
        store.put(bucket, {f"crow/{index}.jpg": bytes([version]) * size for index, size in enumerate(sizes)})

    def opened() -> RemoteSource:
        cache = ReadThrough(tmp_path, 1 << 30) if cached else None
        place = RemotePlace(f"s3://{bucket}", store.options, cache=cache)
        monkeypatch.setattr(remote_folder, "_STARTED_S", time.time())  # as a process that starts now
        return RemoteSource.of(place, list_files(place))

    put_all(0)
    source = opened()
    assert source.read(0) == bytes(100_000)
    replacing = threading.Thread(target=lambda: [put_all(version) for version in (1, 2, 3)])
    replacing.start()
    store.proxy.faults = {"crow/2": ["short"] * 2}
    for index in (0, 1, 2, 3, 0, 1, 2, 3):
        data = source.read(index)
        assert len(data) == 100_000
        assert len(set(data)) == 1
    replacing.join()
    for index in (4, 5):
        with pytest.raises(GoneError, match="100001 bytes or more arrived, but 100000 were listed: it was replaced"):
            source.read(index)
    source = opened()
    assert [set(source.read(index)) for index in range(6)] == [{3}] * 6


# --- ahead ------------------------------------------------------------------------------------------------------------


def test_what_the_order_needs_is_fetched_before_it_is_asked_for(store: ObjectStore, tmp_path: Path) -> None:
    cache = ReadThrough(tmp_path, _MIB)
    source = source_of(store, cache)
    batches = [[3, 1], [2, 0], [7, 5], [19, 18]]
    ahead = ReadAhead(source, (), int(source.sizes[[3, 1, 2, 0]].sum()))
    order = ahead.through(batches)
    assert next(order) == [3, 1]
    wait_until(lambda: held(cache) == 4)
    time.sleep(0.2)
    assert held(cache) == 4  # and no more than was to be read ahead
    assert list(order) == batches[1:]
    wait_until(lambda: held(cache) == 8)
    assert [len(source.read(index)) for index in (3, 0, 19)] == source.sizes[[3, 0, 19]].tolist()
    assert store.gets("train/") == 8


def test_behind_the_end_of_an_epoch_the_next_one_is_fetched(store: ObjectStore, tmp_path: Path) -> None:
    datamodule = ImageFolderDataModule(
        "s3://photos", 4, image_size=16, decoder="pillow", storage_options=store.options, stage_to=tmp_path,
        stage_limit=_MIB, readahead=100, loader=LoaderSettings(num_workers=0, seed=5),
    )  # fmt: skip
    epoch = 0
    loader = datamodule.train_dataloader()
    loader.order = EpochOrder(seed=5, epoch=lambda: epoch)
    sent: list[list[int]] = []
    loader._index.ahead._send = sent.append
    list(loader)
    behind = [number for numbers in sent for number in numbers][20:]
    epoch, before = 1, len(sent)
    list(loader)
    assert behind
    assert [number for numbers in sent[before:] for number in numbers][: len(behind)] == behind


def test_an_order_is_complete_however_little_is_read_ahead(store: ObjectStore, tmp_path: Path) -> None:
    for limit in (1, _MIB):
        source = source_of(store, ReadThrough(tmp_path / str(limit), limit))
        for ahead in (1, 5000, 1 << 40):
            assert list(ReadAhead(source, (), ahead).through([[0, 1], [2], [3, 4, 5], "?"])) == [
                [0, 1],
                [2],
                [3, 4, 5],
                "?",
            ]


def test_only_remote_sets_with_a_cache_are_read_ahead(store: ObjectStore, tmp_path: Path) -> None:
    def ahead(**given: Any) -> Any:
        made = ImageFolderDataModule("s3://photos", 4, storage_options=store.options, val_fraction=0.5, **given)
        return find_read_ahead(Subset(made.dataset("train"), [4, 2]))

    assert ahead() is None
    found = ahead(stage_to=tmp_path, stage_limit=_MIB)
    assert isinstance(found, ReadAhead)
    assert [found._number_of(index) for index in (0, 1)] == [4, 2]
    fsspec.filesystem("memory").pipe({f"/ahead/{name}": content for name, content in birds().items()})
    of_this_process = ImageFolderDataModule("memory://ahead", 4, stage_to=tmp_path, stage_limit=_MIB)
    assert find_read_ahead(of_this_process.dataset("train")) is None
    assert find_read_ahead(range(3)) is None
    assert find_read_ahead(RandomSampler(range(3))) is None


def test_the_process_that_reads_ahead_ends_with_the_training(store: ObjectStore, tmp_path: Path) -> None:
    script = f"""
import os, time
from lightning_feed.storage.read_ahead import ReadAhead
from lightning_feed.storage.read_through import ReadThrough
from lightning_feed.storage.remote import RemotePlace
from lightning_feed.storage.remote_folder import RemoteSource, list_files
place = RemotePlace("s3://photos", {store.options!r}, cache=ReadThrough({str(tmp_path)!r}, 1 << 20))
ahead = ReadAhead(RemoteSource.of(place, list_files(place), "train"), (), 1 << 20)
next(ahead.through([[0], [1]]))
print(ahead._child[1].pid, flush=True)
time.sleep(60)
"""
    training = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert training.stdout is not None
    child = int(training.stdout.readline())
    assert Path(f"/proc/{child}").exists()
    training.kill()
    training.communicate()
    wait_until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])


def test_a_process_that_has_ended_is_reported_and_started_again_for_the_next_epoch(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReadThrough(tmp_path, _MIB)
    ahead = ReadAhead(source_of(store, cache), (), 1)
    batches = [[index] for index in range(6)]
    order = ahead.through(batches)
    assert next(order) == [0]
    assert ahead._child is not None
    ahead._child[1].kill()
    ahead._child[1].wait()
    assert list(order) == batches[1:]
    assert caplog.text.count("Nothing is read ahead of s3://photos/train until the next epoch (BrokenPipeError") == 1
    assert list(ahead.through(batches)) == batches
    wait_until(lambda: held(cache) == 6)


def test_a_place_that_cannot_be_sent_to_the_process_is_read_without_it(
    store: ObjectStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = source_of(store, ReadThrough(tmp_path, _MIB))
    source.place.options["session"] = lambda: None
    assert list(ReadAhead(source, (), 1).through([[0], [1]])) == [[0], [1]]
    assert caplog.text.count("Nothing is read ahead") == 1


def put(cache: ReadThrough, key: str, data: bytes) -> None:
    with cache._claimed(key) as part:
        assert part is not None
        cache._put(key, part, data)
