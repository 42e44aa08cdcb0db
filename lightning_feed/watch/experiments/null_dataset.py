"""X7: a data set that costs nothing, so that what remains is the machinery around it."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.variant import Changes
from lightning_feed.watch.experiments.subject import Part, rate_of


class NullDataset(Dataset[Any]):
    """Gives the same sample for every index.

    Args:
        sample: what it gives. Dicts and lists are given as shallow copies, since collate functions take things out.
        original: the data set that it stands for, asked for attributes that a ``worker_init_fn`` may want.
    """

    def __init__(self, sample: Any, original: Any) -> None:
        self.sample = sample
        self.original = original

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: Any) -> Any:
        return copy.copy(self.sample) if isinstance(self.sample, (Mapping, list)) else self.sample

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__, by which torch would load whole batches from the original; and nothing while unpickling.
        if name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


class NullStream(IterableDataset[Any]):
    """Gives the same sample without end.

    Args:
        sample: what it gives.
        original: the data set that it stands for.
    """

    def __init__(self, sample: Any, original: Any) -> None:
        self.sample = sample
        self.original = original

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield copy.copy(self.sample) if isinstance(self.sample, (Mapping, list)) else self.sample

    def __getattr__(self, name: str) -> Any:
        # A length or a state of the original's would be believed.
        if name in ("state_dict", "load_state_dict") or name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


def measure_ceiling(parts: tuple[Part, ...], samples: list[Any], limits: RoundLimits) -> LoaderRate:
    """The rate of the loaders with constant samples: what handing over, collating and pinning allow.

    Args:
        parts: the loaders.
        samples: one of each.
        limits: how long.
    """
    by_part = dict(zip(parts, samples, strict=True))

    def change(part: Part) -> Changes:
        kind = NullStream if part.stream else NullDataset
        return Changes(dataset=kind(by_part[part], part.loader.dataset), endless=True)

    return rate_of(parts, change, limits)[0]
