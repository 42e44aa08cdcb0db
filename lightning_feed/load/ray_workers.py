"""Ray workers: a stage that makes batches of a map-style dataset as Ray tasks, on any node of a cluster.

Each batch is one task. It depends only on its number, its indices and the seed of the pass, not on the worker. Ray does
the rest: it places tasks on free CPUs, reuses worker processes, and repeats a batch whose process or node died. Actors
would each hold a CPU for their whole life, and a batch assigned to a busy actor would wait.

Each task starts after the end of the task requested ``num_workers`` before it. So no more than ``num_workers`` CPUs are
used, and an autoscaling cluster adds no machines beyond that. These dependencies cost 1 ms of CPU per batch, because
Ray requests a CPU for each such task; it would send independent tasks to a worker without such requests.
"""

import contextlib
import functools
import logging
import os
import pickle
import socket
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from lightning_feed.errors import LoaderError
from lightning_feed.extras import require
from lightning_feed.load.collate import count_relayed
from lightning_feed.load.kinds import Batch, Index
from lightning_feed.load.order import ranks_of_run
from lightning_feed.load.ray_batches import BatchRecipe, RayTask, close_passes, make_batch, take_reports
from lightning_feed.load.settings import RayCluster
from lightning_feed.load.stage import CLOSED, PATIENCE_S, OwnPass, shortened, traced

logger = logging.getLogger(__name__)

STORE_SHARE = 0.5
"""Share of the cluster's smallest object store for batches of all training processes on one node."""
TRIES = 5
"""Number of worker processes that may die while making the same batch. After that, the batch is taken for the cause,
and an error is raised."""
WAIT_FOR_WORKER_S = 300.0
"""Longest wait while no worker makes a batch of a pass. A cluster may have to start machines first."""
REPORT_S = 10.0
"""Seconds between two reports of a busy worker."""
GRACE_S = 5.0
"""Seconds that a batch of a closed pass may take before its worker process is ended. Torch, too, ends workers that do
not exit in time."""
_HEAD_CHECK_S = 5.0
_HEAD_PATIENCE_S = 20.0
"""Seconds between two checks of the head node, and the longest time without an answer. After 60 s without contact Ray
ends a process, without an exception."""
_CHECK_S = 0.2
"""Seconds between a waiting consumer's checks that its pass is open and has active workers."""


# --- the cluster ----------------------------------------------------------------------------------------------------

_connected: dict[str, int] = {}
"""Process id by cluster address: the connections made by this module."""


def _ray() -> Any:
    return require("ray", extra="ray", why="LoaderSettings(workers='ray')")


def connect(address: str | None, num_workers: int) -> Any:
    """Connect this process to a Ray cluster, unless it is connected already. Returns the module ``ray``."""
    ray = _ray()
    if not ray.is_initialized():
        own: dict[str, Any] = {}
        if not address:
            own = {"num_cpus": num_workers, "include_dashboard": False}
        if address and "://" in address:
            raise LoaderError(
                f"RAY_ADDRESS={address} is an address of Ray Client, which is not supported. Run the training on a "
                "node of the cluster, with RAY_ADDRESS=auto."
            )
        try:
            if address not in (None, "auto", "local"):
                _knock(address)  # Ray itself would try for ever
            ray.init(address=address or "local", logging_level=logging.WARNING, **own)
        except Exception as error:  # Ray raises a bare Exception if its own processes are late
            raise LoaderError(
                f"The Ray cluster at RAY_ADDRESS={address} cannot be used: {error} Run `ray start --head` before "
                "training, with the Ray and Python versions of this process, and train on a node of the cluster with "
                "RAY_ADDRESS=auto. Without this variable, Ray starts on this machine; that fails if it is too busy, or "
                "short of memory or disk space. The log files are in /tmp/ray/session_latest/logs."
            ) from error
        _connected[ray.get_runtime_context().gcs_address] = os.getpid()
    used = ray.get_runtime_context().gcs_address
    if _connected.get(used, os.getpid()) != os.getpid():
        raise LoaderError(
            "This process was forked from one that uses Ray, and Ray does not work after a fork. Start loading only "
            "after the fork, or start the ranks in new processes (strategy='ddp')."
        )
    return ray


def _knock(address: str) -> None:
    """Check that the head node answers. Raises OSError if it does not, ValueError if the address is invalid."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()


@functools.cache  # warn once
def _warn_of_few(cpus: float, workers: int) -> None:
    if cpus < workers:
        logger.warning(
            "The Ray cluster has %g CPUs for num_workers=%d: it makes at most one batch on each CPU at the same time.",
            cpus,
            workers,
        )


@functools.cache  # the task is sent to the cluster once
def _task(tries: int) -> Any:
    # If training itself runs in an actor (ray.train), SPREAD keeps our tasks out of the actor's placement group.
    options = {"num_returns": 2, "num_cpus": 1, "max_retries": tries - 1, "scheduling_strategy": "SPREAD"}
    return _ray().remote(**options)(make_batch)


_owner = uuid.uuid4().hex
_in_use: "weakref.WeakValueDictionary[str, RemotePlan]" = weakref.WeakValueDictionary()
"""Plans of this process that workers must keep, by key."""


class RemotePlan:
    """One loader's dataset and collate function in Ray's object store.

    Each worker reads them once, and drops them when this object is gone. A loader with persistent workers therefore
    keeps this object between passes.
    """

    def __init__(self, loader: DataLoader[Batch], cluster: RayCluster) -> None:
        ray = connect(cluster.address, loader.num_workers)
        self.ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.store_bytes = int(min(node.get("object_store_memory", 0) for node in nodes))
        _warn_of_few(sum(node.get("CPU", 0) for node in nodes), loader.num_workers)
        self.address: str = ray.get_runtime_context().gcs_address
        self.node: str = ray.get_runtime_context().get_node_id()
        plan = BatchRecipe(loader.dataset, loader.collate_fn, loader.batch_sampler is not None)
        self._plan = [self._put(plan)]  # in a list, so that Ray gives the task a reference, not the object
        self.key = f"{_owner}/{uuid.uuid4().hex}"
        self.passes = count()
        _in_use[self.key] = self

    def make(self, after: Any, *job: Any) -> Any:
        """Request a batch, to be started when task ``after`` has ended. Returns references to its completion marker and
        to its result."""
        keys = (self.key, *(key for key in _in_use if key != self.key))
        # One argument instead of seven: Ray would serialise each separately.
        packed = self.ray.cloudpickle.dumps(RayTask(keys, REPORT_S, GRACE_S, *job))
        return _task(TRIES).remote(after, self._plan, packed)

    def close_passes(self, last: int) -> None:
        """Tell workers that the passes up to number ``last`` are closed."""
        if self.ray.is_initialized() and self.ray.get_runtime_context().gcs_address == self.address:
            close_passes(self.key, last)

    def cpus(self) -> str:
        """Describe the cluster's CPUs."""
        cpus = self.ray.cluster_resources().get("CPU", 0)
        free = self.ray.available_resources().get("CPU", 0)
        return f"The Ray cluster has {cpus:g} CPUs, {free:g} of them free"

    def _put(self, plan: BatchRecipe) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.put(plan)
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise LoaderError(
                f"The dataset {type(plan.dataset).__name__} fits neither into Ray's object store nor on its disk: "
                f"{error} Keep samples in files and only their names in the dataset, or start Ray with a larger "
                "object_store_memory."
            ) from error
        except Exception as error:
            name = "dataset"
            try:
                self.ray.cloudpickle.dumps(plan.collate)
            except Exception:  # noqa: BLE001  # any error from the user's objects
                name = "collate_fn"
            thing = plan.dataset if name == "dataset" else plan.collate
            raise LoaderError(
                f"Cannot pickle the {name} ({shortened(thing)}) for the Ray workers: {error.__cause__ or error}. Open "
                "files and connections in the first __getitem__, hold no locks, or use workers='process' with "
                "start_method='fork', which does not pickle."
            ) from error


# --- a pass ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PendingBatch:
    """A batch requested from Ray."""

    number: int
    """Number of the batch in its epoch, from 0."""
    index: Index
    ended: Any
    """Reference to the completion marker of its task."""
    result: Any
    """Reference to the result of its task."""

    def words(self) -> str:
        """Return number and indices for error messages."""
        return f"batch {self.number}, at {shortened(self.index)}"


class RayPass(OwnPass):
    """Yields the same batches as a DataLoader, made by Ray tasks instead of processes.

    Makes fewer than ``capacity`` batches ahead if ``capacity`` batches would take more of the object store than
    :data:`STORE_SHARE`.
    """

    def __init__(self, loader: DataLoader[Batch], indices: Iterator[Index], *, plan: RemotePlan, **begun: int) -> None:
        super().__init__(loader, indices, **begun)
        self._plan = plan
        self._ray = plan.ray
        self._ends: deque[Any] = deque([None] * loader.num_workers, maxlen=loader.num_workers)
        """References to the completion markers of the newest tasks."""
        # A node has at most one rank per device, and these ranks share the node's object store.
        self._sharers = min(ranks_of_run(), torch.accelerator.device_count() or ranks_of_run())
        self._asked: deque[PendingBatch] = deque()
        self._largest = 0
        self._far = False
        self._closed = False
        now_s = time.monotonic()
        self._head_seen_s = now_s
        self._head_checked_s = now_s
        self._worked_s = now_s
        self._of_pass = next(plan.passes)
        self._ending = weakref.finalize(self, plan.close_passes, self._of_pass)
        self._ending.atexit = False
        self._ask()

    def __next__(self) -> Batch:
        if not self._closed and not self._asked:
            self._ended = self._closed = True
            self._ending.detach()
        if self._ended:
            raise StopIteration
        with traced("thread_wait"):
            pending, result = self._wait()
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, ExceptionWrapper):
            result.reraise()
        data, buffers, bad_samples, node = result
        self._far = self._far or node != self._plan.node
        self._largest = max(self._largest, sum(buffer.nbytes for buffer in buffers))
        self._ask()
        count_relayed(bad_samples)
        batch = _unpickled(data, buffers, pending)
        return batch if self._pin is None else self._pin(batch)

    @property
    def ready(self) -> int:
        """See :attr:`OwnPass.ready`."""
        return self._query()

    def _query(self) -> int:
        """Count the complete batches. The query also starts the transfer of batches from other nodes."""
        results = [pending.result for pending in list(self._asked)]
        if not results:
            return 0
        complete, _ = self._ray.wait(results, num_returns=len(results), timeout=0)
        return len(complete)

    def where(self) -> str:
        """See :meth:`Maker.where`."""
        lines = [f"{report}. `ray stack` on that machine shows where." for report in take_reports(self._plan.key)]
        if not lines:
            lines = [f"No worker reports a batch longer than {REPORT_S:g} s."]
        return "\n".join([f"{self._plan.cpus()}.", *lines])

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """See :meth:`OwnPass.close`. Returns at once."""
        self._closed = True
        self._ending()
        self._asked.clear()

    def _ask(self) -> None:
        """Request batches up to the limit of batches ahead."""
        room = STORE_SHARE * self._plan.store_bytes / max(1, self._largest * self._sharers)
        ahead = min(self.capacity, max(1, int(room)))
        for index in islice(self._indices, max(0, ahead - len(self._asked))):
            ended, result = self._plan.make(self._ends[0], self._of_pass, self._seed, self._number, index)
            self._ends.append(ended)
            self._asked.append(PendingBatch(self._number, index, ended, result))
            self._number += 1

    def _wait(self) -> tuple[PendingBatch, Any]:
        """Wait for the next batch. Returns the batch and its result."""
        began_s = time.monotonic()
        self._worked_s = began_s
        while True:
            self._check(began_s)
            pending = self._next()
            if pending is None:
                continue
            try:
                result = self._ray.get(pending.result, timeout=_CHECK_S)
            except self._ray.exceptions.GetTimeoutError:
                continue
            except self._ray.exceptions.RayError as error:
                result = self._explained(pending, error)
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._asked.remove(pending)
            return pending, result

    def _next(self) -> PendingBatch | None:
        """Return the batch to wait for. Returns None if batches may come in any order and none is complete, or if none
        is requested."""
        if self._far:
            self._query()
        asked = list(self._asked)
        if not asked:
            return None
        if self._in_order:
            return asked[0]
        complete, _ = self._ray.wait([pending.result for pending in asked], num_returns=1, timeout=_CHECK_S)
        return next((pending for pending in asked if pending.result in complete), None)

    def _explained(self, pending: PendingBatch, error: Exception) -> LoaderError:
        if type(error) is self._ray.exceptions.WorkerCrashedError:
            explained = LoaderError(
                f"{TRIES} Ray workers in a row died while making {pending.words()}: {error} The dataset's code "
                "crashes, or memory runs out: see `ray logs`."
            )
        else:
            explained = LoaderError(
                f"The Ray workers could not make {pending.words()}: {getattr(error, 'cause', error)} All nodes need "
                "this package and the dataset's imports, in the versions of the training process. The object store "
                f"needs room for {self.capacity} batches: if it is too small, lower num_workers, prefetch_factor or "
                "batch_size, or start Ray with a larger object_store_memory."
            )
        explained.__cause__ = error
        return explained

    def _check(self, began_s: float) -> None:
        """Raise an error if waiting longer is useless."""
        if self._closed:
            raise LoaderError(CLOSED)
        now_s = time.monotonic()
        self._check_head(now_s)
        if self._timeout_s and now_s - began_s >= self._timeout_s:
            raise LoaderError(
                f"No batch came within timeout={self._timeout_s:g} s. {self.where()} Set a timeout in the "
                "call that hangs, or allow more time with LoaderSettings(timeout_s=...)."
            )
        if now_s - self._worked_s >= WAIT_FOR_WORKER_S:
            self._check_workers(now_s, began_s)

    def _check_workers(self, now_s: float, began_s: float) -> None:
        if take_reports(self._plan.key):  # a worker that is still busy reports again soon
            self._worked_s = now_s - WAIT_FOR_WORKER_S + 6 * REPORT_S
            return
        raise LoaderError(
            f"No Ray worker has started any of {len(self._asked)} batches in {now_s - began_s:.0f} s. "
            f"{self._plan.cpus()}. Other jobs may hold the CPUs, or workers may fail to start: see `ray status` and "
            "`ray logs`. Add machines, or stop the other jobs."
        )

    def _check_head(self, now_s: float) -> None:
        if now_s - self._head_checked_s < _HEAD_CHECK_S:
            return
        self._head_checked_s = now_s
        address = self._plan.address
        try:
            _knock(address)
            self._head_seen_s = now_s
        except OSError as error:
            if now_s - self._head_seen_s < _HEAD_PATIENCE_S:
                return
            self._ending.detach()  # closing the pass would wait for the head node, too
            if address in _connected:
                self._ray.shutdown()  # else Ray ends this process soon, before a checkpoint is written
            raise LoaderError(
                f"The head node of the Ray cluster ({address}) has not answered for {now_s - self._head_seen_s:.0f} s: "
                f"{error}. Ray ends processes that cannot reach it. Start the cluster again, and resume from the last "
                "checkpoint."
            ) from error


def _unpickled(data: bytes, buffers: list[Any], pending: PendingBatch) -> Batch:
    try:
        # Copied out of the object store, in which it would be read-only and take up space.
        return pickle.loads(data, buffers=[buffer.copy() for buffer in buffers])
    except Exception as error:
        raise LoaderError(
            f"A Ray worker sent {pending.words()}, which the training process cannot unpickle: "
            f"{type(error).__name__}: {error}. Return tensors, arrays, numbers and text from the dataset."
        ) from error
