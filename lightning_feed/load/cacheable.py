"""CacheableDataset, a dataset with a cache between its steps, and a shared limit for all caches of a run."""

import hashlib
import logging
from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_feed.decode.header import Encoded
from lightning_feed.errors import DatasetError
from lightning_feed.load.kinds import AnyDataset, Array, Sample
from lightning_feed.load.machine import Machine, read_machine
from lightning_feed.storage.shared_cache import Kind, SampleCache
from lightning_feed.storage.system import parse_limit

logger = logging.getLogger(__name__)

_MOST = 0.8
"""Largest share of memory and of /dev/shm for caches. The workers' batches need the rest."""


class CacheableDataset(Dataset[Sample]):
    """A map-style dataset that makes samples in steps: read and decode, the same in each epoch, then a random augment.

    Write ``__len__``, :meth:`read`, :meth:`decode` and, in most cases, :meth:`augment`. A sample is
    ``augment(decode(read(index), index), index)``. A class with a faster path may override ``__getitem__`` and call
    :meth:`cached_bytes` and :meth:`cached_decoded` itself.

    Attributes:
        cache: keeps the results of ``read`` (kind ``"bytes"``) or of ``decode`` (kind ``"decoded"``). None: no cache.

    Example:
        >>> class Squares(CacheableDataset):
        ...     def __len__(self):
        ...         return 4
        ...     def read(self, index):
        ...         return bytes([index])
        ...     def decode(self, data, index):
        ...         return np.array([data[0] ** 2])
        ...     def augment(self, decoded, index):
        ...         return decoded + np.random.randint(2), index
    """

    cache: SampleCache | None = None

    def __len__(self) -> int:
        raise NotImplementedError(
            f"{type(self).__name__} has no __len__. Write one that returns the number of samples."
        )

    def read(self, index: int) -> Encoded:
        """Read the encoded bytes of a sample from storage."""
        raise NotImplementedError(f"{type(self).__name__} has no method read. Write read(self, index) -> bytes.")

    def decode(self, data: Encoded, index: int) -> Array:
        """Decode the bytes into an array. The result must be the same in each epoch.

        Args:
            data: the result of :meth:`read`, or a memoryview of the same bytes from a cache.
            index: the sample's index.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no decode. Write decode(self, data, index), which returns an array."
        )

    def augment(self, decoded: Array, index: int) -> Sample:
        """Make the sample from the array, with random changes if you like. You may modify the array."""
        return decoded

    def plain(self, decoded: Array, index: int) -> Sample:
        """Make the sample without randomness, in a fixed shape, for ``cache="device"``."""
        if type(self).augment is not CacheableDataset.augment:
            raise DatasetError(
                f"{type(self).__name__} has augment but no plain. cache='device' keeps finished samples, so a random "
                "augment would give the same samples in each epoch. Write plain(self, decoded, index), which returns "
                "the sample without augmentation, and augment whole batches in device_transform."
            )
        return decoded

    def cached_bytes(self, index: int) -> Encoded:
        """Return the result of :meth:`read`, cached if possible. Do not modify it."""
        cache = self.cache
        if cache is None or cache.kind != "bytes":
            return self.read(index)
        held = cache.get(index)
        if held is None:
            data = self.read(index)
            # The same type with and without a cache hit: else code could work in the first epoch and fail in the
            # second.
            held = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
            cache.put(index, held)
        return held.data.toreadonly() if held.ndim == 1 and held.dtype == np.uint8 else held

    def cached_decoded(self, index: int) -> Array:
        """Return the result of :meth:`decode`, cached if possible. Do not modify it."""
        cache = self.cache
        if cache is None or cache.kind != "decoded":
            return self.decode(self.cached_bytes(index), index)
        held = cache.get(index)
        if held is None:
            held = self.decode(self.read(index), index)
            if not isinstance(held, np.ndarray):
                raise DatasetError(
                    f"{type(self).__name__}.decode returned a {type(held).__name__} for sample {index}, but only NumPy "
                    "arrays can be cached. Return an array, and convert it for the model in augment."
                )
            cache.put(index, held)
        return held

    def __getitem__(self, index: int) -> Sample:
        decoded = self.cached_decoded(index)
        # Arrays of the cache, and of some decoders, are read-only. Augment may write, and torch warns about them.
        if isinstance(decoded, np.ndarray) and not decoded.flags.writeable:
            decoded = decoded.copy()
        return self.augment(decoded, index)


def open_caches(
    named: Sequence[tuple[str, AnyDataset]], *, kind: Kind, limit: int | str, run: str, machine: Machine | None = None
) -> list[SampleCache]:
    """Put a cache into each dataset. The caches share one limit, in proportion to the sample counts.

    Looks inside ``Subset`` and ``ConcatDataset``; subsets of one dataset share its cache. A dataset that already has a
    cache keeps it. Caches live as long as their datasets.

    Args:
        named: names and datasets from ``name_datasets``, the same on all ranks.
        kind: cached results, ``"bytes"`` or ``"decoded"``.
        limit: bytes, a size such as ``"8GiB"``, or a share such as ``"50%"`` of the available memory and /dev/shm.
        run: a unique name for this run and its datasets, the same on all ranks of the node.
        machine: limits of this machine. None: read them now.

    Raises:
        DatasetError: a dataset does not read, decode and augment in separate steps.
        SettingsError: the limit cannot be parsed.
        ArchiveError: a cache cannot be opened.
    """
    places: dict[int, tuple[str, CacheableDataset]] = {}
    for name, dataset in named:
        for part, found in enumerate(_cacheable_parts(dataset, name, kind)):
            if found.cache is None:
                places.setdefault(id(found), (f"{name}.{part}", found))
    total = sum(len(dataset) for _, dataset in places.values())
    bytes_for_all = _bytes_within(limit, machine or read_machine())
    for name, dataset in places.values():
        size = len(dataset)
        identity = f"{run}/{name}/{type(dataset).__qualname__}/{size}"
        dataset.cache = SampleCache(
            size,
            max(1, bytes_for_all * size // total),
            kind=kind,
            name=hashlib.blake2b(identity.encode(), digest_size=12).hexdigest(),
            memory_left=memory_left,
        )
    return [dataset.cache for _, dataset in places.values() if dataset.cache is not None]


def _bytes_within(limit: int | str, machine: Machine) -> int:
    """Convert the limit for all caches to bytes, capped by the machine's free space."""
    known = [free for free in (machine.available_memory_bytes, machine.free_shm_bytes) if free is not None]
    room = min(known, default=None)
    bytes_for_all = parse_limit(limit, room)
    if room is not None and bytes_for_all > _MOST * room:
        logger.warning(
            "cache_limit=%r is cut to %d MiB: %d MiB of memory and /dev/shm are available, and batches in flight "
            "need a part of that.",
            limit,
            int(_MOST * room) >> 20,
            room >> 20,
        )
        return int(_MOST * room)
    return bytes_for_all


def memory_left() -> int | None:
    """Return the bytes of memory still available to this process in its container. None if unknown."""
    return read_machine().available_memory_bytes


def _cacheable_parts(dataset: AnyDataset, name: str, kind: str) -> Iterator[CacheableDataset]:
    if isinstance(dataset, CacheableDataset):
        yield dataset
    elif isinstance(dataset, Subset):
        yield from _cacheable_parts(dataset.dataset, name, kind)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from _cacheable_parts(part, name, kind)
    else:
        raise DatasetError(
            f"cache={kind!r} needs a dataset with separate steps to read, decode and augment, but the dataset of "
            f"{name} ({type(dataset).__name__}) has none. Derive it from lightning_feed.CacheableDataset (read, "
            "decode, augment), or leave cache out."
        )
