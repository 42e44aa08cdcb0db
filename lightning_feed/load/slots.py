"""Slots: memory shared with worker processes, into which they write batch after batch.

Torch's workers put each tensor of a batch into new shared memory: the kernel clears its pages, a file descriptor is
sent, the training process maps the pages, and a thread copies them into page-locked memory. Here, the workers share
slots that exist before they start. A worker collates into a free slot and sends the slot's number; the training process
reads the slot in place. The slot is free again once nothing refers to the batch any more.

The memory is a file that exists only in memory (``memfd_create``), not in /dev/shm, so the size of /dev/shm does not
limit it, and no descriptor is sent with a batch. The file has a fixed, large range of addresses for each slot; the
kernel takes memory only for pages that were written. Workers always take the first free slot, so that only as many
slots have memory as there are batches at a time.

A tensor that cannot be put into a slot, such as a sparse tensor, is sent as torch sends it. A whole batch is sent that
way if no slot is free because the user has kept earlier batches: no worker blocks until a slot is free.

This module manages the memory. :mod:`lightning_feed.load.slot_batches` writes and reads batches in it, and
:mod:`lightning_feed.load.slot_loaders` gives it to loaders.
"""

import contextlib
import ctypes
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_feed.load.machine import HAS_SLOTS
from lightning_feed.storage.memory_limits import read_text

if TYPE_CHECKING:
    from lightning_feed.load.copy_fence import CopyFence

try:
    import fcntl
    import resource
except ImportError:  # Windows, which has no memfd_create either
    fcntl = resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 * 2**30
"""Size of a slot's range of addresses, in bytes. Memory is taken only for pages that are written. Tensors for which a
slot has no room are sent as torch sends them."""
_FREE = 0
_TAKEN = 1


class SlotMemory:
    """The slots of one set of worker processes.

    The file begins with a byte for each slot, which is set by the worker that takes the slot, and cleared by the
    training process. A second byte for each slot is set as long as the worker refers to the batch, because a collate
    function may keep a batch, which must not change then.

    Args:
        count: number of slots.
        fence: finds out when the device has copied a batch; None if slots are not registered for copies to a device.

    Raises:
        OSError: the system has no ``memfd_create``, or too few addresses.
    """

    def __init__(self, count: int, fence: "CopyFence | None" = None) -> None:
        self._registered: dict[int, int] = {}
        """Number of bytes registered for copies to a device, by slot."""
        self._refused: int | None = None
        """The smallest number of bytes that the driver has refused to register. None if it has refused none."""
        self.count = count
        self._pages_of_flags = -(-2 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = self._pages_of_flags + count * SLOT_BYTES
        self._map_file(_new_file(self._size))
        self._owner = os.getpid()
        self._fence = fence
        self._copying: deque[tuple[int, list[Any]]] = deque()
        """Slots whose batch was dropped while the device may still be copying from them, with the events after these
        copies."""
        self._polling = threading.Lock()
        self.number = next(_numbers)
        memories[self.number] = self

    def _map_file(self, file: int) -> None:
        self._file = file
        # Costs no memory, even with vm.overcommit_memory=2: "For a file backed map: SHARED or READ-only - 0 cost (the
        # file is the map not swap)", Documentation/mm/overcommit-accounting.rst. Pages cost memory once they are taken.
        self._map = mmap.mmap(file, self._size)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._map.madvise(mmap.MADV_DONTDUMP)  # a core dump would contain the unused addresses

    def __getstate__(self) -> dict[str, Any]:
        # Only for spawned workers: forked ones inherit the memory.
        assert get_spawning_popen() is not None, "slots are shared only with worker processes"
        kept = ("count", "_pages_of_flags", "_size", "number")
        return {**{name: getattr(self, name) for name in kept}, "_file": DupFd(self._file)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file = state.pop("_file").detach()
        self.__dict__.update(state, _owner=None, _registered={})
        self._map_file(file)

    def __del__(self) -> None:
        if self._registered and self._fence is not None and self._owner == os.getpid():
            for _, events in self._copying:  # these copies must not lose their memory
                self._fence.wait(events)
            for slot in self._registered:
                _unregister(self._address(slot))
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def registers(self) -> bool:
        """True if slots are registered for copies to a device, so that no thread has to pin batches."""
        return self._fence is not None

    @property
    def slot_bytes(self) -> int:
        """Size of a slot's range of addresses, in bytes."""
        return SLOT_BYTES

    def start_of(self, slot: int) -> int:
        """Offset of a slot in the memory."""
        return self._pages_of_flags + slot * SLOT_BYTES

    def _address(self, slot: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self.start_of(slot)

    # --- in a worker process ------------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """Take the first free slot, whose pages are likely to be in the CPU's caches. Returns None if none is free."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the system releases it if this process dies
        try:
            slot = self._map.find(bytes([_FREE]), 0, self.count)
            while slot >= 0 and self._map[self.count + slot] != _FREE:
                slot = self._map.find(bytes([_FREE]), slot + 1, self.count)
            if slot < 0:
                return None
            self._map[slot] = _TAKEN
            return slot
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def give_back(self, slot: int) -> None:
        """Make a slot free."""
        self._map[slot] = _FREE

    def reserve(self, start: int, end: int) -> None:
        """Take memory for a range.

        Raises:
            OSError: there is not enough memory. Without this call, writing to the range would then end the process.
        """
        os.posix_fallocate(self._file, start, end - start)

    def view(self, slot: int) -> memoryview:
        """Return a slot's memory. The slot is not free while the worker refers to this memory, or to tensors in it."""
        start = self.start_of(slot)
        view = memoryview(self._map)[start : start + SLOT_BYTES]
        self._map[self.count + slot] = _TAKEN
        weakref.finalize(view, self._drop, slot).atexit = False
        return view

    def _drop(self, slot: int) -> None:
        self._map[self.count + slot] = _FREE

    # --- in the training process --------------------------------------------------------------------------------------

    def lease(self, slot: int, used: int) -> memoryview:
        """Return the used part of a slot. The slot is free again when nothing refers to this part, or to tensors in it,
        any more, and the device has copied them."""
        if self._fence is not None:
            self._register(slot, used)
        start = self.start_of(slot)
        leased = memoryview(self._map)[start : start + used]
        weakref.finalize(leased, self._end_lease, slot).atexit = False
        return leased

    def _register(self, slot: int, used: int) -> None:
        """Register a slot with the driver, so that copies from it are fast and do not wait."""
        before = self._registered.get(slot, 0)
        if used <= before or (self._refused is not None and used >= self._refused):
            return
        wanted = used
        if before:
            # A copy must not cross two registered ranges, so a range that grows is registered anew. A quarter more is
            # registered than needed, so that batches of varying sizes do not cause a new registration each time.
            wanted += used // 4
            _unregister(self._address(slot))
            del self._registered[slot]
        size = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        if _register(self._address(slot), min(size, SLOT_BYTES)):
            self._registered[slot] = size
            return
        if self._refused is None:
            logger.warning(
                "A batch of %d MB could not be registered with the driver, so its copy to the device is slow. Allow "
                "more locked memory (`ulimit -l`), or use smaller batches.",
                used >> 20,
            )
        self._refused = used

    def _end_lease(self, slot: int) -> None:
        if os.getpid() != self._owner:
            return  # a forked copy of the batch
        if slot in self._registered and self._fence is not None:
            self._copying.append((slot, self._fence.events()))
        else:
            self.give_back(slot)

    def poll(self) -> None:
        """Free the slots of dropped batches that the device has finished copying."""
        if not self._copying or self._fence is None or not self._polling.acquire(blocking=False):
            return
        try:
            while self._copying and self._fence.passed(self._copying[0][1]):
                slot, _ = self._copying.popleft()
                self.give_back(slot)
        finally:
            self._polling.release()


_numbers = itertools.count()
memories: weakref.WeakValueDictionary[int, SlotMemory] = weakref.WeakValueDictionary()
"""All SlotMemories of this process, by number. A batch sent by a worker refers to its memory by this number."""


def _check_addresses(size: int) -> None:
    """Check that enough addresses are left for the program, if their number is limited (``ulimit -v``).

    Raises:
        OSError: the slots would take more than half of the addresses that are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    pages = int(read_text(Path("/proc/self/statm")).partition(" ")[0] or 0)
    if size > (limit - pages * mmap.PAGESIZE) // 2:
        raise OSError(f"slots need {size >> 30} GiB of address space, more than half of what `ulimit -v` leaves")


def _new_file(size: int) -> int:
    if not HAS_SLOTS:
        raise OSError("this system has no memfd_create")
    _check_addresses(size)
    file = os.memfd_create("lightning_feed")
    try:
        os.truncate(file, size)
    except OSError:
        os.close(file)
        raise
    return file


def _register(address: int, size: int) -> bool:
    """Register memory with the driver (``cudaHostRegister``). Returns False if the driver refuses."""
    runtime: Any = torch.cuda.cudart()
    portable = 1  # page-locked for all devices
    if int(runtime.cudaHostRegister(address, size, portable)) == 0:
        return True
    _clear_error()
    return False


def _clear_error() -> None:
    """Clear the error of a refused call, which this thread's next kernel would raise as its own.

    Torch has no function for this (2.14), but clears an error when it raises the error.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unregister(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def can_register() -> bool:
    """True if the driver can register memory that is shared with other processes. Tries to register one page."""
    if not torch.cuda.is_initialized():
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if not _register(address, mmap.PAGESIZE):
        return False
    _unregister(address)
    return True
