"""A simulated asynchronous device: streams, events, a caching allocator and simulated time, without any hardware.

Tensors on the ``meta`` device are its memory and each aten operation on them is one kernel on the current stream, so
that the real callbacks run on it through a real Trainer. The object is the device module, too: what
``torch.get_device_module`` returns. Two things are followed side by side.

**Order**, with a vector clock for each stream and one for the host (as data race detectors keep them, Flanagan and
Freund, FastTrack, PLDI 2009). An operation is reported in :attr:`SimulatedDevice.races` when it reads or writes memory
that another stream wrote, or writes memory that another stream reads, without having waited for it. That does not
depend on how long anything takes: a race is found even where the timing of a run hides it. Memory that is freed keeps
its last uses, and whatever is allocated next from the same stream's pool inherits them, but for those that
``record_stream`` makes the allocator wait for.

**Time**, in whole nanoseconds. Kernels take no time unless they are given some, copies take
``bytes / copy_bytes_per_ms``. Streams work in order and beside each other; copies to the device share one copy engine;
a copy from pageable memory makes the host wait for its stream and for itself. Sources: the CUDA C++ programming guide
(asynchronous concurrent execution) and the CUDA runtime's "API synchronization behavior".

**Refusals**, as torch has them: ``record_stream`` of host tensors, ``elapsed_time`` of events made without timing, and
what mixes up its two devices. Each has a default stream, a pool of streams and a current stream of its own, and
``torch.device("meta", 1)`` is the second; without an index the current device is meant, as with ``"cuda"``. Tensors on
it are known by their memory, since torch keeps no index of meta tensors: their ``device`` is ``"meta"``.

What it does not know: values (but those copied from the host, :meth:`SimulatedDevice.content`), how kernels slow each
other down, pinned memory that the host writes to while it is copied, copies between devices, and what drivers do beyond
their documentation. Writes to different parts of one storage are taken for writes to the same. Blocks of memory are
handed out again as a whole and never split, ``cudaMalloc`` and ``cudaHostAlloc`` take no time and stall nothing, and
the backward pass is queued by the thread that asked for it: autograd's own thread for the device is not there.

Threads have a current stream each, as in torch. What another thread does is followed while it has chosen a stream.
"""

from __future__ import annotations  # the device has a method of the name `Stream`, as torch.cuda has

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import count, cycle
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_feed.measure.step_meter import EventRing, StepMeter, StepTimes
from lightning_feed.transfer import prefetcher as streams

MS = 1_000_000
DEVICE = torch.device("meta")
DEVICES = 2
POOL = 32
"""Streams of one priority that torch has for a device; ``Stream()`` hands them out in turn (c10/cuda/CUDAStream.h)."""
LAUNCH_QUEUE = 1024
"""Kernels that may be queued before a launch makes the host wait, as seen with CUDA."""
WRITES_UNMARKED = {"aten.native_batch_norm.default": (3, 4)}
"""Arguments that an operation writes to without its schema saying so: the running statistics."""
READS_VALUES = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select", "aten._unique2")
"""Operations whose results the host needs before it can go on."""
ALLOCATES = ("aten.empty", "aten.new_empty")
SCALES_GRADIENTS = ("aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_")
"""Operations of a GradScaler that change their arguments, and that torch has no ``meta`` kernels for."""

NOT_CHECKED = {"Event.synchronize", "synchronize", "a copy from pageable memory", "decode_jpegs_cuda"}
"""Waits at which ``torch.cuda.set_sync_debug_mode("error")`` does not raise. It does where torch synchronises a stream,
and at copies that are not ``non_blocking`` (c10/cuda/CUDAFunctions.h). torchvision's decoder waits by itself."""

Span = tuple[int, int]
"""From and to, nanoseconds."""
Seen = dict["Stream", int]
"""For each stream the number of its last operation that is known to be over."""


class Wait(NamedTuple):
    """A moment at which the host could have to wait for the device."""

    what: str
    blocked_ns: int
    where: str


class Stream:
    """A queue of work of the device with the number ``index``."""

    __slots__ = ("_device", "busy", "free_at", "held_up", "index", "name", "seen")
    # No "__weakref__": torch 2.11 frees a stream without clearing the weak references to it.

    def __init__(self, device: SimulatedDevice, name: str, index: int = 0) -> None:
        self._device = device
        self.index = index
        self.name = f"{name} of device {index}" if index else name
        self.seen: Seen = {}
        self.free_at = 0
        """When all work queued so far is over."""
        self.busy: list[Span] = []
        """When it was at work, or held up by an event; all else is idle."""
        self.held_up: list[Span] = []
        """When it was held up by an event."""

    def wait_event(self, event: Event) -> None:
        """The event may be of another device."""
        join(self.seen, event.seen)
        assert event.at is not None, "waits for an event that was never recorded"
        began = max(self.free_at, self._device.now)
        if event.at > began:
            self._occupy(began, event.at)
            self.held_up.append((began, event.at))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        event = self._device.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._device.wait_for(self.record_event(), "Stream.synchronize")

    def run(self, duration_ns: int, begin_at: int = 0) -> int:
        """Queue work; returns when it will be over."""
        began = max(self.free_at, self._device.now, begin_at)
        self._occupy(began, began + duration_ns)
        return self.free_at

    def _occupy(self, began: int, until: int) -> None:
        self.free_at = until
        if until > began:
            self.busy.append((began, until))

    def __repr__(self) -> str:
        return f"<{self.name} stream>"


class Event:
    """A mark in a stream. It refuses what torch's refuses (c10/cuda/CUDAEvent.h, torch 2.15), with the same errors.

    Torch takes an event that was never recorded for one that has passed; here that is an error, too.
    """

    def __init__(self, device: SimulatedDevice, *, enable_timing: bool = False) -> None:
        self._device = device
        self._enable_timing = enable_timing
        self.seen: Seen = {}
        self.at: int | None = None
        self.index: int | None = None
        """Of the device, that of the first stream that it was recorded on."""

    def record(self, stream: Stream | None = None) -> None:
        stream = self._device.current_stream() if stream is None else stream
        self.index = stream.index if self.index is None else self.index
        if self.index != stream.index:
            raise RuntimeError(f"Event device {self.index} does not match recording stream's device {stream.index}.")
        self.seen = join(dict(stream.seen), self._device.host_seen)
        self.at = max(stream.free_at, self._device.now)

    def query(self) -> bool:
        assert self.at is not None, "asked for an event that was never recorded"
        if self._device.now < self.at:
            return False
        join(self._device.host_seen, self.seen)
        return True

    def elapsed_time(self, end_event: Event) -> float:
        if not (self._enable_timing and end_event._enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.query() and end_event.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        if self.index != end_event.index:  # CUDA C++ programming guide, "Stream and Event Behavior" of several devices
            raise RuntimeError("CUDA error: invalid resource handle")
        assert self.at is not None
        assert end_event.at is not None
        return (end_event.at - self.at) / MS

    def synchronize(self) -> None:
        self._device.wait_for(self, "Event.synchronize")


class Block:
    """One allocation of device memory."""

    def __init__(self, storage: torch.UntypedStorage, pool: Pool, what: str) -> None:
        self.ref = StorageWeakRef(storage)
        self.pool = pool
        self.what = what
        self.size = pool.take(storage.nbytes())
        self.written: tuple[Stream, int] | None = None
        self.uses: Seen = dict(pool.unordered)
        """The last use on each stream since the last write; at first those of what was in this memory before."""
        self.inherits = bool(self.uses)
        self.recorded: set[Stream] = set()
        self.content: Tensor | None = None


class Pool:
    """The caching allocator's memory of one stream (docs.pytorch.org: notes/cuda, "Memory management").

    A freed block can be handed out again to the same stream at once, in stream order. A block that ``record_stream``
    was called for waits until the other stream is past the point at which it was freed.
    """

    def __init__(self, device: SimulatedDevice, stream: Stream) -> None:
        self._device = device
        self.stream = stream
        self.unordered: Seen = {}
        """Uses of freed blocks that the allocator does not wait for."""
        self._free: list[int] = []
        self._pending: list[tuple[int, int]] = []
        self.reserved = 0
        """Bytes taken from the device; never given back, as torch does not until memory is short."""

    def take(self, size: int) -> int:
        """A block for ``size`` bytes; returns the bytes that it has."""
        now = self._device.now
        self._free += [size for size, until in self._pending if until <= now]
        self._pending = [(size, until) for size, until in self._pending if until > now]
        fits = min((each for each in self._free if size <= each <= 2 * size), default=None)
        if fits is None:
            self.reserved += size
            return size
        self._free.remove(fits)
        return fits

    def give_back(self, block: Block) -> None:
        uses = dict(block.uses)
        if block.written is not None:
            join(uses, dict([block.written]))
        join(self.unordered, {stream: number for stream, number in uses.items() if stream not in block.recorded})
        if block.recorded:
            self._pending.append((block.size, max(stream.free_at for stream in block.recorded)))
        else:
            self._free.append(block.size)


class Chosen(threading.local):
    """What one thread has chosen: its current device, and a current stream for each device."""

    def __init__(self, defaults: list[Stream]) -> None:
        self.index = 0
        self.streams = [*defaults]


class Follower(TorchDispatchMode):
    """Makes a device see the operations of one more thread: a mode is for the thread that enters it."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        return self._device.__torch_dispatch__(func, types, args, kwargs)


class SimulatedDevice(TorchDispatchMode):
    """The devices, their module, and the host's clock.

    Args:
        copy_bytes_per_ms: of the link to the host.
        launch_ns: what a kernel launch costs the host.
    """

    def __init__(self, *, copy_bytes_per_ms: float = float("inf"), launch_ns: int = 0) -> None:
        super().__init__()
        self.now = 1_000 * MS
        """The host's clock."""
        self.host_seen: Seen = {}
        self.defaults = [Stream(self, "compute", index) for index in range(DEVICES)]
        """The default stream of each device."""
        self.compute = self.defaults[0]
        self.races: list[str] = []
        self.waits: list[Wait] = []
        self.copied: list[tuple[Stream, Span]] = []
        """When the copy engine was at work, and for which stream."""
        self.kernels = self.copies = self.events = self.waited = self.registrations = 0
        self._copy_bytes_per_ms = copy_bytes_per_ms
        self._launch_ns = launch_ns
        self._numbers = count(1)
        self._streams = [
            cycle([Stream(self, f"side {number}", index) for number in range(POOL)]) for index in range(DEVICES)
        ]
        self._chosen = Chosen(self.defaults)
        self._home = threading.get_ident()
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}
        self._pools: dict[Stream, Pool] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.registered: dict[int, int] = {}
        """Bytes of page-locked memory that torch's allocator does not manage, by their address."""
        self._copying_until = [0] * DEVICES
        self._queued: deque[int] = deque(maxlen=LAUNCH_QUEUE)
        self._captures = False
        self._sync_debug_mode = 0

    # --- the device module --------------------------------------------------------------------------------------------

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # torch's name
        return next(self._streams[self._index_of(device)])

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> Event:  # torch's name
        self.events += 1
        return Event(self, enable_timing=enable_timing)

    def current_device(self) -> int:
        return self._index

    def set_device(self, device: Any) -> None:
        self._chosen.index = self._index_of(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        before, self._chosen.index = self._index, self._index_of(device)
        try:
            yield
        finally:
            self._chosen.index = before

    def current_stream(self, device: Any = None) -> Stream:
        return self._chosen.streams[self._index_of(device)]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Makes the stream's device the current one, too (torch/cuda/__init__.py, StreamContext)."""
        followed = nullcontext() if threading.get_ident() == self._home else Follower(self)
        with self.device(stream.index), followed:
            before = self._current
            self._chosen.streams[stream.index] = stream
            try:
                yield
            finally:
                self._chosen.streams[stream.index] = before

    @contextmanager
    def graph(self) -> Iterator[None]:
        """While entered a graph is captured: work on the current stream is only recorded, and nothing else may run."""
        self._captures = True
        capturing = self._current
        before = self.copies, len(self.waits)
        try:
            yield
        finally:
            self._captures = False
        if (self.copies, len(self.waits)) != before or self._current is not capturing:
            self._say("a copy or a wait was issued while a graph was captured")

    def is_current_stream_capturing(self) -> bool:
        return self._captures

    def is_initialized(self) -> bool:
        return True

    def get_sync_debug_mode(self) -> int:
        return self._sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        """Torch's modes by number and name (torch/cuda/__init__.py)."""
        self._sync_debug_mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    def synchronize(self, device: Any = None) -> None:
        index = self._index_of(device)
        for stream in {self.defaults[index], self._chosen.streams[index], *self._pools}:
            if stream.index == index:
                self.wait_for(stream.record_event(), "synchronize")

    # --- the host -----------------------------------------------------------------------------------------------------

    def clock(self) -> int:
        return self.now

    def host(self, ms: float) -> None:
        """The host is busy or blocked."""
        self.now += round(ms * MS)

    def wait_for(self, event: Event, what: str) -> None:
        """The host waits for an event."""
        assert event.at is not None
        if self._sync_debug_mode and what not in NOT_CHECKED:
            if self._sync_debug_mode == 2:
                raise RuntimeError("called a synchronizing CUDA operation")
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        blocked_ns = max(0, event.at - self.now)
        self.waits.append(Wait(what, blocked_ns, _caller()))
        self.waited += 1
        self.now += blocked_ns
        join(self.host_seen, event.seen)

    def pin(self, tensor: Tensor) -> Tensor:
        """From here on the memory of a host tensor is page-locked."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        ref = self._pinned.get(tensor.untyped_storage()._cdata)
        if ref is not None and not ref.expired():
            return True
        return not tensor.is_meta and any(
            start <= tensor.data_ptr() < start + size for start, size in self.registered.items()
        )

    def register(self, address: int, size: int) -> bool:
        """As ``cudaHostRegister``; says that it was done."""
        self.registered[address] = size
        self.registrations += 1
        return True

    def event(self) -> Event:
        """A timing event."""
        return self.Event(enable_timing=True)

    def meter(self, keep: Callable[[StepTimes], Any], *, size: int = 512) -> StepMeter:
        """A step meter over this device."""
        return StepMeter(keep, clock=self.clock, ring=EventRing(self.event, size))

    # --- work ---------------------------------------------------------------------------------------------------------

    def launch(self, ms: float = 0.0, *, what: str = "kernel", reads: Any = (), writes: Any = ()) -> None:
        """Queue a kernel on the current stream; the host goes on at once."""
        self._reap()
        self.now += self._launch_ns
        if len(self._queued) == LAUNCH_QUEUE:
            self.now = max(self.now, self._queued[0])
        self._touch(what, self._current, _on_device(reads), _on_device(writes))
        self._queued.append(self._current.run(round(ms * MS)))
        self.kernels += 1

    def decode(self, shapes: Iterable[tuple[int, ...]], ms: float = 0.0) -> tuple[list[Tensor], Event]:
        """As nvJPEG in torchvision and torchcodec: allocates on the current stream, and writes on none that waits for
        it. Returns the images, and the event after them."""
        made = [torch.empty(shape, dtype=torch.uint8, device=DEVICE) for shape in shapes]
        decoder = Stream(self, "decoder", self._index)  # a new one has waited for nothing
        self._touch("decode", decoder, [], made)
        decoder.run(round(ms * MS))
        return made, decoder.record_event()

    def memory_bytes(self, stream: Stream | None = None) -> int:
        """Bytes that the allocator has taken from the device, for all streams or for one."""
        return sum(pool.reserved for pool in self._pools.values() if stream in (None, pool.stream))

    def content(self, tensor: Tensor) -> Tensor:
        """The values that a tensor got from the host, as they were when its copy was queued."""
        content = self._block(tensor).content
        assert content is not None, "it was not copied from the host"
        whole = content.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Torch has a kernel for CUDA, XPU and MPS only (aten/src/ATen/native/native_functions.yaml)."""
        if tensor.device.type != DEVICE.type:
            raise NotImplementedError(
                f"Could not run 'aten::record_stream' with arguments from the '{tensor.device.type.upper()}' backend."
            )
        block = self._block(tensor)
        if stream is not block.pool.stream:
            block.recorded.add(stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        with self._lock:
            return self._dispatch(func, types, args, dict(kwargs or {}))

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if _is_composite(func):
            with self:  # under inference mode operations come here that are made of others
                done = func.decompose(*args, **kwargs)
            if done is not NotImplemented:
                return done
        ins = _on_device((args, kwargs))
        index = self._device_of(ins, kwargs.get("device"))
        if index != self._index:
            with self.device(index):
                return self._dispatch(func, types, args, kwargs)
        pin = kwargs.pop("pin_memory", None)
        name = _name(func)
        looked = self._look(name, func, args, kwargs, ins) if ins else NotImplemented
        if looked is not NotImplemented:
            return looked
        if name.startswith(SCALES_GRADIENTS):
            out = args[0] if func._schema.returns else None
        else:
            out = func(*args, **kwargs)
        if pin:
            self.pin(out)
        outs = _on_device(out)
        if not (ins or outs) or _is_view(func):
            return out
        self._reap()
        if name.startswith(ALLOCATES):
            self._allocate(name, outs)
            return out
        written = _on_device(
            [args[place] if place < len(args) else kwargs.get(argument) for place, argument in _written(func)]
        )
        written += _on_device([args[place] for place in WRITES_UNMARKED.get(name, ()) if len(args) > place])
        self._allocate(name, outs)
        source = args[1] if name.startswith("aten.copy_") else args[0] if args else None
        if (
            isinstance(source, Tensor)
            and source.device.type == "cpu"
            and name.startswith(("aten._to_copy", "aten.copy_"))
        ):
            self._from_host(name, source, outs, _is_non_blocking(name, args, kwargs))
        else:
            self.launch(what=name, reads=ins, writes=[*written, *outs])
        return out

    # --- details ------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return self._chosen.index

    @property
    def _current(self) -> Stream:
        return self._chosen.streams[self._index]

    def _index_of(self, device: Any) -> int:
        """A number, a device or its name; the current device where there is no number."""
        index = device if device is None or isinstance(device, int) else torch.device(device).index
        return self._index if index is None else index

    def _device_of(self, ins: list[Tensor], device: Any) -> int:
        """The device of an operation: that of its tensors, else the one that it names."""
        blocks = [self._blocks.get(each.untyped_storage()._cdata) for each in ins]
        indices = {block.pool.stream.index for block in blocks if block is not None and not block.ref.expired()}
        if device is not None and torch.device(device).type == DEVICE.type and torch.device(device).index is not None:
            indices.add(torch.device(device).index)
        if len(indices) > 1:
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices.")
        return indices.pop() if indices else self._index

    def _from_host(self, name: str, source: Tensor, outs: list[Tensor], non_blocking: bool) -> None:
        stream = self._current
        pageable = not self.is_pinned(source)
        if pageable:
            self.wait_for(stream.record_event(), "a copy from pageable memory")
        self._touch(name, stream, [], outs)
        for each in outs:
            whole = each.numel() * each.element_size() == each.untyped_storage().nbytes()
            self._block(each).content = source.detach().to(each.dtype).clone() if whole else None
        duration = round(source.nbytes / self._copy_bytes_per_ms * MS)
        ended = stream.run(duration, begin_at=self._copying_until[stream.index])
        self._copying_until[stream.index] = ended
        self.copied.append((stream, (ended - duration, ended)))
        self.copies += 1
        if not non_blocking:
            self.wait_for(stream.record_event(), "a blocking copy")
        elif pageable:
            # The host is busy as long, but nothing promises that the copy is over then: it is not ordered by that.
            self.now = max(self.now, stream.free_at)

    def _look(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], ins: list[Tensor]) -> Any:
        """What the host gets of an operation that brings values to it; NotImplemented for all others."""
        if name.startswith(READS_VALUES):
            return self._read_values(name, func, args, ins)
        target = kwargs.get("device")
        if name.startswith("aten._to_copy") and target is not None and torch.device(target).type == "cpu":
            self._wait_on_current("a copy to the host", ins)
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cpu")
        if name.startswith("aten.copy_") and args[0].device.type == "cpu":
            self._wait_on_current("a copy to the host", ins)
            return args[0]
        return NotImplemented

    def _read_values(self, name: str, func: Any, args: Any, ins: list[Tensor]) -> Any:
        self._wait_on_current(name, ins)
        if name.startswith("aten._local_scalar_dense"):
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if name.startswith("aten.equal"):
            return True
        return func(*(torch.zeros_like(each, device="cpu") if isinstance(each, Tensor) else each for each in args))

    def _wait_on_current(self, what: str, reads: list[Tensor]) -> None:
        self.launch(what=what, reads=reads)
        self.wait_for(self._current.record_event(), what)

    def _block(self, tensor: Tensor) -> Block:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = Block(storage, self._pool(self._current), "made elsewhere")
        return self._blocks[storage._cdata]

    def _pool(self, stream: Stream) -> Pool:
        return self._pools.setdefault(stream, Pool(self, stream))

    def _allocate(self, name: str, outs: list[Tensor]) -> None:
        for each in outs:
            storage = each.untyped_storage()
            if storage._cdata not in self._blocks:
                pool = self._pool(self._current)
                self._blocks[storage._cdata] = Block(storage, pool, f"{name} on {self._current.name}")

    def _reap(self) -> None:
        for key, block in list(self._blocks.items()):
            if block.ref.expired():
                del self._blocks[key]
                block.pool.give_back(block)

    def _touch(self, what: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Check the order of an operation against those before it, and note it."""
        with self._lock:
            self._check(what, stream, reads, writes)

    def _check(self, what: str, stream: Stream, reads: list[Tensor], writes: list[Tensor]) -> None:
        join(stream.seen, self.host_seen)
        number = next(self._numbers)
        writing = {id(block): block for block in map(self._block, writes)}
        reading = {id(block): block for block in map(self._block, reads)}
        for block in {**reading, **writing}.values():
            earlier = dict(block.uses) if id(block) in writing or block.inherits else {}
            if block.written is not None:
                join(earlier, dict([block.written]))
            late = sorted(
                other.name
                for other, last in earlier.items()
                if other is not stream and stream.seen.get(other, 0) < last
            )
            if late:
                how = "memory handed out again" if block.inherits else "used"
                self._say(f"{what} on {stream.name}: [{block.what}] {how} without waiting for {', '.join(late)}")
        stream.seen[stream] = number
        for block in reading.values():
            block.uses[stream] = number
        for block in writing.values():
            block.written = (stream, number)
            block.uses = {}
            block.inherits = False

    def _say(self, text: str) -> None:
        if text not in self.races:
            self.races.append(text)


@contextmanager
def simulated(device: SimulatedDevice) -> Iterator[SimulatedDevice]:
    """While entered, ``meta`` is an accelerator: torch's device module, and a backend that prefetching, pinning and
    decoding know."""
    from lightning_feed.load import copy_fence, recommend, slot_loaders, slots
    from lightning_feed.machine import limits
    from lightning_feed.measure import loader_code
    from lightning_feed.measure import step_meter as clocks

    with _patched() as patch:
        find = torch.get_device_module

        def get_device_module(which: Any = None) -> Any:
            return device if which is not None and torch.device(which).type == DEVICE.type else find(which)

        patch(torch, "get_device_module", get_device_module)
        patch(torch.Tensor, "record_stream", lambda tensor, stream: device.record_stream(tensor, stream))
        patch(torch.Tensor, "is_pinned", lambda tensor: device.is_pinned(tensor))
        patch(torch.Tensor, "pin_memory", lambda tensor: device.pin(tensor.clone()))
        make = torch.tensor

        def tensor(
            data: Any, *, pin_memory: bool = False, **options: Any
        ) -> Tensor:  # pins before any mode hears of it
            made = make(data, **options)
            return device.pin(made) if pin_memory else made

        patch(torch, "tensor", tensor)
        patch(loader_code, "_TORCH", (*loader_code._TORCH, __file__))  # its frames stand for torch's own
        for module in (streams, clocks):
            if hasattr(module, "STREAM_BACKENDS"):
                patch(module, "STREAM_BACKENDS", (*streams.STREAM_BACKENDS, DEVICE.type))
        for module, name in ((limits, "DECODING_BACKENDS"), (recommend, "PINNING_DEVICES")):
            patch(module, name, (*getattr(module, name), DEVICE.type))
        patch(limits, "STREAM_BACKENDS", (*limits.STREAM_BACKENDS, DEVICE.type))
        patch(slot_loaders, "can_register", lambda: True)
        patch(slots, "_register", device.register)
        patch(slots, "_unregister", device.registered.pop)
        patch(copy_fence.CopyFence.__init__, "__defaults__", (device,))
        defaults = dict(StepMeter.__init__.__kwdefaults__ or {})
        patch(StepMeter.__init__, "__kwdefaults__", {**defaults, "clock": device.clock})
        with device:
            yield device
        for memory in slots.memories():  # the driver has nothing to forget of those that outlive this device
            if memory.registers:
                memory._registered.clear()


@contextmanager
def _patched() -> Iterator[Callable[[Any, str, Any], None]]:
    import pytest

    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch.setattr


def join(seen: Seen, other: Seen) -> Seen:
    """Let ``seen`` know what ``other`` knows."""
    for stream, number in [*other.items()]:  # another thread may add to it meanwhile
        seen[stream] = max(seen.get(stream, 0), number)
    return seen


def outside(span: Span, busy: Iterable[Span]) -> int:
    """Nanoseconds of ``span`` that lie in none of ``busy``, which do not overlap."""
    start, end = span
    return (end - start) - sum(max(0, min(end, until) - max(start, since)) for since, until in busy)


# What follows is called for each operation, so it is written for speed.
PLAIN = (int, float, str, type(None), torch.dtype, torch.device)


def _on_device(values: Any) -> list[Tensor]:
    there: list[Tensor] = []
    _collect(values, there)
    return there


def _collect(value: Any, there: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        if value.is_meta:
            there.append(value)
    elif type(value) in (tuple, list):
        for element in value:
            _collect(element, there)
    elif type(value) is dict:
        for element in value.values():
            _collect(element, there)
    elif not isinstance(value, PLAIN):
        there += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_meta]


@cache
def _name(func: Any) -> str:
    return str(func)


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@cache
def _is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Place and name of each argument that the operation writes to."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _is_non_blocking(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    given = args[2] if name.startswith("aten.copy_") and len(args) > 2 else kwargs.get("non_blocking", False)
    return bool(given)


def _caller() -> str:
    """Where outside of this file and of torch the host was when it had to wait."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.endswith("simulated/device.py"):
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
