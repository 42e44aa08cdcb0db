"""Slots: memory shared with worker processes, in which they leave their batches, again and again.

Torch's workers put each tensor of a batch into new shared memory: the kernel clears its pages, a file descriptor is
sent, the training process maps the pages, and a thread copies them into page-locked memory. Here, the workers share
slots that exist before they start. A worker collates into a free slot and sends the slot's number; the training process
looks at the slot in place. The slot is free again once nothing refers to the batch any more.

The memory is a file that exists only in memory (``memfd_create``), not in /dev/shm, so the size of /dev/shm does not
limit it, and no descriptor is sent with a batch. The file has a fixed, large range of addresses for each slot; the
kernel takes memory only for pages that were written. The first free slot is taken, so that only as many have memory as
there are batches at a time.

What cannot be put into a slot, such as a sparse tensor, is sent as torch sends it. So is a whole batch if no slot
is free, because the user has kept the batches: nothing waits for a slot.
"""

import contextlib
import ctypes
import functools
import io
import itertools
import logging
import mmap
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import collate as torch_collate

from lightning_feed.errors import LoaderError
from lightning_feed.load.copy_fence import CopyFence
from lightning_feed.load.kinds import Batch, Sample
from lightning_feed.load.machine import HAS_SLOTS
from lightning_feed.storage.system import read_text

try:
    import fcntl
    import resource
except ImportError:  # Windows, which has no memfd_create either
    fcntl = resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

SLOT_BYTES = 4 * 2**30
"""Addresses of a slot. Memory is taken only for what is written. A larger batch is sent as torch sends it."""
_SPARE_SLOTS = 2
"""Slots for each worker beyond those for its ``prefetch_factor`` batches, for batches that the training loop keeps a
while."""
_WAITS = 20
_WAIT_S = 0.00005
"""Seconds of each of the waits of a worker before it uses a slot for the first time that is not usually needed."""
_ALIGNMENT = 64
"""Bytes to which tensors are aligned, as in torch's allocator for the CPU."""
_GROWTH = mmap.PAGESIZE * 64
_SMALL_PART = 16
_LARGE_BYTES = 2**20
"""A tensor that is less than a 16th of its memory is sent as torch sends it, if that memory is larger than this."""
_FREE = 0
_TAKEN = 1


class SlotMemory:
    """The slots of one set of worker processes.

    The file begins with a byte for each slot, which is set by the worker that takes the slot, and cleared by the
    training process. A second byte for each is set as long as the worker refers to the batch: a collate function may
    keep batches, and those of torch's DataLoader stay as they are.

    Args:
        count: number of slots.
        fence: knows when the device has copied a batch. None: slots are not registered for copies to a device.

    Raises:
        OSError: the system has no such memory, or too few addresses.
    """

    def __init__(self, count: int, fence: CopyFence | None = None) -> None:
        self._registered: dict[int, int] = {}
        """Bytes of each slot that are registered for copies to a device."""
        self._refused: int | None = None
        """The least number of bytes that the driver has refused to register."""
        self.count = count
        self._pages_of_flags = -(-2 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        self._size = self._pages_of_flags + count * SLOT_BYTES
        self._map_file(_new_file(self._size))
        self._owner = os.getpid()
        self._fence = fence
        self._copying: deque[tuple[int, list[Any]]] = deque()
        """Slots without a batch that the device may still be copying, with the events after the copies."""
        self._polling = threading.Lock()
        self.number = next(_numbers)
        _memories[self.number] = self

    def _map_file(self, file: int) -> None:
        self._file = file
        # Costs no memory, also with vm.overcommit_memory=2: "For a file backed map: SHARED or READ-only - 0 cost (the
        # file is the map not swap)", Documentation/mm/overcommit-accounting.rst. Pages count when they are taken.
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

    def start_of(self, slot: int) -> int:
        """Offset of a slot in the memory."""
        return self._pages_of_flags + slot * SLOT_BYTES

    def _address(self, slot: int) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self.start_of(slot)

    # --- in a worker process ------------------------------------------------------------------------------------------

    def take(self) -> int | None:
        """Take the first free slot, whose pages are in the caches. None if there is none."""
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
            OSError: there is not enough memory. Without this call, writing there would end the process.
        """
        os.posix_fallocate(self._file, start, end - start)

    def view(self, slot: int) -> memoryview:
        """A slot's memory. The slot is not free while a worker refers to it, or to tensors in it."""
        start = self.start_of(slot)
        view = memoryview(self._map)[start : start + SLOT_BYTES]
        self._map[self.count + slot] = _TAKEN
        weakref.finalize(view, self._drop, slot).atexit = False
        return view

    def _drop(self, slot: int) -> None:
        self._map[self.count + slot] = _FREE

    # --- in the training process --------------------------------------------------------------------------------------

    def lease(self, slot: int, used: int) -> memoryview:
        """The used part of a slot. The slot is free again when nothing refers to it, nor to tensors in it, any more."""
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
        # A copy must not cross two registered ranges, so a range that grows is registered anew. A quarter more, so that
        # batches of varying sizes do not register each time.
        size = -(-(used if not before else used + used // 4) // mmap.PAGESIZE) * mmap.PAGESIZE
        if before:
            _unregister(self._address(slot))
            del self._registered[slot]
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
        """Make the slots free whose batches the device has copied."""
        if not self._copying or self._fence is None or not self._polling.acquire(blocking=False):
            return
        try:
            while self._copying and self._fence.passed(self._copying[0][1]):
                slot, _ = self._copying.popleft()
                self.give_back(slot)
        finally:
            self._polling.release()


_numbers = itertools.count()
_memories: weakref.WeakValueDictionary[int, SlotMemory] = weakref.WeakValueDictionary()
"""All memories of this process, by number: a batch names its memory by the number."""


def _check_addresses(size: int) -> None:
    """Leave addresses to the program, if their number is limited.

    Raises:
        OSError: the memory would have more than half of those that are left.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    left = limit - int(read_text(Path("/proc/self/statm")).partition(" ")[0] or 0) * mmap.PAGESIZE
    if size > left // 2:
        raise OSError(f"slots need {size >> 30} GiB of addresses, more than half of those that are left (ulimit -v)")


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
    """Register memory with the driver (``cudaHostRegister``). Returns False if it refuses."""
    runtime: Any = torch.cuda.cudart()
    portable = 1  # page-locked for all devices
    if int(runtime.cudaHostRegister(address, size, portable)) == 0:
        return True
    _clear_error()
    return False


def _clear_error() -> None:
    """Clear the error of a refused call, which this thread's next kernel would raise as its own.

    Torch has no function for it (2.14), but clears the error when it raises it.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _unregister(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def can_register() -> bool:
    """True if the driver registers memory that is shared with other processes. Tries it with one page."""
    if not torch.cuda.is_initialized():
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if not _register(address, mmap.PAGESIZE):
        return False
    _unregister(address)
    return True


def use_slots(loader: DataLoader[Batch], *, held: int = 0) -> None:
    """Let the next worker processes of a loader leave their batches in slots.

    Changes ``collate_fn``, and ``pin_memory`` where slots replace the thread that pins.

    Args:
        loader: the loader.
        held: batches that later stages keep ready.
    """
    collate: Any = loader.collate_fn
    fence = CopyFence() if loader.pin_memory and can_register() else None
    count = loader.num_workers * ((loader.prefetch_factor or 1) + _SPARE_SLOTS) + held
    try:
        memory = SlotMemory(count, fence)
    except (OSError, OverflowError, ValueError) as error:
        _say_once(f"Batches are handed over as torch does it: {error}.")
        return
    usual = loader.num_workers * (loader.prefetch_factor or 1) + held + 1
    loader.collate_fn = SlotCollate(collate, memory, usual)
    loader.pin_memory = loader.pin_memory and not memory.registers


@functools.cache
def _say_once(message: str) -> None:
    logger.info(message)


@functools.cache
def in_slots(kind: Any) -> type[DataLoader[Batch]]:
    """A subclass of a DataLoader's class whose worker processes leave their batches in slots.

    For the ``__class__`` of a live loader: the loader keeps all that its own constructor has made.
    """

    class InSlots(kind):  # type: ignore[misc]  # the base class is only known here
        def _get_iterator(self) -> Any:
            own: Any = vars(self)
            collate = own["collate_fn"]
            pin = own["pin_memory"]
            if self.num_workers:
                use_slots(self)
            try:
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
    """Let the worker processes of a DataLoader of torch's, or of a derived class, leave their batches in slots.

    Not if the class makes its iterators in its own way, or if the user wants torch's way (:attr:`hand_over`).
    """
    kind: Any = type(loader)
    if kind._get_iterator is DataLoader._get_iterator and getattr(loader, "hand_over", "slots") == "slots":
        loader.__class__ = in_slots(kind)


def uses_slots(loader: DataLoader[Batch]) -> bool:
    """True if the worker processes of a loader leave their batches in slots."""
    ours = getattr(loader, "hand_over", None) == "slots" and getattr(loader, "workers", None) == "process"
    return HAS_SLOTS and (ours or hasattr(loader, "plain_kind"))


def plain_kind_of(loader: DataLoader[Batch]) -> type[DataLoader[Batch]]:
    """The class of a loader before :func:`in_slots`."""
    kind: type[DataLoader[Batch]] = getattr(loader, "plain_kind", type(loader))
    return kind


def memory_of(iterator: Any) -> SlotMemory | None:
    """The slots of torch's iterator. None if it has none."""
    collate = getattr(iterator, "_collate_fn", None)
    return collate.memory if isinstance(collate, SlotCollate) else None


# --- writing a batch, in a worker process -----------------------------------------------------------------------------


class SlotCollate:
    """The ``collate_fn`` of a worker whose batches are in slots.

    Args:
        collate: the loader's own.
        memory: the slots.
        usual: number of slots for the batches that are ready, and for one in training.
    """

    def __init__(self, collate: Callable[[Sample], Batch], memory: SlotMemory, usual: int) -> None:
        self.collate = collate
        self.memory = memory
        self._usual = usual
        self._touched: dict[int, int] = {}
        """End of the memory that was taken for each slot."""

    def __call__(self, samples: Sample) -> Any:
        """Collate samples. Returns what is sent to the training process."""
        if get_worker_info() is None:
            return self.collate(samples)
        slot = self._take()
        if slot is None:
            return _InSlot(self.memory.number, None, 0, bytes(ForkingPickler.dumps(self.collate(samples))))
        write = _Slot(self.memory, slot, self._touched.get(slot, 0))
        try:
            with _StackInto(write):
                batch = self.collate(samples)
            content = write.pickled(batch)
        except BaseException:
            self.memory.give_back(slot)
            raise
        self._touched[slot] = write.touched
        if not write.used:
            self.memory.give_back(slot)
            return batch
        return _InSlot(self.memory.number, slot, write.used, content)

    def _take(self) -> int | None:
        """Take a free slot. None if there is none.

        A loop drops a batch just after it has taken the next one, for which a worker at once begins another. So before
        a slot gets memory that may never be needed again, a moment is given for an earlier one to become free.
        """
        slot = self.memory.take()
        if max(self._touched.values(), default=0) < _LARGE_BYTES:
            return slot
        for _ in range(_WAITS):
            if slot is None or slot < self._usual or slot in self._touched:
                break
            time.sleep(_WAIT_S)
            other = self.memory.take()
            if other is not None:
                self.memory.give_back(max(slot, other))
                slot = min(slot, other)
        return slot


class _Slot:
    """A slot that a batch is written into, from its start to its end."""

    def __init__(self, memory: SlotMemory, slot: int, touched: int) -> None:
        self._memory = memory
        self._start = memory.start_of(slot)
        self._view = memory.view(slot)
        self._allocating = threading.Lock()  # a collate function may stack in several threads
        self.used = 0
        self.touched = touched
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages that are in the slot, with their offsets in it, by torch's address of them."""

    def allocate(self, count: int) -> Tensor | None:
        """A tensor of bytes in the slot. None if there is no memory for it."""
        with self._allocating:
            return self._allocate(count)

    def _allocate(self, count: int) -> Tensor | None:
        offset = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        end = offset + count
        if end > SLOT_BYTES:
            return None
        if end > self.touched:
            touched = min(SLOT_BYTES, -(-end // _GROWTH) * _GROWTH)
            try:
                self._memory.reserve(self._start + self.touched, self._start + touched)
            except OSError:
                return None
            self.touched = touched
        self.used = end
        found = torch.frombuffer(self._view, dtype=torch.uint8, count=count, offset=offset)
        self._note(found.untyped_storage(), found.untyped_storage(), offset)
        return found

    def _note(self, storage: torch.UntypedStorage, kept: torch.UntypedStorage, offset: int) -> None:
        self._storages[storage._cdata] = (kept, offset)

    def pickled(self, batch: Batch) -> bytes:
        """Put the batch's tensors into the slot, and pickle the rest."""
        file = io.BytesIO()
        _Pickler(file, self._place).dump(batch)
        return file.getvalue()

    def _place(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Put a tensor's storage into the slot, once. Returns the arguments of :meth:`_Lease.tensor`; None if the
        tensor must be sent as torch sends it."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            if storage.is_shared():
                return None  # shared by the user: torch shares it with the training process, too
            if storage.nbytes() > max(_LARGE_BYTES, _SMALL_PART * tensor.nbytes):
                return None  # a few rows of a whole dataset, say, which torch shares once for all batches
            copied = self.allocate(storage.nbytes())
            if copied is None:
                return None
            copied.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
            self._note(storage, storage, self._storages[copied.untyped_storage()._cdata][1])
        offset = self._storages[storage._cdata][1]
        return offset, storage.nbytes(), tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def is_plain(tensor: Tensor) -> bool:
    """True for a tensor that is described by its bytes, type, shape and strides."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


class _Pickler(ForkingPickler):
    """Pickles a batch, except for the tensors that ``place`` puts into a slot."""

    def __init__(self, file: io.BytesIO, place: Callable[[Tensor], tuple[Any, ...] | None]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._place = place

    def reducer_override(self, thing: Any) -> Any:
        placed = self._place(thing) if type(thing) is Tensor else None
        return NotImplemented if placed is None else (_tensor, placed)


class _StackInto:
    """Makes torch's ``default_collate`` stack tensors into a slot, also where a user's collate function calls it.

    Uses torch's table of collate functions, ``default_collate_fn_map``, in the worker process.
    """

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot

    def __enter__(self) -> None:
        self._before = torch_collate.default_collate_fn_map[Tensor]
        if self._before is torch_collate.collate_tensor_fn:  # not a function of the user's
            torch_collate.default_collate_fn_map[Tensor] = partial(_stack_into, self._slot)

    def __exit__(self, *_: object) -> None:
        torch_collate.default_collate_fn_map[Tensor] = self._before


def _stack_into(slot: _Slot, batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """Stack tensors, as torch's ``collate_tensor_fn`` does in a worker, but into a slot."""
    first = batch[0]
    place = slot.allocate(len(batch) * first.nbytes) if is_plain(first) else None
    if place is None:
        stacked: Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return stacked
    return torch.stack(batch, 0, out=place.view(first.dtype).view(len(batch), *first.shape))


# --- reading a batch, in the training process -------------------------------------------------------------------------


class _InSlot:
    """A batch on its way to the training process, where it becomes the batch itself."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, self._arguments


def _open(number: int, slot: int | None, used: int, content: bytes) -> Batch:
    """Look at a batch in its slot. Nothing is copied.

    Args:
        number: number of the memory.
        slot: None for a batch for which there was no free slot.
        used: bytes in the slot.
        content: the pickled batch.
    """
    memory = _memories.get(number)
    if memory is None:
        raise LoaderError("A batch came from workers that have ended. Begin a new pass with iter(loader).")
    memory.poll()
    if slot is None:
        return pickle.loads(content)
    return _Unpickler(io.BytesIO(content), _Lease(memory.lease(slot, used))).load()


class _Lease:
    """The tensors of a batch in a slot."""

    def __init__(self, leased: memoryview) -> None:
        self._leased = leased
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(
        self,
        start: int,
        count: int,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> Tensor:
        """A tensor over ``count`` bytes from ``start`` on.

        Each storage is one of its own, as in torch's batches: saving one tensor must not save the others.
        """
        storage = self._storages.get(start)
        if storage is None:
            whole = torch.frombuffer(self._leased, dtype=torch.uint8, count=count, offset=start)
            storage = self._storages[start] = whole.untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def _tensor(*_: object) -> Tensor:
    """Stands for :meth:`_Lease.tensor` in a pickled batch."""
    raise LoaderError("This batch can only be opened by the loader that it was made for.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, lease: _Lease) -> None:
        super().__init__(file)
        self._lease = lease

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _tensor.__name__:
            return self._lease.tensor
        return super().find_class(module, name)
