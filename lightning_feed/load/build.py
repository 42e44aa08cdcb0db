"""Build loaders from datasets: name and check the datasets, and apply the recommended settings."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

from lightning_feed.errors import DatasetError, SettingsError
from lightning_feed.load.kinds import AnyDataset, AnySampler, Batch, Sample
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.loader_tree import LoaderPath, name_in_split
from lightning_feed.load.order import EpochOrder, has_set_epoch, size_of
from lightning_feed.load.recommend import Recommendation, RunFacts, Workload, recommend
from lightning_feed.load.settings import LoaderSettings, Setting, workers_of
from lightning_feed.load.stage import BatchDecoder
from lightning_feed.load.watchdog import Watch
from lightning_feed.load.worker import WorkerInit, refuse_unsendable
from lightning_feed.machine.limits import Machine, read_machine

if TYPE_CHECKING:
    from lightning_feed.load.rehearsal import Rehearsal

_SAMPLES = (tuple, list, dict, str, bytes, torch.Tensor)
"""Types with ``__getitem__`` and ``__len__`` that are samples, not datasets."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Specification of one loader of a split."""

    name: str
    """Name in reports and errors."""
    split: str
    batch_size: int
    together: int
    """Number of loaders that run at the same time, including this one."""
    sampler: Callable[[AnyDataset], AnySampler]
    """Returns the user's sampler for a map-style dataset, or None if the user has not set one."""
    collate_fn: Callable[[list[Sample]], Batch] | None
    order: EpochOrder
    decode: BatchDecoder | None = None
    """Decodes batches once they have left the workers. None if batches need no decoding."""


def build_loader(
    dataset: AnyDataset,
    part: Part,
    settings: LoaderSettings,
    job: RunFacts,
    rehearsed: "Callable[[FeedLoader], Rehearsal] | None" = None,
) -> tuple[FeedLoader, Recommendation]:
    """Build the loader for one dataset. Returns the loader and its settings, with reasons.

    It has worker processes that the user has not asked for only if a rehearsal has seen that samples stay the same.

    Args:
        dataset: the dataset.
        part: the loader to build.
        settings: the user's settings.
        job: the run's properties.
        rehearsed: returns the rehearsal of a loader; None to rehearse it now.

    Raises:
        SettingsError: the settings leave no batch, would keep the workers of loaders that the Trainer replaces, or use
            threads or Ray for an iterable dataset.
        LoaderError: the dataset or the collate function cannot be sent to the workers.
    """
    drop_last = part.split == "train" and settings.drop_last
    machine = read_machine()
    workload = _workload(dataset, part, job, drop_last=drop_last)
    recommendation = recommend(machine, settings, workload)
    setting = recommendation.setting
    build = partial(_built, dataset, part, settings, job, _sampler(dataset, part, job))
    loader = build(setting)
    if setting.num_workers and setting.workers == "process":
        _refuse_unsendable(loader, part, settings, machine)
    if not _adds_workers(setting, settings, workload):
        return loader, recommendation
    from lightning_feed.load.rehearsal import rehearse  # only if workers are chosen

    refusal = (rehearsed or rehearse)(loader).refusal
    if refusal is None:
        loader.probed = True
        return loader, recommendation
    recommendation = recommend(machine, settings, replace(workload, why_no_workers=str(refusal)))
    return build(recommendation.setting), recommendation


def _adds_workers(setting: Setting, settings: LoaderSettings, workload: Workload) -> bool:
    """Return True if a loader of a map-style dataset has worker processes that the user has not asked for."""
    is_asked = isinstance(settings.num_workers, int) or bool(settings.asking_for_workers())
    return setting.num_workers > 0 and setting.workers == "process" and not is_asked and not workload.iterable


def _refuse_unsendable(loader: FeedLoader, part: Part, settings: LoaderSettings, machine: Machine) -> None:
    """Raise a LoaderError if a loader cannot start its worker processes."""
    start_method = settings.start_method or machine.start_method
    if start_method != "fork":
        # Checked here, because an error raised later, by iter(), is masked by an error from Lightning's teardown.
        refuse_unsendable(loader, part.name, start_method)


def _built(
    dataset: AnyDataset, part: Part, settings: LoaderSettings, job: RunFacts, sampler: AnySampler, setting: Setting
) -> FeedLoader:
    drop_last = part.split == "train" and settings.drop_last
    options: dict[str, Any] = {}
    if setting.num_workers:
        options["timeout"] = settings.timeout_s
    if setting.num_workers and setting.workers == "process":
        options["worker_init_fn"] = job.worker_init or WorkerInit()
        options["multiprocessing_context"] = settings.start_method
    return FeedLoader(
        dataset,
        batch_size=part.batch_size,
        sampler=sampler,
        num_workers=setting.num_workers,
        collate_fn=part.collate_fn,
        pin_memory=setting.pin_memory,
        drop_last=drop_last,
        prefetch_factor=setting.prefetch_factor,
        persistent_workers=setting.persistent_workers,
        in_order=setting.in_order,
        background=settings.background,
        order=part.order,
        workers=workers_of(settings),
        hand_over=settings.hand_over,
        decode=part.decode,
        watch=Watch(part.name),
        **options,
    )


def _workload(dataset: AnyDataset, part: Part, job: RunFacts, *, drop_last: bool) -> Workload:
    return Workload(
        split=part.split,
        batch_size=part.batch_size,
        batches=_batches(dataset, part, job, drop_last=drop_last),
        loaders=part.together,
        iterable=isinstance(dataset, IterableDataset),
        has_set_epoch=has_set_epoch(dataset),
        **vars(job),
    )


def _sampler(dataset: AnyDataset, part: Part, job: RunFacts) -> AnySampler:
    """Return the user's sampler, or a RandomSampler for training. Returns None if the order is fixed."""
    if isinstance(dataset, IterableDataset):
        return None
    sampler = part.sampler(dataset)
    if sampler is None and part.split == "train" and not job.overfit:
        return RandomSampler(dataset)
    return sampler


def _batches(dataset: AnyDataset, part: Part, job: RunFacts, *, drop_last: bool) -> int | None:
    """Count the batches of an epoch on one rank. Returns None if the dataset has no length.

    Raises:
        SettingsError: ``drop_last`` leaves no batch.
    """
    samples = size_of(dataset)
    if samples is None:
        return None
    ranks = job.sharing_ranks
    if isinstance(dataset, IterableDataset):
        ranks = 1
    share = math.ceil(samples / ranks)
    if not drop_last:
        return math.ceil(share / part.batch_size)
    if share < part.batch_size:
        on_ranks = f" ({share} on each of {ranks} ranks)" if ranks > 1 else ""
        raise SettingsError(
            f"drop_last=True with batch_size={part.batch_size} leaves no batch: {part.name} has only {samples} "
            f"samples{on_ranks}. Set batch_size to {share} or less, or leave drop_last out."
        )
    return share // part.batch_size


# --- the datasets of a split ------------------------------------------------------------------------------------------


def name_datasets(datasets: object, split: str) -> list[tuple[str, AnyDataset]]:
    """Return the datasets in ``datasets`` with the names that reports and errors use.

    Args:
        datasets: a dataset, or a dict or list of datasets.
        split: for example ``"train"``. Datasets in a dict or list are named ``train['key']`` or ``train[0]``.

    Raises:
        DatasetError: there is no dataset, one is empty, or an object is not a dataset.

    Example:
        >>> name_datasets({"real": range(3), "made up": range(5)}, "train")
        [("train['real']", range(0, 3)), ("train['made up']", range(0, 5))]
    """
    named = [(name_in_split(split, path), dataset) for path, dataset in _datasets_in(datasets)]
    if not named:
        raise DatasetError(
            f"make_dataset({split!r}) returned an empty {type(datasets).__name__}. Return a dataset that has "
            "samples, or None if there is no such split."
        )
    for name, dataset in named:
        _check_dataset(name, dataset, split)
    return named


def _datasets_in(datasets: object) -> list[tuple[LoaderPath, AnyDataset]]:
    """List the datasets with the paths of their loaders: a key or a position. Datasets cannot be nested."""
    if isinstance(datasets, dict):
        return [((key,), dataset) for key, dataset in datasets.items()]
    if isinstance(datasets, list):
        return [((position,), dataset) for position, dataset in enumerate(datasets)]
    return [((), datasets)]


def like(datasets: object, values: list[Any]) -> Any:
    """Arrange one value per dataset in the structure of ``datasets``: a single value, a list or a dict."""
    if isinstance(datasets, dict):
        return dict(zip(datasets, values, strict=True))
    if isinstance(datasets, list):
        return values
    return values[0]


def even_batch_size(wished: int, samples: int, world_size: int = 1) -> tuple[int, str]:
    """Choose the batch size, from half of ``wished`` to ``wished``, that leaves the fewest samples for a last batch.

    In a tie the larger size wins. Each rank has ``ceil(samples / world_size)`` samples, because a DistributedSampler
    repeats some to make the ranks equal.

    Returns:
        The size, and why it was chosen.

    Example:
        >>> even_batch_size(512, 50_000)[0]
        500
    """
    share = -(-samples // world_size)
    samples_of_rank = f"{share} samples"
    if world_size > 1:
        samples_of_rank += f" on each of {world_size} ranks"
    if share <= wished:
        return wished, f"the {samples_of_rank} fit into one batch"
    best = min(range((wished + 1) // 2, wished + 1), key=lambda size: (share % size, -size))
    reason = f"the {samples_of_rank} leave {share % best} for a last batch"
    if best == wished:
        return best, f"{reason}; no size from half of {wished} up leaves fewer"
    return best, f"{reason}, instead of {share % wished} with {wished}"


def _check_dataset(name: str, dataset: AnyDataset, split: str) -> None:
    kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}".removeprefix("builtins.")
    map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, _SAMPLES)
    if not map_style and not isinstance(dataset, IterableDataset):
        raise DatasetError(
            f"make_dataset({split!r}) returned {kind} for {name}, not a dataset. Return a torch.utils.data.Dataset "
            "with __getitem__ and __len__, an IterableDataset for a stream, or a dict or list of datasets; "
            "TensorDataset makes one from tensors. The data module makes the loader."
        )
    if size_of(dataset) == 0:
        raise DatasetError(
            f"The dataset of {name} ({kind}) is empty. Check its path and filter, or return "
            f"None from make_dataset({split!r}) if there is no such split."
        )
