"""Position, the position of one pass over a loader; and IndexSource, the source of the pass's remaining indices."""

import copy
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_feed.errors import ResumeError
from lightning_feed.load.kinds import AnySampler, Index, State
from lightning_feed.load.order import (
    DrawsOf,
    EpochOrder,
    PassGenerator,
    drawing_device,
    mix_seed,
    no_epoch,
    rank_of_run,
    size_of,
)
from lightning_feed.load.resume import OTHER_ORDER, LoaderState, SamplerState

_UNKNOWN = SamplerState()


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
        sampler: Any = waiting.pop(0)
        if sampler is None or id(sampler) in seen or isinstance(sampler, (list, tuple, range)):
            continue
        seen.add(id(sampler))
        kind = type(sampler).__name__
        number = sum(name.startswith(f"{kind}#") for name in named)
        named[f"{kind}#{number}"] = sampler
        waiting += [getattr(sampler, name, None) for name in ("sampler", "batch_sampler", "_batch_sampler")]
        if isinstance(sampler, DistributedSampler):
            waiting.append(getattr(sampler.dataset, "_sampler", None))
    return named


def state_of_sampler(sampler: AnySampler) -> SamplerState:
    """Return the state that a sampler keeps between epochs: its own state, and the state of the user's generator."""
    own = None
    if _has_state(sampler):
        own = copy.deepcopy(sampler.state_dict())
    generator = getattr(sampler, "generator", None)
    if type(generator) is not torch.Generator:
        return SamplerState(own=own)
    return SamplerState(own=own, generator=generator.get_state())


def draws_again(sampler: AnySampler, start: SamplerState) -> bool:
    """Return True if a sampler is known to draw the same order again from its state at the start of a pass."""
    if type(sampler) in (SequentialSampler, BatchSampler):
        return True
    return any(value is not None for value in (start.epoch, start.seed, start.generator, start.own))


def is_ours(sampler: AnySampler) -> bool:
    """Return True for a sampler of torch or Lightning whose order depends only on an :class:`EpochOrder`."""
    if isinstance(sampler, DistributedSampler):  # or Lightning's wrapper, a subclass
        return type(sampler).__module__.partition(".")[0] in ("torch", "lightning", "pytorch_lightning")
    generator = getattr(sampler, "generator", None)
    own = generator is None or isinstance(generator, PassGenerator)
    return type(sampler) in (SequentialSampler, BatchSampler) or (type(sampler) is RandomSampler and own)


def draws_same_order(sampler: AnySampler) -> bool:
    """Return True for a sampler that draws the same order in each epoch."""
    if isinstance(sampler, DistributedSampler):
        return not sampler.shuffle
    return type(sampler) in (SequentialSampler, BatchSampler)


def _has_state(sampler: AnySampler) -> bool:
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def checksum(index: Index, before: int | None) -> int | None:
    """Update ``before``, the CRC-32 of all sample numbers drawn so far, by those in ``index``.

    Returns None if any index so far was neither a number nor a list of numbers.
    """
    if before is None or isinstance(index, Tensor):
        return None
    numbers = index if isinstance(index, (list, tuple)) else (index,)
    try:
        return zlib.crc32(array("q", numbers), before)
    except (TypeError, OverflowError):
        return None


class Position:
    """One pass over a loader: the number of its batches, and the seeds of its order.

    Args:
        order: seeds the order; None to use torch's global generator, as a DataLoader does.
        epoch: epoch of this pass; None without an order.
        cycle: number of passes of the same epoch before this one.
        resume: the state to resume from; None to start from the beginning.
        ahead: number of batches whose indices are kept for :meth:`index_of`.
        checked: True to keep a checksum of the sample numbers, by which a resumed pass checks that it repeats their
            order. False if batches come in any order.
    """

    def __init__(
        self,
        order: EpochOrder | None,
        *,
        epoch: int | None,
        cycle: int = 0,
        resume: LoaderState | None = None,
        ahead: int = 1,
        checked: bool = True,
    ) -> None:
        self.order = order
        self.epoch = epoch
        self.cycle = cycle
        self.origin = resume
        self.batches = 0
        self.ended = False
        """True once the data have ended."""
        self.may_begin_again = True
        """False for the rest of a pass of another loader: no later pass resumes where it began."""
        self.refusal: ResumeError | None = None
        """The error that ends a resumed pass. Not raised by ``iter()``, because Lightning's teardown would hide it."""
        self.samplers: dict[str, SamplerState] = {}
        """The states of the samplers at the start of the pass."""
        self.drawn: int | None = None
        """The checksum of the samples yielded in this pass. None if the samples are not checked."""
        self.sample_seed: int | None = None
        """The seed of the samples' random numbers; None if it follows from the order, or if the workers draw it."""
        self.requested = 0
        """The number of indices of this pass that were requested in this process, one for each batch. 0 for a
        stream."""
        self.before = 0
        """The number of indices of earlier passes that the same torch iterator had requested."""
        self.next_epoch: Callable[[int], int | None] = no_epoch
        """Called when all indices of the pass have been given out: see :class:`EpochOrder`."""
        self.followed = False
        """True once :meth:`next_pass` has returned a pass, whose indices follow the indices of this pass."""
        self._drawn_ahead: deque[int | None] = deque()
        self._recent: deque[Index] = deque(maxlen=max(1, ahead))
        self._begun = False
        if checked:
            self.drawn = 0
        if resume is not None:
            self.batches = resume.batches
            self.drawn = resume.drawn if checked else None

    def count_yielded(self) -> None:
        """Count a yielded batch."""
        self.batches += 1
        if self._drawn_ahead:
            self.drawn = self._drawn_ahead.popleft()

    def note(self, index: Index) -> None:
        """Count a requested index."""
        self.requested += 1
        self._recent.append(index)
        if self.drawn is None:
            return
        before: int | None = self.drawn
        if self._drawn_ahead:
            before = self._drawn_ahead[-1]
        self._drawn_ahead.append(checksum(index, before))

    def seed_for(self, stream: str) -> int | None:
        """Derive a seed for one use of randomness in this pass. Returns None without an order."""
        if self.order is None or self.epoch is None:
            return None
        return mix_seed(self.order.seed, self.epoch, self.cycle, stream)

    @property
    def is_over(self) -> bool:
        """True if all batches were yielded, even without a StopIteration: Lightning stops at the loader's length."""
        yielded = self.batches
        if self.origin is not None:
            yielded -= self.origin.batches
        return self.ended or (self.followed and yielded == self.requested)

    def next_pass(self) -> "Position | None":
        """Return the pass whose indices follow directly after the indices of this pass. Returns None if no pass
        follows."""
        if self.epoch is None or self.refusal is not None:
            return None
        epoch = self.next_epoch(self.epoch)
        if epoch is None:
            return None
        following = Position(self.order, epoch=epoch, ahead=self._recent.maxlen or 1, checked=self.drawn is not None)
        following.before = self.before + self.requested
        following.next_epoch = self.next_epoch
        self.followed = True
        return following

    def index_of(self, number: int) -> Index:
        """Return the ``number``-th requested index, from 0. Returns None if this index is no longer kept."""
        back = self.requested - number
        if 0 < back <= len(self._recent):
            return self._recent[-back]
        return None

    def newest(self) -> Index:
        """Return the last requested index. Returns None if no index was requested."""
        return self.index_of(self.requested - 1)

    def skip_trained(self, indices: Iterator[Index]) -> Iterator[Index]:
        """Return ``indices`` without those of the batches that were trained before the checkpoint.

        If the checksum of the skipped samples is not the one in the checkpoint, sets :attr:`refusal` and returns no
        indices.
        """
        if self.origin is None:
            return indices
        drawn: int | None = 0
        for index in islice(indices, self.origin.batches):
            drawn = checksum(index, drawn)
        if self.drawn is None:
            return indices
        # A checkpoint holds only the first rank's state, so the other ranks cannot compare their samples.
        if drawn is not None and drawn != self.drawn and rank_of_run() == 0:
            self.refusal = ResumeError(OTHER_ORDER)
            return iter(())
        self.drawn = drawn
        return indices

    def begin(self, samplers: Mapping[str, AnySampler]) -> None:
        """Seed, restore and record the samplers. Runs once, before the first index is drawn.

        Not earlier: building a torch iterator draws the workers' base seed from the user's generator unless persistent
        workers are alive. The generator's state is the same in a resumed run only after this draw.
        """
        if self._begun:
            return
        self._begun = True
        saved: Mapping[str, SamplerState] = {} if self.origin is None else self.origin.samplers
        for name, sampler in samplers.items():
            self.samplers[name] = self._begin_sampler(name, sampler, saved.get(name, _UNKNOWN))

    def _begin_sampler(self, name: str, sampler: AnySampler, saved: SamplerState) -> SamplerState:
        epoch = self._set_epoch(sampler, saved)
        if saved.own is not None and _has_state(sampler):
            sampler.load_state_dict(copy.deepcopy(saved.own))
        generator = getattr(sampler, "generator", None)
        if type(generator) is torch.Generator and saved.generator is not None:  # the user's own: never reseeded
            generator.set_state(saved.generator)
        start = state_of_sampler(sampler)
        seed = None
        if start.generator is None and isinstance(sampler, Sampler) and hasattr(sampler, "generator"):
            seed = self._seed_sampler(name, sampler, saved.seed)
        return SamplerState(epoch=epoch, seed=seed, generator=start.generator, own=start.own)

    def _seed_sampler(self, name: str, sampler: AnySampler, seed: int | None) -> int | None:
        """Give a generator of ours to a sampler, with the seed of the checkpoint, if any. Returns the seed."""
        if seed is None:
            seed = self._draw_seed(name, sampler)
        if seed is not None:
            # A new generator, not the old one reseeded, because an older pass may still be drawing from the old one.
            sampler.generator = PassGenerator().manual_seed(seed)
        return seed

    def _set_epoch(self, sampler: AnySampler, saved: SamplerState) -> int | None:
        """Call ``set_epoch`` of a sampler that has this method. Returns the sampler's epoch, or None if not known.

        Lightning calls ``set_epoch`` only after the first ``iter()``, too late for indices already sent to workers.
        """
        if not callable(getattr(sampler, "set_epoch", None)):
            return None
        epoch = self.epoch
        if self.order is None:
            epoch = saved.epoch
        if epoch is None:
            present = getattr(sampler, "epoch", None)
            return present if type(present) is int else None
        sampler.set_epoch(epoch)
        return epoch

    def _draw_seed(self, name: str, sampler: Sampler[Index]) -> int | None:
        seed = self.seed_for(name)
        if seed is None and isinstance(sampler, RandomSampler):
            # Without a generator, RandomSampler.__iter__ draws this seed itself, so the order is that of a plain
            # DataLoader. Drawn here, the seed can be recorded.
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        return seed


class IndexSource:
    """Source of indices for torch's iterator: draws from the loader's samplers, and skips indices of batches that were
    trained before a resume.

    A loader keeps one IndexSource for its whole life, because the iterators of persistent workers call ``iter()`` on it
    for every pass. Torch also begins and drops one iteration at each start of workers. That has no effect, since
    nothing happens before the first index is drawn.

    The indices of the next pass may follow directly after those of the current pass, so that workers begin the next
    pass before the training loop asks for it.

    Args:
        inner: ``loader.batch_sampler``, or ``loader.sampler`` if there is no batch sampler.
        samplers: result of :func:`find_samplers`.
        draws: random draws of the loader that is replaced; None if no loader is replaced.

    Attributes:
        position: the pass that the loader began last.
        following: later passes whose indices have already been given out, in part or all.
    """

    def __init__(
        self,
        inner: AnySampler,
        samplers: Mapping[str, AnySampler],
        draws: DrawsOf | None = None,
    ) -> None:
        self.inner = inner
        self.samplers = samplers
        self.position: Position | None = None
        self.following: deque[Position] = deque()
        self.draws = draws

    def __iter__(self) -> Iterator[Index]:
        self.following.clear()
        return self._walk(self.position)

    def __len__(self) -> int:
        return len(self.inner)

    def _walk(self, position: Position | None) -> Iterator[Index]:
        assert position is not None, "indices were drawn outside of a pass"
        if self.draws is not None and self.draws.is_unused:
            return
        yield from self._indices_of(position)
        while (following := position.next_pass()) is not None:
            position = following
            self.following.append(position)
            yield from self._indices_of(position)

    def _indices_of(self, position: Position) -> Iterator[Index]:
        position.begin(self.samplers)
        generators = [getattr(sampler, "generator", None) for sampler in self.samplers.values()]
        device = drawing_device(next(filter(None, generators), None))
        drawn = iter(self.inner)
        if self.draws is not None:
            drawn = self.draws.walk(drawn, size_of(self.inner))
        indices = position.skip_trained(drawn)
        while True:
            with device:  # entered for each index: without workers, samples are loaded in between
                try:
                    index = next(indices)
                except StopIteration:
                    return
            position.note(index)
            yield index
