"""Which parts of a batch a training step reads: containers that take down what is taken out of them, for one step."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, KeysView
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_feed.watch.experiments.session import WHOLE, key_leaves

_Take = Callable[[Any, bool], None]
"""``(key, named)``: the part under ``key`` was handed out, by its name or with all others."""


class KeyWatch:
    """A batch that knows which of its parts were read.

    A part is used when the step takes it out by its name, or hands it to any function of torch. It is unused when it
    was never taken out at all. What was only handed out with all others (unpacking, ``**batch``, ``.items()``) and no
    function of torch has seen cannot be told: the step may have kept it, or ignored it.

    Dicts, ordered dicts, lists, tuples, named tuples and dataclasses are watched at any depth, and pass
    ``isinstance``; anything else is one part.

    Args:
        batch: what the step is to get. It is not written to.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves: dict[str, Any] = {}
        self._read: set[str] = set()
        self._handed: set[str] = set()
        self._names_of: dict[int, set[str]] = {}
        self.batch = self._watched(batch, ())
        if self.batch is batch:
            self._handed |= set(self._leaves)  # nothing to take it out of
        """The same, watched."""

    def uses(self) -> dict[str, bool | None]:
        """Whether each part was used, by its place as :func:`key_leaves` names it. None: cannot be told."""
        unread: dict[bool, bool | None] = {True: None, False: False}
        return {name: True if name in self._read else unread[name in self._handed] for name in self._leaves}

    def seeing_torch(self) -> TorchFunctionMode:
        """Inside of it, a part that any function of torch is given was read."""
        return _Seen(self._see)

    def _see(self, value: Any, depth: int = 3) -> None:
        if isinstance(value, Tensor):
            self._read |= self._names_of.get(id(value), set())
        elif depth and isinstance(value, (list, tuple)):
            for part in tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value):
                self._see(part, depth - 1)
        elif depth and isinstance(value, dict):
            for part in dict.values(value):
                self._see(part, depth - 1)

    def _watched(self, value: Any, place: tuple[str, ...]) -> Any:
        parts = _parts(value)
        if parts is None:
            self._keep_leaves(value, ".".join(place))
            return value
        names = [(*place, name) for name, _, _ in parts]
        leaves = {key: ".".join(at) for at, (_, key, part) in zip(names, parts, strict=True) if _parts(part) is None}

        def take(key: Any, named: bool) -> None:  # noqa: FBT001  # called from the containers below only
            if key in leaves:
                (self._read if named else self._handed).add(leaves[key])

        children = [self._watched(part, at) for at, (_, _, part) in zip(names, parts, strict=True)]
        return _container(value, [key for _, key, _ in parts], children, take)

    def _keep_leaves(self, value: Any, place: str) -> None:
        """A leaf; or a container that is not watched, of which only torch's functions can tell."""
        for name, leaf in key_leaves(value, place):
            self._leaves[name] = leaf  # held, so that its id stays its own
            if leaf is not value:
                self._handed.add(name)
            if isinstance(leaf, Tensor):
                self._names_of.setdefault(id(leaf), set()).add(name)


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether parts of a batch may be read where neither containers nor torch's functions notice: compiled code."""
    kinds = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(
        isinstance(part, kinds)
        or type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or any(isinstance(held, kinds) for held in vars(part).values())
        for part in module.modules()
    )


def _parts(value: Any) -> list[tuple[str, Any, Any]] | None:
    """As :func:`key_leaves` divides it: (name, key, part), of fields (name, name, part). None: not watched."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return [(str(key), key, part) for key, part in value.items()]
    if kind in (list, tuple):
        if list(key_leaves(value)) == [(WHOLE, value)]:
            return None  # paths, numbers: one part, as collating makes them of one key
        return [(str(index), index, part) for index, part in enumerate(value)]
    if isinstance(value, tuple) and hasattr(kind, "_fields") and kind.__base__ is tuple:
        return [(name, index, part) for index, (name, part) in enumerate(zip(kind._fields, value, strict=True))]
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, dict, list, tuple, Tensor)):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(name, name, getattr(value, name)) for name in fields if hasattr(value, name)]
    return None


def _container(value: Any, keys: list[Any], children: list[Any], take: _Take) -> Any:
    kind = type(value)
    if issubclass(kind, dict):
        made: Any = (_WatchedOrderedDict if kind is OrderedDict else _WatchedDict)()
        for key, child in zip(keys, children, strict=True):
            kind.__setitem__(made, key, child)
    elif kind is list:
        made = _WatchedList(children)
    elif issubclass(kind, tuple):
        made = tuple.__new__(_watched_tuple(kind), children)
    else:
        return _watched_dataclass(value, keys, children, take)
    made._take = take
    return made


_NOTHING = object()


class _DictReads:
    """What dicts hand their values out by. Writing needs no watching."""

    _take: _Take
    _offered: Any = _NOTHING
    _listed: tuple[Any, ...] | list[Any] = ()

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)  # type: ignore[misc]  # of the dict that this is mixed into
        # Not by name: what an iteration over the keys is at, or `f(**batch)`, which lists all keys and then reads each.
        in_turn = bool(self._listed) and key is self._listed[0]
        self._listed = self._listed[1:] if in_turn else []
        self._took(key, named=not in_turn and key is not self._offered)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        self._took(key, named=True)
        return super().get(key, default)  # type: ignore[misc]  # as above

    def pop(self, key: Any, *default: Any) -> Any:
        self._took(key, named=True)
        return super().pop(key, *default)  # type: ignore[misc]  # as above

    def popitem(self, *args: Any, **kwargs: Any) -> Any:
        key, value = super().popitem(*args, **kwargs)  # type: ignore[misc]  # as above
        self._took(key, named=False)
        return key, value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._took(key, named=True)
        return super().setdefault(key, default)  # type: ignore[misc]  # as above

    def __iter__(self) -> Iterator[Any]:
        keys = list(super().__iter__())  # type: ignore[misc]  # as above
        for key in keys:
            self._offered = key
            yield key
        self._offered, self._listed = _NOTHING, keys

    def keys(self) -> Any:
        return KeysView(cast(Any, self))

    def items(self) -> Any:
        self._took_all()
        return super().items()  # type: ignore[misc]  # as above

    def values(self) -> Any:
        self._took_all()
        return super().values()  # type: ignore[misc]  # as above

    def copy(self) -> Any:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return bool(self.copy() == other)

    __hash__ = None  # type: ignore[assignment]  # as dicts

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (list(self.items()),)

    def _took(self, key: Any, *, named: bool) -> None:
        take = getattr(self, "_take", None)
        if take is not None:  # None in one that the step made itself, from the class of its batch
            take(key, named)

    def _took_all(self) -> None:
        for key in super().__iter__():  # type: ignore[misc]  # as above
            self._took(key, named=False)


class _WatchedDict(_DictReads, dict[Any, Any]):
    pass


class _WatchedOrderedDict(_DictReads, OrderedDict[Any, Any]):
    pass


class _SequenceReads:
    """What lists and tuples hand their elements out by."""

    _take: _Take

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            for each in range(*index.indices(len(self))):  # type: ignore[arg-type]  # of the list or tuple
                self._took(each, named=False)
            return list(super().__getitem__(index)) if isinstance(self, list) else tuple(super().__getitem__(index))  # type: ignore[misc]
        self._took(index + len(self) if index < 0 else index, named=True)  # type: ignore[arg-type]  # as above
        return super().__getitem__(index)  # type: ignore[misc]  # as above

    def __iter__(self) -> Iterator[Any]:
        for index, value in enumerate(super().__iter__()):  # type: ignore[misc]  # as above
            self._took(index, named=False)
            yield value

    def __reversed__(self) -> Iterator[Any]:
        return iter(list(iter(self))[::-1])

    def __add__(self, other: Any) -> Any:
        return (list(self) if isinstance(self, list) else tuple(self)) + other

    def __eq__(self, other: object) -> bool:
        return bool((list(self) if isinstance(self, list) else tuple(self)) == other)

    __hash__ = None  # type: ignore[assignment]  # tensors in it are not hashed by value either

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind = type(self).__bases__[-1]
        return (kind._make if hasattr(kind, "_make") else kind), (list(iter(self)),)

    def pop(self, index: int = -1) -> Any:
        self._took(index + len(self) if index < 0 else index, named=True)  # type: ignore[arg-type]  # as above
        return super().pop(index)  # type: ignore[misc]  # as above

    def _took(self, index: int, *, named: bool) -> None:
        take = getattr(self, "_take", None)
        if take is not None:
            take(index, named)


class _WatchedList(_SequenceReads, list[Any]):  # type: ignore[misc]  # the mixin stands in for tuples as well
    pass


def _watched_tuple(kind: type) -> Any:
    """A subclass of ``tuple`` or of a named tuple's class. Fields of the latter are read past ``__getitem__``."""
    fields = getattr(kind, "_fields", ())
    reads: dict[str, Any] = {name: property(itemgetter(index)) for index, name in enumerate(fields)}
    return type(kind.__name__, (_SequenceReads, kind), reads)


def _watched_dataclass(value: Any, names: Iterable[str], children: list[Any], take: _Take) -> Any:
    kind: Any = type(value)

    def read(self: Any, name: str) -> Any:
        take(name, True)  # noqa: FBT003  # private to this file
        return kind.__getattribute__(self, name)

    made: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read}))
    if hasattr(value, "__dict__"):
        made.__dict__.update(vars(value))
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)
    return made


class _Seen(TorchFunctionMode):
    def __init__(self, see: Callable[[Any], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see(args)
        self._see(kwargs or {})
        return func(*args, **(kwargs or {}))
