"""``num_workers="tune"`` in a fit: trials with a training loader, and settings from their result."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from lightning_feed.errors import LoaderError, throughput
from lightning_feed.load.kinds import Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import DrawsOf, size_of
from lightning_feed.load.processes import shut_down_workers
from lightning_feed.load.rank_store import connected, gather
from lightning_feed.load.settings import LoaderSettings, RayCluster, Recommendation
from lightning_feed.trials.cloning import has_threads, twin_of
from lightning_feed.trials.search import Goal, Tuned
from lightning_feed.trials.trial import Setting
from lightning_feed.trials.tune_loader import Store, tune_loader

logger = logging.getLogger(__name__)
_OPEN = ("prefetch_factor", "pin_memory", "persistent_workers")
"""Settings that tuning chooses if the user does not."""


def why_not_now(trainer: Any, split: str) -> str:
    """The reason for using ``"auto"`` in place of ``"tune"`` for a loader. Empty if it can be tuned."""
    if split != "train":
        return "not tuned: only training loaders are; using the settings of num_workers='auto'"
    if trainer is None or trainer.state.fn != "fit":
        return "not tuned: tuning waits for trainer.fit; using the settings of num_workers='auto'"
    if trainer.fast_dev_run:
        return "not tuned in a fast_dev_run; using the settings of num_workers='auto'"
    return ""


def goal_of(trainer: Any, loader: object, **others: Any) -> Goal:
    """The goal of tuning for a run: all ranks of a node at once; the fastest setting, unless ``others`` set a demand.

    Threads are tried only if the user's loader has threads: some datasets cannot be read by several threads, and may
    not say so.
    """
    return Goal(
        local_ranks=trainer.num_devices,
        device_type=trainer.strategy.root_device.type,
        may_persist=not trainer.reload_dataloaders_every_n_epochs,
        threads=has_threads(loader),
        **others,
    )


def tune_for_fit(loader: DataLoader[Batch], trainer: Any, name: str, goal: Goal | None = None) -> Tuned | None:
    """Tune the training loader of a run that is about to begin. The loader itself is not iterated.

    With several ranks, one rank of each node runs the trials, for all its ranks at once; the others wait for it.

    Args:
        loader: the loader without tuning.
        trainer: the Trainer of the run.
        name: name of the loader, for the progress bar.
        goal: result of :func:`goal_of`, with further limits.

    Returns:
        The result; None, on all ranks, if torch.distributed does not connect them.

    Raises:
        FeedError: the loader cannot be tuned: its data set raises, hangs, or gives nothing.
    """
    goal = goal or goal_of(trainer, loader)

    def tune() -> Tuned:
        with tqdm(total=goal.max_trials, desc=f"tuning the loader of {name}", disable=None, leave=False) as bar:
            return tune_loader(loader, goal, store=Store(), on_trial=lambda _: bar.update())

    if trainer.world_size < 2:
        return tune()
    if not connected():
        logger.warning("The loaders are not tuned: torch.distributed does not connect the ranks, so they cannot agree.")
        return None
    return _once_per_node(tune, trainer)


def _once_per_node(tune: Callable[[], Tuned], trainer: Any) -> Tuned:
    """The result of local rank 0, on all ranks of its node.

    Raises:
        LoaderError: ``tune`` failed on another rank, of any node.
        Exception: the error of ``tune``, on the rank that ran it.
    """
    mine: Tuned | Exception | None = None
    if trainer.local_rank == 0:
        try:
            mine = tune()
        except Exception as error:  # noqa: BLE001  # raised below, once the others know
            mine = error
    result = mine if not isinstance(mine, Exception) else f"{type(mine).__name__}: {mine}"
    every = gather(trainer, (trainer.node_rank, result))
    if isinstance(mine, Exception):
        raise mine
    for node, found in every:
        if isinstance(found, str):  # raise on all nodes: ranks that train would wait for ranks that do not
            raise LoaderError(
                f"The rank that tunes the loaders for node {node} failed: {found} See its own error for details. Pass "
                "LoaderSettings(num_workers=...) to train without tuning."
            )
    tuned: Tuned = next(found for node, found in every if node == trainer.node_rank and found is not None)
    return tuned


def settled(settings: LoaderSettings, tuned: Tuned | None) -> LoaderSettings:
    """``settings``, completed by tuned values; with ``num_workers="auto"`` if there is no result."""
    if tuned is None:
        return replace(settings, num_workers="auto")
    found = tuned.setting
    if not found.num_workers:
        pinned = settings.pin_memory if settings.pin_memory != "auto" else found.pin_memory
        return replace(without_workers(settings), pin_memory=pinned)
    changed: dict[str, Any] = {"num_workers": found.num_workers, "workers": found.workers}
    changed |= {name: getattr(found, name) for name in _OPEN if getattr(settings, name) == "auto"}
    if found.workers == "thread":
        changed["start_method"] = None
    if found.num_workers == 1:
        changed["in_order"] = True  # no batch can overtake another
    return replace(settings, **changed)


def without_workers(settings: LoaderSettings) -> LoaderSettings:
    """``settings`` with no workers, and without settings that need workers."""
    plain = LoaderSettings()
    return replace(settings, num_workers=0, **{name: getattr(plain, name) for name in settings.asking_for_workers()})


def explained(found: Recommendation, settings: LoaderSettings, tuned: Tuned | None, why_not: str) -> Recommendation:
    """The recommendation, with tuning as the reason for the values that it chose.

    Args:
        found: recommendation for the result of :func:`settled`.
        settings: the user's settings.
        tuned: the result of tuning.
        why_not: the reason for not tuning; empty if the ranks could not agree.
    """
    reasons = dict(found.reasons)
    if tuned is None:
        why_not = why_not or "not tuned: the ranks are not connected, so this is as for num_workers='auto'"
        return replace(found, reasons={**reasons, "num_workers": f"{reasons['num_workers']} ({why_not})"})
    short = "tuned" if not tuned.remembered else "tuned by an earlier run, and checked"
    rate = "" if tuned.batches_per_s is None else f", {throughput(tuned.batches_per_s, tuned.batch_size)} in the trial"
    reasons["num_workers"] = f"{short}: {tuned.reason}{rate}"
    # A value from the user stays "as given". A value that has no effect without workers keeps the reason for that.
    chosen = {name: short for name in _OPEN if getattr(settings, name) == "auto" and reasons[name] == "as given"}
    return replace(found, reasons=reasons | chosen)


# --- the tuned loader ------------------------------------------------------------------------------------------------


def why_fixed(loader: DataLoader[Batch]) -> str:
    """The reason why the workers of a training loader cannot be changed; empty if they can."""
    kind = type(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable, so its samples depend on the number of workers"
    known = kind.__iter__ in (DataLoader.__iter__, FeedLoader.__iter__)
    if not known or kind._get_iterator is not DataLoader._get_iterator:
        return f"the training loader ({kind.__name__}) iterates in its own way"
    if isinstance(loader, FeedLoader) and isinstance(loader.workers, RayCluster):
        return "Ray workers run on other machines"
    return ""


def setting_of(loader: DataLoader[Batch]) -> Setting:
    """The present setting of a loader."""
    workers = loader.num_workers
    return Setting(
        num_workers=workers,
        prefetch_factor=loader.prefetch_factor if workers else None,
        workers="thread" if workers and has_threads(loader) else "process",
        persistent_workers=loader.persistent_workers,
        pin_memory=loader.pin_memory,
    )


def with_setting(loader: DataLoader[Batch], setting: Setting) -> DataLoader[Batch]:
    """A copy of a loader with the workers of ``setting``, in the same order of samples.

    Its workers are seeded by a separate generator. The seed that the given loader would draw for its workers is still
    drawn, so that samplers and model draw the same numbers afterwards.

    Args:
        loader: a loader for which :func:`why_fixed` returns nothing. It stays unchanged.
        setting: source of ``num_workers``, ``workers``, ``prefetch_factor`` and ``persistent_workers``. Persistent
            workers stay persistent.
    """
    values: dict[str, Any] = {
        "num_workers": setting.num_workers,
        "prefetch_factor": setting.prefetch_factor,
        "persistent_workers": setting.persistent_workers or loader.persistent_workers,
    }
    if isinstance(loader, FeedLoader):
        if setting.num_workers:
            values["workers"] = setting.workers
        if loader.draws is None:
            values |= {"draws": DrawsOf(loader), "generator": _seeds_for(loader)}
    else:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        source = getattr(loader, name)
        if not isinstance(source, SameDraws):
            values |= {name: SameDraws(source, loader), "generator": _seeds_for(loader)}
    twin = twin_of(loader, **values)
    if isinstance(twin, FeedLoader) and isinstance(loader, FeedLoader):
        twin.follow(loader)
    return twin


def end_workers(loader: DataLoader[Batch]) -> None:
    """End the workers that a loader keeps from pass to pass."""
    if isinstance(loader, FeedLoader):
        loader.close()  # else a thread that reads ahead would go on
    iterator = loader._iterator
    loader._iterator = None
    shut_down_workers(iterator)


def _seeds_for(loader: DataLoader[Batch]) -> torch.Generator:
    own = loader.generator
    seed = torch.initial_seed() if own is None else own.initial_seed()
    return torch.Generator(torch.empty(0).device if own is None else own.device).manual_seed(seed)


class SameDraws:
    """A sampler that draws the samples of the original loader, whatever the number of workers is.

    At the beginning of a pass, torch begins an iteration of the sampler, draws a seed for the workers, and begins
    another iteration if it has started worker processes (torch 2.6 to 2.15, ``_BaseDataLoaderIter.__init__`` and
    ``_MultiProcessingDataLoaderIter._reset``).

    Args:
        source: the sampler.
        loader: the original loader.
    """

    def __init__(self, source: Any, loader: DataLoader[Batch]) -> None:
        self.source = source
        self._draws = DrawsOf(loader)

    def __iter__(self) -> Iterator[Batch]:
        indices = iter(self.source)
        if self._draws.draw_seed() and self._draws.processes:
            indices = iter(self.source)
        yield from self._draws.walk(indices, size_of(self.source))

    def __len__(self) -> int:
        return len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # still missing while a copy is made
            raise AttributeError(name)
        return getattr(self.source, name)
