"""LoaderState: the position of a FeedLoader in a checkpoint, and the check that a resumed run can go on from it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_feed.errors import ResumeError
from lightning_feed.load.kinds import State

VERSION = 1
"""Version of the states of loaders in checkpoints."""
WAY_OUT = (
    "Resume with the configuration of the checkpoint until the end of this epoch. To change it, resume from a "
    "checkpoint that was saved at the end of an epoch (ModelCheckpoint(save_on_train_epoch_end=True))."
)
DAMAGED = (
    "The loader state in the checkpoint was changed after it was written, or not written by lightning_feed, so it does "
    "not say which samples were trained. Resume from another checkpoint."
)
_STREAM = (
    "The checkpoint was saved in the middle of an epoch, where an IterableDataset cannot be resumed: its place in its "
    "samples is not known. Resume from a checkpoint that was saved at the end of an epoch, or load the stream with "
    "torchdata's StatefulDataLoader, which saves the place of a stream."
)
OTHER_ORDER = (
    "The sampler does not repeat the order that it had before the checkpoint, so some samples would be repeated and "
    "others missed. It was changed, or it draws from a random generator that is not in the checkpoint: give it an "
    "attribute `generator` with a torch.Generator, or the methods state_dict() and load_state_dict(). Or resume from "
    "a checkpoint that was saved at the end of an epoch."
)


@dataclass(frozen=True, kw_only=True)
class SamplerState:
    """The state of a sampler at the start of a pass, from which it repeats its order."""

    epoch: int | None = None
    """The argument of ``set_epoch``."""
    seed: int | None = None
    """The seed of our generator in the sampler."""
    generator: Tensor | None = None
    """The state of the user's generator in the sampler."""
    own: Any = None
    """The result of the sampler's ``state_dict()``."""

    @property
    def is_sound(self) -> bool:
        """True if all values have a type and a range that a saved state can have."""
        if self.generator is not None and not _is_generator_state(self.generator):
            return False
        return _is_count(self.epoch, or_none=True) and _is_count(self.seed, or_none=True)


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The position of a FeedLoader, counted in yielded batches, and the configuration that this count belongs to."""

    kind: Literal["map", "iterable"]
    seed: int | None
    """The seed of the run's order. None if torch's global generator decides the order."""
    epoch: int | None
    cycle: int
    """The number of passes of this epoch before this one."""
    batches: int
    """The number of batches yielded in this pass. 0 at the start of an epoch, where the configuration may change."""
    samplers: Mapping[str, SamplerState]
    """The loader's samplers by name, at the start of the pass. Empty before the first pass."""
    ranks: int
    batch_size: int | None
    samples: int | None
    """The length of the dataset. None if it has no length."""
    drawn: int | None
    """The checksum of the samples yielded in this pass. None if their order is not known."""
    sample_seed: int | None
    """The seed of the samples' random numbers in worker threads, if the run has no order of its own."""
    exact: bool
    """False if the workers yield their batches in any order: the remaining samples are then not known."""

    @property
    def begun(self) -> bool:
        """True if this is the state of a pass, or of the start of the next epoch."""
        return bool(self.batches or self.samplers)

    def to_dict(self) -> State:
        """Return the state as it is saved in checkpoints."""
        samplers = {name: dict(vars(sampler)) for name, sampler in self.samplers.items()}
        return {"version": VERSION, **vars(self), "samplers": samplers}

    @classmethod
    def from_dict(cls, state: object) -> "LoaderState":
        """Read a state from a checkpoint.

        Raises:
            ResumeError: the state has another version, or was changed after it was written.
        """
        if not is_feed_state(state):
            raise ResumeError(DAMAGED)
        fields = dict(state)  # type: ignore[call-overload]  # checked by is_feed_state
        version = fields.pop("version")
        if version != VERSION:
            raise ResumeError(
                f"The loader state has version {version}, and this lightning_feed reads version {VERSION}. "
                "Resume with the version of lightning_feed that wrote the checkpoint."
            )
        try:
            fields["samplers"] = {name: SamplerState(**values) for name, values in fields["samplers"].items()}
            loaded = cls(**fields)
        except (TypeError, AttributeError, KeyError) as error:
            raise ResumeError(DAMAGED) from error
        if not loaded._is_sound():
            raise ResumeError(DAMAGED)
        return loaded

    def next_epoch(self, samplers: Mapping[str, SamplerState]) -> "LoaderState":
        """Return the state at the start of the next epoch, which begins with the sampler states ``samplers``."""
        epoch = None if self.epoch is None else self.epoch + 1
        return replace(self, epoch=epoch, cycle=0, batches=0, samplers=samplers, drawn=None, sample_seed=None)

    def _is_sound(self) -> bool:
        """Return True if all values have a type and a range that a saved state can have."""
        if type(self.kind) is not str or self.kind not in ("map", "iterable"):
            return False
        if type(self.exact) is not bool or not (self.seed is None or type(self.seed) is int):
            return False
        if not all(type(name) is str and sampler.is_sound for name, sampler in self.samplers.items()):
            return False
        return self._counts_are_sound()

    def _counts_are_sound(self) -> bool:
        if not all(map(_is_count, (self.cycle, self.batches, self.ranks))):
            return False
        optional = (self.epoch, self.batch_size, self.samples, self.drawn, self.sample_seed)
        if not all(_is_count(value, or_none=True) for value in optional):
            return False
        if not self.batches and self.drawn:
            return False
        return self.ranks > 0


def _is_count(value: object, *, or_none: bool = False) -> bool:
    if value is None:
        return or_none
    return type(value) is int and 0 <= value < 2**63


def _is_generator_state(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim == 1


def is_feed_state(state: object) -> bool:
    """Return True for the state of a ``FeedLoader``, even a damaged one."""
    return isinstance(state, Mapping) and type(state.get("version")) is int and "kind" in state


def refuse_changes(saved: LoaderState, present: LoaderState) -> None:
    """Check that a loader can go on in the middle of the epoch in which ``saved`` was saved.

    Args:
        saved: the state from the checkpoint.
        present: the state of the loader that is to go on.

    Raises:
        ResumeError: the dataset is a stream, or the configuration differs.
    """
    if "iterable" in (saved.kind, present.kind):
        raise ResumeError(_STREAM)
    changed = []
    if saved.samples != present.samples:
        changed.append(f"a dataset of {present.samples} samples instead of {saved.samples}")
    if saved.ranks != present.ranks:
        changed.append(f"{present.ranks} ranks instead of {saved.ranks}")
    if saved.batch_size != present.batch_size:
        changed.append(f"batch_size={present.batch_size} instead of {saved.batch_size}")
    if saved.samplers.keys() != present.samplers.keys():
        changed.append(f"the sampler {_names(present.samplers)} instead of {_names(saved.samplers)}")
    if changed:
        raise ResumeError(
            f"The checkpoint was saved in the middle of an epoch, and this run has {' and '.join(changed)}, so some "
            f"samples would be repeated and others missed. {WAY_OUT}"
        )


def _names(samplers: Iterable[str]) -> str:
    return ", ".join(name.removesuffix("#0") for name in samplers)
