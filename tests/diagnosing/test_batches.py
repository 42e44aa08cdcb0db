"""Batches that are kept and replayed."""

import pytest
import torch
from diagnosing.small_runs import Numbers
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_feed.diagnosing import batches
from lightning_feed.diagnosing.batches import KeptBatches, Replay, own_loaders


def test_replayed_tensors_are_copied_only_where_a_step_writes_into_them() -> None:
    batch = {"x": torch.ones(2), "names": ["a"]}
    read = iter(Replay([batch], 4))
    next(read)
    second = next(read)
    assert second["x"] is batch["x"]
    assert second is not batch
    assert second["names"] is not batch["names"]
    assert len(list(read)) == 2
    writes = iter(Replay([batch], 3))
    for given in writes:
        given["x"].add_(1)
    assert torch.equal(batch["x"], torch.ones(2))


def test_own_loaders_copies_loaders_inside_containers() -> None:
    loader = DataLoader(Numbers(), batch_size=4)
    combined = CombinedLoader({"a": loader, "b": [1, 2]}, "max_size")
    mine = own_loaders(combined)
    assert mine.iterables["a"] is not loader
    assert combined.iterables["a"] is loader
    assert mine.iterables["a"].dataset is loader.dataset
    assert own_loaders([loader, {"x": loader}])[1]["x"] is not loader


def test_first_of_equally_shaped_batches_is_kept_for_replay() -> None:
    kept = KeptBatches(skip=2)
    for number in range(100):
        kept.offer(torch.full((2,), number))
    assert [batch.tolist() for batch in kept.batches] == [[2, 2]]


def test_kept_batches_are_spread_over_the_run_and_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptBatches(skip=10)
    for length in range(1010):
        kept.offer({"x": torch.zeros(length + 1)})
    lengths = [len(batch["x"]) for batch in kept.batches]
    assert lengths == [11, 139, 267, 395, 523, 651, 779, 907]
    monkeypatch.setattr(batches, "MOST_BYTES", 4000)
    small = KeptBatches()
    for length in range(1, 400):
        small.offer(torch.zeros(length))
    assert 1 < len(small.batches) < 8
    assert small._bytes() <= batches.MOST_BYTES


def test_replay_cycles_through_its_batches_in_order() -> None:
    given = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    assert [len(batch) for batch in Replay(given, 7)] == [1, 2, 3, 1, 2, 3, 1]
