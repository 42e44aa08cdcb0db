"""Rates of the loader alone: as configured, with other numbers of workers, constant samples, or files in memory."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from lightning_feed.diagnosing.parts import LoaderPart, NotMeasurable, fresh, key_bytes
from lightning_feed.diagnosing.session import Session
from lightning_feed.errors import DatasetError, LoaderError
from lightning_feed.in_fit.goal import KEEPS, fills_a_cache, rehearsal_of, why_fixed, why_left_alone, work_of
from lightning_feed.load.child import NoAnswer
from lightning_feed.load.kinds import AnyDataset, Sample
from lightning_feed.load.worker import original_error
from lightning_feed.measure.experiment_results import KeyBytes, TriedSetting
from lightning_feed.trials.cloning import Changes, burst_of, iter_is_itself
from lightning_feed.trials.search import Trial
from lightning_feed.trials.tune_loader import Goal, Tuned, tune_loader

ROUNDS = 8
"""Largest number of rounds to repeat from memory, after a first batch. A round has one batch from each worker."""


def measure_loader(session: Session) -> None:
    """Measure the rate of the loaders side by side, as configured. Samplers begin again at their end.

    Raises:
        LoaderError: the loader yields no batch, or hangs, or is not iterable.
        NotMeasurable: the loader can be iterated only once.
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
    if all(part.loader.num_workers for part in session.parts):
        session.note(taking_ms=rate.taking_ms)


def measure_keys(session: Session) -> None:
    """Record the bytes of each part of the first batch."""
    names = [part.name for part in session.parts] or [""]
    keys = [
        KeyBytes(name=name, bytes_per_batch=size)
        for part, batch in zip(names, session.first_batch, strict=True)
        for name, size in key_bytes(batch, part).items()
    ]
    session.note(keys=tuple(keys))


# --- other numbers of workers -----------------------------------------------------------------------------------------


def measure_workers(session: Session) -> None:
    """Try numbers of workers, with a consumer that works as long as a training step of the user's model.

    Raises:
        NotMeasurable: workers would change what is trained, or there are several loaders.
    """
    if len(session.parts) > 1:
        raise NotMeasurable("the workers of several loaders are not tried together")
    (part,) = session.parts
    why_not = why_fixed(part.loader)
    if why_not:
        raise NotMeasurable(why_not)
    session.check_memory()
    rehearsal = rehearsal_of(part.loader, session.share_s)
    why_not = why_left_alone(part.loader, rehearsal)
    if why_not and not part.loader.num_workers:
        session.note_refusal(why_not)
    if fills_a_cache(part.loader, rehearsal):
        why_not = why_not or KEEPS
    if why_not:
        raise NotMeasurable(why_not)
    try:
        tuned = tune_loader(
            part.loader, _goal_of(session), rehearsal=rehearsal, machine=session.machine, clock=session.clock
        )
    except NoAnswer as error:
        raise NotMeasurable(str(error)) from error
    session.tuned = tuned
    _note_trials(session, tuned)


def _note_trials(session: Session, tuned: Tuned) -> None:
    trials = sorted((trial for trial in tuned.trials if trial.steps_s), key=lambda trial: trial.setting.num_workers)
    session.note(
        tried=tuple(_tried(trial, tuned) for trial in trials),
        why_chosen=tuned.reason,
        out_of_time=tuned.out_of_time,
        inconclusive=tuned.inconclusive,
    )


def _goal_of(session: Session) -> Goal:
    """Return the goal of the trials: steps as short as they can be, or the fastest loader if no step was measured."""
    measured = session.measured
    goal = Goal(budget_s=session.share_s)
    if measured is None:
        return goal
    work = work_of(measured)
    if work is None:
        return goal
    facts = measured.facts
    step_ms = measured.stats.step_ms
    return replace(
        goal,
        work=work,
        device_type=facts.device_type,
        own_step_s=None if not step_ms else 1e-3 * step_ms,
        steps_per_epoch=facts.batches_per_epoch or math.inf,
    )


def _tried(trial: Trial, tuned: Tuned) -> TriedSetting:
    """Return the result of a trial, for the report."""
    return TriedSetting(
        num_workers=trial.setting.num_workers,
        prefetch_factor=trial.setting.prefetch_factor,
        step_ms=1e3 * trial.step_s,
        shortest_ms=1e3 * min(trial.steps_s),
        longest_ms=1e3 * max(trial.steps_s),
        own=trial is tuned.trial_of(tuned.own),
        chosen=trial is tuned.trial_of(tuned.setting),
    )


# --- constant samples -------------------------------------------------------------------------------------------------


class _ConstantSample:
    """Replaces a dataset, and returns the same sample again and again.

    Args:
        sample: the sample to return.
        original: the replaced dataset, whose attributes a ``worker_init_fn`` may want.
    """

    def __init__(self, sample: object, original: AnyDataset) -> None:
        self.sample = sample
        self.original = original

    def __getattr__(self, name: str) -> Any:
        # __getitems__ is left out, because torch would load whole batches from the original with it; so are a stream's
        # length and state, which torch would use. While unpickling there is no original yet.
        if name in ("state_dict", "load_state_dict") or name.startswith("__") or "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.original, name)


class NullDataset(_ConstantSample, Dataset[Sample]):
    """Map-style dataset that returns the same sample for every index."""

    def __len__(self) -> int:
        return len(self.original)

    def __getitem__(self, index: object) -> Sample:
        return fresh(self.sample)


class NullStream(_ConstantSample, IterableDataset[Sample]):
    """Iterable dataset that yields the same sample without end."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield fresh(self.sample)


def measure_ceiling(session: Session) -> None:
    """Measure the rate of the loaders with constant samples: the limit of handing over, collating and pinning.

    Raises:
        NotMeasurable: the loader's class needs a dataset of its own kind, as LitData's does, or memory is short.
    """
    session.check_memory()
    samples = dict(zip(session.parts, session.samples, strict=True))

    def constant(part: LoaderPart) -> Changes:
        kind = NullStream if part.stream else NullDataset
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
    """Measure the rate of the loaders with the samplers' first batches, loaded again and again.

    The first pass over these batches does not count: it reads their files from storage into the page cache.
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
