"""DaliDataModule: from a DALI pipeline for each split to loaders that Lightning can break off, resume and shard."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningDataModule

from lightning_feed._host.fetcher import (
    checkpoint_loader_states,
    write_loader_states,
)
from lightning_feed.data.base import DataModuleBase, check_batch_sizes, check_choice, device_of
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.dali.binding import DaliOptions, decode_threads, require_dali
from lightning_feed.load.dali.readers import ReaderLoader, ReaderSettings, ResumableReaderLoader, reader_pipeline
from lightning_feed.load.dali.shares import LAST_BATCH, LastBatch
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.settings import LoaderSettings

Device = Literal["auto", "cpu", "gpu"]


@dataclass
class _State:
    """What the data module keeps for itself, under one name: the other names are the user's."""

    device: Device
    last_batch: dict[bool, LastBatch]
    """Of training (True) and of evaluation."""
    resumable: bool
    options: DaliOptions
    arguments: dict[str, Any] | None = None
    """What readers are to be told, while ``pipeline()`` defines a pipeline."""
    reads: bool = False
    """Whether that was asked for, for the last pipeline."""
    resume: dict[str, Any] | None = None
    """The state of the training loader in the checkpoint that this fit goes on from."""
    there: dict[str, bool] = field(default_factory=dict)
    """Whether there is a split, once it was asked for."""
    loaders: dict[str, ReaderLoader] = field(default_factory=dict)


class FeedDali(DataModuleBase):
    """All of DaliDataModule but its base class, of which there are two: Lightning is published as two packages."""

    _feed_method = "pipeline"

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
        super().__init__(LoaderSettings(seed=seed).seed)  # which refuses what is no seed
        check_batch_sizes(batch_size, eval_batch_size)
        check_choice("device", device, get_args(Device))
        check_choice("last_batch", last_batch, LAST_BATCH)
        check_choice("eval_last_batch", eval_last_batch, LAST_BATCH)
        options = dali or DaliOptions()
        options.refuse_gpu_options(
            "would have no effect here, where pipeline() calls the decoder itself. Give it to fn.decoders.image there."
        )
        require_dali(gpu=device == "gpu", why=type(self).__name__)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self._dali = _State(device, {True: last_batch, False: eval_last_batch}, resumable, options)

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

    # --- to call ------------------------------------------------------------------------------------------------------

    def reader(self, name: str = "reader", *, shuffle: bool | None = None) -> dict[str, Any]:
        """The arguments of each reader in ``pipeline``: ``fn.readers.file(..., **self.reader())``.

        These are ``name``, ``shard_id``, ``num_shards``, ``stick_to_shard``, ``random_shuffle``, ``seed`` and
        ``pad_last_batch``. But for the name they are the same for every reader, so that all give the same samples.

        Args:
            name: what the reader is called; of several in a pipeline, each has its own.
            shuffle: whether the order is random; None: that of training is. DALI shuffles within ``initial_fill``
                samples (1024 unless the reader is told another number), and ``readers.file`` the list of files before.

        Raises:
            SettingsError: outside of ``pipeline``.
        """
        arguments = self._dali.arguments
        if arguments is None:
            raise SettingsError(
                "self.reader() tells a reader its share of the set, which is known while a pipeline is made. Call it "
                "in pipeline(split): fn.readers.file(file_root=..., **self.reader())."
            )
        self._dali.reads = True
        return {"name": name, **arguments, **({} if shuffle is None else {"random_shuffle": shuffle})}

    @property
    def decoder_device(self) -> Literal["cpu", "mixed"]:
        """Where a decoder works: ``fn.decoders.image(jpegs, device=self.decoder_device)``. What follows it is done on
        the device that its images are on."""
        return "cpu" if self._dali_device() is None else "mixed"

    def loader_report(self) -> str:
        """What the pipelines of the loaders that were made are built with: one line for each."""
        lines = []
        for split, loader in self._dali.loaders.items():
            found = loader.settings
            lines.append(
                f"{split}: DALI on {'the CPU' if found.device is None else found.device}, threads={found.threads}, "
                f"prefetch={found.prefetch}, batch_size={found.batch_size}, share {found.rank + 1} of {found.ranks}, "
                f"last_batch={found.last_batch!r}"
            )
        return "\n".join(lines) or "No loader has been made yet."

    # --- what Lightning calls -----------------------------------------------------------------------------------------

    def teardown(self, stage: str) -> None:
        """Free the pipelines."""
        self._feed_release()

    def __getstate__(self) -> dict[str, Any]:
        fresh = replace(self._dali, arguments=None, resume=None, there={}, loaders={})
        return {**super().__getstate__(), "_dali": fresh}

    def _feed_setup(self, splits: tuple[str, ...]) -> None:
        self._dali_close(*splits)  # what an interrupted run left
        self._dali.there.clear()
        self._dali.resume = None
        for split in splits:
            self._feed_has(split)

    def _feed_resumed(self, checkpoint: dict[str, Any]) -> None:
        # Lightning gives the state to no loader where an epoch had come to its end.
        states = checkpoint_loader_states(checkpoint) or []
        if states and self._dali.resumable:
            self._dali.resume = states[0]
        elif states:
            # Lightning refuses a state that no loader takes; without one it warns that the epoch is taken up anew.
            write_loader_states(checkpoint, [])

    def _feed_pass_ended(self, split: str) -> None:
        if split in self._dali.loaders:
            self._dali.loaders[split].end_pass()

    def _feed_release(self) -> None:
        self._dali_close(*self._dali.loaders)

    def _feed_loaders(self, split: str) -> Any:
        state = self._dali
        self._dali_close(split)  # the Trainer reloads its loaders
        if not self._feed_has(split):
            return self._feed_no_loaders(split)
        settings = self._dali_settings(split)

        def define(seed: int) -> Any:
            with self._dali_defining(split, settings, seed):
                return self.pipeline(split)

        order = EpochOrder(seed=self._feed_run_seed(), epoch=self._feed_epoch)
        if not settings.resumable:
            state.loaders[split] = ReaderLoader(define, settings, order)
            return state.loaders[split]
        state.loaders[split] = loader = ResumableReaderLoader(define, settings, order)
        if state.resume is not None:
            # Given here as well as by Lightning, which does so in mid-epoch only.
            resume, state.resume = state.resume, None
            loader.load_state_dict(resume)
        return loader

    # --- details ------------------------------------------------------------------------------------------------------

    def _dali_close(self, *splits: str) -> None:
        """Free the pipelines of these splits, and forget their loaders."""
        for split in splits:
            loader = self._dali.loaders.pop(split, None)
            if loader is not None:
                loader.close()

    def _feed_has(self, split: str) -> bool:
        # Its pipeline is defined to know it, and not built.
        there = self._dali.there
        if split not in there:
            settings = self._dali_settings(split)
            with self._dali_defining(split, settings, seed=0), reader_pipeline(settings):
                found = self.pipeline(split)
            if found is None and self._dali.reads:
                raise DatasetError(f"{settings.name} made a reader and returned nothing: return images, labels.")
            there[split] = found is not None
        return there[split]

    @contextmanager
    def _dali_defining(self, split: str, settings: ReaderSettings, seed: int) -> Iterator[None]:
        """While a pipeline is being defined, ``reader()`` can tell what it has to be told."""
        training, self._dali.reads = split == "train", False
        self._dali.arguments = {
            "shard_id": settings.rank,
            "num_shards": settings.ranks,
            "stick_to_shard": not training,
            "random_shuffle": training and settings.goes_on,
            "seed": mix_seed(seed, 0, 0, "reader") >> 32,  # the same on all ranks, and for all readers of a pipeline
            "pad_last_batch": True,
        }
        try:
            yield
        finally:
            self._dali.arguments = None

    def _dali_settings(self, split: str) -> ReaderSettings:
        """What a pipeline of ``split`` is built with in this process."""
        trainer, state, training = self.trainer, self._dali, split == "train"
        sharding = None if trainer is None else trainer.distributed_sampler_kwargs
        ranks_here, overfits = (1, False) if trainer is None else (trainer.num_devices, trainer.overfit_batches > 0)
        return ReaderSettings(
            name=f"{type(self).__name__}.pipeline({split!r})",
            batch_size=self.batch_size if training else self.eval_batch_size or self.batch_size,
            threads=decode_threads(state.options, read_machine(), ranks_here)[0],
            prefetch=state.options.prefetch,
            device=self._dali_device(),
            rank=sharding["rank"] if sharding else 0,
            ranks=sharding["num_replicas"] if sharding else 1,
            last_batch=state.last_batch[training],
            lives=training or state.options.keep_eval_pipelines,
            goes_on=training and not overfits,
            resumable=training and state.resumable,
        )

    def _dali_device(self) -> torch.device | None:
        """The CUDA device that pipelines work on; None: the CPU alone.

        Raises:
            SettingsError: for ``device="gpu"`` where the run is not on one.
        """
        found = torch.device("cpu") if self._dali.device == "cpu" else device_of(self.trainer)
        if found.type == "cuda":
            return found
        if self._dali.device == "gpu":
            raise SettingsError(
                f"{type(self).__name__}(device='gpu') needs an NVIDIA GPU, and this run is on {found.type!r}. Train "
                "with Trainer(accelerator='cuda'), or give device='cpu', or 'auto' to follow the Trainer."
            )
        return None


class DaliDataModule(FeedDali, LightningDataModule):
    """A LightningDataModule over DALI pipelines of your own, with DALI's own readers.

    Write :meth:`pipeline`; override ``device_transform`` where needed. Each rank reads its shard, a pass may end early,
    and a run that is resumed in mid-epoch trains what is left of the epoch. The training pipeline lives as long as the
    fit; the others are made when their pass begins and freed after it.

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
