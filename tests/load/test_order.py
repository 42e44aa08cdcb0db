"""Seeds, samplers found under Lightning's wrappers, and passes over indices alone (no DataLoader)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.position import IndexSource, Position, find_samplers
from lightning_feed.load.resume import LoaderState


def one_pass(sampler, *, seed=0, epoch=0, cycle=0, resume=None):
    """The indices of one pass, and the pass."""
    now = Position(EpochOrder(seed=seed, epoch=lambda: epoch), epoch=epoch, cycle=cycle, resume=resume)
    source = IndexSource(sampler, find_samplers(sampler))
    source.position = now
    return list(source), now


def saved_after(now: Position, batches: int) -> LoaderState:
    blank = LoaderState.from_dict(FeedLoader(range(1)).state_dict())
    return replace(blank, batches=batches, epoch=now.epoch, cycle=now.cycle, samplers=now.samplers)


def test_seed_of_a_pass_is_stable_across_releases():
    # A checkpoint of an older release must resume to the same later epochs.
    assert mix_seed(42, 3, 1, "RandomSampler#0") == 3396208212008250047


@given(seed=st.integers(), epoch=st.integers(0, 50), cycle=st.integers(0, 5), skip=st.integers(0, 20))
def test_resumed_pass_yields_the_remaining_indices(seed, epoch, cycle, skip):
    whole, now = one_pass(RandomSampler(range(20)), seed=seed, epoch=epoch, cycle=cycle)
    rest, _ = one_pass(RandomSampler(range(20)), seed=seed + 1, epoch=epoch, cycle=cycle, resume=saved_after(now, skip))
    assert rest == whole[skip:]
    assert sorted(whole) == list(range(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(30)),
        lambda: WeightedRandomSampler([0.1] * 30, 30),
        lambda: SubsetRandomSampler(range(30)),
    ],
)
def test_each_epoch_and_cycle_has_its_own_reproducible_order(make):
    orders = {(e, c): one_pass(make(), epoch=e, cycle=c)[0] for e in range(3) for c in range(2)}
    assert len({tuple(order) for order in orders.values()}) == 6
    assert all(one_pass(make(), epoch=e, cycle=c)[0] == order for (e, c), order in orders.items())


def test_random_sampler_without_epoch_order_draws_as_in_torch():
    torch.manual_seed(3)
    plain = list(RandomSampler(range(30)))
    torch.manual_seed(3)
    source = IndexSource(sampler := RandomSampler(range(30)), find_samplers(sampler))
    source.position = Position(None, epoch=None)
    assert list(source) == plain
    saved = saved_after(source.position, 4)
    torch.manual_seed(99)
    source.position = Position(None, epoch=None, cycle=0, resume=saved)
    assert list(source) == plain[4:]


class EpochSampler:
    """A sampler with nothing but ``set_epoch``."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i * (self.epoch + 1)) % 7 for i in range(7)])

    def __len__(self):
        return 7


def test_epoch_set_by_others_is_kept_and_restored_without_epoch_order():
    source = IndexSource(sampler := EpochSampler(), find_samplers(sampler))
    sampler.set_epoch(2)
    source.position = Position(None, epoch=None)
    whole = list(source)
    resumed = IndexSource(fresh := EpochSampler(), find_samplers(fresh))
    resumed.position = Position(None, epoch=None, cycle=0, resume=saved_after(source.position, 3))
    assert list(resumed) == whole[3:]


class StatefulSampler:
    """A sampler whose order depends on how many passes there have been."""

    def __init__(self):
        self.passes = 0

    def state_dict(self):
        return self.__dict__

    def load_state_dict(self, state):
        self.__dict__.update(state)

    def __iter__(self):
        self.passes += 1
        return iter([(i + self.passes) % 7 for i in range(7)])


def test_state_of_a_sampler_is_recorded_at_the_start_of_the_pass():
    sampler = StatefulSampler()
    one_pass(sampler)
    second, now = one_pass(sampler, epoch=1)
    assert one_pass(StatefulSampler(), epoch=1, resume=saved_after(now, 2))[0] == second[2:]


def test_samplers_are_found_under_every_wrapper():
    inner = RandomSampler(range(4))
    distributed = DistributedSamplerWrapper(inner, num_replicas=1, rank=0)
    batches = BatchSampler(distributed, 2, False)
    wrapped = _IndexBatchSamplerWrapper(batches)
    found = find_samplers(SequentialSampler(range(4)), wrapped)
    assert list(found) == [
        "SequentialSampler#0",
        "_IndexBatchSamplerWrapper#0",
        "DistributedSamplerWrapper#0",
        "BatchSampler#0",
        "RandomSampler#0",
    ]
    assert found["RandomSampler#0"] is inner
