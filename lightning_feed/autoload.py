"""Entry points that Lightning calls for every new Trainer: they add our callbacks if LIGHTNING_FEED is set."""

import os
from importlib import import_module
from typing import Any, NoReturn

from lightning_feed.errors import SettingsError

VARIABLE = "LIGHTNING_FEED"
PROGRAM = "LIGHTNING_FEED_PROGRAM"
"""Environment variable that holds process ID and name of the program while it is being diagnosed or tuned."""


def callbacks() -> list[Any]:
    """Return the callbacks to add to a ``lightning.pytorch.Trainer`` that is being built.

    Registered as an entry point in the group ``lightning.pytorch.callbacks_factory``, so this function also runs in
    programs that do not use this package. The function imports nothing unless ``LIGHTNING_FEED`` is set.

    Returns:
        ``[PrefetchCallback(), GPUStarvationCallback()]`` with ``LIGHTNING_FEED=1``, an ``AutotuneCallback()`` before
        them with ``LIGHTNING_FEED=tune``, else an empty list.

    With these callbacks, only Lightning's own loggers get figures and reports.

    Raises:
        SettingsError: if the variable has any other value, except 0 or empty.
    """
    return _callbacks_from("lightning_feed")


def pl_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``pytorch_lightning``, which in 2.4 refuses those of ``lightning``."""
    return _callbacks_from("lightning_feed.pl")


def _callbacks_from(module: str) -> list[Any]:
    process, _, program = os.environ.get(PROGRAM, "").partition(" ")
    if process and process != str(os.getpid()):
        _end_process(program)
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return []
    if value not in ("1", "tune"):
        raise SettingsError(
            f"{VARIABLE}={value!r} is not valid. Set it to 1 to add PrefetchCallback and GPUStarvationCallback to "
            "every Trainer, to tune to have AutotuneCallback choose the workers as well, or unset it."
        )
    feed = import_module(module)
    starvation = feed.GPUStarvationCallback()
    starvation.was_asked_for = False
    prefetch = feed.PrefetchCallback()
    prefetch.was_asked_for = False
    added = [prefetch, starvation]
    if value == "tune":
        added.insert(0, feed.AutotuneCallback())
    return added


def _end_process(program: str) -> NoReturn:
    """End a child process of a program that is being diagnosed or tuned, because the child must not train."""
    message = (
        f"lightning-feed: {program} makes a Trainer in another process, which cannot be examined. "
        "Nothing was trained there. Name the program that runs in that process.\n"
    )
    os.write(2, message.encode(errors="backslashreplace"))
    os._exit(1)  # an exception would run code such as `finally: torch.save(...)`
