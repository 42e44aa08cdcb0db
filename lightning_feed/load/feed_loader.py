"""A DataLoader whose passes can be taken up in their middle, and run ahead in a background thread.

What torch iterates is not the loader itself but a plain DataLoader built for each pass, around the same dataset and
samplers, with our counting in between. So ``dataset``, ``sampler``, ``batch_sampler`` and ``collate_fn`` stay what the
user gave, which is what Lightning inspects and copies, and no private part of torch is overridden. The one private
name is ``_iterator``, where torch keeps persistent workers and where Lightning looks for them (torch 2.6 to 2.15).
"""

import copy
import inspect
import logging
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from lightning_feed.errors import LoaderError, ResumeError, SettingsError
from lightning_feed.load.batch_decoder import BatchDecoder
from lightning_feed.load.epoch_order import (
    EpochOrder,
    IndexSource,
    MapPass,
    PassGenerator,
    drawing_device,
    find_samplers,
    mix_seed,
)
from lightning_feed.load.iterable_state import IterablePass, StampingCollate
from lightning_feed.load.late_batch import Watch
from lightning_feed.load.loader_pass import LoaderPass
from lightning_feed.load.rest_of_epoch import SIDE_BY_SIDE, facts_of, fitted, ranks_of_run, rest_of
from lightning_feed.load.thread_crew import ThreadCrew
from lightning_feed.load.thread_pass import ThreadPass, check_arguments

logger = logging.getLogger(__name__)

_VERSION = 1
_OURS = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"}
# Everything else that a DataLoader of the installed torch takes is handed on to the inner loader as it is.
_HANDED_ON = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in _OURS]


class FeedLoader(DataLoader[Any]):
    """A DataLoader that can read ahead in a thread, and whose state makes a resumed run train what is left.

    Without ``background``, ``order`` and a loaded state it yields what a DataLoader of the same arguments yields. With
    an ``order``, random samplers that the user did not seed are seeded for each pass from (seed, epoch, cycle), where
    cycle counts the passes within one epoch (a shorter loader of a CombinedLoader is iterated again).

    Exactly resumable are map-style datasets under torch's samplers and under any sampler that depends on its
    ``generator``, ``set_epoch`` or ``state_dict`` alone, and iterable datasets that have a state (torchdata's contract)
    or that give the same samples when iterated again. A sampler that draws from torch's global generator on its own is
    not: its order is gone with the process. Batches handed out are counted, not batches read ahead.

    Args:
        dataset: map-style or iterable.
        background: batches that a thread prepares ahead of the consumer; 0: no thread.
        order: what seeds the order of each epoch; None: torch's global generator, as in a DataLoader.
        workers: what ``num_workers`` counts, ``"process"`` or ``"thread"``. Threads serve map-style datasets, in the
            training process: ``get_worker_info()`` is None in them, and ``worker_init_fn`` is not called. Torch's
            random numbers come from a stream for each sample, of (seed, epoch, cycle, place in the epoch, rank).
        watch: when to warn of a batch that does not come; None: never.
        decode: decodes whole batches after they have left the workers, some of them ahead; None: they stay as they are.
        **options: DataLoader's own. They are passed through by name, because Lightning makes a copy of the loader
            with another sampler by the names that DataLoader has.

    Raises:
        SettingsError: for threads with an iterable dataset, or with a ``multiprocessing_context``.
        LoaderError: from ``iter()``, when an argument cannot be sent to the workers, or threads cannot be started.

    Example:
        >>> loader = FeedLoader(range(6), batch_size=2)
        >>> batches = iter(loader)
        >>> next(batches), loader.state_dict()["batches"]
        (tensor([0, 1]), 1)
        >>> resumed = FeedLoader(range(6), batch_size=2)
        >>> resumed.load_state_dict(loader.state_dict())
        >>> list(resumed)
        [tensor([2, 3]), tensor([4, 5])]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        background: int = 0,
        order: EpochOrder | None = None,
        workers: Literal["process", "thread"] = "process",
        decode: BatchDecoder | None = None,
        watch: Watch | None = None,
        **options: Any,
    ) -> None:
        self.workers, self.decode, self.watch = workers, decode, watch
        super().__init__(dataset, **options)
        self.background = background
        self.order = order
        self._iterable = isinstance(dataset, IterableDataset)
        self._threaded = workers == "thread" and self.num_workers > 0
        self._sample_seed: int | None = None
        self._probed = False
        if workers not in ("process", "thread"):
            raise SettingsError(f"workers={workers!r} is not a choice. Give 'process' or 'thread'.")
        if self._threaded:
            check_arguments(self)
        inner = self.batch_sampler if self.batch_sampler is not None else self.sampler
        self._index = IndexSource(inner, {} if self._iterable else find_samplers(self.sampler, self.batch_sampler))
        self._live: weakref.ref[LoaderPass] | None = None
        self._position: MapPass | IterablePass | None = None
        self._pending: dict[str, Any] | None = None
        self.shift = 0
        """Batches by which a loaded state's count of them changed, because this loader's batches are others."""

    def __iter__(self) -> LoaderPass:  # type: ignore[override]
        live = self._live() if self._live is not None else None
        if live is not None and (self.persistent_workers or self.background or self.decode is not None):
            live.close()  # workers and decoders serve one pass at a time, and two threads would share one dataset
        resume = self._take_pending()
        position = self._begin(resume)
        source = self._start(position)
        if isinstance(position, MapPass):
            position.begin(self._index.samplers)  # if torch has not asked for an index yet
            position.facts = {**facts_of(self, self._index.samplers), "since": 0, "done": []}
            if resume is not None:
                position.facts |= {key: resume[key] for key in ("since", "done", "order", "rest") if key in resume}
        self._position = position
        batches = LoaderPass(source, self.background, position, self.decode, self.watch)
        self._live = weakref.ref(batches)
        return batches

    @property
    def state_differs_by_rank(self) -> bool:
        """Whether a checkpoint needs the state of every rank. A sampler stands at the same place on all of them; an
        iterable dataset divides itself, so each rank has a state of its own."""
        return self._iterable

    def close(self) -> None:
        """End the live pass, if there is one, and its thread."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, in batches handed out. Never raises; what cannot be resumed exactly says so
        in ``"exact"``."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        now = self._position
        state: dict[str, Any] = {
            **({} if self._sample_seed is None else {"sample_seed": self._sample_seed}),
            "version": _VERSION,
            "kind": "iterable" if self._iterable else "map",
            "seed": self.order.seed if self.order is not None else None,
            "begun": now is not None,
            "exact": self.in_order or self.num_workers < 2,
        }
        if now is None:
            return state
        if isinstance(now, IterablePass):
            state["exact"] = state["exact"] and now.exact
        return {**state, "epoch": now.epoch, "cycle": now.cycle, "batches": now.batches, **now.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state`` with the next pass. A live pass is closed, and persistent workers are ended.

        Args:
            state: of ``state_dict()``, or ``{"ranks": [state of rank 0, state of rank 1, ...]}``.

        Raises:
            ResumeError: the state is of another kind of dataset, of an unknown version, or, in the middle of an epoch,
                of a setting from which it cannot be carried over: see rest_of_epoch.py. An iterable dataset needs the
                workers and the ranks that it had.
        """
        state = copy.deepcopy(_of_this_rank(state) if "ranks" in state else state)
        before = state.get("batches", 0)
        state = self._fitted(state)
        self.shift = state.get("batches", 0) - before
        if not state["exact"]:
            logger.warning(
                "The loader state in the checkpoint is not exact (workers out of order, a DataPipe, or a dataset state "
                "that could not be pickled): some samples of this epoch may be trained twice, or not at all."
            )
        self.close()
        self._iterator = None  # torch ends the workers when their iterator is garbage
        self._live = self._position = None
        if self.order is not None and state["seed"] is not None:
            self.order.seed = state["seed"]  # the epochs after this one must be those of the interrupted run, too
        self._pending = state if state["begun"] else None

    def check_worker_number_rationality(self) -> None:
        """Torch's warning of more worker processes than CPUs, which threads are not."""
        if self.workers != "thread":
            super().check_worker_number_rationality()

    def _fitted(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` as it is for this loader. Raises where it does not fit."""
        # Here, not in iter(): an error there is hidden by one that Lightning's teardown raises on top of it.
        kind = "iterable" if self._iterable else "map"
        if state.get("version") != _VERSION:
            raise ResumeError(
                f"The loader state has version {state.get('version')!r}, and this lightning_feed reads version "
                f"{_VERSION}. Resume with the version of lightning_feed that wrote the checkpoint."
            )
        if state["kind"] != kind:
            raise ResumeError(
                f"The loader state is of a dataset of kind {state['kind']!r}, and this loader's dataset "
                f"({type(self.dataset).__name__}) is of kind {kind!r}. Resume with the dataset that was trained on."
            )
        if not state["begun"] or self._is_stale(state):
            return state
        if self._iterable:
            return self._fitted_stream(state)
        state = fitted(state, self, self._index.samplers)
        if hasattr(self._index.inner, "__len__") and state["batches"] > len(self):
            raise ResumeError(
                f"The checkpoint was saved after {state['batches']} batches of an epoch, and this loader has "
                f"{len(self)}. Resume with the dataset and the batch size that were trained with."
            )
        return state

    def _fitted_stream(self, state: dict[str, Any]) -> dict[str, Any]:
        # One worker process and none at all see the same share of the dataset.
        if max(1, state["num_workers"]) != max(1, self.num_workers):
            raise ResumeError(
                f"The checkpoint was saved with num_workers={state['num_workers']} and this loader has "
                f"num_workers={self.num_workers}. An iterable dataset is divided among its workers, so their places "
                f"cannot be carried over. Set num_workers={state['num_workers']} to resume."
            )
        ranks, now = state.get("world", 1), ranks_of_run()
        if "world" in state and ranks != now:
            raise ResumeError(_OTHER_RANKS.format(ranks=ranks, now=now))
        size = state.get("batch_size", self.batch_size)
        if size == self.batch_size:
            return state
        if state.get("beside"):
            raise ResumeError(
                f"The checkpoint was saved with batch_size={size}, and this loader has {self.batch_size}. "
                f"{SIDE_BY_SIDE}. Resume with batch_size={size}."
            )
        # Places are counted in samples, so only the count of batches is another.
        state["batch_size"] = self.batch_size
        try:
            drawn = sum(worker["drawn"] for worker in state["workers"].values())
            left = max(0, len(self.dataset) - drawn) / (self.batch_size or 1)  # type: ignore[arg-type]
            state["batches"] = len(self) - (math.floor(left) if self.drop_last else math.ceil(left))
        except (TypeError, NotImplementedError):  # no length: nothing is compared with the count
            pass
        logger.warning(
            "The checkpoint was saved with batch_size=%s, and this loader has %s. The epoch goes on after the samples "
            "that were trained.",
            size,
            self.batch_size,
        )
        return state

    def _is_stale(self, state: Mapping[str, Any]) -> bool:
        """Whether the epoch that ``state`` interrupts was complete: the run is in a later one already."""
        return self.order is not None and state["epoch"] is not None and self.order.epoch() > state["epoch"]

    def __getstate__(self) -> dict[str, Any]:
        # ddp_spawn pickles loaders. A pass cannot go along, but its place can.
        return {**self.__dict__, "_live": None, "_position": None, "_iterator": None, "_pending": self._place()}

    def _place(self) -> dict[str, Any] | None:
        return self.state_dict() if self._pending is not None or self._position is not None else None

    def _take_pending(self) -> dict[str, Any] | None:
        """The state that the next pass goes on from; None for a pass from its beginning."""
        state, self._pending = self._pending, None
        last = self._position
        if state is None and last is not None and last.origin is not None and not last.ended:
            # Lightning may iter() a loader twice before its first batch: the second pass resumes as well.
            state = dict(last.origin) if last.batches == last.origin["batches"] else None
        return None if state is None or self._is_stale(state) else state

    def _begin(self, resume: dict[str, Any] | None) -> MapPass | IterablePass:
        if resume is not None:
            epoch, cycle = resume["epoch"], resume["cycle"]
        else:
            epoch, cycle, last = self.order.epoch() if self.order is not None else None, 0, self._position
            if epoch is not None and last is not None and last.epoch == epoch:
                cycle = last.cycle + (1 if last.batches else 0)
        if self._iterable:
            stream = IterablePass(self.num_workers, epoch=epoch, cycle=cycle, resume=resume)
            stream.facts = {"world": ranks_of_run(), "batch_size": self.batch_size}
            return stream
        position = MapPass(self.order, epoch=epoch, cycle=cycle, resume=resume)
        position.remember(self.num_workers * (self.prefetch_factor or 1))
        position.rest = None if resume is None else rest_of(resume, self)
        return position

    def _start(self, position: MapPass | IterablePass) -> Iterator[Any]:
        """Torch's iterator for the pass, or that of worker threads."""
        if self._threaded and isinstance(position, MapPass):
            return self._start_threads(position)
        inner = self._inner(position)
        if inner is None:
            return super().__iter__()
        # Workers that a failed pass has ended are started anew.
        inner._iterator = None if getattr(self._iterator, "_shutdown", False) else self._iterator
        device = drawing_device(inner.generator)
        try:
            # Entered only where it changes something: workers that are forked here inherit it, and it slows each call.
            with nullcontext() if torch.get_default_device() == device else device:
                source = iter(inner)
        except (TypeError, AttributeError, PicklingError) as error:
            blame = _unpicklable(self)
            if blame is None:
                raise
            raise LoaderError(blame) from error
        # Kept here, where Lightning ends workers, and not a second time in the inner loader.
        self._iterator, inner._iterator = inner._iterator, None
        return source

    def _start_threads(self, position: MapPass) -> ThreadPass:
        self._index.now = position
        crew = self._iterator if isinstance(self._iterator, ThreadCrew) and self._iterator.usable else None
        if crew is None:
            # Drawn where DataLoader draws the seed of its workers, from what it draws it from.
            with drawing_device(self.generator):
                seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
            crew = ThreadCrew(self.num_workers, base_seed=seed)
        crew.passes += 1
        self._iterator = crew if self.persistent_workers else None  # type: ignore[assignment]
        saved = position.origin.get("sample_seed") if position.origin is not None else None
        if self.order is not None and position.epoch is not None:
            self._sample_seed, seed = None, mix_seed(self.order.seed, position.epoch, position.cycle, "samples")
        else:
            seed = saved if saved is not None else mix_seed(crew.base_seed, crew.passes, 0, "samples")
            self._sample_seed = seed
        probe, self._probed = not self._probed, True
        return ThreadPass(self, iter(self._index), crew, first=position.batches, seed=seed, probe=probe)

    def _inner(self, position: MapPass | IterablePass) -> DataLoader[Any] | None:
        options = {name: getattr(self, name) for name in _HANDED_ON if hasattr(self, name)}
        if isinstance(position, MapPass):
            self._index.now = position
            options |= {"collate_fn": self.collate_fn, "generator": self.generator}
            if self.batch_sampler is not None:
                return DataLoader(self.dataset, batch_sampler=self._index, **options)
            return DataLoader(self.dataset, batch_size=None, sampler=self._index, **options)
        if isinstance(self.dataset, IterDataPipe):
            return None  # torch shards and seeds DataPipes by their class, which a wrapper would hide
        dataset = position.dataset(self.dataset, self.batch_size)
        options |= {"collate_fn": StampingCollate(self.collate_fn, dataset), "generator": self._base_of(position)}
        return DataLoader(dataset, batch_size=self.batch_size, drop_last=self.drop_last, **options)

    def _base_of(self, position: IterablePass) -> torch.Generator | None:
        """What the workers' base seed is drawn from: datasets that shuffle by their worker's seed are then iterated in
        the same order when they are drawn again."""
        if self.generator is not None:
            saved = position.origin["base_state"] if position.origin is not None else None
            if saved is not None:
                self.generator.set_state(saved)
            position.base_state = self.generator.get_state()
            return self.generator  # type: ignore[no-any-return]
        if self.order is None or position.epoch is None:
            return None
        generator = PassGenerator()
        generator.manual_seed(mix_seed(self.order.seed, position.epoch, position.cycle, "workers"))
        return generator


_OTHER_RANKS = (
    "The checkpoint was saved by {ranks} ranks and this run has {now}. An iterable dataset is divided among the ranks, "
    "so their places cannot be carried over. Resume with {ranks} ranks."
)


def _of_this_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a state that was gathered from all ranks."""
    world = ranks_of_run()
    ranks: list[dict[str, Any]] = state["ranks"]
    if len(ranks) == world:
        mine = ranks[torch.distributed.get_rank() if world > 1 else 0]
    elif ranks[0]["kind"] == "iterable":
        raise ResumeError(_OTHER_RANKS.format(ranks=len(ranks), now=world))
    else:
        mine = ranks[0]  # a sampler stands at the same place on all of them
    return {**mine, "beside": state.get("beside", 0), **({"world": len(ranks)} if "world" in mine else {})}


def _unpicklable(loader: FeedLoader) -> str | None:
    """Which argument cannot be sent to a worker process, and what to do; None if all can."""
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        value = getattr(loader, name)
        try:
            ForkingPickler.dumps(value)
        except RuntimeError:
            continue  # locks and queues refuse to be pickled except while a process starts, which is what matters
        except (TypeError, AttributeError, PicklingError) as error:
            return (
                f"The worker processes could not be started, because {name} ({value!r}) cannot be pickled: {error}. "
                "Workers that are not forked get their arguments pickled. Define functions and classes at the top "
                "level of a module and open files or connections in the worker, or use "
                "multiprocessing_context='fork', or num_workers=0."
            )
    return None


def is_feed_state(state: Mapping[str, Any]) -> bool:
    """Whether ``state`` is one of a :class:`FeedLoader`, or such states gathered from all ranks."""
    return all("begun" in part for part in state.get("ranks", [state]))


def begin_next_epoch(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state at the beginning of the epoch after the one that ``state`` is in."""
    if "ranks" in state:
        return {"ranks": [begin_next_epoch(part) for part in state["ranks"]]}
    if state["kind"] == "iterable" or not state["begun"]:
        return {**state, "begun": False}
    epoch = None if state["epoch"] is None else state["epoch"] + 1
    state = {key: value for key, value in state.items() if key not in ("sample_seed", "rest")}
    if "done" in state:
        state |= {"done": [], "since": 0}
    return {**state, "epoch": epoch, "cycle": 0, "batches": 0, "pass_start": {}}
