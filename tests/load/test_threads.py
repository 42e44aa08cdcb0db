"""Worker threads: the batches of a DataLoader, random numbers of our recipes, errors, and clean ends."""

import gc
import logging
import multiprocessing
import os
import pickle
import random
import threading
import weakref

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
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

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load import threads as worker_threads
from lightning_feed.load.carry_over import begin_next_epoch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.random_state import DefaultGenerators, begin_sample, sample_generator

SIZE = 23


class Rows(Dataset):
    def __init__(self, size=SIZE):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Whole(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(Rows):
    """As our recipes draw: more or less, by what was drawn before."""

    def __getitem__(self, index):
        drawn = [draw()]
        while drawn[-1] < 0.7:
            drawn += [draw(), draw()]
        return index, drawn[-1]


def draw():
    return torch.rand((), generator=sample_generator()).item()


class NoisyWhole(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def mix_up(samples):
    return torch.tensor([sample[1] for sample in samples]) * draw()


def as_list(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_list(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def threaded(dataset, *, num_workers=2, **options):
    return FeedLoader(dataset, num_workers=num_workers, workers="thread", **options)


def epochs(loader, count=2):
    return [[as_list(batch) for batch in loader] for _ in range(count)]


def order(epoch=0):
    return EpochOrder(seed=8, epoch=lambda: epoch)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if _feeds():
        gc.collect()  # half a second each time
    for thread in _feeds():
        thread.join(10)  # told to end, but waited for only by the thread that started them
    assert _feeds() == []


def _feeds():
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]


# --- the contract ---------------------------------------------------------------------------------------------------

KINDS = {
    "sequential": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "users_generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False)},
    "uneven": lambda: {"batch_sampler": [[3], [1, 2, 3], (4, 5), torch.tensor([6, 7]), range(2)]},
    "unbatched": lambda: {"batch_size": None, "shuffle": True},
    "unbatched_lists": lambda: {"batch_size": None, "sampler": [0, 1, 2], "collate_fn": lambda sample: [sample]},
    "collate": lambda: {"batch_size": 4, "collate_fn": lambda samples: {"sum": sum(map(int, samples))}},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(range(SIZE), 2, 1)},
}


@pytest.mark.parametrize("number", range(len(KINDS)))
@pytest.mark.parametrize("options", [{}, {"background": 2}, {"persistent_workers": True}], ids=str)
def test_batches_are_those_of_a_dataloader(number, options):
    kind, dataset = list(KINDS)[number], (Rows, Whole)[(number + len(options)) % 2]
    threads = (1, 3)[(number // 2 + ("background" in options)) % 2]
    torch.manual_seed(7)
    plain = epochs(DataLoader(dataset(), **KINDS[kind]()))
    torch.manual_seed(7)
    given = KINDS[kind]()
    ours = epochs(threaded(dataset(), num_workers=threads, **given, **options))
    same = 1 if "persistent_workers" in options else 2  # torch seeds persistent workers once, and draws less from then
    assert ours[:same] == plain[:same]


@pytest.mark.parametrize("kind", ["shuffled", "users_generator", "batch_sampler", "unbatched"])
def test_batches_and_main_random_state_are_those_of_worker_processes(kind):
    def run(**options):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        given = KINDS[kind]()
        seen = epochs(FeedLoader(Rows(), num_workers=1, **given, **options))
        users = given["generator"].get_state().tolist() if "generator" in given else None
        return seen, torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), users

    assert run(workers="thread") == run()


@pytest.mark.parametrize("background", [0, 2])
def test_out_of_order_all_batches_come(background):
    class Blocked(Rows):
        def __init__(self):
            super().__init__()
            self.free = threading.Event()

        def __getitem__(self, index):
            if index == 2:
                assert self.free.wait(10)
            return index

    dataset = Blocked()
    seen = []
    for batch in threaded(dataset, batch_size=4, in_order=False, background=background):
        seen.append(batch.tolist())
        dataset.free.set()
    whole = [list(range(at, min(at + 4, SIZE))) for at in range(0, SIZE, 4)]
    assert seen[0] != whole[0]
    assert sorted(seen) == whole


def test_an_empty_batch_is_collated():
    assert list(threaded(Rows(), batch_sampler=[[], [1]], collate_fn=list)) == [[], [1]]


def test_no_batches_at_all():
    assert epochs(threaded(Rows(), batch_sampler=[])) == [[], []]


def test_several_passes_at_a_time():
    loader = threaded(Rows(), batch_size=4)
    whole = [batch.tolist() for batch in loader]
    both = [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)]
    assert both == [(batch, batch) for batch in whole]


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 1), (2, 2), (3, 2)])
def test_no_more_is_loaded_ahead_than_said(threads, prefetch):
    dataset = Rows(400)
    loader = threaded(dataset, num_workers=threads, batch_size=4, prefetch_factor=prefetch)
    batches = iter(loader)
    most = 0
    for taken, _ in enumerate(batches, 1):
        most = max(most, len(dataset.read) - 4 * taken)
        assert most <= 4 * threads * prefetch
    assert sorted(dataset.read) == list(range(400))


def test_the_samples_of_a_batch_are_loaded_side_by_side():
    meeting = threading.Barrier(2)

    class Meeting(Rows):
        def __getitem__(self, index):
            if index in (1, 2):
                meeting.wait(10)
            return index

    assert next(iter(threaded(Meeting(), batch_size=3))).tolist() == [0, 1, 2]


# --- random numbers -------------------------------------------------------------------------------------------------

NOISY = {
    "batches": (Noisy, {"batch_size": 4}),
    "unbatched": (Noisy, {"batch_size": None}),
    "whole": (NoisyWhole, {"batch_size": 4}),
    "collate": (Noisy, {"batch_size": 4, "collate_fn": mix_up}),
}


@pytest.mark.parametrize("kind", NOISY)
def test_what_is_drawn_does_not_depend_on_the_threads(kind):
    dataset, given = NOISY[kind]
    options = {"background": 2} if kind in ("batches", "unbatched") else {"persistent_workers": True}
    runs = [
        epochs(threaded(dataset(), num_workers=threads, shuffle=True, order=order(), **given, **opts))
        for threads, opts in ((1, {}), (2, options), (7, options), (7, {"prefetch_factor": 5}))
    ]
    assert runs[1] == runs[2] == runs[3] == runs[0]
    assert runs[0][0] != runs[0][1]  # another cycle of the same epoch


@pytest.mark.parametrize("kind", NOISY)
@pytest.mark.parametrize("seeded", [True, False])
def test_what_is_drawn_is_the_same_after_a_resume(kind, seeded):
    dataset, given = NOISY[kind]

    def make(threads):
        return threaded(dataset(), num_workers=threads, order=order() if seeded else None, shuffle=True, **given)

    torch.manual_seed(7)
    loader = make(2)
    whole, states = [], []
    for batch in loader:
        whole.append(as_list(batch))
        states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    for at in (0, 2, len(whole) - 2):
        torch.manual_seed(at)
        resumed = make(1 + at % 3)
        resumed.load_state_dict(states[at])
        assert resumed.state_dict() == states[at]
        assert [as_list(batch) for batch in resumed] == whole[at + 1 :]


def test_the_epoch_after_a_resumed_one_has_numbers_of_its_own():
    torch.manual_seed(7)
    loader = threaded(Noisy(), batch_size=4)
    batches = iter(loader)
    first = as_list(next(batches))
    state = loader.state_dict()
    assert "sample_seed" in state
    assert "sample_seed" not in begin_next_epoch(state)
    resumed = threaded(Noisy(), batch_size=4)
    resumed.load_state_dict(begin_next_epoch(state))
    assert as_list(next(iter(resumed))) != first


def test_epochs_and_seeds_have_numbers_of_their_own():
    def first(seed, epoch):
        given = EpochOrder(seed=seed, epoch=lambda: epoch)
        return str(as_list(next(iter(threaded(Noisy(), batch_size=4, order=given)))))

    assert len({first(1, 0), first(1, 1), first(2, 0)}) == 3
    assert first(1, 1) == first(1, 1)


def test_ranks_have_numbers_of_their_own(monkeypatch):
    def on_rank(rank):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        return epochs(threaded(Noisy(), batch_size=4, order=order()))

    assert on_rank(0) != on_rank(1)


def test_without_an_order_each_pass_follows_torchs_seed():
    def run(seed, **options):
        torch.manual_seed(seed)
        return epochs(threaded(Noisy(), batch_size=4, **options))

    first, second = run(7)
    assert first != second
    assert run(7) == [first, second]
    assert run(8)[0] != first
    persistent = run(7, persistent_workers=True)
    assert persistent[0] != persistent[1]


def test_the_training_goes_on_drawing_its_own_numbers():
    def run(dataset, threads):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        workers = {"workers": "thread", "num_workers": threads} if threads else {}
        loader = FeedLoader(dataset, batch_size=4, shuffle=True, order=order(), **workers)
        return [(torch.rand(2).tolist(), random.random(), np.random.rand()) for _ in range(2) for _ in loader]

    assert run(Noisy(), 1) == run(Noisy(), 3) == run(Rows(), 0)


class DrawsShared(Rows):
    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(())


def test_drawing_what_is_shared_is_said_once_and_the_first_draw_taken_back(caplog):
    random.seed(1), np.random.seed(1)
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    with caplog.at_level(logging.WARNING):
        loader = threaded(DrawsShared(1), batch_size=4, generator=torch.Generator())
        epochs(loader, 1)
        assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before
        epochs(loader, 1)
    assert caplog.text.count("are not reproducible") == 1
    assert "torch's default generator and Python's random module and numpy.random's functions" in caplog.text
    assert "Use workers='process'" in caplog.text


def test_drawing_from_a_generator_of_the_samples_own_is_not_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        epochs(threaded(Noisy(), batch_size=4))
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("draws", "word"),
    [
        (lambda: random.gauss(0, 1), ["Python's random module"]),
        (lambda: np.random.randn(), ["numpy.random's functions"]),
        (lambda: torch.rand(1), ["torch's default generator"]),
        (lambda: (random.Random(1).random(), np.random.default_rng(1).random()), []),
    ],
)
def test_a_draw_from_a_default_generator_is_found(draws, word):
    found = DefaultGenerators()
    draws()
    assert found.restore() == word
    assert DefaultGenerators().restore() == []


def test_samples_differ_by_pass_batch_and_place_and_other_threads_have_torchs_default():
    seen = []

    def work():
        for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 2, -1), (1, 2, 3)):
            begin_sample(*key)
            seen.append(draw())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(set(seen)) == 5
    assert seen[0] == seen[-1]
    assert sample_generator() is None


# --- what a worker thread is like -----------------------------------------------------------------------------------


class Asking(Rows):
    def __getitem__(self, index):
        return {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "device": str(torch.get_default_device()),
            "autocast": torch.is_autocast_enabled("cpu"),
            "threads": torch.get_num_threads(),
            "info": get_worker_info(),
        }


def test_a_worker_thread_is_set_up_as_a_worker_process_is():
    torch.set_num_threads(2)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        loader = threaded(Asking(2), batch_size=None)
        first, second = loader
    assert (
        first
        == second
        == {
            "grad": True,
            "inference": False,
            "device": "cpu",
            "autocast": False,
            "threads": 1,
            "info": None,
        }
    )


def test_what_torch_computes_elsewhere_keeps_its_threads():
    torch.set_num_threads(2)
    seen = [torch.get_num_threads]
    loader = threaded(Rows(), batch_size=4)
    batches = iter(loader)
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    next(batches)
    assert (torch.get_num_threads(), seen[1]) == (2, 2)


def test_opencv_opens_no_pool_beside_them(monkeypatch):
    calls = []

    class Cv2:
        setNumThreads = staticmethod(calls.append)

    monkeypatch.setitem(__import__("sys").modules, "cv2", Cv2)
    epochs(threaded(Rows(), batch_size=4), 1)
    assert calls == [0]


def test_batches_are_pinned_in_the_threads(monkeypatch):
    pinned = []

    def pin(batch, device=None):
        pinned.append(threading.current_thread().name)
        return batch + 100

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(worker_threads._pinning, "pin_memory", pin)
    loader = threaded(Rows(4), batch_size=2, pin_memory=True)
    assert [batch.tolist() for batch in loader] == [[100, 101], [102, 103]]
    assert {name[:5] for name in pinned} == {"feed-"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is something to pin for")
def test_without_an_accelerator_nothing_is_pinned():
    assert epochs(threaded(Rows(4), batch_size=2, pin_memory=True), 1) == [[[0, 1], [2, 3]]]


# --- errors ---------------------------------------------------------------------------------------------------------


class Failing(Rows):
    def __init__(self, error, at=(9, 10, 11)):
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index):
        if index in self.at:
            raise self.error
        return super().__getitem__(index)


class TwoWords(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


@pytest.mark.parametrize(("threads", "options"), [(1, {}), (3, {"background": 2})])
def test_an_error_names_the_thread_and_the_index(options, threads):
    loader = threaded(Failing(KeyError("no picture")), num_workers=threads, batch_size=4, **options)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(
        KeyError, match=r"(?s)Caught KeyError in thread worker \d, at index 9 of .*no picture"
    ) as caught:
        next(batches)
    assert "__getitem__" in str(caught.value)
    del caught
    with pytest.raises(LoaderError, match="ended with KeyError"):
        next(batches)


def test_of_several_errors_in_a_batch_the_first_is_told():
    with pytest.raises(ValueError, match="at index 9 of"):
        epochs(threaded(Failing(ValueError()), num_workers=4, batch_size=16))


def test_an_error_that_takes_other_arguments_is_told_in_words():
    with pytest.raises(RuntimeError, match=r"(?s)Caught TwoWords in thread worker .*at index 9"):
        epochs(threaded(Failing(TwoWords("a", "b")), batch_size=4))


@pytest.mark.parametrize(("error", "background"), [(SystemExit(3), 0), (KeyboardInterrupt(), 1)])
def test_what_is_no_exception_is_raised_as_it_is(error, background):
    with pytest.raises(type(error)) as caught:
        epochs(threaded(Failing(error), batch_size=4, background=background))
    assert caught.value is error


def test_stop_iteration_in_a_dataset_is_not_the_end_of_the_epoch():
    with pytest.raises(LoaderError, match=r"StopIteration was raised in thread worker .*index 9"):
        epochs(threaded(Failing(StopIteration()), batch_size=4))


def test_an_error_in_the_collate_function_names_the_samples():
    def collate(samples):
        raise ValueError("does not fit")

    with pytest.raises(ValueError, match=r"(?s)putting together the samples of index \[0, 1, 2, 3\].*does not fit"):
        epochs(threaded(Rows(), batch_size=4, collate_fn=collate))


def test_a_long_index_is_cut():
    with pytest.raises(IndexError, match=r"at index \[0, 1, .*\.\.\. of the dataset") as caught:
        epochs(threaded(Failing(IndexError(), at=[list(range(900))]), batch_size=None, sampler=[list(range(900))]))
    assert len(str(caught.value).splitlines()[0]) < 300


def test_an_error_in_the_sampler_is_raised_where_it_is_drawn():
    def sampler():
        yield from range(9)
        raise ValueError("the sampler is broken")

    class Broken:
        __iter__ = staticmethod(sampler)

    with pytest.raises(ValueError, match="the sampler is broken"):
        epochs(threaded(Rows(), batch_size=4, sampler=Broken()))
    with pytest.raises(ValueError, match="the sampler is broken"):
        iter(threaded(Rows(), batch_size=4, prefetch_factor=9, sampler=Broken()))


def test_after_an_error_nothing_more_is_loaded():
    dataset = Failing(ValueError(), at=[0])
    with pytest.raises(ValueError, match="index 0"):
        epochs(threaded(dataset, num_workers=1, batch_size=10, prefetch_factor=1))
    assert dataset.read == []


def test_threads_that_cannot_be_started_are_counted(monkeypatch):
    start, started = threading.Thread.start, []

    def refuse(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LoaderError, match=r"Only 2 of 5 worker threads .*Lower num_workers"):
        iter(threaded(Rows(), num_workers=5, batch_size=4))


def test_a_thread_that_cannot_be_set_up_is_an_error_and_not_waited_for(monkeypatch):
    """After a kernel has failed, CUDA raises its error in each call, that of the device of a new thread too."""
    setting = torch.set_num_threads

    def fail(count):
        if threading.current_thread().name == "feed-1":
            raise RuntimeError("device-side assert triggered")
        setting(count)

    monkeypatch.setattr(torch, "set_num_threads", fail)
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        iter(FeedLoader(Rows(), workers="thread", num_workers=3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]


# --- ends -----------------------------------------------------------------------------------------------------------


class Hanging(Rows):
    """At index 5 until it is let go."""

    def __init__(self, size=SIZE):
        super().__init__(size)
        self.free = threading.Event()

    def __getitem__(self, index):
        if index == 5:
            self.free.wait(10)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "background"), [("close", 0), ("loader", 2), ("garbage", 0), ("garbage", 2), ("break", 2), ("end", 0)]
)
def test_no_thread_outlives_its_pass(how, background):
    before = set(threading.enumerate())
    loader = threaded(Rows(1000), num_workers=3, batch_size=2, background=background)
    batches = iter(loader)
    next(batches)
    assert len(set(threading.enumerate()) - before) == 3 + bool(background)
    if how == "close":
        batches.close()
    elif how == "loader":
        loader.close()
    elif how == "break":
        for _ in batches:
            break
        del batches
    elif how == "end":
        list(batches)
    else:
        del batches
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    assert set(threading.enumerate()) <= before
    assert len(loader.dataset.read) < 1000 or how == "end"


def test_a_pass_that_was_closed_is_loaded_no_further():
    dataset = Hanging(1000)
    batches = iter(threaded(dataset, num_workers=1, batch_size=5, prefetch_factor=50))
    next(batches)
    threading.Timer(0.1, dataset.free.set).start()
    batches.close()
    assert len(dataset.read) <= 6


def test_a_batch_that_was_handed_out_is_not_kept():
    class Batch(list):
        pass

    loader = threaded(Rows(8), batch_size=4, collate_fn=Batch)
    batches = iter(loader)
    kept = weakref.ref(next(batches))
    assert kept() is None
    assert len(next(batches)) == 4


@pytest.mark.parametrize("options", [{"background": 1}, {"in_order": False}], ids=str)
def test_a_sample_that_hangs_is_named(options):
    dataset = Hanging()
    loader = threaded(dataset, batch_size=4, timeout=0.2, **options)
    with pytest.raises(LoaderError, match=r"timeout=0.2 s: thread worker \d is at index 5 of the dataset"):
        list(loader)
    dataset.free.set()
    assert len(list(loader)) == 6
    _join_feeds()


def _join_feeds():
    """The threads that were left behind, once what they hung at is over."""
    for thread in _feeds():
        thread.join(10)


def test_a_first_sample_that_hangs_is_named_too():
    dataset = Hanging()
    loader = threaded(dataset, batch_size=4, timeout=0.1, sampler=[5, 6, 7, 8])
    with pytest.raises(LoaderError, match="at index 5 of the dataset"):
        next(iter(loader))
    dataset.free.set()
    _join_feeds()


def test_threads_that_do_not_end_are_left_behind_with_words(monkeypatch, caplog):
    monkeypatch.setattr(worker_threads, "PATIENCE_S", 0.01)
    dataset = Hanging()
    loader = threaded(dataset, num_workers=1, batch_size=5)
    next(iter(loader))
    loader.close()
    assert "1 threads of the loader are still at a sample after 0.01 s and were left behind" in caplog.text
    dataset.free.set()
    _join_feeds()


def test_closing_wakes_a_consumer_in_another_thread():
    dataset = Hanging()
    loader = threaded(dataset, batch_size=4)
    batches = iter(loader)
    next(batches)
    raised = []

    def consume():
        try:
            next(batches)
        except LoaderError as error:
            raised.append(str(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    source = batches.source
    source.close(0)
    consumer.join(10)
    dataset.free.set()
    assert raised == ["This pass over the loader was closed. Begin a new pass with iter(loader)."]
    _join_feeds()


# os.fork is no good idea in a process with threads, says Python from 3.12 on: that is what is tested
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_in_the_middle_does_not_hang():
    loader = threaded(Rows(), batch_size=4)
    batches = iter(loader)
    next(batches)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(batches, loader, answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "belongs to another process" in answers.get()
    assert answers.get() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [batch.tolist()[0] for batch in batches] == [4, 8, 12, 16, 20]


def _in_child(batches, loader, answers):
    source = batches.source
    try:
        next(source)
    except LoaderError as error:
        answers.put(str(error))
    fresh = iter(loader)
    answers.put([next(fresh).tolist(), next(fresh).tolist()])
    fresh.close()
    os._exit(0)  # as multiprocessing does, without what pytest has to say at its end


# --- around it ------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_a_stream_is_refused():
    with pytest.raises(SettingsError, match=r"cannot serve Stream, an IterableDataset.*num_workers=0"):
        threaded(Stream())
    assert len(list(FeedLoader(Stream(), workers="thread"))) == 3  # no workers, no threads


def pl_worker_init_function(worker_id, rank=None):
    raise AssertionError("it would seed the training process")


@pytest.mark.parametrize(("function", "said"), [(pl_worker_init_function, 0), (print, 1)])
def test_worker_init_fn_is_not_called(function, said, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        epochs(threaded(Rows(), batch_size=4, worker_init_fn=function))
    assert caplog.text.count("is not called with workers='thread'") == said
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("error")
def test_more_threads_than_cpus_are_not_warned_of():
    assert len(next(iter(threaded(Rows(), num_workers=64, batch_size=4)))) == 4


@pytest.mark.parametrize("wrapped", [True, False], ids=["made in a hook", "made elsewhere"])
def test_lightning_can_copy_it_with_another_sampler(wrapped):
    def make():
        return threaded(Rows(), batch_size=4, background=1, order=given, prefetch_factor=3)

    given = order()
    if wrapped:
        with _replace_dunder_methods(DataLoader, "dataset"), _replace_dunder_methods(BatchSampler):
            loader = make()
    else:
        loader = make()
    copied = _update_dataloader(loader, DistributedSampler(range(SIZE), 2, 1, shuffle=False))
    assert type(copied) is FeedLoader
    assert (copied.workers, copied.num_workers, copied.prefetch_factor, copied.background) == ("thread", 2, 3, 1)
    assert copied.order is given
    assert as_list(next(iter(copied))) == [1, 3, 5, 7]
    copied.close()


def test_it_can_be_pickled_in_the_middle_of_a_pass():
    loader = threaded(Noisy(), batch_size=4, shuffle=True)
    batches = iter(loader)
    next(batches)
    copied = pickle.loads(pickle.dumps(loader))
    assert [as_list(batch) for batch in copied] == [as_list(batch) for batch in batches]
