"""Collating: replacing unreadable samples and dropping keys."""

import contextlib
import copy
import dataclasses
import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch.utils.data import default_collate, get_worker_info

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.counts import SharedCounts
from lightning_feed.load.kinds import Batch, Sample
from lightning_feed.wording import plural

logger = logging.getLogger(__name__)

OnError: TypeAlias = Literal["raise", "skip", "substitute"]
_STEP = 7919
"""Number of samples between an unreadable sample and its substitute: neighbours of a broken file are often broken too.
A prime, so that repeated steps reach all samples, unless the number of samples is a multiple of this prime."""


@dataclass(frozen=True)
class Skipped:
    """Placeholder of a skipped sample until its batch is collated."""

    index: int


class BadSamples:
    """The policy for unreadable samples, and their count.

    Args:
        on_error: ``"raise"`` ends the run at the first bad sample. ``"skip"`` repeats another sample of the batch
            instead; ``"substitute"`` takes another sample of the dataset. Both keep the batch size.
        max_failures: limit for ``"skip"`` and ``"substitute"``, over all workers and epochs of this rank.

    Raises:
        SettingsError: a value is invalid.
    """

    def __init__(self, on_error: OnError = "raise", max_failures: int = 100) -> None:
        if on_error not in ("raise", "skip", "substitute"):
            raise SettingsError(f"on_error={on_error!r} is not valid. Use 'raise', 'skip' or 'substitute'.")
        if isinstance(max_failures, bool) or not isinstance(max_failures, int) or max_failures < 0:
            raise SettingsError(f"max_failures={max_failures!r} is not valid. Use a whole number, 0 or more.")
        self.on_error = on_error
        self.max_failures = max_failures
        self._counts = SharedCounts("failed")
        self._key = uuid.uuid4().hex
        _known[self._key] = self

    @property
    def failures(self) -> int:
        """Number of unreadable samples so far. A sample that fails in two epochs counts twice."""
        return self._counts.as_dict().get("failed", 0)

    def instead(self, index: int, error: DatasetError, size: int, read: Callable[[int], Sample]) -> Sample:
        """Return a replacement for sample ``index``, or raise its error.

        Args:
            index: index of the failed sample.
            error: the error raised for this sample.
            size: number of samples in the dataset.
            read: reads one sample, or raises a DatasetError.

        Raises:
            DatasetError: ``error`` itself if there is no replacement, or another if too many samples have failed.
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
        logger.warning("%s on_error=%r: the run goes on. Unreadable samples so far: %d", error, self.on_error, failures)
        if failures > self.max_failures:
            raise DatasetError(
                f"{plural(failures, 'sample')} could not be read (max_failures={self.max_failures}). The last "
                f"error: {error} "
                "Fix the data, or raise max_failures."
            )


# For workers that share no memory with the training process:
_known: weakref.WeakValueDictionary[str, BadSamples] = weakref.WeakValueDictionary()
_relay: list[tuple[str, str]] | None = None


def is_relayed() -> bool:
    """Return True in a process whose reports of unreadable samples are collected: a trial's, or a Ray worker."""
    return _relay is not None


@contextlib.contextmanager
def relayed() -> Iterator[list[tuple[str, str]]]:
    """Collect reports of unreadable samples. :func:`count_relayed` counts these reports in the training process."""
    global _relay
    reports: list[tuple[str, str]] = []
    _relay = reports
    try:
        yield reports
    finally:
        _relay = None


def count_relayed(reports: list[tuple[str, str]]) -> None:
    """Count the unreadable samples reported by a worker without shared memory.

    Raises:
        DatasetError: too many samples have failed.
    """
    for key, error in reports:
        if key in _known:
            _known[key]._count(error)


def fill_skipped(samples: list[Sample]) -> list[Sample]:
    """Replace skipped samples with the other samples of the batch, in turn.

    Raises:
        DatasetError: all samples were skipped.
    """
    good = [sample for sample in samples if not isinstance(sample, Skipped)]
    if len(good) == len(samples):
        return samples
    if not good:
        skipped = ", ".join(str(sample.index) for sample in samples[:10])
        if len(samples) > 10:
            skipped += ", ..."
        raise DatasetError(
            f"None of the {len(samples)} samples of a batch could be read (samples {skipped}), so the batch is empty. "
            "Fix the data, use larger batches, or set on_error='substitute'."
        )
    substitutes = itertools.cycle(good)
    return [next(substitutes) if isinstance(sample, Skipped) else sample for sample in samples]


def check_drop_keys(keys: Any, owner: str) -> tuple[str, ...]:
    """Return ``keys`` as a tuple.

    Raises:
        SettingsError: ``keys`` is a plain string, each letter of which would be taken for a key.
    """
    if isinstance(keys, str):
        raise SettingsError(f"{owner}(drop_keys={keys!r}) would be read as a list of letters. Write ({keys!r},).")
    return tuple(keys)


def drop(batch: Batch, keys: frozenset[str]) -> Batch:
    """Return ``batch`` without the values under ``keys``, at any depth. The user's objects are not changed.

    Mappings lose the key. In named tuples and dataclasses the field becomes None, so that positions and types stay.
    Objects with their own ``.to`` are entered only if they are mappings or dataclasses.

    Raises:
        SettingsError: every key would be dropped.

    Example:
        >>> drop({"x": 1, "meta": {"path": "a.jpg", "id": 3}}, frozenset({"path"}))
        {'x': 1, 'meta': {'id': 3}}
    """
    reduced = _without(batch, keys)
    if isinstance(reduced, Mapping) and not reduced and batch:
        raise SettingsError(
            f"drop_keys={tuple(sorted(keys))!r} would drop every key of the batch: {', '.join(map(repr, batch))}. "
            "Drop only keys that the step does not read."
        )
    return reduced


def missing_keys(batch: Batch, keys: frozenset[str]) -> str | None:
    """Return a warning about keys that the first batch lacks. Returns None if the batch has all of them."""
    there = dict.fromkeys(_keys(batch))
    absent = [key for key in sorted(keys) if key not in there]
    if not absent:
        return None
    known = ", ".join(repr(key) for key in there) or "none: it is not a dict, named tuple or dataclass"
    return (
        f"drop_keys: the first batch has no {', '.join(map(repr, absent))}, so nothing is dropped there. Keys: {known}."
    )


class DroppingCollate:
    """A collate function that drops ``keys`` in the worker, before a batch is sent to the training process.

    Torch's collate function never sees the dropped mapping keys, so their values may be of any type. A user's function
    gets whole samples. The first worker warns once about keys that the first batch lacks.

    Args:
        collate: makes a batch from a list of samples; None for torch's ``default_collate``.
        keys: see :func:`drop`.
    """

    def __init__(self, collate: Callable[[Sample], Batch] | None, keys: tuple[str, ...]) -> None:
        self.collate = collate
        self.keys = frozenset(keys)
        self._looked = False

    def __call__(self, samples: list[Sample]) -> Batch:
        """Collate ``samples`` into a batch without the keys."""
        if self.collate is None:
            self._warn_once(samples)
            batch = default_collate([_without(sample, self.keys, fields=False) for sample in samples])
        else:
            batch = self.collate(samples)
            self._warn_once(batch)
        return drop(batch, self.keys)

    def _warn_once(self, batch: Batch) -> None:
        if self._looked:
            return
        self._looked = True
        warning = missing_keys(batch, self.keys)
        worker = get_worker_info()
        if warning is not None and (worker is None or worker.id == 0):
            logger.warning("%s", warning)


GONE = object()
"""Result of ``change`` in :func:`rebuild` that removes a part from a mapping."""


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _moves_itself(value: object) -> bool:
    """Check for a sequence with a ``.to``, such as a ``PackedSequence``, which must stay complete."""
    return isinstance(value, (list, tuple)) and hasattr(value, "to")


def named_parts(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, field or position. Returns None if ``value`` is not a container."""
    if isinstance(value, Mapping):
        return dict(value)
    if _is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    return None


def rebuild(container: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Rebuild a container with ``change(name, part)`` in place of each part. ``change`` may return ``GONE`` to remove
    the part from a mapping.

    Returns the container itself if nothing changes. The user's objects are not changed.
    """
    parts = named_parts(container) or {}
    new_parts = {name: change(name, part) for name, part in parts.items()}
    changed = {name: part for name, part in new_parts.items() if part is not parts[name]}
    if not changed:
        return container
    if isinstance(container, Mapping):
        return _rebuilt_mapping(container, new_parts)
    kind: Any = type(container)
    if isinstance(container, (list, tuple)):
        if hasattr(container, "_fields"):
            return kind(*new_parts.values())
        return kind(new_parts.values())
    copied = copy.copy(container)
    for name, part in changed.items():
        object.__setattr__(copied, name, part)  # works for frozen dataclasses too; only our copy is changed
    return copied


def _rebuilt_mapping(mapping: Mapping[Any, Any], new_parts: Mapping[Any, Any]) -> Mapping[Any, Any]:
    kept = {name: part for name, part in new_parts.items() if part is not GONE}
    if not isinstance(mapping, MutableMapping):
        kind: Any = type(mapping)
        return kind(kept)  # type: ignore[no-any-return]
    copied = copy.copy(mapping)  # keeps other attributes of a user's mapping
    for name in new_parts.keys() - kept.keys():
        del copied[name]
    copied.update(kept)
    return copied


def _without(value: Any, keys: frozenset[str], *, fields: bool = True) -> Any:
    """Remove ``keys`` from a value. With ``fields``, also set named-tuple and dataclass fields to None."""
    is_mapping = isinstance(value, Mapping)
    if _moves_itself(value) or (not fields and _is_dataclass(value)):
        return value

    def without(name: object, part: object) -> object:
        if name in keys and is_mapping:
            return GONE
        if name in keys and fields:
            return None
        return _without(part, keys, fields=fields)

    return rebuild(value, without)


def _keys(value: object) -> Iterator[object]:
    if _moves_itself(value):
        return
    parts = named_parts(value) or {}
    if not isinstance(value, (list, tuple)) or hasattr(value, "_fields"):
        yield from parts
    for part in parts.values():
        yield from _keys(part)
