"""Ctrl-C and SIGTERM while experiments run: heard once, and not lost where Python drops what they raise."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class StopSignals:
    """Notes the signal that is to end a diagnosis, besides raising KeyboardInterrupt where it comes.

    A KeyboardInterrupt that comes up in a ``__del__`` or in the callback of a weak reference is dropped by Python
    ("Exception ignored in"), and torch's loaders and ``logging`` have both. So :meth:`look` asks again.

    Handlers are set by :meth:`listen`, and are to be put back by the caller, who knows what was there.

    Attributes:
        number: of the first signal that came; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._pid = os.getpid()
        self._heard: list[int] = []

    def listen(self) -> None:
        """Hear Ctrl-C, and SIGTERM where it would end the process. In other threads than the main one: nothing.

        Where Ctrl-C is ignored, it still is. A handler of the user's own is called first, and decides for Ctrl-C
        whether it interrupts; for SIGTERM only Lightning's comes before it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        before: Any = signal.getsignal(signal.SIGINT)
        if callable(before):  # neither ignored nor set by C code
            signal.signal(signal.SIGINT, self._on_ctrl_c(before))
            self._heard.append(signal.SIGINT)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            self._heard.append(signal.SIGTERM)

    def hold_back(self) -> None:
        """From now on a signal is noted and raises nothing: what runs now must come to its end."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in self._heard:
            signal.signal(number, self._only_note)

    def note(self, number: int) -> None:
        """A signal has come. Only the first counts."""
        if self.number is None:
            self.number = number

    def look(self) -> None:
        """End here if a signal has come.

        Raises:
            KeyboardInterrupt: when one has.
        """
        if self.number is not None:
            raise KeyboardInterrupt

    def _on_ctrl_c(self, before: Handler) -> Handler:
        def on_ctrl_c(number: int, frame: FrameType | None) -> None:
            try:
                before(number, frame)
            except KeyboardInterrupt:
                self.note(number)
                raise

        return on_ctrl_c

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a worker that was forked just now, and that its loader ends
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.note(number)
        raise KeyboardInterrupt

    def _only_note(self, number: int, frame: FrameType | None) -> None:
        self.note(number)
