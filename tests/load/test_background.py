"""The background thread: nothing lost, nothing doubled, nothing left behind, and every error heard."""

import gc
import logging
import multiprocessing
import threading
import traceback
import weakref
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from prefetch_generator import BackgroundGenerator

from lightning_feed.errors import LoaderError
from lightning_feed.load.ahead import BackgroundIterator


class Source:
    """Counts up, notes what was drawn, and can fail at one item."""

    def __init__(self, size: int, *, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.size, self.fails_at, self.error = size, fails_at, error
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.drawn == self.fails_at:
            assert self.error is not None
            raise self.error
        if self.drawn == self.size:
            raise StopIteration
        self.drawn += 1
        return self.drawn - 1


class Gate:
    """Gives an item each time that it is opened. For what no test may leave to chance."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Semaphore(0), threading.Event()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.asked.set()
        self.open.acquire()
        return 0


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, BackgroundGenerator)]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threads():
        thread.join(5)
    assert threads() == []
    for worker in multiprocessing.active_children():
        worker.join(5)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("size", "depth"), [(0, 1), (1, 2), (17, 1), (17, 50)])
def test_background_iterator_yields_every_item_once_and_in_order(size: int, depth: int) -> None:
    ahead = BackgroundIterator(Source(size), depth)
    assert list(ahead) == list(range(size))
    assert threads() == []
    assert list(ahead) == []  # still at its end


def test_background_thread_prefetches_no_further_than_its_depth() -> None:
    gate = Gate()
    with closing(BackgroundIterator(gate, depth=2)) as ahead:
        for _ in range(3):
            assert gate.asked.wait(5)
            gate.asked.clear()
            gate.open.release()
        # The third item is drawn beside those that are kept ready: the source is not asked for a fourth.
        assert not gate.asked.wait(0.05)
        assert ahead.ready == 2
        gate.open.release()
        assert [next(ahead), next(ahead), next(ahead), next(ahead)] == [0, 0, 0, 0]
        gate.open.release()


def test_a_break_ends_the_thread_and_releases_the_source() -> None:
    source = Source(1000)
    released = weakref.ref(source)
    ahead = BackgroundIterator(source, 2)
    del source
    for item in ahead:
        if item == 3:
            break
    assert threads() != []
    del ahead
    assert threads() == []
    assert released() is None


def test_close_takes_effect_at_once_and_can_be_repeated() -> None:
    source = Source(1000)
    ahead = BackgroundIterator(source, 3)
    assert next(ahead) == 0
    ahead.close()
    ahead.close()
    assert threads() == []
    drawn = source.drawn
    assert drawn <= 1 + 3 + 2
    with pytest.raises(LoaderError, match="closed before its end"):
        next(ahead)
    assert source.drawn == drawn


@pytest.mark.parametrize("collected_in", ["another thread", "its own thread"])
def test_background_thread_ends_when_garbage_collected_in_any_thread(collected_in: str) -> None:
    box: list[Any] = []
    may_drop, dropped = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        yield 0
        if collected_in == "its own thread":
            may_drop.wait(5)
            box.clear()  # the last reference goes here, in the thread that close() would wait for
            dropped.set()
        yield from range(1, 1000)

    box.append(BackgroundIterator(source(), 1))
    assert next(box[0]) == 0
    may_drop.set()
    if collected_in == "its own thread":
        assert dropped.wait(5)
    else:
        other = threading.Thread(target=box.clear)
        other.start()
        other.join(5)
    for thread in threads():
        thread.join(5)
    assert threads() == []


@pytest.mark.parametrize(
    ("error", "at"),
    [(ValueError("bad"), 0), (KeyboardInterrupt(), 4), (SystemExit(3), 4), (GeneratorExit(), 4)],
    ids=repr,
)
def test_source_error_is_raised_after_the_items_before_it(error: BaseException, at: int) -> None:
    ahead = BackgroundIterator(Source(9, fails_at=at, error=error), 2)
    seen: list[int] = []
    with pytest.raises(type(error)) as raised:
        seen.extend(ahead)
    assert seen == list(range(at))
    assert raised.value is error
    assert "raise self.error" in "".join(traceback.format_exception(error))  # the line in the source
    assert threads() == []
    with pytest.raises(LoaderError):  # not the end of an epoch
        next(ahead)


def test_stop_iteration_keeps_no_reference_to_the_source() -> None:
    """Torch's iterator, in a cycle with it, lost its pipes to garbage collection before its threads closed them."""
    ahead = BackgroundIterator(Source(2), 1)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(StopIteration) as end:
        next(ahead)
    held = [value for frame, _ in traceback.walk_tb(end.value.__traceback__) for value in frame.f_locals.values()]
    assert not any(isinstance(value, Source) for value in held)


def test_background_iterator_keeps_no_reference_to_a_consumed_batch() -> None:
    class Big:
        pass

    def source() -> Iterator[Big]:
        yield Big()
        gate.wait(5)

    gate = threading.Event()
    with closing(BackgroundIterator(source(), 1)) as ahead:
        taken = weakref.ref(next(ahead))
        assert taken() is None
        gate.set()


def test_dead_background_thread_raises_instead_of_ending_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundGenerator, "run", lambda self: None)
    ahead = BackgroundIterator(Source(5), 1)
    with pytest.raises(LoaderError, match=r"The epoch is incomplete: batches are missing"):
        next(ahead)


def test_close_abandons_a_stuck_source_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    ahead = BackgroundIterator(gate, 1)
    assert gate.asked.wait(5)
    with caplog.at_level(logging.WARNING, "lightning_feed"):
        ahead.close(0.01)
    assert ["timeout" in record.message for record in caplog.records] == [True]
    gate.open.release()  # the batch comes at last, and the thread ends


def test_keyboard_interrupt_while_waiting_ends_the_background_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = BackgroundIterator(Source(100), 1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    assert threads() == []


def test_close_in_a_forked_child_leaves_the_parents_thread_running() -> None:
    ahead = BackgroundIterator(Source(100), 1)
    next(ahead)
    child = multiprocessing.get_context("fork").Process(target=ahead.close)
    child.start()
    child.join(10)
    assert child.exitcode == 0
    assert next(ahead) == 1
    ahead.close()


def test_background_thread_uses_the_consumers_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: asked.append((device, type(threading.current_thread()).__name__))
    )
    assert list(BackgroundIterator(Source(2), 1)) == [0, 1]
    assert set(asked) == {(3, "BackgroundGenerator")}
