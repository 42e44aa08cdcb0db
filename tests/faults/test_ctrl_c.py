"""Ctrl-C that comes while garbage is collected, where Python drops it, is heard a moment later."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_feed.load import worker
from lightning_feed.load.ahead import BackgroundIterator
from lightning_feed.load.loader import FeedLoader


@pytest.fixture(autouse=True)
def interrupted_join(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Threads that are waited for send Ctrl-C first."""
    gc.collect()
    real, names = threading.Thread.join, []

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        if not names:
            names.append(self.name)
            os.kill(os.getpid(), signal.SIGINT)
        real(self, timeout)

    # What Python drops is printed by a hook, of which pytest makes a warning: that it was dropped here is no news.
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", join)
        patch.setattr("sys.unraisablehook", lambda _: None)
        yield names


def drop(held: list[Any]) -> None:
    """Let go of all, and wait for Ctrl-C."""
    held.clear()
    threading.Event().wait(5)


def test_ctrl_c_while_abandoned_worker_threads_end_is_raised(interrupted_join: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        drop([iter(FeedLoader(range(4), num_workers=1, workers="thread"))])
    assert interrupted_join == ["feed-0"]


def test_ctrl_c_while_an_abandoned_background_thread_ends_is_raised(interrupted_join: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        drop([BackgroundIterator(iter(range(100)), depth=1)])
    assert len(interrupted_join) == 1


def test_ctrl_c_while_a_background_thread_is_closed_is_raised_once(interrupted_join: list[str]) -> None:
    items = BackgroundIterator(iter(range(100)), depth=1)
    with pytest.raises(KeyboardInterrupt):
        items.close()  # nothing drops it here, so it comes once
    assert len(interrupted_join) == 1
    threading.Event().wait(2 * worker._RESEND_S)
