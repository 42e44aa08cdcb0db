"""The order of one pass over a loader: seeded for each epoch, recorded at the start, resumed in the middle."""

import copy
import hashlib
import logging
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_feed.errors import ResumeError
from lightning_feed.load.kinds import AnyDataset, AnyLoader, AnySampler, Batch, Index, SavedState, State

logger = logging.getLogger(__name__)

STATE_VERSION = 1
"""Version of the states of loaders in checkpoints."""


class PassGenerator(torch.Generator):
    """Our generator in a sampler that the user did not seed."""

    def __reduce__(self) -> tuple[type["PassGenerator"], tuple[()]]:  # type: ignore[override]
        # Torch's own pickling would restore a plain Generator. The state is not needed: each pass makes a new
        # generator.
        return (PassGenerator, ())


class EpochOrder:
    """The source of a loader's order: one seed for the run, and the number of the current epoch.

    A loader shares this object with Lightning's copies of the loader, so they count the same epochs. All ranks need the
    same seed: a DistributedSampler divides one common order among them.

    Args:
        seed: any integer. Loading a state replaces it with the seed of the interrupted run.
        epoch: returns the number of the current epoch, from 0. Called once at the start of each pass, in the thread
            that begins the pass. Never sent to a worker, so it need not be picklable.

    Example:
        >>> order = EpochOrder(seed=7, epoch=lambda: 3)
        >>> order.seed, order.epoch()
        (7, 3)
    """

    def __init__(self, *, seed: int, epoch: Callable[[], int]) -> None:
        self.seed = seed
        self.epoch = epoch


def mix_seed(seed: int, epoch: int, cycle: int, stream: str) -> int:
    """Derive a seed in [0, 2**63) for one use of randomness in one pass.

    Hashed, because neighbouring seeds of torch's Mersenne Twister yield related first numbers, and ``seed + epoch``
    would make epoch 1 of run 0 the same as epoch 0 of run 1.

    Example:
        >>> mix_seed(0, 1, 0, "a") != mix_seed(1, 0, 0, "a")
        True
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}/{cycle}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def drawing_device(generator: object) -> torch.device:
    """Return the device of a loader's generator, or the CPU if it has no generator. Used as a context, it overrides
    ``torch.set_default_device``, under which torch's loaders and samplers fail with a CPU generator."""
    return generator.device if isinstance(generator, torch.Generator) else torch.device("cpu")


class DrawsOf:
    """The random draws of a loader and its samplers, to be repeated by a clone with other workers.

    torch draws a seed for the workers when a pass begins, unless they are alive already. With workers, indices are
    drawn past the end of the sampler. At this end, torch's RandomSampler draws once more from the user's generator.
    Without workers, a loop that knows the loader's length stops before this last draw (torch 2.6 to 2.15).

    Args:
        loader: a DataLoader.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self.generator: torch.Generator | None = loader.generator
        self.processes = loader.num_workers > 0 and getattr(loader, "workers", "process") == "process"
        self._ahead = loader.num_workers * (loader.prefetch_factor or 1) + getattr(loader, "background", 0)
        self._once = self.processes and loader.persistent_workers
        self._drawn = False

    def draw_seed(self) -> bool:
        """Draw the workers' seed for a pass. Returns False if the workers are alive already."""
        if self._once and self._drawn:
            return False
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._drawn = True
        return True

    def walk(self, indices: Iterator[Index], length: int | None) -> Iterator[Index]:
        """Yield ``indices``, drawn as far ahead as the loader draws them. Without workers, stop at ``length``."""
        if not self._ahead:
            yield from islice(indices, length)
            return
        waiting = deque(islice(indices, self._ahead))
        while waiting:
            waiting.extend(islice(indices, 1))
            yield waiting.popleft()


def ranks_of_run() -> int:
    """Number of training processes of this run."""
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def rank_of_run() -> int:
    """Rank of this training process."""
    return torch.distributed.get_rank() if ranks_of_run() > 1 else 0


def find_samplers(*roots: object) -> State:
    """Find all samplers in ``loader.sampler`` and ``loader.batch_sampler``, outermost first. Their names, such as
    ``"RandomSampler#0"``, are the same in a resumed run.

    Lightning wraps samplers in two ways: ``DistributedSamplerWrapper`` keeps the original as ``dataset._sampler``, and
    ``_IndexBatchSamplerWrapper`` keeps the batch sampler as ``_batch_sampler``.
    """
    waiting = list(roots)
    seen = set[int]()
    named = State()
    while waiting:
        found = waiting.pop(0)
        if found is None or id(found) in seen or isinstance(found, (list, tuple, range)):
            continue
        seen.add(id(found))
        kind = type(found).__name__
        named[f"{kind}#{sum(name.startswith(f'{kind}#') for name in named)}"] = found
        waiting += [getattr(found, name, None) for name in ("sampler", "batch_sampler", "_batch_sampler")]
        if isinstance(found, DistributedSampler):
            waiting.append(getattr(found.dataset, "_sampler", None))
    return named


def state_of_sampler(sampler: AnySampler) -> State:
    """Return the state that a sampler keeps between epochs: its own state, and the state of the user's generator."""
    state: State = {}
    if _has_state(sampler):
        state["sampler"] = copy.deepcopy(sampler.state_dict())
    generator = getattr(sampler, "generator", None)
    if type(generator) is torch.Generator:
        state["generator"] = generator.get_state()
    return state


def _has_state(sampler: AnySampler) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def checksum(index: Index, before: int | None) -> int | None:
    """Update the CRC-32 of all sample numbers drawn so far. None if an index is neither a number nor a list."""
    if before is None or isinstance(index, Tensor):
        return None
    try:
        return zlib.crc32(array("q", index if isinstance(index, (list, tuple)) else (index,)), before)
    except (TypeError, OverflowError):
        return None


class Pass:
    """The position of one pass over a loader.

    Args:
        order: seeds the order. None: uses torch's global generator, as in DataLoader.
        epoch: epoch of this pass; None without an order.
        cycle: number of passes of the same epoch before this one.
        resume: the state to resume from. None: start from the beginning.
    """

    def __init__(self, order: EpochOrder | None, *, epoch: int | None, cycle: int, resume: SavedState | None) -> None:
        self.order = order
        self.epoch = epoch
        self.cycle = cycle
        self.origin = resume
        self.batches: int = resume["batches"] if resume is not None else 0
        self.ended = False  # set at the end of the data
        self.exact = True
        self.refusal: ResumeError | None = None
        """The error that ends a resumed pass. Not raised by ``iter()``, because Lightning's teardown would hide it."""
        self.facts: State = {}
        """The loader's configuration, for its state."""
        self.given = 0
        """Number of indices requested in this pass, one per batch. 0 for a stream."""

    def begin(self, samplers: Mapping[str, AnySampler]) -> None:
        """Seed, restore and record the samplers. Does nothing for a stream."""

    def hand_out(self, batch: Batch) -> Batch:
        """Count a yielded batch, and return it."""
        raise NotImplementedError

    def state(self) -> State:
        """Return this pass's part of the loader's state."""
        raise NotImplementedError

    def seed_for(self, stream: str) -> int | None:
        """Derive a seed for one use of randomness in this pass. None without an order."""
        if self.order is None or self.epoch is None:
            return None
        return mix_seed(self.order.seed, self.epoch, self.cycle, stream)

    def index_of(self, number: int) -> Index:
        """Return the ``number``-th requested index, from 0. None if unknown."""

    def newest(self) -> Index:
        """Return the last requested index. None if unknown."""


class MapPass(Pass):
    """The position of one pass over a map-style dataset, and the seeds of its order.

    Args:
        order: see :class:`Pass`.
        ahead: number of batches whose indices are kept for :meth:`index_of`.
        **begun: see :class:`Pass`.
    """

    def __init__(self, order: EpochOrder | None, *, ahead: int = 1, **begun: Any) -> None:
        super().__init__(order, **begun)
        self.skip = self.batches
        self.pass_start: dict[str, State] = {}
        self.rest: Callable[[], Iterator[Index]] | None = None
        """Returns the remaining indices of a pass resumed in another configuration."""
        self.drawn: int | None = None
        """Checksum of the samples yielded in this epoch. None: not checked."""
        self._drawn_ahead: deque[int | None] = deque()
        self._recent: deque[Index] = deque(maxlen=max(1, ahead))
        self._begun = False

    def hand_out(self, batch: Batch) -> Batch:
        """Count a yielded batch."""
        self.batches += 1
        if self._drawn_ahead:
            self.drawn = self._drawn_ahead.popleft()
        return batch

    def note(self, index: Index) -> None:
        """Count a requested index."""
        self.given += 1
        self._recent.append(index)
        if self.drawn is not None:
            before = self._drawn_ahead[-1] if self._drawn_ahead else self.drawn
            self._drawn_ahead.append(checksum(index, before))

    def skip_trained(self, indices: Iterator[Index], count: int) -> Iterator[Index]:
        """Return ``indices`` without the first ``count``, which were trained before the checkpoint.

        If these differ from the samples in the checkpoint, sets :attr:`Pass.refusal` and returns no indices.
        """
        if self.drawn is None:
            return islice(indices, count, None)
        for index in islice(indices, count):
            self.drawn = checksum(index, self.drawn)
        saved = self.origin.get("drawn") if self.origin is not None else None
        # A checkpoint holds the state of the first rank.
        if None not in (saved, self.drawn) and saved != self.drawn and rank_of_run() == 0:
            self.refusal = ResumeError(
                "The sampler does not repeat the order that it had before the checkpoint, so some samples would be "
                "repeated and others missed. It was changed, or it draws from a random generator that is not in the "
                "checkpoint: give it an attribute `generator` with a torch.Generator, or the methods state_dict() and "
                "load_state_dict(). Or resume from a checkpoint that was saved at the end of an epoch."
            )
            return iter(())
        return indices

    def index_of(self, number: int) -> Index:
        """See :meth:`Pass.index_of`."""
        back = self.given - number
        return self._recent[-back] if 0 < back <= len(self._recent) else None

    def newest(self) -> Index:
        """See :meth:`Pass.newest`."""
        return self.index_of(self.given - 1)

    def state(self) -> State:
        """See :meth:`Pass.state`: seeds, generator and sampler states at the start of the pass."""
        drawn = {} if self.drawn is None else {"drawn": self.drawn}
        return {"pass_start": copy.deepcopy(self.pass_start), **self.facts, **drawn}

    def begin(self, samplers: Mapping[str, AnySampler]) -> None:
        """Seed, restore and record the samplers. Runs once, before the first index is drawn.

        Not earlier: building a torch iterator draws the workers' base seed from the user's generator unless persistent
        workers are alive. The generator's state is the same in a resumed run only after this draw.
        """
        if self._begun:
            return
        self._begun = True
        saved: Mapping[str, SavedState] = self.origin["pass_start"] if self.origin is not None else {}
        if self.origin is not None and self.origin.get("rest") == "dealt":
            self.pass_start = copy.deepcopy(self.origin["pass_start"])  # source of the remaining samples' order
            return
        for name, sampler in samplers.items():
            self.pass_start[name] = self._begin_sampler(name, sampler, saved.get(name, {}))
        for name in saved.keys() - samplers.keys():
            if saved[name]:
                logger.warning(
                    "The checkpoint holds the state of a sampler %s that this loader does not have (it has %s). The "
                    "rest of the epoch may repeat or miss samples.",
                    name.split("#")[0],
                    ", ".join(samplers),
                )

    def _begin_sampler(self, name: str, sampler: AnySampler, saved: SavedState) -> State:
        start = self._set_epoch(sampler, saved)
        if "sampler" in saved and _has_state(sampler):
            sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
        generator = getattr(sampler, "generator", None)
        if type(generator) is torch.Generator and "generator" in saved:  # the user's own: never reseeded
            generator.set_state(saved["generator"])
        start |= state_of_sampler(sampler)
        if "generator" not in start and isinstance(sampler, Sampler) and hasattr(sampler, "generator"):
            seed = saved["seed"] if "seed" in saved else self._draw_seed(name, sampler)
            if seed is not None:
                # A new generator, not the old one reseeded: an older pass may still be drawing from that.
                sampler.generator = PassGenerator().manual_seed(seed)
                start["seed"] = seed
        return start

    def _set_epoch(self, sampler: AnySampler, saved: SavedState) -> State:
        """Set the epoch of a sampler that has one. Lightning does so only after the first ``iter()``, too late for
        indices already sent to workers."""
        if not callable(getattr(sampler, "set_epoch", None)):
            return {}
        epoch = self.epoch if self.order is not None else saved.get("epoch")
        if epoch is None:
            return {"epoch": getattr(sampler, "epoch", None)}
        sampler.set_epoch(epoch)
        return {"epoch": epoch}

    def _draw_seed(self, name: str, sampler: Sampler[Index]) -> int | None:
        seed = self.seed_for(name)
        if seed is None and isinstance(sampler, RandomSampler):
            # Without a generator, RandomSampler.__iter__ draws this seed itself, so the order is that of a plain
            # DataLoader. Drawn here, the seed can be recorded.
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        return seed


def size_of(dataset: AnyDataset) -> int | None:
    """Return the number of samples in the dataset. None if it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # torch's own wrappers have __len__ and raise TypeError in it
        return None


def facts_of(loader: DataLoader[Batch], samplers: Mapping[str, AnySampler]) -> State:
    """Describe a map-style loader's configuration for its state, for comparison in a resumed run.

    Returns:
        ``world``, the number of ranks; ``shares``, the number of parts into which a DistributedSampler divides its
        order, 1 for other samplers; ``batch_size``; ``samples``, the length of the dataset, None if it has none; and
        ``order``, a recipe to draw the order again, None if unknown.
    """
    batches = loader.batch_sampler
    sampler: AnySampler = loader.sampler if batches is None else getattr(batches, "sampler", batches)
    samples = size_of(loader.dataset)
    size = 1 if batches is None else getattr(batches, "batch_size", None)
    if type(batches) is not BatchSampler and hasattr(batches, "state_dict"):
        size = None  # the size may change from batch to batch; the sampler's state holds it
    order: State | None = None
    if _can_be_drawn_again(sampler, samples):
        order = {"sampler": next((name for name, found in samplers.items() if found is sampler), "")}
        if type(sampler) is DistributedSampler:
            order = {**order, "shuffle": sampler.shuffle, "seed": sampler.seed}
    return {
        "world": ranks_of_run(),
        "shares": sampler.num_replicas if isinstance(sampler, DistributedSampler) else 1,
        "batch_size": size if isinstance(size, int) else None,
        "samples": samples,
        "order": order,
    }


def _can_be_drawn_again(sampler: AnySampler, samples: int | None) -> bool:
    kind = type(sampler)
    if kind not in (DistributedSampler, RandomSampler, SequentialSampler):
        return False
    drawn_from = sampler.dataset if kind is DistributedSampler else sampler.data_source
    if len(drawn_from) != samples:
        return False
    if kind is not RandomSampler:
        return True
    on_cpu = sampler.generator is None or sampler.generator.device.type == "cpu"
    return not sampler.replacement and sampler.num_samples == samples and on_cpu


class IndexSource:
    """Source of indices for torch's iterator: the loader's samplers, without what a resumed pass has trained on.

    A loader keeps one for its whole life, because the iterators of persistent workers call ``iter()`` on it for every
    pass. Torch also begins and drops one iteration at each start of workers. That has no effect, since nothing happens
    before the first index is drawn.

    Args:
        inner: ``loader.batch_sampler``, or ``loader.sampler`` if there is no batch sampler.
        samplers: result of :func:`find_samplers`.
        draws: random draws made by the loader being replaced. None: replaces no loader.
    """

    def __init__(
        self,
        inner: AnySampler,
        samplers: Mapping[str, AnySampler],
        draws: DrawsOf | None = None,
    ) -> None:
        self.inner = inner
        self.samplers = samplers
        self.now: MapPass | None = None
        self.draws = draws

    def __iter__(self) -> Iterator[Index]:
        return self._walk(self.now)

    def __len__(self) -> int:
        return len(self.inner)

    def _walk(self, now: MapPass | None) -> Iterator[Index]:
        assert now is not None, "indices were drawn outside of a pass"
        now.begin(self.samplers)
        generators = (getattr(sampler, "generator", None) for sampler in self.samplers.values())
        device = drawing_device(next(filter(None, generators), None))
        drawn = iter(self.inner) if self.draws is None else self.draws.walk(iter(self.inner), size_of(self.inner))
        indices = now.skip_trained(drawn, now.skip) if now.rest is None else now.rest()
        while True:
            with device:  # entered for each index: without workers, samples are loaded in between
                try:
                    index = next(indices)
                except StopIteration:
                    return
            now.note(index)
            yield index
