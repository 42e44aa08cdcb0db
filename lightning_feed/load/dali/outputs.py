"""What a DALI pipeline gives, as torch tensors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from lightning_feed.errors import DatasetError


def take_outputs(pipeline: Any, device: torch.device | None = None) -> list[Tensor]:
    """Wait for the oldest scheduled run of a pipeline, and take its outputs.

    Args:
        pipeline: with a run scheduled (``schedule_run``).
        device: the CUDA device that outputs of the GPU lie on. They are then ordered after the current stream there,
            and have to be used on it; the host does not wait. None for a pipeline without GPU.

    Returns:
        One tensor for each output, which stays valid for as long as it is held.

    Raises:
        StopIteration: when a reader of the pipeline has come to its end.
        DatasetError: when the samples of an output differ in shape.
        RuntimeError: what an operator raised.
    """
    owned = bool(pipeline.exec_dynamic)
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
    # Only the dynamic executor knows streams; the others give what the host has waited for.
    outputs = pipeline.share_outputs(stream) if owned and stream is not None else pipeline.share_outputs()
    try:
        tensors = to_tensors(outputs, owned=owned)
        if not owned and stream is not None:
            stream.synchronize()  # the copies read what release_outputs gives away
    finally:
        pipeline.release_outputs()
    return tensors


def to_tensors(outputs: Sequence[Any], *, owned: bool) -> list[Tensor]:
    """DALI's tensor lists as one tensor each, of shape (B, ...).

    Args:
        outputs: of one run: ``TensorListCPU`` or ``TensorListGPU``.
        owned: whether they own their memory, as those of the dynamic executor do: then it is shared. Else it is
            overwritten by a later run, and copied.

    Raises:
        DatasetError: when the samples of an output differ in shape.
    """
    return [_dense(output, place, owned=owned) for place, output in enumerate(outputs)]


def _dense(output: Any, place: int, *, owned: bool) -> Tensor:
    if not output.is_dense_tensor():
        shapes = sorted({tuple(shape) for shape in output.shape()})
        raise DatasetError(
            f"Output {place} of the DALI pipeline has samples of {len(shapes)} shapes, {shapes[0]} to {shapes[-1]}: "
            "they are not one tensor. Bring them to one shape, with fn.resize, fn.crop or fn.pad."
        )
    tensor: Tensor = from_dlpack(output.as_tensor())
    return tensor if owned else tensor.clone()
