"""Ray workers: one pass over a map-style dataset, with actors on any node of a Ray cluster in place of processes.

Each batch is one task of one actor, a pure function of its number, its indices and the seed of the pass: who makes it,
and how often it was begun, cannot be seen in it. Ray replaces actors that die (``max_restarts``). Its retries of tasks
are not used: a task waits there for the actor's replacement, for ever where the cluster has no room for one, while
other actors are idle. So a batch whose actor died goes to the next actor that is free.

All loaders of a process that have as many workers share their actors. Training and validation would otherwise take
each other's CPUs: an actor keeps what it has reserved for as long as it lives.
"""

import io
import logging
import os
import pickle
import random
import socket
import sys
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from lightning_feed.errors import LoaderError
from lightning_feed.extras import require
from lightning_feed.load.collate import count_relayed, relayed
from lightning_feed.load.order import mix_seed, rank_of_run, ranks_of_run
from lightning_feed.load.random_state import begin_sample
from lightning_feed.load.settings import RayCluster
from lightning_feed.load.threads import OwnPass, pin_function, shortened
from lightning_feed.load.trace import traced
from lightning_feed.load.worker import disable_opencv_threads

logger = logging.getLogger(__name__)

STORE_SHARE = 0.5
"""Of the smallest object store of the cluster, what the batches of the training processes of one node may take."""
TRIES = 5
"""Actors that may die with one batch before it is an error: the batch is what kills them."""
_HEAD_CHECK_S, _HEAD_PATIENCE_S = 5.0, 20.0
"""How often to look for the head node, and how long it may be away. Ray itself ends a process, without an exception,
that has not reached it for 60 s."""
_LOOK_S = 0.2
"""How often a waiting consumer looks whether its pass was closed."""
_END = object()


# --- in an actor ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """How the batches of a loader are made. Sent to the object store once."""

    dataset: Any
    collate: Callable[[Any], Any]
    batched: bool
    """Whether an index stands for a batch of samples, rather than for one sample that is no batch."""

    def make(self, index: Any, begin: Callable[[int, str], None]) -> Any:
        """The batch; ``begin`` is told the place in it of each sample, -1 for collating, and what it is in words."""
        if not self.batched or getattr(self.dataset, "__getitems__", None):
            begin(0, f"at index {shortened(index)} of the dataset")
            samples = self.dataset.__getitems__(index) if self.batched else self.dataset[index]
        else:
            samples = []
            for place, one in enumerate(index):
                begin(place, f"at index {shortened(one)} of the dataset")
                samples.append(self.dataset[one])
        begin(-1, f"putting together the samples of index {shortened(index)}")
        return self.collate(samples)


class BatchMaker:
    """An actor. It keeps the plans of the loaders that it serves, until it is told to forget them."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._plans: dict[str, _Plan] = {}
        torch.set_num_threads(1)  # actors are the parallelism

    def make(self, key: str, plan: list[Any], seed: int, number: int, index: Any) -> Any:
        """A batch, taken apart for the object store, with its bad samples; or what went wrong, as torch tells it."""
        if key not in self._plans:
            self._plans[key] = sys.modules["ray"].get(plan[0])
            disable_opencv_threads()
        doing = ""

        def begin(place: int, what: str) -> None:
            nonlocal doing
            doing = what
            begin_sample(seed, number, place)
            # The default generators serve nobody else here: draws of the user's own are independent of the actors, too.
            own = mix_seed(seed, number, place, "default generators")
            torch.default_generator.manual_seed(own)
            random.seed(own)
            np.random.seed(own % 2**32)

        with relayed() as bad:
            try:
                return *_take_apart(self._plans[key].make(index, begin)), bad
            except BaseException as error:  # noqa: BLE001  # SystemExit, too: raised in the training process
                where = f"in Ray worker {self._number}, {doing}"
                if isinstance(error, StopIteration):  # raised as it is, it would look like the end of the epoch
                    error = LoaderError(f"StopIteration was raised {where}. The dataset must not raise it.")
                return ExceptionWrapper((type(error), error, error.__traceback__), where=where)  # type: ignore[no-untyped-call]

    def forget(self, key: str) -> None:
        """Let go of a loader's dataset."""
        self._plans.pop(key, None)


def _take_apart(batch: Any) -> tuple[bytes, list[Any]]:
    """A batch as a pickle and its buffers. Ray alone would copy each tensor several times."""
    cloudpickle: Any = sys.modules["ray"].cloudpickle  # in an actor it is there

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, thing: Any) -> Any:
            found = _reduced(thing) if type(thing) is torch.Tensor else None
            return super().reducer_override(thing) if found is None else found

    buffers: list[Any] = []
    stream = io.BytesIO()
    Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(batch)
    return stream.getvalue(), [np.frombuffer(buffer.raw(), dtype=np.uint8) for buffer in buffers]


def _reduced(tensor: torch.Tensor) -> Any:
    """A plain tensor of the CPU as its memory and how to see it; None for one that torch has to pickle."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided and not tensor.requires_grad
    if not plain or not tensor.numel() or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])  # channels_last stays what it is
    dense = tensor.permute(order).contiguous()
    memory = dense.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (memory, tensor.dtype, tuple(dense.shape), [order.index(dim) for dim in range(tensor.ndim)])


def _tensor(memory: Any, dtype: torch.dtype, shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    return torch.from_numpy(memory).view(dtype).view(shape).permute(order)


# --- the cluster, and actors on it ----------------------------------------------------------------------------------

_connected: dict[str, int] = {}
"""Clusters that this module connected to, and the process that it did so in."""


def connect(address: str | None, num_workers: int) -> Any:
    """Ray, connected to the cluster that was asked for."""
    ray = require("ray", extra="ray", why="LoaderSettings(workers='ray')")
    if not ray.is_initialized():
        own = {} if address else {"num_cpus": num_workers, "include_dashboard": False}
        try:
            if address not in (None, "auto", "local"):
                _knock(address)  # where nobody answers, Ray tries for ever
            ray.init(address=address or "local", logging_level=logging.WARNING, **own)
        except (RuntimeError, ConnectionError, ValueError, OSError) as error:
            raise LoaderError(
                f"The Ray cluster at ray_address={address!r} cannot be used: {error} Start it with `ray start --head`, "
                "under the Ray and Python of this process, and train on a node of it with ray_address='auto'. Without "
                "ray_address, Ray starts on this machine."
            ) from error
        _connected[ray.get_runtime_context().gcs_address] = os.getpid()
    used = ray.get_runtime_context().gcs_address
    if _connected.get(used, os.getpid()) != os.getpid():
        raise LoaderError(
            "This process was forked from one that uses Ray, which Ray does not survive. Begin to load after the fork "
            "only, or start the ranks anew (strategy='ddp')."
        )
    if address not in (None, "auto", used):
        raise LoaderError(
            f"This process uses the Ray cluster at {used} already, and ray_address={address!r} is another one. A "
            f"process can use one cluster: give ray_address={used!r}, or 'auto', or call ray.shutdown() before."
        )
    return ray


def _knock(address: str) -> None:
    """Raise an OSError, or a ValueError for what is no address, where no head node answers."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()


class Actors:
    """As many actors as there are workers. They end with this object, or with the process."""

    def __init__(self, ray: Any, count: int, *, cpus: int) -> None:
        self.ray = ray
        # SPREAD also keeps them out of the placement group of a training that is an actor itself, as under ray.train.
        options = {"num_cpus": cpus, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
        maker = ray.remote(**options)(BatchMaker)
        self.handles = [maker.remote(number) for number in range(count)]
        self.ready: set[int] = set()
        self.starting: dict[Any, int] = {}
        for number in range(count):
            self.await_start(number)
        weakref.finalize(self, _on_all, ray, ray.get_runtime_context().gcs_address, self.handles, ray.kill)

    def await_start(self, number: int) -> None:
        """Give an actor no work until it says that it is there (again)."""
        self.ready.discard(number)
        if number not in self.starting.values():
            ping = self.handles[number].__ray_ready__.options(max_task_retries=-1).remote()
            self.starting[ping] = number

    def started(self, ping: Any) -> None:
        """Give an actor work from now on."""
        number = self.starting.pop(ping, None)
        if number is None:
            return  # another pass has seen it first
        try:
            self.ray.get(ping)
        except self.ray.exceptions.RayError as error:
            raise LoaderError(
                f"Ray worker {number} could not be started: {error} All nodes need this package and its requirements, "
                "in the versions of the training process."
            ) from error
        self.ready.add(number)


def _on_all(ray: Any, address: str, things: Iterable[Any], do: Callable[[Any], object]) -> None:
    """Do something with actors or tasks, unless their cluster is not this process's any more."""
    if ray.is_initialized() and ray.get_runtime_context().gcs_address == address:
        for thing in things:
            do(thing)


_shared: "weakref.WeakValueDictionary[tuple[str, int], Actors]" = weakref.WeakValueDictionary()


class Lease:
    """The actors that serve one loader, and its dataset in the object store. Persistent workers: kept by the loader."""

    def __init__(self, loader: DataLoader[Any], cluster: RayCluster) -> None:
        self.ray = ray = connect(cluster.address, loader.num_workers)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.store_bytes = int(min(node.get("object_store_memory", 0) for node in nodes))
        self.gcs_address: str = ray.get_runtime_context().gcs_address
        self.plan = [self._put(_Plan(loader.dataset, loader.collate_fn, loader.batch_sampler is not None))]
        known = (self.gcs_address, loader.num_workers)
        actors = _shared.get(known)
        if actors is None:
            # With Ray on this machine alone there is nothing to share out: actors of several loaders all have room.
            cpus = 1 if cluster.address else 0
            actors = _shared[known] = Actors(ray, loader.num_workers, cpus=cpus)
            there = sum(node.get("CPU", 0) for node in nodes)
            if cpus and there < loader.num_workers:
                few = "The Ray cluster has %g CPUs for num_workers=%d: the others wait until it has more."
                logger.warning(few, there, loader.num_workers)
        self.actors = actors
        self.key = key = uuid.uuid4().hex
        weakref.finalize(self, _on_all, ray, self.gcs_address, actors.handles, lambda actor: actor.forget.remote(key))

    def _put(self, plan: _Plan) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.put(plan)
        except (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError) as error:
            raise LoaderError(
                f"The dataset {type(plan.dataset).__name__} does not fit into the object store of Ray, nor on its "
                f"disk: {error} Keep samples in files and only their names in the dataset, or start Ray with a larger "
                "object_store_memory."
            ) from error
        except Exception as error:
            name, thing, why = self._culprit(plan, error)
            raise LoaderError(
                f"The Ray workers cannot be given the {name} ({shortened(thing)}), which has to be pickled: {why}. "
                "Open files and connections in the first __getitem__, keep no locks, or use workers='process' with "
                "start_method='fork', which does not pickle."
            ) from error

    def _culprit(self, plan: _Plan, error: Exception) -> tuple[str, Any, str]:
        try:
            self.ray.cloudpickle.dumps(plan.collate)
        except Exception as told:  # noqa: BLE001  # of whatever the user's objects hold
            return "collate_fn", plan.collate, str(told)
        return "dataset", plan.dataset, str(error.__cause__ or error)


# --- a pass ---------------------------------------------------------------------------------------------------------


@dataclass
class _Job:
    """One batch in the making."""

    number: int
    """Of the batch in its epoch, from 0."""
    index: Any
    actor: int = -1
    made: Any = None
    tries: int = 0


class RayPass(OwnPass):
    """Iterates over what a DataLoader of the same arguments would, with Ray actors in place of worker processes.

    Indices are drawn, and errors raised, where DataLoader does so: by the consumer, ``num_workers * prefetch_factor``
    batches ahead. So many are in the making or ready, unless they would take more of the object store than
    :data:`STORE_SHARE`. ``worker_init_fn`` is not called.
    """

    def __init__(self, loader: DataLoader[Any], indices: Iterator[Any], *, first: int, seed: int, lease: Lease) -> None:
        self._indices, self._number, self._lease = indices, first, lease
        self._in_order, self._timeout_s = loader.in_order, loader.timeout
        self._pin = pin_function() if loader.pin_memory else None
        self._seed = mix_seed(seed, rank_of_run(), 0, "rank")
        self._each = loader.prefetch_factor or 1
        self.capacity = loader.num_workers * self._each
        self._waiting: deque[_Job] = deque()
        self._running: dict[Any, _Job] = {}
        self._made: dict[int, _Job] = {}
        self._largest = 0
        self._ended = self._closed = False
        self._head_seen = self._head_checked = time.monotonic()
        for _ in range(self.capacity):
            self._ask()
        self._submit()

    def __next__(self) -> Any:
        if not self._closed and not (self._waiting or self._running or self._made):
            self._ended = True
            self.close()
        if self._ended:
            raise StopIteration
        self._look_for_head()
        with traced("thread_wait"):
            made = self._wait().made
        if isinstance(made, BaseException):
            raise made
        if isinstance(made, ExceptionWrapper):
            made.reraise()  # type: ignore[no-untyped-call]
        data, buffers, bad = made
        count_relayed(bad)
        # Copied out of the object store, where it could not be written to, and would not make room.
        batch = pickle.loads(data, buffers=[buffer.copy() for buffer in buffers])
        del made, buffers
        batch = batch if self._pin is None else self._pin(batch)
        self._ask()
        self._submit()
        return batch

    @property
    def ready(self) -> int:
        """Batches that are complete and not handed out. Any thread may ask."""
        return len(self._made)

    def where(self) -> str:
        """What is waited for, in words. Any thread may ask."""
        actors = self._lease.actors
        told = f"{len(actors.ready)} of {len(actors.handles)} Ray workers are there"
        if not actors.ready:
            return f"{told}: the others wait for a CPU of the cluster, or still import. `ray status` tells."
        job = min(list(self._running.values()), key=lambda job: job.number, default=None)
        at = "" if job is None else f"; worker {job.actor} is at batch {job.number}, the samples {shortened(job.index)}"
        return f"{told}{at}. `ray stack` on its node shows where it is."

    def close(self, patience_s: float | None = None) -> None:
        """End the work of this pass. A second call does nothing."""
        self._closed = True
        running, self._running = self._running, {}
        self._waiting.clear()
        self._made.clear()
        lease = self._lease
        _on_all(lease.ray, lease.gcs_address, running, lease.ray.cancel)  # what an actor has not begun

    def _ask(self) -> None:
        """Plan one batch more, if there is one."""
        index = next(self._indices, _END)
        if index is not _END:
            self._waiting.append(_Job(self._number, index))
            self._number += 1

    def _submit(self) -> None:
        """Give what waits to the actors that are there and have the least to do, as far as the store has room."""
        lease = self._lease
        load = dict.fromkeys(sorted(lease.actors.ready), 0)
        for job in self._running.values():
            load[job.actor] = load.get(job.actor, self._each) + 1
        while self._waiting and load and self._has_room(self._waiting[0]):
            actor = min(load, key=lambda one: load[one])
            if load[actor] >= self._each:
                return
            load[actor] += 1
            job = self._waiting.popleft()
            job.actor = actor
            make = lease.actors.handles[actor].make
            self._running[make.remote(lease.key, lease.plan, self._seed, job.number, job.index)] = job

    def _has_room(self, job: _Job) -> bool:
        others = [*self._running.values(), *self._made.values()]
        if not others or (self._in_order and all(job.number < other.number for other in others)):
            return True  # what comes next is always made
        if not self._largest:
            return len(others) < len(self._lease.actors.handles)
        # No more ranks share a node than it has devices.
        sharers = min(ranks_of_run(), torch.accelerator.device_count() or ranks_of_run())
        return (len(others) + 1) * self._largest * sharers <= STORE_SHARE * self._lease.store_bytes

    def _wait(self) -> _Job:
        """The batch to hand out, when it is complete."""
        until = time.monotonic() + self._timeout_s if self._timeout_s else None
        patience_s = 0.0
        while not self._closed:
            self._collect(patience_s)
            self._submit()
            jobs = [*self._made.values(), *self._running.values(), *self._waiting]
            number = min(job.number for job in jobs) if self._in_order and jobs else next(iter(self._made), None)
            if number in self._made:
                return self._made.pop(number)
            self._look_for_head()
            if until is not None and time.monotonic() >= until:
                raise LoaderError(
                    f"No batch came within timeout={self._timeout_s:g} s. {self.where()} Give what it waits for a "
                    "timeout of its own, or allow more time by LoaderSettings(timeout_s=...)."
                )
            patience_s = _LOOK_S
        raise LoaderError("This pass over the loader was closed. Begin a new pass with iter(loader).")

    def _collect(self, timeout_s: float) -> None:
        """Take what is done. Waiting for all makes Ray fetch all of them from their nodes."""
        lease, running = self._lease, dict(self._running)
        refs = [*running, *list(lease.actors.starting)]
        if not refs:
            return
        done, _ = lease.ray.wait(refs, num_returns=1 if timeout_s else len(refs), timeout=timeout_s)
        for ref in done:
            if ref not in running:
                lease.actors.started(ref)
            elif self._running.pop(ref, None) is not None:  # else made again, or closed
                self._take(lease.ray, running[ref], ref)

    def _take(self, ray: Any, job: _Job, ref: Any) -> None:
        try:
            job.made = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            job.made = LoaderError(
                f"Ray worker {job.actor} could not make batch {job.number}, at {shortened(job.index)}: {error.cause} "
                "All nodes need what the dataset imports, and room for a batch in the object store or on its disk."
            )
        except ray.exceptions.RayError as error:  # the actor or its node died, or what it made is lost
            self._make_again(job, error)
            return
        if isinstance(job.made, tuple):
            self._largest = max(self._largest, sum(buffer.nbytes for buffer in job.made[1]))
        self._made[job.number] = job

    def _make_again(self, job: _Job, error: Exception) -> None:
        """Give all that an actor had to others: what it had made is lost with a node, which Ray takes long to tell."""
        lost = {ref: other for ref, other in self._running.items() if other.actor == job.actor}
        logger.warning("Ray worker %d died (%s). Its %d batches are made again.", job.actor, error, 1 + len(lost))
        self._lease.actors.await_start(job.actor)
        for ref in lost:
            del self._running[ref]
        for again in sorted([job, *lost.values()], key=lambda one: one.number, reverse=True):
            again.tries += 1
            if again.tries < TRIES:
                self._waiting.appendleft(again)
                continue
            again.made = LoaderError(
                f"{TRIES} Ray workers died one after the other with batch {again.number}, at {shortened(again.index)}: "
                f"{error} A crash in the dataset's code does this, and too little memory: see `ray logs`."
            )
            self._made[again.number] = again

    def _look_for_head(self) -> None:
        now, lease = time.monotonic(), self._lease
        if now - self._head_checked < _HEAD_CHECK_S:
            return
        self._head_checked = now
        try:
            _knock(lease.gcs_address)
            self._head_seen = now
        except OSError as error:
            if now - self._head_seen < _HEAD_PATIENCE_S:
                return
            if lease.gcs_address in _connected:
                lease.ray.shutdown()  # else Ray ends this process soon, before a checkpoint is written
            raise LoaderError(
                f"The head node of the Ray cluster ({lease.gcs_address}) has not answered for "
                f"{now - self._head_seen:.0f} s: {error}. Ray ends processes that cannot reach it. Start the cluster "
                "again, and resume from the last checkpoint."
            ) from error
