"""Rates of the loader alone: as configured, with other numbers of workers, constant samples, and files in memory."""

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_feed.diagnosing.parts import LoaderPart, NotMeasurable, fresh, key_bytes
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError, FeedError, LoaderError
from lightning_feed.load.kinds import AnyDataset, Sample
from lightning_feed.measure.experiment_results import KeyBytes
from lightning_feed.trials.cloning import Changes, burst_of, iter_is_itself, original_error

_TIMES = 3
"""Largest number of tries of each number of workers."""
_EACH = 1 / 8
"""Share of the time for each try."""
ROUNDS = 8
"""Rounds of the workers whose batches are read from memory: two that do not count, and six that do."""


def measure_loader(session: Session) -> None:
    """Measure the rate of the loaders side by side, as configured. Samplers begin again at their end.

    Raises:
        LoaderError: the loader gives nothing, or hangs.
        DatasetError: a sample cannot be loaded.
    """
    kind = type(session.train_loaders).__name__
    if not session.parts and not hasattr(session.train_loaders, "__iter__"):
        raise LoaderError(
            f"The training loader is a {kind}, which is not iterable. Give a DataLoader, a dict or list of them, or "
            "another iterable."
        )
    if not session.parts and iter_is_itself(session.train_loaders):
        raise NotMeasurable(f"a {kind} can be iterated only once, and training needs it")
    session.check_memory()
    rate, session.first_batch = session.drain()
    session.alone = rate
    session.note(loader_per_s=rate.batches_per_s, loader_start_s=rate.start_s)
    workers = [part.loader.num_workers for part in session.parts]
    if workers:
        session.note(worker_scaling=((max(workers), rate.batches_per_s),))
    if all(workers):
        session.note(taking_ms=rate.taking_ms)


def measure_keys(session: Session) -> None:
    """Note the bytes of each part of the first batch."""
    names = [part.name for part in session.parts] or [""]
    keys = [
        KeyBytes(name=name, bytes_per_batch=size)
        for part, batch in zip(names, session.first_batch, strict=True)
        for name, size in key_bytes(batch, part).items()
    ]
    session.note(keys=tuple(keys))


# --- other numbers of workers -----------------------------------------------------------------------------------------


def workers_to_try(session: Session) -> list[int]:
    """Numbers of workers around the configured number and the number of CPUs, the most informative first."""
    configured = max(part.loader.num_workers for part in session.parts)
    cpus = max(1, session.machine.usable_cpus // len(session.parts))
    wanted = [cpus, 0, 1, 2 * configured, configured // 2, max(1, cpus // 2), configured + 1]
    most = max(2 * cpus, configured)
    numbers = [number for number in dict.fromkeys(wanted) if number <= most and number != configured]
    numbers.insert(min(2, len(numbers)), configured)
    return numbers


def measure_scaling(session: Session) -> None:
    """Measure the rate with each number of workers. Repeats all of them while there is time.

    The rate varies even with the same number of workers. Only a larger difference between two numbers counts.

    Raises:
        NotMeasurable: some numbers were not tried; the message says why.
    """
    deadline = session.clock() + session.share_s
    rates = {workers: [rate] for workers, rate in session.results.worker_scaling}
    reasons: dict[int, str] = {}
    for number in workers_to_try(session) * _TIMES:
        if session.clock() >= deadline - session.counted_s(_EACH):
            break
        if number in reasons:
            continue
        try:
            session.check_memory(number)
            rate = session.rate(partial(LoaderPart.changes, num_workers=number), share=_EACH)
        except (NotMeasurable, FeedError) as error:
            reasons[number] = f"{number} workers: {error}"
            continue
        rates.setdefault(number, []).append(rate)
        ordered = sorted(rates.items())
        session.note(
            worker_scaling=tuple((workers, statistics.median(tries)) for workers, tries in ordered),
            worker_spread=tuple((workers, min(tries), max(tries)) for workers, tries in ordered if len(tries) > 1),
        )
    if reasons:
        raise NotMeasurable("; ".join(reasons.values()))


# --- constant samples -------------------------------------------------------------------------------------------------


class _Constant:
    """Replaces a dataset, and gives one sample again and again.

    Args:
        sample: the sample to give.
        original: the dataset, asked for attributes that a ``worker_init_fn`` may want.
    """

    def __init__(self, sample: object, original: AnyDataset) -> None:
        self.sample = sample
        self.original = original

    def __getattr__(self, name: str) -> Any:
        # Not __getitems__: torch would load whole batches from the original. Not a stream's length or state: torch
        # would use them. And nothing while unpickling.
        if name in ("state_dict", "load_state_dict") or name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


class NullDataset(_Constant, Dataset[Sample]):
    """Gives the same sample for every index."""

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: object) -> Sample:
        return fresh(self.sample)


class NullStream(_Constant, IterableDataset[Sample]):
    """Gives the same sample without end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield fresh(self.sample)


def measure_ceiling(session: Session) -> None:
    """Measure the rate of the loaders with constant samples: the limit of handing over, collating and pinning.

    Raises:
        NotMeasurable: for a loader of a class that needs a dataset of its own kind, such as LitData's.
    """
    session.check_memory()
    samples = dict(zip(session.parts, session.samples, strict=True))

    def constant(part: LoaderPart) -> Changes:
        kind: Any = NullDataset
        if part.stream:
            kind = NullStream
        return Changes(dataset=kind(samples[part], part.loader.dataset), endless=True)

    try:
        rate = session.rate(constant)
    except DatasetError as error:
        kinds = ", ".join(sorted({type(part.loader).__name__ for part in session.parts}))
        kind, text = original_error(error.__cause__ or error)
        why = text.partition("\n")[0] or kind
        raise NotMeasurable(f"a {kinds} does not accept constant samples as its dataset: {why}") from error
    session.note(ceiling_per_s=rate)


# --- files in memory --------------------------------------------------------------------------------------------------


def measure_files_in_memory(session: Session) -> None:
    """Measure the rate over the first batches of the samplers, repeated.

    The first pass does not count: it reads the files from storage into the page cache.
    """
    session.check_memory()
    if any(part.stream for part in session.parts):
        raise NotMeasurable("an iterable dataset decides itself which samples come")
    assert session.alone is not None, "it is measured first"
    burst = max(burst_of(part.loader) for part in session.parts)
    count = min(1 + ROUNDS * burst, int(session.alone.batches_per_s * session.share_s / 3))
    batches = {part: part.first_batches(count) for part in session.parts}
    count = min(map(len, batches.values()))
    if count < 1 + burst:
        raise NotMeasurable(f"too little time: {count} batches fit, but a round of the workers has {1 + burst}")
    rate = session.rate(
        lambda part: Changes(batches=batches[part], endless=True),
        share=0.5,
        warm_rounds=max(2, math.ceil(count / burst)),
    )
    session.note(cached_bytes_per_s=rate)
