"""The slots behind a loader's iterator."""

from typing import Any

from lightning_feed.load.slot_batches import SlotCollate
from lightning_feed.load.slots import SlotMemory


def memory_of(iterator: Any) -> SlotMemory | None:
    """The slots of torch's iterator. None if it has none."""
    collate = getattr(iterator, "_collate_fn", None)
    return collate.memory if isinstance(collate, SlotCollate) else None
