"""The loader of a dataset that is on the device: the sampler's order as one tensor there, a batch as a gather."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_feed.errors import LoaderError, SettingsError
from lightning_feed.load.epoch_order import EpochOrder, mix_seed
from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.transfer.resident import ResidentData, Shard


class ResidentLoader(FeedLoader):
    """A FeedLoader over :class:`ResidentData`: the same samples in the same order, on the device already.

    Under torch's own samplers and batches the host does nothing for each sample, and nothing is copied for each batch:
    the order of an epoch is drawn as one tensor and moved to the device at its beginning. A sampler of the user's is
    asked for all its indices then; a batch sampler of the user's is asked for each batch, whose list of indices is
    copied.

    With a shard, Lightning's DistributedSampler says how many samples the rank takes and from which seed; they are of
    the rank's own share, shuffled in itself. Over all ranks an epoch has each sample once, and as many of them twice as
    DistributedSampler repeats to give all ranks the same number.

    Args:
        dataset: what is on the device.
        order: as for :class:`FeedLoader`.
        **options: DataLoader's own, by name for Lightning, which makes a copy with another sampler.

    Raises:
        SettingsError: when workers or pinned memory are asked for: there is nothing for them to do.
    """

    def __init__(self, dataset: ResidentData, *, order: EpochOrder | None = None, **options: Any) -> None:
        for name in ("num_workers", "pin_memory"):
            if options.get(name):
                raise SettingsError(
                    f"{name}={options[name]!r} would have no effect on a set that is on the device. Leave it out."
                )
        super().__init__(dataset, order=order, **{**options, "collate_fn": _as_it_is})
        if type(self.batch_sampler) is BatchSampler:
            # In our own index source only: Lightning finds the plain BatchSampler, which it knows how to replace.
            self._index.inner = _Batches(self.sampler, self.batch_sampler, dataset)


class _Batches:
    """What a plain BatchSampler gives, as slices of one tensor of row numbers on the device."""

    def __init__(self, sampler: Any, plain: BatchSampler, data: ResidentData) -> None:
        self.sampler, self.plain, self.data = sampler, plain, data

    def __len__(self) -> int:
        return len(self.plain)

    def __iter__(self) -> Iterator[Tensor | list[int]]:
        order = self._order()
        if order is None:
            yield from self.plain
            return
        order = order.to(self.data.device)
        step = self.plain.batch_size
        end = len(order) - len(order) % step if self.plain.drop_last else len(order)
        for start in range(0, end, step):
            yield order[start : start + step]

    def _order(self) -> Tensor | None:
        shard = self.data.shard
        if shard is not None:
            return _order_in_shard(self.sampler, shard, self.data.held)
        order = order_of(self.sampler)
        if order is not None and len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(self.data):
            raise LoaderError(
                f"The sampler {type(self.sampler).__name__} gave indices from {int(order.min())} to "
                f"{int(order.max())}, and the dataset has {len(self.data)} samples."
            )
        return order


def order_of(sampler: Any) -> Tensor | None:
    """All indices that ``iter(sampler)`` would give now, as a tensor; None for a sampler without a length.

    Torch's own are drawn as tensors, with the very calls that they make themselves: int64, shape (n,), on the host.
    """
    if type(sampler) is SequentialSampler:
        return torch.arange(len(sampler))
    if type(sampler) is RandomSampler and sampler.generator is not None and not sampler.replacement:
        size = len(sampler.data_source)
        whole = [torch.randperm(size, generator=sampler.generator) for _ in range(sampler.num_samples // size)]
        # Drawn even where nothing is left to be taken from it, as torch does: the user's generator must go on alike.
        rest = torch.randperm(size, generator=sampler.generator)[: sampler.num_samples % size]
        return torch.cat([*whole, rest])
    if type(sampler) is DistributedSampler:
        return _order_of_rank(sampler)
    if not hasattr(sampler, "__len__"):
        return None  # may be endless
    return torch.tensor(list(islice(sampler, None)), dtype=torch.int64)


def _order_of_rank(sampler: DistributedSampler[Any]) -> Tensor:
    """DistributedSampler.__iter__ (torch 2.6 to 2.15) in tensors."""
    size = len(sampler.dataset)  # type: ignore[arg-type]
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = torch.randperm(size, generator=generator)
    else:
        order = torch.arange(size)
    if not sampler.drop_last:
        order = order.repeat(-(-sampler.total_size // size))
    return order[sampler.rank : sampler.total_size : sampler.num_replicas]


def _order_in_shard(sampler: Any, shard: Shard, held: int) -> Tensor:
    """The rows of a shard for one epoch, as many as the sampler would give to its rank."""
    if not isinstance(sampler, DistributedSampler) or (sampler.rank, sampler.num_replicas) != (shard.rank, shard.ranks):
        raise LoaderError(
            f"Rank {shard.rank} of {shard.ranks} holds its own share of the set, and its sampler is a "
            f"{type(sampler).__name__} that does not divide the set in this way. Leave the sampler to Lightning "
            "(use_distributed_sampler=True, and no sampler()), or keep the whole set on each rank."
        )
    rows = torch.arange(held)
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(mix_seed(sampler.seed, sampler.epoch, shard.rank, "shard"))
        rows = torch.randperm(held, generator=generator)
    # One short where the samples do not go evenly into the ranks: the first again, as DistributedSampler repeats some.
    return rows.repeat(-(-len(sampler) // held))[: len(sampler)] if held < len(sampler) else rows[: len(sampler)]


def _as_it_is(batch: Any) -> Any:
    """The ``collate_fn``: what comes from the device is a batch already."""
    return batch
