"""Stages while training reads from the source.

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

from lightning_feed.archive.stage_lock import claim
from lightning_feed.archive.stage_path import StagedPath
from lightning_feed.archive.stage_record import StagePlace, now_s
from lightning_feed.archive.stage_tree import shown
from lightning_feed.archive.stage_users import hold, is_copy_of, release, remove_if_last
from lightning_feed.archive.stage_work import StageOptions
from lightning_feed.archive.staging import bring_up_to_date, find_place
from lightning_feed.errors import ArchiveError, FeedError

logger = logging.getLogger(__name__)

# What this package needs is imported from where it was found here, and never from the working folder ("").
_CHILD = (
    "import json, sys; request = json.loads(sys.stdin.readline()); sys.path[:] = request['sys_path']; "
    "from lightning_feed.archive.stage_background import copy_in_child; copy_in_child(request)"
)


class BackgroundStage:
    """A copy that is being made. Made by :func:`stage_in_background`.

    Attributes:
        path: leads to the source until the copy is complete.
    """

    def __init__(self, place: StagePlace, origin: str, *, hash: bool, remove_at_exit: bool) -> None:
        self.path = StagedPath(origin, place.target, since_s=now_s())
        self._place, self._origin, self._remove_at_exit = place, origin, remove_at_exit
        self._error: ArchiveError | None = None
        self._stopped = False
        self._pid = os.getpid()
        # A session of its own: Ctrl-C goes to the training, which stops the copy when it ends.
        self._child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="backslashreplace",
        )
        self._request = json.dumps(
            {
                "sys_path": [*filter(None, sys.path), str(Path(__file__).parents[2])],
                "parent": self._pid,
                "origin": origin,
                "target": str(place.target),
                "hash": hash,
                "remove_at_exit": remove_at_exit,
            }
        )
        # Below zero: after multiprocessing has ended its daemonic children, the workers that still read.
        self._finalize = Finalize(self, BackgroundStage._at_exit, args=(self,), exitpriority=-9)
        self._thread = threading.Thread(target=self._watch, name="lightning-feed-stage", daemon=True)
        self._thread.start()

    @property
    def error(self) -> ArchiveError | None:
        """Why there is no copy; None while it is being made and when it is complete."""
        return self._error

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end.

        Args:
            timeout_s: None waits as long as it takes.

        Returns:
            True when the copy is complete; False when it failed (see :attr:`error`), was stopped, or goes on.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._error is None and not self._stopped

    def stop(self) -> None:
        """End the copying now, and wait for that. What is copied is kept, for the next time."""
        if os.getpid() == self._pid:
            self._stopped = True
            self._child.kill()
            self._thread.join()

    def _watch(self) -> None:
        output, errors = self._child.communicate(f"{self._request}\n")
        if self._stopped:
            return
        message = _message_of(output, errors, self._child.returncode)
        if message is None:
            try:
                self._hold()
            except ArchiveError as error:
                message = str(error)
        if message is not None:
            self._error = ArchiveError(message)
            logger.warning("Training goes on from %s, which was not staged: %s", shown(self._origin), message)

    def _hold(self) -> None:
        lock = claim(self._place)
        try:
            if not is_copy_of(self._place, self._origin):
                raise ArchiveError(f"{shown(self._place.target)} was removed by another process.")
            hold(self._place, self._origin, remove_at_exit=self._remove_at_exit)
        finally:
            lock.release()

    def _at_exit(self) -> None:
        self.stop()
        if self._remove_at_exit and os.getpid() == self._pid:
            release(self._place)
            remove_if_last(self._place, self._origin)


def stage_in_background(
    source: str | os.PathLike[str], dest: str | os.PathLike[str], *, hash: bool = False, remove_at_exit: bool = False
) -> BackgroundStage:
    """Begin to copy, as :func:`~lightning_feed.archive.staging.stage` does, and return at once.

    A copy that fails is said once, as a warning; training goes on from the source. When this process ends first, the
    copying stops, and is gone on with next time.

    Raises:
        ArchiveError: when one of the two lies in the other, or ``dest`` cannot be made.

    Example:
        >>> copy = stage_in_background("/data/birds", "/dev/shm/me")  # doctest: +SKIP
        >>> copy.path.current()  # doctest: +SKIP
        PosixPath('/data/birds')
    """
    place, origin = find_place(source, dest)
    return BackgroundStage(place, origin, hash=hash, remove_at_exit=remove_at_exit)


def copy_in_child(request: dict[str, object]) -> None:
    """What the copying process does. Its last line of output is empty, or the error as JSON."""
    threading.Thread(target=_end_with, args=(request["parent"],), daemon=True).start()
    os.nice(10)
    options = StageOptions(hash=bool(request["hash"]), remove_at_exit=bool(request["remove_at_exit"]))
    answer: dict[str, object] = {"done": True}
    try:
        place = StagePlace(Path(str(request["target"])))
        done = bring_up_to_date(place, str(request["origin"]), options, use=False, show=False)
        answer["caveats"] = done.caveats if done.copied_files else ()
    except FeedError as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _end_with(parent: object) -> None:
    """End this process when its parent has ended: it is killed at once when that is killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _message_of(output: str, errors: str, code: int) -> str | None:
    """Why the child failed; None when it did not."""
    lines = output.splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    for caveat in answer.get("caveats", ()):
        logger.warning("%s", caveat)
    if answer.get("done"):
        return None
    last = errors.strip().splitlines()
    return answer.get("error") or f"the process that copies ended with code {code}: {last[-1] if last else 'no output'}"
