"""The rehearsal: sees in forked children whether the samples of a dataset stay the same in worker processes.

A sample that workers may make depends on its index alone. So the same few samples are read after different pasts, with
the default generators seeded alike before each sample, and then through worker processes. Whatever differs depends on
something else: a generator, a position, a queue or a counter kept anywhere, also in a closure or in a C library.
"""

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_feed.errors import FeedError, LoaderError
from lightning_feed.load.child import NoAnswer, run_in_children
from lightning_feed.load.digest import Digests, differing, digests_of, leaf_sizes
from lightning_feed.load.kinds import AnyDataset, AnyLoader, Batch, Index, Sample
from lightning_feed.load.processes import ended_worker
from lightning_feed.load.random_state import DefaultGenerators
from lightning_feed.load.shared_objects import refers_to_shared
from lightning_feed.load.worker import original_error
from lightning_feed.machine.open_files import moved_file, positions

PASS_S = 0.1
"""Seconds in which samples are chosen for the rehearsal. It reads each of them about six times."""
MOST_SAMPLES = 32
FEWEST_SAMPLES = 8
"""Samples that are read even if that takes longer: a generator that matters only now and then shows in several."""
SLOW_S = 1.0
LARGE_BYTES = 2**24
"""Fewer samples are enough after this time, or if they are larger together: a container has 64 MB of shared memory by
default (docs.docker.com/reference/cli/docker/container/run, --shm-size), and two workers hold a batch each."""
LIMIT_S = 20.0
"""Seconds after which a part of the rehearsal that gave nothing counts as hanging."""
_PARTS = 3
_KEPT = 3.0
"""A dataset keeps what it reads if it reads samples again faster than before by more than this factor."""
_KEPT_PART = 8
"""It is enough if that happens to one sample of this many."""
_LEAST_S = 1e-4
"""Samples that take less time than this need not be kept."""
_DEEPEST = 4
_OURS = "lightning_feed."

Reason: TypeAlias = Literal["shared", "past", "collate", "alike", "workers", "file", "error", "time"]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why workers may not be added, or their number may not be changed."""

    reason: Reason
    """``shared``: the dataset refers to an object that processes share. ``past``: a sample depends on what was read
    before it. ``collate``: a batch depends on the batches before it. ``alike``: two workers draw the same random
    numbers. ``workers``: worker processes fail, or make other batches. ``file``: workers share the position of an open
    file. ``error``: the dataset fails in a forked process. ``time``: it hangs there, or is too slow."""
    detail: str = ""
    """Class of the shared object, index of the sample, path of the file, text of the error, or seconds."""
    name: str = ""
    """The attribute that changes when samples are read, if that is known: ``dataset.rng``."""

    def __str__(self) -> str:
        name = f" ({self.name})" if self.name else ""
        seed = "Seed it in a worker_init_fn of the DataLoader, from torch.initial_seed(), if it draws random numbers"
        sentences: dict[Reason, str] = {
            "shared": f"the dataset refers to an object that processes share ({self.detail}), so even trying workers "
            "could change what is trained",
            "past": f"sample {self.detail} depends on what was read before it{name}: workers would change what is "
            f"trained. {seed}",
            "collate": f"a batch depends on the batches before it{name}: workers would change what is trained. {seed}",
            "alike": "two workers draw the same random numbers: workers would change what is trained. A worker_init_fn "
            "must give each of them another seed",
            "workers": f"batches from worker processes are not those that are made without them{self.detail}",
            "file": f"{self.detail} is open, and workers would share its position. Open it in the first call of "
            "__getitem__ to use workers",
            "error": f"the dataset cannot be read in a forked process: {self.detail}",
            "time": f"reading some samples in forked processes gave nothing within {self.detail} s: the dataset hangs "
            "there, or is too slow to be sure",
        }
        return sentences[self.reason]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    refusal: Refusal | None = None
    """None if samples stay the same in workers."""
    keeps: bool = False
    """True if the dataset keeps what it reads, and so is faster the next time: each worker would have to fill its
    own."""
    fingerprint: str = ""
    """A digest of the samples that were read, which tells this dataset from others of the same class and length."""
    seconds: float = 0.0
    """Seconds that the rehearsal took."""


def rehearse(
    loader: AnyLoader, *, limit_s: float = _PARTS * LIMIT_S, stop: Callable[[], bool] = lambda: False
) -> Rehearsal:
    """See whether a loader's samples and batches stay the same in worker processes. Takes about a second.

    Args:
        loader: a DataLoader with a map-style dataset. Nothing is read in this process.
        limit_s: seconds for the whole rehearsal.
        stop: returns True if the program is to stop.

    Raises:
        Stopped: ``stop`` returned True.
    """
    began_s = time.monotonic()
    shared = refers_to_shared(loader)
    if shared:
        return Rehearsal(refusal=Refusal(reason="shared", detail=shared))
    rehearsal = _Rehearsing(loader, began_s + limit_s, stop).run()
    return replace(rehearsal, seconds=time.monotonic() - began_s)


class Item(NamedTuple):
    """A sample to read."""

    index: Index
    seed: int | None
    """Seed of the default generators before the sample; None to go on with their numbers."""


class Reading(NamedTuple):
    """Some samples, as one process has read them."""

    items: list[Item]
    samples: list[Digests]
    batch: Digests
    """The batch of all these samples."""
    seconds: list[float]
    """Seconds for each sample."""


def first_items(loader: AnyLoader) -> Iterator[Item]:
    """Draw indices from a loader's sampler, from a seed of its own. Changes the sampler: call it in a child."""
    _seed(0)
    is_batched = loader.batch_sampler is not None
    source: Any = loader.batch_sampler if is_batched else loader.sampler
    indices = chain.from_iterable(source) if is_batched else source
    for number, index in enumerate(indices):
        yield Item(index, number)


def first_batch(loader: AnyLoader) -> list[Item]:
    """Draw the indices of the first batch, for a collate function that refuses other samples."""
    _seed(0)
    batches = ([index] for index in loader.sampler) if loader.batch_sampler is None else loader.batch_sampler
    drawn: list[Index] = next(iter(batches), [])
    return [Item(index, number) for number, index in enumerate(drawn)]


def read_items(
    loader: AnyLoader, items: Iterable[Item], is_enough: Callable[[list[float], int], bool] = lambda *_: False
) -> Reading:
    """Read samples, and collate them, in this process.

    Args:
        loader: the loader to which the samples belong.
        items: the samples.
        is_enough: called with the seconds of each sample so far, and the bytes of all; returns True to read no more.
    """
    reading = Reading([], [], (), [])
    samples = []
    nbytes = 0
    for item in items:
        began_s = time.perf_counter()
        sample = _read(loader.dataset, item, batched=loader.batch_sampler is not None)
        reading.seconds.append(time.perf_counter() - began_s)
        reading.items.append(item)
        reading.samples.append(digests_of(sample))
        samples.append(sample)
        nbytes += sum(leaf_sizes(sample))
        if is_enough(reading.seconds, nbytes):
            break
    if not samples:
        return reading
    batch = _collated(samples, loader.collate_fn, batched=loader.batch_sampler is not None)
    return reading._replace(batch=digests_of(batch))


def _read(dataset: AnyDataset, item: Item, *, batched: bool) -> Sample:
    if item.seed is not None:
        _seed(item.seed)
    # As torch's workers do, which ask for whole batches if the dataset can make them.
    several = getattr(dataset, "__getitems__", None) if batched else None
    if not several:
        return dataset[item.index]
    made = several([item.index])
    return made[0] if isinstance(made, list) else made


def _collated(samples: list[Sample], collate: Callable[[Any], Batch], *, batched: bool) -> Batch:
    return collate(samples) if batched else [collate(sample) for sample in samples]


def _digested(samples: list[Sample], collate: Callable[[Any], Batch], *, batched: bool) -> Digests:
    """Return the digests of a batch, which take no shared memory on their way out of a worker."""
    return digests_of(_collated(samples, collate, batched=batched), sent=True)


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class _Seen:
    """The same samples as different processes have read them.

    Args:
        first: the samples in their order, in a fresh process.
        again: the same, in a second fresh process.
        backward: the samples in reverse order, in a third fresh process.
        forward: the samples in their order, afterwards in the third process.
    """

    def __init__(self, first: Reading, again: Reading, backward: Reading, forward: Reading) -> None:
        self.first = first
        self.backward = backward
        self.by_itself = differing(first.batch, again.batch)
        """Leaves that differ even between fresh processes, so that workers change nothing."""
        self.by_past = differing(first.batch, forward.batch) - self.by_itself
        """Leaves that depend on what the process has read before."""
        self._samples_by_itself = [differing(*pair) for pair in zip(first.samples, again.samples, strict=True)]

    def dependent_sample(self) -> Index:
        """Return the index of a sample that depends on what was read before it; None if there is none."""
        after_others = reversed(self.backward.samples)
        rows = zip(self.first.items, self.first.samples, after_others, self._samples_by_itself, strict=True)
        for item, one, other, by_itself in rows:
            if differing(one, other) - by_itself:
                return item.index
        return None

    def fingerprint(self) -> str:
        """Return a digest of the first two samples, without the leaves that differ in each process."""
        digest = blake2b(digest_size=16)
        for sample, by_itself in zip(self.first.samples[:2], self._samples_by_itself, strict=False):
            for position, leaf in enumerate(sample):
                if position not in by_itself:
                    digest.update(leaf)
        return digest.hexdigest()


class _Rehearsing:
    """One rehearsal, in forked children.

    Args:
        loader: the loader.
        until_s: the monotonic time at which it must end.
        stop: see :func:`rehearse`.
    """

    def __init__(self, loader: AnyLoader, until_s: float, stop: Callable[[], bool]) -> None:
        self._loader = loader
        self._until_s = until_s
        self._stop = stop
        self._limit_s = 0.0

    def run(self) -> Rehearsal:
        """Read samples after different pasts, then through workers."""
        loader = self._loader
        try:
            first, drawn_from = self._first_reading()
            items = first.items
            if len(items) < 2:
                return Rehearsal()
            back_and_forth = partial(_read_all, loader, [items[::-1], items])
            again, both = self._in_children(partial(_read_all, loader, [items]), back_and_forth)
        except NoAnswer:
            return Rehearsal(refusal=Refusal(reason="time", detail=f"{self._limit_s:.3g}"))
        except FeedError as error:
            return Rehearsal(refusal=Refusal(reason="error", detail=str(error)))
        seen = _Seen(first, *again, *both)
        backward, forward = both
        fresh_s = [first.seconds, *(reading.seconds for reading in again), backward.seconds[::-1]]
        keeps = _is_kept(fresh_s, forward.seconds)
        return Rehearsal(refusal=self._refusal(seen, drawn_from), keeps=keeps, fingerprint=seen.fingerprint())

    def _first_reading(self) -> tuple[Reading, set[str]]:
        """Read some samples in a fresh process, or the first batch if the collate function refuses them."""
        try:
            (result,) = self._in_children(partial(_read_first, self._loader))
        except NoAnswer:
            raise
        except FeedError:
            (result,) = self._in_children(partial(_read_first, self._loader, whole_batch=True))
        first: tuple[Reading, set[str]] = result
        return first

    def _in_children(self, *works: Callable[[], Any]) -> list[Any]:
        self._limit_s = max(0.1, min(LIMIT_S, self._until_s - time.monotonic()))
        return run_in_children(works, timeout_s=self._limit_s, stop=self._stop)

    def _refusal(self, seen: _Seen, drawn_from: set[str]) -> Refusal | None:
        sample = seen.dependent_sample()
        depends = sample is not None
        if seen.by_past:  # on random numbers, perhaps, which a worker_init_fn may seed
            depends = self._loader.worker_init_fn is None
        if depends:
            return self._past(sample)
        try:
            (heard,) = self._in_children(partial(_read_in_workers, self._loader, seen.first.items))
        except NoAnswer:
            return Refusal(reason="time", detail=f"{self._limit_s:.3g}")
        except FeedError as error:
            return Refusal(reason="workers", detail=f": {error}")
        if heard.moved_file:
            return Refusal(reason="file", detail=heard.moved_file)
        if not seen.by_past <= differing(heard.one, heard.other):  # not reseeded in each worker
            return self._past(sample)
        if drawn_from & heard.alike:
            return Refusal(reason="alike")
        left_out = seen.by_itself | seen.by_past
        pairs = ((seen.first.batch, heard.forward), (seen.backward.batch, heard.backward))
        if any(differing(*pair) - left_out for pair in pairs):
            return Refusal(reason="workers")
        return None

    def _past(self, sample: Index) -> Refusal:
        """Return a refusal, with the name of what changes if a child finds it."""
        name = ""
        with suppress(NoAnswer, LoaderError):
            (name,) = self._in_children(partial(_changed_name, self._loader))
        if sample is None:
            return Refusal(reason="collate", name=name)
        return Refusal(reason="past", detail=str(sample), name=name)


def _is_kept(fresh_s: list[list[float]], second_s: list[float]) -> bool:
    """Return True if some samples were read far faster for the second time than in each fresh process.

    Training may have read the others already, in which case they are fast in fresh processes, too.

    Args:
        fresh_s: seconds for each sample, in each of several fresh processes.
        second_s: seconds for each sample that the same process had read before.
    """
    kept = [min(first_s) > max(_LEAST_S, _KEPT * again_s) for *first_s, again_s in zip(*fresh_s, second_s, strict=True)]
    return kept.count(True) >= max(1, len(kept) // _KEPT_PART)


# --- in a child -------------------------------------------------------------------------------------------------------


def _read_first(loader: AnyLoader, *, whole_batch: bool = False) -> tuple[Reading, set[str]]:
    """Choose samples and read them. Also returns the names of the default generators from which they draw."""
    if whole_batch:
        reading = read_items(loader, first_batch(loader))
    else:
        reading = read_items(loader, islice(first_items(loader), MOST_SAMPLES), _is_enough)
    generators = DefaultGenerators()
    read_items(loader, _unseeded(reading.items))
    return reading, set(generators.used())


def _unseeded(items: list[Item]) -> list[Item]:
    return [Item(index, None) for index, _ in items]


def _is_enough(seconds: list[float], nbytes: int) -> bool:
    if len(seconds) < FEWEST_SAMPLES:
        return len(seconds) > 1 and (sum(seconds) > SLOW_S or nbytes >= LARGE_BYTES)
    return sum(seconds) > PASS_S or nbytes >= LARGE_BYTES


def _read_all(loader: AnyLoader, passes: list[list[Item]]) -> list[Reading]:
    return [read_items(loader, items) for items in passes]


class _Heard(NamedTuple):
    """The same batch, four times, from two worker processes."""

    one: Digests
    """From the first worker, with its own random numbers."""
    other: Digests
    """From the second worker, with its own random numbers."""
    forward: Digests
    """From the first worker, seeded as without workers."""
    backward: Digests
    """From the second worker, seeded as without workers, in reverse order."""
    alike: set[str]
    """Names of the default generators that began in the same state in both workers."""
    moved_file: str
    """The path of a file whose position the workers have moved in the process that started them. Empty if none."""


def _read_in_workers(loader: AnyLoader, items: list[Item]) -> _Heard:
    unseeded = _unseeded(items)
    is_batched = loader.batch_sampler is not None
    init = _InitOfDataset(loader.worker_init_fn)
    before = positions()
    batches = iter(
        DataLoader(
            _SeededDataset(loader.dataset, batched=is_batched),
            batch_sampler=[unseeded, unseeded, items, items[::-1]],
            num_workers=2,
            collate_fn=partial(_digested, collate=loader.collate_fn, batched=is_batched),
            worker_init_fn=init,
            multiprocessing_context=loader.multiprocessing_context,
        )
    )
    try:
        made = list(batches)
    except Exception as error:
        moved = moved_file(before)  # the reason for an error of the code that reads the file
        if moved:
            return _Heard((), (), (), (), set(), moved)
        raise LoaderError(ended_worker(batches, error) or ": ".join(original_error(error))) from error
    one, other, forward, backward = made
    return _Heard(one, other, forward, backward, init.alike(), moved_file(before))


class _SeededDataset(Dataset[Sample]):
    """A dataset whose indices are Items."""

    def __init__(self, original: AnyDataset, *, batched: bool) -> None:
        self.original = original
        self._batched = batched

    def __getitem__(self, item: Item) -> Sample:
        return _read(self.original, item, batched=self._batched)


class _InitOfDataset:
    """Calls a worker_init_fn with the original dataset in ``get_worker_info()``. Notes the states of generators."""

    def __init__(self, function: Callable[[int], object] | None) -> None:
        self._function = function
        self._states = torch.zeros((2, len(DefaultGenerators().read())), dtype=torch.int64).share_memory_()

    def __call__(self, worker_id: int) -> None:
        worker: Any = get_worker_info()
        object.__setattr__(worker, "dataset", worker.dataset.original)  # WorkerInfo refuses usual assignments
        if self._function is not None:
            self._function(worker_id)
        states = DefaultGenerators().read().values()
        self._states[worker_id] = torch.tensor([zlib.crc32(state) for state in states])

    def alike(self) -> set[str]:
        """Return the names of the default generators that began in the same state in both workers."""
        are_equal = (self._states[0] == self._states[1]).tolist()
        return {name for name, is_equal in zip(DefaultGenerators().read(), are_equal, strict=True) if is_equal}


# --- the name of what changes, in a child -----------------------------------------------------------------------------


def _changed_name(loader: AnyLoader) -> str:
    """Return the attribute of the dataset or the collate function that changes when samples are read.

    Attributes are compared by what pickle would send of them to a worker. Empty if no attribute of the user is seen to
    change.
    """
    roots = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
    before = {name: _attributes(root, name, _DEEPEST) for name, root in roots.items()}
    _read_first(loader)
    for name, root in roots.items():
        after = _attributes(root, name, _DEEPEST)
        changed = [path for path, digest in after.items() if before[name].get(path, digest) != digest]
        if changed:
            return max(changed, key=lambda path: path.count("."))
    return ""


def _attributes(holder: object, path: str, depth: int) -> dict[str, Digests]:
    """Return the digests of the attributes of an object, and of the objects in these attributes, by path."""
    digests = {}
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        inner = f"{path}.{name}"
        if not type(holder).__module__.startswith(_OURS):
            digests[inner] = digests_of(value)
        if depth > 1:
            digests |= _attributes(value, inner, depth - 1)
    return digests
