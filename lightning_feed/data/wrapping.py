"""wrap: gives the loaders of any LightningDataModule a number of workers that fits the machine."""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, SupportsIndex

from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.data.build_loaders import SPLITS, ChosenSettings, job_of
from lightning_feed.errors import SettingsError
from lightning_feed.load.kinds import AnyLoader
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import size_of
from lightning_feed.load.settings import Job, LoaderSettings, Recommendation, Workload, recommend
from lightning_feed.load.worker import why_not_sent
from lightning_feed.trials.background import BackgroundLoader, BackgroundTrial, taken_by, why_not_in_background
from lightning_feed.trials.cloning import map_loaders, twin_of
from lightning_feed.trials.in_fit import without_workers

logger = logging.getLogger(__name__)

_SPLIT_OF = {f"{split}_dataloader": split for split in SPLITS}
_OURS = "_feed_wrapped"
_CHANGED = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_OF_DALI = "DALI loads in threads of its own: set num_threads and prefetch_queue_depth of its Pipeline."
_DECIDED = (*_CHANGED, "sample_bytes", "background")


def wrap(datamodule: object, loader: LoaderSettings | None = None) -> Any:
    """Wrap a data module so that its loaders get other workers. See ``FastDataModule.wrap``.

    The result's class derives from the data module's class, so all hooks run. Both objects share their attributes: an
    attribute set on one is set on both.

    Raises:
        SettingsError: the object is not a data module or chooses its loaders itself, or a setting was passed that
            wrapping does not change.
    """
    kind: Any = type(datamodule)
    if not hasattr(datamodule, "train_dataloader") or not hasattr(datamodule, "prepare_data"):
        raise SettingsError(
            f"A {kind.__name__} cannot be wrapped. Pass a LightningDataModule. To make one from datasets: "
            "LightningDataModule.from_datasets(train_set, val_set, batch_size=32)."
        )
    _host.package_of(datamodule)
    if hasattr(datamodule, "loader_report"):
        raise SettingsError(
            f"{kind.__name__} already chooses its loaders itself. Pass loader=LoaderSettings(...) to its constructor."
        )
    wrapped = object.__new__(_class_around(kind))
    # A new dict for both: from Python 3.13 on, attributes are stored inside their object. A bug in the garbage
    # collector, fixed in 2026, then cleared attributes that the other object still used
    # (https://github.com/python/cpython/issues/130327).
    datamodule.__dict__ = wrapped.__dict__ = dict(datamodule.__dict__)
    methods = {name: datamodule.__dict__.get(name) for name in _SPLIT_OF}
    wrapped.__dict__[_OURS] = WrappedLoaders(loader or LoaderSettings(), methods=methods)
    return wrapped


class _Wrapped:
    """Additions to a wrapped data module."""

    trainer: object

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in _SPLIT_OF:
            return found
        kept = super().__getattribute__("__dict__")
        # An attribute set after wrapping belongs to a tool that replaces or observes the hook.
        return _changing(self, _SPLIT_OF[name], found) if kept.get(name) is kept[_OURS].methods[name] else found

    @property
    def recommendations(self) -> Mapping[str, Recommendation]:
        """The settings chosen for each loader: ``"train"``, or ``"train['key']"`` of a dict of loaders."""
        return MappingProxyType(self.__dict__[_OURS].chosen)

    def loader_report(self) -> str:
        """Return the settings of each loader with reasons, one line per value."""
        text: str = self.__dict__[_OURS].report()
        return text

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # The class is made at run time, so it is pickled by its original class. For ddp_spawn, and copies.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, *rest = reduced
        if arguments and arguments[0] is type(self):
            make = _made_again
            arguments = (type(self).__bases__[1], *arguments[1:])
        return (make, arguments, *rest)


def _made_again(kind: type, *arguments: object) -> object:
    made = _class_around(kind)
    return made.__new__(made, *arguments)


def _changing(owner: Any, split: str, original: Callable[[], Any]) -> Callable[[], Any]:
    # wraps: Lightning unwraps the method to check if the user overrides it.
    @functools.wraps(original)
    def give() -> Any:
        return owner.__dict__[_OURS].change(owner.trainer, split, original())

    return give


@functools.cache
def _class_around(kind: type) -> Any:
    """Derive the class for wrapped objects. It keeps the class name, under which Lightning saves the state."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_Wrapped, kind), names)


# --- the loaders ------------------------------------------------------------------------------------------------------


@dataclass
class WrappedLoaders(ChosenSettings):
    """The settings chosen for the loaders of a wrapped data module.

    Raises:
        SettingsError: a setting was passed that the user's loaders decide.
    """

    methods: dict[str, object] = field(default_factory=dict)
    """Loader hooks set on the object, as by ``LightningDataModule.from_datasets``. A value of None: the hook of the
    class."""
    left_alone: set[str] = field(default_factory=set)
    background: BackgroundLoader | None = None
    """The training loader that a thread iterates."""

    def __post_init__(self) -> None:
        plain = LoaderSettings()
        for name, value in vars(self.settings).items():
            if name not in _DECIDED and value != vars(plain)[name]:
                raise SettingsError(
                    f"{name}={value!r} would have no effect: wrap() changes only {', '.join(_CHANGED)}. Set it where "
                    "the loaders are made."
                )

    def change(self, trainer: object, split: str, made: object) -> Any:
        """Give other workers to each DataLoader in a structure of loaders.

        Other loaders stay unchanged, except a training loader to be iterated by a thread.

        Raises:
            SettingsError: ``background`` was set, but there is no training loader for it.
        """
        # Training iterates its loaders in parallel, evaluation one after the other.
        loaders: list[object] = []
        map_loaders(made, lambda loader, _: loaders.append(loader))
        count = sum(isinstance(loader, DataLoader) for loader in loaders)
        together = max(1, count) if split == "train" else 1
        if split == "train" and self.settings.background:
            self._check_background(loaders)

        def change(loader: object, path: tuple[object, ...]) -> Any:
            name = split + "".join(f"[{key!r}]" for key in path)
            return self._change(trainer, split, name, loader, together)

        return map_loaders(made, change)

    def _change(self, trainer: AnyTrainer, split: str, name: str, loader: AnyLoader, together: int) -> Any:
        if not isinstance(loader, DataLoader):
            ahead = split == "train" and self.settings.background
            return self._in_background(trainer, loader) if ahead else self._leave(name, loader)
        settings, explain = self.settings_for(trainer, split, name, lambda: loader)
        settings = replace(settings, workers="process", start_method=None)
        found = explain(_recommended(loader, split, settings, job_of(trainer), together))
        self.announce(trainer, split, name, found)
        return _rebuilt(loader, found)

    def end_background(self) -> None:
        """End the thread that iterates the training loader."""
        if self.background is not None:
            self.background.close()
            self.background = None

    def _check_background(self, loaders: list[Any]) -> None:
        said = f"background={self.settings.background!r} would have no effect"
        if len(loaders) != 1:
            raise SettingsError(f"{said}: a thread draws from one training loader, and there are {len(loaders)}.")
        if isinstance(loaders[0], DataLoader):
            raise SettingsError(f"{said}: the training loader is a DataLoader, whose workers load ahead. Leave it out.")
        if why_not := why_not_in_background(loaders[0]):
            raise SettingsError(f"{said}: {why_not}. Leave it out.")

    def _in_background(self, trainer: AnyTrainer, loader: AnyLoader) -> BackgroundLoader:
        def say(line: str) -> None:
            logger.info("wrap() %s", line)

        self.end_background()
        trial = BackgroundTrial(f"the training loader ({type(loader).__name__})", say, asked=True)
        self.background = BackgroundLoader(
            loader,
            trial,
            limit=(lambda _: math.inf) if trainer is None else functools.partial(taken_by, trainer),
            depth=self.settings.background,
        )
        if trainer is not None and not any(
            isinstance(one, _Close) and one.loaders is self for one in trainer.callbacks
        ):
            trainer.callbacks.append(_Close(self))
        return self.background

    def _leave(self, name: str, loader: object) -> object:
        if name not in self.left_alone:
            self.left_alone.add(name)
            of_dali = any(kind.__module__.startswith("nvidia.dali.") for kind in type(loader).__mro__)
            logger.warning(
                "%s is a %s, not a torch DataLoader, so it is left as it is.%s",
                name,
                type(loader).__name__,
                f" {_OF_DALI}" if of_dali else "",
            )
        return loader


class _Close(Callback):
    """Ends a wrapped data module's thread after the fit or an exception."""

    def __init__(self, loaders: WrappedLoaders) -> None:
        self.loaders = loaders

    def on_train_end(self, *arguments: object, **named: object) -> None:
        """End the thread."""
        self.loaders.end_background()

    on_exception = teardown = on_train_end


def _rebuilt(loader: DataLoader[object], found: Recommendation) -> DataLoader[object]:
    """Copy a loader with other workers. A StatefulDataLoader keeps its resume position."""
    changed: dict[str, object] = {name: vars(found)[name] for name in _CHANGED}
    twin = twin_of(loader, **changed)
    if not found.num_workers:
        changed |= {"multiprocessing_context": None, "timeout": 0}
    _host.change_saved_arguments(twin, changed, always=_CHANGED)
    return twin


def _recommended(
    loader: DataLoader[object], split: str, settings: LoaderSettings, job: Job, together: int
) -> Recommendation:
    stream = isinstance(loader.dataset, IterableDataset)
    batches = size_of(loader)
    ranks = 1 if stream else job.sharing_ranks
    kept = _why_kept(loader, stream=stream) if settings.num_workers == "auto" else ""
    if kept:
        kept_workers = loader.num_workers
        settings = replace(settings, num_workers=kept_workers) if kept_workers else without_workers(settings)
    found = recommend(
        read_machine(),
        settings,
        Workload(
            split=split,
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1,
            batches=None if batches is None else -(-batches // ranks),
            loaders=together,
            iterable=stream,
            **vars(job),
        ),
    )
    return replace(found, reasons={**found.reasons, "num_workers": kept}) if kept else found


def _why_kept(loader: DataLoader[object], *, stream: bool) -> str:
    """Return the reason for keeping the number of workers. Empty if the number is chosen here."""
    if stream:
        return "as the loader has it: each worker of an IterableDataset reads the part that it takes for its own"
    context: Any = loader.multiprocessing_context
    why = why_not_sent(loader, context.get_start_method() if context is not None else read_machine().start_method)
    return f"as the loader has it: {why}" if why else ""
