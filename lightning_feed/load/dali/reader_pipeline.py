"""One DALI pipeline with readers of its own: defined by the user's function, built, run ahead, and freed."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_feed.errors import DatasetError, FeedError
from lightning_feed.load.dali.forks import is_inherited, outlive_forks
from lightning_feed.load.dali.install import require_dali
from lightning_feed.load.dali.outputs import take_outputs
from lightning_feed.load.dali.reader_culprits import FAILURES, undecodable
from lightning_feed.load.dali.reader_graph import read_images
from lightning_feed.load.dali.reader_labels import not_built, refuse_changed_labels, said_by_dali
from lightning_feed.load.dali.reader_structure import take_apart

_SOURCE = "Checkpointing enabled in a pipeline with external source operator"
_SOURCES = {
    "GENERATOR_FUNC": "a generator function",
    "ITERABLE": "a generator, an iterator or a list",
    "parameterless": "a callable without an argument",
}
"""What DALI's warning calls a source that it keeps no state of, and what it is."""


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
            size, a set of fewer samples than ranks, labels that DALI would change, a source of which a resumable
            pipeline would lose its place, and whatever DALI refuses, as a reader without files.
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
        refuse_changed_labels(nodes, name)
        if settings.device is not None:
            nodes = [node.gpu() if node.device == "cpu" else node for node in nodes]
        self._pipeline.set_outputs(*nodes)
        try:
            with _sources_keep_their_place(name):
                self._pipeline.build()
        except DatasetError:  # ours, which is a RuntimeError too
            self.close()
            raise
        except FAILURES as error:
            self.close()
            raise DatasetError(not_built(error, name, settings.ranks, on_cpu=settings.device is None)) from error
        readers = self._pipeline.reader_meta()
        self.reader = _the_reader(readers, settings, name)
        self._images = read_images(nodes, readers)
        self.before = 0
        """Batches that its readers gave before its first one: up to the checkpoint that it goes on from."""
        self.failed = False
        """Whether a batch could not be made, after which there are no more."""
        self._queue, self._ahead, self._taken = settings.prefetch_queue_depth, 0, 0

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
            self._taken += 1
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
        except FAILURES as error:
            self.failed = True
            traceback.clear_frames(error.__traceback__)  # they hold the pipeline, for as long as the error is held
            raise DatasetError(
                f"DALI could not make a batch of {self.name}. {said_by_dali(error)}\n{self._culprits(error)}"
                "DALI cannot leave a sample out: remove or repair what is named, and resume from the last checkpoint "
                "(with resumable=False where a sample was removed). ImageFolderDataModule(backend='dali-cpu', "
                "on_error='skip') leaves out what cannot be decoded, and names it."
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

    def _culprits(self, error: Exception) -> str:
        found = undecodable(self._images, self._pipeline, error, before=self.before + self._taken)
        return f"It cannot decode {' nor '.join(found)}.\n" if found else ""

    def close(self) -> None:
        """Free the pipeline and its memory. Batches that were handed out stay valid: they own theirs."""
        pipeline, self._pipeline = self._pipeline, None
        self._images = []
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
    dali = require_dali(gpu=False)
    node_type = dali.data_node.DataNode
    with pipeline:
        nodes, put_together = take_apart(define())
    for node in nodes:
        if isinstance(node, dali.Pipeline):
            raise DatasetError(
                f"{name} returned a Pipeline. It is called with a pipeline as DALI's current one: leave @pipeline_def "
                "and Pipeline(...) out, and return what nvidia.dali.fn gives: return images, labels."
            )
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


@contextmanager
def _sources_keep_their_place(name: str) -> Iterator[None]:
    """While a pipeline is built: what DALI only warns of, where it is to keep track of its state, is an error.

    Raises:
        DatasetError: ``external_source`` has a source that would begin anew with a resumed run, though its reader
            goes on: data of one sample with those of another.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=_SOURCE)
            yield
    except UserWarning as warning:
        if not str(warning).startswith(_SOURCE):
            raise
        kind = next((kind for called, kind in _SOURCES.items() if called in str(warning)), "one without a state")
        raise DatasetError(
            f"The source of fn.external_source in {name} is {kind}. A resumed run would begin it again, while the "
            "reader goes on, and its data would go with the wrong samples. Give a callable of one argument that makes "
            "its data from it, and resumes exactly: of nvidia.dali.types.SampleInfo with batch=False, or of the number "
            "of the batch with batch=True. Or give DaliDataModule(resumable=False): a resumed run then trains the rest "
            "of its epoch from a new order."
        ) from warning
