"""What is done to a batch around its transfer: keys dropped or held back, small tensors copied as one."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_feed.load.collate import drop, missing_keys
from lightning_feed.load.trace import traced
from lightning_feed.transfer.batch_tree import hold, map_tensors, release
from lightning_feed.transfer.prefetcher import SideStream

SMALL_BYTES = 64 * 1024
"""Tensors up to this size are packed. A larger one keeps the bus busy longer than it takes the host to ask for it."""
AT_LEAST = 8
"""Small tensors that a batch must have."""
ALIGN_BYTES = 128
"""Where a tensor may begin in the buffer: a whole number of every element, and of what vectorised kernels load."""

DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Those that every version of torch can concatenate and view."""

_pads: dict[tuple[torch.dtype, int], Tensor] = {}
"""Fillers between two tensors; a constant of each dtype and length, so nothing grows beyond a few kB."""


def small_tensors(batch: Any) -> list[Tensor]:
    """The tensors of ``batch`` that can be packed, in the order of a walk through its plain containers.

    Those are dense, contiguous tensors on the host, of torch's own class and without a gradient. All others are left to
    the ordinary transfer, which knows what to do with them.
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if _is_small(tensor):
            found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def pack(batch: Any, small: list[Tensor], send: Callable[[Tensor], Tensor], *, pin: bool) -> Any:
    """``batch`` with its small tensors on the device; everything else is where it was.

    The packed tensors have the values, dtypes and shapes of the originals, and each has a version count of its own, so
    that autograd does not take a write to one for a write to another. But they lie in one piece of device memory,
    which lives as long as any of them, and which ``torch.save`` of one of them would save whole.

    Args:
        batch: a host batch.
        small: what :func:`small_tensors` found in it.
        send: issues the copy of one tensor of bytes to the device, without waiting.
        pin: make the buffer of page-locked memory. Its owner is torch's caching host allocator, which hands it out
            again only when the copies from it are over, so it need not be kept here.
    """
    with traced("pack_small"):
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(small):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        regions: list[tuple[torch.dtype, list[int], list[Tensor], list[int], int]] = []
        start = 0
        for dtype, members in by_dtype.items():
            pieces: list[Tensor] = []
            lengths: list[int] = []
            step = ALIGN_BYTES // dtype.itemsize
            for index in members:
                flat = small[index]
                if flat.dim() != 1:
                    flat = flat.view(-1)
                length = len(flat)
                filler = -length % step
                pieces += (flat, _pad(dtype, filler))
                lengths += (length, filler)
            regions.append((dtype, members, pieces, lengths, start))
            start += sum(lengths) * dtype.itemsize
        host = torch.empty(start, dtype=torch.uint8, device="cpu", pin_memory=pin)
        for dtype, _, pieces, lengths, begin in regions:
            torch.cat(pieces, out=_typed(host, dtype, begin, lengths))
    device = send(host)
    with traced("unpack_small"):
        sent: list[Any] = [None] * len(small)
        for dtype, members, _, lengths, begin in regions:
            flats = _typed(device, dtype, begin, lengths).split_with_sizes(lengths)[::2]
            for index, flat in zip(members, flats, strict=True):
                shape = small[index].shape
                # `.data`: views of one tensor share its version count, and autograd would refuse a backward pass.
                sent[index] = (flat if len(shape) == 1 else flat.view(shape)).data
        coming, packed = iter(sent), set(map(id, small))
        return map_tensors(batch, lambda tensor: next(coming) if id(tensor) in packed else tensor)


def _is_small(tensor: Tensor) -> bool:
    # Asked of every tensor of every batch. `is_cpu` and `nbytes` make no objects, as `device.type` does.
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and 0 < tensor.nbytes <= SMALL_BYTES
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        and tensor.dtype in DTYPES
    )


def _typed(buffer: Tensor, dtype: torch.dtype, begin: int, lengths: list[int]) -> Tensor:
    return buffer[begin : begin + sum(lengths) * dtype.itemsize].view(dtype)


def _pad(dtype: torch.dtype, length: int) -> Tensor:
    pad = _pads.get((dtype, length))
    if pad is None:
        pad = _pads[dtype, length] = torch.zeros(length, dtype=dtype, device="cpu")
    return pad


WARM_UP = 2
"""Batches of each way that are not counted: the first ones allocate the buffers."""
ROUNDS = 5
"""Batches of each way that are."""


class PackTrial:
    """Takes turns between the two ways until each was timed often enough, then stays with the cheaper one.

    A way's price is the time of the host plus that of the copying stream, medians over its batches. The device's time
    is read from events that have passed already; until they have, batches go unpacked, and nothing waits.

    Args:
        clock: the host's time in nanoseconds.
        stamp: puts a timing event on the copying stream; gives None where there is no device clock.
    """

    def __init__(self, clock: Callable[[], int], stamp: Callable[[], Any]) -> None:
        self._clock, self._stamp = clock, stamp
        self._timed: dict[bool, list[tuple[int, Any, Any]]] = {False: [], True: []}
        """Nanoseconds of the host, and the stamps before and behind a batch, by whether it was packed."""
        self.packs: bool | None = None
        """Whether packing pays; None as long as that is not known."""
        self.figures = ""
        """What was measured, for people."""

    def run(self, ways: dict[bool, Callable[[], Any]]) -> Any:
        """Send one batch, in the way whose turn it is.

        Args:
            ways: what sends the batch packed (True), and what sends it as it is (False).
        """
        if self.packs is None:
            self._settle()
        if self.packs is not None:
            return ways[self.packs]()
        packed = len(self._timed[True]) < len(self._timed[False])
        if not packed and len(self._timed[False]) >= WARM_UP + ROUNDS:
            return ways[False]()  # the device has not come to the last one yet
        first, began = self._stamp(), self._clock()
        sent = ways[packed]()
        self._timed[packed].append((self._clock() - began, first, self._stamp()))
        return sent

    def _settle(self) -> None:
        plain, packed = (self._timed[way][WARM_UP:] for way in (False, True))
        if len(packed) < ROUNDS or not all(last is None or last.query() for _, _, last in plain + packed):
            return
        prices, said = [], []
        for way, timed in (("packed", packed), ("one by one", plain)):
            host = median(host_ns for host_ns, _, _ in timed)
            on_stream = [first.elapsed_time(last) * 1e6 for _, first, last in timed if last is not None]
            device = median(on_stream) if on_stream else 0.0
            prices.append(host + device)
            on_device = f" + {device / 1e3:.0f} us of copying" if on_stream else ""
            said.append(f"{way} {host / 1e3:.0f} us of the host{on_device}")
        self.packs = prices[0] < prices[1]
        self.figures = f"{', '.join(said)} (medians of {ROUNDS} batches)"
        self._timed = {False: [], True: []}


PackSmall = bool | Literal["auto"]


class LeanTransfer:
    """Drops keys, holds keys back, and packs small tensors, around whatever copies a batch.

    Args:
        drop_keys: left out; see :func:`lightning_feed.load.collate.drop`.
        host_keys: kept from the copy.
        pack_small: pack small tensors always, never, or where that was measured to be cheaper.
        warn: takes what the user should know of, at most once each.
        tell: takes what was measured.
    """

    def __init__(
        self,
        *,
        drop_keys: frozenset[str],
        host_keys: frozenset[str],
        pack_small: PackSmall,
        warn: Callable[[str], object],
        tell: Callable[[str], object],
    ) -> None:
        self._drop, self._held, self._pack_small = drop_keys, host_keys, pack_small
        self._warn, self._tell = warn, tell
        self._looked = False
        self._trials: dict[str, PackTrial] = {}

    def look(self, batch: Any) -> None:
        """Warn, once, of keys to drop that a first batch does not have."""
        if not self._looked:
            self._looked = True
            absent = missing_keys(batch, self._drop)
            if absent is not None:
                self._warn(absent)

    def send(self, batch: Any, copy: Callable[[Any], Any]) -> Any:
        """The batch as ``copy`` makes it of what is left; held values come back untouched."""
        left = drop(batch, self._drop) if self._drop else batch
        return release(copy(hold(left, self._held))) if self._held else copy(left)

    def send_packed(
        self, batch: Any, copy: Callable[[Any], Any], *, device: torch.device, stream: SideStream, stage: str
    ) -> Any:
        """The same, with small tensors packed where that pays. Called while ``stream`` is the current one.

        Args:
            batch: a host batch.
            copy: host batch -> device batch; tensors that are on the device already stay as they are.
            device: where to.
            stream: where the copies are issued.
            stage: each has batches of its own kind, so each is measured for itself.
        """

        def packing(left: Any) -> Any:
            trial = None
            if self._pack_small == "auto":
                trial = self._trials.setdefault(stage, PackTrial(time.perf_counter_ns, stream.stamp))
                if trial.packs is False:
                    return copy(left)
            small = small_tensors(left)
            if len(small) < AT_LEAST:
                return copy(left)

            def packed() -> Any:
                pin = device.type != "cpu"
                return copy(pack(left, small, lambda host: host.to(device, non_blocking=True), pin=pin))

            if trial is None or trial.packs:
                return packed()
            sent = trial.run({True: packed, False: lambda: copy(left)})
            if trial.packs is not None:
                does = "are packed into one copy" if trial.packs else "are copied one by one"
                self._tell(f"The {len(small)} small tensors of a batch ({stage}) {does} from now on: {trial.figures}.")
            return sent

        return self.send(batch, packing if self._pack_small else copy)
