"""Loaders whose worker processes leave their batches in slots: our loaders, and torch's DataLoader."""

import functools
import logging
from typing import Any

from torch.utils.data import DataLoader

from lightning_feed.load.kinds import Batch
from lightning_feed.load.slot_batches import SlotCollate
from lightning_feed.load.slots import SlotMemory, can_register, own_forks
from lightning_feed.machine.limits import HAS_SLOTS

logger = logging.getLogger(__name__)

_SPARE_SLOTS = 2
"""Number of spare slots for each worker, besides a slot for each of its ``prefetch_factor`` batches. Spare slots hold
batches that the training loop keeps for a while."""


def use_slots(loader: DataLoader[Batch], *, held: int = 0) -> None:
    """Let the next worker processes of a loader leave their batches in slots.

    Changes the loader's ``collate_fn``. Sets ``pin_memory`` to False if the slots themselves are page-locked, so that
    no thread has to pin batches.

    Args:
        loader: the loader.
        held: number of batches that later stages keep ready.
    """
    fence = None
    if loader.pin_memory and can_register():
        from lightning_feed.load.copy_fence import CopyFence

        fence = CopyFence()
    ahead = loader.num_workers * (loader.prefetch_factor or 1) + held
    count = ahead + loader.num_workers * _SPARE_SLOTS
    try:
        memory = SlotMemory(count, fence)
    except (OSError, OverflowError, ValueError) as error:
        _say_once(f"Batches are handed over as torch does it: {error}.")
        return
    collate: Any = loader.collate_fn
    loader.collate_fn = SlotCollate(collate, memory, usual=ahead + 1)
    loader.pin_memory = loader.pin_memory and not memory.registers


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


@functools.cache
def in_slots(kind: Any) -> type[DataLoader[Batch]]:
    """Return a subclass of a DataLoader class, with worker processes that leave their batches in slots.

    The subclass is assigned to the ``__class__`` of an existing loader, which thus keeps all attributes that its own
    constructor has set.
    """

    class InSlots(kind):  # type: ignore[misc]  # the base class is only known here
        def _get_iterator(self) -> Any:
            own: Any = vars(self)
            collate = own["collate_fn"]
            pin = own["pin_memory"]
            if self.num_workers:
                use_slots(self)
            try:
                with own_forks():
                    return super()._get_iterator()
            finally:
                self.collate_fn = collate
                self.pin_memory = pin

        def __reduce__(self) -> tuple[Any, ...]:
            return object.__new__, (kind,), vars(self)

    InSlots.plain_kind = kind
    InSlots.__name__ = kind.__name__
    InSlots.__qualname__ = kind.__qualname__
    InSlots.__module__ = kind.__module__
    return InSlots


def put_in_slots(loader: DataLoader[Batch]) -> None:
    """Let the worker processes of torch's DataLoader, or of a subclass of it, leave their batches in slots.

    Changes nothing if the subclass overrides ``_get_iterator``, or if the loader has ``hand_over="torch"``.
    """
    kind: Any = type(loader)
    if _can_be_put(loader):
        loader.__class__ = in_slots(kind)


def take_out_of_slots(loader: DataLoader[Batch]) -> None:
    """Undo :func:`put_in_slots`: the next worker processes hand their batches over as torch does."""
    loader.__class__ = plain_kind_of(loader)


def _can_be_put(loader: DataLoader[Batch]) -> bool:
    kind: Any = type(loader)
    is_plain = kind._get_iterator is DataLoader._get_iterator
    return is_plain and getattr(loader, "hand_over", "slots") == "slots"


def may_use_slots(loader: object) -> bool:
    """Return True if the worker processes of a loader could leave their batches in slots, but do not: see
    :func:`put_in_slots`."""
    if not HAS_SLOTS or not isinstance(loader, DataLoader) or getattr(loader, "workers", "process") != "process":
        return False
    return not uses_slots(loader) and _can_be_put(loader)


def uses_slots(loader: DataLoader[Batch]) -> bool:
    """Return True if the worker processes of a loader leave their batches in slots."""
    ours = getattr(loader, "hand_over", None) == "slots" and getattr(loader, "workers", None) == "process"
    return HAS_SLOTS and (ours or hasattr(loader, "plain_kind"))


def plain_kind_of(loader: DataLoader[Batch]) -> type[DataLoader[Batch]]:
    """Return the class that a loader had before :func:`put_in_slots`."""
    kind: type[DataLoader[Batch]] = getattr(loader, "plain_kind", type(loader))
    return kind
