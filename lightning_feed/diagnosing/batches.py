"""Batches of a short fit: kept for replay, replayed, and watched for the parts that a step reads."""

import copy
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, KeysView, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from lightning_feed.errors import SettingsError
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.watch.experiments.session import key_leaves

MOST_KEPT, MOST_BYTES = 32, 256 * 2**20
"""Batches that a sample of a run holds at most, and their memory."""
_Shapes = tuple[tuple[int, ...], ...]

# --- copies -------------------------------------------------------------------------------------------------------


def copy_of(batch: Any) -> Any:
    """A copy of a batch with its tensors, pinned where they are: a copy to the device is then as fast."""
    return _with_new_containers(batch, _clone)


def _with_new_containers(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """New containers with ``change(tensor)`` for each tensor. Other objects are copied without what they hold."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else copy.copy(leaf), batch)


def _clone(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    return copied.pin_memory() if tensor.is_pinned() else copied


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _idle_copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    mine = copy.copy(loader)
    mine._iterator = None
    return mine


def own_loaders(loaders: Any, make: Callable[[DataLoader[Any]], Any] = _idle_copy) -> Any:
    """``loaders`` with a copy of every DataLoader, without the workers that the user's own may have running.

    Dicts, lists and tuples of loaders, and ``CombinedLoader``, are rebuilt around the copies; data sets, samplers and
    other iterables are the user's own objects.

    Args:
        loaders: as the data module gives them.
        make: makes a copy of a DataLoader.

    Raises:
        SettingsError: for an iterator, which can be read only once.
    """
    if isinstance(loaders, DataLoader):
        return make(loaders)
    if type(loaders) in (dict, list, tuple):
        return tree_map(lambda one: own_loaders(one, make), loaders)
    if hasattr(loaders, "flattened") and hasattr(loaders, "limits"):
        mine = copy.copy(loaders)
        mine.flattened = own_loaders(loaders.flattened, make)
        return mine
    if hasattr(loaders, "__next__"):
        raise SettingsError(
            f"The training loader is a {type(loaders).__name__}, an iterator that can be read only once: diagnosing it "
            "would use it up. Give an object whose __iter__ begins anew, such as a DataLoader."
        )
    return loaders


# --- replay -------------------------------------------------------------------------------------------------------


class Replay:
    """A loader that yields the same batches again and again, ``length`` in all.

    The containers are new each time, since a step may take parts out of its batch. The tensors are the same, unless the
    first step wrote into them: then each step gets copies.

    Args:
        batches: what the loop gets, one after the other. Kept as they are.
        length: batches per epoch.
    """

    def __init__(self, batches: Sequence[Any], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = copy_of(self._batches[0])
        given = [(tensor, _version(tensor)) for tensor in tensors(first)]
        yield first
        change = _clone if any(_version(tensor) != version for tensor, version in given) else _same
        del first, given
        for number in range(1, self._length):
            yield _with_new_containers(self._batches[number % len(self._batches)], change)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no versions


class Sample:
    """Batches of a run to be replayed: taken evenly over it where their shapes differ, else only the first.

    Of batches with equal shapes one is kept for all.

    Args:
        skip: batches before those that are measured; of them only the first is kept.
    """

    def __init__(self, skip: int = 0) -> None:
        self.first: Any = None
        self._kept: list[_Shapes] = []
        self._batches: dict[_Shapes, Any] = {}
        self._skip, self._every, self._came = skip, 1, 0

    def offer(self, batch: Any) -> None:
        """Keep a copy of a batch of the run, if its turn has come."""
        number, self._came = self._came, self._came + 1
        if number and (number < self._skip or (number - self._skip) % self._every):
            return
        try:
            shapes = tuple(tuple(tensor.shape) for tensor in tensors(batch))
            if shapes not in self._batches:
                self._batches[shapes] = copy_of(batch)
        except Exception:  # noqa: BLE001  # a class of the user's that cannot be looked into: it is not replayed
            return
        if number == 0:
            self.first = self._batches[shapes]
        self._kept.append(shapes)
        while len(self._kept) > MOST_KEPT or (len(self._kept) > 1 and self._bytes() > MOST_BYTES):
            self._kept = self._kept[::2]
            self._every *= 2
            self._batches = {one: self._batches[one] for one in self._kept}

    def take(self, count: int) -> list[Any]:
        """``count`` batches, as large as those of the run were; one where all are alike, and where ``count`` is one.

        There must be a ``first``.
        """
        by_size = sorted(self._kept[1:] or self._kept, key=lambda shapes: sum(map(math.prod, shapes)))
        if by_size[0] == by_size[-1]:
            count = 1
        return [self._batches[by_size[(2 * place + 1) * len(by_size) // (2 * count)]] for place in range(count)]

    def _bytes(self) -> int:
        return sum(tensor.nbytes for batch in self._batches.values() for tensor in tensors(batch))


# --- which parts a step reads -------------------------------------------------------------------------------------


class KeyWatch(TorchFunctionMode):
    """A batch that knows which of its parts were read; and the context in which torch's functions are seen, too.

    A part is used when the step takes it out by its name, or hands it to any function of torch. It is unused when it
    was never taken out at all. What was only handed out with all others (unpacking, ``**batch``, ``.items()``) and no
    function of torch has seen cannot be told: the step may have kept it, or ignored it.

    Dicts, lists, tuples, named tuples and dataclasses are watched at any depth, and pass ``isinstance``; of other
    containers only torch's functions tell what was read.

    Args:
        batch: what the step is to get. It is not written to.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self._leaves: dict[str, Any] = {}
        self._read: set[str] = set()
        self._handed: set[str] = set()
        self.batch = self._watched(batch, "")
        """The same, watched."""

    def uses(self) -> dict[str, bool | None]:
        """Whether each part was used, by its place as :func:`key_leaves` names it. None: cannot be told."""
        return {name: True if name in self._read else None if name in self._handed else False for name in self._leaves}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _see(self, value: Any, depth: int = 4) -> None:
        if isinstance(value, Tensor):
            self._read |= {name for name, leaf in self._leaves.items() if leaf is value}
        elif depth and isinstance(value, (list, tuple)):
            for part in tuple.__iter__(value) if isinstance(value, tuple) else list.__iter__(value):
                self._see(part, depth - 1)
        elif depth and isinstance(value, dict):
            for part in dict.values(value):
                self._see(part, depth - 1)

    def _watched(self, value: Any, place: str) -> Any:
        leaves = dict(key_leaves(value, place))
        parts = None if any(leaf is value for leaf in leaves.values()) else _parts(value)
        if parts is None:
            self._leaves |= leaves
            if place not in leaves:  # no container hands them out that would tell
                self._handed |= set(leaves)
            return value
        places = {key: f"{place}.{name}" if place else name for key, name, _ in parts}
        children = {key: self._watched(part, places[key]) for key, _, part in parts}

        def take(key: Any, *, named: bool) -> None:
            if places.get(key) in self._leaves:
                (self._read if named else self._handed).add(places[key])

        return _container(value, children, take)


def _parts(value: Any) -> list[tuple[Any, str, Any]] | None:
    """(key, name as :func:`key_leaves` gives it, part) of each part; None: not watched."""
    kind: Any = type(value)
    if kind in (dict, OrderedDict):
        return [(key, str(key), part) for key, part in value.items()]
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
        names = getattr(kind, "_fields", None) or map(str, range(len(value)))
        return [(index, name, part) for index, (name, part) in enumerate(zip(names, value, strict=True))]
    if dataclasses.is_dataclass(value) and not isinstance(value, (dict, list, tuple, Tensor)):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return [(name, name, getattr(value, name)) for name in names]
    return None


def _container(value: Any, children: dict[Any, Any], take: Callable[..., None]) -> Any:
    """An object of a class derived from that of ``value``, which calls ``take`` for what it hands out."""
    kind: Any = type(value)
    if isinstance(value, (dict, list, tuple)):
        fields = {name: property(itemgetter(index)) for index, name in enumerate(getattr(kind, "_fields", ()))}
        reads = _DictReads if isinstance(value, dict) else _SequenceReads
        watched: Any = type(kind.__name__, (reads, kind), {"_kind": kind, **fields})
        made = kind.__new__(watched, *([children.values()] if kind is tuple else children.values() if fields else []))
        if isinstance(value, dict):
            kind.update(made, children)
        elif isinstance(value, list):
            made.extend(children.values())
        made._take = take
        return made

    def read(self: Any, name: str) -> Any:
        take(name, named=True)
        return kind.__getattribute__(self, name)

    made = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": read}))
    for name, child in {**getattr(value, "__dict__", {}), **children}.items():
        object.__setattr__(made, name, child)
    return made


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether parts of a batch may be read where neither containers nor torch's functions notice: compiled code."""
    scripted = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or any(isinstance(held, scripted) for held in (part, *vars(part).values()))
        for part in module.modules()
    )


def _on_a_copy(name: str) -> Any:
    """A method that is called on a plain copy, for which all parts are handed out."""

    def method(self: Any, *args: Any) -> Any:
        return getattr(self._plain(), name)(*args)

    return method


def _take_nothing(key: Any, *, named: bool) -> None:
    """Of a container that the step made itself, from the class of its batch."""


class _DictReads:
    """What dicts hand their values out by. Writing needs no watching."""

    _take, _kind = staticmethod(_take_nothing), cast(Any, dict)
    _listed = False

    def __getitem__(self, key: Any) -> Any:
        self._take(key, named=not self._listed)  # `f(**batch)` lists all keys, and then reads each by its name
        return self._kind.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._take(key, named=True)
        return self._kind.get(self, key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._take(key, named=True)
        return self._kind.pop(self, key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._take(key, named=True)
        return self._kind.setdefault(self, key, default)

    def popitem(self, *args: Any, **kwargs: Any) -> Any:
        self._plain()
        return self._kind.popitem(self, *args, **kwargs)

    def __iter__(self) -> Any:
        self._listed = True
        return self._kind.__iter__(self)

    def keys(self) -> Any:
        return KeysView(cast(Any, self))

    def _plain(self) -> Any:
        for key in self._kind.__iter__(self):
            self._take(key, named=False)
        return self._kind(self._kind.items(self))

    items, values, copy = _on_a_copy("items"), _on_a_copy("values"), _on_a_copy("copy")
    __or__, __ror__ = _on_a_copy("__or__"), _on_a_copy("__ror__")
    __eq__, __reduce_ex__ = _on_a_copy("__eq__"), _on_a_copy("__reduce_ex__")


class _SequenceReads:
    """What lists and tuples hand their elements out by."""

    _take, _kind = staticmethod(_take_nothing), cast(Any, list)

    def __getitem__(self, index: Any) -> Any:
        taken = range(len(cast(Any, self)))[index]
        for each in taken if isinstance(taken, range) else (taken,):
            self._take(each, named=not isinstance(taken, range))
        return self._kind.__getitem__(self, index)

    def __iter__(self) -> Iterator[Any]:
        for index, value in enumerate(self._kind.__iter__(self)):
            self._take(index, named=False)
            yield value

    def pop(self, index: Any = -1) -> Any:
        self[index]
        return self._kind.pop(self, index)

    def _plain(self) -> Any:
        return self._kind(*self) if hasattr(self._kind, "_fields") else self._kind(iter(self))

    __reversed__, __add__, copy = _on_a_copy("__reversed__"), _on_a_copy("__add__"), _on_a_copy("copy")
    __eq__, __reduce_ex__ = _on_a_copy("__eq__"), _on_a_copy("__reduce_ex__")
