"""One DALI pipeline: encoded images and what to crop out of each -> a batch of pixels.

It has no reader: what it decodes is fed to it, so that order, shards, resuming and the random boxes stay ours.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_feed.decode.decoders import Region
from lightning_feed.decode.header import Encoded
from lightning_feed.load.crop import CropSpec
from lightning_feed.load.dali.binding import is_inherited, outlive_forks, require_dali, take_outputs

STAND_IN = b"P6\n1 1\n255\n\x00\x00\x00"
"""An image of one pixel (PNM), for the place of one that DALI is not given."""
_DEVICE_BYTES_PER_PIXEL, _HOST_BYTES_PER_PIXEL = 5.5, 3.7
"""Of the decoder's buffers. In DALI's ImageNet example (docs/examples/use_cases/pytorch/resnet50/main.py) the largest
image has 5980 x 6430 pixels and the paddings are 211025920 and 140544512 bytes: 5.49 and 3.66 bytes a pixel."""


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """What a pipeline is built for."""

    batch_size: int
    """The most images of a batch; each batch has as many as were fed."""
    device: torch.device
    """That it decodes on: the CPU, or a CUDA device with its index."""
    threads: int
    """On the CPU."""
    prefetch: int
    """Batches that may be on their way."""
    mean: tuple[float, ...]
    """Of R, G and B for values in [0, 1]; the GPU normalises."""
    std: tuple[float, ...]
    half: bool
    """Whether the GPU gives float16; else float32."""
    largest_image: tuple[int, int] | None
    """(height, width) that the GPU's decoder makes its buffers for; None: DALI's own default."""
    hw_decoder_load: float | None
    """Share of the JPEGs for the GPU's hardware decoder; None: DALI's own default."""


class ImagePipeline:
    """Decodes batches in the order that they are fed in, up to ``spec.prefetch`` of them at a time.

    On the CPU it gives uint8, on the GPU normalised float16 or float32, both of shape (B, 3, height, width), channels
    last in memory. After an error it is of no use any more. Dropping it ends its threads and frees its memory.

    Raises:
        MissingExtraError: without DALI.
        SettingsError: with a DALI that is too old, or of the wrong CUDA.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.owner: object = None
        """Whose batches are on their way."""
        self._fed: deque[Any] = deque()  # DALI reads them where they lie, until their outputs are there
        self._pipeline = _build(spec)
        outlive_forks(self._pipeline)
        # The first schedule_run() runs as often as there is room for batches, later ones run once. So that all runs of
        # ours are alike, that first one is spent on stand-ins.
        crop = _whole(1, 1)
        for _ in range(spec.prefetch):
            self._give([STAND_IN], [crop])
        self._pipeline.schedule_run()
        self.drain()

    def __len__(self) -> int:
        """Batches on their way."""
        return len(self._fed)

    @property
    def inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from: its threads are not here."""
        return is_inherited(self._pipeline)

    def feed(self, files: Sequence[Encoded], crops: Sequence[CropSpec]) -> None:
        """Start to decode a batch.

        Args:
            files: the encoded images, 1 to ``spec.batch_size``. They must not change until the batch is taken.
            crops: what of each is wanted; all windows of one size.
        """
        self._give(files, crops)
        self._pipeline.schedule_run()

    def take(self) -> Tensor:
        """Wait for the batch that was fed first.

        Raises:
            RuntimeError: what DALI says. It is not known which batch or image is at fault.
        """
        [images] = take_outputs(self._pipeline, self.spec.device)
        self._fed.popleft()
        return images.permute(0, 3, 1, 2)

    def drain(self) -> None:
        """Drop the batches on their way."""
        while self._fed:
            self.take()

    def close(self) -> None:
        """End its threads and free its memory, without waiting for the garbage collector."""
        self._pipeline = None
        self._fed.clear()

    def _give(self, files: Sequence[Encoded], crops: Sequence[CropSpec]) -> None:
        fed = {"files": [np.frombuffer(data, np.uint8) for data in files], **_numbers(crops)}
        for name, values in fed.items():
            self._pipeline.feed_input(name, values)
        self._fed.append(fed)


def stand_in(like: CropSpec) -> tuple[bytes, CropSpec]:
    """An image and its crop of the same output size."""
    return STAND_IN, _whole(like.window.height, like.window.width)


def _whole(height: int, width: int) -> CropSpec:
    """The one pixel of the stand-in, as large as the images beside it."""
    return CropSpec(
        region=Region(0, 0, 1, 1), resized=(height, width), window=Region(0, 0, height, width), flipped=False
    )


def _numbers(crops: Sequence[CropSpec]) -> dict[str, npt.NDArray[Any]]:
    """The crops as DALI takes them: a region in pixels, and a box of the region that is resized to the window.

    That box has fractions of pixels. It begins at its right side where the image is to be flipped.
    """
    rows = np.array([(*c.region, *c.resized, *c.window, c.flipped) for c in crops], np.float64)
    corner, extent, resized = rows[:, 0:2], rows[:, 2:4], rows[:, 4:6]
    first, shape, flipped = rows[:, 6:8], rows[:, 8:10], rows[:, 10] > 0
    begin, end = first * extent / resized, (first + shape) * extent / resized
    begin[flipped, 1], end[flipped, 1] = end[flipped, 1], begin[flipped, 1]
    return {
        "corner": corner.astype(np.int32),
        "extent": extent.astype(np.int32),
        "begin": begin.astype(np.float32),
        "end": end.astype(np.float32),
        "shape": shape.astype(np.float32),
    }


def _build(spec: PipelineSpec) -> Any:
    gpu = spec.device.type == "cuda"
    dali = require_dali(gpu=gpu)
    fn, types = dali.fn, dali.types
    pipeline = dali.Pipeline(
        batch_size=spec.batch_size,
        num_threads=spec.threads,
        device_id=spec.device.index if gpu else None,
        prefetch_queue_depth=spec.prefetch,
        exec_dynamic=True,
        seed=0,  # nothing is drawn here
    )

    def fed(name: str, dtype: Any) -> Any:
        return fn.external_source(name=name, device="cpu", dtype=dtype, ndim=1, no_copy=True)

    with pipeline:
        pixels = fn.decoders.image_slice(
            fed("files", types.UINT8),
            device="mixed" if gpu else "cpu",
            start=fed("corner", types.INT32),
            shape=fed("extent", types.INT32),
            axis_names="HW",
            adjust_orientation=False,  # as torchvision's ImageFolder, which does not turn images either
            **(gpu_decoding(spec) if gpu else {}),
        )
        # Antialiased linear interpolation is a triangular filter as wide as the scale, which torchvision's is, too.
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


def normalised(dali: Any, images: Any, spec: PipelineSpec) -> Any:
    """A node of the graph: uint8 images to normalised ones, as ``device_transform`` makes them."""
    return dali.fn.crop_mirror_normalize(
        images,
        dtype=dali.types.FLOAT16 if spec.half else dali.types.FLOAT,
        output_layout="HWC",
        mean=[255 * value for value in spec.mean],
        std=[255 * value for value in spec.std],
    )


def gpu_decoding(spec: PipelineSpec) -> dict[str, Any]:
    """What the decoder is told on the GPU alone."""
    options: dict[str, Any] = {"jpeg_fancy_upsampling": True}  # as libjpeg on the CPU does it
    if spec.hw_decoder_load is not None:
        options["hw_decoder_load"] = spec.hw_decoder_load
    if spec.largest_image is not None:
        height, width = spec.largest_image
        options |= {
            "device_memory_padding": int(_DEVICE_BYTES_PER_PIXEL * height * width),
            "host_memory_padding": int(_HOST_BYTES_PER_PIXEL * height * width),
            "preallocate_height_hint": height,
            "preallocate_width_hint": width,
        }
    return options
