"""A dataset kept on the device: loaded once, with batches gathered there."""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from tqdm import tqdm

from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.load.kinds import AnyDataset, AnySampler
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import EpochOrder
from lightning_feed.load.stage import traced
from lightning_feed.machine.limits import read_machine

logger = logging.getLogger(__name__)

_LOOKED_AT = 8
"""Samples used to estimate the size of the whole dataset; every sample must have the shapes of the first."""
_CHUNK_BYTES = 8 << 20
"""Size limit of one batch on its way to the device; each worker has two of them in host memory."""
_MOST_IN_CHUNK = 1024
_SHARE = 0.8
"""Largest share of the free device memory for the dataset. The model needs the rest."""


class ResidentData(Dataset[object]):
    """Samples on the device: each leaf of the nested batch is one tensor, with a row per sample.

    Made by :func:`load_resident`; read through a ``ResidentLoader``.

    Args:
        leaves: leaves of a batch of all samples, as returned by the collate function.
        form: structure of that batch.
    """

    def __init__(self, leaves: "list[_Leaf]", form: TreeSpec) -> None:
        self._leaves = leaves
        self._form = form
        self.device = leaves[0].rows.device

    def __len__(self) -> int:
        return len(self._leaves[0].rows)

    @property
    def stored_bytes(self) -> int:
        """Bytes in use on the device."""
        return sum(leaf.rows.nbytes for leaf in self._leaves)

    def __getitems__(self, indices: Tensor | Sequence[int]) -> Any:
        """Return the batch for a list of sample indices, or for a tensor of them, int64 of shape (B,), on the
        device."""
        rows = indices
        if not isinstance(rows, Tensor):
            rows = torch.tensor([self._row(index) for index in rows], dtype=torch.int64, device=self.device)
        with traced("gather"):
            return tree_unflatten([leaf.gather(rows) for leaf in self._leaves], self._form)

    def __getitem__(self, index: int) -> Any:
        leaves, form = tree_flatten(self.__getitems__([index]))
        return tree_unflatten([leaf[0] for leaf in leaves], form)

    def _row(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no sample {index} among {len(self)}.")
        return index % len(self)


@dataclass
class _Leaf:
    """One tensor of the batch for all samples, with the memory layout that the collate function chose."""

    rows: Tensor
    """Contiguous, one row per sample."""
    dims: tuple[int, ...]
    """Permutation that restores a non-contiguous layout: channels last, for example."""

    def gather(self, rows: Tensor) -> Tensor:
        return self.rows.index_select(0, rows).permute(self.dims)

    def fill(self, start: int, rows: Tensor) -> None:
        self.rows[start : start + len(rows)].permute(self.dims).copy_(rows)


def load_resident(
    dataset: AnyDataset,
    *,
    device: torch.device,
    collate_fn: Callable[[list[object]], object] | None = None,
    reading: Mapping[str, object] | None = None,
) -> ResidentData:
    """Read a dataset once and keep it on the device.

    Stores the results of ``sample_to_keep(index)`` if the dataset, or a dataset inside a ``Subset`` or
    ``ConcatDataset``, has this method. For any other dataset, stores the samples of this one pass.

    Args:
        dataset: map-style, with samples of one shape.
        device: the device to keep the dataset on.
        collate_fn: makes a batch of samples, each row from one sample only; None for torch's ``default_collate``.
        reading: :class:`FeedLoader` options for the loading pass: ``num_workers``, ``workers`` and the like.

    Raises:
        SettingsError: if the dataset does not fit; raised before loading, with the numbers.
        DatasetError: for a stream, or if a sample has another shape than the first, or contains a value that a device
            cannot hold.
    """
    _check_kind(dataset)
    size = len(dataset)
    collate = collate_fn or default_collate
    samples = _SamplesToKeep(dataset, _shapes_of(_sample_to_keep(dataset, 0), 0))
    rows = sorted({part * size // _LOOKED_AT for part in range(_LOOKED_AT)})
    first_batch = collate([samples[row] for row in rows])
    tensors, form = tree_flatten(first_batch)
    _check_rows(first_batch, len(rows))
    sample_bytes = sum(tensor.nbytes // len(tensor) for tensor in tensors)
    _refuse_if_too_large(sample_bytes, size, device)
    leaves = [_allocate(tensor, size, device) for tensor in tensors]
    chunk = max(1, min(_MOST_IN_CHUNK, _CHUNK_BYTES // max(1, sample_bytes)))
    # A separate generator, because drawing from the default generator would change the training's random numbers.
    options = {**(reading or {}), "batch_size": chunk, "collate_fn": collate, "generator": torch.Generator()}
    with tqdm(total=size, desc=f"Loading onto {device}", unit=" samples", disable=None, leave=False) as bar:
        start = 0
        for batch in FeedLoader(samples, **options):
            count = min(chunk, size - start)
            _fill(leaves, batch, start, count)
            start += count
            bar.update(count)
    return ResidentData(leaves, form)


def _fill(leaves: list[_Leaf], batch: object, start: int, count: int) -> None:
    _check_rows(batch, count)
    for leaf, rows in zip(leaves, tree_flatten(batch)[0], strict=True):
        leaf.fill(start, rows)


def free_device_bytes(device: torch.device) -> int | None:
    """Return the number of bytes on the device that are still available to tensors. Returns None if unknown."""
    if device.type == "cpu":
        return read_machine().available_memory_bytes
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


class _SamplesToKeep(Dataset[object]):
    """Samples without augmentation, each checked against the first."""

    def __init__(self, dataset: AnyDataset, expected: dict[str, str]) -> None:
        self.dataset = dataset
        self.expected = expected

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        sample = _sample_to_keep(self.dataset, index)
        shapes = _shapes_of(sample, index)
        if shapes != self.expected:
            paths = {**self.expected, **shapes}
            path = next(path for path in paths if shapes.get(path) != self.expected.get(path))
            raise DatasetError(
                f"Sample {index} has another shape than sample 0, but a dataset on the device needs one "
                f"shape: at sample{path} it has {shapes.get(path, 'nothing')}, not "
                f"{self.expected.get(path, 'nothing')}. Resize in sample_to_keep(), or leave on_device out."
            )
        return sample


def _shapes_of(sample: object, index: int) -> dict[str, str]:
    """Return type and shape of each leaf of a sample, by its path: ``{"['image']": "uint8 (32, 32, 3)"}``."""
    shapes = {}
    for path, leaf in tree_flatten_with_path(sample)[0]:
        if isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc"):
            shapes[keystr(path)] = f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
        elif isinstance(leaf, (bool, int, float, np.number, np.bool_)):
            shapes[keystr(path)] = f"a {type(leaf).__name__}"
        else:
            raise DatasetError(
                f"Sample {index} has a {type(leaf).__name__} at sample{keystr(path)}, which cannot be kept on a "
                "device. Use only tensors, arrays and numbers."
            )
    return shapes


def _sample_to_keep(dataset: AnyDataset, index: int) -> Any:
    """Return the result of ``sample_to_keep``, which does not augment. For a dataset without it, ``dataset[index]``."""
    if isinstance(dataset, Subset):
        return _sample_to_keep(dataset.dataset, dataset.indices[index])
    if isinstance(dataset, ConcatDataset):
        number = bisect_right(dataset.cumulative_sizes, index)
        samples_before = dataset.cumulative_sizes[number - 1] if number else 0
        return _sample_to_keep(dataset.datasets[number], index - samples_before)
    if hasattr(dataset, "sample_to_keep"):
        return dataset.sample_to_keep(index)
    return dataset[index]


def _check_kind(dataset: object) -> None:
    """Refuse streams, and warn if samples may be augmented."""
    if isinstance(dataset, IterableDataset):
        raise DatasetError(
            f"A stream (an IterableDataset, here {type(dataset).__name__}) has no samples by index, so it cannot be "
            "kept on the device. Leave on_device out, or pass a map-style dataset."
        )
    if isinstance(dataset, (Subset, ConcatDataset)):
        for inner in [dataset.dataset] if isinstance(dataset, Subset) else dataset.datasets:
            _check_kind(inner)
    elif not hasattr(dataset, "sample_to_keep") and not isinstance(dataset, TensorDataset):
        logger.warning(
            "The samples of %s are kept on the device as they are now. A random augmentation would be the same in "
            "each epoch: write a method sample_to_keep(index) that does not augment, and augment in device_transform.",
            type(dataset).__name__,
        )


def _check_rows(batch: object, rows: int) -> None:
    for path, leaf in tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            value = tuple(leaf.shape) if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise DatasetError(
                f"The collate function returned {value} at batch{keystr(path)}, but a dataset on the device needs a "
                "tensor with a row per sample there. Use torch's own collate function, or leave on_device out."
            )


def _refuse_if_too_large(sample_bytes: int, size: int, device: torch.device) -> None:
    needed = sample_bytes * size
    free = free_device_bytes(device)
    if free is None or needed <= _SHARE * free:
        return
    raise SettingsError(
        f"on_device=True needs {needed >> 20} MiB on {device}, for {size} samples of {sample_bytes} bytes each, but "
        f"only {_SHARE:.0%} of the {free >> 20} MiB free may be taken. Keep uint8 and convert in device_transform, "
        "make samples smaller, or leave on_device out."
    )


def _allocate(leaf: Tensor, rows: int, device: torch.device) -> _Leaf:
    order = sorted(range(leaf.ndim), key=lambda dim: (leaf.stride(dim), leaf.shape[dim]), reverse=True)
    if leaf.is_contiguous() or order[0] != 0:
        order = list(range(leaf.ndim))
    shape = [leaf.shape[dim] for dim in order[1:]]
    dims = tuple(order.index(dim) for dim in range(leaf.ndim))
    return _Leaf(torch.empty((rows, *shape), dtype=leaf.dtype, device=device), dims)


class ResidentLoader(FeedLoader):
    """FeedLoader over :class:`ResidentData`: the same samples in the same order, already on the device.

    With torch's own batch sampler nothing is copied per batch: all indices of an epoch are moved to the device at its
    start, as one tensor. A custom batch sampler is called for each batch, and its list of indices is copied.

    Args:
        dataset: the samples on the device.
        order: as for :class:`FeedLoader`.
        **options: DataLoader arguments under their usual names, because Lightning copies the loader to replace its
            sampler.
    """

    def __init__(self, dataset: ResidentData, *, order: EpochOrder | None = None, **options: Any) -> None:
        super().__init__(dataset, order=order, **{**options, "collate_fn": _unchanged})
        if type(self.batch_sampler) is BatchSampler:
            # Only in our own index source: Lightning must find the plain BatchSampler, which it can replace.
            self._index.inner = _Batches(self.sampler, self.batch_sampler, dataset)


class _Batches:
    """Batches of a plain BatchSampler, as slices of one tensor of row numbers on the device."""

    def __init__(self, sampler: AnySampler, plain: BatchSampler, data: ResidentData) -> None:
        self.sampler = sampler
        self.plain = plain
        self.data = data

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Tensor | list[int]]:
        order = self._order()
        if order is None:
            yield from self.plain
            return
        order = order.to(self.data.device)
        size = self.plain.batch_size
        end = len(order)
        if self.plain.drop_last:
            end -= end % size
        for start in range(0, end, size):
            yield order[start : start + size]

    def _order(self) -> Tensor | None:
        """Return the row numbers of an epoch. Returns None if the sampler has no length, and so may be endless."""
        if not hasattr(self.sampler, "__len__"):
            return None
        order = torch.tensor(list(self.sampler), dtype=torch.int64, device="cpu")
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(self.data):
            raise LoaderError(
                f"The sampler {type(self.sampler).__name__} returned indices from {int(order.min())} to "
                f"{int(order.max())}, but the dataset has {len(self.data)} samples."
            )
        return order


def _unchanged(batch: object) -> object:
    """``collate_fn`` that returns the batch from the device unchanged."""
    return batch
