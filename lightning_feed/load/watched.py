"""Work in a thread that must show that it goes on."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from lightning_feed.errors import LoaderError

T = TypeVar("T")

_LOOK_S = 0.2
_SOON_S = 1.0
"""How long work is waited for after it was told to stop."""
_GRACE_S = 7.0
"""And after what it waits for is gone. Torch's iterator looks every 5 s whether its workers live."""


class Beat:
    """The sign of life that work gives."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.stopped = False
        """Set when the work should end."""

    def beat(self) -> None:
        """Say that the work goes on."""
        self.last = time.monotonic()


def watched(
    work: Callable[[Beat], T], *, silent_s: float, unblock: Callable[[], bool], what: Callable[[float], str]
) -> T:
    """What ``work`` returns, or raises. Ctrl-C ends the work before it is raised here.

    The work runs in a daemon thread: a call that never returns cannot be ended from outside, only left behind.

    Args:
        work: calls ``beat()`` at least every ``silent_s``.
        silent_s: how long it may be silent.
        unblock: called to let the work past what it waits for; returns whether there was anything to do.
        what: the message for so many seconds of silence.

    Raises:
        LoaderError: the work was silent for longer.
    """
    beat = Beat()
    given: list[T] = []
    raised: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on device 0
            given.append(work(beat))
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
            raised.append(error)

    thread = threading.Thread(target=run, name="lightning-feed-measuring", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK_S)
            if thread.is_alive() and time.monotonic() - beat.last > silent_s:
                raise LoaderError(what(silent_s))
    except BaseException as ended:
        beat.stopped = True
        thread.join(_SOON_S)
        # What was silent for too long may hang for ever. What Ctrl-C met in the midst of a sample ends with that, and
        # must: it would draw random numbers after their state has been put back.
        if thread.is_alive() and (unblock() or isinstance(ended, KeyboardInterrupt)):
            thread.join(_GRACE_S)
        raise
    if raised:
        error = raised.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
    return given[0]
