"""What a running loader takes: CPU time and memory of its workers, and the size of its batches."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

_DEEPEST = 8


def cpu_seconds(pids: Iterable[int], root: Path = Path("/")) -> float | None:
    """CPU time so far of this process and of the workers, all their threads. None where a worker's cannot be read."""
    total = time.process_time()
    for pid in pids:
        try:
            stat = (root / f"proc/{pid}/stat").read_text()
            user, system = stat.rpartition(")")[2].split()[11:13]  # proc(5), fields 14 and 15
            total += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None
    return total


def worker_memory(pids: Iterable[int], root: Path = Path("/")) -> int | None:
    """Bytes that the workers have to themselves, /dev/shm apart: what they share counts by their share of it (PSS).
    None where that cannot be read."""
    total = 0
    for pid in pids:
        try:
            lines = (root / f"proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return None
        sizes = {
            name: int(value.split()[0])
            for name, _, value in (line.partition(":") for line in lines)
            if name[:3] == "Pss"
        }
        if "Pss" not in sizes:
            return None
        total += 1024 * (sizes["Pss"] - sizes.get("Pss_Shmem", 0))
    return total


def leaves_of(batch: Any, depth: int = 0) -> list[int]:
    """Bytes of each tensor and array in a batch, and of each text."""
    if isinstance(batch, Tensor):
        return [batch.numel() * batch.element_size()]
    if isinstance(batch, np.ndarray):
        return [int(batch.nbytes)]
    if isinstance(batch, (bytes, bytearray)) or depth > _DEEPEST:
        return []
    if isinstance(batch, Mapping):
        inside: Iterable[Any] = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        inside = batch
    else:
        inside = getattr(batch, "__dict__", {}).values()
    return [size for one in inside for size in leaves_of(one, depth + 1)]
