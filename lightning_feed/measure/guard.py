"""A guard around code that only observes a run: its failures are logged once, and training goes on."""

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from lightning_feed.errors import SettingsError
from lightning_feed.wording import printable_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")


class Guard:
    """Catches each ``Exception`` of code that only observes a run. KeyboardInterrupt and SystemExit pass.

    A failure is logged once, as a warning, and its task is not tried again with this guard; the traceback is logged at
    DEBUG. If several parts meet the same error, only the first is logged. Never call user code inside a guard: its
    failures would be taken for ours, and be lost.

    Args:
        owner: name of the callback, for the log.
        stop: called once when measuring fails: removes all changes to the Trainer.
    """

    def __init__(self, owner: str, stop: Callable[[], object]) -> None:
        self._owner = owner
        self._stop = stop
        self._failed: set[str] = set()
        self._logged: set[str] = set()
        self.measures = True
        self._quiet = False

    def measure(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``call``. If it fails, end all measuring, and return None from then on."""
        if not self.measures:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # here only: nothing in this package may end the user's run
            self.measuring_failed(error)
            return None

    def tap(self, call: Callable[[], object]) -> Callable[[], None]:
        """Wrap ``call`` as :meth:`measure` does, for code that runs several times in each step."""

        def tapped() -> None:
            try:
                call()
            except Exception as error:  # noqa: BLE001  # as above
                self.measuring_failed(error)

        return tapped

    def attempt(self, task: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return the result of ``call``, or None if it fails or ``task`` has failed before. Measuring continues.

        Args:
            task: the task in words that can follow "could not": ``"print its report"``.
            call: the function that does the task.
        """
        if task in self._failed:
            return None
        try:
            return call(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # as above
            self._failed.add(task)
            self._log(f"could not {task}", error, "Training goes on without it.")
            return None

    def measuring_failed(self, error: Exception) -> None:
        """Log the failure, and end all measuring."""
        if self.measures:
            self.measures = False
            self._log("stopped measuring", error, "Training goes on; log at level DEBUG to see where it failed.")
            self._quiet = True  # if removing the hooks fails, too, the reason is the one that was just logged
            self.attempt("remove its hooks from the Trainer", self._stop)
            self._quiet = False

    def _log(self, what: str, error: Exception, then: str) -> None:
        reason = traceback.format_exception_only(error)[-1].strip()
        if not self._quiet and reason not in self._logged:
            self._logged.add(reason)
            say(logger, logging.WARNING, printable_lines(f"{self._owner} {what} ({reason}). {then}"))
        with contextlib.suppress(Exception):  # as in `say`, a logging handler may raise
            logger.debug("%s %s:", self._owner, what, exc_info=error)


class _Guarded(Protocol):
    _guard: Guard


Owner = TypeVar("Owner", bound=_Guarded)


def guarded(hook: Callable[Concatenate[Owner, P], None]) -> Callable[Concatenate[Owner, P], None]:
    """Wrap a callback's hook to do what :meth:`Guard.measure` does, but at less cost: several hooks run per step."""

    @functools.wraps(hook)
    def run(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
        guard = self._guard
        if guard.measures:
            try:
                hook(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  # as above
                guard.measuring_failed(error)

    return run


def check_instance(callback: object, kind: type) -> None:
    """Refuse a callback's class that was passed in place of an object: its hooks would get the Trainer as ``self``.

    Raises:
        SettingsError: if ``callback`` is a class; the message says what to write instead.
    """
    if not isinstance(callback, kind):
        raise SettingsError(f"callbacks=[{kind.__name__}] holds the class. Write callbacks=[{kind.__name__}()].")


def say(to: logging.Logger, level: int, what: str) -> None:
    """Log a line and ignore any failure.

    A user's logging handler may raise, and Python's own do once ``stderr`` is closed.
    """
    with contextlib.suppress(Exception):  # there is no other place to report it
        to.log(level, "%s", what)


class Once:
    """Logs each line once, and on one rank only.

    Args:
        to: the logger to use.
    """

    def __init__(self, to: logging.Logger) -> None:
        self._to = to
        self._logged: set[str] = set()

    def say(self, trainer: Any, level: int, what: str, *, of: str = "") -> None:
        """Log a line, unless the same line, or another line with the same ``of``, was logged before."""
        key = of or what
        if key not in self._logged and trainer.is_global_zero:
            say(self._to, level, what)
        self._logged.add(key)


def call_plainly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function: a stand-in for :meth:`Guard.measure` without a guard."""
    return call(*args, **kwargs)
