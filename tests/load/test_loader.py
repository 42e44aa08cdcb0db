"""FeedLoader: the same batches as DataLoader, exact resume after any batch, threads and workers that end."""

import logging
import multiprocessing
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_feed.errors import LoaderError, ResumeError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder

SIZE = 11


class Squares(Dataset):
    def __init__(self, size=SIZE):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class EpochSampler:
    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i * (self.epoch + 2)) % SIZE for i in range(SIZE)])

    def __len__(self):
        return SIZE


class Sharded(IterableDataset):
    """Divided among workers unevenly: each gets a third of what is left, the last all of the rest."""

    def __init__(self, size=SIZE):
        self.size = size

    def numbers(self):
        info = get_worker_info()
        if info is None:
            return list(range(self.size))
        cuts = [0] + [self.size * (i + 1) // (i + 3) for i in range(info.num_workers - 1)] + [self.size]
        return list(range(cuts[info.id], cuts[info.id + 1]))

    def __iter__(self):
        return iter(self.numbers())


class Shuffling(Sharded):
    """In an order that depends on the worker's seed."""

    def __iter__(self):
        numbers = self.numbers()
        return (numbers[i] for i in torch.randperm(len(numbers)).tolist())


class Run:
    """A training of ``epochs`` epochs over one loader, which can be taken up from a state."""

    def __init__(self, make, epochs=2):
        self.epochs = epochs
        self.epoch = epoch = [0]  # not self: in a reference cycle, persistent workers would end late, and slowly
        self.loader = make(EpochOrder(seed=8, epoch=lambda: epoch[0]))

    def unbroken(self):
        """[(epoch, batch, state after it)]"""
        seen = []
        for epoch in range(self.epochs):
            self.epoch[0] = epoch
            seen += [(epoch, as_list(batch), self.loader.state_dict()) for batch in self.loader]
        return seen

    def resumed(self, epoch, state):
        self.loader.load_state_dict(state)
        seen = []
        for now in range(epoch, self.epochs):
            self.epoch[0] = now
            seen += [(now, as_list(batch)) for batch in self.loader]
        return seen


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def check_resume(make, at=None):
    """The run resumed after each batch (or those given) trains what the unbroken one does."""
    whole = Run(make).unbroken()
    assert whole
    for k in range(len(whole)) if at is None else at:
        epoch, _, state = whole[k]
        state = pickle.loads(pickle.dumps(state))
        assert Run(make).resumed(epoch, state) == [(e, batch) for e, batch, _ in whole[k + 1 :]], f"after batch {k}"


MAP_KINDS = {
    "sequential": lambda order, **kw: FeedLoader(Squares(), batch_size=3, order=order, **kw),
    "shuffled": lambda order, **kw: FeedLoader(Squares(), batch_size=3, shuffle=True, order=order, **kw),
    "drop_last": lambda order, **kw: FeedLoader(
        Squares(), batch_size=3, shuffle=True, drop_last=True, order=order, **kw
    ),
    "weighted": lambda order, **kw: FeedLoader(
        Squares(), batch_size=3, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE), order=order, **kw
    ),
    "set_epoch": lambda order, **kw: FeedLoader(Squares(), batch_size=3, sampler=EpochSampler(), order=order, **kw),
    "batch_sampler": lambda order, **kw: FeedLoader(
        Squares(), batch_sampler=BatchSampler(RandomSampler(range(SIZE)), 3, False), order=order, **kw
    ),
    "unbatched": lambda order, **kw: FeedLoader(Squares(), batch_size=None, shuffle=True, order=order, **kw),
    "user_generator": lambda order, **kw: FeedLoader(
        Squares(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1), order=order, **kw
    ),
    "no_order": lambda order, **kw: FeedLoader(Squares(), batch_size=3, **kw),
    "rank_1_of_2": lambda order, **kw: FeedLoader(
        Squares(), batch_size=2, sampler=DistributedSampler(range(SIZE), 2, 1), order=order, **kw
    ),
}
WORKERS = {
    "0w": {},
    "0w-background": {"background": 2},
    "2w": {"num_workers": 2},
    "2w-persistent-background": {"num_workers": 2, "persistent_workers": True, "background": 2},
}


@pytest.mark.parametrize("kind", MAP_KINDS)
@pytest.mark.parametrize("workers", ["0w", "0w-background"])
def test_map_style_dataset_resumes_after_any_batch(kind, workers):
    check_resume(lambda order: MAP_KINDS[kind](order, **WORKERS[workers]))


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("shuffled", "2w", marks=pytest.mark.nightly),
        pytest.param("shuffled", "2w-persistent-background", marks=pytest.mark.nightly),
        ("set_epoch", "2w-persistent-background"),
        ("user_generator", "2w"),
        ("rank_1_of_2", "2w-persistent-background"),
    ],
)
def test_map_style_dataset_resumes_with_worker_processes(kind, workers):
    check_resume(lambda order: MAP_KINDS[kind](order, **WORKERS[workers]), at=[1, 5])


@pytest.mark.parametrize("workers", WORKERS)
def test_iterable_dataset_resumes_only_at_the_end_of_an_epoch(workers):
    def make(order):
        dataset = Shuffling() if workers == "2w" else Sharded()  # fresh workers get the seed of their epoch
        return FeedLoader(dataset, batch_size=3, order=order, **WORKERS[workers])

    whole = Run(make).unbroken()
    loader = Run(make).loader
    with pytest.raises(ResumeError, match=r"an IterableDataset cannot be resumed.*StatefulDataLoader"):
        loader.load_state_dict(whole[1][2])
    last = max(number for number, (epoch, _, _) in enumerate(whole) if epoch == 0)
    state = loader.state_at_end(whole[last][2])
    assert Run(make).resumed(1, state) == [(epoch, batch) for epoch, batch, _ in whole[last + 1 :]]


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 20),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_resume_is_exact_for_any_dataset_and_batch_size(size, batch_size, drop_last, data):
    def make(order):
        return FeedLoader(Squares(size), batch_size=batch_size, drop_last=drop_last, shuffle=True, order=order)

    count = len(Run(make).unbroken())
    if count:
        check_resume(make, at=[data.draw(st.integers(0, count - 1))])


def test_resume_does_not_load_the_skipped_batches():
    whole = Run(MAP_KINDS["sequential"]).unbroken()
    resumed = Run(MAP_KINDS["sequential"], epochs=1)
    resumed.resumed(0, whole[1][2])
    assert resumed.loader.dataset.read == list(range(6, SIZE))


def test_second_pass_of_an_epoch_resumes_and_the_third_follows():
    run = Run(MAP_KINDS["shuffled"])
    list(run.loader)
    second = []
    for batch in run.loader:
        second.append(batch.tolist())
        if len(second) == 2:
            state = run.loader.state_dict()
    third = [b.tolist() for b in run.loader]
    other = Run(MAP_KINDS["shuffled"])
    other.loader.load_state_dict(state)
    assert [b.tolist() for b in other.loader] == second[2:]
    assert [b.tolist() for b in other.loader] == third


def test_pass_without_batches_does_not_count_as_a_cycle():
    run = Run(MAP_KINDS["shuffled"])
    abandoned = iter(run.loader)
    whole = [b.tolist() for b in run.loader]
    del abandoned
    assert whole == [b for _, b, _ in Run(MAP_KINDS["shuffled"], epochs=1).unbroken()]


def test_resumed_pass_restarted_before_its_first_batch_resumes_again():
    whole = Run(MAP_KINDS["shuffled"], epochs=1).unbroken()
    run = Run(MAP_KINDS["shuffled"])
    run.loader.load_state_dict(whole[1][2])
    iter(run.loader)
    assert run.loader.state_dict() == whole[1][2]
    assert [b.tolist() for b in run.loader] == [b for _, b, _ in whole[2:]]
    assert len(list(run.loader)) == len(whole)  # and no third time


def test_resume_uses_the_seed_of_the_checkpoint():
    whole = Run(MAP_KINDS["shuffled"]).unbroken()
    run = Run(MAP_KINDS["shuffled"])
    run.loader.order.seed = 1
    assert run.resumed(0, whole[0][2]) == [(e, b) for e, b, _ in whole[1:]]


def test_state_dict_returns_a_loaded_state_before_it_is_used():
    state = Run(MAP_KINDS["shuffled"]).unbroken()[1][2]
    loader = MAP_KINDS["shuffled"](EpochOrder(seed=0, epoch=lambda: 0))
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert pickle.loads(pickle.dumps(FeedLoader(Squares()))).state_dict()["samplers"] == {}


def test_loading_a_state_ends_persistent_workers():
    before = set(multiprocessing.active_children())
    run = Run(lambda order: MAP_KINDS["shuffled"](order, num_workers=2, persistent_workers=True))
    whole = run.unbroken()
    assert len(set(multiprocessing.active_children()) - before) == 2
    run.loader.load_state_dict(whole[1][2])
    assert set(multiprocessing.active_children()) <= before
    run.epoch[0] = 0
    assert [b.tolist() for b in run.loader] == [b for e, b, _ in whole if e == 0][2:]


def test_new_pass_reuses_persistent_workers_and_closes_the_old_pass():
    loader = FeedLoader(Squares(), batch_size=3, num_workers=1, persistent_workers=True, background=1)
    first = iter(loader)
    next(first)
    workers = [w.pid for w in first.source._workers]
    second = iter(loader)
    assert [w.pid for w in second.source._workers] == workers
    with pytest.raises(LoaderError, match="closed before its end"):
        next(first)
    assert [b.tolist() for b in second] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


# ---- states that do not fit ----


def changed_sampler():
    return FeedLoader(Squares(), batch_size=3, sampler=EpochSampler())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: FeedLoader(Squares(), batch_size=4, shuffle=True), "batch_size=4 instead of 3"),
        (lambda: FeedLoader(Squares(12), batch_size=3, shuffle=True), "a dataset of 12 samples instead of 11"),
        (changed_sampler, "the sampler EpochSampler, BatchSampler instead of RandomSampler, BatchSampler"),
        (lambda: FeedLoader(Squares(12), batch_size=4, shuffle=True), "12 samples instead of 11 and batch_size=4"),
        (lambda: FeedLoader(Sharded(), batch_size=3), "an IterableDataset cannot be resumed"),
    ],
)
def test_mid_epoch_resume_refuses_and_names_changed_settings(other, words):
    run = Run(MAP_KINDS["shuffled"])
    states = [state for _, _, state in run.unbroken()]
    with pytest.raises(ResumeError, match=words) as refused:
        other().load_state_dict(states[1])
    assert "end of an epoch" in str(refused.value)
    loader = other()
    loader.load_state_dict(run.loader.state_at_end(states[3]))  # where it is welcome
    assert len(list(loader)) > 2


def test_resume_refuses_and_names_a_changed_number_of_ranks(monkeypatch):
    state = Run(MAP_KINDS["shuffled"], epochs=1).unbroken()[0][2]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ResumeError, match="2 ranks instead of 1"):
        Run(MAP_KINDS["shuffled"]).loader.load_state_dict(state)


def test_resume_refuses_a_sampler_that_does_not_repeat_the_order():
    loader = FeedLoader(Squares(), batch_size=3, sampler=RandomSampler(range(SIZE), generator=torch.Generator()))
    state = Run(MAP_KINDS["shuffled"], epochs=1).unbroken()[1][2]
    loader.load_state_dict(state)
    with pytest.raises(ResumeError, match="does not repeat the order"):
        list(loader)


def test_resume_refuses_states_of_another_version_or_edited_states():
    state = Run(MAP_KINDS["shuffled"]).unbroken()[0][2]
    loader = Run(MAP_KINDS["shuffled"]).loader
    with pytest.raises(ResumeError, match="version 9"):
        loader.load_state_dict({**state, "version": 9})
    with pytest.raises(ResumeError, match="was changed after it was written"):
        loader.load_state_dict({"batches": 5})


def test_states_saved_with_in_order_false_are_marked_inexact(caplog):
    loader = FeedLoader(Squares(), num_workers=2, in_order=False)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    assert state["exact"] is False
    with caplog.at_level(logging.WARNING):
        FeedLoader(Squares()).load_state_dict(state)
    assert caplog.text.count("not exact") == 1


# ---- ends ----


def test_close_can_be_called_at_any_time_and_repeatedly():
    loader = FeedLoader(Squares())
    loader.close()
    batches = iter(loader)
    batches.close()
    batches.close()
    with pytest.raises(LoaderError, match="closed before its end"):
        next(batches)


@pytest.mark.parametrize("name", ["dataset", "collate_fn", "worker_init_fn"])
# torch adds advice of its own to the failure that is provoked here, from 2.15 on
@pytest.mark.filterwarnings("ignore:Got pickle error when attempting to start a worker:UserWarning")
def test_unpicklable_loader_argument_is_named_in_the_error(name):
    dataset = Squares()
    options = {"collate_fn": list, "worker_init_fn": None}
    if name == "dataset":
        dataset.transform = lambda x: x
    else:
        options[name] = lambda *a: None
    loader = FeedLoader(dataset, num_workers=1, multiprocessing_context="spawn", **options)
    with pytest.raises(
        LoaderError, match=f"because its {name} cannot be sent to worker processes that are started by 'spawn'"
    ):
        iter(loader)


# ---- what Lightning does with loaders ----


class Source:
    """A *_dataloader hook."""

    def __init__(self, **options):
        self.order = EpochOrder(seed=8, epoch=lambda: 0)
        self.options = options

    def make(self, dataset):
        return FeedLoader(dataset, background=1, order=self.order, num_workers=1, **self.options)


@pytest.mark.parametrize("wrapped", [True, False], ids=["made in a hook", "made elsewhere"])
def test_lightning_can_copy_a_loader_over_an_iterable_dataset(wrapped):
    source = Source(batch_size=4)
    if wrapped:
        with _replace_dunder_methods(DataLoader, "dataset"):
            loader = source.make(Sharded())
    else:
        loader = source.make(Sharded())
    copied = _update_dataloader(loader, loader.sampler)
    assert copied.dataset is loader.dataset
    assert type(copied.dataset) is Sharded
    assert [as_list(b) for b in copied] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_lightning_sees_the_batch_indices_when_predicting():
    loader = _update_dataloader(FeedLoader(Squares(), batch_size=4), range(SIZE), RunningStage.PREDICTING)
    batches = iter(loader)
    next(batches)
    assert loader.batch_sampler.seen_batch_indices == [[0, 1, 2, 3]]


def test_copied_loader_draws_the_same_order_as_the_original():
    order = EpochOrder(seed=8, epoch=lambda: 1)
    loader = FeedLoader(Squares(), batch_size=SIZE, shuffle=True, order=order)
    first = next(iter(loader)).tolist()
    assert next(iter(_update_dataloader(loader, loader.sampler))).tolist() == first


def init_of_worker(worker_id):
    get_worker_info().dataset.size = 2 + worker_id


def test_worker_init_fn_sees_the_users_dataset():
    loader = FeedLoader(Sharded(), batch_size=None, num_workers=1, worker_init_fn=init_of_worker)
    assert list(loader) == [0, 1]
