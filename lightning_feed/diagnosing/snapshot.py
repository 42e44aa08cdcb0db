"""What objects hold, tensors and random states included, kept to be put back bit for bit into the same objects."""

import random
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

Undo = Callable[[], None]

MANY_ELEMENTS = 100_000
"""A longer container is kept as it is, its elements are not looked into."""
_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_MACHINERY = (
    # Live threads, processes, files; and what refers to all of a program.
    *("threading", "_thread", "multiprocessing", "concurrent", "asyncio", "logging", "io", "_io", "socket", "weakref"),
    *("subprocess", "mmap", "torch.multiprocessing", "torch.utils.data.dataloader._", "torch._dynamo", "torch.fx"),
    # The Trainer that a module or a data module knows is the user's, and nothing is done to it.
    *(f"{package}.{part}" for package in ("lightning.pytorch", "pytorch_lightning") for part in (
        "trainer", "strategies", "loops", "accelerators", "plugins", "loggers",
    )),
    # Caches and copies of data on this machine: what an experiment puts in stays good.
    "lightning_feed.archive",
)  # fmt: skip


class Snapshot:
    """Everything that can be reached from some objects, as it is now.

    Looks into containers, attributes, slots, modules, tensors (with their gradients and devices), arrays and random
    generators. Every object is put back by writing into it: whoever holds it keeps the same one. Not looked into: code,
    files, threads, what the ``_MACHINERY`` above names.

    Args:
        roots: where to begin.
        leave: objects that are not looked into.
        array_limit: bytes; larger tensors and arrays are taken to be read only. None: all are kept. Tensors are kept
            in host memory.
    """

    def __init__(self, *roots: Any, leave: tuple[Any, ...] = (), array_limit: int | None = None) -> None:
        self._limit = float("inf") if array_limit is None else array_limit
        self._seen = {id(one): one for one in leave}  # holding them keeps their ids from being given out again
        self._undo: list[Undo] = []
        self._undo_grads: list[Undo] = []
        todo = list(roots)
        while todo:
            value = todo.pop()
            if isinstance(value, (*_ATOMS, *_CODE)) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            todo.extend(self._keep(value))

    def restore(self) -> None:
        """Put everything back. May be called more than once."""
        with torch.no_grad():
            # A gradient fits its tensor only when both are what they were.
            for undo in (*self._undo, *self._undo_grads):
                undo()

    def _keep(self, value: Any) -> Iterator[Any]:
        """Take down what ``value`` holds, and give what it refers to."""
        if isinstance(value, np.ndarray):
            if value.nbytes <= self._limit and value.flags.writeable and not isinstance(value, np.memmap):
                self._undo.append(_keep_array(value))
            return
        state = _random_state(value)
        if state is not None:
            self._undo.append(state)
            return
        yield from self._keep_contents(value)
        kind: Any = type(value)
        if isinstance(value, Module) or not _is_machinery(kind):  # torch.compile makes modules of its own
            yield from self._keep_attributes(value)

    def _keep_contents(self, value: Any) -> Iterator[Any]:
        if isinstance(value, Tensor):
            self._undo += _keep_tensor(value, self._limit)
            if value.is_leaf and not is_lazy(value):
                self._undo_grads.append(_keep_grad(value))
                yield value.grad
        elif isinstance(value, dict):
            self._undo.append(_keep_dict(value))
            yield from _few([*value.keys(), *value.values()])
        elif isinstance(value, (list, deque, set)):
            self._undo.append(_keep_elements(value))
            yield from _few(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _few(value)

    def _keep_attributes(self, value: Any) -> Iterator[Any]:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._undo.append(_keep_attributes(value, attributes))
            yield from attributes.values()
        kind: Any = type(value)
        for name in () if isinstance(value, Tensor) else _slots(kind):
            held = getattr(value, name, _ABSENT)
            if held is not _ABSENT:
                self._undo.append(_keep_slot(value, name, held))
                yield held


_ABSENT = object()


def _few(elements: Any) -> Any:
    return elements if len(elements) <= MANY_ELEMENTS else ()


def _bases(kind: Any) -> tuple[type, ...]:
    return kind.__mro__  # type: ignore[no-any-return]  # every class has it


@cache
def _is_machinery(kind: Hashable) -> bool:
    return any(f"{base.__module__}.{base.__name__}".startswith(_MACHINERY) for base in _bases(kind))


@cache
def _slots(kind: Hashable) -> tuple[str, ...]:
    """Slots of Python classes; those of torch and numpy are no state."""
    found: list[str] = []
    for base in _bases(kind):
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _keep_tensor(tensor: Tensor, limit: float) -> list[Undo]:
    """Contents, memory, device, gradient and class of a tensor."""
    if is_lazy(tensor):
        return [_keep_lazy(tensor)]
    memory = tensor.detach()  # shares the memory, and keeps it when the tensor is moved to another device
    undo: list[Undo] = []
    if memory.numel() * memory.element_size() <= limit and memory.device.type != "meta":
        undo.append(_keep_memory(memory))
    if tensor.is_leaf:
        undo.append(_keep_leaf(tensor, memory))
    return undo


def _keep_memory(memory: Tensor) -> Undo:
    if memory.layout is torch.strided:
        for dim, stride in enumerate(memory.stride()):
            if stride == 0 and memory.shape[dim] > 1:  # expanded: the same memory again and again
                memory = memory.narrow(dim, 0, 1)
    contents, inference = memory.to("cpu", copy=True), memory.is_inference()

    def fill() -> None:
        with torch.inference_mode(inference):
            memory.copy_(contents)

    return fill


def _keep_leaf(tensor: Tensor, memory: Tensor) -> Undo:
    requires_grad = tensor.requires_grad

    def put_back() -> None:
        if _elsewhere(tensor, memory):
            tensor.grad = None  # torch refuses new data while an unlike gradient is there
            tensor.data = memory
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return put_back


def _keep_grad(tensor: Tensor) -> Undo:
    grad = tensor.grad

    def put_back() -> None:
        if tensor.grad is not grad:
            tensor.grad = grad

    return put_back


def _elsewhere(tensor: Tensor, memory: Tensor) -> bool:
    if tensor.device != memory.device or tensor.shape != memory.shape or tensor.dtype != memory.dtype:
        return True
    return tensor.layout is torch.strided and tensor.data_ptr() != memory.data_ptr()


def _keep_lazy(tensor: Tensor) -> Undo:
    kind: Any = type(tensor)
    data = tensor.data

    def dematerialize() -> None:
        if type(tensor) is not kind:
            tensor.data = data
            tensor.__class__ = kind

    return dematerialize


def _keep_array(array: Any) -> Undo:
    contents = array.copy()

    def fill() -> None:
        if array.flags.writeable:
            array[...] = contents

    return fill


def _random_state(value: Any) -> Undo | None:
    if isinstance(value, torch.Generator):
        generator_state = value.get_state()
        return partial(_call, value.set_state, generator_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        bit_state = bits.state
        return partial(setattr, bits, "state", bit_state)
    if isinstance(value, np.random.RandomState):
        legacy_state = value.get_state()
        return partial(value.set_state, legacy_state)
    if isinstance(value, random.Random):
        random_state = value.getstate()
        return partial(value.setstate, random_state)
    return None


def _call(function: Callable[[Any], object], argument: Any) -> None:
    function(argument)


def _keep_dict(held: dict[Any, Any]) -> Undo:
    items = list(held.items())

    def refill() -> None:
        now = list(held.items())
        if len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items, strict=True)):
            held.clear()
            for key, value in items:
                held[key] = value

    return refill


def _keep_elements(held: Any) -> Undo:
    elements = list(held)

    def refill() -> None:
        now = list(held)
        if len(now) != len(elements) or any(a is not b for a, b in zip(now, elements, strict=True)):
            held.clear()
            (held.update if isinstance(held, set) else held.extend)(elements)

    return refill


def _keep_attributes(owner: Any, attributes: dict[str, Any]) -> Undo:
    refill, kind = _keep_dict(attributes), type(owner)

    def put_back() -> None:
        if type(owner) is not kind:  # lazy modules change theirs
            owner.__class__ = kind
        refill()

    return put_back


def _keep_slot(owner: Any, name: str, held: Any) -> Undo:
    def put_back() -> None:
        if getattr(owner, name, _ABSENT) is not held:
            object.__setattr__(owner, name, held)

    return put_back
