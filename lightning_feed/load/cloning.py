"""Clones of a user's loader for trials and experiments: with changes, without traces, their failures located."""

import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_feed.errors import DatasetError, LoaderError, SettingsError
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import drawing_device
from lightning_feed.load.recommend import TORCH_PREFETCH

_SETTINGS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "in_order")
_PASSES = ("__iter__", "_get_iterator")
_WORKER = re.compile(r"in DataLoader worker process (\d+)")


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What to change in a loader; None leaves a thing as it is.

    Raises:
        SettingsError: for changes that contradict each other.
    """

    dataset: Any = None
    """In place of its dataset, of the same kind and length."""
    num_workers: int | None = None
    workers: Literal["process", "thread"] | None = None
    """What they are; only a FeedLoader has the choice."""
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    batches: Sequence[Any] | None = None
    """What the sampler is to give, batch for batch: lists of indices, or indices where the loader does not batch."""
    endless: bool = False
    """Whether the sampler begins again at its end. Iterable datasets end when they end."""

    def __post_init__(self) -> None:
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.persistent_workers):
            raise SettingsError("num_workers=0 loads in this process: there is nothing to prefetch or to keep alive.")
        if self.batches is not None and not self.batches:
            raise SettingsError("batches is empty, so the loader would give nothing.")


class GivenOrder:
    """A sampler that gives what it was given, over and over if it is to be endless.

    Args:
        source: a sampler, or a list.
        endless: begin again at its end; a source that gives nothing ends all the same.
    """

    def __init__(self, source: Any, *, endless: bool) -> None:
        self.source = source
        self.endless = endless

    def __iter__(self) -> Iterator[Any]:
        while True:
            empty = True
            for item in self.source:
                empty = False
                yield item
            if empty or not self.endless:
                return

    def __len__(self) -> int:
        return len(self.source)


def clone_loader(loader: DataLoader[Any], changes: Changes | None = None) -> DataLoader[Any]:
    """A loader of the same class, dataset, samplers, collate function and settings, but for the changes.

    Its dataset, samplers and generator are the loader's own objects, so it draws the same order: iterate it within
    :func:`preserve_state`, which puts back what they draw and change. A FeedLoader's clone has no order of its own. The
    constructor is not called: it may take other arguments, and may do more than once what must be done once.

    Args:
        loader: of torch, of a class derived from it, or ours. It is not iterated, and its workers are left alone.
        changes: what is to differ.

    Raises:
        LoaderError: when it cannot be cloned: its sampler can be gone through only once, or it keeps an iterator of its
            own.
        SettingsError: when batches are given for an iterable dataset.
    """
    changes = changes or Changes()
    if isinstance(loader.dataset, IterableDataset) and changes.batches is not None:
        raise SettingsError("An iterable dataset decides itself what comes: batches cannot be given for it.")
    own_way = any(getattr(type(loader), name, None) is not getattr(DataLoader, name, None) for name in _PASSES)
    if own_way and not isinstance(loader, FeedLoader):
        _refuse_kept_iterator(loader)
    values: dict[str, Any] = {**_order(loader, changes), "_iterator": None}
    values |= {name: value for name in _SETTINGS if (value := getattr(changes, name)) is not None}
    if changes.dataset is not None:
        values["dataset"] = changes.dataset
    context = loader.multiprocessing_context
    workers = values.get("num_workers", loader.num_workers)
    if not workers:
        values |= {"prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    elif values.get("prefetch_factor", loader.prefetch_factor) is None:
        values["prefetch_factor"] = TORCH_PREFETCH
    clone = object.__new__(type(loader))
    clone.__dict__.update(vars(loader), **values)
    if "next_iter_state" in vars(loader):  # torchdata's: where a StatefulDataLoader is to go on
        clone.__dict__["next_iter_state"] = None
    threads = isinstance(loader, FeedLoader) and (changes.workers or loader.workers) == "thread"
    clone.multiprocessing_context = None if threads or not workers else context
    if isinstance(clone, FeedLoader):
        clone.order, clone.watch, clone.workers = None, None, changes.workers or clone.workers
        clone.forget()
    return clone


def burst_of(loader: DataLoader[Any]) -> int:
    """Batches that come together: one for each worker process; 1 without, and with threads, which share a batch."""
    threaded = getattr(loader, "workers", "process") == "thread"
    return 1 if threaded else max(1, loader.num_workers)


def iter_is_itself(source: Any) -> bool:
    """Whether iterating uses ``source`` up: it is an iterator, such as a generator."""
    return hasattr(source, "__next__") and isinstance(source, Iterator)


def _order(loader: DataLoader[Any], changes: Changes) -> dict[str, Any]:
    """What gives the indices, where that is to change."""
    if isinstance(loader.dataset, IterableDataset):
        return {}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source = getattr(loader, name) if changes.batches is None else changes.batches
    if iter_is_itself(source):
        raise LoaderError(
            f"The sampler ({type(source).__name__}) is an iterator, which can be gone through only once, so the loader "
            "cannot be tried without using it up. Give an object whose __iter__ begins anew."
        )
    if changes.batches is None and not changes.endless:
        return {}
    return {name: GivenOrder(source, endless=changes.endless)}


def _refuse_kept_iterator(loader: DataLoader[Any]) -> None:
    for name, value in vars(loader).items():
        if name != "_iterator" and hasattr(value, "__next__") and not isinstance(value, type):
            raise LoaderError(
                f"The loader ({type(loader).__name__}) keeps an iterator in its attribute {name!r}, so it cannot be "
                "tried without taking batches from it. Try it with a plain DataLoader."
            )


# --- without traces -------------------------------------------------------------------------------------------------

_ATOMS = (str, bytes, bytearray, int, float, complex, bool, type(None), Tensor, np.ndarray, np.generic)
_CODE = (type, BuiltinFunctionType, ModuleType)
_LONG = 100_000
"""A longer container is kept by its owner's attribute only, not its elements: datasets hold lists of all samples."""
_ENTERED = 1_000
"""Elements of a longer one are samples, not objects that draw or count."""
_MOST = 200_000
"""Objects that are looked at."""
_APART = re.compile(
    r"(threading|multiprocessing|logging|torch\.multiprocessing|lightning_feed\.archive)\b"
    r"|(lightning|pytorch_lightning)\b(?!(\.pytorch|\.fabric)?\.(core|utilities)\b)"
)
"""Packages whose objects belong to a running program; and our archive's, whose state lies outside Python. Not
what of Lightning's holds a user's data: data modules made by ``from_datasets``, ``hparams``, ``CombinedLoader``."""
_GENERATORS = ((torch.Generator, "get_state"), (random.Random, "getstate"), (np.random.RandomState, "get_state"))

Undo = Callable[[], object]


@contextmanager
def preserve_state(*owners: Any) -> Iterator[None]:
    """Within it, ``owners`` may be worked with; after it they are as before, and so are the global generators.

    Put back: torch's, numpy's and random's global states; and in everything that can be reached from the owners,
    datasets, samplers and transforms among it: attributes, contents of containers, generators. Not put back: contents
    of arrays and tensors, of containers above 100,000 elements (and what is in those above 1,000), and what lies
    outside Python, such as a file's position.

    Args:
        owners: loaders, datasets, or containers of them. Iterators of loaders are not looked into.
    """
    undo: list[Undo] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(np.random.set_state, np.random.get_state()),
        partial(random.setstate, random.getstate()),
        *_reached(owners),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    try:
        yield
    finally:
        for put_back in undo:
            put_back()


def _reached(owners: Any) -> Iterator[Undo]:
    seen: dict[int, Any] = {}  # holds what it names: an id may be used again
    stack = [owners]
    while stack and len(seen) < _MOST:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (*_ATOMS, *_CODE)):
            continue
        seen[id(value)] = value
        generator = _generator(value)
        if generator is not None:
            yield generator
        elif isinstance(value, MethodType):
            stack.append(value.__self__)
        elif isinstance(value, FunctionType):
            stack += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        elif isinstance(value, (Dataset, Sampler, DataLoader)) or not _APART.match(type(value).__module__):
            yield from _kept(value)
            stack += _inside(value)


def _generator(value: Any) -> Undo | None:
    """Puts a random generator's state back; None for what is none."""
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    for kind, get in _GENERATORS:
        if isinstance(value, kind) and not isinstance(value, random.SystemRandom):
            return partial(getattr(value, get.replace("get", "set")), getattr(value, get)())
    return None


def _kept(value: Any) -> Iterator[Undo]:
    if isinstance(value, (list, dict, set, deque)) and len(value) <= _LONG:
        yield partial(_refill, value, dict(value) if isinstance(value, dict) else list(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield partial(_refill, attributes, attributes.copy())


def _refill(container: Any, before: Any) -> None:
    """The same container with the elements that it had. One that is as it was is not written to."""
    here, there = (chain(one, one.values()) if isinstance(one, dict) else one for one in (container, before))
    if len(container) == len(before) and all(now is then for now, then in zip(here, there, strict=True)):
        return
    container.clear()
    getattr(container, "update" if isinstance(container, (dict, set)) else "extend")(before)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, partial):
        return [value.func, *value.args, value.keywords]
    inside: list[Any] = []
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)) and len(value) <= _ENTERED:
        inside += value.values() if isinstance(value, dict) else value
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        is_loader = isinstance(value, DataLoader) or type(value).__name__ == "CombinedLoader"
        skipped = "_iterator" if is_loader else None
        inside += [held for name, held in attributes.items() if name != skipped]
    return inside


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not sys
    except ValueError:  # a cell of a function that is not yet defined
        return False


# --- with their failures located ------------------------------------------------------------------------------------


def locate_failure(parts: Sequence[Any], error: BaseException, came: int | None) -> DatasetError:
    """The error to raise for one that a loader raised, with the worker and the sample as far as they can be told.

    The sampler's draws are repeated up to the batch that failed, and its samples are made in this process: the one that
    raises the same kind of error is named.

    Args:
        parts: the loaders, as before the pass.
        error: what was raised.
        came: batches that came before, in the first pass; None: not known.
    """
    worker = _WORKER.search(str(error))
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    kind, text = type(error).__name__, str(error).strip()
    if lines and _WORKER.search(lines[0]):  # torch made one text of a worker's traceback
        kind, _, text = (part.strip() for part in lines[-1].partition(":"))
        kind = kind.rpartition(".")[2]
    where = [f"worker {worker.group(1)}"] if worker else []
    if came is not None and len(parts) == 1 and not parts[0].stream:
        sample = _failing_sample(parts[0].loader, kind, came)
        where += [] if sample is None else [f"sample {sample}"]
    data = ", ".join(sorted({type(part.loader.dataset).__name__ for part in parts}))
    place = f" in {', '.join(where)}" if where else ""
    end = "" if text.endswith((".", "!", "?")) else "."
    return DatasetError(
        f"Loading from the data set ({data}) failed{place}: {kind}: {text}{end} Mend it, or leave it out."
    )


def _failing_sample(loader: DataLoader[Any], kind: str, came: int) -> Any:
    """The sample that failed; None where it cannot be told."""
    with preserve_state(loader):
        # As torch does before it asks the sampler for anything.
        with drawing_device(loader.generator):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            batched = loader.batch_sampler is not None
            source = loader.batch_sampler if batched else loader.sampler
            if iter_is_itself(source):
                return None
            failed = next((batch for number, batch in enumerate(source or ()) if number == came), None)
        if failed is None:
            return None
        for index in failed if batched else [failed]:
            try:
                loader.dataset[index]
            except Exception as error:  # noqa: BLE001  # compared with the one that is being explained
                if type(error).__name__ == kind:
                    return index
    return None
