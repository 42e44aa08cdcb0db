"""Image decoders of the simulated device: nvJPEG, whose pixels are not known, and DALI, by its pipelines for CPUs."""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from simulated.device import DEVICE, SimulatedDevice
from torch import Tensor
from torchvision.io import ImageReadMode

from lightning_feed.images import dali_binding, nvjpeg, ragged_crop

DECODE_MS = 4.0


class ImageDecoders:
    """The calls that only a device can answer."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.nvjpeg: list[int] = []
        """Files in each call of nvJPEG."""
        self.decoded: Any = None
        """The event after the last of these calls, which reads the files until then."""
        self.dali: list[dict[str, Any]] = []
        """Arguments of each pipeline of DALI, and those of its image decoder."""

    def decode_jpegs(self, files: list[Tensor], mode: int, where: torch.device) -> list[Tensor]:
        """As ``torch.ops.image.decode_jpegs_cuda``: the host waits."""
        assert mode == ImageReadMode.RGB.value
        images = self._decode(files, where)
        self.device.wait_for(self.decoded, "decode_jpegs_cuda")
        return images

    def decode_jpeg(self, files: list[Tensor], *, mode: str, device: torch.device) -> list[Tensor]:
        """As ``torchcodec.decoders.decode_jpeg`` (0.17): the current stream waits, the host does not."""
        assert mode == "RGB"
        images = self._decode(files, device)
        self.device.current_stream().wait_event(self.decoded)
        return images

    def _decode(self, files: list[Tensor], where: torch.device) -> list[Tensor]:
        assert where.type == DEVICE.type
        self.nvjpeg.append(len(files))
        images, self.decoded = self.device.decode([(3, *size_of(file)) for file in files], DECODE_MS)
        return images


@contextmanager
def image_decoders(device: SimulatedDevice, library: str = "torchvision") -> Iterator[ImageDecoders]:
    """While entered, nvJPEG is there by one library, and DALI if it is installed.

    What was cached for another device is forgotten.
    """
    decoders = ImageDecoders(device)
    caches = (nvjpeg.nvjpeg, ragged_crop.normalization_of)
    with pytest.MonkeyPatch.context() as patch:
        if library == "torchcodec":
            patch.setitem(sys.modules, "torchcodec", ModuleType("torchcodec"))
            patch.setitem(sys.modules, "torchcodec.decoders", SimpleNamespace(decode_jpeg=decoders.decode_jpeg))
            patch.delattr(torch.ops.image, "decode_jpegs_cuda", raising=False)
        else:
            patch.setitem(sys.modules, "torchcodec", None)
            patch.setattr(torch.ops.image, "decode_jpegs_cuda", decoders.decode_jpegs, raising=False)
        for cache in caches:
            cache.cache_clear()
        yield decoders
        for cache in caches:
            cache.cache_clear()


@contextmanager
def dali_on_cpu(decoders: ImageDecoders) -> Iterator[None]:
    """While entered, pipelines of DALI for a GPU run on the CPU, and their batches are then copied to the device.

    All that they are asked for is given to DALI, but for the device.
    """
    dali = pytest.importorskip("nvidia.dali")
    slice_on_cpu = dali.fn.decoders.image_slice
    from_dlpack = dali_binding.from_dlpack

    class Pipeline(dali.Pipeline):  # type: ignore[misc]
        def __init__(self, *, device_id: int | None, **options: Any) -> None:
            super().__init__(device_id=None, **options)
            self.on_gpu = device_id is not None
            decoders.dali.append({"device_id": device_id, **options})

        def share_outputs(self, *streams: Any) -> Any:
            assert streams == ((decoders.device.current_stream(),) if self.on_gpu else ())
            outputs = super().share_outputs()
            if not self.on_gpu:
                return outputs
            host = decoders.device.pin(from_dlpack(outputs[0].as_tensor()).clone())
            return [SimpleNamespace(as_tensor=lambda: host.to(DEVICE, non_blocking=True))]

    def image_slice(files: Any, *, device: str, **options: Any) -> Any:
        decoders.dali[-1].update(device=device, **options)
        return slice_on_cpu(files, device="cpu", **options)

    def as_torch(given: Any) -> Tensor:
        return given if isinstance(given, Tensor) else from_dlpack(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "cuda", None)  # any DALI will do: no GPU is asked
        patch.setattr(dali, "Pipeline", Pipeline)
        patch.setattr(dali.fn.decoders, "image_slice", image_slice)
        patch.setattr(dali_binding, "from_dlpack", as_torch)
        yield


def size_of(file: Tensor) -> tuple[int, int]:
    """(height, width) of a baseline JPEG."""
    data = bytes(file.tolist())
    height, width = struct.unpack(">HH", data[data.index(b"\xff\xc0") + 5 :][:4])
    return height, width
