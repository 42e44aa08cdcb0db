"""wrap: lets the workers of any LightningDataModule's loaders hand their batches over in place."""

import functools
import logging
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import _host
from lightning_feed._host import AnyDataModule, AnyTrainer, Original
from lightning_feed.callbacks.autotune import WITHOUT_WORKERS
from lightning_feed.data.build_loaders import SPLITS, ChosenSettings, attach_tuning, job_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.kinds import AnyDataset
from lightning_feed.load.loader_tree import name_in_split, rebuild_loaders, walk_loaders
from lightning_feed.load.recommend import Recommendation, RunFacts
from lightning_feed.load.rehearsal import rehearse
from lightning_feed.load.settings import PINNING_DEVICES, LoaderSettings, Setting
from lightning_feed.load.slot_loaders import put_in_slots
from lightning_feed.load.worker import why_not_sent
from lightning_feed.machine.limits import read_machine
from lightning_feed.trials.cloning import clone_with

logger = logging.getLogger(__name__)

_CHANGED = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_STREAM = (
    "the dataset is a stream: each worker yields all of its samples, unless it divides them by "
    "torch.utils.data.get_worker_info()"
)
_IN_PLACE_NEEDS_WORKERS = (
    "Batches in place need workers. FastDataModule.wrap(datamodule, LoaderSettings(num_workers='tune')) tries "
    "numbers of workers."
)
_OF_DALI = "DALI loads in threads of its own: set num_threads and prefetch_queue_depth of its Pipeline."
_ACCEPTED = (*_CHANGED, "hand_over")
"""Settings that the user may pass."""


def wrap(datamodule: Any, loader: LoaderSettings | None = None) -> Any:
    """Let the workers of a data module's loaders hand batches over in place. See ``FastDataModule.wrap``.

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
    if loaders.settings.num_workers not in ("auto", 0):
        given = loaders.settings.num_workers != "tune"
        _Hook(datamodule, "setup", functools.partial(_set_up, datamodule, given=given))
    for split in SPLITS:
        _Hook(datamodule, f"{split}_dataloader", functools.partial(loaders.make, datamodule, split))
    datamodule.loader_report = loaders.report
    datamodule.recommendations = loaders.chosen
    datamodule._feed_wrapped = True
    return datamodule


def _set_up(datamodule: AnyDataModule, original: Original, *args: object, given: bool, **named: object) -> object:
    if datamodule.trainer is not None:
        attach_tuning(datamodule.trainer, given=given)
    return original(*args, **named)


class _Hook(_host.Wrap):
    """The wrap of a hook. Unlike other wraps, it stays in copies, such as those that ddp_spawn makes."""

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
    refusals: dict[str, tuple[AnyDataset, str]] = field(default_factory=dict)
    """Datasets with the reason why a rehearsal has refused workers, by the loader's name; empty if it has not."""

    def __post_init__(self) -> None:
        defaults = vars(LoaderSettings())
        for name, value in vars(self.settings).items():
            if name not in _ACCEPTED and value != defaults[name]:
                raise SettingsError(
                    f"{name}={value!r} would have no effect: wrap() changes only {', '.join(_CHANGED)}. Set it where "
                    "the loaders are made."
                )

    def make(self, datamodule: AnyDataModule, split: str, original: Original) -> Any:
        """Make the loaders of a split with the user's hook, and let them hand batches over in place."""
        return self.change(datamodule.trainer, split, original())

    def change(self, trainer: AnyTrainer | None, split: str, structure: object) -> Any:
        """Change each DataLoader in a structure of loaders. Other loaders stay unchanged."""
        changed = []
        for path, loader in walk_loaders(structure):
            name = name_in_split(split, path)
            if isinstance(loader, DataLoader):
                changed.append(self._change(trainer, split, name, loader))
            else:
                self._note_left_alone(name, loader)
                changed.append(loader)
        return rebuild_loaders(structure, changed)

    def _change(
        self, trainer: AnyTrainer | None, split: str, name: str, loader: DataLoader[object]
    ) -> DataLoader[object]:
        recommendation = self._recommended(loader, name, job_of(trainer))
        self.announce(trainer, split, name, recommendation)
        return _rebuilt(loader, recommendation.setting, self.settings)

    def _recommended(self, loader: DataLoader[object], name: str, job: RunFacts) -> Recommendation:
        """Return the loader's own setting, with the values that the user has passed."""
        settings = self.settings
        setting = Setting.of(loader)
        reasons = dict.fromkeys(_CHANGED, "as the loader has it")
        warnings: tuple[str, ...] = ()
        if isinstance(settings.num_workers, int) and settings.num_workers != setting.num_workers:
            why_not = "" if setting.num_workers else self._why_no_workers(loader, name)
            if why_not:
                reasons["num_workers"] = f"as the loader has it: {why_not}"
                warnings = (f"num_workers={settings.num_workers} is not set: {why_not}",)
            else:
                setting = setting.with_workers(settings.num_workers)
                reasons["num_workers"] = "as given"
                if isinstance(loader.dataset, IterableDataset) and setting.num_workers > 1:
                    warnings = (_STREAM,)
        if not setting.num_workers:
            return Recommendation(setting=setting, reasons=reasons, warnings=warnings or _unused_warnings(settings))
        setting, given = _with_given(setting, settings, pins=job.device_type in PINNING_DEVICES)
        return Recommendation(setting=setting, reasons=reasons | given, warnings=warnings)

    def _why_no_workers(self, loader: DataLoader[object], name: str) -> str:
        """Return the reason for not giving workers to a loader without workers. Empty if a rehearsal found none."""
        context: Any = loader.multiprocessing_context
        start_method = context.get_start_method() if context is not None else read_machine().start_method
        why_not = why_not_sent(loader, start_method)
        if why_not or isinstance(loader.dataset, IterableDataset):
            return why_not
        held = self.refusals.get(name)
        if held is None or held[0] is not loader.dataset:
            held = self.refusals[name] = loader.dataset, str(rehearse(loader).refusal or "")
        return held[1]

    def announce(self, trainer: AnyTrainer | None, split: str, name: str, recommendation: Recommendation) -> None:
        """Log the settings of a loader, and once that batches in place need workers."""
        is_new = name not in self.chosen
        super().announce(trainer, split, name, recommendation)
        has_none = not recommendation.setting.num_workers and not recommendation.warnings
        if is_new and has_none and self.settings.num_workers == "auto":
            logger.info("%s: %s", name, _IN_PLACE_NEEDS_WORKERS)

    def _note_left_alone(self, name: str, loader: object) -> None:
        if name in self.left_alone:
            return
        self.left_alone.add(name)
        message = f"{name} is a {type(loader).__name__}, not a torch DataLoader, so it is left as it is."
        if any(kind.__module__.startswith("nvidia.dali.") for kind in type(loader).__mro__):
            message += f" {_OF_DALI}"
        logger.warning("%s", message)


def _unused_warnings(settings: LoaderSettings) -> tuple[str, ...]:
    """Return a warning if the user has passed values that a loader without workers cannot use."""
    unused = ", ".join(f"{name}={value!r}" for name, value in settings.asking_for_workers().items())
    if not unused:
        return ()
    return (f"{unused} has no effect, because the loader has no workers",)


def _with_given(setting: Setting, settings: LoaderSettings, *, pins: bool) -> tuple[Setting, dict[str, str]]:
    """Return the setting of a loader with workers, with the values that the user has passed, and the reasons for
    these."""
    reasons = {}
    for name in ("prefetch_factor", "persistent_workers", "pin_memory"):
        value = getattr(settings, name)
        if value != "auto":
            setting = replace(setting, **{name: value})
            reasons[name] = "as given"
    if settings.pin_memory == "auto" and pins and not setting.pin_memory:
        setting = replace(setting, pin_memory=True)
        reasons["pin_memory"] = "batches are handed over in page-locked memory"
    return setting, reasons


def _rebuilt(loader: DataLoader[object], setting: Setting, settings: LoaderSettings) -> DataLoader[object]:
    """Copy a loader with another setting. Processes that torch starts as workers leave their batches in slots.

    A StatefulDataLoader keeps its resume position.
    """
    changed: dict[str, object] = {name: vars(setting)[name] for name in _CHANGED}
    clone = clone_with(loader, **changed)
    if not setting.num_workers:
        changed |= {"multiprocessing_context": None, "timeout": 0}
    _host.change_saved_arguments(clone, changed, always=_CHANGED)
    vars(clone)["hand_over"] = settings.hand_over  # a tuner's copy of this loader follows this setting, too
    put_in_slots(clone)
    if setting.num_workers and not loader.num_workers:
        vars(clone)[WITHOUT_WORKERS] = loader
    return clone
