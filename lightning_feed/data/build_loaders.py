"""The loaders of one data module: recommended settings, tuning, data on the device, and the report.

Tuning and data on the device are imported only if a setting needs them.
"""

import logging
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import IterableDataset, RandomSampler

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.load.build import Part, build_loader, even_batch_size
from lightning_feed.load.kinds import AnyDataset
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import size_of
from lightning_feed.load.recommend import Recommendation, RunFacts
from lightning_feed.load.settings import LoaderSettings, Setting, workers_of
from lightning_feed.load.worker import WorkerInit
from lightning_feed.machine.limits import read_machine

if TYPE_CHECKING:
    from lightning_feed.load.rehearsal import Rehearsal
    from lightning_feed.transfer.resident import ResidentData

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "predict")


def ignore_warning(message: str) -> None:
    """Suppress a Lightning warning whose advice does not apply here."""
    warnings.filterwarnings("ignore", message=message, category=UserWarning)


@dataclass
class ChosenSettings:
    """The settings chosen for a data module's loaders, by loader name."""

    settings: LoaderSettings
    """The user's settings."""
    chosen: dict[str, Recommendation] = field(default_factory=dict)
    even: dict[str, str] = field(default_factory=dict)
    """Report line about the evaluation batch size, by loader name."""

    def announce(self, trainer: AnyTrainer | None, split: str, name: str, recommendation: Recommendation) -> None:
        """Log the settings of a loader on one rank if they are new, and suppress Lightning's advice on them."""
        if self.chosen.get(name) != recommendation and (trainer is None or trainer.is_global_zero):
            with suppress(Exception):  # a logging handler may raise, as Python's own do after stderr is closed
                _log_settings(name, recommendation)
        self.chosen[name] = recommendation
        setting = recommendation.setting
        if setting.num_workers < 2:
            ignore_warning(f"The '{split}_dataloader' does not have many workers")
        if setting.num_workers and not setting.persistent_workers:
            ignore_warning(f"Consider setting `persistent_workers=True` in '{split}_dataloader'")

    def report(self) -> str:
        """Return the settings with reasons, one line per value."""
        lines = []
        for name, recommendation in self.chosen.items():
            lines += [f"{name}: {line}" for line in recommendation.describe().splitlines()]
            if name in self.even:
                lines.append(f"{name}: {self.even[name]}")
        return "\n".join(lines) or "No loader has been made yet."


def _log_settings(name: str, recommendation: Recommendation) -> None:
    values = vars(recommendation.setting)
    chosen = ", ".join(f"{setting}={values[setting]}" for setting in recommendation.reasons)
    logger.info("%s: %s (loader_report() has the reasons)", name, chosen)
    for warning in recommendation.warnings:
        logger.warning("%s: %s", name, warning)


@dataclass
class Loaders(ChosenSettings):
    """Builds the loaders of one data module."""

    drop_keys: tuple[str, ...] = ()
    """Keys of batches that are dropped in the workers."""
    on_device: bool = False
    """True to keep whole datasets on the device."""
    rehearsals: "dict[str, tuple[AnyDataset, Rehearsal]]" = field(default_factory=dict)
    """Datasets with their rehearsals, by loader name."""
    resident: "dict[str, tuple[object, ResidentData]]" = field(default_factory=dict)
    """Datasets kept on the device, with their data there, by loader name."""

    def build(
        self, trainer: AnyTrainer | None, dataset: AnyDataset, part: Part, job: RunFacts, *, even: bool
    ) -> FeedLoader:
        """Build the loader of one dataset.

        Args:
            trainer: the Trainer of the run, if there is one.
            dataset: the dataset to load.
            part: the loader to build. In evaluation, its batch size is the largest allowed.
            job: the run's properties, such as its number of ranks.
            even: True to evaluate with the batch size that leaves the fewest samples for a smaller last batch.
        """
        if part.split != "train":
            part = replace(part, batch_size=self._eval_size(part, dataset, job, even=even))
        if self.on_device:
            loader, recommendation = self._build_on_device(trainer, dataset, part, job)
        else:
            rehearsed = partial(self._rehearsed, part.name)
            loader, recommendation = build_loader(dataset, part, self.settings, job, rehearsed)
        self.announce(trainer, part.split, part.name, recommendation)
        return loader

    def _rehearsed(self, name: str, loader: FeedLoader) -> "Rehearsal":
        """Return the rehearsal of a loader, made once for each dataset."""
        from lightning_feed.load.rehearsal import rehearse  # only if workers are chosen

        held = self.rehearsals.get(name)
        if held is None or held[0] is not loader.dataset:
            held = self.rehearsals[name] = loader.dataset, rehearse(loader)
        return held[1]

    def _eval_size(self, part: Part, dataset: AnyDataset, job: RunFacts, *, even: bool) -> int:
        """Choose the evaluation batch size, and note for the report which size would divide the samples best."""
        size = part.batch_size
        samples = None if isinstance(dataset, IterableDataset) else size_of(dataset)
        if samples is None:
            best = size
            reason = "a stream has no length that could be divided evenly"
        else:
            best, reason = even_batch_size(size, samples, job.sharing_ranks)
        if even:
            self.even[part.name] = f"eval_batch_size={best}: {reason}"
            return best
        if best != size:
            self.even[part.name] = f'eval_batch_size={size}: "even" would take {best}: {reason}'
        return size

    def _build_on_device(
        self, trainer: AnyTrainer | None, dataset: AnyDataset, part: Part, job: RunFacts
    ) -> tuple[FeedLoader, Recommendation]:
        """Build the loader of a dataset kept on the device. Loads the data now if necessary."""
        from lightning_feed.transfer.resident import ResidentLoader

        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
        data = self._resident_data(dataset, part, job, device)
        sampler = part.sampler(dataset)
        training = part.split == "train"
        if sampler is None and training and not job.overfit:
            sampler = RandomSampler(data)
        drop_last = training and self.settings.drop_last
        loader = ResidentLoader(
            data, batch_size=part.batch_size, sampler=sampler, drop_last=drop_last, order=part.order
        )
        reason = f"the set is on {device} ({data.stored_bytes >> 20} MiB), so there is nothing to load"
        names = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
        return loader, Recommendation(setting=Setting(num_workers=0), reasons=dict.fromkeys(names, reason))

    def _resident_data(self, dataset: AnyDataset, part: Part, job: RunFacts, device: torch.device) -> "ResidentData":
        """Return the dataset's data on the device. The first call loads the data there."""
        if part.name in self.resident:
            held, data = self.resident[part.name]
            if held is dataset and data.device == device:
                return data
            del self.resident[part.name], data  # free it before loading the next: there may not be room for both
        data = self._load(dataset, part, job, device)
        self.resident[part.name] = (dataset, data)
        return data

    def _load(self, dataset: AnyDataset, part: Part, job: RunFacts, device: torch.device) -> "ResidentData":
        from lightning_feed.transfer.resident import load_resident

        workers = self.settings.num_workers
        if not isinstance(workers, int):
            # Workers are worth starting only for more than a few batches.
            workers = min(read_machine().usable_cpus // job.local_ranks, len(dataset) // 512)
        return load_resident(
            dataset,
            device=device,
            collate_fn=part.collate_fn,
            reading={"num_workers": workers, "workers": workers_of(self.settings)},
        )

    def copy(self) -> "Loaders":
        """Return the Loaders object for a copy of the data module."""
        return replace(self, chosen=dict(self.chosen), even={}, rehearsals={}, resident={})


def attach_tuning(trainer: AnyTrainer, *, given: bool = False) -> None:
    """Add an AutotuneCallback to a Trainer that has none.

    Args:
        trainer: the Trainer of a fit.
        given: True for a callback that only watches the workers that the user has asked for.
    """
    from lightning_feed.callbacks.autotune import AutotuneCallback, GivenWorkers

    callbacks = _host.callbacks_of(trainer)
    callbacks[:] = [callback for callback in callbacks if type(callback) is not GivenWorkers]  # of an earlier fit
    if not any(isinstance(callback, AutotuneCallback) for callback in callbacks):
        callbacks.append(GivenWorkers() if given else AutotuneCallback())


def job_of(trainer: AnyTrainer | None) -> RunFacts:
    """Return the properties of the Trainer's run that loaders need; without a Trainer, the defaults of a RunFacts."""
    if trainer is None:
        return RunFacts()
    seeding = int(os.environ.get("PL_SEED_WORKERS", "0"))
    return RunFacts(
        device_type=trainer.strategy.root_device.type,
        local_ranks=trainer.num_devices,
        sharing_ranks=_host.ranks_that_share_samples(trainer),
        reload_every_n_epochs=_host.reload_interval(trainer),
        overfit=_host.overfits(trainer),  # shuffled loaders would be replaced by Lightning, with a warning
        worker_init=WorkerInit(rank=trainer.global_rank, seed_worker=pl_worker_init_function if seeding else None),
    )
