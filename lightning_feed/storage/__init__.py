"""Encoded samples: how they are stored and read. Each name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_feed.storage.file_system import mount_command
    from lightning_feed.storage.folder import is_pack
    from lightning_feed.storage.packed_dataset import PackedDataset
    from lightning_feed.storage.packing import PackReport, pack, verify_pack
    from lightning_feed.storage.staging import Staged, stage, unstage

__all__ = [
    "PackReport",
    "PackedDataset",
    "Staged",
    "is_pack",
    "mount_command",
    "pack",
    "stage",
    "unstage",
    "verify_pack",
]

_HOMES = {
    "PackReport": "packing",
    "PackedDataset": "packed_dataset",
    "Staged": "staging",
    "is_pack": "folder",
    "mount_command": "file_system",
    "pack": "packing",
    "stage": "staging",
    "unstage": "staging",
    "verify_pack": "packing",
}


def __getattr__(name: str) -> object:
    if name in ("StagedPath", "stage_in_background"):
        raise ImportError(f"{name} was removed: stage(...) waits for the copy, and returns its path.")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
