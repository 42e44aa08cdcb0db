"""At rest: where the encoded samples lie, and how they are read. Each name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_feed.archive.folder import is_pack
    from lightning_feed.archive.packed_dataset import PackedDataset
    from lightning_feed.archive.packing import PackReport, pack, verify_pack
    from lightning_feed.archive.stage_path import StagedPath
    from lightning_feed.archive.staging import Staged, stage, stage_in_background, unstage
    from lightning_feed.archive.system import mount_command

__all__ = [
    "PackReport",
    "PackedDataset",
    "Staged",
    "StagedPath",
    "is_pack",
    "mount_command",
    "pack",
    "stage",
    "stage_in_background",
    "unstage",
    "verify_pack",
]

_HOMES = {
    "PackReport": "packing",
    "PackedDataset": "packed_dataset",
    "Staged": "staging",
    "StagedPath": "stage_path",
    "is_pack": "folder",
    "mount_command": "system",
    "pack": "packing",
    "stage": "staging",
    "stage_in_background": "staging",
    "unstage": "staging",
    "verify_pack": "packing",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
