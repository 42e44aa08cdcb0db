"""FastDataModule: builds loaders that fit the machine from a dataset for each split."""

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast, final

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import default_collate

from lightning_feed import _host
from lightning_feed._host import AnyTrainer
from lightning_feed.callbacks.exact_resume import ExactResume
from lightning_feed.data.build_loaders import SPLITS, Loaders, attach_tuning, ignore_warning, job_of
from lightning_feed.errors import DatasetError, LoaderError, SettingsError, no_argument
from lightning_feed.load.build import Part, like, name_datasets
from lightning_feed.load.collate import DroppingCollate, check_drop_keys
from lightning_feed.load.kinds import AnyDataset, Batch
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import SEEDS, LoaderSettings
from lightning_feed.load.stage import BatchDecoder, traced

if TYPE_CHECKING:
    from lightning_feed.measure.measurements import DataModuleFacts

logger = logging.getLogger(__name__)

_TRANSFER = "transfer_batch_to_device"
_AROUND_TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer")
_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


def check_whole(name: str, value: object, unit: str) -> None:
    """Check that the argument ``name`` is a whole number of 1 or more.

    Raises:
        SettingsError: the argument is anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value!r} is not valid. Give {unit}, a whole number of 1 or more.")


_ARGUMENTS = {
    "make_dataset": ("split",),
    "collate": ("samples", "split"),
    "sampler": ("dataset", "split"),
    "device_transform": ("batch", "split"),
}
"""The methods that a subclass may write, and their arguments."""


class _NotInitialised:
    """Stands for the state of a data module whose ``__init__`` was not called."""

    def __get__(self, module: object, kind: type) -> "_NotInitialised":
        if module is None:
            return self
        raise SettingsError(
            f"{kind.__name__}.__init__ does not call super().__init__(). Write super().__init__(batch_size=...) as its "
            "first line."
        )


@dataclass
class _State:
    """All state of a data module under one name, since the other attribute names belong to the user."""

    loaders: Loaders
    data_dir: str | Path | None
    stage_to: str | Path | None
    folder: Path | None = None
    """The folder of the staged copy; None until it is first used."""
    datasets: "dict[str, SplitDatasets]" = field(default_factory=dict)
    """The datasets of each split for which ``make_dataset`` was called."""
    built: set[str] = field(default_factory=set)
    """The splits whose loaders were made."""

    def copy(self) -> "_State":
        """Return the state for a copy of the data module: the same settings and folder, without datasets."""
        return _State(self.loaders.copy(), self.data_dir, self.stage_to, self.folder)


@dataclass(frozen=True)
class SplitDatasets:
    """The datasets that ``make_dataset`` returned for one split, checked."""

    structure: object
    """A dataset, or a dict or list of datasets; None if there is no such split."""
    named: list[tuple[str, AnyDataset]]
    """The datasets in the structure, with the names that reports and errors use."""


@dataclass
class Collate:
    """``datamodule.collate`` for one split, as a ``collate_fn``.

    Spawned workers get the data module without its Trainer and datasets, see ``FeedDataModule.__getstate__``.
    """

    datamodule: "FeedDataModule"
    split: str
    has_made_batches: bool = False
    """True once this process has made a batch."""

    def __call__(self, samples: list[object]) -> Any:
        """Make a batch. Runs in the workers. A later batch may be None: Lightning then skips the step, with a warning.

        Raises:
            LoaderError: the data module's ``collate`` returned None for the first batch.
        """
        batch = self.datamodule.collate(samples, self.split)
        if batch is None and not self.has_made_batches:
            name = type(self.datamodule).__name__
            raise LoaderError(f"{name}.collate returned None in place of the first batch. End it with `return batch`.")
        self.has_made_batches = True
        return batch


class FeedDataModule:
    """FastDataModule without its base class, which differs between ``lightning`` and ``pytorch_lightning``.

    Names that begin with ``_feed_`` are ours. All other names belong to the user.
    """

    trainer: AnyTrainer | None
    _feed = cast("_State", _NotInitialised())
    _feed_without_validation = "return None from make_dataset('val')"
    """Advice for a run without validation."""
    _feed_seed: int | None = None
    """Seed of the run's training order; None until it is first used, or loaded from a checkpoint."""

    def __init__(  # noqa: PLR0913 - all but the batch size are by name, and have a default
        self,
        batch_size: int = 32,
        *,
        eval_batch_size: int | Literal["even"] | None = None,
        loader: LoaderSettings | None = None,
        drop_keys: Sequence[str] = (),
        data_dir: str | Path | None = None,
        stage_to: str | Path | None = None,
        on_device: bool = False,
        **misplaced: NoReturn,
    ) -> None:
        self._feed_refuse(misplaced)
        self._feed_check_methods()
        check_whole("batch_size", batch_size, "the samples in a batch")
        if eval_batch_size not in (None, "even"):
            check_whole("eval_batch_size", eval_batch_size, "the samples in a batch")
        if loader is None:
            loader = LoaderSettings()
        if not isinstance(loader, LoaderSettings):
            raise SettingsError(f"loader={loader!r} is not a LoaderSettings. Write LoaderSettings(num_workers=...).")
        super().__init__()
        self._feed_given_seed = loader.seed
        # Lightning sees val_dataloader before it knows if there is validation data. setup() warns if there is.
        ignore_warning("You passed in a `val_dataloader` but have no `validation_step`")
        if type(self).device_transform is not FeedDataModule.device_transform:
            # Set only if needed: once a data module overrides this hook, Lightning ignores the LightningModule's.
            # Unlike on_after_batch_transfer, this hook runs on the stream of the copy.
            setattr(self, _TRANSFER, self._feed_transfer)
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        if stage_to is not None and data_dir is None:
            raise SettingsError(f"stage_to={str(stage_to)!r} needs a data_dir to copy. Set data_dir.")
        if stage_to is None and "://" in str(data_dir):
            raise SettingsError(
                f"data_dir={str(data_dir)!r} is a URL, but samples are read from this machine. Set stage_to to a "
                "folder in memory or on a local disk, for a copy."
            )
        dropped = check_drop_keys(drop_keys, type(self).__name__)
        self._feed = _State(Loaders(loader, drop_keys=dropped, on_device=on_device), data_dir, stage_to)

    # --- to write or to override --------------------------------------------------------------------------------------

    def make_dataset(self, split: str) -> Any:
        """Make the dataset of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``. The only required method.

        Called once per needed split in each training process. Called again only if the Trainer reloads loaders
        (``reload_dataloaders_every_n_epochs``).

        Returns:
            A map-style or iterable dataset, a dict or list of datasets, or None if there is no such split.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no make_dataset. Write into the class:\n\n"
            "    def make_dataset(self, split):  # 'train', 'val', 'test' or 'predict'\n"
            "        return MyDataset(split)     # None if there is no such split\n"
        )

    def collate(self, samples: list[Any], split: str) -> Any:
        """Make a batch from a list of samples. Runs in the workers."""
        return default_collate(samples)

    def sampler(self, dataset: AnyDataset, split: str) -> Any:
        """Return a sampler for a map-style dataset; None to shuffle training, and read other splits in order."""
        return None

    def device_transform(self, batch: Batch, split: str) -> Any:
        """Transform a batch on the device. Runs on the prefetch stream if ``PrefetchCallback`` is active."""
        return batch

    # --- what Lightning calls -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Make the datasets of the splits that ``stage`` needs.

        Raises:
            SettingsError: there is no such stage.
            DatasetError: there is no training data, or a split is empty or not a dataset.
        """
        if stage not in _SPLITS_OF_STAGE:
            raise SettingsError(f"There is no stage {stage!r}. Use one of {', '.join(map(repr, _SPLITS_OF_STAGE))}.")
        for split in _SPLITS_OF_STAGE[stage]:
            self._feed_datasets(split)
            self._feed.built.discard(split)
        if stage == "fit":
            self._feed_warn_of_unused_validation()
            if not self._feed_datasets("train").named:
                self._feed_no_loaders("train")
            self._feed_seed = None  # each run has its own order; a checkpoint's seed is loaded later
            self._feed_attach()
        if _TRANSFER in vars(self) and _host.defined_by_lightning(getattr(type(self), _TRANSFER)):
            ignore_warning(f"You have overridden `{_TRANSFER}` in both")  # the module's is called: see _feed_transfer

    @final
    def train_dataloader(self) -> Any:
        """Return the training loader, or a dict or list of training loaders."""
        return self._feed_loaders("train")

    @final
    def val_dataloader(self) -> Any:
        """Return the validation loader, or a dict or list of them. An empty list if there is no such split."""
        return self._feed_loaders("val")

    @final
    def test_dataloader(self) -> Any:
        """Return the test loader, or a dict or list of them. An empty list if there is no such split."""
        return self._feed_loaders("test")

    @final
    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a dict or list of them. An empty list if there is no such split."""
        return self._feed_loaders("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of the training order, so that a resumed run keeps the order."""
        if self._feed_seed is None:
            return {}
        return {"seed": self._feed_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the checkpoint's seed of the training order."""
        saved = state_dict.get("seed")
        if saved is None:
            return
        if self._feed_given_seed is not None and saved != self._feed_given_seed:
            logger.warning(
                "The checkpoint was trained in the order of seed %d, but this data module has seed %d. The "
                "checkpoint's seed is used, because another order would repeat samples in this epoch.",
                saved,
                self._feed_given_seed,
            )
        self._feed_seed = saved

    # --- to call ------------------------------------------------------------------------------------------------------

    @staticmethod
    def wrap(datamodule: Any, loader: LoaderSettings | None = None) -> Any:
        """Wrap a data module, of either Lightning package, so that its workers hand their batches over in place.

        Nothing else changes, unless it is passed: number of workers, persistent workers and their set-up stay the
        user's. Only on a device that copies from page-locked memory, batches lie there. The result has a
        ``loader_report()``. See docs/how-to/tune.md.

        Args:
            datamodule: any LightningDataModule. It is changed, and returned.
            loader: settings. Only ``num_workers``, ``prefetch_factor``, ``persistent_workers``, ``pin_memory`` and
                ``hand_over`` may be set. A loader without workers gets ``num_workers`` only after a rehearsal has seen
                that its samples stay the same. ``num_workers="tune"`` adds an AutotuneCallback to the Trainer.

        Raises:
            SettingsError: the object is not a data module, or is a FastDataModule, or another setting was passed.
        """
        from lightning_feed.data.wrapping import wrap

        return wrap(datamodule, loader)

    def dataset(self, split: str) -> Any:
        """Return the result of ``make_dataset(split)``, which is called now if necessary.

        Raises:
            SettingsError: there is no such split.
            DatasetError: the result is empty, or not a dataset.
        """
        return self._feed_datasets(split).structure

    @property
    def staged_dir(self) -> Path:
        """The folder to read from: ``data_dir`` as given, or its copy in ``stage_to`` once that is complete.

        Raises:
            SettingsError: there is no ``data_dir``.
            ArchiveError: staging failed.
        """
        feed = self._feed
        if feed.data_dir is None:
            raise SettingsError("This data module was made without data_dir, so there is no folder to read from.")
        if feed.stage_to is None:
            return Path(feed.data_dir)
        if feed.folder is None:
            from lightning_feed.storage.staging import stage

            feed.folder = stage(feed.data_dir, feed.stage_to).path
        return feed.folder

    @property
    def recommendations(self) -> Mapping[str, Recommendation]:
        """The settings chosen for each loader, by name: ``"train"``, or ``"train['key']"`` for a dict of datasets."""
        return MappingProxyType(self._feed.loaders.chosen)

    def loader_report(self) -> str:
        """Return the settings of each loader with reasons, one line per value."""
        return self._feed.loaders.report()

    def _feed_has_transfer_hooks(self) -> bool:
        """Return True if a transfer hook of the user's data module or module may take time for each batch."""
        if not _host.defined_by_lightning(getattr(type(self), _TRANSFER)):
            return True
        module = None if self.trainer is None else self.trainer.lightning_module
        around = any(_host.is_overridden(owner, hook) for owner in (self, module) for hook in _AROUND_TRANSFER)
        return around or _host.is_overridden(module, _TRANSFER)

    def _feed_facts(self) -> "DataModuleFacts":
        """Return the facts for reports that only a data module knows."""
        from lightning_feed.measure.measurements import DataModuleFacts  # only if the run is measured

        return DataModuleFacts(
            staged=self._feed.stage_to is not None,
            device_transform=type(self).device_transform is not FeedDataModule.device_transform,
        )

    def __getstate__(self) -> dict[str, object]:
        # Pickled for ddp_spawn, and for spawned workers if `collate` is overridden; copied by tuners. The Trainer
        # attaches itself again, and loader resources are rebuilt when needed.
        return {**self.__dict__, "trainer": None, "_feed": self._feed.copy()}

    def _feed_refuse(self, misplaced: Mapping[str, object]) -> None:
        """Refuse unknown arguments, and point to LoaderSettings for its fields."""
        owner = type(self).__name__
        for name, value in misplaced.items():
            if name in LoaderSettings.__dataclass_fields__:
                where = f"Write {owner}(..., loader=LoaderSettings({name}={value!r}))."
                raise SettingsError(f"{name} is a setting of the loaders. {where}")
            raise no_argument(name, owner, inspect.signature(type(self)).parameters)

    def _feed_check_methods(self) -> None:
        """Check that the methods of a subclass take the arguments that they are called with."""
        for name, arguments in _ARGUMENTS.items():
            try:
                inspect.signature(getattr(self, name)).bind(*arguments)
            except TypeError as error:
                line = f"def {name}({', '.join(('self', *arguments))})"
                raise SettingsError(
                    f"{type(self).__name__}.{name} cannot be called: {error}. Write it as {line}."
                ) from error

    # --- datasets -----------------------------------------------------------------------------------------------------

    def _feed_datasets(self, split: str) -> SplitDatasets:
        if split not in SPLITS:
            raise SettingsError(f"There is no split {split!r}. Use one of {', '.join(map(repr, SPLITS))}.")
        if split not in self._feed.datasets:
            structure = self.make_dataset(split)
            named = [] if structure is None else name_datasets(structure, split)
            self._feed.datasets[split] = SplitDatasets(structure, named)
        return self._feed.datasets[split]

    def _feed_warn_of_unused_validation(self) -> None:
        if self.trainer is None or not self._feed_datasets("val").named:
            return
        module = self.trainer.lightning_module
        if module is not None and not _host.is_overridden(module, "validation_step"):
            logger.warning(
                "The validation data is not used, since %s has no validation_step. Write a validation_step, or %s.",
                type(module).__name__,
                self._feed_without_validation,
            )

    # --- loaders ------------------------------------------------------------------------------------------------------

    def _feed_loaders(self, split: str) -> object:
        self._feed_attach()
        trainer = self.trainer
        feed = self._feed
        if trainer is not None and _host.reload_interval(trainer) and split in feed.built:
            del feed.datasets[split]  # made again, since the data may have changed
        feed.built.add(split)
        datasets = self._feed_datasets(split)
        if not datasets.named:
            return self._feed_no_loaders(split)
        job = job_of(trainer)
        # Training iterates its loaders in parallel, evaluation one after the other.
        together = len(datasets.named) if split == "train" else 1
        even = self.eval_batch_size == "even"
        loaders = []
        for index, (name, dataset) in enumerate(datasets.named):
            part = self._feed_part(split, name, index, together=together)
            loaders.append(feed.loaders.build(trainer, dataset, part, job, even=even))
        return like(datasets.structure, loaders)

    def _feed_part(self, split: str, name: str, index: int, *, together: int) -> Part:
        """Describe one loader of a split, without its dataset."""
        batch_size = self.batch_size
        if split != "train" and isinstance(self.eval_batch_size, int):
            batch_size = self.eval_batch_size
        seed = self._feed_run_seed()
        if index:
            # With a common seed, datasets of equal size would have the same order: the same samples would always meet.
            seed = mix_seed(seed, index, 0, "loader")
        order = EpochOrder(seed=seed, epoch=self._feed_epoch)
        if together == 1:  # if there are several loaders, the shorter ones may begin again within an epoch
            order.next_epoch = self._feed_next_epoch
        has_own_collate = type(self).collate is not FeedDataModule.collate
        collate = Collate(self, split) if has_own_collate else None
        dropped = self._feed.loaders.drop_keys
        return Part(
            name=name,
            split=split,
            batch_size=batch_size,
            together=together,
            sampler=lambda dataset: self.sampler(dataset, split),
            collate_fn=DroppingCollate(collate, dropped) if dropped else collate,
            order=order,
            decode=self._feed_decode(split),
        )

    # --- what an ImageFolderDataModule changes ------------------------------------------------------------------------

    def _feed_decode(self, split: str) -> BatchDecoder | None:
        """Return the decoder that the loader runs on the batches from its workers; None if they need no decoding."""
        return None

    # --- details ------------------------------------------------------------------------------------------------------

    def _feed_attach(self) -> None:
        """Add the callbacks that the loaders need. Called outside ``setup``, too, which a subclass may override."""
        if self.trainer is None:
            return
        callbacks = _host.callbacks_of(self.trainer)
        if not any(isinstance(callback, ExactResume) for callback in callbacks):
            callbacks.append(ExactResume())
        if self._feed.loaders.settings.num_workers == "tune":
            attach_tuning(self.trainer)

    def _feed_run_seed(self) -> int:
        """Return the seed of the training order: the user's, ``seed_everything``'s, or a random one for all ranks."""
        trainer = self.trainer
        if self._feed_seed is None:
            self._feed_seed = self._feed_given_seed
        if self._feed_seed is None and "PL_GLOBAL_SEED" in os.environ:
            self._feed_seed = int(os.environ["PL_GLOBAL_SEED"])
        if self._feed_seed is None:
            self._feed_seed = int(torch.randint(SEEDS, (), device="cpu"))
            if trainer is not None and trainer.world_size > 1:
                # All ranks need the same seed: each takes its share of one common order.
                self._feed_seed = trainer.strategy.broadcast(self._feed_seed)
        return self._feed_seed

    def _feed_no_loaders(self, split: str) -> list[object]:
        if split == "train":
            raise DatasetError(
                f"{type(self).__name__}.make_dataset('train') returned None, so there is no training data. "
                "Return a dataset for 'train', or call trainer.validate, test or predict, which do not need one."
            )
        if self.trainer is not None and self.trainer.state.fn == "fit":  # training without validation is intended
            ignore_warning("Total length of `list` across ranks is zero")
        return []

    def _feed_epoch(self) -> int:
        if self.trainer is None:
            return 0
        return _host.epochs_processed(self.trainer)

    def _feed_next_epoch(self, epoch: int) -> int | None:
        if self.trainer is None:
            return None
        return _host.next_epoch(self.trainer, epoch)

    def _feed_transfer(self, batch: object, device: torch.device, dataloader_idx: int) -> object:
        """Run the original transfer (the module's, if it has one), then ``device_transform``."""
        trainer = self.trainer
        own = getattr(type(self), _TRANSFER)
        if trainer is None:
            raise LoaderError(
                f"{_TRANSFER}() works only with a Trainer, which knows the split of the batch. Without a Trainer, move "
                "the batch to the device yourself, and call device_transform(batch, split)."
            )
        with traced("device_copy"):
            if _host.defined_by_lightning(own) and _host.is_overridden(trainer.lightning_module, _TRANSFER):
                moved = getattr(trainer.lightning_module, _TRANSFER)(batch, device, dataloader_idx)
            else:
                moved = own(self, batch, device, dataloader_idx)
        from lightning_feed.transfer.batch_tree import release

        # Put back the values that PrefetchCallback(host_keys=...) kept out of the transfer.
        moved = release(moved)
        split = _SPLITS_OF_STAGE[_host.stage_now(trainer)][0]
        with traced("device_transform"):
            transformed = self.device_transform(moved, split)
        if transformed is None and moved is not None:
            raise LoaderError(
                f"{type(self).__name__}.device_transform returned None in place of a batch. End it with `return batch`."
            )
        return transformed


class FastDataModule(FeedDataModule, LightningDataModule):
    """A LightningDataModule that builds its loaders itself, from a dataset for each split.

    Write :meth:`make_dataset`; override ``collate``, ``sampler`` and ``device_transform`` if needed. Workers, prefetch
    factor, pinned memory and persistent workers are chosen for the machine; :meth:`loader_report` lists them with
    reasons. A run resumed in mid-epoch trains the rest of the epoch.

    Workers hold copies of the dataset as it was when they started, and by default stay alive from epoch to epoch. They
    are chosen only after a rehearsal, in which a few samples were seen to be the same in worker processes. Chosen
    workers start anew when an epoch begins with other samples. With a number of workers of your own, set
    ``persistent_workers=False`` if the program changes the dataset between epochs.

    Args:
        batch_size: samples in a training batch, on each rank.
        eval_batch_size: samples in a batch of validation, test and prediction. By default ``batch_size``. ``"even"``
            chooses the size, from half of ``batch_size`` to all of it, that leaves the fewest samples for a smaller
            last batch.
        loader: settings of the loaders.
        drop_keys: keys of a batch that no step reads, and that are dropped in the workers.
        data_dir: the folder or file of the data, or with ``stage_to`` its fsspec URL (``"s3://bucket/birds"``).
            ``make_dataset`` reads from ``self.staged_dir``.
        stage_to: a folder in memory (``"/dev/shm/<user>"``) or on a local disk, to copy the data to once per node.
        on_device: True to keep whole datasets on each device.

    Raises:
        SettingsError: a value is invalid, or would have no effect.

    Example:
        >>> from lightning_feed import FastDataModule
        >>> class Numbers(FastDataModule):
        ...     def make_dataset(self, split):
        ...         return range(10) if split == "train" else None
        >>> sum(len(batch) for batch in Numbers(batch_size=4).train_dataloader())
        10
    """
