"""Skipped samples and dropped keys."""

import contextlib
import copy
import dataclasses
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.utils.data import default_collate, get_worker_info

from lightning_feed.decode.counts import SharedCounts
from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.kinds import Batch, Sample

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
_STEP = 7919
"""Distance to a substitute: files beside a broken one are often broken too. A prime, so that the steps go through all
samples, unless their number is a multiple of it."""


@dataclass(frozen=True)
class Skipped:
    """Placeholder of a skipped sample until its batch is collated."""

    index: int


class BadSamples:
    """The policy for samples that cannot be read, and their count.

    Args:
        on_error: ``"raise"`` ends the run at the first. ``"skip"`` gives the place in the batch to another sample of
            the same batch; ``"substitute"`` gives it to another sample of the dataset. Both keep the batch size.
        max_failures: with ``"skip"`` and ``"substitute"``, how many are too many, over all workers and epochs of this
            rank.

    Raises:
        SettingsError: for values that are no choice.
    """

    def __init__(self, on_error: OnError = "raise", max_failures: int = 100) -> None:
        if on_error not in ("raise", "skip", "substitute"):
            raise SettingsError(f"on_error={on_error!r} is not a choice. Give 'raise', 'skip' or 'substitute'.")
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
            raise SettingsError(f"max_failures={max_failures!r} is not possible. Give a whole number, 0 or more.")
        self.on_error, self.max_failures = on_error, max_failures
        self._counts = SharedCounts("failed")
        self._key = uuid.uuid4().hex
        _known[self._key] = self

    @property
    def failures(self) -> int:
        """Number of unreadable samples so far; one that fails in two epochs counts twice."""
        return self._counts.as_dict().get("failed", 0)

    def instead(self, index: int, error: DatasetError, size: int, read: Callable[[int], Sample]) -> Sample:
        """A replacement for sample ``index``, or the error.

        Args:
            index: of the sample that failed.
            error: why.
            size: samples in the dataset.
            read: reads one sample, or raises a DatasetError.

        Raises:
            DatasetError: ``error`` itself, or that there have been too many.
        """
        if self.on_error == "raise":
            raise error
        self._count(str(error))
        if self.on_error == "skip":
            return Skipped(index)
        for step in range(1, size):
            other = (index + step * _STEP) % size
            if other == index:
                break
            try:
                return read(other)
            except DatasetError as next_error:
                self._count(str(next_error))
        raise error

    def _count(self, error: str) -> None:
        if _relay is not None:
            _relay.append((self._key, error))
            return
        self._counts.add("failed")
        failures = self.failures
        logger.warning("%s on_error=%r: the run goes on. (%d so far)", error, self.on_error, failures)
        if failures > self.max_failures:
            raise DatasetError(
                f"{failures} samples could not be read (max_failures={self.max_failures}). The last error: {error} "
                "Fix the data, or raise max_failures."
            )


# For workers that share no memory with the training process:
_known: weakref.WeakValueDictionary[str, BadSamples] = weakref.WeakValueDictionary()
_relay: list[tuple[str, str]] | None = None


@contextlib.contextmanager
def relayed() -> Iterator[list[tuple[str, str]]]:
    """Collect unreadable samples for :func:`count_relayed` in the training process, instead of counting them here."""
    global _relay
    found: list[tuple[str, str]] = []
    _relay = found
    try:
        yield found
    finally:
        _relay = None


def count_relayed(found: list[tuple[str, str]]) -> None:
    """Count unreadable samples that a worker without shared memory found.

    Raises:
        DatasetError: there have been too many.
    """
    for key, error in found:
        if key in _known:
            _known[key]._count(error)


def fill_skipped(samples: list[Sample]) -> list[Sample]:
    """The samples of a batch, with skipped ones replaced by others of the batch, in turn.

    Raises:
        DatasetError: when all of them were skipped.
    """
    good = [sample for sample in samples if not isinstance(sample, Skipped)]
    if len(good) == len(samples):
        return samples
    if not good:
        skipped = ", ".join(str(sample.index) for sample in samples[:10]) + (", ..." if len(samples) > 10 else "")
        raise DatasetError(
            f"None of the {len(samples)} samples of a batch could be read (samples {skipped}), so nothing is left "
            "to fill it with. Fix the data, use larger batches, or set on_error='substitute'."
        )
    places = iter(range(len(samples)))
    return [good[next(places) % len(good)] if isinstance(sample, Skipped) else sample for sample in samples]


def check_drop_keys(given: Any, owner: str) -> tuple[str, ...]:
    """``given`` as a tuple of keys.

    Raises:
        SettingsError: for a plain string, whose letters would be the keys.
    """
    if isinstance(given, str):
        raise SettingsError(f"{owner}(drop_keys={given!r}) would be taken letter by letter. Write ({given!r},).")
    return tuple(given)


def drop(batch: Batch, keys: frozenset[str]) -> Batch:
    """``batch`` without the values under ``keys``, at any depth. The user's objects are not changed.

    Mappings lose the key. Named tuples and dataclasses keep the field, with None in it, so that positions and types
    stay; objects with a ``.to`` of their own are entered only where they are mappings or dataclasses.

    Raises:
        SettingsError: when nothing of the batch would be left.

    Example:
        >>> drop({"x": 1, "meta": {"path": "a.jpg", "id": 3}}, frozenset({"path"}))
        {'x': 1, 'meta': {'id': 3}}
    """
    left = _without(batch, keys)
    if isinstance(left, Mapping) and not left and batch:
        raise SettingsError(
            f"drop_keys={tuple(sorted(keys))!r} would drop every key of the batch: {', '.join(map(repr, batch))}. "
            "Drop only keys that the step does not read."
        )
    return left


def missing_keys(batch: Batch, keys: frozenset[str]) -> str | None:
    """A warning about keys that the first batch does not have; None where it has all."""
    there = dict.fromkeys(_keys(batch))
    absent = [key for key in sorted(keys) if key not in there]
    if not absent:
        return None
    known = ", ".join(repr(key) for key in there) or "none: it is no dict, named tuple or dataclass"
    return (
        f"drop_keys: the first batch has no {', '.join(map(repr, absent))}, so nothing is dropped there. Keys: {known}."
    )


class DroppingCollate:
    """A collate function that drops ``keys`` in the worker, before a batch is sent to the training process.

    Mapping keys of single samples are dropped before torch's own collate function, which then need not know how to
    collate them; a function of the user's gets whole samples. The first worker warns once of keys that the first batch
    does not have.

    Args:
        collate: makes a batch of a list of samples; None for torch's own.
        keys: as in :func:`drop`.
    """

    def __init__(self, collate: Callable[[Sample], Batch] | None, keys: tuple[str, ...]) -> None:
        self.collate = collate
        self.keys = frozenset(keys)
        self._looked = False

    def __call__(self, samples: list[Sample]) -> Batch:
        """The batch of ``samples`` without the keys."""
        batch = samples if self.collate is None else self.collate(samples)
        if not self._looked:
            self._looked = True
            worker, absent = get_worker_info(), missing_keys(batch, self.keys)
            if absent is not None and (worker is None or worker.id == 0):
                logger.warning("%s", absent)
        if self.collate is None:
            batch = default_collate([_without(sample, self.keys, fields=False) for sample in samples])
        return drop(batch, self.keys)


GONE = object()
"""Replaces a part that a mapping loses."""


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _moves_itself(value: object) -> bool:
    """Check for a sequence with a ``.to``, such as a ``PackedSequence``, which must stay complete."""
    return isinstance(value, (list, tuple)) and hasattr(value, "to")


def named_parts(value: Any) -> dict[Any, Any] | None:
    """The parts of a container by key, field or position; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if _is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return None


def rebuild(container: Any, change: Callable[[Any, Any], Any]) -> Any:
    """A container with each part replaced by ``change(name, part)``, or dropped where that returns ``GONE``.

    Returns the container itself where nothing changes. The user's objects are not changed.
    """
    parts = named_parts(container) or {}
    made = {name: change(name, part) for name, part in parts.items()}
    changed = {name: part for name, part in made.items() if part is not parts[name]}
    if not changed:
        return container
    if isinstance(container, Mapping):
        return _rebuilt_mapping(container, made)
    kind: Any = type(container)
    if isinstance(container, (list, tuple)):
        return kind(*made.values()) if hasattr(container, "_fields") else kind(made.values())
    twin = copy.copy(container)
    for name, part in changed.items():
        object.__setattr__(twin, name, part)  # frozen dataclasses too: the copy is ours
    return twin


def _rebuilt_mapping(mapping: Mapping[Any, Any], made: Mapping[Any, Any]) -> Mapping[Any, Any]:
    left = {name: part for name, part in made.items() if part is not GONE}
    if not isinstance(mapping, MutableMapping):
        kind: Any = type(mapping)
        return kind(left)  # type: ignore[no-any-return]
    twin = copy.copy(mapping)  # keeps other attributes of a mapping of the user's
    for name in made.keys() - left.keys():
        del twin[name]
    twin.update(left)
    return twin


def _without(value: Any, keys: frozenset[str], *, fields: bool = True) -> Any:
    """A value without ``keys``. ``fields``: those of named tuples and dataclasses are emptied, too."""
    mapping = isinstance(value, Mapping)
    if _moves_itself(value) or (not fields and _is_dataclass(value)):
        return value

    def left(name: object, part: object) -> object:
        if name in keys and (mapping or fields):
            return GONE if mapping else None
        return _without(part, keys, fields=fields)

    return rebuild(value, left)


def _keys(value: object) -> Iterator[object]:
    parts = {} if _moves_itself(value) else named_parts(value) or {}
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        yield from parts
    for part in parts.values():
        yield from _keys(part)
