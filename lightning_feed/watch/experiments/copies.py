"""X8: how fast a batch gets to the device, from pinned and from pageable memory."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_feed.transfer.nested import tensors

BUFFER_BYTES = 64 << 20
_REPEATS = 7


@dataclass(frozen=True, kw_only=True)
class Copies:
    """What was measured by device events."""

    pinned_gb_per_s: float
    pageable_gb_per_s: float
    copy_ms: float
    """All tensors of the batch, from the memory that the loader gives."""


def why_no_copies(device: torch.device | None) -> str | None:
    """Why there is nothing to measure; None when there is."""
    if device is None or device.type == "cpu":
        return "nothing is copied: the device is the CPU"
    if device.type != "cuda":
        return f"copies are timed by CUDA events, and the device is of type '{device.type}'"
    if not torch.cuda.is_available():
        return "no CUDA device is there"
    return None


def measure_copies(batch: Any, device: torch.device) -> Copies | str:
    """Copy a buffer of 64 MiB and the batch to a CUDA device, several times each; medians. Or why not.

    Args:
        batch: on the host, as the loader gives it.
        device: of type ``cuda``.
    """
    leaves = [tensor for tensor in tensors(batch) if tensor.device.type == "cpu"]
    batch_bytes = sum(tensor.numel() * tensor.element_size() for tensor in leaves)
    free, _ = torch.cuda.mem_get_info(device)
    if 2 * (batch_bytes + BUFFER_BYTES) > free:
        return f"a batch of {batch_bytes >> 20} MiB and a buffer would take more than half of the free device memory"
    pageable = torch.empty(BUFFER_BYTES, dtype=torch.uint8).fill_(1)  # written: else its pages are not there
    pinned = pageable.pin_memory()
    target = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=device)
    per_s = BUFFER_BYTES / 1e9
    return Copies(
        pinned_gb_per_s=per_s / (_median_ms(lambda: target.copy_(pinned, non_blocking=True), device) / 1e3),
        pageable_gb_per_s=per_s / (_median_ms(lambda: target.copy_(pageable), device) / 1e3),
        copy_ms=_median_ms(lambda: [tensor.to(device, non_blocking=True) for tensor in leaves], device),
    )


def _median_ms(copy: Callable[[], object], device: torch.device) -> float:
    """Milliseconds between two events around the copy; the first two times do not count."""
    taken: list[float] = []
    with torch.cuda.device(device):
        for _ in range(2 + _REPEATS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            start.record()
            copy()
            end.record()
            end.synchronize()
            taken.append(float(start.elapsed_time(end)))
    return statistics.median(taken[2:])
