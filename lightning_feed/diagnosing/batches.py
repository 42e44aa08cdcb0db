"""Batches of a short fit: keeping, replaying and timing them, and finding the parts that a step reads."""

import copy
import itertools
import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from lightning_feed.diagnosing.session import WHOLE, key_leaves
from lightning_feed.errors import SettingsError
from lightning_feed.load.kinds import Batch
from lightning_feed.measure.step_meter import event_maker
from lightning_feed.transfer.batch_tree import tensors
from lightning_feed.trials.cloning import map_loaders

MOST_KEPT = 32
MOST_BYTES = 256 * 2**20
"""Largest number of batches kept as a sample of a run, and their largest size in bytes."""
WINDOWS = 5
FEWEST_CYCLES = 3
"""Fewest optimizer steps after the warm-up for a rate."""
FEWEST_PASSES = 2
"""Fewest times that each of several batches must have come after the warm-up."""
STEPS_AHEAD = 8
"""Largest number of steps that the device may be behind the host: enough that it never runs out of work."""
_Shapes = tuple[tuple[int, ...], ...]

# --- copies -------------------------------------------------------------------------------------------------------


def copy_of(batch: object) -> Batch:
    """A copy of a batch with its tensors. Pinned tensors stay pinned, so copies to the device are as fast."""
    return _with_new_containers(batch, _clone)


def _with_new_containers(batch: object, change: Callable[[Tensor], Tensor]) -> Batch:
    """New containers with ``change(tensor)`` in place of each tensor. Other objects get a shallow copy."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else copy.copy(leaf), batch)


def _clone(tensor: Tensor) -> Tensor:
    copied = tensor.clone()
    return copied.pin_memory() if tensor.is_pinned() else copied


def _idle_copy(loader: DataLoader[Batch]) -> DataLoader[Batch]:
    idle = copy.copy(loader)
    idle._iterator = None
    return idle


def own_loaders(loaders: object, make: Callable[[DataLoader[Batch]], Any] = _idle_copy) -> Any:
    """``loaders`` with a copy of every DataLoader, without running workers.

    Dicts, lists and tuples of loaders, and ``CombinedLoader``, are rebuilt around the copies; data sets, samplers and
    other iterables are not copied.

    Args:
        loaders: the data module's loaders.
        make: makes a copy of a DataLoader.

    Raises:
        SettingsError: for an iterator, which can be read only once.
    """

    def own(loader: object, _: tuple[object, ...]) -> Any:
        if isinstance(loader, DataLoader):
            return make(loader)
        if hasattr(loader, "__next__"):
            raise SettingsError(
                f"The training loader is a {type(loader).__name__}, an iterator that can be read only once, and "
                "diagnosing would exhaust it. Pass an object that can be iterated again, such as a DataLoader."
            )
        return loader

    return map_loaders(loaders, own)


# --- replay -------------------------------------------------------------------------------------------------------


class Replay:
    """A loader that yields the same batches again and again, ``length`` in all.

    The containers are new each time, because a step may take parts out of its batch. The tensors are the same, unless
    the first step wrote into them: then each step gets copies.

    Args:
        batches: the batches for the loop, in this order. They stay unchanged.
        length: batches per epoch.
    """

    def __init__(self, batches: Sequence[Batch], length: int) -> None:
        self._batches = batches
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        first = copy_of(self._batches[0])
        given = [(tensor, _version(tensor)) for tensor in tensors(first)]
        yield first
        written = any(_version(tensor) != version for tensor, version in given)
        change = _clone if written else lambda tensor: tensor
        del first, given
        for number in range(1, self._length):
            yield _with_new_containers(self._batches[number % len(self._batches)], change)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors count no versions


class Sample:
    """Batches of a run to replay: spread evenly over the run if their shapes differ, else only the first.

    Batches of equal shapes share one copy.

    Args:
        skip: number of batches before the measured ones. Only the first of these is kept.
    """

    def __init__(self, skip: int = 0) -> None:
        self.first: Batch = None
        self._kept: list[_Shapes] = []
        self._batches: dict[_Shapes, Batch] = {}
        self.came = 0
        """Batches so far."""
        self._skip = skip
        self._every = 1

    def offer(self, batch: object) -> None:
        """Keep a copy of a batch of the run, if it is one of those to keep."""
        number = self.came
        self.came = self.came + 1
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

    def take(self, count: int) -> list[Batch]:
        """Return ``count`` batches sized like those of the run, or one if all have the same size.

        There must be a ``first``.
        """
        by_size = sorted(self._kept[1:] or self._kept, key=lambda shapes: sum(map(math.prod, shapes)))
        if by_size[0] == by_size[-1]:
            count = 1
        return [self._batches[by_size[(2 * place + 1) * len(by_size) // (2 * count)]] for place in range(count)]

    def _bytes(self) -> int:
        return sum(tensor.nbytes for batch in self._batches.values() for tensor in tensors(batch))


class Pace:
    """The times at which steps end; with a device, the times at which it has finished them."""

    def __init__(self, device: torch.device) -> None:
        self._make = event_maker(device)
        self._wait: Callable[[], object] = (
            (lambda: None) if device.type == "cpu" else torch.get_device_module(device).synchronize
        )
        self._ahead: deque[Batch] = deque()
        self._stamps: list[float] = []

    def stamp(self) -> None:
        """Note that a step has ended on the host, and wait for an earlier step on the device.

        Without waiting (CUDA graphs), the host could queue far more steps in the experiment's time than the device can
        run.
        """
        if self._make is None:
            self._wait()
        else:
            event = self._make()
            event.record()
            self._ahead.append(event)
            if len(self._ahead) <= STEPS_AHEAD:
                return
            self._ahead.popleft().synchronize()
        self._stamps.append(time.perf_counter())

    def per_s(self, accumulate: int, batches: int = 1) -> float | None:
        """Batches per second over whole optimizer steps of ``accumulate`` batches, without the first quarter.

        The result is the median rate of several windows. Each window is long enough to include work that comes only
        every few steps, while a program that takes the CPUs for a while affects only a few windows. If several
        ``batches`` are repeated in turn, each window includes every batch equally often.
        """
        self._wait()
        period = math.lcm(accumulate, batches)
        marks = self._stamps[::period]
        counted = marks[max(1, len(marks) // 4) :]
        if len(counted) <= (FEWEST_CYCLES if batches == 1 else FEWEST_PASSES):
            return None
        windows = min(WINDOWS, len(counted) - 1)
        edges = [index * (len(counted) - 1) // windows for index in range(windows + 1)]
        middle = statistics.median(
            (counted[last] - counted[first]) / (last - first) for first, last in itertools.pairwise(edges)
        )
        return period / middle if middle > 0 else None


# --- which parts a step reads -------------------------------------------------------------------------------------


class KeyWatch(TorchFunctionMode):
    """Finds the parts of a batch that a step reads. Use it as a context manager, to see torch's functions, too.

    A part is used if the step reads it from a dict by its key, or passes it to any function of torch. It is unused if
    nothing ever read it from the dict. The use is unknown for parts that no function of torch received, and that the
    step got only together with others (unpacking, ``**batch``, ``.items()``, a tuple, a dataclass).

    Args:
        batch: the batch for the step. It stays unchanged.
    """

    def __init__(self, batch: object) -> None:
        super().__init__()
        self._leaves = dict(key_leaves(batch))
        self._read: set[str] = set()
        self.batch, self._handed = self._watched(batch, "")
        """The batch with watched dicts, and the names of the parts that the step may have read."""

    def uses(self) -> dict[str, bool | None]:
        """True, False, or None (unknown) for each part, by its name from :func:`key_leaves`."""
        return {name: True if name in self._read else None if name in self._handed else False for name in self._leaves}

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        seen = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._read |= {name for name, leaf in self._leaves.items() if id(leaf) in seen}
        return func(*args, **(kwargs or {}))

    def _watched(self, value: Any, place: str) -> tuple[Any, set[str]]:
        """The value with its dicts watched, and its leaves that are not in a dict."""
        leaves = {name for name, _ in key_leaves(value, place)}
        kind = type(value)
        if kind in (dict, OrderedDict):
            return self._watched_dict(value, place), set()
        if kind in (list, tuple) and leaves != {place or WHOLE}:
            inside = [self._watched(part, _place(place, at)) for at, part in enumerate(value)]
            return kind(part for part, _ in inside), set().union(*(names for _, names in inside))
        return value, leaves

    def _watched_dict(self, value: dict[Any, Any], place: str) -> Any:
        names = {key: _place(place, key) for key in value}
        kind = type(value)
        parts = {key: self._watched(part, names[key]) for key, part in value.items()}

        def take(key: object, *, by_key: bool) -> None:
            handed = parts[key][1] if key in parts else set()
            (self._read if by_key and handed == {names[key]} else self._handed).update(handed)

        watched = type(kind.__name__, (_WatchedDict, kind), {"_kind": kind})
        made: Any = watched((key, part) for key, (part, _) in parts.items())
        made._take = take
        return made


def _place(before: str, key: object) -> str:
    return f"{before}.{key}" if before else str(key)


_MAPPING: Any = MutableMapping


class _WatchedDict:
    """Methods of dicts that read values, all through ``__getitem__``. Writing is not watched."""

    _kind: Any = dict
    _listed = False

    @staticmethod
    def _take(key: object, *, by_key: bool) -> None:
        """Note that a value was read. Does nothing in a dict that the step itself made from the class of its batch."""

    def __getitem__(self, key: object) -> Any:
        self._take(key, by_key=not self._listed)  # `f(**batch)` lists all keys, and then reads each by its name
        return self._kind.__getitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        self._listed = True
        return iter(self._kind.__iter__(self))

    keys = _MAPPING.keys
    values = _MAPPING.values
    items = _MAPPING.items
    get = _MAPPING.get
    pop = _MAPPING.pop
    popitem = _MAPPING.popitem
    setdefault = _MAPPING.setdefault
    __eq__ = _MAPPING.__eq__

    def copy(self) -> Any:
        return self._kind(self.items())

    def __or__(self, other: object) -> Any:
        return self.copy() | other

    def __ror__(self, other: object) -> Any:
        return other | self.copy()

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.copy().__reduce_ex__(protocol)


def is_opaque(module: torch.nn.Module) -> bool:
    """True for compiled code, which may read parts of a batch without calling dicts or torch's functions."""
    scripted = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or any(isinstance(held, scripted) for held in (part, *vars(part).values()))
        for part in module.modules()
    )
