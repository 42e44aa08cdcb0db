"""Worker threads, beyond the contract of test_workers.py: set-up, shared generators, hanging samples, forks."""

import gc
import logging
import multiprocessing
import os
import random
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from load.numbered import LOADERS, SIZE, Failing, Noisy, Rows, as_list, epochs
from torch.utils.data import default_collate, get_worker_info

from lightning_feed.errors import LoaderError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.threads import _BatchInProgress, _PassTasks


def threaded(dataset, *, num_workers=2, **options):
    return FeedLoader(dataset, num_workers=num_workers, workers="thread", **options)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    if _feeds():
        gc.collect()
    for thread in _feeds():
        thread.join(10)  # told to end, but waited for only by the thread that started them
    assert _feeds() == []


def _feeds():
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]


# --- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shuffled", "users_generator", "batch_sampler", "unbatched"])
def test_batches_and_main_random_state_match_worker_processes(kind):
    def run(**options):
        torch.manual_seed(7), random.seed(7), np.random.seed(7)
        given = LOADERS[kind]()
        seen = epochs(FeedLoader(Rows(), num_workers=1, **given, **options))
        users = given["generator"].get_state().tolist() if "generator" in given else None
        return seen, torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state()), users

    assert run(workers="thread") == run()


def test_an_empty_batch_is_collated():
    assert list(threaded(Rows(), batch_sampler=[[], [1]], collate_fn=list)) == [[], [1]]


def test_samples_of_a_batch_are_loaded_in_parallel():
    meeting = threading.Barrier(2)

    class Meeting(Rows):
        def __getitem__(self, index):
            if index in (1, 2):
                meeting.wait(10)
            return index

    assert next(iter(threaded(Meeting(), batch_size=3))).tolist() == [0, 1, 2]


# --- random numbers -------------------------------------------------------------------------------------------------


def test_epoch_after_a_resumed_one_draws_new_random_numbers():
    torch.manual_seed(7)
    loader = threaded(Noisy(), batch_size=4)
    batches = iter(loader)
    first = as_list(next(batches))
    state = loader.state_dict()
    assert state["sample_seed"] is not None
    next_epoch = loader.state_at_end(state)
    assert next_epoch["sample_seed"] is None
    resumed = threaded(Noisy(), batch_size=4)
    resumed.load_state_dict(next_epoch)
    assert as_list(next(iter(resumed))) != first


def test_random_samples_without_epoch_order_follow_torchs_seed():
    def run(seed, **options):
        torch.manual_seed(seed)
        return epochs(threaded(Noisy(), batch_size=4, **options))

    first, second = run(7)
    assert first != second
    assert run(7) == [first, second]
    assert run(8)[0] != first
    persistent = run(7, persistent_workers=True)
    assert persistent[0] != persistent[1]


class DrawsShared(Rows):
    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(())


def test_draw_from_a_shared_generator_is_undone_and_logged_once(caplog):
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


def test_worker_threads_have_the_torch_settings_of_worker_processes():
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


def test_batches_are_pinned_in_the_worker_threads(monkeypatch):
    pinned = []

    def pin(batch, device=None):
        pinned.append(threading.current_thread().name)
        return batch + 100

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.utils.data._utils.pin_memory.pin_memory", pin)
    loader = threaded(Rows(4), batch_size=2, pin_memory=True)
    assert [batch.tolist() for batch in loader] == [[100, 101], [102, 103]]
    assert {name[:5] for name in pinned} == {"feed-"}


# --- errors ---------------------------------------------------------------------------------------------------------


def test_the_first_of_several_errors_in_a_batch_is_raised():
    with pytest.raises(ValueError, match="at index 9 of"):
        epochs(threaded(Failing(ValueError()), num_workers=4, batch_size=16))


def test_samples_before_a_failed_one_are_still_loaded():
    """Its thread has taken it, and not yet begun."""
    job = _BatchInProgress(
        _PassTasks(Failing(ValueError(), at=[4, 6]), default_collate, None, batched=True, seed=0), 0, [4, 5, 6]
    )
    for place in (2, 1, 0):
        thread = threading.Thread(target=job.work, args=(place, 0))  # its generator is not that of the tests' thread
        thread.start()
        thread.join()
    with pytest.raises(ValueError, match="index 4"):
        job.take()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is new in Python 3.11")
def test_an_exception_group_keeps_its_text():
    error = ExceptionGroup("two reads failed", [OSError("disk"), TimeoutError("net")])  # noqa: F821
    with pytest.raises(ExceptionGroup, match=r"(?s)in thread worker.*two reads failed.*OSError: disk"):  # noqa: F821
        epochs(threaded(Failing(error), batch_size=4))


@pytest.mark.parametrize(("error", "background"), [(SystemExit(3), 0), (KeyboardInterrupt(), 1)])
def test_system_exit_and_keyboard_interrupt_are_raised_unchanged(error, background):
    with pytest.raises(type(error)) as caught:
        epochs(threaded(Failing(error), batch_size=4, background=background))
    assert caught.value is error


def test_sampler_error_is_raised_when_its_batch_is_drawn():
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


def test_error_counts_the_threads_that_could_be_started(monkeypatch):
    start, started = threading.Thread.start, []

    def refuse(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LoaderError, match=r"Only 2 of 5 worker threads .*Lower num_workers"):
        iter(threaded(Rows(), num_workers=5, batch_size=4))


def test_thread_setup_error_is_raised_and_leaves_no_thread_running(monkeypatch):
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


def test_closed_pass_loads_no_more_samples():
    dataset = Hanging(1000)
    batches = iter(threaded(dataset, num_workers=1, batch_size=5, prefetch_factor=50))
    next(batches)
    threading.Timer(0.1, dataset.free.set).start()
    batches.close()
    assert len(dataset.read) <= 6


def test_loader_keeps_no_reference_to_a_consumed_batch():
    class Batch(list):
        pass

    loader = threaded(Rows(8), batch_size=4, collate_fn=Batch)
    batches = iter(loader)
    kept = weakref.ref(next(batches))
    assert kept() is None
    assert len(next(batches)) == 4


@pytest.mark.parametrize("options", [{"background": 1}, {"in_order": False}], ids=str)
def test_hanging_sample_is_named_in_the_timeout_error(options):
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


def test_threads_that_do_not_end_are_abandoned_with_a_warning(caplog):
    dataset = Hanging()
    loader = threaded(dataset, num_workers=1, batch_size=5)
    batches = iter(loader)
    next(batches)
    batches.source.close(0.01)
    assert "1 threads of the loader are still loading a sample after 0.01 s and were abandoned" in caplog.text
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
def test_fork_during_a_pass_does_not_hang():
    loader = threaded(Rows(), batch_size=4)
    batches = iter(loader)
    next(batches)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(batches, loader, answers))
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert "are in another process" in answers.get()
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


def pl_worker_init_function(worker_id, rank=None):
    raise AssertionError("it would seed the training process")


@pytest.mark.parametrize(("function", "said"), [(pl_worker_init_function, 0), (print, 1)])
def test_worker_init_fn_is_not_called(function, said, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        epochs(threaded(Rows(), batch_size=4, worker_init_fn=function))
    assert caplog.text.count("is not called with workers='thread'") == said
    assert capsys.readouterr().out == ""
