"""FastDataModule: from a dataset for each split to loaders that are tuned for the machine."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import default_collate

from lightning_feed import _host, exact_resume
from lightning_feed.archive.shared_cache import CacheStats
from lightning_feed.datamodule_loaders import Loaders, hush
from lightning_feed.datamodule_storage import Cache, Storage
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.batch_decoder import BatchDecoder
from lightning_feed.load.build import name_datasets
from lightning_feed.load.drop_keys import check_drop_keys
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.trace import traced
from lightning_feed.transfer_hook import TRANSFER, moved
from lightning_feed.wrapping import wrap

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "predict")
_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


@dataclass
class _State:
    """What the data module keeps for itself, under one name: the other names are the user's."""

    loaders: Loaders
    storage: Storage
    datasets: dict[str, Any] = field(default_factory=dict)
    built: set[str] = field(default_factory=set)
    cached: set[str] = field(default_factory=set)


class FeedDataModule:
    """All of FastDataModule but its base class, of which there are two: Lightning is published as two packages."""

    trainer: Any

    def __init__(  # noqa: PLR0913 - all but the batch size are by name, and have a default
        self,
        batch_size: int = 32,
        *,
        eval_batch_size: int | Literal["even"] | None = None,
        loader: LoaderSettings | None = None,
        drop_keys: Sequence[str] = (),
        data_dir: str | Path | None = None,
        stage_to: str | Path | None = None,
        stage_wait: bool = True,
        stage_remove: bool = False,
        cache: Cache | None = None,
        cache_limit: int | str = "50%",
        cache_shard: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("batch_size", batch_size), ("eval_batch_size", eval_batch_size)):
            if (name, value) == ("eval_batch_size", "even"):
                continue
            if (value is not None or name == "batch_size") and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise SettingsError(f"{name}={value!r} is not possible. Give the samples in a batch, 1 or more.")
        if loader is not None and not isinstance(loader, LoaderSettings):
            raise SettingsError(f"loader={loader!r} is not a LoaderSettings. Write LoaderSettings(num_workers=...).")
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        storage = Storage(
            data_dir=data_dir,
            stage_to=stage_to,
            stage_wait=stage_wait,
            stage_remove=stage_remove,
            cache=cache,
            cache_limit=cache_limit,
            cache_shard=cache_shard,
        )
        dropped = check_drop_keys(drop_keys, type(self).__name__)
        self._feed = _State(Loaders(loader or LoaderSettings(), drop_keys=dropped), storage)
        # Lightning sees a val_dataloader before it can know whether there is data for it. setup() warns where there is.
        hush("You passed in a `val_dataloader` but have no `validation_step`")
        if self._feed_overrides("device_transform"):
            # Bound to this object only when it is needed, since Lightning takes an override of this hook away from the
            # LightningModule. Here, and not in on_after_batch_transfer, it runs on the stream that the copy runs on.
            setattr(self, TRANSFER, self._feed_transfer)

    # --- to write or to override --------------------------------------------------------------------------------------

    def make_dataset(self, split: str) -> Any:
        """Make the dataset of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``. The one method to write.

        Called once for each split that is needed, in each training process; again only where the Trainer reloads
        loaders (``reload_dataloaders_every_n_epochs``).

        Returns:
            A map-style or iterable dataset, a dict or list of datasets, or None where there is no such split.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no make_dataset. Write into the class:\n\n"
            "    def make_dataset(self, split):  # 'train', 'val', 'test' or 'predict'\n"
            "        return MyDataset(split)     # None where there is no such split\n"
        )

    def collate(self, samples: list[Any], split: str) -> Any:
        """Make a batch of a list of samples. Runs in the workers."""
        return default_collate(samples)

    def sampler(self, dataset: Any, split: str) -> Any:
        """The order of a map-style dataset: a sampler, or None for ours (training shuffled, the rest in order)."""
        return None

    def device_transform(self, batch: Any, split: str) -> Any:
        """Change a batch once it is on the device; on the prefetch stream, where ``PrefetchCallback`` is active."""
        return batch

    # --- to call ------------------------------------------------------------------------------------------------------

    @staticmethod
    def wrap(datamodule: Any, loader: LoaderSettings | None = None) -> Any:
        """The same data module, of either package, whose loaders come with workers that fit the machine.

        Data sets, samplers, collate functions, generators and batch sizes stay; ``num_workers``, ``prefetch_factor``,
        ``persistent_workers`` and ``pin_memory`` change. It has a ``loader_report()``. See docs/how-to/wrap.md.

        Args:
            datamodule: any LightningDataModule. The result shares its attributes.
            loader: how to choose; of it only ``num_workers``, ``prefetch_factor``, ``persistent_workers``,
                ``pin_memory`` and ``sample_bytes``.

        Raises:
            SettingsError: for what is no data module or a FastDataModule, and for other settings.
        """
        return wrap(datamodule, loader)

    def dataset(self, split: str) -> Any:
        """What ``make_dataset(split)`` gave, made now if it was not yet.

        Raises:
            SettingsError: for a name that is no split.
            DatasetError: when it is empty, or not a dataset.
        """
        return self._feed_dataset(split)

    @property
    def staged_dir(self) -> Path:
        """The folder to read from: ``data_dir`` as given, or its copy in ``stage_to`` once that is complete.

        Raises:
            SettingsError: when the data module was made without ``data_dir``.
            ArchiveError: when it cannot be staged.
        """
        place = self._feed.storage.find()
        return place if isinstance(place, Path) else place.current()

    @property
    def recommendations(self) -> Mapping[str, Recommendation]:
        """What was chosen for each loader that was made: ``"train"``, or ``"train['key']"`` of a dict of datasets."""
        return self._feed.loaders.recommendations()

    def loader_report(self) -> str:
        """What was chosen for each loader that was made, and why: one line for each value."""
        return self._feed.loaders.report()

    def cache_stats(self) -> CacheStats | None:
        """What the caches in host memory hold and have done, over all processes of the node; None without one."""
        return self._feed.storage.stats()

    def _feed_facts(self) -> dict[str, Any]:
        """Fields of ``LoopFacts`` that only a data module knows."""
        storage = self._feed.storage
        return {
            "cache": storage.cache or "off",
            "staged": storage.stage_to is not None,
            "device_transform": self._feed_overrides("device_transform"),
        }

    # --- what Lightning calls -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Make the datasets that ``stage`` needs, and no others.

        Raises:
            DatasetError: when there is nothing to train on, or a dataset is empty or not a dataset.
        """
        if stage not in _SPLITS_OF_STAGE:
            raise SettingsError(f"There is no stage {stage!r}. Give one of {', '.join(map(repr, _SPLITS_OF_STAGE))}.")
        for split in _SPLITS_OF_STAGE[stage]:
            self._feed_dataset(split)
            self._feed.built.discard(split)
        self._feed_open_caches(*_SPLITS_OF_STAGE[stage])
        if stage == "fit":
            self._feed_require_train()
            self._feed.loaders.seed = None  # each run has its own order; a checkpoint's seed comes after this
            if self.trainer is not None:
                exact_resume.attach(self.trainer)
                self._feed_warn_of_unused_validation()
        if TRANSFER in vars(self) and _host.defined_by_lightning(getattr(type(self), TRANSFER)):
            hush(f"You have overridden `{TRANSFER}` in both")  # the module's is called: see _feed_transfer

    @final
    def train_dataloader(self) -> Any:
        """The training loader, or a dict or list of them."""
        return self._feed_loaders("train")

    @final
    def val_dataloader(self) -> Any:
        """The validation loader, or a dict or list of them; an empty list without that split."""
        return self._feed_loaders("val")

    @final
    def test_dataloader(self) -> Any:
        """The test loader, or a dict or list of them; an empty list without that split."""
        return self._feed_loaders("test")

    @final
    def predict_dataloader(self) -> Any:
        """The prediction loader, or a dict or list of them; an empty list without that split."""
        return self._feed_loaders("predict")

    def state_dict(self) -> dict[str, Any]:
        """The seed of the training order, so that a resumed run goes on in the same order."""
        seed = self._feed.loaders.seed
        return {} if seed is None else {"seed": seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that wrote the checkpoint."""
        self._feed.loaders.load_seed(state_dict.get("seed"))

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for ddp_spawn, and for spawned workers when `collate` is overridden; copied by tuners. The Trainer
        # attaches itself again, and datasets are made again where they are needed.
        feed = _State(self._feed.loaders.copy(), self._feed.storage.copy())
        return {**self.__dict__, "trainer": None, "_feed": feed}

    # --- datasets -----------------------------------------------------------------------------------------------------

    def _feed_overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(FeedDataModule, method)

    def _feed_dataset(self, split: str) -> Any:
        if split not in SPLITS:
            raise SettingsError(f"There is no split {split!r}. Give one of {', '.join(map(repr, SPLITS))}.")
        if split not in self._feed.datasets:
            made = self.make_dataset(split)
            if made is not None:
                name_datasets(made, split)
            self._feed.datasets[split] = made
        return self._feed.datasets[split]

    def _feed_open_caches(self, *splits: str) -> None:
        """Caches for the datasets that were made since, within one limit."""
        named = [(split, self._feed_dataset(split)) for split in splits if split not in self._feed.cached]
        self._feed.cached.update(splits)
        self._feed.storage.open_caches(self.trainer, [(split, made) for split, made in named if made is not None])

    def _feed_warn_of_unused_validation(self) -> None:
        module = self.trainer.lightning_module
        if self._feed_dataset("val") is not None and not _host.is_overridden(module, "validation_step"):
            logger.warning(
                "make_dataset('val') gives data that is not used, since %s has no validation_step. Write one, or "
                "return None for 'val'.",
                type(module).__name__,
            )

    def _feed_require_train(self) -> None:
        if self._feed_dataset("train") is None:
            raise DatasetError(
                f"{type(self).__name__}.make_dataset('train') gave None, so there is nothing to train on. Return a "
                "dataset for 'train', or call trainer.validate, test or predict, which do without."
            )

    # --- loaders ------------------------------------------------------------------------------------------------------

    def _feed_loaders(self, split: str) -> Any:
        trainer = self.trainer
        if trainer is not None and trainer.reload_dataloaders_every_n_epochs and split in self._feed.built:
            del self._feed.datasets[split]  # asked for again, since the data may have changed
            self._feed.cached.discard(split)
        self._feed.built.add(split)
        if split == "train":
            self._feed_require_train()
            if trainer is not None:
                exact_resume.attach(trainer)  # a subclass may have a setup() of its own
        self._feed_open_caches(split)
        made = self._feed_dataset(split)
        if made is None:
            if trainer is not None and trainer.state.fn == "fit":  # training without validation is no slip
                hush("Total length of `list` across ranks is zero")
            return []
        return self._feed.loaders.build(self, split, made, self._feed.storage)

    def _feed_decode(self, split: str) -> BatchDecoder | None:
        """What decodes a loader's batches after its workers."""
        return None

    def _feed_on_device(self, batch: Any, split: str) -> Any:
        """A batch as ``device_transform`` is to see it."""
        return batch

    def _feed_epoch(self) -> int:
        return 0 if self.trainer is None else _host.epochs_processed(self.trainer)

    # --- on the way to the device -------------------------------------------------------------------------------------

    def _feed_transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The transfer as it would be without us, then ``device_transform``."""
        there = moved(self, batch, device, dataloader_idx)
        split = _split_of(self.trainer)
        with traced("device_transform"):
            return self.device_transform(self._feed_on_device(there, split), split)


class FastDataModule(FeedDataModule, LightningDataModule):
    """A LightningDataModule that builds its loaders itself, from a dataset for each split.

    Write :meth:`make_dataset`; override ``collate``, ``sampler`` and ``device_transform`` where needed. Workers, look-
    ahead, pinned memory and persistence are chosen for the machine: :meth:`loader_report` says what and why. A run that
    is resumed in mid-epoch trains what is left of the epoch.

    Args:
        batch_size: samples in a training batch, on each rank.
        eval_batch_size: samples in a batch of validation, test and prediction; None for ``batch_size``; ``"even"`` for
            the size up to ``batch_size``, and at least half of it, that leaves the fewest samples for a last batch.
        loader: how the loaders are to be built.
        drop_keys: parts of a batch that nobody reads: they are left out in the workers, before they cost a copy.
        data_dir: the folder or file that ``make_dataset`` reads, for ``stage_to``; read it from ``staged_dir``.
        stage_to: a folder in memory (``"/dev/shm/<user>"``) or on a local disk: data are copied there once per node.
        stage_wait: whether training waits for the copy; if not, it begins with the source and moves over.
        stage_remove: whether the copy is removed when its last user ends.
        cache: ``"bytes"`` or ``"decoded"``, what to keep of each sample in memory shared by all processes of the node,
            or ``"device"``, to keep the whole set on each accelerator. Needs a ``CacheableDataset``.
        cache_limit: the most that caches may take: bytes, ``"8GiB"``, or a share of the free memory.
        cache_shard: for ``"device"``, whether each rank keeps its share of the samples only.

    Raises:
        SettingsError: for a value that is impossible, or that would have no effect.

    Example:
        >>> from lightning_feed import FastDataModule
        >>> class Numbers(FastDataModule):
        ...     def make_dataset(self, split):
        ...         return range(10) if split == "train" else None
        >>> sum(len(batch) for batch in Numbers(batch_size=4).train_dataloader())
        10
    """


def _split_of(trainer: Any) -> str:
    """The split that the running loop goes through."""
    if trainer.training:
        return "train"
    if trainer.sanity_checking or trainer.validating:
        return "val"
    return "test" if trainer.testing else "predict"
