"""Staging in the background, while training reads from the source.

A process of its own copies, not a thread: for many small files a copying thread takes the interpreter's lock from the
training loop. It is a fresh interpreter, since forking a process that has threads is unsafe; it has low priority and
ends with its parent. Killing it at any time leaves whole files only.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from multiprocessing.util import Finalize
from pathlib import Path

from lightning_feed.archive.remote import is_url
from lightning_feed.archive.stage_path import StagedPath, StagePlace, claimed, hold, now_s, shown
from lightning_feed.archive.staging import StageWork, find_place, leave
from lightning_feed.errors import ArchiveError, FeedError

logger = logging.getLogger(__name__)

# What this package needs is imported from where it was found here, and never from the working folder ("").
_CHILD = (
    "import json, sys; request = json.loads(sys.argv[1]); sys.path[:] = request.pop('sys_path'); "
    "from lightning_feed.archive.stage_background import copy_in_child; copy_in_child(**request)"
)


class BackgroundStage:
    """A copy that is being made. Made by :func:`stage_in_background`.

    Attributes:
        path: leads to the source until the copy is complete.
        error: why there is no copy; None while it is being made and when it is complete.
    """

    def __init__(self, place: StagePlace, origin: str, *, hash: bool, remove_at_exit: bool) -> None:
        self.path = StagedPath(origin, place.target, since_s=now_s())
        self.error: ArchiveError | None = None
        self._place, self._origin, self._stopped = place, origin, False
        request = {
            "sys_path": [*filter(None, sys.path), str(Path(__file__).parents[2])],
            "parent": os.getpid(),
            "origin": origin,
            "target": str(place.target),
            "hash": hash,
            "remove_at_exit": remove_at_exit,
        }
        # A session of its own: Ctrl-C goes to the training, which stops the copy when it ends.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="backslashreplace",
        )
        # Below zero: after multiprocessing has ended its daemonic children, the workers that still read.
        Finalize(self, BackgroundStage._at_exit, args=(self,), exitpriority=-9)
        self._thread = threading.Thread(target=self._watch, name="lightning-feed-stage", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end.

        Args:
            timeout_s: None waits as long as it takes.

        Returns:
            True when the copy is complete; False when it failed (see :attr:`error`), was stopped, or goes on.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.error is None and not self._stopped

    def stop(self) -> None:
        """End the copying now, and wait for that. What is copied is kept, for the next time."""
        self._stopped = True
        self._child.kill()
        self._thread.join()

    def _watch(self) -> None:
        output, errors = self._child.communicate()
        if self._stopped:
            return
        try:
            answer = json.loads(output.splitlines()[-1])
        except (IndexError, ValueError):
            last = (errors.strip() or "no output").splitlines()[-1]
            answer = {"error": f"the process that copies ended with code {self._child.returncode}: {last}"}
        for caveat in answer.get("caveats", ()):
            logger.warning("%s", caveat)
        try:
            if "error" in answer:
                raise ArchiveError(answer["error"])
            self._hold()
        except ArchiveError as error:
            self.error = error
            logger.warning("Training goes on from %s, which was not staged: %s", shown(self._origin), error)

    def _hold(self) -> None:
        with claimed(self._place):
            record = self._place.read()
            if record is None or record.source != self._origin:
                raise ArchiveError(f"{shown(self._place.target)} was removed by another process.")
            hold(self._place, at_exit=leave)

    def _at_exit(self) -> None:
        self.stop()
        leave(self._place)


def stage_in_background(
    source: str | os.PathLike[str], dest: str | os.PathLike[str], *, hash: bool = False, remove_at_exit: bool = False
) -> BackgroundStage:
    """Begin to copy, as :func:`~lightning_feed.archive.staging.stage` does, and return at once.

    A copy that fails is said once, as a warning; training goes on from the source. When this process ends first, the
    copying stops, and is completed next time.

    Raises:
        ArchiveError: when one of the two lies in the other, or ``dest`` cannot be made.

    Example:
        >>> copy = stage_in_background("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> copy.path.current()  # doctest: +SKIP
        PosixPath('/data/birds')
    """
    place, origin = find_place(source, dest)
    if is_url(origin):
        raise ArchiveError(
            f"{origin} is a URL, which training cannot read from as from a folder until the copy is there. Call stage, "
            "which waits, or give a data module stage_limit, with which it begins at once."
        )
    return BackgroundStage(place, origin, hash=hash, remove_at_exit=remove_at_exit)


def copy_in_child(*, parent: int, origin: str, target: str, hash: bool, remove_at_exit: bool) -> None:
    """Copy in the process made for it. Its last line of output says how it went, as JSON."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(10)
    place, answer = StagePlace(target), dict[str, object]()
    work = StageWork(place=place, origin=origin, hash=hash, remove_at_exit=remove_at_exit, in_background=True)
    try:
        done = work.run()
        answer = {"caveats": done.caveats if done.copied_files else ()}
    except FeedError as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: it is killed at once when that is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
