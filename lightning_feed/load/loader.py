"""FeedLoader, a DataLoader that can resume in the middle of a pass.

Each pass builds and iterates an inner DataLoader around the same dataset, with an :class:`IndexSource` that counts
indices from the samplers. So ``dataset``, ``sampler``, ``batch_sampler`` and ``collate_fn`` stay the user's, for
Lightning to inspect and copy, and nothing private in torch is overridden. The only private attribute of DataLoader in
use is ``_iterator``, where torch keeps persistent workers and Lightning looks for them (torch 2.6 to 2.15).
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe

from lightning_feed.errors import SettingsError
from lightning_feed.load.inner_loader import iterator_of, map_loader, stream_loader
from lightning_feed.load.kinds import AnyDataset, Batch, State
from lightning_feed.load.loader_pass import NO_SUBSTITUTES, LoaderPass
from lightning_feed.load.order import (
    DrawsOf,
    EpochOrder,
    drawing_device,
    has_set_epoch,
    mix_seed,
    rank_of_run,
    ranks_of_run,
    size_of,
)
from lightning_feed.load.passes import Passes, is_stale
from lightning_feed.load.position import (
    IndexSource,
    Position,
    draws_again,
    find_samplers,
    is_ours,
    state_of_sampler,
)
from lightning_feed.load.processes import TorchBatches
from lightning_feed.load.resume import LoaderState, SamplerState, refuse_changes
from lightning_feed.load.settings import RayCluster
from lightning_feed.load.slot_loaders import use_slots
from lightning_feed.load.slots import own_forks
from lightning_feed.load.stage import BatchDecoder, Decoding, Maker, OwnPass, Stage
from lightning_feed.load.streams import RepeatsWarning, may_repeat

if TYPE_CHECKING:  # imported only by loaders that use them
    from lightning_feed.load.probe import AddedWorkers
    from lightning_feed.load.watchdog import Watch

logger = logging.getLogger(__name__)


class FeedLoader(DataLoader[Batch]):
    """A DataLoader that can read ahead in a thread, and can resume in the middle of an epoch.

    Without ``background``, ``order`` and a loaded state, a FeedLoader yields the same batches as a DataLoader.
    With an ``order``, random samplers that the user did not seed are seeded for each pass from (seed, epoch, cycle),
    where cycle counts the passes within an epoch (a CombinedLoader repeats its shorter loaders).

    Exact resume works for map-style datasets with torch's samplers, or with any sampler whose order depends only on its
    ``generator``, ``set_epoch`` or ``state_dict``, if the configuration is the same as in the checkpoint. A sampler
    that draws from torch's global generator cannot be resumed: its order is lost with the process. An iterable dataset
    resumes only at the start of an epoch. The state counts yielded batches, not batches read ahead.

    Args:
        dataset: map-style or iterable.
        background: number of batches that a thread keeps ready; 0 for no thread.
        order: seeds the order of each epoch; None to use torch's global generator, as a DataLoader does.
        workers: kind of workers: ``"process"``, ``"thread"`` (in the training process) or a
            :class:`RayCluster`. Threads and Ray load only map-style datasets, because ``get_worker_info()`` is None in
            these workers. They do not call ``worker_init_fn``.
        hand_over: method by which worker processes hand over their batches: ``"slots"`` (see
            :mod:`lightning_feed.load.slots`), or ``"torch"``, the method of a DataLoader.
        watch: time after which to warn of a missing batch; None for no warning.
        probed: True to look at a few samples when an epoch begins, and once soon after. If the program has changed the
            dataset, its workers start anew; if it changes within an epoch, batches are made without workers from then
            on. For workers that the user has not asked for.
        decode: decodes whole batches that have left the workers, a few batches ahead; None if batches need no decoding.
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

    def __init__(  # noqa: PLR0913 - all but the dataset are by name, and have a default
        self,
        dataset: AnyDataset,
        *,
        background: int = 0,
        order: EpochOrder | None = None,
        workers: Literal["process", "thread"] | RayCluster = "process",
        hand_over: Literal["slots", "torch"] = "slots",
        decode: BatchDecoder | None = None,
        watch: "Watch | None" = None,
        probed: bool = False,
        **options: Any,
    ) -> None:
        self.workers = workers
        self.hand_over = hand_over
        self.decode = decode
        self.watch = watch
        self.probed = probed
        super().__init__(dataset, **options)
        self.background = background
        self.order = order
        self.draws: DrawsOf | None = None
        """Random draws of the loader that this one replaces. None if this loader replaces no other."""
        self.forget()

    def forget(self) -> None:
        """Start over with the current attributes, without a position or workers."""
        if self._has_own_workers:
            _check_own_workers(self)
        inner = self.sampler if self.batch_sampler is None else self.batch_sampler
        samplers = {} if self._is_stream else find_samplers(self.sampler, self.batch_sampler)
        self._index = IndexSource(inner, samplers, self.draws)
        self._passes = Passes(self._index, self._configuration())
        self._live: weakref.ref[LoaderPass] | None = None
        """The latest pass, if it is still in use."""
        self._iterator = None
        self._added: AddedWorkers | None = None
        """The watch over workers that the user has not asked for; None until a pass of such workers begins."""
        self._has_tried_threads = False
        """True once worker threads have tried a sample in two threads at once."""
        self._repeats: RepeatsWarning | None = None
        """Compares batches of the workers of a stream; None if they are not compared."""
        self._refers_to_shared: bool | None = None
        """True if the dataset refers to objects that processes share; None if nobody has looked yet."""

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _has_own_workers(self) -> bool:
        """True if batches come from worker threads or from Ray."""
        return self.workers != "process" and self.num_workers > 0

    def follow(self, other: "FeedLoader") -> None:
        """Replace another loader of the same samples, continuing after its latest pass."""
        self._passes.latest = other._passes.latest

    def follow_rest(self, rest: "FeedLoader") -> None:
        """Have the position of the loader that yields the rest of the present pass. The next pass is a new one."""
        self.follow(rest)
        if self._passes.latest is not None:
            self._passes.latest.may_begin_again = False

    def __iter__(self) -> LoaderPass:  # type: ignore[override]
        """Begin a pass. Ends the pass before if both would use the same workers.

        Persistent workers may have begun the pass already. Otherwise the index source gets the position of the pass
        before the workers start, because they request indices at once. The samplers are seeded when the first index is
        requested, which is after torch has drawn the seed of its workers: see :meth:`Position.begin`.
        """
        if self.persistent_workers or self.background or self.decode is not None:
            self.close()  # workers and decoders serve one pass at a time; two passes would share one dataset
        if self.probed:
            self._watch_over_workers().pass_begins(self, self._passes.latest)
        resume = self._passes.take_resume(self.order)
        position = None
        if resume is None:
            position = self._passes.take_begun(self.order, self._iterator)
        if position is None:
            position = self._new_position(resume)
            self._passes.give_out(position, self._configuration())
            with own_forks():
                maker = self._maker(position)
            position.begin(self._index.samplers)  # no effect if torch has requested an index already
        else:
            self._passes.give_out(position, self._configuration())
            self._draw_seed()
            workers: Any = self._iterator
            maker = TorchBatches(workers, position)
        self._passes.latest = position
        batches = self._with_later_stages(maker, position)
        self._live = weakref.ref(batches)
        return batches

    def _watch_over_workers(self) -> "AddedWorkers":
        if self._added is None:
            from lightning_feed.load.probe import AddedWorkers

            self._added = AddedWorkers()
        return self._added

    def give_up_workers(self) -> None:
        """Make batches without workers from the next pass on."""
        # Torch refuses to change some of these attributes in the usual way.
        vars(self).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        self.multiprocessing_context = None
        self.probed = False

    def _with_later_stages(self, maker: Maker, position: Position) -> LoaderPass:
        stages: list[Stage] = [maker]
        background = None
        if self.background:
            from lightning_feed.load.ahead import BackgroundIterator

            background = BackgroundIterator(maker, self.background)
            stages.append(background)
        if self.decode is not None:
            stages.append(Decoding(self.decode, stages[-1], self._under_way()))
        substitutes = NO_SUBSTITUTES
        if self.probed and self.num_workers:
            substitutes = self._watch_over_workers().substitutes(self)
        return LoaderPass(stages, maker, position, background, self.watch, substitutes)

    def may_draw_again(self) -> bool:
        """Return True if the samplers are known to repeat the order of the latest pass from their states at its
        start."""
        latest = self._passes.latest
        if latest is None or not self._keeps_order():
            return False
        starts = latest.samplers
        return all(draws_again(sampler, starts[name]) for name, sampler in self._index.samplers.items())

    def close(self) -> None:
        """End the current pass, if any, and its threads."""
        if self._live is None:
            return
        live = self._live()
        if live is not None:
            live.close()

    def state_dict(self) -> State:
        """Return the position of the latest pass, in yielded batches. Never raises. ``"exact"`` is False if an exact
        resume is not possible."""
        return self._passes.state().to_dict()

    def _configuration(self) -> LoaderState:
        """Return the state before any pass."""
        return LoaderState(
            kind="iterable" if self._is_stream else "map",
            seed=None if self.order is None else self.order.seed,
            epoch=None,
            cycle=0,
            batches=0,
            samplers={},
            ranks=ranks_of_run(),
            batch_size=_batch_size_of(self),
            samples=None if self._is_stream else size_of(self.dataset),
            drawn=None,
            sample_seed=None,
            exact=self._keeps_order(),
        )

    def _keeps_order(self) -> bool:
        return self.in_order or self.num_workers < 2

    def state_at_end(self, state: State) -> State:
        """Return ``state`` of a finished epoch as the state at the start of the next one."""
        saved = LoaderState.from_dict(state)
        if not saved.begun:
            return state
        samplers = {name: state_of_sampler(sampler) for name, sampler in self._index.samplers.items()}
        return saved.next_epoch(samplers).to_dict()

    def load_state_dict(self, state: State) -> None:
        """Resume from ``state`` with the next pass. Closes the current pass, and ends persistent workers.

        Args:
            state: result of ``state_dict()``.

        Raises:
            ResumeError: the state is damaged, or was saved in the middle of an epoch and the dataset is a stream, or
                the number of ranks, batch size, dataset length or sampler differs.
        """
        saved = LoaderState.from_dict(state)
        # Checked here, not in iter(), whose errors are hidden by an error from Lightning's teardown.
        if saved.batches and not is_stale(saved, self.order):
            samplers = dict.fromkeys(self._index.samplers, SamplerState())
            refuse_changes(saved, replace(self._configuration(), samplers=samplers))
            if not saved.exact:
                logger.warning(
                    "The loader state in the checkpoint is not exact, because workers yielded batches in any order: "
                    "some samples of this epoch may be trained twice, or not at all."
                )
        self.close()
        self._iterator = None  # torch ends the workers when their iterator is garbage-collected
        self._live = None
        if self.order is not None and saved.seed is not None:
            self.order.seed = saved.seed  # later epochs must repeat those of the interrupted run, too
        self._passes.resume_from(saved)

    def check_worker_number_rationality(self) -> None:
        """Issue torch's warning about more worker processes than CPUs."""
        if self.workers == "process":
            DataLoader.check_worker_number_rationality(self)

    def __getstate__(self) -> State:
        # ddp_spawn pickles loaders. A pass cannot be pickled, but its position can.
        return self.__dict__ | {"_live": None, "_iterator": None, "_passes": self._passes.without_pass()}

    def _new_position(self, resume: LoaderState | None) -> Position:
        """Make the position of a new pass, which may resume from a state."""
        epoch, cycle = self._passes.next_epoch(self.order) if resume is None else (resume.epoch, resume.cycle)
        ahead = self._under_way()
        checked = self._keeps_order() and not self._is_stream
        position = Position(self.order, epoch=epoch, cycle=cycle, resume=resume, ahead=ahead, checked=checked)
        if self.order is not None and self._may_begin_next_epoch():
            position.next_epoch = self.order.next_epoch
        return position

    def _under_way(self) -> int:
        """Return the number of batches that the workers may have begun."""
        return self.num_workers * (self.prefetch_factor or 1)

    def _may_begin_next_epoch(self) -> bool:
        """Return True if the workers may make the first batches of the next epoch before it begins.

        They may only if nothing that these batches depend on can change in between.
        """
        if self.order is None or not self.persistent_workers or self.workers != "process" or not self._keeps_order():
            return False
        if not all(map(is_ours, self._index.samplers.values())):
            return False
        if self._refers_to_shared is None:
            from lightning_feed.load.shared_objects import refers_to_shared

            self._refers_to_shared = bool(refers_to_shared(self))
        return not has_set_epoch(self.dataset) and not self._refers_to_shared

    def _maker(self, position: Position) -> Maker:
        """Make the first stage of a pass."""
        if self._is_stream:
            if isinstance(self.dataset, IterDataPipe):  # torch shards and seeds DataPipes by their class
                return TorchBatches(super().__iter__(), position)
            see = self._watch_for_repeats(position)
            inner = stream_loader(self, position.seed_for("workers"))
            return TorchBatches(iterator_of(self, inner, self._workers_start), position, see)
        self._draw_seed()
        if self._has_own_workers:
            return self._own_workers(position)
        inner = map_loader(self, self._index)
        return TorchBatches(iterator_of(self, inner, self._workers_start), position)

    def _watch_for_repeats(self, position: Position) -> Callable[[Batch], None] | None:
        """Return a function that compares the first batches of the workers, all of which may give the same samples.
        Returns None if there is nothing to compare, or if this was done before."""
        is_known = self._repeats is not None and self._repeats.is_settled
        if is_known or position.epoch or rank_of_run() or not may_repeat(self):
            return None
        name = "This loader" if self.watch is None else self.watch.name
        self._repeats = RepeatsWarning(name, self.num_workers)
        return self._repeats.see

    def _draw_seed(self) -> None:
        """Draw the seed that the replaced loader, if there is one, would draw for its workers."""
        if self.draws is not None and not self.draws.is_unused:
            with drawing_device(self.draws.generator):
                self.draws.draw_seed()

    def _own_workers(self, position: Position) -> OwnPass:
        # Drawn at the same point as DataLoader's worker seed, from the same generator.
        with drawing_device(self.generator):
            base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        seed = position.seed_for("samples")
        if seed is None:
            seed = mix_seed(base_seed, 1, 0, "samples")
            if position.origin is not None and position.origin.sample_seed is not None:
                seed = position.origin.sample_seed
            position.sample_seed = seed
        indices = iter(self._index)
        if isinstance(self.workers, RayCluster):
            from lightning_feed.load.ray_workers import RayPass, RemotePlan

            plan: Any = self._iterator or RemotePlan(self, self.workers)
            self._iterator = None
            if self.persistent_workers:
                self._iterator = plan  # Lightning ends the workers in this attribute
            return RayPass(self, indices, first=position.batches, seed=seed, plan=plan)
        from lightning_feed.load.threads import ThreadPass

        probe = not self._has_tried_threads
        self._has_tried_threads = True
        return ThreadPass(self, indices, first=position.batches, seed=seed, probe=probe)

    def _workers_start(self, inner: DataLoader[Batch]) -> None:
        """Prepare the inner loader, whose workers are about to start."""
        if self.hand_over == "slots":
            use_slots(inner, held=self.background)
        if self.probed and not self._is_stream:
            self._watch_over_workers().workers_start(self)


def _check_own_workers(loader: FeedLoader) -> None:
    """Raise SettingsError if worker threads or Ray cannot load the dataset. Warn of what they leave out."""
    name = "ray" if isinstance(loader.workers, RayCluster) else loader.workers
    if loader._is_stream:
        raise SettingsError(
            f"workers={name!r} cannot load {type(loader.dataset).__name__}, an IterableDataset: "
            "get_worker_info() is None in these workers, so it cannot divide its samples. Use "
            "workers='process', or LoaderSettings(num_workers=0, background=2), which reads it in one thread."
        )
    function = getattr(loader.worker_init_fn, "func", loader.worker_init_fn)
    # seed_everything(workers=True) makes Lightning set a function. It is not needed: each sample has a generator.
    if function is not None and getattr(function, "__name__", "") != "pl_worker_init_function":
        logger.warning(
            "worker_init_fn=%r is not called with workers=%r: it would change the "
            "training process, or a process that serves other loaders too. Keep the state of each worker "
            "in a threading.local().",
            function,
            name,
        )


def _batch_size_of(loader: FeedLoader) -> int | None:
    """Return the batch size, which must not change within an epoch. Returns None if it is not known."""
    batches: Any = loader.batch_sampler
    if batches is None:
        return loader.batch_size
    size = getattr(batches, "batch_size", None)
    if type(size) is not int or (type(batches) is not BatchSampler and hasattr(batches, "state_dict")):
        return None  # it may change from batch to batch; the sampler's state holds it
    return size
