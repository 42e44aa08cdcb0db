"""Packs and staged copies of samples. Each name is imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_feed.storage.packed_dataset import PackedDataset
    from lightning_feed.storage.packing import pack, verify_pack
    from lightning_feed.storage.staging import stage

__all__ = ["PackedDataset", "pack", "stage", "verify_pack"]

_HOMES = {
    "PackedDataset": "packed_dataset",
    "pack": "packing",
    "stage": "staging",
    "verify_pack": "packing",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
