"""Parts of a batch that nobody reads, left out before they cost a copy."""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import default_collate, get_worker_info

from lightning_feed.errors import SettingsError

logger = logging.getLogger(__name__)


def check_drop_keys(given: Any, owner: str) -> tuple[str, ...]:
    """``given`` as a tuple of keys.

    Raises:
        SettingsError: for a plain string, which would be taken letter by letter.
    """
    if isinstance(given, str):
        raise SettingsError(f"{owner}(drop_keys={given!r}) would be taken letter by letter. Write ({given!r},).")
    return tuple(given)


def drop(batch: Any, keys: frozenset[str]) -> Any:
    """``batch`` without the values under ``keys``, at any depth of nesting. The user's objects are not written to.

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
            f"drop_keys={tuple(sorted(keys))!r} leaves nothing of the batch, whose keys are "
            f"{', '.join(map(repr, batch))}. Drop only what the step does not read."
        )
    return left


def missing_keys(batch: Any, keys: frozenset[str]) -> str | None:
    """What to warn of after the first batch: keys that it does not have, and those that it has. None: it has all."""
    there = dict.fromkeys(_keys(batch))
    absent = [key for key in sorted(keys) if key not in there]
    if not absent:
        return None
    known = ", ".join(repr(key) for key in there) or "none: it is no dict, named tuple or dataclass"
    return (
        f"drop_keys: the first batch has no {', '.join(map(repr, absent))}, so nothing is dropped there. Keys: {known}."
    )


class DroppingCollate:
    """A collate function whose batches leave the worker without ``keys``: they cross neither processes nor the bus.

    Mapping keys of single samples are left out before torch's own collate function, which then need not know how to
    collate them; a function of the user's sees whole samples. Of keys that the first batch does not have, the first
    worker warns, once in its life.

    Args:
        collate: makes a batch of a list of samples; None for torch's own.
        keys: as in :func:`drop`.
    """

    def __init__(self, collate: Callable[[Any], Any] | None, keys: tuple[str, ...]) -> None:
        self.collate = collate
        self.keys = frozenset(keys)
        self._looked = False

    def __call__(self, samples: Any) -> Any:
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


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _without(value: Any, keys: frozenset[str], *, fields: bool = True) -> Any:
    """The value itself where nothing is dropped. ``fields``: whether those of named tuples and dataclasses are, too."""
    if isinstance(value, Mapping):
        kept = {key: _without(one, keys, fields=fields) for key, one in value.items() if key not in keys}
        if len(kept) == len(value) and all(kept[key] is value[key] for key in kept):
            return value
        return kept if type(value) is dict else _mapping_like(value, kept)
    if _is_dataclass(value):
        return _dataclass_without(value, keys) if fields else value
    if not isinstance(value, (list, tuple)) or hasattr(value, "to"):
        return value
    names = getattr(value, "_fields", None)
    gone = keys if fields else frozenset[str]()
    pairs = zip(names or [None] * len(value), value, strict=True)
    parts = [None if name in gone else _without(one, keys, fields=fields) for name, one in pairs]
    if all(part is one for part, one in zip(parts, value, strict=True)):
        return value
    kind: Any = type(value)
    return kind(*parts) if names is not None else kind(parts)


def _mapping_like(value: Any, kept: dict[Any, Any]) -> Any:
    made = copy.copy(value)  # keeps what a mapping of the user's has besides its values
    for key in list(value):
        if key not in kept:
            del made[key]
        elif kept[key] is not value[key]:
            made[key] = kept[key]
    return made


def _dataclass_without(value: Any, keys: frozenset[str]) -> Any:
    made = value
    for field in dataclasses.fields(value):
        before = getattr(value, field.name, None)
        after = None if field.name in keys else _without(before, keys)
        if after is not before:
            made = copy.copy(value) if made is value else made
            object.__setattr__(made, field.name, after)  # frozen ones too: the copy is ours
    return made


def _keys(value: Any) -> Iterator[Any]:
    if _is_dataclass(value):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    inside: Any = ()
    if isinstance(value, Mapping):
        yield from value
        inside = value.values()
    elif isinstance(value, (list, tuple)) and not hasattr(value, "to"):
        yield from getattr(value, "_fields", ())
        inside = value
    for one in inside:
        yield from _keys(one)
