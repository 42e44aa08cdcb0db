"""Decodes batches for a CUDA device in a thread of its own, ahead of training."""

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_feed.errors import SettingsError, refuses_unknown_fields
from lightning_feed.images.cpu_share import Balance, CpuShare, Seconds
from lightning_feed.images.device_decode import decode_batch, decode_on_cpu
from lightning_feed.images.image_dataset import EncodedBatch, ImageDataset
from lightning_feed.images.ragged_crop import Normalization
from lightning_feed.load.ahead import BackgroundIterator
from lightning_feed.load.copy_fence import register

DEPTH = 2
"""Decoded batches that wait for training, besides the one that is being decoded."""


@refuses_unknown_fields
@dataclass(frozen=True, kw_only=True)
class NvJpegOptions:
    """The nvJPEG backend with options of its own: ``backend=NvJpegOptions(cpu_share=0.25)``.

    Raises:
        SettingsError: the share is not between 0 and 1.
    """

    cpu_share: float | Literal["auto"] = "auto"
    """Share of the images that the workers decode. ``"auto"`` moves it during training to where the rate is highest.
    The two sides differ slightly in their pixels (docs/how-to/images.md), so a run can be repeated to the bit only with
    a fixed share; with ``torch.use_deterministic_algorithms(True)``, ``"auto"`` is 0. The workers decode in any case
    what nvJPEG cannot."""

    def __post_init__(self) -> None:
        share: object = self.cpu_share
        if share == "auto" or (isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1):
            return
        raise SettingsError(f"NvJpegOptions(cpu_share={share!r}): set a share from 0 to 1, or 'auto'.")


def fixed_share(options: object) -> float | None:
    """Return the share of images that workers decode; None if it adapts. With deterministic algorithms, it is 0.0."""
    if isinstance(options, NvJpegOptions) and options.cpu_share != "auto":
        return options.cpu_share
    return 0.0 if torch.are_deterministic_algorithms_enabled() else None


class _Decoded(NamedTuple):
    """A batch whose last kernels may still run."""

    parts: list[Tensor]
    ready: Any
    """The event after these kernels."""


class _Copier:
    """The stream on which a thread decodes, and copies parts of the batches that come from the workers.

    One object serves all passes of a loader: the caching allocator keeps a pool of memory for each stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = torch.get_device_module(device)
        self.stream = self.module.Stream(device, priority=-1)
        register(self)


class NvJpegDecoder:
    """Decodes the batches of one loader with nvJPEG, or on the CPU if that is the device.

    If workers make the batches, a thread decodes two batches ahead, on a stream of high priority: small kernels then do
    not wait behind those of the training step. Training only waits for an event. Batches that are made in the training
    process, by ``num_workers=0``, are decoded when they are asked for.

    Args:
        dataset: the dataset of the batches.
        device: the device.
        normalization: returns what to make of grey levels, on the device. None for uint8.
        shares: the share of the images that the workers decode.
        share: a fixed share, from 0 to 1; None to move it to where the rate is highest.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        device: torch.device,
        normalization: Callable[[], Normalization] | None,
        shares: CpuShare,
        share: float | None,
    ) -> None:
        self.dataset = dataset
        self.device = device
        self._normalization = normalization
        self._shares = shares
        self._share = share
        self._balance = Balance(shares)
        if share is not None:
            shares.share = share  # before the workers begin, so that it holds for the first batch, too

    def run(self, batches: Iterator[EncodedBatch], under_way: int) -> Generator[list[Tensor], None, None]:
        """Decode one pass: yield [images, labels] for each batch, in order. See :class:`BatchDecoder`.

        Raises:
            DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
            LoaderError: if nvJPEG decodes no file any more.
            torch.OutOfMemoryError: if the device is out of memory.
        """
        if self.device.type == "cpu":
            for batch in batches:
                yield decode_on_cpu(batch, self.dataset)
            return
        if not under_way:
            for batch in batches:
                yield self._decode(batch)
            return
        yield from self._ahead(batches, under_way)

    def _ahead(self, batches: Iterator[EncodedBatch], under_way: int) -> Generator[list[Tensor], None, None]:
        module = torch.get_device_module(self.device)
        thread = BackgroundIterator(self._in_thread(batches, under_way), DEPTH)
        try:
            for decoded in thread:
                current = module.current_stream(self.device)
                current.wait_event(decoded.ready)
                for part in decoded.parts:
                    part.record_stream(current)
                yield decoded.parts
                del decoded  # not held while the next batch is waited for
        finally:
            thread.close()

    def _in_thread(self, batches: Iterator[EncodedBatch], under_way: int) -> Iterator[_Decoded]:
        copier = self._copier
        asked_s = time.perf_counter()
        for batch in batches:
            came_s = time.perf_counter()
            with copier.module.stream(copier.stream):
                parts = self._decode(batch)
                decoded = _Decoded(parts, copier.stream.record_event())
            del batch, parts
            decoded_s = time.perf_counter()
            yield decoded
            del decoded
            seconds = Seconds(came_s - asked_s, decoded_s - came_s, time.perf_counter() - decoded_s)
            if self._share is None:
                self._balance.note(seconds, under_way)
            asked_s = time.perf_counter()

    @cached_property
    def _copier(self) -> _Copier:
        return _Copier(self.device)

    def _decode(self, batch: EncodedBatch) -> list[Tensor]:
        normalization = None if self._normalization is None else self._normalization()
        return decode_batch(batch, self.dataset, self.device, normalization=normalization)
