"""The loaders of one DaliDataModule: what its pipelines are told, and when they are made and freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from lightning_feed import _host
from lightning_feed.datamodule_loaders import Loaders, hush
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.dali.options import DaliOptions, decode_threads
from lightning_feed.load.dali.reader_labels import dali_explained
from lightning_feed.load.dali.reader_loader import ReaderLoader, Reading
from lightning_feed.load.dali.reader_pipeline import PipelineSettings, ReaderPipeline, new_pipeline
from lightning_feed.load.dali.reader_resume import ResumableReaderLoader
from lightning_feed.load.dali.reader_share import LAST_BATCH, Asked, LastBatch
from lightning_feed.load.machine import read_machine
from lightning_feed.load.order import EpochOrder, mix_seed
from lightning_feed.load.settings import LoaderSettings

Device = Literal["auto", "cpu", "gpu"]
SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}


@dataclass(frozen=True, kw_only=True)
class DaliChoices:
    """What a user decided besides batch sizes, as ``DaliDataModule`` has it.

    Raises:
        SettingsError: for a value that is impossible, or would have no effect.
    """

    device: Device
    last_batch: LastBatch
    eval_last_batch: LastBatch
    resumable: bool
    seed: int | None
    options: DaliOptions

    def __post_init__(self) -> None:
        for name, choices in (
            ("device", get_args(Device)),
            ("last_batch", LAST_BATCH),
            ("eval_last_batch", LAST_BATCH),
        ):
            if getattr(self, name) not in choices:
                shown = ", ".join(map(repr, choices))
                raise SettingsError(f"{name}={getattr(self, name)!r} is not a choice. Give one of {shown}.")
        for name in ("largest_image", "hw_decoder_load"):
            if getattr(self.options, name) is not None:
                raise SettingsError(
                    f"DaliOptions({name}={getattr(self.options, name)!r}) would have no effect here, where pipeline() "
                    "calls the decoder itself. Give it to fn.decoders.image there."
                )


def check_count(name: str, value: object, means: str) -> None:
    """Refuse what is no whole number of 1 or more.

    Raises:
        SettingsError: says which, and what to give.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SettingsError(f"{name}={value!r} is not possible. Give {means}: 1 or more.")


@dataclass
class Making:
    """A pipeline that is being defined: what its readers are to be told."""

    settings: PipelineSettings
    seed: int
    shuffle: bool
    sticks: bool
    readers: list[str] = field(default_factory=list)
    """The names that were given out."""

    def reader(self, name: str, *, shuffle: bool | None) -> dict[str, Any]:
        """The arguments of one reader."""
        self.readers.append(name)
        return {
            "name": name,
            "shard_id": self.settings.rank,
            "num_shards": self.settings.ranks,
            "stick_to_shard": self.sticks,
            "random_shuffle": self.shuffle if shuffle is None else shuffle,
            "seed": self.seed,
            "pad_last_batch": True,
        }


class DaliLoaders:
    """Builds loaders for a data module, from its ``pipeline(split)``, and keeps them."""

    def __init__(self, choices: DaliChoices) -> None:
        self.choices = choices
        self.run = Loaders(LoaderSettings(seed=choices.seed))
        """Knows the seed of the run."""
        self.making: Making | None = None
        self.resume: dict[str, Any] | None = None
        """The state of the training loader in the checkpoint that this fit goes on from."""
        self._there: dict[str, bool] = {}
        self._loaders: dict[str, ReaderLoader] = {}

    def has(self, owner: Any, split: str) -> bool:
        """Whether there is such a split. Its pipeline is defined to know it, and not built."""
        if split not in self._there:
            name = _name(owner, split)
            with self._made(owner, split, seed=0) as making, new_pipeline(making.settings), dali_explained(name):
                found = owner.pipeline(split)
            if found is None and making.readers:
                raise DatasetError(
                    f"{_name(owner, split)} made a reader and returned nothing. Return its outputs: return images, "
                    "labels."
                )
            self._there[split] = found is not None
        return self._there[split]

    def require_train(self, owner: Any) -> None:
        """Refuse to train on nothing."""
        if not self.has(owner, "train"):
            raise DatasetError(
                f"{_name(owner, 'train')} gave None, so there is nothing to train on. Return the outputs of a pipeline "
                "for 'train', or call trainer.validate, test or predict, which do without."
            )

    def build(self, owner: Any, split: str) -> ReaderLoader | list[Any]:
        """The loader of a split; an empty list where there is no such split."""
        self.close(split)  # the Trainer reloads its loaders
        trainer, training = owner.trainer, split == "train"
        if not self.has(owner, split):
            if trainer is not None and trainer.state.fn == "fit":  # training without validation is no slip
                hush("Total length of `list` across ranks is zero")
            return []
        settings = self.settings(owner, split)
        resumable = training and self.choices.resumable
        reading = Reading(
            batch_size=settings.batch_size,
            ranks=settings.ranks,
            rank=settings.rank,
            last_batch=self.choices.last_batch if training else self.choices.eval_last_batch,
            device="cpu" if settings.device is None else settings.device.type,
            threads=settings.num_threads,
            prefetch=settings.prefetch_queue_depth,
            lives=training or self.choices.options.keep_eval_pipelines,
            goes_on=training and not _overfits(trainer),
            asked=Asked(pipeline=_name(owner, split))
            if training
            else Asked(pipeline=_name(owner, split), batch_size="eval_batch_size", last_batch="eval_last_batch"),
        )

        def make(seed: int, checkpoint: bytes | None) -> ReaderPipeline:
            with self._made(owner, split, seed=seed) as making:
                return ReaderPipeline(
                    lambda: owner.pipeline(split),
                    making.settings,
                    name=_name(owner, split),
                    seed=mix_seed(seed, settings.rank, 0, "operators") >> 32,
                    resumable=resumable,
                    checkpoint=checkpoint,
                )

        order = EpochOrder(seed=self.run.seed_of_run(trainer), epoch=lambda: _epoch(owner.trainer))
        loader = (ResumableReaderLoader if resumable else ReaderLoader)(make, reading, order)
        self._loaders[split] = loader
        if isinstance(loader, ResumableReaderLoader) and self.resume is not None:
            # Given here as well as by Lightning, which does so in mid-epoch only.
            state, self.resume = self.resume, None
            loader.load_state_dict(state)
        return loader

    def end_pass(self, split: str) -> None:
        """No further batch of this pass is asked for."""
        if split in self._loaders:
            self._loaders[split].end_pass()

    def close(self, *splits: str) -> None:
        """Free the pipelines of these splits, of all if none is given, and forget their loaders."""
        for split in splits or tuple(self._loaders):
            loader = self._loaders.pop(split, None)
            if loader is not None:
                loader.close()

    def forget(self) -> None:
        """Ask anew which splits there are."""
        self._there.clear()

    def settings(self, owner: Any, split: str) -> PipelineSettings:
        """What a pipeline of ``split`` is built with in this process."""
        trainer, options = owner.trainer, self.choices.options
        sharding = None if trainer is None else trainer.distributed_sampler_kwargs
        threads, _ = decode_threads(options, read_machine(), 1 if trainer is None else trainer.num_devices)
        evaluates_by = owner.batch_size if owner.eval_batch_size is None else owner.eval_batch_size
        return PipelineSettings(
            batch_size=owner.batch_size if split == "train" else evaluates_by,
            num_threads=threads,
            prefetch_queue_depth=options.prefetch,
            device=self.device(owner),
            rank=0 if sharding is None else sharding["rank"],
            ranks=1 if sharding is None else sharding["num_replicas"],
        )

    def device(self, owner: Any) -> torch.device | None:
        """The CUDA device that pipelines work on; None: the CPU alone.

        Raises:
            SettingsError: for ``device="gpu"`` where the run is not on one.
        """
        if self.choices.device == "cpu":
            return None
        if owner.trainer is not None:
            found: torch.device = owner.trainer.strategy.root_device
        else:
            found = (
                torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            )
        if found.type == "cuda":
            return found
        if self.choices.device == "gpu":
            raise SettingsError(
                f"{type(owner).__name__}(device='gpu') needs an NVIDIA GPU, and this run is on {found.type!r}. Train "
                "with Trainer(accelerator='cuda'), or give device='cpu', or 'auto' to follow the Trainer."
            )
        return None

    def report(self, owner: Any) -> str:
        """What the loaders that were made are built with: one line for each."""
        lines = []
        for split, loader in self._loaders.items():
            found = self.settings(owner, split)
            lines.append(
                f"{split}: DALI on {'the CPU' if found.device is None else found.device}, "
                f"threads={found.num_threads}, prefetch={found.prefetch_queue_depth}, "
                f"batch_size={found.batch_size}, share {found.rank + 1} of {found.ranks}, "
                f"last_batch={loader.reading.last_batch!r}"
            )
        return "\n".join(lines) or "No loader has been made yet."

    def copy(self) -> "DaliLoaders":
        """For a copy of the data module, whose run is its own."""
        copied = DaliLoaders(self.choices)
        copied.run = self.run.copy()
        return copied

    @contextmanager
    def _made(self, owner: Any, split: str, *, seed: int) -> Iterator[Making]:
        """While a pipeline is being made, ``reader()`` can tell what it has to be told."""
        training = split == "train"
        self.making = Making(
            self.settings(owner, split),
            seed=mix_seed(seed, 0, 0, "reader") >> 32,  # the same on all ranks, and for all readers of a pipeline
            shuffle=training and not _overfits(owner.trainer),
            sticks=not training,
        )
        try:
            yield self.making
        finally:
            self.making = None


def _name(owner: Any, split: str) -> str:
    return f"{type(owner).__name__}.pipeline({split!r})"


def _overfits(trainer: Any) -> bool:
    return trainer is not None and trainer.overfit_batches > 0


def _epoch(trainer: Any) -> int:
    return 0 if trainer is None else _host.epochs_processed(trainer)
