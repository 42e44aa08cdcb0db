"""The loaders of one data module: built as recommended, tuned or on the device, and reported."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_feed import _host
from lightning_feed.data.base import ignore_warning
from lightning_feed.data.storage import Storage
from lightning_feed.load.build import Part, build_loader, even_batch_size
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import size_of
from lightning_feed.load.random_state import preserve_state
from lightning_feed.load.settings import Job, LoaderSettings, Recommendation, workers_of
from lightning_feed.load.worker import WorkerInit
from lightning_feed.measure.guard import say
from lightning_feed.storage.shared_cache import parse_limit
from lightning_feed.transfer.resident import ResidentData, ResidentLoader, Shard, free_device_bytes, load_resident
from lightning_feed.trials.in_fit import explained, settled, tune_for_fit, why_not_now
from lightning_feed.trials.search import Tuned

logger = logging.getLogger(__name__)


@dataclass
class ChosenSettings:
    """What was chosen for the loaders of a data module, by their names."""

    settings: LoaderSettings
    """The user's."""
    chosen: dict[str, Recommendation] = field(default_factory=dict)
    tuned: dict[str, Tuned | None] = field(default_factory=dict)
    """What tuning found; None where the ranks could not agree."""
    even: dict[str, str] = field(default_factory=dict)
    """What there is to say of the batch size of evaluation."""

    def settle(
        self, trainer: Any, split: str, name: str, for_trials: Callable[[], DataLoader[Any]]
    ) -> tuple[LoaderSettings, Callable[[Recommendation], Recommendation]]:
        """The settings to choose a loader's values by, tuned where that was asked for, and what adds the reason."""
        if self.settings.num_workers != "tune":
            return self.settings, lambda found: found
        tuned, why_not = None, why_not_now(trainer, split)
        if not why_not:
            if name not in self.tuned:
                tried = for_trials()
                with preserve_state(tried):
                    found = tune_for_fit(tried, trainer, name)
                self.tuned[name] = found  # here: the state that is put back may hold this dict
            tuned = self.tuned[name]
        explain = partial(explained, settings=self.settings, tuned=tuned, why_not=why_not)
        return settled(self.settings, tuned), explain

    def tell(self, trainer: Any, split: str, name: str, found: Recommendation) -> None:
        """Keep what was chosen, log it on one rank if it is news, and keep Lightning from complaining about it."""
        if self.chosen.get(name) != found and (trainer is None or trainer.is_global_zero):
            say(logger, logging.INFO, "\n".join(f"{name}: {line}" for line in found.describe().splitlines()))
            for warning in found.warnings:
                say(logger, logging.WARNING, f"{name}: {warning}")
        self.chosen[name] = found
        if found.num_workers < 2:
            ignore_warning(f"The '{split}_dataloader' does not have many workers")
        if found.num_workers and not found.persistent_workers:
            ignore_warning(f"Consider setting `persistent_workers=True` in '{split}_dataloader'")

    def report(self) -> str:
        """What was chosen, and why: one line for each value."""
        lines = []
        for name, found in self.chosen.items():
            even = [self.even[name]] if name in self.even else []
            lines += [f"{name}: {line}" for line in [*found.describe().splitlines(), *even]]
        return "\n".join(lines) or "No loader has been made yet."


@dataclass
class Loaders(ChosenSettings):
    """Builds the loaders of one data module."""

    drop_keys: tuple[str, ...] = ()
    """Parts of batches that are left out in the workers."""
    resident: dict[str, tuple[Any, ResidentData]] = field(default_factory=dict)
    """Datasets and what of them is on the device, by the name of the loader."""

    def build(self, datamodule: Any, dataset: Any, part: Part, job: Job, storage: Storage) -> FeedLoader:
        """The loader of one dataset of ``datamodule``."""
        trainer = datamodule.trainer

        def to_try() -> DataLoader[Any]:
            # A sampler of the user's may draw random numbers when it is made, or count how often that is.
            with preserve_state(datamodule, dataset):
                tried, _ = build_loader(dataset, part, replace(self.settings, num_workers="auto"), job)
            return tried

        if storage.cache == "device":
            loader, found = self._build_on_device(trainer, dataset, part, storage, job)
        else:
            settings, explain = self.settle(trainer, part.split, part.name, to_try)
            loader, found = build_loader(dataset, part, settings, job)
            found = explain(found)
        self.tell(trainer, part.split, part.name, found)
        return loader

    def eval_size(self, part: Part, dataset: Any, job: Job, *, even: bool) -> int:
        """Samples in a batch of evaluation.

        Args:
            part: whose batch size is the most that it may be.
            dataset: that is divided.
            job: whose ranks it is divided among.
            even: whether to look for a size that leaves the fewest samples for a last batch.
        """
        size, samples = part.batch_size, None if isinstance(dataset, IterableDataset) else size_of(dataset)
        best, reason = size, "a stream has no length that could be divided evenly"
        if samples is not None:
            best, reason = even_batch_size(size, samples, job.sharing_ranks)
        if even:
            self.even[part.name] = f"eval_batch_size={best}: {reason}"
        elif best != size:
            self.even[part.name] = f'eval_batch_size={size}: "even" would take {best}: {reason}'
        return best if even else size

    def _build_on_device(
        self, trainer: Any, dataset: Any, part: Part, storage: Storage, job: Job
    ) -> tuple[FeedLoader, Recommendation]:
        """The loader of a dataset that is kept on the device, where it is put if it is not there yet."""
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        held = self.resident.get(part.name)
        if held is None or held[0] is not dataset or held[1].device != device:
            self.resident.pop(part.name, None)  # before the next one is loaded: there may not be room for both
            ranks = job.sharing_ranks if storage.cache_shard else 1
            workers = self.settings.num_workers
            if not isinstance(workers, int):
                # Worth their start from a few batches on.
                workers = min(read_machine().usable_cpus // job.local_ranks, len(dataset) // 512)
            data = load_resident(
                dataset,
                device=device,
                limit_bytes=parse_limit(storage.cache_limit, free_device_bytes(device)),
                collate_fn=part.collate_fn,
                shard=Shard(trainer.global_rank, ranks) if ranks > 1 else None,
                reading={"num_workers": workers, "workers": workers_of(self.settings)},
            )
            held = self.resident[part.name] = (dataset, data)
        data, sampler = held[1], part.sampler(dataset)
        training = part.split == "train"
        if sampler is None and training and self.settings.shuffle and not job.overfit:
            sampler = RandomSampler(data)
        drop_last = training and self.settings.drop_last
        loader = ResidentLoader(
            data, batch_size=part.batch_size, sampler=sampler, drop_last=drop_last, order=part.order
        )
        values: dict[str, Any] = {
            "num_workers": 0,
            "prefetch_factor": None,
            "pin_memory": False,
            "persistent_workers": False,
        }
        reason = f"the set is on {device} ({data.stored_bytes >> 20} MiB), so there is nothing to load"
        return loader, Recommendation(**values, reasons=dict.fromkeys(values, reason))

    def copy(self) -> "Loaders":
        """For a copy of the data module."""
        return replace(self, chosen=dict(self.chosen), tuned=dict(self.tuned), even={}, resident={})


def job_of(trainer: Any) -> Job:
    """What loaders have to know of a Trainer's run; without a Trainer, of a loader that is used by itself."""
    if trainer is None:
        return Job()
    seeding = int(os.environ.get("PL_SEED_WORKERS", "0"))
    return Job(
        device_type=trainer.strategy.root_device.type,
        local_ranks=trainer.num_devices,
        sharing_ranks=_host.ranks_that_share_samples(trainer),
        reload_every_n_epochs=trainer.reload_dataloaders_every_n_epochs,
        overfit=trainer.overfit_batches > 0,  # shuffled loaders would be replaced by Lightning, with a warning
        worker_init=WorkerInit(rank=trainer.global_rank, seed_worker=pl_worker_init_function if seeding else None),
    )
