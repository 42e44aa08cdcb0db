"""Data sets of numbers for loaders with workers of any kind, and how their batches are compared."""

import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from lightning_feed.load.order import EpochOrder
from lightning_feed.load.random_state import sample_generator

SIZE = 23
LOADERS = {
    "sequential": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "drop_last": lambda: {"batch_size": 4, "drop_last": True},
    "weighted": lambda: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * SIZE, SIZE)},
    "users_generator": lambda: {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "batch_sampler": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE)), 5, False)},
    "uneven": lambda: {"batch_sampler": [[3], [1, 2, 3], (4, 5), torch.tensor([6, 7]), range(2)]},
    "unbatched": lambda: {"batch_size": None, "shuffle": True},
    "unbatched_lists": lambda: {"batch_size": None, "sampler": [0, 1, 2], "collate_fn": lambda sample: [sample]},
    "collate": lambda: {"batch_size": 4, "collate_fn": lambda samples: {"sum": sum(map(int, samples))}},
    "distributed": lambda: {"batch_size": 4, "sampler": DistributedSampler(range(SIZE), 2, 1)},
}


class Rows(Dataset):
    """Sample i is i; it notes what is read in this process."""

    def __init__(self, size=SIZE):
        self.size = size
        self.read = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index


class Whole(Rows):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Noisy(Rows):
    """As our recipes draw: more or less, by what was drawn before."""

    def __getitem__(self, index):
        drawn = [draw()]
        while drawn[-1] < 0.7:
            drawn += [draw(), draw()]
        return index, drawn[-1]


class NoisyEverywhere(Rows):
    """As our recipes draw, and as users' datasets do."""

    def __getitem__(self, index):
        return index, draw(), torch.rand(()).item(), random.random(), float(np.random.rand())


class NoisyWhole(Noisy):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Failing(Rows):
    def __init__(self, error, at=(9, 10, 11)):
        super().__init__()
        self.error, self.at = error, at

    def __getitem__(self, index):
        if index in self.at:
            raise self.error
        return super().__getitem__(index)


class TwoWords(Exception):
    def __init__(self, one, two):
        super().__init__(one, two)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def draw():
    return torch.rand((), generator=sample_generator()).item()


def mix_up(samples):
    return torch.tensor([sample[1] for sample in samples]) * draw()


def as_list(batch):
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_list(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def epochs(loader, count=2):
    return [[as_list(batch) for batch in loader] for _ in range(count)]


def order(epoch=0):
    return EpochOrder(seed=8, epoch=lambda: epoch)
