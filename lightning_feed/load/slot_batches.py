"""Batches in slots: a worker process writes them, and the training process reads them in place."""

import io
import mmap
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import pin_memory as torch_pinning

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch, Sample
from lightning_feed.load.slots import SlotMemory, memory_with

_WAITS = 20
_WAIT_S = 0.00005
"""Seconds of one wait for a free slot. A worker waits up to ``_WAITS`` times before it uses a slot beyond the usual
number."""
_ALIGNMENT = 64
"""Bytes to which tensors are aligned, as in torch's allocator for the CPU."""
_GROWTH = mmap.PAGESIZE * 64
_SMALL_PART = 16
_LARGE_BYTES = 2**20
"""Size of a large storage. A tensor that takes less than a 16th of its large storage is sent as torch sends it."""

# --- writing a batch, in a worker process -----------------------------------------------------------------------------


class SlotCollate:
    """A ``collate_fn`` that puts the batches of a worker into slots.

    Args:
        collate: the loader's own ``collate_fn``.
        memory: the slots.
        usual: number of slots that are usually needed: one for each batch that is ready, and one for the batch in
            training.
    """

    def __init__(self, collate: Callable[[Sample], Batch], memory: SlotMemory, usual: int) -> None:
        self.collate = collate
        self.memory = memory
        self._usual = usual
        self._touched: dict[int, int] = {}
        """Bytes of memory that this worker has taken, by slot."""

    def __call__(self, samples: Sample) -> Any:
        """Collate samples. Returns the object that is sent to the training process, where it becomes a batch."""
        if get_worker_info() is None:
            return self.collate(samples)
        slot = self._take()
        if slot is None:
            content = bytes(ForkingPickler.dumps(self.collate(samples)))
            return _SentBatch(_Sent(self.memory.number, None, used=0, content=content, left_out=True))
        writer = _SlotWriter(self.memory, slot, self._touched.get(slot, 0))
        try:
            with _StackInto(writer):
                batch = self.collate(samples)
            content = writer.pickled(batch)
        except BaseException:
            self.memory.give_back(slot)
            raise
        self._touched[slot] = writer.touched
        if not writer.used:
            self.memory.give_back(slot)
            slot = None
        sent = _Sent(self.memory.number, slot, used=writer.used, content=content, left_out=writer.left_out)
        return _SentBatch(sent)

    def _take(self) -> int | None:
        """Take a free slot. Returns None if there is none.

        When a training loop takes a batch, a worker begins another batch at once; only then does the loop drop the
        batch before. So before the worker takes memory for a slot that may never be needed again, it waits a moment for
        an earlier slot to become free.
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


class _SlotWriter:
    """Writes the tensors of one batch into a slot, one after the other."""

    def __init__(self, memory: SlotMemory, slot: int, touched: int) -> None:
        self._memory = memory
        self._start = memory.start_of(slot)
        self._view = memory.view(slot)
        self._allocating = threading.Lock()  # a collate function may stack in several threads
        self.used = 0
        self.touched = touched
        self.left_out = False
        """True if the batch has something to pin that is not in the slot."""
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
        """Storages in the slot, with their offsets in the slot, by the address of torch's storage object."""
        self._stacked: dict[int, torch.UntypedStorage] = {}
        """Storages that torch has made for this batch, in shared memory, by the same address."""

    def allocate(self, count: int) -> Tensor | None:
        """Make a tensor of ``count`` bytes in the slot. Returns None if there is no memory for it."""
        with self._allocating:
            return self._allocate(count)

    def _allocate(self, count: int) -> Tensor | None:
        offset = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        end = offset + count
        if end > self._memory.slot_bytes:
            return None
        if end > self.touched:
            touched = min(self._memory.slot_bytes, -(-end // _GROWTH) * _GROWTH)
            try:
                self._memory.reserve(self._start + self.touched, self._start + touched)
            except OSError:
                return None
            self.touched = touched
        self.used = end
        allocated = torch.frombuffer(self._view, dtype=torch.uint8, count=count, offset=offset)
        self._note(allocated.untyped_storage(), allocated.untyped_storage(), offset)
        return allocated

    def _note(self, storage: torch.UntypedStorage, kept: torch.UntypedStorage, offset: int) -> None:
        self._storages[storage._cdata] = (kept, offset)

    def note_stacked(self, stacked: Tensor) -> None:
        """Note a tensor that torch has stacked for this batch."""
        storage = stacked.untyped_storage()
        self._stacked[storage._cdata] = storage

    def pickled(self, batch: Batch) -> bytes:
        """Put the batch's tensors into the slot, and pickle the rest."""
        file = io.BytesIO()
        pickler = _Pickler(file, self._place, self._place_stacked)
        pickler.dump(batch)
        self.left_out = pickler.left_out
        return file.getvalue()

    def _place(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """Put a tensor's storage into the slot, unless it is there already. Returns the arguments of
        :meth:`_LeasedSlot.tensor`, or None if the tensor must be sent as torch sends it."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() > max(_LARGE_BYTES, _SMALL_PART * tensor.nbytes):
            return None  # a few rows of a whole dataset, say, which torch shares once for all batches
        if storage.is_shared() and storage._cdata not in self._stacked:
            return None  # shared by the user: torch shares it with the training process, too
        placed = self._place_storage(storage)
        if placed is None:
            return None
        return *placed, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()

    def _place_stacked(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Put the storage of a subclass of Tensor into the slot if torch has made it for this batch. Returns the
        arguments of :meth:`_LeasedSlot.storage`, or None."""
        if storage._cdata not in self._stacked or not storage.nbytes():
            return None
        return self._place_storage(storage)

    def _place_storage(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Put a storage into the slot, unless it is there already. Returns its offset and size, or None if there is no
        memory for it."""
        if storage._cdata not in self._storages:
            copied = self.allocate(storage.nbytes())
            if copied is None:
                return None
            copied.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
            self._note(storage, storage, self._storages[copied.untyped_storage()._cdata][1])
        return self._storages[storage._cdata][1], storage.nbytes()


def is_plain(tensor: Tensor) -> bool:
    """Return True for a CPU tensor that is fully described by its bytes, type, shape and strides."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


class _Pickler(ForkingPickler):
    """Pickles a batch, except for the tensors and storages that ``place`` and ``place_storage`` put into a slot."""

    def __init__(
        self,
        file: io.BytesIO,
        place: Callable[[Tensor], tuple[Any, ...] | None],
        place_storage: Callable[[torch.UntypedStorage], tuple[int, int] | None],
    ) -> None:
        super().__init__(file)  # the protocol of torch; a later one sends read-only arrays as such
        self._place = place
        self._place_storage = place_storage
        self.left_out = False

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor:
            placed = self._place(thing)
            if placed is not None:
                return _tensor, placed
        elif type(thing) is torch.UntypedStorage:
            placed = self._place_storage(thing)
            if placed is not None:
                return _storage, placed
        # Tensors that are not in the slot, and objects of other classes that torch's pin_memory pins.
        self.left_out |= hasattr(type(thing), "pin_memory")
        return NotImplemented


_filled: "_SlotWriter | None" = None
"""The writer of the slot that this worker process is filling; None if it is not collating."""


def new_bytes(count: int) -> Tensor:
    """Make a tensor of bytes for a part of a batch: in the slot that this worker process is filling, if it is.

    Args:
        count: number of bytes.

    Returns:
        uint8, shape (count,), not initialised.
    """
    slot = _filled
    allocated = slot.allocate(count) if slot is not None and count else None
    return torch.empty(count, dtype=torch.uint8, device="cpu") if allocated is None else allocated


class _StackInto:
    """Makes torch's ``default_collate`` stack tensors into a slot, even if a user's collate function calls it, and
    :func:`new_bytes` take its memory there.

    Uses torch's table of collate functions, ``default_collate_fn_map``, in the worker process.
    """

    def __init__(self, slot: _SlotWriter) -> None:
        self._slot = slot

    def __enter__(self) -> None:
        global _filled  # a worker process fills one slot at a time
        _filled = self._slot
        self._before = torch_collate.default_collate_fn_map[Tensor]
        if self._before is torch_collate.collate_tensor_fn:  # not replaced by the user
            torch_collate.default_collate_fn_map[Tensor] = partial(_stack_into, self._slot)

    def __exit__(self, *_: object) -> None:
        global _filled
        _filled = None
        torch_collate.default_collate_fn_map[Tensor] = self._before


def _stack_into(slot: _SlotWriter, batch: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    """Stack tensors, as torch's ``collate_tensor_fn`` does in a worker, but into a slot."""
    first = batch[0][...]  # a plain tensor if samples are torchvision's images, which it stacks to plain tensors
    if is_plain(first):
        memory = slot.allocate(len(batch) * first.nbytes)
        if memory is not None:
            return torch.stack(batch, 0, out=memory.view(first.dtype).view(len(batch), *first.shape))
    stacked: Tensor = torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
    if stacked.layout is torch.strided and stacked.device.type == "cpu":
        slot.note_stacked(stacked)
    return stacked


# --- reading a batch, in the training process -------------------------------------------------------------------------


class _Sent(NamedTuple):
    """The message that a worker sends for a batch."""

    number: int
    """Number of the :class:`SlotMemory`."""
    slot: int | None
    """The batch's slot; None if it has none, so that the batch is sent as torch sends it."""
    used: int
    """Number of bytes used in the slot."""
    content: bytes
    """The pickled batch, without the tensors in the slot."""
    left_out: bool
    """True if the batch has something to pin that is not in the slot."""


class _SentBatch:
    """A batch on its way to the training process. Unpickling this object there makes the batch: see :func:`_open`."""

    def __init__(self, sent: _Sent) -> None:
        self._sent = sent

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, (self._sent,)


def _open(sent: _Sent) -> Batch:
    """Make a batch whose tensors stay in its slot. Nothing is copied, except for pinning what is not in the slot.

    Raises:
        LoaderError: the workers of the batch have ended.
    """
    memory = memory_with(sent.number)
    if memory is None:
        raise LoaderError("A batch came from workers that have ended. Begin a new pass with iter(loader).")
    memory.poll()
    if sent.slot is None:
        batch = pickle.loads(sent.content)
    else:
        leased = _LeasedSlot(memory.lease(sent.slot, sent.used))
        batch = _Unpickler(io.BytesIO(sent.content), leased).load()
    if sent.left_out and memory.registers:
        return torch_pinning.pin_memory(batch)
    return batch


class _LeasedSlot:
    """Makes the tensors of a batch in a slot."""

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
        """Make a tensor whose storage is the ``count`` bytes of the slot from ``start`` on.

        The slot holds several storages, not one, because saving one tensor must not save the others.
        """
        return torch.empty(0, dtype=dtype, device="cpu").set_(self.storage(start, count), offset, shape, stride)

    def storage(self, start: int, count: int) -> torch.UntypedStorage:
        """Make a storage of the ``count`` bytes of the slot from ``start`` on."""
        storage = self._storages.get(start)
        if storage is None:
            whole = torch.frombuffer(self._leased, dtype=torch.uint8, count=count, offset=start)
            storage = self._storages[start] = whole.untyped_storage()
        return storage


def _tensor(*_: object) -> Tensor:
    """Placeholder for :meth:`_LeasedSlot.tensor` in a pickled batch."""
    raise LoaderError("This batch can only be opened by the loader that it was made for.")


def _storage(*_: object) -> torch.UntypedStorage:
    """Placeholder for :meth:`_LeasedSlot.storage` in a pickled batch."""
    raise LoaderError("This batch can only be opened by the loader that it was made for.")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, lease: _LeasedSlot) -> None:
        super().__init__(file)
        self._lease = lease

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _tensor.__name__:
            return self._lease.tensor
        if module == __name__ and name == _storage.__name__:
            return self._lease.storage
        return super().find_class(module, name)
