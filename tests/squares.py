"""A dataset that counts its reads. In a module of its own: spawned workers import this, and not Lightning."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_feed.load.cacheable import CacheableDataset


class Squares(CacheableDataset):
    """Sample i is i squared, four times; reads are counted where all processes see it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = torch.zeros(size, dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return self.size

    def read(self, index: int) -> bytes:
        self.reads[index] += 1
        return bytes([index])

    def decode(self, data: Any, index: int) -> np.ndarray:
        return np.full(4, float(bytes(data)[0]) ** 2, dtype=np.float32)

    def augment(self, decoded: np.ndarray, index: int) -> Tensor:
        return torch.from_numpy(decoded)

    def plain(self, decoded: np.ndarray, index: int) -> Tensor:
        return torch.from_numpy(decoded)
