"""CacheableDataset: the same samples with and without a cache, and each step done once where it can be."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from lightning_feed.errors import DatasetError
from lightning_feed.load.cacheable import CacheableDataset, open_caches
from lightning_feed.load.machine import Machine
from lightning_feed.storage.folder import Encoded
from lightning_feed.storage.shared_cache import Kind, SampleCache

MIB = 1 << 20
RUN = f"test {os.getpid()}"
"""Caches of other processes that test have other names in /dev/shm."""
# Python warns of a fork beside the threads of other tests.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.* may lead to deadlocks:DeprecationWarning")


class Squares(CacheableDataset):
    """Sample i is ([i * i, 0, ...], i) of (i % 3 + 1) numbers, plus noise; it counts what it does."""

    def __init__(self, size: int = 12, noise: int = 0) -> None:
        self.size, self.noise = size, noise
        self.calls: Counter[str] = Counter()

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> Encoded:
        self.calls["read"] += 1
        return bytes([index]) * (index % 3 + 1)

    def decode(self, data: Encoded, index: int) -> npt.NDArray[Any]:
        self.calls["decode"] += 1
        values = np.frombuffer(data, np.uint8).astype(np.int64) ** 2
        return np.pad(values[:1], (0, 3))

    def augment(self, decoded: npt.NDArray[Any], index: int) -> Any:
        decoded += np.random.randint(self.noise + 1)  # in place, as it may be
        return decoded, index


@pytest.fixture(autouse=True)
def _no_caches_are_left() -> Iterator[None]:
    from lightning_feed.storage import shared_cache

    yield
    for cache in list(shared_cache._open_files.values()):
        cache.close()


def _machine(memory: int | None = 1 << 40, shm: int | None = 1 << 30) -> Machine:
    return Machine(usable_cpus=2, cpu_reason="", available_memory_bytes=memory, free_shm_bytes=shm, start_method="fork")


def _open(dataset: Any, kind: Kind = "decoded", limit: int | str = MIB, **options: Any) -> list[SampleCache]:
    return open_caches([("train", dataset)], kind=kind, limit=limit, **{"run": RUN, "machine": _machine(), **options})


# --- the steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "calls"), [("bytes", {"read": 12, "decode": 36}), ("decoded", {"read": 12, "decode": 12})]
)
def test_each_step_in_front_of_the_cache_is_done_once(kind: Kind, calls: dict[str, int]) -> None:
    dataset, obvious = Squares(), Squares()
    (cache,) = _open(dataset, kind)
    for _ in range(3):
        for index in range(12):
            (values, label), (expected, _) = dataset[index], obvious[index]
            np.testing.assert_array_equal(values, expected)
            assert label == index
    assert dataset.calls == calls
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.entries) == (24, 12, 12)


def test_what_augment_writes_stays_out_of_the_cache() -> None:
    dataset = Squares(noise=50)
    _open(dataset)
    np.random.seed(0)
    values = {int(dataset[5][0][0]) for _ in range(30)}
    assert len(values) > 10
    assert min(values) >= 25
    np.testing.assert_array_equal(dataset.cached_decoded(5), [25, 0, 0, 0])


@pytest.mark.parametrize("given", [bytes([1, 2]), memoryview(bytes([1, 2])), np.array([1, 2], np.uint8)])
def test_decode_is_given_the_same_type_whether_the_bytes_were_held_or_not(given: Any) -> None:
    class Given(Squares):
        def read(self, index: int) -> Encoded:
            return given  # type: ignore[no-any-return]

    dataset = Given()
    _open(dataset, "bytes")
    first, second = dataset.cached_bytes(0), dataset.cached_bytes(0)
    assert type(first) is type(second) is memoryview
    assert first == second == bytes([1, 2])
    assert first.readonly


def test_pixels_that_are_read_keep_their_shape() -> None:
    class Pixels(Squares):
        def read(self, index: int) -> Encoded:
            return np.full((4, 5, 3), index, np.uint8)

    dataset = Pixels()
    _open(dataset, "bytes")
    for _ in range(2):
        data = dataset.cached_bytes(7)
        assert isinstance(data, np.ndarray)
        np.testing.assert_array_equal(data, np.full((4, 5, 3), 7))


def test_a_full_cache_falls_back_to_reading() -> None:
    dataset = Squares(size=100)
    (cache,) = _open(dataset, limit=4096)
    for _ in range(2):
        assert [int(dataset[index][0][0]) for index in range(100)] == [index**2 for index in range(100)]
    assert cache.stats().entries == 4096 // 128
    assert dataset.calls["read"] == 200 - 32
    stats = cache.stats()
    assert (stats.hits, stats.misses) == (32, 168)


# --- in loaders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"), [("bytes", "fork"), pytest.param("decoded", "forkserver", marks=pytest.mark.slow)]
)
def test_workers_share_what_they_read(kind: Kind, method: str) -> None:
    dataset = Squares()
    (cache,) = _open(dataset, kind)
    loader = DataLoader(
        dataset, 3, shuffle=True, num_workers=2, multiprocessing_context=method, persistent_workers=True
    )
    for epoch in range(2):
        seen = {int(label): int(row[0]) for rows, labels in loader for row, label in zip(rows, labels, strict=True)}
        assert seen == {index: index**2 for index in range(12)}
        stats = cache.stats()
        assert (stats.hits, stats.misses) == (12 * epoch, 12)
    assert cache.stats().entries == 12


# --- opening ------------------------------------------------------------------------------------------------------


def test_subsets_of_one_dataset_share_its_cache() -> None:
    whole = Squares()
    train, val = Subset(whole, range(8)), Subset(whole, range(8, 12))
    caches = open_caches([("train", train), ("val", val)], kind="decoded", limit=MIB, run=RUN, machine=_machine())
    assert caches == [whole.cache]
    assert caches[0].size == 12
    assert val[0][1] == 8
    assert caches[0].get(8) is not None


def test_one_limit_is_shared_out_by_samples() -> None:
    parts = Squares(size=10), Squares(size=30), Squares(size=40)
    named = [("train", ConcatDataset(parts[:2])), ("val", parts[2])]
    caches = open_caches(named, kind="decoded", limit="50%", run=RUN, machine=_machine(shm=160 * MIB))
    assert [cache.stats().limit_bytes for cache in caches] == [10 * MIB, 30 * MIB, 40 * MIB]
    assert len({cache.path for cache in caches}) == 3


@pytest.mark.parametrize("limit", ["10GiB", "90MiB", "90%"])
def test_room_is_left_for_batches(limit: str, caplog: pytest.LogCaptureFixture) -> None:
    (cache,) = _open(Squares(), limit=limit, machine=_machine(memory=100 * MIB))
    assert cache.stats().limit_bytes == 80 * MIB
    assert f"cache_limit='{limit}' is cut to 80 MiB: 100 MiB of memory and /dev/shm" in caplog.text


@pytest.mark.parametrize("dataset", [TensorDataset(torch.zeros(3)), Subset(TensorDataset(torch.zeros(3)), [0]), [1, 2]])
def test_a_dataset_that_does_not_tell_its_steps_is_refused(dataset: Any) -> None:
    with pytest.raises(
        DatasetError, match=r"cache='bytes' needs a dataset with .* dataset of train \(.*CacheableDataset"
    ):
        _open(dataset, "bytes")
