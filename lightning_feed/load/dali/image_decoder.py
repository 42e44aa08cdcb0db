"""A decoder of encoded batches behind a loader: DALI decodes them, some ahead, and the host what DALI cannot."""

import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_feed.decode.header import JPEG, PNG, WEBP, Encoded, ends_like_jpeg, jpeg_header, kind_of, png_bit_depth
from lightning_feed.errors import DatasetError, DecodeError, LoaderError
from lightning_feed.load.bad_samples import Skipped, fill_skipped
from lightning_feed.load.crop import CropSpec
from lightning_feed.load.dali.binding import FAILURES, reason_of, release_unused_memory
from lightning_feed.load.dali.image_pipeline import ImagePipeline, PipelineSpec, stand_in
from lightning_feed.load.image_dataset import EncodedBatch, EncodedSample, ImageDataset
from lightning_feed.load.trace import traced

_NO_MEMORY = ("out of memory", "can't allocate", "bad_alloc", "allocation failed", "insufficient memory")
"""How DALI says that there is none left, in small letters (in the libraries of 2.4.0)."""
_HEADERS = 64
"""Images whose headers are read, where it was not said how large the largest is."""


@dataclass(eq=False)
class _Waiting:
    """A batch that was taken from the loader and has not been handed out."""

    batch: EncodedBatch
    images: list[EncodedSample]
    on_host: dict[int, str]
    """Places of images that DALI is not given, and why."""
    fed: bool = False

    def given(self) -> list[tuple[Encoded, CropSpec]]:
        given: list[tuple[Encoded, CropSpec]] = [(image.data, image.crop) for image in self.images]
        for place in self.on_host:
            given[place] = stand_in(self.images[place].crop)
        return given


@dataclass(eq=False)
class _Pass:
    """One pass over a loader."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    failure: Exception | None = None
    """What the loader raised in the place of its next batch."""


class DaliImageDecoder:
    """Decodes the batches of one loader with a pipeline that is built when the first of them comes.

    An image that DALI fails at ends its pipeline. The image is then found and left to the host, which names it in its
    error or puts in its place what ``on_error`` says; the batches that were on their way go through a new pipeline, so
    that none is lost or doubled.

    Args:
        dataset: that the batches are from.
        spec: of the pipeline. Its batch size grows to that of the largest batch that comes.
        keep: whether the pipeline outlives its pass.
        pin: whether batches in host memory are to lie in page-locked memory.
    """

    def __init__(self, dataset: ImageDataset, spec: PipelineSpec, *, keep: bool, pin: bool = False) -> None:
        self.dataset, self.spec = dataset, spec
        self.keep = keep
        self.pin = pin
        self.built = 0
        """Pipelines that were built so far."""
        self._pipeline: ImagePipeline | None = None

    @property
    def active(self) -> bool:
        """Whether there is a pipeline, which holds memory and threads."""
        return self._pipeline is not None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipeline": None}

    def run(self, batches: Iterator[EncodedBatch]) -> Generator[Any, None, None]:
        """Decode one pass: [images, labels] for each batch, in order.

        Raises:
            DatasetError: when an image cannot be decoded and ``on_error`` does not deal with it, with its name.
            LoaderError: when DALI fails and no image is at fault.
            torch.OutOfMemoryError: when the device has no memory left for it.
        """
        now = _Pass()
        try:
            while True:
                self._take_ahead(now, batches)
                if now.waiting:
                    yield self._next(now)
                elif isinstance(now.failure, StopIteration):
                    return
                elif now.failure is not None:
                    raise now.failure
        finally:
            self._leave(now)

    def release(self) -> None:
        """Drop the pipeline and its memory. A pass that goes on builds another."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            pipeline.close()
            release_unused_memory()

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _take_ahead(self, now: _Pass, batches: Iterator[EncodedBatch]) -> None:
        while now.failure is None and len(now.waiting) < self.spec.prefetch:
            try:
                batch = next(batches)
            except Exception as error:  # noqa: BLE001 - raised after the batches before it
                now.failure = error
            else:
                images = batch.images()
                now.waiting.append(_Waiting(batch, images, self._reasons(images)))
                self._advance(now)

    def _advance(self, now: _Pass) -> ImagePipeline:
        """A pipeline that all batches of the pass are on their way in."""
        size = max(len(waiting.images) for waiting in now.waiting)
        pipeline = self._pipeline
        if pipeline is None or pipeline.owner is not now or size > pipeline.spec.batch_size:
            pipeline = self._acquire(now, size)
            for waiting in now.waiting:
                waiting.fed = False
        for waiting in now.waiting:
            if not waiting.fed:
                files, cuts = zip(*waiting.given(), strict=True)
                pipeline.feed(files, cuts)
                waiting.fed = True
        return pipeline

    def _next(self, now: _Pass) -> list[Any]:
        with traced("decode"):
            images = self._taken(now)
            done = now.waiting.popleft()
            labels = done.batch.labels
            if done.on_host:
                images, labels = self._put_host_images(images, done)
            if self.pin and images.device.type == "cpu":
                images, labels = (part if part.is_pinned() else part.pin_memory() for part in (images, labels))
            return [images, labels.to(images.device, non_blocking=True)]

    def _taken(self, now: _Pass) -> Tensor:
        """The pixels of the first batch that waits, with stand-ins for the images that DALI is not given."""
        while True:
            pipeline = self._advance(now)
            try:
                return pipeline.take()
            except FAILURES as error:
                self.release()
                self._raise_if_no_memory(error)
                self._locate_failure(now, error)

    def _locate_failure(self, now: _Pass, error: Exception) -> None:
        """Find the images that DALI failed at, and leave them to the host from now on.

        Raises:
            LoaderError: when there are none.
        """
        images = [
            image for waiting in now.waiting for k, image in enumerate(waiting.images) if k not in waiting.on_host
        ]
        found = self._fail_alone(images)
        if not found:
            raise LoaderError(
                f"DALI failed at a batch of {len(now.waiting[0].images)} images, and decodes each of them alone. It "
                f"said: {reason_of(error)}"
            ) from error
        self.dataset.cpu_fallback.known.update(found)
        for waiting in now.waiting:
            waiting.on_host = self._reasons(waiting.images)

    def _fail_alone(self, images: list[EncodedSample]) -> dict[int, str]:
        """Those that DALI fails at, and why, by their index in the dataset."""
        found: dict[int, str] = {}
        pipeline = None
        for image in images:
            if pipeline is None:
                pipeline = self._build(replace(self.spec, batch_size=1, prefetch=1))
            try:
                pipeline.feed([image.data], [image.crop])
                pipeline.take()
            except FAILURES as error:
                pipeline.close()
                pipeline = None
                self._raise_if_no_memory(error)
                found[image.index] = f"DALI failed at it: {reason_of(error)}"
        if pipeline is not None:
            pipeline.close()
        return found

    def _raise_if_no_memory(self, error: Exception) -> None:
        """Memory that is short is no image's fault, and to decode them one by one would hide it."""
        if not any(text in str(error).lower() for text in _NO_MEMORY):
            return
        advice = "Use a smaller batch_size, DaliOptions(prefetch=1) or fewer DaliOptions(threads=...)."
        if self.spec.device.type == "cuda":  # as torch says it: batch size finders look for this
            raise torch.OutOfMemoryError(f"CUDA out of memory: DALI said: {reason_of(error)} {advice}") from error
        raise LoaderError(f"DALI has not enough memory. It said: {reason_of(error)} {advice}") from error

    # --- images that DALI is not given --------------------------------------------------------------------------------

    def _reasons(self, images: Sequence[EncodedSample]) -> dict[int, str]:
        """Which of a batch's images are not given to DALI, by their place, and why."""
        known = self.dataset.cpu_fallback.known
        reasons = {place: known.get(image.index) or why_on_host(image.data) for place, image in enumerate(images)}
        return {place: reason for place, reason in reasons.items() if reason}

    def _put_host_images(self, batch: Tensor, done: _Waiting) -> tuple[Tensor, Tensor]:
        """The batch with what the host decodes in its places, or what ``on_error`` puts there, and the labels.

        Raises:
            DatasetError: when one cannot be decoded and ``on_error`` does not deal with it, with its name.
        """
        # The outputs of DALI are its own memory, and may be read-only for us: what is changed is a copy.
        batch, labels = batch.clone(), done.batch.labels.clone()
        order: list[Any] = list(range(len(done.images)))
        for place, reason in done.on_host.items():
            index = done.images[place].index
            self.dataset.cpu_fallback.add(reason, f"{self.dataset.source.name(index)} (sample {index})")
            made = self.dataset.decoded(done.images[place])
            if isinstance(made, Skipped):
                order[place] = made
            else:
                pixels, labels[place] = made
                batch[place] = self._like(pixels, batch)
        if any(isinstance(place, Skipped) for place in order):
            kept = torch.tensor(fill_skipped(order), device="cpu")
            batch = batch[kept.to(batch.device)].contiguous(memory_format=torch.channels_last)
            labels = labels[kept.to(labels.device)]
        return batch, labels

    def _like(self, pixels: Tensor, batch: Tensor) -> Tensor:
        """Pixels of the host as the batch has them: normalised where it is of floats."""
        if batch.dtype == torch.uint8:
            return pixels
        values = pixels.to(batch.device).float() / 255
        spec = (self.spec.mean, self.spec.std)
        mean, std = (torch.tensor(numbers, device=batch.device).view(3, 1, 1) for numbers in spec)
        return ((values - mean) / std).to(batch.dtype)

    # --- the pipeline -------------------------------------------------------------------------------------------------

    def _acquire(self, now: _Pass, size: int) -> ImagePipeline:
        """The pipeline for a pass: empty, and large enough."""
        pipeline = self._pipeline
        if pipeline is not None and (size > pipeline.spec.batch_size or not _emptied(pipeline)):
            self.release()
            pipeline = None
        if pipeline is None:
            if self.spec.device.type == "cuda" and self.spec.largest_image is None:
                self.spec = replace(self.spec, largest_image=largest_of_some(self.dataset))
            self.spec = replace(self.spec, batch_size=max(size, self.spec.batch_size))
            pipeline = self._pipeline = self._build(self.spec)
            self.built += 1
        pipeline.owner = now
        return pipeline

    def _build(self, spec: PipelineSpec) -> ImagePipeline:
        try:
            return ImagePipeline(spec)
        except RuntimeError as error:
            self._raise_if_no_memory(error)
            raise LoaderError(
                f'DALI cannot build its pipeline: {reason_of(error)} See "lightning-feed doctor" for the driver and '
                'the CUDA of DALI, or use backend="torch".'
            ) from error

    def _leave(self, now: _Pass) -> None:
        """End a pass. What is on its way is dropped."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.owner is not now or pipeline.inherited:
            return  # another pass, or the process that this one was forked from, has it
        if sys.is_finalizing():
            return  # DALI has ended all pipelines, by its own exit handler
        pipeline.owner = None
        if not self.keep or not _emptied(pipeline):
            self.release()


def largest_of_some(dataset: ImageDataset) -> tuple[int, int] | None:
    """(height, width) of the largest of some images, spread over the dataset; None where none can be read."""
    sizes = []
    for index in range(0, len(dataset), max(1, len(dataset) // _HEADERS)):
        try:
            sizes.append(dataset.decoder.size(dataset.source.read(index)))
        except DatasetError:  # met again when it is its turn
            continue
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def _emptied(pipeline: ImagePipeline) -> bool:
    """Whether what was on its way could be dropped."""
    try:
        pipeline.drain()
    except FAILURES:  # of a batch that nobody waits for
        return False
    return True


def why_on_host(data: Encoded) -> str:
    """Why a file is not given to DALI; "" where it is.

    DALI makes other pixels than Pillow of 16 bits a channel, knows no GIF, and may decode what is there of a JPEG or a
    TIFF that is cut short. What nvJPEG makes of CMYK on the GPU is its own affair.
    """
    kind = kind_of(data)
    if kind == JPEG:
        try:
            components = jpeg_header(data).components
        except DecodeError:
            return "a JPEG without a frame header"
        if components == 4:
            return "a CMYK JPEG"
        return "" if ends_like_jpeg(data) else "a JPEG with something else at its end than the end of its image"
    if kind == PNG:
        return "" if png_bit_depth(data) < 16 else "a PNG of 16 bits a channel"
    return "" if kind in (WEBP, "BMP") else f"an image of the kind {kind}"
