"""Fetches remote files in an epoch's order before they are needed, in a separate process.

A process, not a thread: an object store library takes a millisecond of Python per object, which would slow the training
loop. The training process draws indices from the sampler early, until their files add up to the bytes to read ahead,
and sends the numbers of these files to the fetching process. That process puts the files into the cache, where workers
find them.
"""

import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.util import Finalize
from pathlib import Path
from pickle import PicklingError
from queue import SimpleQueue
from typing import IO, Any

import numpy as np

from lightning_feed.storage.remote import REQUESTS
from lightning_feed.storage.remote_folder import RemoteSource
from lightning_feed.storage.system import end_with

logger = logging.getLogger(__name__)

_CHILD = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from lightning_feed.storage.read_ahead import fetch_in_child; fetch_in_child()"
)
_IN_FLIGHT_BYTES = 256 << 20
_GIVE_UP = 20
"""Consecutive failures after which the process gives up: so many cannot be the fault of single files."""


class ReadAhead:
    """Fetches the next files of an order into a source's cache.

    Args:
        source: must have a cache.
        picked: index arrays to apply one after the other, from an index in the order to a file number in ``source``:
            one for each ``Subset`` or split share between them.
        limit_bytes: bytes to fetch ahead of their use.
    """

    def __init__(self, source: RemoteSource, picked: Sequence[Any], limit_bytes: int) -> None:
        cache = source.place.cache
        assert cache is not None
        self._source = source
        self._picked = picked
        # New files must not push out files that were fetched just before.
        self._limit_bytes = max(1, min(limit_bytes, cache.limit_bytes // 4))
        self._child: tuple[int, subprocess.Popen[bytes]] | None = None
        self._ended = False

    def through(self, order: Iterable[object], then: Callable[[], Iterable[object]] = tuple) -> Iterator[Any]:
        """Yield the entries of ``order``, and fetch the files of the next entries in advance.

        Near the end, also fetch the first files of the next order, which ``then`` returns.
        """
        waiting = deque[tuple[object, int]]()
        ahead_bytes = 0
        entries: Iterator[object] | None = iter(order)
        own = True
        self._ended = False
        while True:
            sent = list[int]()
            while ahead_bytes < self._limit_bytes and entries is not None:
                entry = next(entries, self)
                if entry is self:
                    entries = iter(then()) if own else None
                    own = False
                    continue
                numbers = [self._number_of(index) for index in _indices_in(entry)]
                size = sum(max(1, int(self._source.sizes[number])) for number in numbers)
                if own:
                    waiting.append((entry, size))
                ahead_bytes += size
                sent += numbers
            self._send(sent)
            if not waiting:
                return
            entry, size = waiting.popleft()
            ahead_bytes -= size
            yield entry

    def _number_of(self, index: int) -> int:
        for indices in self._picked:
            index = int(indices[index])
        return index

    def _send(self, numbers: list[int]) -> None:
        if not numbers or self._ended:
            return
        try:
            pipe = self._pipe()
            pipe.write(np.array(numbers, np.int64).tobytes())
            pipe.flush()
        except (OSError, PicklingError, TypeError, AttributeError) as error:  # the child ended, or pickling failed
            self._child = None
            self._ended = True
            logger.warning(
                "Nothing is read ahead of %s until the next epoch (%s: %s): each sample is read when it is needed, "
                "which is slower. If the data cannot be read at all, the next sample's error says why.",
                self._source.place,
                type(error).__name__,
                error,
            )

    def _pipe(self) -> IO[bytes]:
        """Return the pipe to this process's child, starting the child if there is none."""
        if self._child is None or self._child[0] != os.getpid():
            self._child = (os.getpid(), self._start())
        pipe = self._child[1].stdin
        assert pipe is not None
        return pipe

    def _start(self) -> "subprocess.Popen[bytes]":
        package = str(Path(__file__).parents[2])
        given = pickle.dumps([*filter(None, sys.path), package]) + pickle.dumps((os.getpid(), self._source))
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C goes only to the training, which ends the child
        )
        Finalize(self, _end, args=(child,), exitpriority=-9)
        assert child.stdin is not None
        child.stdin.write(given)
        return child

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_child": None}


def _end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


def _indices_in(entry: object) -> list[int]:
    """Return the indices of a batch, or of one sample; empty for any other entry."""
    indices = entry if isinstance(entry, (list, tuple)) else [entry]
    return [int(index) for index in indices if isinstance(index, (int, np.integer))]


def fetch_in_child() -> None:
    """Fetch the samples whose numbers the parent sends, until the parent exits or too many fetches fail in a row."""
    given = sys.stdin.buffer
    parent, source = pickle.load(given)  # only from the parent
    os.nice(5)
    numbers: SimpleQueue[int | None] = SimpleQueue()
    end_with(parent)
    threading.Thread(target=_take_in, args=(given, numbers), daemon=True).start()
    running = set[Future[bytes]]()
    failures = 0
    while (number := numbers.get()) is not None and failures < _GIVE_UP:
        future = source.begin_ahead(number)
        if future is not None:
            running.add(future)
        most = max(1, min(REQUESTS, _IN_FLIGHT_BYTES // max(1, int(source.sizes[number]))))
        while len(running) >= most:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for one in ended:
                failures = failures + 1 if one.exception() is not None else 0
    wait(running)
    os._exit(0)  # fsspec's loop is a daemon thread, so there is no need to wait for it


def _take_in(given: Any, numbers: "SimpleQueue[int | None]") -> None:
    """Empty the pipe at once: the training process must never wait for room in the pipe."""
    left = b""
    while chunk := given.read1(1 << 16):
        left += chunk
        whole = len(left) // 8 * 8
        for number in np.frombuffer(left[:whole], np.int64).tolist():
            numbers.put(number)
        left = left[whole:]
    numbers.put(None)
