"""Finds the lines at which the host waits for the device, in a few steps of a run.

In these steps torch warns of each operation that synchronises (``torch.cuda.set_sync_debug_mode``). A filter of our own
takes these warnings in, so that nobody sees them, and notes the line that was running. Torch does not warn of
``torch.cuda.synchronize``, which is therefore wrapped during these steps; and not of events, of ``torch.distributed``
and of other libraries, whose waits are not found.
"""

import linecache
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple, SupportsIndex

import torch

from lightning_feed.measure.loader_code import is_torchs, is_users
from lightning_feed.measure.measurements import DeviceWait

logger = logging.getLogger(__name__)

SAMPLED_STEPS = 16
"""Largest number of sampled steps in a loop."""
_SYNCHRONISES = "called a synchronizing CUDA operation"
_ANNOUNCES = "Synchronization debug mode is a prototype"
"""Beginnings of torch's warnings: at an operation that synchronises, and at the first change of the mode
(c10/cuda/CUDAFunctions.cpp and torch/csrc/cuda/Module.cpp, torch 2.6 to 2.14)."""
_OFF, _WARN = 0, 1
"""Modes of ``torch.cuda.set_sync_debug_mode``."""
_LONGEST_CODE = 60
"""Characters of a source line that reports show."""


class _Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int
    is_users: bool


class WaitFinder:
    """Notes where the training thread waits for the device in the sampled steps.

    Between the samples nothing differs from a run without this class. A sample changes nothing if the user has set a
    synchronisation debug mode. Other threads' waits are not noted.

    ``warnings.filters`` is replaced without ``warnings.filterwarnings``, because that function makes Python show all
    warnings again that it has shown once.

    Args:
        device_type: type of the device that computes. Waits are found on devices whose module has
            ``set_sync_debug_mode``, as CUDA's has.
        in_users_loop: True if the user's own code runs the loop; False if a Trainer, called by the user's code, does.
    """

    def __init__(self, device_type: str, *, in_users_loop: bool = False) -> None:
        self._backend: Any = torch.get_device_module(device_type)
        self._in_users_loop = in_users_loop
        self._steps = 0
        """Number of finished samples."""
        self._seen: Counter[_Place] = Counter()
        """Number of samples in which the host waited at each place."""
        self._fresh: set[_Place] = set()
        """Places of the current sample."""
        self._callers: set[int] = set()
        """Identities of the frames of the user that are around the loop."""
        self._undo: Callable[[], None] | None = None

    @property
    def wants_more(self) -> bool:
        """True if another step should be sampled."""
        if self._steps >= SAMPLED_STEPS or not hasattr(self._backend, "set_sync_debug_mode"):
            return False
        return bool(self._backend.is_initialized())

    def begin(self) -> None:
        """Begin a sample. It lasts until :meth:`end` or :meth:`drop`."""
        if self._backend.get_sync_debug_mode() != _OFF:
            return
        self._fresh.clear()
        if not self._in_users_loop:
            self._callers = {id(frame) for frame in _frames(sys._getframe()) if is_users(frame.f_code.co_filename)}
        self._undo = _watch(self._backend, self._note)

    def check(self) -> None:
        """Drop the sample if its filter is gone, because a context of the user, within which it began, has ended."""
        if self._undo is not None and not _is_in_place():
            self.drop()

    def end(self) -> None:
        """Stop watching the step, and count it. Does nothing if no step is watched."""
        if self._undo is not None:
            self.drop()
            self._steps += 1
            self._seen.update(self._fresh)

    def drop(self) -> None:
        """End the sample without counting it. Does nothing without a sample."""
        undo = self._undo
        self._undo = None
        if undo is not None:
            undo()

    def _note(self, frame: FrameType) -> None:
        place = self._place_of(frame)
        if place is not None:
            self._fresh.add(place)

    def _place_of(self, frame: FrameType) -> _Place | None:
        """Return the innermost line of the user within the loop; else the innermost line outside torch."""
        library: _Place | None = None
        for each in _frames(frame):
            file = each.f_code.co_filename
            if id(each) in self._callers:
                break
            if is_users(file):
                return _Place(file, each.f_lineno, is_users=True)
            if library is None and not is_torchs(file):
                library = _Place(file, each.f_lineno, is_users=False)
        return library

    def waits(self) -> tuple[DeviceWait, ...] | None:
        """Return the lines at which the host waited, those of most samples first; None without a sample."""
        if not self._steps:
            return None
        return tuple(
            DeviceWait(
                file=place.file,
                line=place.line,
                code=linecache.getline(place.file, place.line).strip()[:_LONGEST_CODE],
                is_users=place.is_users,
                steps=steps,
                sampled_steps=self._steps,
            )
            for place, steps in self._seen.most_common()
        )


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and its callers, the innermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _watch(backend: Any, note: Callable[[FrameType], None]) -> Callable[[], None]:
    """Call ``note`` with the frame of this thread's Python code whenever it waits for the device.

    Returns:
        A function that puts everything back.
    """
    pattern = _Pattern(threading.get_ident(), note)
    usual: list[Any] = warnings.filters  # type: ignore[assignment]  # a tuple to some type checkers, a list in Python
    filters = _Filters(usual)
    filters.put_first(("ignore", pattern, Warning, None, 0))
    warnings.filters = filters
    synchronize = backend.synchronize

    def noting(*args: Any, **named: Any) -> Any:
        pattern.note(sys._getframe(1))
        return synchronize(*args, **named)

    backend.set_sync_debug_mode(_WARN)
    backend.synchronize = noting

    def undo() -> None:
        if backend.synchronize is noting:
            backend.synchronize = synchronize
        in_place = warnings.filters
        if backend.get_sync_debug_mode() == _WARN:  # else the user has changed it meanwhile
            warnings.filters = filters
            backend.set_sync_debug_mode(_OFF)
            warnings.filters = in_place
        pattern.is_over = True
        for each in (filters, in_place):  # two, within a `catch_warnings` of the user, which puts ours back
            if isinstance(each, _Filters):
                each.take_out()
        usual[:] = filters  # with what the user has added meanwhile
        if in_place is filters:
            warnings.filters = usual

    return undo


def _is_in_place() -> bool:
    filters = warnings.filters
    return isinstance(filters, _Filters) and filters.has_ours


class _Filters(list[Any]):
    """Warning filters of which ours stays the first, also in the copy that ``warnings.catch_warnings`` makes.

    Otherwise a filter of the user for all warnings, such as ``simplefilter("error")`` within a step, would meet those
    of torch.
    """

    def put_first(self, entry: Any) -> None:
        """Insert our entry."""
        super().insert(0, entry)

    @property
    def has_ours(self) -> bool:
        """True as long as our entry is the first."""
        return bool(self) and isinstance(self[0][1], _Pattern)

    def take_out(self) -> None:
        """Take our entry out, after which this is a list as any other."""
        if self.has_ours:
            del self[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        ours = self[0] if self.has_ours else None
        super().__setitem__(key, value)  # by which `warnings.resetwarnings` removes all filters
        if ours is not None and not self.has_ours:
            self.put_first(ours)

    def insert(self, index: SupportsIndex, entry: Any) -> None:
        """Insert an entry as functions of ``warnings`` do, but behind ours."""
        super().insert(int(index) + self.has_ours, entry)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return _Filters(found) if isinstance(key, slice) else found


class _Pattern:
    """Stands for the pattern of a warning filter: Python asks it about the text of each warning, where it is raised."""

    def __init__(self, thread: int, note: Callable[[FrameType], None]) -> None:
        self._thread = thread
        self._note = note
        self.is_over = False
        """True once the sample has ended. A context of the user may hold the filter for longer."""

    def match(self, text: str) -> bool:
        """Return True for torch's warnings of this mode, which nobody then sees."""
        if self.is_over:
            return False
        if text.startswith(_SYNCHRONISES):
            self.note(sys._getframe(1))
            return True
        return text.startswith(_ANNOUNCES)

    def note(self, frame: FrameType) -> None:
        """Note a wait of the thread. Nothing is raised: this runs within the user's operation."""
        if threading.get_ident() != self._thread:
            return
        try:
            self._note(frame)
        except Exception as error:  # noqa: BLE001  # what cannot be noted is not known, and training goes on
            logger.debug("A wait for the device was not noted: %r", error)
