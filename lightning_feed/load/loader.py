"""FeedLoader, a DataLoader that can resume in the middle of a pass.

Each pass builds and iterates an inner DataLoader around the same dataset, with an :class:`IndexSource` that counts
indices from the samplers. So ``dataset``, ``sampler``, ``batch_sampler`` and ``collate_fn`` stay the user's, for
Lightning to inspect and copy, and nothing private in torch is overridden. The only private attribute of DataLoader in
use is ``_iterator``, where torch keeps persistent workers and Lightning looks for them (torch 2.6 to 2.15).
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pickle import PicklingError
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe

from lightning_feed.errors import FeedError, SettingsError
from lightning_feed.load.decoding import BatchDecoder, Decoding
from lightning_feed.load.kinds import AnyDataset, Batch, State
from lightning_feed.load.loader_pass import NO_SUBSTITUTES, LoaderPass, Substitutes
from lightning_feed.load.order import (
    DrawsOf,
    EpochOrder,
    PassGenerator,
    drawing_device,
    has_set_epoch,
    mix_seed,
    rank_of_run,
    ranks_of_run,
    size_of,
)
from lightning_feed.load.position import (
    IndexSource,
    Position,
    draws_again,
    draws_same_order,
    find_samplers,
    is_ours,
    state_of_sampler,
)
from lightning_feed.load.processes import TorchBatches, shut_down_workers
from lightning_feed.load.resume import LoaderState, SamplerState, refuse_changes
from lightning_feed.load.settings import RayCluster
from lightning_feed.load.slot_loaders import use_slots
from lightning_feed.load.slots import own_forks
from lightning_feed.load.stage import Maker, OwnPass, Stage
from lightning_feed.load.streams import RepeatsWarning, may_repeat
from lightning_feed.load.worker import failed_in_worker, original_error, refuse_unsendable

if TYPE_CHECKING:  # imported only by loaders that use them
    from lightning_feed.load.probe import Probe
    from lightning_feed.load.watchdog import Watch

logger = logging.getLogger(__name__)

_LATER_LOOK = 10
"""Number of batches of the first pass after which a probed loader looks again if its dataset has changed."""
_OURS = {"self", "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"}
# All other arguments of the installed torch's DataLoader are passed to the inner loader unchanged.
_PASSED_ON = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in _OURS]


def _as_default(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the default device.

    Does nothing if ``device`` is the default already: a device context slows each call of torch, and forked workers
    inherit it.
    """
    # Read from a tensor: torch 2.6's get_default_device() raises after set_default_device(None).
    if torch.empty(0).device == device:
        return nullcontext()
    return device


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
        self._stream = isinstance(self.dataset, IterableDataset)
        self._has_own_workers = self.workers != "process" and self.num_workers > 0
        if self._has_own_workers:
            self._check_own_workers()
        inner = self.sampler if self.batch_sampler is None else self.batch_sampler
        samplers = {} if self._stream else find_samplers(self.sampler, self.batch_sampler)
        self._index = IndexSource(inner, samplers, self.draws)
        self._sample_seed: int | None = None
        self._probed = False
        self._repeats: RepeatsWarning | None = None
        self._iterator = None
        self._is_first = True
        """True if no batch was yielded before the latest pass."""
        self._probe: Probe | None = None
        """The samples as the workers make them; None if they are not compared."""
        self._refers_to_shared: bool | None = None
        """True if the dataset refers to objects that processes share; None if nobody has looked yet."""
        self._live: weakref.ref[LoaderPass] | None = None
        """The latest pass, if it is still in use."""
        self._position: Position | None = None
        """The position of the latest pass."""
        self._pending: LoaderState | None = None
        """A loaded state, from which the next pass resumes."""
        self._configuration = self._state_before_any_pass()
        """The configuration at the start of the latest pass."""

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
        if self._iterator is not None and self._has_changed():
            shut_down_workers(self._iterator)
            self._probe = None
        self._is_first = self._position is None or not self._position.batches
        resume = self._take_pending()
        position = None
        if resume is None:
            position = self._take_pass_under_way()
        if position is None:
            position = self._new_position(resume)
            self._give_out(position)
            with own_forks():
                maker = self._maker(position)
            position.begin(self._index.samplers)  # no effect if torch has requested an index already
        else:
            self._give_out(position)
            self._draw_seed()
            workers: Any = self._iterator
            maker = TorchBatches(workers, position)
        self._position = position
        batches = self._with_later_stages(maker, position)
        self._live = weakref.ref(batches)
        return batches

    def _has_changed(self) -> bool:
        """True if the dataset has changed since its workers started."""
        return self._probe is not None and self._probe.changed()

    def _look(self, taken: int) -> LoaderPass | None:
        """Look if the dataset has changed since the first pass began, before a batch of this pass.

        Lightning begins the first pass before the hooks of the first epoch, in which the program may change the
        dataset.

        Args:
            taken: number of batches taken from the pass.

        Returns:
            The pass to go on with, in place of the present one; None to go on with that.
        """
        if taken not in (0, _LATER_LOOK) or not self._has_changed():
            return None
        if not self.may_draw_again():
            logger.warning(
                "The program has changed the dataset (%s) since its worker processes started, and its sampler cannot "
                "repeat its order, so this epoch goes on without the change. Set num_workers=0.",
                type(self.dataset).__name__,
            )
            return None
        state = self.state_dict()
        shut_down_workers(self._iterator)
        if taken:
            logger.warning(
                "The program changes the dataset (%s) within an epoch, which worker processes cannot see. From batch "
                "%d on, batches are made without workers.",
                type(self.dataset).__name__,
                taken,
            )
            self._give_up_workers()
        return self._rest_from(state)

    def _recover(self, error: BaseException) -> LoaderPass | None:
        """Go on without the workers that the user has not asked for, if the user's code fails in them.

        Code may fail only there: a worker may have no processes of its own, for example. If it fails everywhere, the
        error comes again.
        """
        if not failed_in_worker(error) or isinstance(error, FeedError) or not self.may_draw_again():
            return None
        logger.warning(
            "The dataset (%s) fails in worker processes (%s), so from now on batches are made without them. If the "
            "error comes again, the workers are not its cause.",
            type(self.dataset).__name__,
            ": ".join(original_error(error)),
        )
        state = self.state_dict()
        shut_down_workers(self._iterator)
        self._give_up_workers()
        return self._rest_from(state)

    def _give_up_workers(self) -> None:
        # Torch refuses to change some of these attributes in the usual way.
        vars(self).update(num_workers=0, prefetch_factor=None, persistent_workers=False, timeout=0)
        self.multiprocessing_context = None
        self.probed = False

    def _rest_from(self, state: State) -> LoaderPass:
        """Begin a pass that yields the rest of the present one."""
        self._probe = None
        self.load_state_dict(state)
        with torch.random.fork_rng(devices=[]):  # the pass has drawn its seeds already
            return iter(self)

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
            is_looked_at = self._probe is not None and self._is_first
            substitutes = Substitutes(self._look if is_looked_at else NO_SUBSTITUTES.look, self._recover)
        return LoaderPass(stages, maker, position, background, self.watch, substitutes)

    def _give_out(self, position: Position) -> None:
        """Make the index source yield the indices of a pass, and record the present configuration."""
        self._configuration = self._state_before_any_pass()
        self._index.position = position

    def may_draw_again(self) -> bool:
        """True if the samplers are known to repeat the order of the latest pass from their states at its start."""
        if self._position is None or not self._keeps_order():
            return False
        starts = self._position.samplers
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
        return self._state().to_dict()

    def _state(self) -> LoaderState:
        if self._pending is not None:
            return self._pending
        position = self._position
        if position is None:
            return self._state_before_any_pass()
        return replace(
            self._configuration,
            epoch=position.epoch,
            cycle=position.cycle,
            batches=position.batches,
            samplers=dict(position.samplers),
            drawn=position.drawn,
            sample_seed=self._sample_seed,
        )

    def _state_before_any_pass(self) -> LoaderState:
        return LoaderState(
            kind="iterable" if self._stream else "map",
            seed=None if self.order is None else self.order.seed,
            epoch=None,
            cycle=0,
            batches=0,
            samplers={},
            ranks=ranks_of_run(),
            batch_size=self._batch_size(),
            samples=None if self._stream else size_of(self.dataset),
            drawn=None,
            sample_seed=None,
            exact=self._keeps_order(),
        )

    def _batch_size(self) -> int | None:
        """Return the batch size, which must not change within an epoch. Returns None if it is not known."""
        batches: Any = self.batch_sampler
        if batches is None:
            return self.batch_size
        size = getattr(batches, "batch_size", None)
        if type(size) is not int or (type(batches) is not BatchSampler and hasattr(batches, "state_dict")):
            return None  # it may change from batch to batch; the sampler's state holds it
        return size

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
        if saved.batches and not self._is_stale(saved):
            samplers = dict.fromkeys(self._index.samplers, SamplerState())
            refuse_changes(saved, replace(self._state_before_any_pass(), samplers=samplers))
            if not saved.exact:
                logger.warning(
                    "The loader state in the checkpoint is not exact, because workers yielded batches in any order: "
                    "some samples of this epoch may be trained twice, or not at all."
                )
        self.close()
        self._iterator = None  # torch ends the workers when their iterator is garbage-collected
        self._live = None
        self._position = None
        if self.order is not None and saved.seed is not None:
            self.order.seed = saved.seed  # later epochs must repeat those of the interrupted run, too
        self._pending = saved if saved.begun else None

    def check_worker_number_rationality(self) -> None:
        """Issue torch's warning about more worker processes than CPUs."""
        if self.workers == "process":
            DataLoader.check_worker_number_rationality(self)

    def __getstate__(self) -> State:
        # ddp_spawn pickles loaders. A pass cannot be pickled, but its position can.
        without_pass: State = {"_live": None, "_position": None, "_iterator": None, "_pending": None, "_probe": None}
        state = self._state()
        if state.begun:
            without_pass["_pending"] = state
        return self.__dict__ | without_pass

    def _is_stale(self, state: LoaderState) -> bool:
        """True if the epoch of ``state`` was complete and the run is in a later epoch."""
        return self.order is not None and state.epoch is not None and self.order.epoch() > state.epoch

    def _take_pending(self) -> LoaderState | None:
        """Return the state to resume from, and clear it. Returns None if the pass starts from the beginning."""
        state = self._pending
        self._pending = None
        if state is None:
            state = self._origin_of_unused_pass()
        if state is None or self._is_stale(state):
            return None
        return state

    def _origin_of_unused_pass(self) -> LoaderState | None:
        """Return the state from which the latest pass resumed. Returns None if that pass has yielded a batch, or did
        not resume.

        Lightning may ``iter()`` a loader twice before its first batch: the second pass resumes as well.
        """
        last = self._position
        if last is None or last.origin is None or last.ended or last.batches != last.origin.batches:
            return None
        return last.origin

    def _new_position(self, resume: LoaderState | None) -> Position:
        """Make the position of a new pass, which may resume from a state."""
        epoch, cycle = self._next_epoch() if resume is None else (resume.epoch, resume.cycle)
        ahead = self._under_way()
        checked = self._keeps_order() and not self._stream
        position = Position(self.order, epoch=epoch, cycle=cycle, resume=resume, ahead=ahead, checked=checked)
        if self.order is not None and self._may_begin_next_epoch():
            position.next_epoch = self.order.next_epoch
        return position

    def _under_way(self) -> int:
        """The number of batches that the workers may have begun."""
        return self.num_workers * (self.prefetch_factor or 1)

    def _next_epoch(self) -> tuple[int | None, int]:
        """Return epoch and cycle of a new pass."""
        if self.order is None:
            return None, 0
        epoch = self.order.epoch()
        last = self._position
        if last is None or last.epoch != epoch:
            return epoch, 0
        if last.batches:
            return epoch, last.cycle + 1
        return epoch, last.cycle

    def _may_begin_next_epoch(self) -> bool:
        """True if the workers may make the first batches of the next epoch before it begins.

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

    def _take_pass_under_way(self) -> Position | None:
        """Return the new pass if the workers have begun it already. Returns None if they have begun no pass, or a pass
        that the program does not need now."""
        last = self._position
        following = self._index.following
        if not following or last is None or not last.is_over or getattr(self._iterator, "_shutdown", True):
            return None
        position = following[0]
        begins = self._next_epoch()
        if (position.epoch, position.cycle) != begins:
            if not all(map(draws_same_order, self._index.samplers.values())):
                return None
            position.epoch, position.cycle = begins
        return following.popleft()

    def _maker(self, position: Position) -> Maker:
        """Make the first stage of a pass."""
        if self._stream:
            if isinstance(self.dataset, IterDataPipe):  # torch shards and seeds DataPipes by their class
                return TorchBatches(super().__iter__(), position)
            see = self._watch_for_repeats(position)
            return TorchBatches(self._torch_iterator(self._stream_loader(position)), position, see)
        self._draw_seed()
        if self._has_own_workers:
            return self._own_workers(position)
        return TorchBatches(self._torch_iterator(self._map_loader()), position)

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
        if self.draws is not None:
            with drawing_device(self.draws.generator):
                self.draws.draw_seed()

    def _own_workers(self, position: Position) -> OwnPass:
        # Drawn at the same point as DataLoader's worker seed, from the same generator.
        with drawing_device(self.generator):
            base_seed = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        self._sample_seed = None
        seed = position.seed_for("samples")
        if seed is None:
            seed = mix_seed(base_seed, 1, 0, "samples")
            if position.origin is not None and position.origin.sample_seed is not None:
                seed = position.origin.sample_seed
            self._sample_seed = seed
        indices = iter(self._index)
        if isinstance(self.workers, RayCluster):
            from lightning_feed.load.ray_workers import RayPass, RemotePlan

            plan: Any = self._iterator or RemotePlan(self, self.workers)
            self._iterator = None
            if self.persistent_workers:
                self._iterator = plan  # Lightning ends the workers in this attribute
            return RayPass(self, indices, first=position.batches, seed=seed, plan=plan)
        from lightning_feed.load.threads import ThreadPass

        probe = not self._probed
        self._probed = True
        return ThreadPass(self, indices, first=position.batches, seed=seed, probe=probe)

    def _torch_iterator(self, inner: DataLoader[Batch]) -> Iterator[Batch]:
        """Make the inner loader's iterator, with this loader's persistent workers if they are alive."""
        if not getattr(self._iterator, "_shutdown", False):  # if True, the workers ended in a failed pass, or just now
            inner._iterator = self._iterator
        if inner._iterator is None and inner.num_workers:
            self._workers_start(inner)
        try:
            with _as_default(drawing_device(inner.generator)):
                iterator = iter(inner)
        except (TypeError, AttributeError, PicklingError):
            context: Any = inner.multiprocessing_context or torch.multiprocessing
            refuse_unsendable(self, "This loader", context.get_start_method())
            raise
        # Kept only in this loader, where Lightning looks for it to end the workers, and not in the inner loader too.
        self._iterator = inner._iterator
        inner._iterator = None
        return iterator

    def _workers_start(self, inner: DataLoader[Batch]) -> None:
        """Prepare the inner loader, whose workers are about to start."""
        if self.hand_over == "slots":
            use_slots(inner, held=self.background)
        if self.probed and not self._stream and (self.persistent_workers or self._is_first):
            from lightning_feed.load.probe import Probe

            self._probe = Probe(self)

    def _map_loader(self) -> DataLoader[Batch]:
        options = self._passed_on() | {"collate_fn": self.collate_fn, "generator": self.generator}
        if self.batch_sampler is not None:
            return DataLoader(self.dataset, batch_sampler=self._index, **options)
        return DataLoader(self.dataset, batch_size=None, sampler=self._index, **options)

    def _stream_loader(self, position: Position) -> DataLoader[Batch]:
        generator = self.generator
        seed = position.seed_for("workers")
        if generator is None and seed is not None:
            # Torch draws the workers' base seed from this generator, so a dataset that shuffles by the base seed
            # repeats the order of an epoch.
            generator = PassGenerator().manual_seed(seed)
        options = self._passed_on() | {"collate_fn": self.collate_fn, "generator": generator}
        return DataLoader(self.dataset, batch_size=self.batch_size, drop_last=self.drop_last, **options)

    def _passed_on(self) -> State:
        return {name: getattr(self, name) for name in _PASSED_ON if hasattr(self, name)}
