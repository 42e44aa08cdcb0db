"""``num_workers="tune"`` when a fit begins: trials with a training loader, and what of them goes into the settings."""

import logging
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from lightning_feed.load.feed_loader import FeedLoader
from lightning_feed.load.recommend import Recommendation
from lightning_feed.load.settings import LoaderSettings
from lightning_feed.load.tuning.store import Store
from lightning_feed.load.tuning.tune_loader import tune_loader
from lightning_feed.load.tuning.values import Goal, Trial, Tuned
from lightning_feed.tuning import ranks as tuning_ranks

logger = logging.getLogger(__name__)

PATIENCE = 3.0
"""Ranks wait for the one that tunes as many times the budget: a first trial may take longer, and workers must start."""
_NEED_WORKERS: dict[str, Any] = {
    "workers": "process", "prefetch_factor": "auto", "persistent_workers": "auto", "in_order": True, "timeout_s": 0,
    "start_method": None,
}  # fmt: skip
"""Settings that are refused beside ``num_workers=0``, as they are when they are not given."""


def why_not_now(trainer: Any, split: str) -> str:
    """Why ``num_workers="tune"`` is as ``"auto"`` for a loader; empty where it is to be tuned."""
    if split != "train":
        return "not tuned: only training loaders are, so this is as for num_workers='auto'"
    if trainer is None or trainer.state.fn != "fit":
        return "not tuned: tuning waits for trainer.fit, so this is as for num_workers='auto'"
    if trainer.fast_dev_run:
        return "not tuned for a fast_dev_run, so this is as for num_workers='auto'"
    return ""


def tune_for_fit(loader: DataLoader[Any], trainer: Any, name: str) -> Tuned | None:
    """The settings for a training loader of a run that is about to begin. The loader is not iterated.

    On several ranks one of each node runs the trials, for all of its ranks at once; the others wait for it.

    Args:
        loader: as it would be without tuning.
        trainer: of the run.
        name: of the loader, for the progress bar.

    Returns:
        None, on all ranks of a node, where tuning took too long for them, or ranks could not agree.

    Raises:
        FeedError: the loader cannot be tuned: its data set raises, hangs, or gives nothing.
    """
    goal = Goal(
        local_ranks=trainer.num_devices,
        device_type=trainer.strategy.root_device.type,
        may_persist=not trainer.reload_dataloaders_every_n_epochs,
    )

    def tune() -> Tuned:
        with tqdm(total=goal.max_trials, desc=f"tuning the loader of {name}", disable=None, leave=False) as bar:

            def on_trial(_: Trial) -> None:
                bar.update()

            return tune_loader(loader, goal, store=Store(), on_trial=on_trial)

    patience_s = PATIENCE * goal.budget_s
    return tuning_ranks.tune_once_per_node(tune, tuning_ranks.place_of(trainer), patience_s=patience_s)


def for_trials(loader: FeedLoader, settings: LoaderSettings) -> DataLoader[Any]:
    """The loader that trials are made with. Threads are tried only where the user allows them: not every data set can
    be read by several threads, and one that cannot need not say so."""
    if settings.workers == "thread" and not isinstance(loader.dataset, IterableDataset):
        return loader
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )


def settled(settings: LoaderSettings, tuned: Tuned | None) -> LoaderSettings:
    """``settings`` with what was found where they leave it open; as for ``"auto"`` where nothing was."""
    if tuned is None:
        return replace(settings, num_workers="auto")
    found = tuned.setting
    if not found.num_workers:
        pinned = settings.pin_memory if settings.pin_memory != "auto" else found.pin_memory
        return replace(settings, num_workers=0, pin_memory=pinned, **_NEED_WORKERS)
    changed: dict[str, Any] = {"num_workers": found.num_workers, "workers": found.workers}
    for name in ("prefetch_factor", "pin_memory", "persistent_workers"):
        if getattr(settings, name) == "auto":
            changed[name] = getattr(found, name)
    if found.workers == "thread":
        changed["start_method"] = None
    if found.num_workers == 1:
        changed["in_order"] = True  # nobody is there to overtake
    return replace(settings, **changed)


def explained(found: Recommendation, settings: LoaderSettings, tuned: Tuned | None, why_not: str) -> Recommendation:
    """What was chosen, with tuning named as the reason of what it chose.

    Args:
        found: made with :func:`settled`.
        settings: the user's.
        tuned: what tuning found.
        why_not: why there was none; empty where it found nothing in time.
    """
    reasons = dict(found.reasons)
    if tuned is None:
        why_not = why_not or "not tuned: it took too long for the ranks, so this is as for num_workers='auto'"
        reasons["num_workers"] = f"{reasons['num_workers']} ({why_not})"
        return replace(found, reasons=reasons)
    short = "tuned" if not tuned.remembered else "tuned by an earlier run, and checked"
    rate = "" if tuned.batches_per_s is None else f", {tuned.batches_per_s:.4g} batches/s in the trial"
    reasons["num_workers"] = f"{short}: {tuned.reason}{rate}"
    for name in ("prefetch_factor", "pin_memory", "persistent_workers"):
        # A value as the user gave it stays so; what stands aside for num_workers=0 has its own reason.
        if getattr(settings, name) == "auto" and reasons[name] == "as given":
            reasons[name] = short
    return replace(found, reasons=reasons)
