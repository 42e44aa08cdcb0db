"""The loaders of one data module: built for each split, with one order for the run, and told about."""

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import IterableDataset, RandomSampler

from lightning_feed import _host
from lightning_feed.archive.shared_cache import parse_limit
from lightning_feed.datamodule_storage import Storage
from lightning_feed.load.build import Job, Part, build_loader, like, name_datasets, size_of
from lightning_feed.load.cloning import preserve_state
from lightning_feed.load.drop_keys import DroppingCollate
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import SEEDS, LoaderSettings
from lightning_feed.load.tuning.even import even_batch_size
from lightning_feed.load.tuning.search import Tuned
from lightning_feed.load.worker import WorkerInit
from lightning_feed.transfer.resident import ResidentData, ResidentLoader, Shard, free_device_bytes, load_resident
from lightning_feed.tuning.fit import explained, for_trials, settled, tune_for_fit, why_not_now
from lightning_feed.watch.guard import say

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Collate:
    """``datamodule.collate`` for one split, as a ``collate_fn``. Spawned workers get the data module without Trainer
    and datasets: see ``FeedDataModule.__getstate__``."""

    datamodule: Any
    split: str

    def __call__(self, samples: list[Any]) -> Any:
        """Make a batch. Runs in the workers."""
        return self.datamodule.collate(samples, self.split)


@dataclass
class Loaders:
    """Builds loaders for a data module, and keeps what was chosen for them."""

    settings: LoaderSettings
    seed: int | None = None
    drop_keys: tuple[str, ...] = ()
    """Parts of batches that are left out in the workers."""
    chosen: dict[str, Recommendation] = field(default_factory=dict)
    resident: dict[str, tuple[Any, ResidentData]] = field(default_factory=dict)
    """Datasets and what of them is on the device, by the name of the loader."""
    tuned: dict[str, Tuned | None] = field(default_factory=dict)
    """What tuning found, by the name of the loader; None where it took too long."""
    even: dict[str, str] = field(default_factory=dict)
    """What there is to say of the batch size of evaluation, by the name of the loader."""

    def build(self, datamodule: Any, split: str, made: Any, storage: Storage) -> Any:
        """Loaders for ``made``, the dataset of a split or a dict or list of them, in the same form."""
        trainer = datamodule.trainer
        named = name_datasets(made, split)
        # Training goes through its loaders side by side, evaluation through one after the other.
        together = len(named) if split == "train" else 1
        job = replace(Job() if trainer is None else job_of(trainer), reserved_bytes=storage.growth_bytes())
        loaders = []
        for index, (name, dataset) in enumerate(named):
            # Loaders of one seed would go through datasets of one size in one order, always with the same pairs.
            run_seed = self.seed_of_run(trainer)
            seed = mix_seed(run_seed, index, 0, "loader") if index else run_seed
            training = split == "train"
            part = Part(
                name=name,
                split=split,
                batch_size=datamodule.batch_size if training else self._eval_size(datamodule, name, dataset, job),
                together=together,
                sampler=lambda dataset: datamodule.sampler(dataset, split),
                collate_fn=self._collate(datamodule, split),
                order=EpochOrder(seed=seed, epoch=datamodule._feed_epoch),
                decode=datamodule._feed_decode(split),
            )
            if storage.cache == "device":
                loader, found = self._build_on_device(trainer, dataset, part, storage, job)
            else:
                loader, found = self._build(datamodule, dataset, part, job)
            self._tell(trainer, split, name, found)
            loaders.append(loader)
        return like(made, loaders)

    def _build(self, datamodule: Any, dataset: Any, part: Part, job: Job) -> tuple[FeedLoader, Recommendation]:
        """The loader of a dataset, tuned where that was asked for."""
        if self.settings.num_workers != "tune":
            return build_loader(dataset, part, self.settings, job)
        trainer, tuned, why_not = datamodule.trainer, None, why_not_now(datamodule.trainer, part.split)
        if not why_not:
            if part.name not in self.tuned:
                # A sampler of the user's may draw random numbers when it is made, or count how often that is.
                with preserve_state(datamodule, dataset):
                    tried, _ = build_loader(dataset, part, replace(self.settings, num_workers="auto"), job)
                    tuned = tune_for_fit(for_trials(tried, self.settings), trainer, part.name)
                self.tuned[part.name] = tuned
            tuned = self.tuned[part.name]
        loader, found = build_loader(dataset, part, settled(self.settings, tuned), job)
        return loader, explained(found, self.settings, tuned, why_not)

    def _eval_size(self, datamodule: Any, name: str, dataset: Any, job: Job) -> int:
        """Samples in a batch of evaluation."""
        wished = datamodule.eval_batch_size
        even = wished == "even"
        size: int = datamodule.batch_size if even or wished is None else wished
        samples = size_of(dataset)
        if samples is None or isinstance(dataset, IterableDataset):
            if even:
                self.even[name] = f"eval_batch_size={size}: a stream has no length that could be divided evenly"
            return size
        found = even_batch_size(size, samples, job.sharing_ranks)
        if even:
            self.even[name] = f"eval_batch_size={found.batch_size}: {found.reason}"
            return found.batch_size
        if found.batch_size != size:
            self.even[name] = f'eval_batch_size={size}: "even" would take {found.batch_size}: {found.reason}'
        return size

    def _collate(self, datamodule: Any, split: str) -> Callable[[list[Any]], Any] | None:
        collate = Collate(datamodule, split) if datamodule._feed_overrides("collate") else None
        return DroppingCollate(collate, self.drop_keys) if self.drop_keys else collate

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
                reading={"num_workers": workers, "workers": self.settings.workers},
            )
            held = self.resident[part.name] = (dataset, data)
        data, sampler = held[1], part.sampler(dataset)
        training = part.split == "train"
        if sampler is None and training and self.settings.shuffle and not job.overfit:
            sampler = RandomSampler(data)
        loader = ResidentLoader(
            data,
            batch_size=part.batch_size,
            sampler=sampler,
            drop_last=training and self.settings.drop_last,
            order=part.order,
        )
        reason = f"the set is on {device} ({data.stored_bytes >> 20} MiB), so there is nothing to load"
        names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        found = Recommendation(
            num_workers=0,
            prefetch_factor=None,
            pin_memory=False,
            persistent_workers=False,
            reasons=dict.fromkeys(names, reason),
        )
        return loader, found

    def seed_of_run(self, trainer: Any) -> int:
        """The seed of the training order: as given, that of ``seed_everything``, or drawn once for all ranks."""
        if self.seed is None:
            self.seed = self.settings.seed
        if self.seed is None and "PL_GLOBAL_SEED" in os.environ:
            self.seed = int(os.environ["PL_GLOBAL_SEED"])
        if self.seed is None:
            self.seed = int(torch.randint(SEEDS, (), device="cpu"))
            if trainer is not None and trainer.world_size > 1:
                # Each rank takes its share of one common order.
                self.seed = trainer.strategy.broadcast(self.seed)
        return self.seed

    def load_seed(self, saved: int | None) -> None:
        """Take the seed of the run that wrote a checkpoint."""
        given = self.settings.seed
        if given is not None and saved is not None and saved != given:
            logger.warning(
                "The checkpoint was trained in the order of seed %d, and LoaderSettings gives seed %d. That of the "
                "checkpoint is used, since another order would repeat samples in this epoch.",
                saved,
                given,
            )
        self.seed = saved if saved is not None else self.seed

    def recommendations(self) -> Mapping[str, Recommendation]:
        """What was chosen, by the name of the loader."""
        return MappingProxyType(self.chosen)

    def report(self) -> str:
        """What was chosen, and why: one line for each value."""
        if not self.chosen:
            return "No loader has been made yet."
        lines = [(name, line) for name, made in self.chosen.items() for line in [*_lines(made), *self._even_line(name)]]
        return "\n".join(f"{name}: {line}" for name, line in lines)

    def _even_line(self, name: str) -> list[str]:
        return [self.even[name]] if name in self.even else []

    def copy(self) -> "Loaders":
        """For a copy of the data module, whose run is its own."""
        return Loaders(
            self.settings, seed=self.seed, drop_keys=self.drop_keys, chosen=dict(self.chosen), tuned=dict(self.tuned)
        )

    def _tell(self, trainer: Any, split: str, name: str, found: Recommendation) -> None:
        """Keep what was chosen, and say it once. Lightning is kept from complaining about it."""
        news = self.chosen.get(name) != found
        self.chosen[name] = found
        if news and (trainer is None or trainer.is_global_zero):
            say(logger, logging.INFO, "\n".join(f"{name}: {line}" for line in _lines(found)))
            for warning in found.warnings:
                say(logger, logging.WARNING, f"{name}: {warning}")
        if found.num_workers < 2:
            hush(f"The '{split}_dataloader' does not have many workers")
        if found.num_workers and not found.persistent_workers:
            hush(f"Consider setting `persistent_workers=True` in '{split}_dataloader'")


def job_of(trainer: Any) -> Job:
    """What loaders have to know of a Trainer's run."""
    seeding = int(os.environ.get("PL_SEED_WORKERS", "0"))
    return Job(
        device_type=trainer.strategy.root_device.type,
        local_ranks=trainer.num_devices,
        sharing_ranks=_host.ranks_that_share_samples(trainer),
        reload_every_n_epochs=trainer.reload_dataloaders_every_n_epochs,
        overfit=trainer.overfit_batches > 0,  # shuffled loaders would be replaced by Lightning, with a warning
        worker_init=WorkerInit(rank=trainer.global_rank, seed_worker=pl_worker_init_function if seeding else None),
    )


def hush(message: str) -> None:
    """Keep one warning of Lightning's back: what it advises was considered, and decided otherwise with a reason."""
    warnings.filterwarnings("ignore", message=message, category=UserWarning)


def _lines(found: Recommendation) -> list[str]:
    return found.describe().splitlines()
