"""wrap: gives the loaders of any LightningDataModule a number of workers that fits the machine."""

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import _host
from lightning_feed._host import AnyDataModule, AnyTrainer, Original, Stage
from lightning_feed.callbacks.fresh_workers import FreshWorkers
from lightning_feed.data.build_loaders import SPLITS, ChosenSettings, job_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.fork_safety import may_change, why_no_workers, why_not_renewed
from lightning_feed.load.loader_tree import name_in_split, rebuild_loaders, walk_loaders
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import size_of
from lightning_feed.load.recommend import Job, Recommendation, Workload, recommend
from lightning_feed.load.settings import LoaderSettings, Setting
from lightning_feed.load.slot_loaders import put_in_slots
from lightning_feed.load.worker import WorkerInit, why_not_sent
from lightning_feed.trials.cloning import twin_of

logger = logging.getLogger(__name__)

_CHANGED = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_OF_DALI = "DALI loads in threads of its own: set num_threads and prefetch_queue_depth of its Pipeline."
_STAGES: dict[str, Stage] = {"train": "fit", "val": "validate"}
"""The stage within a fit of each split whose workers may stay alive throughout the fit."""
_ACCEPTED = (*_CHANGED, "hand_over")
"""Settings that the user may pass."""


def wrap(datamodule: Any, loader: LoaderSettings | None = None) -> Any:
    """Give the loaders of a data module other workers. See ``FastDataModule.wrap``.

    The data module stays the same object, so all its hooks run as before. Only its loader hooks are wrapped.

    Raises:
        SettingsError: the object is not a data module or chooses its loaders itself, or a setting was passed that
            wrapping does not change.
    """
    name = type(datamodule).__name__
    if not hasattr(datamodule, "train_dataloader") or not hasattr(datamodule, "prepare_data"):
        raise SettingsError(
            f"A {name} cannot be wrapped. Pass a LightningDataModule. To make one from datasets: "
            "LightningDataModule.from_datasets(train_set, val_set, batch_size=32)."
        )
    _host.package_of(datamodule)
    if hasattr(datamodule, "loader_report"):
        raise SettingsError(
            f"{name} already chooses its loaders itself. Pass loader=LoaderSettings(...) to its constructor."
        )
    loaders = WrappedLoaders(loader or LoaderSettings())
    for split in SPLITS:
        _LoaderHook(datamodule, f"{split}_dataloader", functools.partial(loaders.make, datamodule, split))
    datamodule.loader_report = loaders.report
    datamodule.recommendations = loaders.chosen
    datamodule._feed_wrapped = True
    return datamodule


class _LoaderHook(_host.Wrap):
    """The wrap of a loader hook. Unlike other wraps, it stays in copies, such as those that ddp_spawn makes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return object.__new__, (type(self),), vars(self)


# --- the loaders ------------------------------------------------------------------------------------------------------


@dataclass
class WrappedLoaders(ChosenSettings):
    """The settings chosen for the loaders of a wrapped data module.

    Raises:
        SettingsError: a setting was passed that the user's loaders decide.
    """

    left_alone: set[str] = field(default_factory=set)
    """Names of loaders that are not DataLoaders, and about which the user was warned."""

    def __post_init__(self) -> None:
        defaults = vars(LoaderSettings())
        for name, value in vars(self.settings).items():
            if name not in _ACCEPTED and value != defaults[name]:
                raise SettingsError(
                    f"{name}={value!r} would have no effect: wrap() changes only {', '.join(_CHANGED)}. Set it where "
                    "the loaders are made."
                )

    def make(self, datamodule: AnyDataModule, split: str, original: Original) -> Any:
        """Make the loaders of a split with the user's hook, and give them other workers."""
        return self.change(datamodule.trainer, split, original())

    def change(self, trainer: AnyTrainer | None, split: str, structure: object) -> Any:
        """Give other workers to each DataLoader in a structure of loaders. Other loaders stay unchanged."""
        # Training iterates its loaders in parallel, evaluation one after the other.
        loaders = walk_loaders(structure)
        together = 1
        if split == "train":
            together = max(1, sum(isinstance(loader, DataLoader) for _, loader in loaders))
        changed = []
        for path, loader in loaders:
            name = name_in_split(split, path)
            if isinstance(loader, DataLoader):
                changed.append(self._change(trainer, split, name, loader, together))
            else:
                self._note_left_alone(name, loader)
                changed.append(loader)
        if trainer is not None and trainer.state.fn == "fit" and split in _STAGES:
            FreshWorkers.watch(trainer, _STAGES[split], changed)
        return rebuild_loaders(structure, changed)

    def _change(
        self, trainer: AnyTrainer | None, split: str, name: str, loader: DataLoader[object], together: int
    ) -> DataLoader[object]:
        settings = replace(self.settings, workers="process", start_method=None)
        recommendation = _recommended(loader, split, settings, job_of(trainer), together)
        self.announce(trainer, split, name, recommendation)
        return _rebuilt(loader, recommendation.setting, settings)

    def _note_left_alone(self, name: str, loader: object) -> None:
        if name in self.left_alone:
            return
        self.left_alone.add(name)
        message = f"{name} is a {type(loader).__name__}, not a torch DataLoader, so it is left as it is."
        if any(kind.__module__.startswith("nvidia.dali.") for kind in type(loader).__mro__):
            message += f" {_OF_DALI}"
        logger.warning("%s", message)


def _rebuilt(loader: DataLoader[object], setting: Setting, settings: LoaderSettings) -> DataLoader[object]:
    """Copy a loader with other workers. Processes that torch starts as workers leave their batches in slots.

    A StatefulDataLoader keeps its resume position.
    """
    changed: dict[str, object] = {name: vars(setting)[name] for name in _CHANGED}
    changed["worker_init_fn"] = loader.worker_init_fn or WorkerInit()
    twin = twin_of(loader, **changed)
    if not setting.num_workers:
        changed |= {"multiprocessing_context": None, "timeout": 0}
    _host.change_saved_arguments(twin, changed, always=_CHANGED)
    vars(twin)["hand_over"] = settings.hand_over  # a tuner's copy of this loader follows this setting, too
    put_in_slots(twin)
    return twin


def _recommended(
    loader: DataLoader[object], split: str, settings: LoaderSettings, job: Job, together: int
) -> Recommendation:
    """Choose the settings of a loader, one of ``together`` that run at the same time."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    why_kept = ""
    if not isinstance(settings.num_workers, int):
        why_kept = _why_kept(loader, is_stream=is_stream)
    if why_kept:
        settings = _as_it_is(loader, settings)
    if settings.persistent_workers == "auto" and not loader.persistent_workers and may_change(loader.dataset):
        settings = replace(settings, persistent_workers=False)
    batches = size_of(loader)
    if batches is not None and not is_stream:
        batches = -(-batches // job.sharing_ranks)
    workload = Workload(
        split=split,
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
        batches=batches,
        loaders=together,
        iterable=is_stream,
        **vars(job),
    )
    recommendation = recommend(read_machine(), settings, workload)
    if not why_kept:
        return recommendation
    return replace(recommendation, reasons={**recommendation.reasons, "num_workers": why_kept})


def _as_it_is(loader: DataLoader[object], settings: LoaderSettings) -> LoaderSettings:
    """The settings with the loader's own number of workers; without workers, settings that need workers are unset."""
    if loader.num_workers:
        return replace(settings, num_workers=loader.num_workers)
    defaults = vars(LoaderSettings())
    unused = {name: defaults[name] for name in settings.asking_for_workers()}
    return replace(settings, num_workers=0, **unused)


def _why_kept(loader: DataLoader[object], *, is_stream: bool) -> str:
    """Return the reason for keeping the number of workers. Empty if the number is chosen here."""
    if is_stream:
        return "as the loader has it: each worker of an IterableDataset decides which samples it reads"
    context: Any = loader.multiprocessing_context
    start_method = context.get_start_method() if context is not None else read_machine().start_method
    why = why_not_sent(loader, start_method)
    if not why and not loader.num_workers:
        # A worker_init_fn of the user is expected to seed the generators and open the files in workers.
        has_own_init = loader.worker_init_fn is not None
        why = why_no_workers(loader.dataset) if has_own_init else why_not_renewed(loader.dataset)
    return f"as the loader has it: {why}" if why else ""
