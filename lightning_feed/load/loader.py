"""FeedLoader, a DataLoader that can resume in the middle of a pass.

Each pass builds and iterates an inner DataLoader around the same dataset and samplers, with our counting in between. So
``dataset``, ``sampler``, ``batch_sampler`` and ``collate_fn`` stay the user's, for Lightning to inspect and copy, and
nothing private in torch is overridden. The only private attribute of DataLoader in use is ``_iterator``, in which torch
keeps persistent workers, and Lightning looks for them (torch 2.6 to 2.15).
"""

import copy
import inspect
import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from lightning_feed.errors import SettingsError
from lightning_feed.load.decoding import BatchDecoder, Decoding
from lightning_feed.load.kinds import AnyDataset, Batch, State
from lightning_feed.load.loader_pass import LoaderPass
from lightning_feed.load.order import (
    STATE_VERSION,
    DrawsOf,
    EpochOrder,
    IndexSource,
    MapPass,
    Pass,
    PassGenerator,
    drawing_device,
    facts_of,
    find_samplers,
    mix_seed,
    ranks_of_run,
    state_of_sampler,
)
from lightning_feed.load.processes import TorchBatches
from lightning_feed.load.settings import RayCluster
from lightning_feed.load.stage import Maker, OwnPass, Stage
from lightning_feed.load.worker import refuse_unsendable

if TYPE_CHECKING:  # stages and streams are imported only by loaders that use them
    from lightning_feed.load.watchdog import Watch

logger = logging.getLogger(__name__)

_OURS = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"}
# All other arguments of the installed torch's DataLoader are passed to the inner loader unchanged.
_PASSED_ON = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in _OURS]


class FeedLoader(DataLoader[Batch]):
    """A DataLoader that can read ahead in a thread, and can resume in the middle of an epoch.

    Without ``background``, ``order`` and a loaded state it yields the same batches as a DataLoader.
    With an ``order``, random samplers that the user did not seed are seeded for each pass from (seed, epoch, cycle),
    where cycle counts the passes within an epoch (a CombinedLoader repeats its shorter loaders).

    Exact resume works for map-style datasets with torch's samplers, or with any sampler whose order depends only on its
    ``generator``, ``set_epoch`` or ``state_dict``. It also works for iterable datasets that have a state (torchdata's
    contract) or repeat their samples when iterated again. A sampler that draws from torch's global generator cannot be
    resumed: its order is lost with the process. The state counts yielded batches, not batches read ahead.

    Args:
        dataset: map-style or iterable.
        background: batches that a thread keeps ready. 0: no thread.
        order: seeds the order of each epoch. None: uses torch's global generator, as in a DataLoader.
        workers: kind of workers: ``"process"``, ``"thread"`` (in the training process) or a
            :class:`RayCluster`. Threads and Ray load only map-style datasets: ``get_worker_info()`` is None in them,
            and ``worker_init_fn`` is not called.
        watch: when to warn of a missing batch; None: never.
        decode: decodes whole batches after the workers, a few batches ahead. None: no decoding.
        **options: other DataLoader arguments, under their usual names, because Lightning copies the loader by these
            names to replace its sampler.

    Raises:
        SettingsError: threads or Ray were chosen for an iterable dataset.
        LoaderError: from ``iter()``, if an argument cannot be sent to the workers, or a thread cannot start.

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
        dataset: AnyDataset,
        *,
        background: int = 0,
        order: EpochOrder | None = None,
        workers: Literal["process", "thread"] | RayCluster = "process",
        decode: BatchDecoder | None = None,
        watch: "Watch | None" = None,
        **options: Any,
    ) -> None:
        self.workers = workers
        self.decode = decode
        self.watch = watch
        super().__init__(dataset, **options)
        self.background = background
        self.order = order
        self.draws: DrawsOf | None = None
        """Random draws of the loader that this one replaces. None: replaces no loader."""
        self.forget()

    def forget(self) -> None:
        """Start over with the current attributes, without a position or workers."""
        self._stream = isinstance(self.dataset, IterableDataset)
        self._ours = self.workers != "process" and self.num_workers > 0
        if self._ours:
            self._check_own_workers()
        inner = self.batch_sampler if self.batch_sampler is not None else self.sampler
        samplers = {} if self._stream else find_samplers(self.sampler, self.batch_sampler)
        self._index = IndexSource(inner, samplers, self.draws)
        self._sample_seed: int | None = None
        self._probed = False
        self._iterator = None
        self._live: weakref.ref[LoaderPass] | None = None
        self._position: Pass | None = None
        self._pending: State | None = None
        self.shift = 0
        """Correction to a loaded state's batch count, for another batch size or number of ranks."""

    def _check_own_workers(self) -> None:
        name = "ray" if isinstance(self.workers, RayCluster) else self.workers
        if self._stream:
            raise SettingsError(
                f"workers={name!r} cannot load {type(self.dataset).__name__}, an IterableDataset: "
                "get_worker_info() is None in these workers, so it cannot divide its samples. Use "
                "workers='process', or LoaderSettings(num_workers=0, background=2), which reads it in one thread."
            )
        function = getattr(self.worker_init_fn, "func", self.worker_init_fn)
        # seed_everything(workers=True) makes Lightning set a function. It is not needed: each sample has a generator.
        if function is not None and getattr(function, "__name__", "") != "pl_worker_init_function":
            logger.warning(
                "worker_init_fn=%r is not called with workers=%r: it would change the "
                "training process, or a process that serves other loaders too. Keep the state of each worker "
                "in a threading.local().",
                function,
                name,
            )

    def follow(self, other: "FeedLoader") -> None:
        """Replace another loader of the same samples, continuing after its latest pass."""
        self._position = other._position

    def __iter__(self) -> LoaderPass:  # type: ignore[override]
        if self.persistent_workers or self.background or self.decode is not None:
            self.close()  # workers and decoders serve one pass at a time; two passes would share one dataset
        position = self._begin(self._take_pending())
        maker = self._maker(position)
        position.begin(self._index.samplers)  # if torch has not requested an index yet
        self._position = position
        later: list[Stage] = []
        ahead = None
        if self.background:
            from lightning_feed.load.ahead import BackgroundIterator

            ahead = BackgroundIterator(maker, self.background)
            later.append(ahead)
        if self.decode is not None:
            later.append(Decoding(self.decode, maker if ahead is None else ahead))
        batches = LoaderPass(maker, later, position, ahead, self.watch)
        self._live = weakref.ref(batches)
        return batches

    @property
    def state_differs_by_rank(self) -> bool:
        """True if a checkpoint needs the state of every rank. An iterable dataset has a different state on each rank; a
        sampler has the same position on all ranks."""
        return self._stream

    def close(self) -> None:
        """End the current pass, if any, and its threads."""
        live = self._live() if self._live is not None else None
        if live is not None:
            live.close()

    def state_dict(self) -> State:
        """Return the position of the latest pass, in yielded batches. Never raises. ``"exact"`` is False if an exact
        resume is not possible."""
        if self._pending is not None:
            return copy.deepcopy(self._pending)
        now = self._position
        state: State = {
            **({} if self._sample_seed is None else {"sample_seed": self._sample_seed}),
            "version": STATE_VERSION,
            "kind": self._kind(),
            "seed": self.order.seed if self.order is not None else None,
            "begun": now is not None,
            "exact": (self.in_order or self.num_workers < 2) and (now is None or now.exact),
        }
        if now is None:
            return state
        return {**state, "epoch": now.epoch, "cycle": now.cycle, "batches": now.batches, **now.state()}

    def state_at_end(self, state: State) -> State:
        """Return ``state`` of a finished epoch, with the samplers' state for the start of the next one."""
        samplers = self._index.samplers.items()
        return {**state, "next_start": {name: state_of_sampler(sampler) for name, sampler in samplers}}

    def load_state_dict(self, state: State) -> None:
        """Resume from ``state`` with the next pass. Closes the current pass, and ends persistent workers.

        Args:
            state: result of ``state_dict()``, or ``{"ranks": [state of rank 0, state of rank 1, ...]}``.

        Raises:
            ResumeError: the state has an unknown version or is for another kind of dataset, or it was saved in the
                middle of an epoch with a configuration that cannot be converted (see elastic_resume.py). An iterable
                dataset needs the same number of workers and ranks as before.
        """
        from lightning_feed.load.elastic_resume import check_kind, converted, state_of_rank
        from lightning_feed.load.state_schema import check_state

        # Here, not in iter(), whose errors are hidden by an error from Lightning's teardown.
        check_state(state)
        state = copy.deepcopy(state_of_rank(state))
        before = state.get("batches", 0)
        check_kind(state, self._kind(), self.dataset)
        if state["begun"] and not self._is_stale(state):
            state = converted(state, self, self._index.samplers)
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
            self.order.seed = state["seed"]  # later epochs must repeat those of the interrupted run, too
        self._pending = state if state["begun"] else None

    def check_worker_number_rationality(self) -> None:
        """Issue torch's warning about more worker processes than CPUs."""
        if self.workers == "process":
            DataLoader.check_worker_number_rationality(self)

    def __getstate__(self) -> State:
        # ddp_spawn pickles loaders. A pass cannot be pickled, but its position can.
        begun = self._pending is not None or self._position is not None
        place = self.state_dict() if begun else None
        return {**self.__dict__, "_live": None, "_position": None, "_iterator": None, "_pending": place}

    def _is_stale(self, state: State) -> bool:
        """True if the epoch of ``state`` was complete and the run is in a later epoch."""
        return self.order is not None and state["epoch"] is not None and self.order.epoch() > state["epoch"]

    def _take_pending(self) -> State | None:
        """Return the state to resume from, and clear it. None: start from the beginning."""
        state = self._pending
        self._pending = None
        last = self._position
        if state is None and last is not None and last.origin is not None and not last.ended:
            # Lightning may iter() a loader twice before its first batch: the second pass resumes as well.
            state = dict(last.origin) if last.batches == last.origin["batches"] else None
        return None if state is None or self._is_stale(state) else state

    def _kind(self) -> str:
        return "iterable" if self._stream else "map"

    def _begin(self, resume: State | None) -> Pass:
        """Make the position of a new pass, which may resume from a state."""
        epoch, cycle = self._next_epoch() if resume is None else (resume["epoch"], resume["cycle"])
        begun: dict[str, Any] = {"epoch": epoch, "cycle": cycle, "resume": resume}
        if self._stream:
            from lightning_feed.load.iterable import IterablePass

            stream = IterablePass(self.order, num_workers=self.num_workers, **begun)
            stream.facts = {"world": ranks_of_run(), "batch_size": self.batch_size}
            return stream
        position = MapPass(self.order, ahead=self.num_workers * (self.prefetch_factor or 1), **begun)
        position.facts = {**facts_of(self, self._index.samplers), "since": 0, "done": []}
        if resume is not None:
            from lightning_feed.load.elastic_resume import rest_of

            position.facts |= {key: resume[key] for key in ("since", "done", "order", "rest") if key in resume}
            position.rest = rest_of(resume, self, position)
        if position.facts["order"] is None and (self.in_order or self.num_workers < 2):
            position.drawn = 0  # begins a checksum: only torch's own samplers surely repeat their order
        self._index.now = position
        return position

    def _next_epoch(self) -> tuple[int | None, int]:
        """Return epoch and cycle of a new pass."""
        epoch = self.order.epoch() if self.order is not None else None
        last = self._position
        if epoch is None or last is None or last.epoch != epoch:
            return epoch, 0
        return epoch, last.cycle + (1 if last.batches else 0)

    def _maker(self, position: Pass) -> Maker:
        """Make the first stage of a pass."""
        if self._stream:
            from lightning_feed.load.iterable import StreamBatches

            if isinstance(self.dataset, IterDataPipe):  # torch shards and seeds DataPipes by their class
                return StreamBatches(super().__iter__(), position)
            return StreamBatches(self._torch_iterator(self._stream_loader(position)), position)
        if self.draws is not None:
            with drawing_device(self.draws.generator):
                self.draws.draw_seed()
        if self._ours:
            return self._own_workers(position)
        return TorchBatches(self._torch_iterator(self._map_loader()), position)

    def _own_workers(self, position: Pass) -> OwnPass:
        # Drawn at the same point as DataLoader's worker seed, from the same generator.
        with drawing_device(self.generator):
            base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        self._sample_seed, seed = None, position.seed_for("samples")
        if seed is None:
            saved = (position.origin or {}).get("sample_seed")
            self._sample_seed = seed = mix_seed(base_seed, 1, 0, "samples") if saved is None else saved
        indices = iter(self._index)
        if isinstance(self.workers, RayCluster):
            from lightning_feed.load.ray_workers import RayPass, RemotePlan

            plan: Any = self._iterator if self._iterator is not None else RemotePlan(self, self.workers)
            self._iterator = plan if self.persistent_workers else None  # Lightning ends the workers in this attribute
            return RayPass(self, indices, first=position.batches, seed=seed, plan=plan)
        from lightning_feed.load.threads import ThreadPass

        probe = not self._probed
        self._probed = True
        return ThreadPass(self, indices, first=position.batches, seed=seed, probe=probe)

    def _torch_iterator(self, inner: DataLoader[Batch]) -> Iterator[Batch]:
        """Make the inner loader's iterator, with this loader's persistent workers if they are alive."""
        # The workers that a failed pass has ended are replaced.
        inner._iterator = None if getattr(self._iterator, "_shutdown", False) else self._iterator
        device = drawing_device(inner.generator)
        try:
            # Entered only if it changes the default device: it slows each call of torch, and forked workers inherit it.
            # The default is read from a tensor: torch 2.6's get_default_device() raises after set_default_device(None).
            with nullcontext() if torch.empty(0).device == device else device:
                iterator = iter(inner)
        except (TypeError, AttributeError, PicklingError):
            context: Any = inner.multiprocessing_context or torch.multiprocessing
            refuse_unsendable(self, "This loader", context.get_start_method())
            raise
        # Kept only here, for Lightning to end the workers, and not in the inner loader too.
        self._iterator = inner._iterator
        inner._iterator = None
        return iterator

    def _map_loader(self) -> DataLoader[Batch]:
        options = {**self._passed_on(), "collate_fn": self.collate_fn, "generator": self.generator}
        if self.batch_sampler is not None:
            return DataLoader(self.dataset, batch_sampler=self._index, **options)
        return DataLoader(self.dataset, batch_size=None, sampler=self._index, **options)

    def _stream_loader(self, position: Any) -> DataLoader[Batch]:
        from lightning_feed.load.iterable import StampingCollate

        dataset = position.dataset(self.dataset, self.batch_size)
        collate = StampingCollate(self.collate_fn, dataset)
        options = {**self._passed_on(), "collate_fn": collate, "generator": self._base_of(position)}
        return DataLoader(dataset, batch_size=self.batch_size, drop_last=self.drop_last, **options)

    def _passed_on(self) -> State:
        return {name: getattr(self, name) for name in _PASSED_ON if hasattr(self, name)}

    def _base_of(self, position: Any) -> torch.Generator | None:
        """Return the generator from which torch draws the workers' base seed. None: torch's default generator.

        Any other generator draws the same base seed in a resumed pass, so datasets that shuffle by worker seed repeat
        their order.
        """
        if self.generator is not None:
            saved = position.origin["base_state"] if position.origin is not None else None
            if saved is not None:
                self.generator.set_state(saved)
            position.base_state = self.generator.get_state()
            return self.generator  # type: ignore[no-any-return]
        seed = position.seed_for("workers")
        return None if seed is None else PassGenerator().manual_seed(seed)
