"""What the user's run is kept safe from: failures told in a line, Ctrl-C and SIGTERM, a module that stays changed."""

import copy
import itertools
import os
import re
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from lightning_feed.diagnosing.session import parts_of
from lightning_feed.errors import DatasetError, FeedError, LoaderError, ReportError
from lightning_feed.measure.user_code import is_users
from lightning_feed.trials.cloning import locate_failure
from lightning_feed.verdict.diagnosis import Diagnosis

_OF_A_WORKER = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_LOADING = ("torch.utils.data.dataloader", "lightning_feed.load.")


class _EndedEarly(BaseException):
    """Of errors that have what was measured before."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on what was measured."""
        self.written = written
        """Its files."""


class DiagnosisInterrupted(_EndedEarly, KeyboardInterrupt):
    """Ctrl-C or SIGTERM while experiments ran. What had been measured by then is here."""

    signal_number: int = signal.SIGINT
    """``signal.SIGINT`` or ``signal.SIGTERM``."""
    not_written = ""
    """Why there are no files, though some were asked for."""


class DiagnosisFailed(_EndedEarly, FeedError):
    """The user's code failed after something had been measured."""


class DiagnosisNotWritten(_EndedEarly, ReportError):
    """All was measured, and the files could not be written."""


class ProgramEnded(FeedError):
    """The user's program ended before it called ``Trainer.fit``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """The exit code for the command: the program's own, and 1 where that says that all is well."""


# --- errors of the user's code ------------------------------------------------------------------------------------


@contextmanager
def told(doing: str) -> Iterator[None]:
    """A context whose errors of the user's code are raised as a FeedError with ``doing``, in a line."""
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        raise FeedError(
            f"{doing}: {_closed(in_a_line(error))} Call trainer.fit() or the data module yourself to see the whole "
            "traceback."
        ) from error


def in_a_line(error: BaseException) -> str:
    """Class and message of an error, and where in the user's code it was raised."""
    place = _place(error)
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    # A worker's error comes with its traceback, whose last line says what it was.
    said = lines[-1] if len(lines) > 1 and "Caught" in lines[0] else lines[0] if lines else ""
    kind = type(error).__name__
    said = said.removeprefix(f"{kind}: ")
    return (f"{kind}: {said}" if said else kind) + (f" ({place})" if place else "")


def loading_failed(doing: str, error: Exception, model: Any, loaders: Any, *, first_pass: bool) -> FeedError | None:
    """The error to raise for one that a training loader raised: with worker, sample and place as far as known.

    Args:
        doing: what was being done.
        error: what was raised.
        model: the user's. What its methods load for themselves is not from a training loader.
        loaders: of the training, as they were before the pass, and the global random generators too.
        first_pass: whether it was the first pass through them. A later one draws another order.

    Returns:
        None where it was raised elsewhere.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    before = itertools.takewhile(lambda frame: frame.f_locals.get("self") is not model, frames)
    loading = [frame for frame in before if str(frame.f_globals.get("__name__")).startswith(_LOADING)]
    if not loading:
        return None
    place = _place(error)
    at = f" Raised in {place}." if place else ""
    try:
        parts = parts_of(loaders)
    except LoaderError:  # no DataLoader: what it loads is not known
        return FeedError(f"{doing}: {_closed(in_a_line(error))}")
    # Of torch's iterator: batches that it gave before. Read in torch 2.6 and 2.15.
    came = [getattr(frame.f_locals.get("self"), "_num_yielded", None) for frame in loading] if first_pass else []
    known = next((given for given in came if isinstance(given, int)), None)
    what = error if isinstance(error, DatasetError) else locate_failure(parts, error, known)
    return DatasetError(f"{doing}. {what}{at}")


def _place(error: BaseException) -> str:
    """File and line of the user's code that raised it: ``train.py:12``. Empty: none of theirs is in the traceback."""
    frames = [(one.filename, one.lineno) for one in traceback.extract_tb(error.__traceback__)]
    # What happened in a worker is in the message.
    frames += [(name, int(line)) for name, line in _OF_A_WORKER.findall(str(error))]
    theirs = [(name, line) for name, line in frames if is_users(name)]
    return f"{Path(theirs[-1][0]).name}:{theirs[-1][1]}" if theirs else ""


def _closed(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


# --- signals ------------------------------------------------------------------------------------------------------


class StopSignals:
    """A context in which Ctrl-C and SIGTERM are noted, besides raising KeyboardInterrupt where they come.

    A KeyboardInterrupt that comes up in a ``__del__`` or in the callback of a weak reference is dropped by Python
    ("Exception ignored in"), and torch's loaders and ``logging`` have both. So :meth:`look` asks again.

    SIGTERM is heard where it would end the process, Ctrl-C where it is not ignored; a handler of the user's own is
    called first, and decides whether it interrupts. In other threads than the main one nothing is heard.

    Attributes:
        number: of the first signal that came; None: none.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}
        self._held, self._pid = False, os.getpid()

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            ctrl_c, terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            if callable(ctrl_c):  # neither ignored nor set by C code
                self._before[signal.SIGINT] = ctrl_c
            if terminate is signal.SIG_DFL:
                self._before[signal.SIGTERM] = terminate
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def hold_back(self) -> None:
        """From now on a signal is noted and raises nothing: what runs now must come to its end."""
        self._held = True

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

    def _hear(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if os.getpid() != self._pid and before is signal.SIG_DFL:  # a worker that was forked just now
            signal.signal(number, before)
            os.kill(os.getpid(), number)
        elif self._held:
            self.note(number)
        else:
            try:
                (before if callable(before) else signal.default_int_handler)(number, frame)
            except KeyboardInterrupt:
                self.note(number)
                raise


# --- the state of a module ----------------------------------------------------------------------------------------


class ModelState:
    """The ``state_dict`` of a module, of the optimizers and schedulers that its attributes are, and of callbacks;
    ``train()``, ``eval()`` and ``requires_grad``. Tensors are kept in host memory.

    Args:
        model: the module; None: nothing of it is kept.
        callbacks: of the user's.
    """

    def __init__(self, model: nn.Module | None, callbacks: Sequence[Any] = ()) -> None:
        self._model = model
        modules = [] if model is None else list(model.modules())
        self._modes = [(one, one.training) for one in modules]
        parameters = [] if model is None else [one for one in model.parameters() if not is_lazy(one)]
        self._learning = [(one, one.requires_grad) for one in parameters]
        held = [value for one in modules for value in vars(one).values() if isinstance(value, (Optimizer, LRScheduler))]
        self._states = [(one, tree_map(_on_host, copy.deepcopy(one.state_dict()))) for one in [*held, *callbacks]]
        # That of the class: a module of the user's may leave parameters out of what it saves.
        values = {} if model is None else nn.Module.state_dict(model)
        self._values = {
            name: _on_host(value)
            for name, value in values.items()
            if not (is_lazy(value) or getattr(value, "is_meta", False))
        }

    def restore(self) -> None:
        """Put it back, and drop gradients. May be called more than once."""
        for module, mode in self._modes:
            module.training = mode
        for parameter, learns in self._learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
        if self._model is not None:
            nn.Module.load_state_dict(self._model, self._values, strict=False)
        for one, state in self._states:
            one.load_state_dict(copy.deepcopy(state))


def _on_host(value: Any) -> Any:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
