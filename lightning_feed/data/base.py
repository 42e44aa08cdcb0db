"""The base of our data modules: splits, stages, the seed of a run, the ends of passes, the transfer to the device."""

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any, final

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_feed import _host
from lightning_feed.data.exact_resume import ExactResume
from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.load.settings import SEEDS, LoaderSettings
from lightning_feed.load.trace import traced
from lightning_feed.transfer.batch_tree import release

logger = logging.getLogger(__name__)

SPLITS = ("train", "val", "test", "predict")
SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
_TRANSFER = "transfer_batch_to_device"


def check_whole(name: str, value: object, unit: str) -> None:
    """Refuse what is not a whole number of 1 or more.

    Raises:
        SettingsError: says which, and what to give.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value!r} is not possible. Give {unit}, 1 or more.")


def check_batch_sizes(batch_size: object, eval_batch_size: object) -> None:
    """Refuse batch sizes that are not possible; None and "even" are, for evaluation."""
    check_whole("batch_size", batch_size, "the samples in a batch")
    if eval_batch_size not in (None, "even"):
        check_whole("eval_batch_size", eval_batch_size, "the samples in a batch")


def check_misplaced(owner: str, given: Mapping[str, object]) -> None:
    """Refuse arguments that a data module does not have; of a loader's settings say where they belong.

    Raises:
        SettingsError: names the first.
    """
    for name, value in given.items():
        if name in LoaderSettings.__dataclass_fields__:
            where = f"Write {owner}(..., loader=LoaderSettings({name}={value!r}))."
            raise SettingsError(f"{name} is a setting of the loaders. {where}")
        raise SettingsError(f"{owner} has no argument {name}.")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse what is none of the choices.

    Raises:
        SettingsError: names them.
    """
    if value not in choices:
        raise SettingsError(f"{name}={value!r} is not a choice. Give one of {', '.join(map(repr, choices))}.")


def ignore_warning(message: str) -> None:
    """Keep one warning of Lightning's back: what it advises was considered, and decided otherwise with a reason."""
    warnings.filterwarnings("ignore", message=message, category=UserWarning)


def device_of(trainer: Any) -> torch.device:
    """Where the batches go: the Trainer's device; without one, the first that a Trainer would take."""
    if trainer is not None:
        return trainer.strategy.root_device  # type: ignore[no-any-return]
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class DataModuleBase:
    """The base of our data modules, without Lightning's own class, which comes in two packages.

    Names that begin with ``_feed_`` are ours, all others are the user's.
    """

    trainer: Any
    _feed_seed: int | None = None
    """Of the run's training order. None until it is asked for, or loaded from a checkpoint."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._feed_given_seed = seed
        # Lightning sees a val_dataloader before it can know whether there is data for it. setup() warns where there is.
        ignore_warning("You passed in a `val_dataloader` but have no `validation_step`")
        if type(self).device_transform is not DataModuleBase.device_transform:
            # Bound to this object only when it is needed, since Lightning takes an override of this hook away from the
            # LightningModule. Here, and not in on_after_batch_transfer, it runs on the stream that the copy runs on.
            setattr(self, _TRANSFER, self._feed_transfer)

    def device_transform(self, batch: Any, split: str) -> Any:
        """Change a batch once it is on the device; on the prefetch stream, where ``PrefetchCallback`` is active."""
        return batch

    # --- what Lightning calls -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Find the splits that ``stage`` needs, and no others.

        Raises:
            DatasetError: when there is nothing to train on, or a split is not what it has to be.
        """
        if stage not in SPLITS_OF_STAGE:
            raise SettingsError(f"There is no stage {stage!r}. Give one of {', '.join(map(repr, SPLITS_OF_STAGE))}.")
        self._feed_setup(SPLITS_OF_STAGE[stage])
        if stage == "fit":
            if not self._feed_has("train"):
                self._feed_no_loaders("train")
            self._feed_seed = None  # each run has its own order; a checkpoint's seed comes after this
            self._feed_attach()
        if _TRANSFER in vars(self) and _host.defined_by_lightning(getattr(type(self), _TRANSFER)):
            ignore_warning(f"You have overridden `{_TRANSFER}` in both")  # the module's is called: see _feed_transfer

    @final
    def train_dataloader(self) -> Any:
        """The training loader, or a dict or list of them."""
        return self._feed_attached_loaders("train")

    @final
    def val_dataloader(self) -> Any:
        """The validation loader, or a dict or list of them; an empty list without that split."""
        return self._feed_attached_loaders("val")

    @final
    def test_dataloader(self) -> Any:
        """The test loader, or a dict or list of them; an empty list without that split."""
        return self._feed_attached_loaders("test")

    @final
    def predict_dataloader(self) -> Any:
        """The prediction loader, or a dict or list of them; an empty list without that split."""
        return self._feed_attached_loaders("predict")

    def state_dict(self) -> dict[str, Any]:
        """The seed of the training order, so that a resumed run goes on in the same order."""
        return {} if self._feed_seed is None else {"seed": self._feed_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that wrote the checkpoint."""
        given, saved = self._feed_given_seed, state_dict.get("seed")
        if saved is not None and given is not None and saved != given:
            logger.warning(
                "The checkpoint was trained in the order of seed %d, and this data module was given seed %d. That of "
                "the checkpoint is used, since another order would repeat samples in this epoch.",
                saved,
                given,
            )
        self._feed_seed = self._feed_seed if saved is None else saved

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for ddp_spawn, and for spawned workers when `collate` is overridden; copied by tuners. The Trainer
        # attaches itself again, and what loaders hold is made again where it is needed.
        return {**self.__dict__, "trainer": None}

    # --- what each of our data modules has of its own -----------------------------------------------------------------

    def _feed_setup(self, splits: tuple[str, ...]) -> None:
        """Find these splits."""
        raise NotImplementedError

    def _feed_has(self, split: str) -> bool:
        """Whether there is such a split."""
        raise NotImplementedError

    def _feed_loaders(self, split: str) -> Any:
        """The loaders of a split; :meth:`_feed_no_loaders` where there is no such split."""
        raise NotImplementedError

    def _feed_on_device(self, batch: Any, split: str) -> Any:
        """A batch as ``device_transform`` is to see it."""
        return batch

    def _feed_pass_ended(self, split: str) -> None:
        """No further batch of this pass is asked for."""

    def _feed_release(self) -> None:
        """Free what the loaders hold: the Trainer is done."""

    # --- details ------------------------------------------------------------------------------------------------------

    def _feed_attach(self) -> None:
        """Have the Trainer write exact checkpoints, and tell of the ends of passes. Not only called in ``setup``, of
        which a subclass may have its own."""
        if self.trainer is None:
            return
        callbacks = self.trainer.callbacks
        if not any(isinstance(one, ExactResume) for one in callbacks):
            callbacks.append(ExactResume())
        if not any(isinstance(one, PassEnds) and one.datamodule is self for one in callbacks):
            callbacks.append(PassEnds(self))

    def _feed_attached_loaders(self, split: str) -> Any:
        self._feed_attach()
        return self._feed_loaders(split)

    def _feed_run_seed(self) -> int:
        """The seed of the run's training order: as given, that of ``seed_everything``, or drawn once for all ranks."""
        trainer = self.trainer
        if self._feed_seed is None:
            self._feed_seed = self._feed_given_seed
        if self._feed_seed is None and "PL_GLOBAL_SEED" in os.environ:
            self._feed_seed = int(os.environ["PL_GLOBAL_SEED"])
        if self._feed_seed is None:
            self._feed_seed = int(torch.randint(SEEDS, (), device="cpu"))
            if trainer is not None and trainer.world_size > 1:
                # Each rank takes its share of one common order.
                self._feed_seed = trainer.strategy.broadcast(self._feed_seed)
        return self._feed_seed

    def _feed_no_loaders(self, split: str) -> list[Any]:
        if split == "train":
            raise DatasetError(
                f"{type(self).__name__}.make_dataset('train') gave None, so there is nothing to train on. Let "
                "it return data for 'train', or call trainer.validate, test or predict, which do without."
            )
        if self.trainer is not None and self.trainer.state.fn == "fit":  # training without validation is no slip
            ignore_warning("Total length of `list` across ranks is zero")
        return []

    def _feed_epoch(self) -> int:
        return 0 if self.trainer is None else _host.epochs_processed(self.trainer)

    def _feed_transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The transfer as it would be without us, which is the module's where it has one, then ``device_transform``."""
        trainer, own = self.trainer, getattr(type(self), _TRANSFER)
        if trainer is None:
            raise LoaderError(f"{_TRANSFER} needs to know the split, which a Trainer tells. Call device_transform.")
        with traced("device_copy"):
            if _host.defined_by_lightning(own) and _host.is_overridden(trainer.lightning_module, _TRANSFER):
                there = getattr(trainer.lightning_module, _TRANSFER)(batch, device, dataloader_idx)
            else:
                there = own(self, batch, device, dataloader_idx)
        # Values that PrefetchCallback(host_keys=...) kept from the transfer are the user's again from here on.
        there = release(there)
        split = SPLITS_OF_STAGE[_host.stage_now(trainer)][0]
        with traced("device_transform"):
            return self.device_transform(self._feed_on_device(there, split), split)


class PassEnds(Callback):
    """A callback that tells a data module of the ends of passes, and of errors.

    A loop that ends early, as with ``limit_val_batches``, does not close its loader, and Lightning keeps its iterator.
    """

    def __init__(self, datamodule: DataModuleBase) -> None:
        self.datamodule = datamodule

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also at the end of the sanity check, and of each validation inside a fit."""
        self.datamodule._feed_pass_ended("val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("test")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the pass."""
        self.datamodule._feed_pass_ended("predict")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Free all."""
        self.datamodule._feed_release()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Free all after an error, too: Lightning does not call ``teardown`` then."""
        self.datamodule._feed_release()
