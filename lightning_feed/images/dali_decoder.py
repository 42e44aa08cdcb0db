"""Decodes batches from the loader with DALI, several batches ahead. Images that DALI cannot decode are decoded on the
host."""

import os
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_feed.errors import DatasetError, DecodeError, LoaderError
from lightning_feed.images import dali_binding as binding
from lightning_feed.images.crop import CropSpec
from lightning_feed.images.dali_binding import FAILURES, DaliOptions
from lightning_feed.images.decoders import Region
from lightning_feed.images.header import JPEG, PNG, WEBP, Encoded, ends_like_jpeg, jpeg_header, kind_of, png_bit_depth
from lightning_feed.images.image_dataset import EncodedBatch, EncodedSample, ImageDataset, decode_rest
from lightning_feed.load.stage import traced

STAND_IN = b"P6\n1 1\n255\n\x00\x00\x00"
"""A one-pixel image (PNM) that stands in for an image not passed to DALI."""
_DEVICE_BYTES_PER_PIXEL = 5.5
_HOST_BYTES_PER_PIXEL = 3.7
"""Sizes of the decoder's buffers, in bytes per pixel of the largest image. In DALI's ImageNet example
(docs/examples/use_cases/pytorch/resnet50/main.py) the largest image has 5980 x 6430 pixels; the paddings are 211025920
and 140544512 bytes: 5.49 and 3.66 bytes per pixel."""


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Settings of a pipeline."""

    batch_size: int
    """Largest batch size; a batch may have fewer images."""
    device: torch.device
    """The CPU, or a CUDA device with its index."""
    threads: int
    """CPU threads."""
    options: DaliOptions
    mean: tuple[float, ...]
    """Mean of R, G and B, for values in [0, 1]; the GPU normalises."""
    std: tuple[float, ...]
    half: bool
    """True for float16 from the GPU; else float32."""

    @property
    def on_gpu(self) -> bool:
        """True if a GPU decodes."""
        return self.device.type != "cpu"


class ImagePipeline:
    """Decodes batches in the order they are fed, up to ``prefetch`` at a time.

    The pipeline has no DALI reader, so that order, shards, resuming and random boxes stay under our control. On the CPU
    it returns uint8, on the GPU normalised float16 or float32, both of shape (B, 3, height, width), channels last in
    memory. It is unusable after an error. Dropping it ends its threads and frees its memory.

    Raises:
        MissingExtraError: without DALI.
        SettingsError: if DALI is too old, or built for the wrong CUDA version.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.owner: object = None
        """The pass that owns the batches in progress."""
        self._fed: deque[object] = deque()  # DALI reads these arrays in place until their outputs are ready
        self._pipeline, self._process = _build(spec), os.getpid()
        # The first schedule_run() starts one run per free batch slot; later calls start one run each. Stand-ins take
        # the first call, so that all real batches are treated alike.
        for _ in range(spec.options.prefetch):
            self._give([STAND_IN], [_whole(1, 1)])
        self._pipeline.schedule_run()
        for _ in range(spec.options.prefetch):
            self.take()

    def __len__(self) -> int:
        """Return the number of batches in progress."""
        return len(self._fed)

    @property
    def inherited(self) -> bool:
        """True if the pipeline belongs to the parent of this forked process: its threads do not run here."""
        return self._process != os.getpid()

    def feed(self, files: Sequence[Encoded], crops: Sequence[CropSpec]) -> None:
        """Start to decode a batch.

        Args:
            files: the encoded images, 1 to ``spec.batch_size``. They must not change until the batch is taken.
            crops: the crop of each image; all windows must have one size.
        """
        self._give(files, crops)
        self._pipeline.schedule_run()

    def take(self) -> Tensor:
        """Wait for the oldest batch.

        Raises:
            RuntimeError: DALI's error, which does not name the batch or image at fault.
        """
        images = binding.take_output(self._pipeline, self.spec.device)
        self._fed.popleft()
        return images.permute(0, 3, 1, 2)

    def drain(self) -> bool:
        """Drop the batches in progress. Return False if any of them failed."""
        try:
            while self._fed:
                self.take()
        except FAILURES:  # from a batch that is no longer needed
            return False
        return True

    def close(self) -> None:
        """End the threads and free the memory, without waiting for the garbage collector."""
        self._pipeline = None
        self._fed.clear()

    def _give(self, files: Sequence[Encoded], crops: Sequence[CropSpec]) -> None:
        fed = {"files": [np.frombuffer(data, np.uint8) for data in files], **_numbers(crops)}
        for name, values in fed.items():
            self._pipeline.feed_input(name, values)
        self._fed.append(fed)


def _whole(height: int, width: int) -> CropSpec:
    """Crop of the stand-in's one pixel, resized to the size of the other images."""
    return CropSpec(
        region=Region(0, 0, 1, 1), resized=(height, width), window=Region(0, 0, height, width), flipped=False
    )


def _numbers(crops: Sequence[CropSpec]) -> dict[str, npt.NDArray[np.generic]]:
    """Return the crops as DALI inputs: a region in pixels, and a box of the region that is resized to the window.

    The box has fractional coordinates. To flip the image, the box starts at its right side.
    """
    rows = np.array([(*c.region, *c.resized, *c.window, c.flipped) for c in crops], np.float64)
    corner = rows[:, 0:2]
    extent = rows[:, 2:4]
    resized = rows[:, 4:6]
    first = rows[:, 6:8]
    shape = rows[:, 8:10]
    flipped = rows[:, 10] > 0
    begin = first * extent / resized
    end = (first + shape) * extent / resized
    begin[flipped, 1], end[flipped, 1] = end[flipped, 1], begin[flipped, 1]
    return {
        "corner": corner.astype(np.int32),
        "extent": extent.astype(np.int32),
        "begin": begin.astype(np.float32),
        "end": end.astype(np.float32),
        "shape": shape.astype(np.float32),
    }


def _build(spec: PipelineSpec) -> Any:
    gpu = spec.on_gpu
    index = spec.device.index
    dali = binding.require_dali(gpu=gpu)
    fn = dali.fn
    types = dali.types
    pipeline = dali.Pipeline(
        batch_size=spec.batch_size,
        num_threads=spec.threads,
        device_id=torch.get_device_module(spec.device).current_device() if gpu and index is None else index,
        prefetch_queue_depth=spec.options.prefetch,
        exec_dynamic=True,
        seed=0,  # nothing is drawn here, so any seed will do
    )
    binding.pipelines.add(pipeline)

    def fed(name: str, dtype: object) -> Any:
        return fn.external_source(name=name, device="cpu", dtype=dtype, ndim=1, no_copy=True)

    with pipeline:
        pixels = fn.decoders.image_slice(
            fed("files", types.UINT8),
            device="mixed" if gpu else "cpu",
            start=fed("corner", types.INT32),
            shape=fed("extent", types.INT32),
            axis_names="HW",
            adjust_orientation=False,  # like torchvision's ImageFolder, which does not rotate images
            **(gpu_decoding(spec) if gpu else {}),
        )
        # Antialiased linear interpolation is a triangular filter as wide as the scale, as in torchvision.
        images = fn.resize(
            pixels,
            size=fed("shape", types.FLOAT),
            roi_start=fed("begin", types.FLOAT),
            roi_end=fed("end", types.FLOAT),
            interp_type=types.INTERP_LINEAR,
            antialias=True,
        )
        if gpu:
            images = normalised(dali, images, spec)
        pipeline.set_outputs(images)
    pipeline.build()
    return pipeline


def normalised(dali: Any, images: object, spec: PipelineSpec) -> Any:
    """Return a graph node that normalises uint8 images as ``device_transform`` does."""
    return dali.fn.crop_mirror_normalize(
        images,
        dtype=dali.types.FLOAT16 if spec.half else dali.types.FLOAT,
        output_layout="HWC",
        mean=[255 * value for value in spec.mean],
        std=[255 * value for value in spec.std],
    )


def gpu_decoding(spec: PipelineSpec) -> dict[str, object]:
    """Return the options of the GPU decoder."""
    options: dict[str, object] = {"jpeg_fancy_upsampling": binding.upsamples_like_libjpeg()}
    if spec.options.hw_decoder_load is not None:
        options["hw_decoder_load"] = spec.options.hw_decoder_load
    if spec.options.largest_image is not None:
        height, width = spec.options.largest_image
        options |= {
            "device_memory_padding": int(_DEVICE_BYTES_PER_PIXEL * height * width),
            "host_memory_padding": int(_HOST_BYTES_PER_PIXEL * height * width),
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
        }
    return options


_HEADERS = 64
"""Number of headers to read if the user has not set the largest image size."""


@dataclass(eq=False)
class _Waiting:
    """A batch taken from the loader and not yet yielded."""

    batch: EncodedBatch
    images: list[EncodedSample]
    on_host: dict[int, str]
    """Positions of the images that DALI does not decode, with the reasons."""

    def feed(self, pipeline: ImagePipeline) -> None:
        """Start to decode the batch, with stand-ins for images that DALI does not decode."""
        files = [image.data for image in self.images]
        crops = [image.crop for image in self.images]
        for position in self.on_host:
            window = crops[position].window
            files[position] = STAND_IN
            crops[position] = _whole(window.height, window.width)
        pipeline.feed(files, crops)


_Pass: TypeAlias = deque[_Waiting]
"""Batches of one pass taken from the loader; the first ones are in the pipeline."""


class DaliImageDecoder:
    """Decodes the batches of one loader with a pipeline built at the first batch.

    A DALI failure ends the pipeline. The failing image is then located, and decoded on the host. If that fails too,
    ``on_error`` decides if the image is replaced or an error names it. The batches in progress go through a new
    pipeline, so no batch is lost or duplicated.

    Args:
        dataset: the dataset of the batches.
        spec: pipeline settings. The batch size grows to that of the largest batch.
        keep: True to keep the pipeline after its pass.
        pin: True to return host batches in page-locked memory.
    """

    def __init__(self, dataset: ImageDataset, spec: PipelineSpec, *, keep: bool, pin: bool = False) -> None:
        self.dataset = dataset
        self.spec = spec
        self.keep = keep
        self.pin = pin
        self.built = 0
        """Number of pipelines built so far."""
        self._pipeline: ImagePipeline | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pipeline": None}

    def run(self, batches: Iterator[EncodedBatch], under_way: int) -> Generator[list[object], None, None]:
        """Decode one pass: yield [images, labels] for each batch, in order. See :class:`BatchDecoder`.

        Raises:
            DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
            LoaderError: if DALI fails and no image is at fault.
            torch.OutOfMemoryError: if the device is out of memory.
        """
        now: _Pass = deque()
        try:
            for batch in batches:
                images = batch.images()
                now.append(_Waiting(batch, images, self._reasons(images)))
                self._advance(now)
                if len(now) >= self.spec.options.prefetch:
                    yield self._next(now)
            while now:
                yield self._next(now)
        finally:
            self._leave(now)

    def release(self) -> None:
        """Drop the pipeline and its memory. A pass in progress builds a new one."""
        pipeline = self._pipeline
        self._pipeline = None
        if pipeline is not None:
            pipeline.close()
            binding.release_unused_memory()

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _advance(self, now: _Pass) -> ImagePipeline:
        """Feed the batches of the pass that are not in the pipeline yet. Return the pipeline."""
        size = max(len(waiting.images) for waiting in now)
        pipeline = self._pipeline
        if pipeline is None or pipeline.owner is not now or size > pipeline.spec.batch_size:
            pipeline = self._acquire(now, size)
        for waiting in list(now)[len(pipeline) :]:
            waiting.feed(pipeline)
        return pipeline

    def _next(self, now: _Pass) -> list[object]:
        with traced("decode"):
            images = self._taken(now)
            done = now.popleft()
            labels = done.batch.labels
            if done.on_host:
                images, labels = self._put_host_images(images, done)
            if self.pin and images.device.type == "cpu":
                images, labels = (part if part.is_pinned() else part.pin_memory() for part in (images, labels))
            return [images, labels.to(images.device, non_blocking=True)]

    def _taken(self, now: _Pass) -> Tensor:
        """Return the pixels of the first waiting batch, with stand-ins for images that DALI does not decode."""
        while True:
            pipeline = self._advance(now)
            try:
                return pipeline.take()
            except FAILURES as error:
                self.release()
                binding.raise_if_no_memory(error, self.spec.device)
                self._locate_failure(now, error)

    def _locate_failure(self, now: _Pass, error: Exception) -> None:
        """Find the images that make DALI fail. The host decodes these images from now on.

        Raises:
            LoaderError: if DALI can decode each image by itself, so that none is to blame.
        """
        for_dali = [
            image for waiting in now for position, image in enumerate(waiting.images) if position not in waiting.on_host
        ]
        failures = self._fail_alone(for_dali)
        if not failures:
            raise LoaderError(
                f"DALI failed on a batch of {len(now[0].images)} images, but can decode each of them separately. It "
                f"said: {binding.reason_of(error)}"
            ) from error
        self.dataset.cpu_fallback.known.update(failures)
        for waiting in now:
            waiting.on_host = self._reasons(waiting.images)

    def _fail_alone(self, images: list[EncodedSample]) -> dict[int, str]:
        """Decode each image separately. Return the reason for each failure, by dataset index."""
        failures: dict[int, str] = {}
        spec = replace(self.spec, batch_size=1)
        pipeline = self._build(spec)
        for image in images:
            try:
                pipeline.feed([image.data], [image.crop])
                pipeline.take()
            except FAILURES as error:
                pipeline.close()
                binding.raise_if_no_memory(error, self.spec.device)
                failures[image.index] = f"DALI failed on it: {binding.reason_of(error)}"
                pipeline = self._build(spec)
        pipeline.close()
        return failures

    # --- images that DALI does not decode -----------------------------------------------------------------------------

    def _reasons(self, images: Sequence[EncodedSample]) -> dict[int, str]:
        """Return the reasons for decoding some images of a batch on the host, by the images' positions."""
        known = self.dataset.cpu_fallback.known
        reasons = [known.get(image.index) or why_on_host(image.data) for image in images]
        return {position: reason for position, reason in enumerate(reasons) if reason}

    def _put_host_images(self, batch: Tensor, done: _Waiting) -> tuple[Tensor, Tensor]:
        """Fill in samples decoded on the host, or their ``on_error`` replacements. Return the batch and the labels.

        Raises:
            DatasetError: if an image cannot be decoded, and ``on_error`` does not handle it. Names the image.
        """
        for position, reason in done.on_host.items():
            index = done.images[position].index
            self.dataset.cpu_fallback.add(reason, f"{self.dataset.source.name(index)} (sample {index})")
        batch = batch.clone()  # outputs are DALI's own memory, and may be read-only
        convert = None if batch.dtype == torch.uint8 else self._normalised
        return batch, decode_rest(done.on_host, done.images, self.dataset, batch, convert)

    def _normalised(self, pixels: Tensor) -> Tensor:
        """Normalise pixels decoded on the host, as DALI does on the GPU."""
        spec = torch.tensor([self.spec.mean, self.spec.std], device="cpu", pin_memory=True)
        mean, std = spec.to(pixels.device, non_blocking=True).view(2, 3, 1, 1).unbind()
        return (pixels.float() / 255 - mean) / std

    # --- the pipeline -------------------------------------------------------------------------------------------------

    def _acquire(self, now: _Pass, size: int) -> ImagePipeline:
        """Return the pipeline for a pass: empty, and large enough."""
        if self._pipeline is not None and (size > self._pipeline.spec.batch_size or not self._pipeline.drain()):
            self.release()
        if self._pipeline is None:
            options = self.spec.options
            if self.spec.on_gpu and options.largest_image is None:
                options = replace(options, largest_image=largest_of_some(self.dataset))
            self.spec = replace(self.spec, batch_size=max(size, self.spec.batch_size), options=options)
            self._pipeline = self._build(self.spec)
            self.built += 1
        self._pipeline.owner = now
        return self._pipeline

    def _build(self, spec: PipelineSpec) -> ImagePipeline:
        try:
            return ImagePipeline(spec)
        except RuntimeError as error:
            binding.raise_if_no_memory(error, self.spec.device)
            raise LoaderError(
                f'DALI cannot build its pipeline: {binding.reason_of(error)} See "lightning-feed doctor" for the '
                'driver and the CUDA of DALI, or use backend="torch".'
            ) from error

    def _leave(self, now: _Pass) -> None:
        """End a pass. Drop its batches in progress."""
        pipeline = self._pipeline
        if pipeline is None or pipeline.owner is not now or pipeline.inherited:
            return  # the pipeline belongs to another pass, or to the parent of this forked process
        if sys.is_finalizing():
            return  # DALI's own exit handler has ended all pipelines
        pipeline.owner = None
        if not self.keep or not pipeline.drain():
            self.release()


def largest_of_some(dataset: ImageDataset) -> tuple[int, int] | None:
    """Return (height, width) of the largest of some images, evenly spaced over the dataset. Returns None if none of
    them can be read."""
    sizes = []
    for index in range(0, len(dataset), max(1, len(dataset) // _HEADERS)):
        try:
            sizes.append(dataset.decoder.size(dataset.source.read(index)))
        except DatasetError:  # raised again when the image is decoded
            continue
    return max(sizes, key=lambda size: size[0] * size[1], default=None)


def why_on_host(data: Encoded) -> str:
    """Return the reason for decoding a file on the host. Returns "" if DALI decodes the file.

    DALI's pixels differ from Pillow's for 16 bits per channel, and for CMYK, which nvJPEG converts in its own way on
    the GPU. DALI does not support GIF, and may decode only a part of a truncated JPEG or TIFF.
    """
    kind = kind_of(data)
    if kind == JPEG:
        try:
            components = jpeg_header(data).components
        except DecodeError:
            return "a JPEG without a frame header"
        if components == 4:
            return "a CMYK JPEG"
        if not ends_like_jpeg(data):
            return "a JPEG that is cut short, or has data after its end marker"
    if kind == PNG and png_bit_depth(data) >= 16:
        return "a PNG of 16 bits a channel"
    if kind not in (JPEG, PNG, WEBP, "BMP"):
        return f"an image of the kind {kind}"
    return ""
