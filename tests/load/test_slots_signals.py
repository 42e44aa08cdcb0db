"""A signal that arrives while a batch is released, such as Ctrl-C, reaches the program's loop."""

import gc
import os
import signal
import sys
import time
from _thread import interrupt_main
from functools import partial
from operator import methodcaller

import pytest
import torch
from slot_memory import FakeDevice

from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.slots import SlotMemory
from lightning_feed.load.worker import resend_ctrl_c, signal_proof


class Tick(Exception):
    """Raised by the handler of a signal."""


class Handler:
    """A handler of signals that raises an error."""

    def __init__(self):
        self.calls = 0

    def method(self, number, frame):
        self.calls += 1
        raise Tick(number)

    __call__ = method


HANDLERS = {
    "default": (signal.SIGINT, lambda: signal.default_int_handler, KeyboardInterrupt),
    "method": (signal.SIGTERM, lambda: Handler().method, Tick),
    "object": (signal.SIGALRM, Handler, Tick),
}


@pytest.fixture(params=HANDLERS)
def arriving(request):
    """A signal, and the error that its handler raises."""
    number, make, error = HANDLERS[request.param]
    before = signal.signal(number, make())
    yield number, error
    signal.signal(number, before)


@pytest.fixture
def device(monkeypatch):
    yield FakeDevice(monkeypatch)
    gc.collect()  # memories must end before there is no such device any more


def release_at(number, held):
    """Empty a list when a signal has arrived, before Python has called its handler."""
    calls = [partial(interrupt_main, number), held.clear]
    list(map(methodcaller("__call__"), calls))  # in C, without any Python code in between


def batch_of(memory):
    """A list with a batch that has been read from a slot."""
    assert memory.take() == 0
    return [memory.lease(0, 4096)]


# --- a signal that has arrived before a batch is dropped --------------------------------------------------------------


def test_signal_before_a_batch_is_dropped_reaches_the_loop(arriving):
    number, error = arriving
    memory = SlotMemory(1)
    held = batch_of(memory)
    with pytest.raises(error):
        release_at(number, held)
    assert memory.take() == 0


def test_signal_before_a_batch_on_the_device_is_dropped_reaches_the_loop(arriving, device):
    number, error = arriving
    memory = SlotMemory(1, CopyFence(device))
    held = batch_of(memory)
    with pytest.raises(error):
        release_at(number, held)
    memory.poll()
    assert memory.take() is None
    device.reached.update(main=1, copies=1)
    memory.poll()
    assert memory.take() == 0


def test_signal_before_a_batch_that_a_child_reads_is_dropped_reaches_the_loop(arriving):
    number, error = arriving
    memory = SlotMemory(1)
    held = batch_of(memory)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(error):
        release_at(number, held)
    memory.poll()
    assert memory.take() == 0


def test_signal_before_a_worker_drops_its_batch_reaches_the_worker(arriving):
    number, error = arriving
    memory = SlotMemory(1)
    assert memory.take() == 0
    held = [memory.view(0)]
    memory.give_back(0)
    assert memory.take() is None
    with pytest.raises(error):
        release_at(number, held)
    assert memory.take() == 0


def test_signal_before_the_slots_end_reaches_the_loop(arriving, device, monkeypatch):
    number, error = arriving
    unregistered = []
    monkeypatch.setattr("lightning_feed.load.slots._unregister", unregistered.append)
    memory = SlotMemory(1, CopyFence(device))
    file = memory._file
    batch_of(memory)
    held = [memory]
    del memory
    with pytest.raises(error):
        release_at(number, held)
    assert len(unregistered) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_ctrl_c_before_a_batch_of_a_loader_is_dropped_reaches_the_loop():
    loader = FeedLoader(torch.arange(40.0), batch_size=4, num_workers=1)
    seen = []

    def train():
        for batch in loader:
            held = [batch]
            del batch
            seen.append(held[0][0].item())
            if len(seen) == 5:
                release_at(signal.SIGINT, held)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert seen == [0, 4, 8, 12, 16]


# --- a signal that arrives while the device's copies are noted ----------------------------------------------------


@pytest.mark.parametrize("place", ["current_stream", "is_current_stream_capturing", "Event"])
def test_signal_while_copies_are_noted_reaches_the_loop_and_the_slot_is_freed_once(arriving, place, device):
    number, error = arriving
    memory = SlotMemory(1, CopyFence(device))
    held = batch_of(memory)
    whole = getattr(device, place)

    def interrupted(*arguments):
        setattr(device, place, whole)
        signal.raise_signal(number)
        return whole(*arguments)

    setattr(device, place, interrupted)
    with pytest.raises(error):
        held.clear()
    memory.poll()
    assert memory.take() is None
    device.reached.update(main=2, copies=2)
    memory.poll()
    assert memory.take() == 0
    memory.poll()
    assert memory.take() is None


def test_error_while_copies_are_noted_is_not_taken_for_a_signal(device, monkeypatch):
    memory = SlotMemory(1, CopyFence(device))
    held = batch_of(memory)
    device.current_stream = None
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: shown.append(what.exc_type))
    held.clear()
    assert shown == [TypeError]


# --- many signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True])
def test_every_signal_among_many_released_batches_reaches_the_loop(on_device, device):
    handler = Handler()
    before = signal.signal(signal.SIGALRM, handler)
    memory = SlotMemory(1, CopyFence(device) if on_device else None)
    came = 0
    until = time.monotonic() + 2
    gc.disable()  # Python drops errors in functions that observe garbage collections, such as hypothesis's
    try:
        while came < 300 and time.monotonic() < until:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                while time.monotonic() < until + 1:  # without an end, a lost signal would hang here
                    memory.lease(0, 4096)
            except Tick:
                came += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert came == handler.calls > 20


def test_signal_proof_work_is_done_again_after_a_signal(arriving):
    number, error = arriving
    done = []

    def work():
        done.append(1)
        if len(done) == 1:
            signal.raise_signal(number)

    once = signal_proof(work)
    with pytest.raises(error):
        once()
    assert done == [1, 1]


def test_signal_proof_work_raises_what_the_handler_has_raised_once(arriving):
    number, _ = arriving
    raised = ValueError("first call")

    def handler(*_):
        nonlocal raised
        error, raised = raised, ValueError("second call")
        raise error

    signal.signal(number, handler)
    work = iter([partial(signal.raise_signal, number), int])
    once = signal_proof(lambda: next(work)())
    with pytest.raises(ValueError, match="first call"):
        once()
    assert signal.getsignal(number) is handler


def test_a_resent_signal_comes_a_moment_later(arriving):
    number, error = arriving
    with pytest.raises(error):  # noqa: PT012
        with resend_ctrl_c():
            signal.raise_signal(number)
        time.sleep(10)
