"""One DALI pipeline with readers of its own: defined by the user's function, built, run ahead, and freed."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_feed.errors import DatasetError, FeedError
from lightning_feed.load.dali.forks import is_inherited, outlive_forks
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.dali.outputs import take_outputs
from lightning_feed.load.dali.reader_structure import take_apart

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""What DALI raises for an operator that failed, by the kind of failure (read in 2.4.0)."""
_SHOWN = 1500
"""Characters of DALI's message that go into ours: all that is before its C++ stack trace, in what was seen."""


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What every pipeline of a data module is built with."""

    batch_size: int
    num_threads: int
    prefetch_queue_depth: int
    """Batches that DALI makes ahead."""
    rank: int
    """Whose share the readers read."""
    ranks: int
    device: torch.device | None
    """The CUDA device it works on; None: the CPU alone."""


class ReaderPipeline:
    """A pipeline that was built, and starts to run with its first batch.

    Args:
        define: makes the graph, and returns its outputs in the form that batches are to have. Called once, with the
            pipeline as DALI's current one.
        settings: what to build it with.
        name: of the pipeline function and the split, for errors.
        seed: what its random operators are seeded from.
        resumable: whether DALI keeps track of the state of its operators.
        checkpoint: what ``checkpoint()`` gave, to go on from there.

    Raises:
        DatasetError: for outputs that are none of DALI's, a pipeline without a reader, readers of sets that differ in
            size, and whatever DALI refuses, as a reader without files.
    """

    def __init__(
        self,
        define: Callable[[], Any],
        settings: PipelineSettings,
        *,
        name: str,
        seed: int,
        resumable: bool = False,
        checkpoint: bytes | None = None,
    ) -> None:
        self.name = name
        self._device = settings.device
        self._pipeline = new_pipeline(settings, seed=seed, enable_checkpointing=resumable, checkpoint=checkpoint)
        nodes, self.put_together = define_outputs(define, self._pipeline, name)
        if settings.device is not None:
            nodes = [node.gpu() if node.device == "cpu" else node for node in nodes]
        self._pipeline.set_outputs(*nodes)
        try:
            self._pipeline.build()
        except _FAILURES as error:
            self.close()
            raise DatasetError(f"DALI cannot build what {name} makes. {_said(error)}{_advice(error)}") from error
        self.reader = _the_reader(self._pipeline.reader_meta(), settings, name)
        self.failed = False
        """Whether a batch could not be made, after which there are no more."""
        self._queue, self._ahead = settings.prefetch_queue_depth, 0

    def take(self, *, to_follow: int | None) -> list[Tensor]:
        """The outputs of the next batch, for ``put_together``.

        Args:
            to_follow: batches that will be taken after it; None: no end is known. No more than these are made ahead.

        Raises:
            DatasetError: when DALI cannot make it. The pipeline cannot be used after that.
        """
        try:
            if not self._ahead:
                self._pipeline.schedule_run()  # the first one fills the queue
                self._ahead = self._queue
            outputs = take_outputs(self._pipeline, self._device)
            self._ahead -= 1
            if to_follow is None or self._ahead < to_follow:
                self._pipeline.schedule_run()
                self._ahead += 1
            return outputs
        except FeedError:
            self.failed = True
            raise
        except StopIteration as error:
            self.failed = True
            raise DatasetError(
                f"A source in {self.name} ended before the reader's epoch did. The reader gives an epoch its length: "
                "let every other source go on for as long."
            ) from error
        except _FAILURES as error:
            self.failed = True
            traceback.clear_frames(error.__traceback__)  # they hold the pipeline, for as long as the error is held
            raise DatasetError(
                f"DALI could not make a batch of {self.name}. {_said(error)}\nDALI cannot leave a sample out: remove "
                "or repair what it names, and resume from the last checkpoint (with resumable=False where a sample was "
                "removed). ImageFolderDataModule(backend='dali-cpu', on_error='skip') leaves out what cannot be "
                "decoded, and names it."
            ) from error

    @property
    def usable(self) -> bool:
        """Whether it can give a batch: it did not fail, and was made in this process."""
        return not self.failed and not is_inherited(self._pipeline)

    def checkpoint(self) -> Tensor:
        """The state after the batch that was taken last, whatever was made ahead of it: uint8, of one dimension.

        A tensor, since checkpoints of plain tensors are loaded with ``weights_only=True``.
        """
        return torch.frombuffer(bytearray(self._pipeline.checkpoint()), dtype=torch.uint8)

    def close(self) -> None:
        """Free the pipeline and its memory. Batches that were handed out stay valid: they own theirs."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        on_gpu = self._device is not None
        del pipeline  # ends its threads
        if on_gpu:
            # DALI's memory pool would keep what the pipeline had, out of torch's reach.
            require_dali(gpu=True).backend.ReleaseUnusedMemory()


def new_pipeline(settings: PipelineSettings, **options: Any) -> Any:
    """A DALI pipeline without a graph."""
    dali = require_dali(gpu=settings.device is not None, why="DaliDataModule")
    pipeline = dali.Pipeline(
        batch_size=settings.batch_size,
        num_threads=settings.num_threads,
        device_id=None if settings.device is None else settings.device.index or 0,
        prefetch_queue_depth=settings.prefetch_queue_depth,
        **options,
    )
    outlive_forks(pipeline)
    return pipeline


def define_outputs(define: Callable[[], Any], pipeline: Any, name: str) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The outputs of a pipeline function as nodes of DALI's graph, and what puts a batch into their form.

    Raises:
        DatasetError: for outputs that are none of DALI's.
    """
    node_type = require_dali(gpu=False).data_node.DataNode
    with pipeline:
        nodes, put_together = take_apart(define())
    for node in nodes:
        if not isinstance(node, node_type):
            raise DatasetError(
                f"{name} returned a {type(node).__name__} ({node!r:.80}) among its outputs, which is none of DALI's. "
                "Return what nvidia.dali.fn gives, alone or in a tuple, list or dict: return images, labels."
            )
    if not nodes:
        raise DatasetError(f"{name} returned no output. Return what nvidia.dali.fn gives: return images, labels.")
    return nodes, put_together


def _the_reader(readers: Mapping[str, Mapping[str, int]], settings: PipelineSettings, name: str) -> Mapping[str, int]:
    """What is known of the reader that gives the epoch its length. Several go through their sets in step."""
    if not readers:
        raise DatasetError(
            f"{name} has no reader of DALI's, so nothing says how long an epoch is. Begin it with one, as in "
            "fn.readers.file(file_root=..., **self.reader()). For samples that Python makes, use FastDataModule."
        )
    wanted = {"number_of_shards": settings.ranks, "shard_id": settings.rank, "pad_last_batch": 1}
    for reader, known in readers.items():
        wrong = [f"{key}={known[key]}" for key, value in wanted.items() if known[key] != value]
        if wrong:
            raise DatasetError(
                f"The reader {reader!r} in {name} was not told its share of the set, or something else than "
                f"self.reader() says ({', '.join(wrong)}). Give it all of that: fn.readers.file(file_root=..., "
                "**self.reader())."
            )
    first, *others = readers
    for other in others:
        if readers[other] != readers[first]:
            raise DatasetError(
                f"{name} has readers that do not go in step: {first!r} has {readers[first]['epoch_size']} samples and "
                f"{other!r} has {readers[other]['epoch_size']}. Give both **self.reader(), and sets of one size."
            )
    return readers[first]


def _said(error: Exception) -> str:
    """DALI's message without its C++ stack trace."""
    text = str(error).partition("\nStacktrace")[0].strip()
    return f"DALI said: {text[:_SHOWN]}"


def _advice(error: Exception) -> str:
    if "checkpointing" in str(error).lower():
        return "\nFor operators without a state that can be saved, give DaliDataModule(resumable=False)."
    return ""
