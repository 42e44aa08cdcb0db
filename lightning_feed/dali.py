"""DaliDataModule: from a DALI pipeline for each split to loaders that Lightning can break off, resume and shard."""

from typing import Any, Literal, final

import torch
from lightning.pytorch import LightningDataModule

from lightning_feed import _host, dali_hooks, exact_resume
from lightning_feed.dali_loaders import SPLITS_OF_STAGE, DaliChoices, DaliLoaders, Device, check_count
from lightning_feed.datamodule_loaders import hush
from lightning_feed.errors import SettingsError
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.dali.options import DaliOptions
from lightning_feed.load.dali.reader_share import LastBatch
from lightning_feed.load.trace import traced
from lightning_feed.transfer_hook import TRANSFER, moved

_SPLIT_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}


class FeedDali:
    """All of DaliDataModule but its base class, of which there are two: Lightning is published as two packages."""

    trainer: Any

    def __init__(  # noqa: PLR0913 - all but the batch size are by name, and have a default
        self,
        batch_size: int = 32,
        *,
        eval_batch_size: int | None = None,
        device: Device = "auto",
        last_batch: LastBatch = "partial",
        eval_last_batch: LastBatch = "partial",
        resumable: bool = True,
        seed: int | None = None,
        dali: DaliOptions | None = None,
    ) -> None:
        super().__init__()
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        choices = DaliChoices(
            device=device,
            last_batch=last_batch,
            eval_last_batch=eval_last_batch,
            resumable=resumable,
            seed=seed,
            options=dali or DaliOptions(),
        )
        check_count("batch_size", batch_size, "the samples in a batch")
        if eval_batch_size is not None:
            check_count("eval_batch_size", eval_batch_size, "the samples in a batch, or None for batch_size")
        require_dali(gpu=device == "gpu", why=type(self).__name__)
        self._dali = DaliLoaders(choices)
        # Lightning sees a val_dataloader before it can know whether there is data for it.
        hush("You passed in a `val_dataloader` but have no `validation_step`")
        if type(self).device_transform is not FeedDali.device_transform:
            setattr(self, TRANSFER, self._dali_transfer)  # on this object only where needed, as in FastDataModule

    # --- to write or to override --------------------------------------------------------------------------------------

    def pipeline(self, split: str) -> Any:
        """Define the pipeline of ``"train"``, ``"val"``, ``"test"`` or ``"predict"``. The one method to write.

        Called whenever a pipeline of the split is made, with that pipeline as DALI's current one: for training once,
        for the other splits before each pass.

        Returns:
            Outputs of ``nvidia.dali.fn``, alone or in a tuple, list or dict: batches come in that form, as tensors of
            shape (B, ...). None where there is no such split.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no pipeline. Write into the class:\n\n"
            "    def pipeline(self, split):  # 'train', 'val', 'test' or 'predict'\n"
            "        if split not in ('train', 'val'):\n"
            "            return None  # no such split\n"
            "        jpegs, labels = fn.readers.file(file_root=f'data/{split}', **self.reader())\n"
            "        images = fn.decoders.image(jpegs, device=self.decoder_device)\n"
            "        images = fn.transpose(fn.resize(images, size=(224, 224)), perm=[2, 0, 1])  # uint8\n"
            "        return images, fn.cast(fn.squeeze(labels, axes=[0]), dtype=types.INT64)\n"
        )

    def device_transform(self, batch: Any, split: str) -> Any:
        """Change a batch once it is on the device; on the prefetch stream, where ``PrefetchCallback`` is active."""
        return batch

    # --- to call ------------------------------------------------------------------------------------------------------

    def reader(self, name: str = "reader", *, shuffle: bool | None = None) -> dict[str, Any]:
        """What a reader of DALI's has to be told, for ``pipeline``: ``fn.readers.file(..., **self.reader())``.

        These are ``name``, ``shard_id``, ``num_shards``, ``stick_to_shard``, ``random_shuffle``, ``seed`` and
        ``pad_last_batch``. They are the same for every reader of a pipeline, so that several go in step.

        Args:
            name: what the reader is called; of several in a pipeline, each has its own.
            shuffle: whether the order is random; None: that of training is. DALI shuffles within ``initial_fill``
                samples (1024 unless the reader is told another number), and ``readers.file`` the list of files before.

        Raises:
            SettingsError: outside of ``pipeline``.
        """
        making = self._dali.making
        if making is None:
            raise SettingsError(
                "self.reader() tells a reader its share of the set, which is known while a pipeline is made. Call it "
                "in pipeline(split): fn.readers.file(file_root=..., **self.reader())."
            )
        return making.reader(name, shuffle=shuffle)

    @property
    def decoder_device(self) -> Literal["cpu", "mixed"]:
        """Where a decoder works: ``fn.decoders.image(jpegs, device=self.decoder_device)``. What follows it is done on
        the device that its images are on."""
        return "cpu" if self._dali.device(self) is None else "mixed"

    def loader_report(self) -> str:
        """What the pipelines of the loaders that were made are built with: one line for each."""
        return self._dali.report(self)

    # --- what Lightning calls -----------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """See which splits there are, of those that ``stage`` needs.

        Raises:
            DatasetError: when there is nothing to train on.
        """
        if stage not in SPLITS_OF_STAGE:
            raise SettingsError(f"There is no stage {stage!r}. Give one of {', '.join(map(repr, SPLITS_OF_STAGE))}.")
        self._dali.close(*SPLITS_OF_STAGE[stage])  # what an interrupted run of that stage left
        self._dali.forget()
        self._dali.resume = None
        for split in SPLITS_OF_STAGE[stage]:
            self._dali.has(self, split)
        if stage == "fit":
            self._dali.require_train(self)
            self._dali.run.seed = None  # each run has its own order; a checkpoint's seed comes after this
        self._dali_attach()
        if TRANSFER in vars(self) and _host.defined_by_lightning(getattr(type(self), TRANSFER)):
            hush(f"You have overridden `{TRANSFER}` in both")  # the module's is called: see _dali_transfer

    def teardown(self, stage: str) -> None:
        """Free the pipelines of ``stage``."""
        self._dali.close(*SPLITS_OF_STAGE.get(stage, ()))

    @final
    def train_dataloader(self) -> Any:
        """The training loader."""
        self._dali.require_train(self)
        self._dali_attach()  # a subclass may have a setup() of its own
        return self._dali.build(self, "train")

    @final
    def val_dataloader(self) -> Any:
        """The validation loader; an empty list without that split."""
        return self._dali.build(self, "val")

    @final
    def test_dataloader(self) -> Any:
        """The test loader; an empty list without that split."""
        return self._dali.build(self, "test")

    @final
    def predict_dataloader(self) -> Any:
        """The prediction loader; an empty list without that split."""
        return self._dali.build(self, "predict")

    def state_dict(self) -> dict[str, Any]:
        """The seed of the training order, so that a resumed run goes on in the same order."""
        seed = self._dali.run.seed
        return {} if seed is None else {"seed": seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that wrote the checkpoint."""
        self._dali.run.load_seed(state_dict.get("seed"))

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for ddp_spawn, and copied by tuners. Pipelines cannot go along, and are made again where needed.
        return {**self.__dict__, "trainer": None, "_dali": self._dali.copy()}

    def _dali_attach(self) -> None:
        if self.trainer is not None:
            exact_resume.attach(self.trainer)
            dali_hooks.attach(self.trainer)

    def _dali_transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """The transfer as it would be without us, then ``device_transform``."""
        there = moved(self, batch, device, dataloader_idx)
        with traced("device_transform"):
            return self.device_transform(there, _SPLIT_OF_STAGE[_host.stage_now(self.trainer)])


class DaliDataModule(FeedDali, LightningDataModule):
    """A LightningDataModule over DALI pipelines of your own, with DALI's own readers.

    Write :meth:`pipeline`; override ``device_transform`` where needed. Shards, seeds, lengths and the last batch are
    seen to, passes may be broken off, and a run that is resumed in mid-epoch trains what is left of the epoch. The
    training pipeline lives as long as the fit; the others are made when their pass begins and freed after it.

    Args:
        batch_size: samples in a training batch, on each rank.
        eval_batch_size: samples in a batch of validation, test and prediction; None for ``batch_size``.
        device: where DALI works: ``"gpu"``, ``"cpu"``, or ``"auto"`` for the GPU where the Trainer trains on one.
            Batches of a GPU pipeline arrive on the device.
        last_batch: of a training epoch: ``"partial"`` for what is left, ``"drop"`` for whole batches only, ``"fill"``
            for a whole batch in which the last sample is repeated. The number of batches is the same on every rank:
            with ``"partial"``, a rank that has nothing left where others do repeats one sample.
        eval_last_batch: the same, of the other splits.
        resumable: whether DALI keeps track of its state for checkpoints; switch it off for operators that cannot, and
            for ``fn.external_source`` of a generator, an iterator or a callable without an argument.
        seed: of the order and of all random operators; None: that of ``seed_everything``, or a drawn one.
        dali: its ``threads``, ``prefetch`` and ``keep_eval_pipelines``.

    Raises:
        MissingExtraError: without DALI; the message holds the pip line.
        SettingsError: for a value that is impossible.

    Example:
        >>> from nvidia.dali import fn, types  # doctest: +SKIP
        >>> class Birds(DaliDataModule):
        ...     def pipeline(self, split):
        ...         if split not in ("train", "val"):
        ...             return None
        ...         jpegs, labels = fn.readers.file(file_root=f"birds/{split}", **self.reader())
        ...         images = fn.decoders.image(jpegs, device=self.decoder_device)
        ...         images = fn.transpose(fn.resize(images, size=(224, 224)), perm=[2, 0, 1])
        ...         return images, fn.cast(fn.squeeze(labels, axes=[0]), dtype=types.INT64)
        ...
        ...     def device_transform(self, batch, split):
        ...         images, labels = batch  # (B, 3, 224, 224) uint8, (B,) int64
        ...         return images.float() / 255, labels
    """
