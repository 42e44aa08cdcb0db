"""What Lightning's entry points call for every new Trainer: both callbacks when LIGHTNING_FEED=1, else nothing."""

import os
from importlib import import_module
from typing import Any

from lightning_feed.errors import SettingsError

VARIABLE = "LIGHTNING_FEED"
PROGRAM = "LIGHTNING_FEED_PROGRAM"
"""Set while a program is diagnosed or tuned: the number of its process, and its name."""


def callbacks() -> list[Any]:
    """Return the callbacks to add to a ``lightning.pytorch.Trainer`` that is being built.

    Registered in the group ``lightning.pytorch.callbacks_factory``, so it runs in programs that never heard of this
    package: while the variable is unset it imports nothing.

    Returns:
        ``[PrefetchCallback(), GPUStarvationCallback()]`` with ``LIGHTNING_FEED=1``, else an empty list.

    Raises:
        SettingsError: when the variable holds anything but 1, 0 or nothing.
    """
    _refuse_children()
    return _both_from("lightning_feed") if _switched_on() else []


def pl_callbacks() -> list[Any]:
    """The same for Trainers of ``pytorch_lightning``, which in 2.4 refuse callbacks of the other package's tree."""
    _refuse_children()
    return _both_from("lightning_feed.pl") if _switched_on() else []


def _refuse_children() -> None:
    number, _, program = os.environ.get(PROGRAM, "").partition(" ")
    if number and number != str(os.getpid()):
        said = (
            f"lightning-feed: {program} is only looked at, and makes a Trainer in another process, which is not. "
            "Nothing was trained there. Name the program that runs in that process.\n"
        )
        os.write(2, said.encode(errors="backslashreplace"))
        os._exit(1)  # an exception would run what follows a training: `finally: torch.save(...)`


def _switched_on() -> bool:
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise SettingsError(
            f"{VARIABLE}={value!r} is neither on nor off. Set it to 1 to add PrefetchCallback and "
            "GPUStarvationCallback to every Trainer, or unset it."
        )
    return value == "1"


def _both_from(module: str) -> list[Any]:
    home = import_module(module)
    return [home.PrefetchCallback(), home.GPUStarvationCallback()]
