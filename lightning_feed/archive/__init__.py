"""At rest: where the encoded samples lie, and how they are read. Each name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_feed.archive.stage_background import stage_in_background
    from lightning_feed.archive.stage_path import StagedPath
    from lightning_feed.archive.stage_room import mount_command
    from lightning_feed.archive.stage_users import unstage
    from lightning_feed.archive.staging import Staged, stage

__all__ = ["Staged", "StagedPath", "mount_command", "stage", "stage_in_background", "unstage"]

_HOMES = {
    "Staged": "staging",
    "StagedPath": "stage_path",
    "mount_command": "stage_room",
    "stage": "staging",
    "stage_in_background": "stage_background",
    "unstage": "stage_users",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
