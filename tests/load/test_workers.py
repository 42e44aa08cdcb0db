"""The contract of a loader with workers of any kind: a DataLoader's batches, random numbers, errors, clean ends."""

import gc
import multiprocessing
import pickle
import random
import threading
import time
import traceback
from itertools import product

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.utilities.data import _update_dataloader
from load.numbered import (
    LOADERS,
    SIZE,
    Failing,
    Noisy,
    NoisyEverywhere,
    NoisyWhole,
    Rows,
    Stream,
    TwoWords,
    Whole,
    as_list,
    epochs,
    mix_up,
    order,
)
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import RayCluster

WORKERS = {
    "none": {},
    "process": {"num_workers": 2},
    "thread": {"num_workers": 2, "workers": "thread"},
    "ray": {"num_workers": 2, "workers": RayCluster()},
}
NAMED = {
    "none": "",
    "process": r"Caught KeyError in DataLoader worker process \d.*",
    "thread": r"Caught KeyError in thread worker \d, at index 9 of .*",
    "ray": r"Caught KeyError in a Ray worker \(process \d+ of .*\), at index 9 of .*",
}
"""How an error is introduced."""
RAY = pytest.param(
    "ray",
    marks=[
        pytest.mark.slow,  # starting Ray and its workers
        pytest.mark.xdist_group("ray"),  # once
        pytest.mark.timeout(120),
        # Ray 2.60 leaves these to garbage collection when it starts its own processes, and when it is shut down.
        pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
    ],
)
KINDS = ["none", "process", "thread", RAY]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_worker = pytest.mark.parametrize("kind", ["process", "thread", RAY])
local = pytest.mark.parametrize("kind", ["none", "process", "thread"])
ours = pytest.mark.parametrize("kind", ["thread", RAY])
"""Those whose workers are not torch's."""


def feeds():
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]


@pytest.fixture(autouse=True)
def _workers(request):
    """Ray where it is asked for; and no thread is left behind."""
    if request.node.callspec.params["kind"] == "ray":
        request.getfixturevalue("one_ray")
    yield
    if feeds():
        gc.collect()
    for thread in feeds():
        thread.join(10)  # told to end, but waited for only by the thread that started them
    assert feeds() == []


def loader_of(kind, dataset, **options):
    return FeedLoader(dataset, **{**WORKERS[kind], **options})


# --- batches --------------------------------------------------------------------------------------------------------


def in_turn(*cells, every):
    """Each kind with each of the cells, of which the gate has one in ``every``, others for each kind."""
    return [
        pytest.param(
            *getattr(kind, "values", (kind,)),
            *cell,
            marks=[*getattr(kind, "marks", ()), *([pytest.mark.nightly] if (number + place) % every else [])],
        )
        for place, kind in enumerate(KINDS)
        for number, cell in enumerate(cells)
    ]


@pytest.mark.parametrize(("kind", "number"), in_turn(*zip(range(len(LOADERS))), every=2))
def test_batches_equal_those_of_a_dataloader(kind, number):
    given, dataset = list(LOADERS.values())[number], (Rows, Whole)[number % 2]
    options = [{}, {"background": 2}, {} if kind == "none" else {"persistent_workers": True}][number % 3]
    torch.manual_seed(7)
    plain = epochs(DataLoader(dataset(), **given()))
    torch.manual_seed(7)
    loaded = epochs(loader_of(kind, dataset(), **given(), **options))
    same = 1 if "persistent_workers" in options else 2  # torch seeds persistent workers once, and draws less from then
    assert loaded[:same] == plain[:same]


@every_worker
def test_all_batches_arrive_with_in_order_false(kind, tmp_path):
    class Blocked(Rows):
        def __getitem__(self, index):
            while index == 2 and not (tmp_path / "free").exists():
                time.sleep(0.01)
            return index

    seen = []
    for batch in loader_of(kind, Blocked(), batch_size=4, in_order=False):
        seen.append(batch.tolist())
        (tmp_path / "free").touch()
    whole = [list(range(at, min(at + 4, SIZE))) for at in range(0, SIZE, 4)]
    assert seen[0] != whole[0]
    assert sorted(seen) == whole


@every_kind
def test_two_simultaneous_passes_yield_the_same_batches(kind):
    loader = loader_of(kind, Rows(), batch_size=4)
    both = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert both == [(batch, batch) for (batch, _) in both]
    assert len(both) == 6


@every_worker
def test_workers_load_no_more_batches_ahead_than_prefetch_factor_allows(kind, tmp_path):
    class Noting(Rows):
        def __getitem__(self, index):
            (tmp_path / str(index)).touch()
            return index

    for taken, _ in enumerate(loader_of(kind, Noting(60), batch_size=4, prefetch_factor=1), 1):
        assert len(list(tmp_path.iterdir())) - 4 * taken <= 4 * 2


@ours
def test_iterable_dataset_is_refused(kind):
    with pytest.raises(SettingsError, match=f"workers='{kind}' cannot load Stream, an IterableDataset"):
        loader_of(kind, Stream())


# --- random numbers -------------------------------------------------------------------------------------------------

NOISY = {
    "batches": (Noisy, {"batch_size": 4}),
    "everywhere": (NoisyEverywhere, {"batch_size": 4}),
    "unbatched": (Noisy, {"batch_size": None}),
    "whole": (NoisyWhole, {"batch_size": 4}),
    "collate": (Noisy, {"batch_size": 4, "collate_fn": mix_up}),
}
noisy = pytest.mark.parametrize(
    ("kind", "drawn"),
    [
        *(("thread", drawn) for drawn in NOISY if drawn != "everywhere"),
        pytest.param("ray", "everywhere", marks=RAY.marks),
    ],
)


@noisy
def test_random_numbers_are_independent_of_the_number_of_workers(kind, drawn):
    dataset, given = NOISY[drawn]
    options = [(1, {}), (2, {"background": 2, "prefetch_factor": 5})]
    if kind == "thread":
        options += [(7, {"persistent_workers": True})]
    runs = [
        epochs(loader_of(kind, dataset(), shuffle=True, order=order(), **given, **{**opts, "num_workers": workers}))
        for workers, opts in options
    ]
    assert all(run == runs[0] for run in runs)
    assert runs[0][0] != runs[0][1]  # another cycle of the same epoch


@noisy
@pytest.mark.parametrize("seeded", [True, False])
def test_random_numbers_are_the_same_after_a_resume(kind, drawn, seeded):
    dataset, given = NOISY[drawn]

    def make(workers):
        given_order = order() if seeded else None
        return loader_of(kind, dataset(), **{**given, "order": given_order, "shuffle": True, "num_workers": workers})

    torch.manual_seed(7)
    loader = make(2)
    whole, states = [], []
    for batch in loader:
        whole.append(as_list(batch))
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    for at in (0, len(whole) - 2):
        torch.manual_seed(at)
        resumed = make(1 + at % 3)
        resumed.load_state_dict(states[at])
        assert resumed.state_dict() == states[at]
        assert [as_list(batch) for batch in resumed] == whole[at + 1 :]


@ours
def test_each_rank_draws_its_own_random_numbers(kind, monkeypatch):
    def on_rank(rank):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return epochs(loader_of(kind, Noisy(), batch_size=4, order=order()))

    assert on_rank(0) != on_rank(1)


@ours
def test_loading_does_not_change_the_random_numbers_of_the_training(kind):
    def run(kind, dataset):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        loader = loader_of(kind, dataset, batch_size=4, shuffle=True, order=order())
        return [(torch.rand(2).tolist(), random.random(), np.random.rand()) for _ in loader]

    assert run(kind, Noisy()) == run("none", Rows())


# --- errors ---------------------------------------------------------------------------------------------------------


@every_kind
def test_an_error_names_the_worker_and_the_index(kind):
    batches = iter(loader_of(kind, Failing(KeyError("no picture")), batch_size=4))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(KeyError, match=f"(?s){NAMED[kind]}no picture") as caught:
        next(batches)
    assert "__getitem__" in "".join(traceback.format_exception(caught.value))
    del caught  # it and this frame would hold each other, and with them the workers
    with pytest.raises(LoaderError, match=r"(?s)ended with KeyError.*Begin a new pass"):
        next(batches)


@ours
@pytest.mark.parametrize(
    ("error", "raised", "words"),
    [
        (TwoWords("a", "b"), RuntimeError, "Caught TwoWords in .* worker .*at index 9"),
        (StopIteration(), LoaderError, "StopIteration was raised in .* worker .*index 9"),
    ],
)
def test_unusual_exceptions_are_raised_with_worker_and_index(kind, error, raised, words):
    with pytest.raises(raised, match=f"(?s){words}"):
        epochs(loader_of(kind, Failing(error), batch_size=4))


@ours
def test_an_error_in_the_collate_function_names_the_samples(kind):
    def collate(samples):
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match=r"(?s)collating the samples of index \[0, 1, 2, 3\].*does not fit"):
        epochs(loader_of(kind, Rows(), batch_size=4, collate_fn=collate))


# --- ends -----------------------------------------------------------------------------------------------------------


@every_kind
def test_an_exhausted_pass_stays_exhausted(kind):
    batches = iter(loader_of(kind, Rows(), batch_size=4))
    assert len(list(batches)) == 6
    assert list(batches) == []


@local
@pytest.mark.parametrize(("how", "background"), [("close", 0), ("loader", 2), ("garbage", 0), ("end", 0)])
def test_no_threads_or_processes_outlive_their_pass(kind, how, background):
    def running():
        return {*threading.enumerate(), *multiprocessing.active_children()}

    before = running()
    loader = loader_of(kind, Rows(1000), batch_size=2, background=background)
    batches = iter(loader)
    next(batches)
    assert len(running() - before) >= WORKERS[kind].get("num_workers", 0) + bool(background)
    if how == "close":
        batches.close()
    elif how == "loader":
        loader.close()
    elif how == "end":
        list(batches)
    else:
        del batches
    for runner in running() - before:
        runner.join(10)
    assert running() <= before


# --- copies ---------------------------------------------------------------------------------------------------------


class Pairs(BatchSampler):
    def __init__(self, sampler, batch_size=2, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)


COPIED = product([True, False], [{"batch_size": 2}, {"batch_sampler": Pairs(RandomSampler(range(SIZE)))}])


@pytest.mark.parametrize(("kind", "wrapped", "options"), in_turn(*COPIED, every=3))
def test_lightning_can_copy_a_loader_with_another_sampler(kind, wrapped, options):
    given = order()
    if wrapped:
        with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
            loader = loader_of(kind, Rows(), background=1, order=given, **options)
    else:
        loader = loader_of(kind, Rows(), background=1, order=given, **options)
    copied = _update_dataloader(loader, DistributedSampler(range(SIZE), 2, 1, shuffle=False))
    assert type(copied) is FeedLoader
    assert copied.order is given
    assert (copied.background, copied.num_workers) == (1, loader.num_workers)
    assert (copied.workers, copied.dataset) == (loader.workers, loader.dataset)
    assert next(iter(copied)).tolist() == [1, 3]
    copied.close()


@every_kind
def test_loader_can_be_pickled_in_the_middle_of_a_pass(kind):
    loader = loader_of(kind, Rows(), batch_size=4, shuffle=True, background=1)
    batches = iter(loader)
    next(batches)
    copied = pickle.loads(pickle.dumps(loader))
    assert [as_list(batch) for batch in copied] == [as_list(batch) for batch in batches]
