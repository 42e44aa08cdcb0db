"""Slots: memory shared with worker processes, into which they write batch after batch.

Torch's workers put each tensor of a batch into new shared memory: the kernel clears its pages, a file descriptor is
sent, the training process maps the pages, and a thread copies them into page-locked memory. Here, the workers share
slots that exist before they start. A worker collates into a free slot and sends the slot's number; the training process
reads the slot in place. The slot is free again once nothing refers to the batch any more, in this process or in one
that the program has forked meanwhile.

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
import operator
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_feed.load.worker import resend_ctrl_c, signal_proof
from lightning_feed.machine.limits import HAS_SLOTS, read_text

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
_CALL_WHEN_DROPPED = operator.methodcaller("when_dropped")


class _Reference(weakref.ref[Any]):
    """A weak reference that calls its attribute ``when_dropped`` when nothing refers to the object any more.

    The call is made in C, without any Python code. Python code would handle a signal that has arrived meanwhile, and
    Python drops errors raised here, such as the KeyboardInterrupt of Ctrl-C. ``weakref.finalize`` is Python code.
    """

    __slots__ = ("readers", "when_dropped")

    when_dropped: Callable[[], object]
    readers: "list[_Child]"
    """Processes that may read the object."""


def _refer(thing: object, when_dropped: Callable[[], object]) -> _Reference:
    reference = _Reference(thing, _CALL_WHEN_DROPPED)
    reference.when_dropped = when_dropped
    reference.readers = []
    return reference


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
        self._refused: int | None = None
        """The smallest number of bytes that the driver has refused to register. None if it has refused none."""
        self.count = count
        self._pages_of_flags = -(-2 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = self._pages_of_flags + count * SLOT_BYTES
        self._fence = fence
        self.number = next(_numbers)
        self._map_file(_new_file(self._size))

    def _map_file(self, file: int) -> None:
        self._views: dict[int, _Reference] = {}
        """References to the memory of slots that this worker process writes, by slot."""
        self._leases: dict[int, _Reference] = {}
        """References to the batches in slots that this training process reads, by slot. A dropped batch's reference
        stays until the slot has its next batch."""
        self._dropped: dict[int, list[Any]] = {}
        """Slots whose batch was dropped while the device or a child process may still read them. The values are the
        events after the device's copies."""
        self._registered: dict[int, int] = {}
        """Number of bytes registered for copies to a device, by the address of the slot."""
        self._polling = threading.Lock()
        self._file = file
        for number, reference in list(_references.items()):
            if reference() is None:
                _references.pop(number, None)
        end = signal_proof(partial(_end, [file], self._fence, self._registered, self._dropped))
        _references[self.number] = _refer(self, end)
        # Costs no memory, even with vm.overcommit_memory=2: "For a file backed map: SHARED or READ-only - 0 cost (the
        # file is the map not swap)", Documentation/mm/overcommit-accounting.rst. Pages cost memory once they are taken.
        self._map = mmap.mmap(file, self._size)
        self._first_address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._map.madvise(mmap.MADV_DONTDUMP)  # a core dump would contain the unused addresses

    def __getstate__(self) -> dict[str, Any]:
        # Only for spawned workers: forked ones inherit the memory.
        assert get_spawning_popen() is not None, "slots are shared only with worker processes"
        kept = ("count", "_pages_of_flags", "_size", "number")
        return {**{name: getattr(self, name) for name in kept}, "_file": DupFd(self._file), "_fence": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        file = state.pop("_file").detach()
        self.__dict__.update(state)
        self._map_file(file)

    @property
    def registers(self) -> bool:
        """True if slots are registered for copies to a device, so that no thread has to pin batches."""
        return self._fence is not None

    @property
    def slot_bytes(self) -> int:
        """Size of a slot's range of addresses, in bytes."""
        return SLOT_BYTES

    def start_of(self, slot: int) -> int:
        """Return the offset of a slot in the memory."""
        return self._pages_of_flags + slot * SLOT_BYTES

    def _address(self, slot: int) -> int:
        return self._first_address + self.start_of(slot)

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
        self._views[slot] = _refer(view, partial(operator.setitem, self._map, self.count + slot, _FREE))
        return view

    # --- in the training process --------------------------------------------------------------------------------------

    def lease(self, slot: int, used: int) -> memoryview:
        """Return the used part of a slot. The slot is free again when nothing refers to this part, or to tensors in it,
        any more, the device has copied them, and the processes have ended that were forked meanwhile."""
        if self._fence is not None:
            self._register(slot, used)
        start = self.start_of(slot)
        leased = memoryview(self._map)[start : start + used]
        when_dropped: Callable[[], object] = partial(operator.setitem, self._map, slot, _FREE)
        if self._fence is not None and self._address(slot) in self._registered:
            when_dropped = signal_proof(partial(self._note_copies, slot, self._fence))
            _copied[self.number, slot] = self
        self._leases[slot] = _refer(leased, when_dropped)
        return leased

    def _note_copies(self, slot: int, fence: "CopyFence") -> None:
        _copied.pop((self.number, slot), None)
        self._dropped[slot] = fence.events()  # last: a signal after this must not make it happen again

    def _register(self, slot: int, used: int) -> None:
        """Register a slot with the driver, so that copies from it are fast and do not wait."""
        address = self._address(slot)
        before = self._registered.get(address, 0)
        if used <= before or (self._refused is not None and used >= self._refused):
            return
        wanted = used
        if before:
            # A copy must not cross two registered ranges, so a range that grows is registered anew. A quarter more is
            # registered than needed, so that batches of varying sizes do not cause a new registration each time.
            wanted += used // 4
            _unregister(address)
            del self._registered[address]
        size = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        if _register(address, min(size, SLOT_BYTES)):
            self._registered[address] = size
            return
        if self._refused is None:
            logger.warning(
                "A batch of %d MB could not be registered with the driver, so its copy to the device is slow. Allow "
                "more locked memory (`ulimit -l`), or use smaller batches.",
                used >> 20,
            )
        self._refused = used

    def poll(self) -> None:
        """Free the slots of dropped batches that neither the device nor a child process reads any more."""
        if _children:
            _note_ended_children()
        if not self._dropped or not self._polling.acquire(blocking=False):
            return
        try:
            for slot in list(self._dropped):
                if not all(child.has_ended for child in self._leases[slot].readers):
                    continue
                if self._fence is not None and not self._fence.passed(self._dropped[slot]):
                    break  # nor has it passed the events after later copies
                del self._dropped[slot]
                self.give_back(slot)
        finally:
            self._polling.release()

    # --- around a fork of the training process ------------------------------------------------------------------------

    def is_leased(self) -> bool:
        """Return True if the program may refer to a batch in a slot."""
        return any(lease() is not None for lease in list(self._leases.values()))

    def keep_leases(self, child: "_Child | None") -> None:
        """Let no batch that is in use now free its slot by itself: :meth:`poll` does so later.

        Args:
            child: the forked process, which must have ended by then; None if it does not read these batches.
        """
        for slot, lease in list(self._leases.items()):
            if lease() is None:
                continue
            if self._address(slot) not in self._registered:
                lease.when_dropped = partial(operator.setitem, self._dropped, slot, [])
            if child is not None:
                lease.readers = [child, *(other for other in lease.readers if not (other.has_ended or other is child))]

    def forget_leases(self) -> None:
        """Let this forked process free no slot, and unregister none."""
        self._leases.clear()
        self._views.clear()
        self._dropped.clear()
        self._registered.clear()


_numbers = itertools.count(os.getpid() << 32)  # a spawned worker has memories with the numbers of its parent
_references: dict[int, _Reference] = {}
"""References to all SlotMemories of this process, by number, and to some that are gone. A WeakValueDictionary would run
Python code when a memory is dropped."""
_copied: dict[tuple[int, int], SlotMemory] = {}
"""Memories by number and slot, for slots that hold a batch and are registered. Such a memory must outlive its loader,
because the driver must not lose the memory of a copy."""


def memory_with(number: int) -> SlotMemory | None:
    """Return the SlotMemory to which a batch refers by its number. None if it is gone."""
    reference = _references.get(number)
    return None if reference is None else reference()


def memories() -> list[SlotMemory]:
    """Return all SlotMemories of this process."""
    found = [reference() for reference in list(_references.values())]
    return [memory for memory in found if memory is not None]


def _end(
    files: list[int], fence: "CopyFence | None", registered: dict[int, int], dropped: dict[int, list[Any]]
) -> None:
    """Close the file of a SlotMemory, and unregister its slots. A second call does what the first one has left."""
    if fence is not None and registered:
        for events in dropped.values():  # these copies must not lose their memory
            fence.wait(events)
    while registered:
        address, _ = registered.popitem()
        _unregister(address)
    while files:
        os.close(files.pop())


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
    """Return True if the driver can register memory that is shared with other processes. Tries to register one page."""
    if not torch.cuda.is_initialized():
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if not _register(address, mmap.PAGESIZE):
        return False
    _unregister(address)
    return True


# --- forks ------------------------------------------------------------------------------------------------------------


class _Child:
    """A process that the program has forked, with its descendants. These may read the batches that were in use then.

    The child has the write end of a pipe, and its descendants inherit it. The system closes the pipe when the last of
    them ends, or starts another program.
    """

    has_ended = False


_UNNOTED = _Child()
"""Stands for children whose end is not noted. Their batches are kept for good."""


class _Fork(threading.local):
    """The fork that a thread is making."""

    is_ours = False
    child = _UNNOTED
    write_end: int | None = None


_fork = _Fork()
_children: dict[int, _Child] = {}
"""Children that have not ended, by the read end of their pipe."""
_noting = threading.Lock()


@contextlib.contextmanager
def own_forks() -> Iterator[None]:
    """Context manager that declares that forks of this thread never read this process's batches."""
    before = _fork.is_ours
    _fork.is_ours = True
    try:
        yield
    finally:
        _fork.is_ours = before


@resend_ctrl_c()
def _before_fork() -> None:
    if not _fork.is_ours and any(memory.is_leased() for memory in memories()):
        _note_ended_children()
        with contextlib.suppress(OSError):  # too many open files
            read_end, _fork.write_end = os.pipe()
            _fork.child = _children[read_end] = _Child()
    _keep_leases()


def _keep_leases() -> None:
    for memory in memories():
        memory.keep_leases(None if _fork.is_ours else _fork.child)


@resend_ctrl_c()
def _after_fork_in_parent() -> None:
    _keep_leases()  # also of batches that other threads have received since
    _fork.child = _UNNOTED
    write_end = _fork.write_end
    _fork.write_end = None  # first: after a signal at the end of close(), a second close() would hit another file
    if write_end is not None:
        os.close(write_end)


def _after_fork_in_child() -> None:
    global _noting
    for memory in memories():
        memory.forget_leases()
    _copied.clear()
    _fork.__dict__.clear()  # leaves the write end open
    _noting = threading.Lock()  # another thread of the parent may have held it
    while _children:
        read_end, _ = _children.popitem()
        with contextlib.suppress(OSError):  # the program has closed all files
            os.close(read_end)


def _note_ended_children() -> None:
    if not _noting.acquire(blocking=False):
        return
    try:
        closed = select.poll()
        for read_end in list(_children):
            closed.register(read_end, 0)  # POLLHUP is always reported
        for read_end, event in closed.poll(0):
            child = _children.pop(read_end)
            if event & select.POLLHUP:
                child.has_ended = True
                os.close(read_end)
    finally:
        _noting.release()


if HAS_SLOTS:
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
