"""Ray worker: makes batches, serializes them, and reports slow batches."""

import functools
import io
import os
import pickle
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_feed.errors import LoaderError
from lightning_feed.load.collate import relayed
from lightning_feed.load.kinds import AnyDataset, Batch, Index, Sample
from lightning_feed.load.order import mix_seed
from lightning_feed.load.random_state import begin_sample
from lightning_feed.load.slot_batches import is_plain
from lightning_feed.load.stage import COLLATING, at_index, collating, shortened, with_place
from lightning_feed.load.worker import disable_opencv_threads

CHECK_S = 1.0
"""Seconds between a busy worker's checks that its pass is still open."""
OPEN_S = 0.1
"""Seconds between two checks that a pass is still open. Checks are rare, because each one queries the head node."""


class RayTask(NamedTuple):
    """The arguments of a task."""

    keys: tuple[str, ...]
    """Keys of the plans that the training process uses, that of this loader first. Workers drop all other plans of
    that process."""
    report_s: float
    """Seconds between two reports of a busy worker."""
    grace_s: float
    """Seconds that a task may take after its pass was closed."""
    of_pass: int
    """Number of the pass over the loader."""
    seed: int
    number: int
    """Number of the batch in its epoch, from 0."""
    index: Index


@dataclass(frozen=True)
class BatchRecipe:
    """Dataset and collate function of a loader. Sent to the object store once."""

    dataset: AnyDataset
    collate: Callable[[Sample], Batch]
    batched: bool
    """True if an index is a batch of samples, not a single one."""

    def make(self, index: Index, begin: Callable[[int, str], None]) -> Sample:
        """Make a batch. Calls ``begin`` before each sample with the sample's position and a description (once, if all
        samples are loaded at once), and before collating with COLLATING and a description."""
        if not self.batched or getattr(self.dataset, "__getitems__", None):
            begin(0, at_index(index))
            samples = self.dataset.__getitems__(index) if self.batched else self.dataset[index]
        else:
            samples = [self._sample(position, sample_index, begin) for position, sample_index in enumerate(index)]
        begin(COLLATING, collating(index))
        return self.collate(samples)

    def _sample(self, position: int, index: Index, begin: Callable[[int, str], None]) -> Sample:
        begin(position, at_index(index))
        return self.dataset[index]

    def explain_pickling(self, error: Exception, index: Index, begin: Callable[[int, str], None]) -> LoaderError:
        """Return the error for a batch that cannot be pickled. Makes the samples again, calling ``begin`` for each, and
        stops at the faulty one."""
        sample_error = self._error_of_a_sample(index, begin) if self.batched else None
        if sample_error is None:
            begin(COLLATING, f"sending the batch of index {shortened(index)}")
        else:
            error = sample_error
        return LoaderError(
            f"A batch of a Ray worker cannot be pickled: {error}. Return tensors, arrays, numbers and text, but no "
            "locks, open files or generators."
        )

    def _error_of_a_sample(self, index: Index, begin: Callable[[int, str], None]) -> Exception | None:
        for position, sample_index in enumerate(index):
            try:
                _serialized(self._sample(position, sample_index, begin))
            except Exception as error:  # noqa: BLE001  # any error from the user's samples
                return error
        return None


class _Task(NamedTuple):
    """A task in progress."""

    job: RayTask
    began_s: float


class _Worker:
    """State of a worker process between tasks: plans in use, and the current batch."""

    def __init__(self) -> None:
        self.name = f"process {os.getpid()} of {socket.gethostname()}"
        self._plans: dict[str, BatchRecipe] = {}
        self._node = sys.modules["ray"].get_runtime_context().get_node_id()
        self._task: _Task | None = None
        """The current task."""
        self._open: tuple[str, int] | None = None
        self._open_until_s = 0.0
        self._doing = ""
        torch.set_num_threads(1)  # the tasks run in parallel already
        disable_opencv_threads()
        threading.Thread(target=self._watch, name="feed-watch", daemon=True).start()

    def make(self, plan: list[Any], job: RayTask) -> Any:
        """Return a serialized batch, the reports of its bad samples, and the id of this node. Returns the wrapped error
        if the batch could not be made, and None if the pass is closed."""
        if not self._is_open(job):
            return None
        self._doing = "loading the dataset"
        self._task = _Task(job, began_s=time.monotonic())
        try:
            return self._attempt(self._plan(job.keys, plan), job)
        finally:
            self._task = None

    def _is_open(self, job: RayTask) -> bool:
        now_s = time.monotonic()
        of_pass = (job.keys[0], job.of_pass)
        if of_pass != self._open or now_s >= self._open_until_s:
            self._open = of_pass
            if is_closed(*of_pass):
                self._open = None
            self._open_until_s = now_s + OPEN_S
        return self._open is not None

    def _plan(self, keys: tuple[str, ...], plan: list[Any]) -> BatchRecipe:
        if keys[0] not in self._plans:
            owner = keys[0].partition("/")[0]
            for old in [old for old in self._plans if old.startswith(owner) and old not in keys]:
                del self._plans[old]
            self._plans[keys[0]] = sys.modules["ray"].get(plan[0])
        return self._plans[keys[0]]

    def _attempt(self, plan: BatchRecipe, job: RayTask) -> Any:
        with relayed() as bad:
            try:
                begin = functools.partial(self._begin, job)
                batch = plan.make(job.index, begin)
                try:
                    return *_serialized(batch), bad, self._node
                except Exception as error:
                    raise plan.explain_pickling(error, job.index, begin) from error
            except BaseException as error:  # noqa: BLE001  # SystemExit, too: raised in the training process
                return with_place(error, f"in a Ray worker ({self.name}), {self._doing}")

    def _begin(self, job: RayTask, position: int, doing: str) -> None:
        self._doing = doing
        begin_sample(job.seed, job.number, position)
        # The default generators serve only the user's code. Seeded for each sample, they do not depend on the worker.
        seed = mix_seed(job.seed, job.number, position, "default generators")
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)

    def _watch(self) -> None:
        """Report slow batches. End this process if the pass of its batch was closed; Ray replaces the process."""
        reported_s = 0.0
        closed_s = 0.0
        while True:
            time.sleep(CHECK_S)
            task = self._task
            now_s = time.monotonic()
            if task is None or now_s - task.began_s < CHECK_S:
                continue
            job = task.job
            if now_s - max(reported_s, task.began_s) >= job.report_s:
                busy_s = now_s - task.began_s
                report(job.keys[0], self.name, f"{self.name} is {self._doing}, in this batch for {busy_s:.0f} s")
                reported_s = now_s
            if is_closed(job.keys[0], job.of_pass):
                if closed_s < task.began_s:
                    closed_s = now_s
                if now_s - closed_s >= job.grace_s:
                    os._exit(1)


_worker: _Worker | None = None


def make_batch(_after: None, plan: list[Any], job: bytes) -> tuple[None, Any]:
    """Ray task that makes a batch. Returns a completion marker and the result."""
    global _worker
    _worker = _worker or _Worker()
    return None, _worker.make(plan, pickle.loads(job))


def _serialized(batch: Batch) -> tuple[bytes, list[Any]]:
    """Serialize a batch to a pickle and its buffers. Plain Ray would copy each tensor several times."""
    buffers: list[Any] = []
    stream = io.BytesIO()
    _pickler()(stream, protocol=5, buffer_callback=buffers.append).dump(batch)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]


@functools.cache
def _pickler() -> Any:
    cloudpickle: Any = sys.modules["ray"].cloudpickle  # always loaded in a worker

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) is torch.Tensor:
                reduced = _reduced(thing)
                if reduced is not None:
                    return reduced
            return super().reducer_override(thing)

    return Pickler


def _reduced(tensor: torch.Tensor) -> Any:
    """Reduce a plain CPU tensor to its memory and layout. Returns None for other tensors, which torch has to pickle."""
    if not is_plain(tensor):
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])  # keeps channels_last
    dense = tensor.permute(order).contiguous()
    memory = dense.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (memory, tensor.dtype, tuple(dense.shape), [order.index(dim) for dim in range(tensor.ndim)])


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape).permute(order)


# --- messages between workers and training processes -----------------------------------------------------------------

# Messages are a few bytes in the key-value store of the head node. Any process of the cluster can write or read them in
# less than a millisecond. ray.cancel() is not used: if the task ends at the same moment, the call ends the calling
# process (seen in Ray 2.60).
_NAMESPACE = {"namespace": "lightning_feed"}


def _store() -> Any:
    from ray.experimental import internal_kv

    return internal_kv


def report(key: str, name: str, text: str) -> None:
    """Report the current work of a worker."""
    _store()._internal_kv_put(f"at/{key}/{name}", text, **_NAMESPACE)


def take_reports(key: str) -> list[str]:
    """Return the workers' reports since the last call."""
    store = _store()
    prefix = f"at/{key}/"
    keys = store._internal_kv_list(prefix, **_NAMESPACE)
    texts = [store._internal_kv_get(report_key, **_NAMESPACE) for report_key in keys]
    store._internal_kv_del(prefix, del_by_prefix=True, **_NAMESPACE)
    return sorted(text.decode() for text in texts if text is not None)


def close_passes(key: str, last: int) -> None:
    """Mark a loader's passes up to number ``last`` as closed."""
    _store()._internal_kv_put(f"closed/{key}", str(last), **_NAMESPACE)


def is_closed(key: str, of_pass: int) -> bool:
    """Check if a pass was closed."""
    last = _store()._internal_kv_get(f"closed/{key}", **_NAMESPACE)
    return last is not None and int(last) >= of_pass
