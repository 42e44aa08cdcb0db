"""The user's own loaders, built again with other workers: all else is as it was."""

import copy
import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import _host
from lightning_feed.datamodule_loaders import hush, job_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.build import Job
from lightning_feed.load.dali.reader_loader import ReaderLoader
from lightning_feed.load.machine import read_machine
from lightning_feed.load.picklable import why_not_picklable
from lightning_feed.load.recommend import Recommendation, Workload, recommend
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.tuning.values import Tuned
from lightning_feed.tuning.fit import explained, settled, tune_for_fit, why_not_now

logger = logging.getLogger(__name__)

_CHANGED = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_OF_DALI = (
    "DALI loads in threads of its own: set num_threads and prefetch_queue_depth of its Pipeline, or make the data "
    "module a DaliDataModule, which chooses them."
)
_DECIDED = (*_CHANGED, "sample_bytes")


@dataclass
class WrappedLoaders:
    """What was chosen for the loaders of a wrapped data module.

    Raises:
        SettingsError: for settings of things that the user's loaders decide.
    """

    settings: LoaderSettings
    chosen: dict[str, Recommendation] = field(default_factory=dict)
    tuned: dict[str, Tuned | None] = field(default_factory=dict)
    left_alone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        plain = LoaderSettings()
        for name, value in vars(self.settings).items():
            if name not in _DECIDED and value != getattr(plain, name):
                raise SettingsError(
                    f"{name}={value!r} would have no effect: wrap() keeps what the loaders of the data module say, and "
                    f"changes only {', '.join(_CHANGED)}. Set it where the loaders are made."
                )

    def change(self, trainer: Any, split: str, made: Any) -> Any:
        """The same structure of loaders, each DataLoader of it with other workers. Other loaders are left alone."""
        # Training goes through its loaders side by side, evaluation through one after the other.
        together = max(1, _count(made)) if split == "train" else 1
        return _each(made, split, lambda loader, name: self._change(trainer, split, name, loader, together))

    def report(self) -> str:
        """What was chosen, and why: one line for each value."""
        if not self.chosen:
            return "No loader has been made yet."
        return "\n".join(f"{name}: {line}" for name, one in self.chosen.items() for line in one.describe().splitlines())

    def _change(self, trainer: Any, split: str, name: str, loader: Any, together: int) -> Any:
        if not isinstance(loader, DataLoader):
            return self._leave(name, loader)
        job = Job() if trainer is None else job_of(trainer)
        settings, tuned, why_not = self.settings, None, ""
        if settings.num_workers == "tune":
            why_not = why_not_now(trainer, split)
            if not why_not:
                if name not in self.tuned:
                    self.tuned[name] = tune_for_fit(loader, trainer, name)
                tuned = self.tuned[name]
            settings = settled(settings, tuned)
            settings = replace(settings, workers="process", start_method=None)
        found = _recommended(loader, split, settings, job, together)
        if self.settings.num_workers == "tune":
            found = explained(found, self.settings, tuned, why_not)
        self._tell(trainer, split, name, found)
        return rebuilt(loader, found)

    def _leave(self, name: str, loader: Any) -> Any:
        if name not in self.left_alone:
            self.left_alone.add(name)
            of_dali = any(kind.__module__.startswith("nvidia.dali.") for kind in type(loader).__mro__)
            logger.warning(
                "%s is a %s, not a torch DataLoader, so it is left as it is.%s",
                name,
                type(loader).__name__,
                f" {_OF_DALI}" if of_dali or isinstance(loader, ReaderLoader) else "",
            )
        return loader

    def _tell(self, trainer: Any, split: str, name: str, found: Recommendation) -> None:
        """Keep what was chosen, and say it once. Lightning is kept from complaining about it."""
        if self.chosen.get(name) != found and (trainer is None or trainer.is_global_zero):
            logger.info("%s", "\n".join(f"{name}: {line}" for line in found.describe().splitlines()))
            for warning in found.warnings:
                logger.warning("%s: %s", name, warning)
        self.chosen[name] = found
        if found.num_workers < 2:
            hush(f"The '{split}_dataloader' does not have many workers")
        if found.num_workers and not found.persistent_workers:
            hush(f"Consider setting `persistent_workers=True` in '{split}_dataloader'")


def rebuilt(loader: DataLoader[Any], found: Recommendation) -> DataLoader[Any]:
    """A loader of the same class around the same data set, samplers and functions, with other workers.

    A class whose constructor takes what its objects show as attributes is constructed anew, as Lightning does; of any
    other the object is copied.
    """
    changed: dict[str, Any] = {name: getattr(found, name) for name in _CHANGED}
    if not found.num_workers:
        changed |= {"multiprocessing_context": None, "timeout": 0}
    names = _constructor_names(type(loader))
    if names is None or not all(hasattr(loader, name) for name in names if name != "shuffle"):
        return _twin(loader, changed)
    values = {name: getattr(loader, name) for name in names if hasattr(loader, name) and name != "shuffle"}
    if not values.get("pin_memory_device"):
        values.pop("pin_memory_device", None)  # newer versions of torch warn of it
    own_batches = loader.batch_sampler is not None and loader.batch_size is None
    if isinstance(loader.dataset, IterableDataset):
        values.pop("sampler", None)
        values.pop("batch_sampler", None)
    elif own_batches:
        for name in ("batch_size", "sampler", "drop_last"):
            values.pop(name, None)
    else:
        values.pop("batch_sampler", None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # said when the user's own was made
        made: DataLoader[Any] = type(loader)(**{**values, **changed})
    # A StatefulDataLoader that was told where to go on from.
    if getattr(loader, "next_iter_state", None) is not None:
        made.next_iter_state = loader.next_iter_state  # type: ignore[attr-defined]
    return made


def _twin(loader: DataLoader[Any], changed: dict[str, Any]) -> DataLoader[Any]:
    twin = object.__new__(type(loader))
    twin.__dict__.update(vars(loader))
    context = changed.get("multiprocessing_context", loader.multiprocessing_context)
    twin.__dict__.update({name: value for name, value in changed.items() if name != "multiprocessing_context"})
    twin.__dict__["_iterator"] = None
    twin.multiprocessing_context = context
    _host.change_saved_arguments(twin, changed, always=_CHANGED)
    return twin


def _constructor_names(kind: type[DataLoader[Any]]) -> list[str] | None:
    """The arguments of a constructor; None where it hands others on without naming them."""
    constructor: Any = inspect.unwrap(kind.__init__)  # Lightning wraps constructors while it requests loaders
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters):
        return None
    return [one.name for one in parameters]


def _recommended(
    loader: DataLoader[Any], split: str, settings: LoaderSettings, job: Job, together: int
) -> Recommendation:
    stream = isinstance(loader.dataset, IterableDataset)
    kept = ""
    if settings.num_workers == "auto":
        kept = _why_kept(loader, stream=stream)
        if kept:
            settings = _with_workers(settings, loader.num_workers)
    found = recommend(
        read_machine(),
        settings,
        Workload(
            split=split,
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
            batches=_batches(loader, 1 if stream else job.sharing_ranks),
            loaders=together,
            iterable=stream,
            device_type=job.device_type,
            local_ranks=job.local_ranks,
            reload_every_n_epochs=job.reload_every_n_epochs,
        ),
    )
    return replace(found, reasons={**found.reasons, "num_workers": kept}) if kept else found


def _why_kept(loader: DataLoader[Any], *, stream: bool) -> str:
    """Why the number of workers stays what it is; empty where it is chosen."""
    if stream:
        return "as the loader has it: each worker of an IterableDataset goes through what it takes for its own part"
    context: Any = loader.multiprocessing_context
    method = context.get_start_method() if context is not None else read_machine().start_method
    for name in ("dataset", "collate_fn", "worker_init_fn") if method != "fork" else ():
        problem = why_not_picklable(getattr(loader, name))
        if problem is not None:
            return f"as the loader has it: its {name} cannot be sent to worker processes: {problem}"
    return ""


def _with_workers(settings: LoaderSettings, workers: int) -> LoaderSettings:
    if workers:
        return replace(settings, num_workers=workers)
    return replace(settings, num_workers=0, prefetch_factor="auto", persistent_workers="auto")


def _batches(loader: DataLoader[Any], ranks: int) -> int | None:
    try:
        return -(-len(loader) // ranks)
    except (TypeError, NotImplementedError):
        return None


def _each(made: Any, name: str, change: Callable[[Any, str], Any]) -> Any:
    if isinstance(made, dict):
        changed = {key: _each(one, f"{name}[{key!r}]", change) for key, one in made.items()}
        if type(made) is dict:
            return changed
        same = copy.copy(made)
        same.update(changed)
        return same
    if isinstance(made, tuple) and hasattr(made, "_fields"):
        return type(made)(*(_each(one, f"{name}[{index}]", change) for index, one in enumerate(made)))
    if type(made) in (list, tuple):
        return type(made)(_each(one, f"{name}[{index}]", change) for index, one in enumerate(made))
    if hasattr(made, "flattened") and hasattr(made, "limits"):  # a CombinedLoader, of either package
        combined = copy.copy(made)
        combined.flattened = [_each(one, f"{name}[{index}]", change) for index, one in enumerate(made.flattened)]
        return combined
    return change(made, name)


def _count(made: Any) -> int:
    found: list[Any] = []
    _each(made, "", lambda loader, _: found.append(loader))
    return sum(isinstance(loader, DataLoader) for loader in found)
