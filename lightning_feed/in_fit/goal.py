"""Reasons to leave the loader of a fit alone, the goal of tuning it, and one result for all ranks."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset
from tqdm.auto import tqdm

from lightning_feed.errors import LoaderError
from lightning_feed.load.kinds import Batch
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.order import size_of
from lightning_feed.load.rehearsal import Refusal, Rehearsal, rehearse
from lightning_feed.load.settings import REGISTERING_DEVICES, RayCluster
from lightning_feed.load.shared_objects import refers_to_shared
from lightning_feed.load.slot_loaders import may_use_slots, plain_kind_of
from lightning_feed.machine.limits import read_machine
from lightning_feed.measure.measurements import LoopMeasurements, Measurements
from lightning_feed.measure.rank_store import connected, gather
from lightning_feed.trials.cloning import has_threads
from lightning_feed.trials.time_left import MOST_S
from lightning_feed.trials.training_work import TrainingWork
from lightning_feed.trials.tune_loader import Goal, Key, Store, Tuned, key_of, tune_loader

logger = logging.getLogger(__name__)


def why_fixed(loader: DataLoader[Batch]) -> str:
    """Return the reason why the workers of a training loader may not be changed, known without a rehearsal; empty if
    none is."""
    kind = plain_kind_of(loader)
    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is a stream, so its samples depend on the number of workers"
    known = kind.__iter__ in (DataLoader.__iter__, FeedLoader.__iter__)
    if not known or kind._get_iterator is not DataLoader._get_iterator:
        return f"the training loader ({kind.__name__}) iterates in its own way"
    if isinstance(loader, FeedLoader) and isinstance(loader.workers, RayCluster):
        return "Ray workers run on other machines"
    shared = refers_to_shared(loader)
    return str(Refusal(reason="shared", detail=shared)) if shared else ""


LEAST_REHEARSAL_S = 5.0
"""Seconds that a rehearsal may take, even if the budget is smaller."""


def rehearsal_of(loader: DataLoader[Batch], budget_s: float, stop: Callable[[], bool] = lambda: False) -> Rehearsal:
    """Rehearse a loader whose number of workers is to be tuned. Threads share one dataset, so they need no rehearsal.

    Args:
        loader: a loader for which :func:`why_fixed` returns nothing.
        budget_s: seconds for the trials, of which the rehearsal may take half.
        stop: returns True if the program is to stop.
    """
    if has_threads(loader):
        return Rehearsal()
    return rehearse(loader, limit_s=max(LEAST_REHEARSAL_S, budget_s / 2), stop=stop)


def why_left_alone(loader: DataLoader[Batch], rehearsal: Rehearsal) -> str:
    """Return the reason why a rehearsal leaves nothing to try; empty if there is something to try.

    If it has refused other numbers of workers, the user's workers may still hand their batches over in place.
    """
    if rehearsal.refusal is not None and not (loader.num_workers and may_use_slots(loader)):
        return str(rehearsal.refusal)
    return ""


KEEPS = (
    "the dataset keeps what it reads, so trials would say nothing of later epochs, and each worker would have to fill "
    "its own"
)


def fills_a_cache(loader: DataLoader[Batch], rehearsal: Rehearsal) -> bool:
    """Return True if a dataset keeps what it reads for later epochs: with workers, only if they persist."""
    return rehearsal.keeps and (not loader.num_workers or loader.persistent_workers)


def goal_of(trainer: Any, *, work: TrainingWork, most_workers: int | None, budget_s: float) -> Goal:
    """Return the goal of tuning the loader of a run, for all ranks of a node at once."""
    return Goal(
        work=work,
        model=name_of_model(trainer.lightning_module),
        device_type=trainer.strategy.root_device.type,
        local_ranks=trainer.num_devices,
        most_workers=most_workers,
        in_slots=True,
        budget_s=budget_s,
    )


_ANY_WORK = TrainingWork(step_s=1.0)
"""The key of a result says only whether there is work."""


def key_in_fit(
    loader: DataLoader[Batch],
    trainer: Any,
    rehearsal: Rehearsal,
    most_workers: int | None = None,
    *,
    in_slots: bool = True,
) -> Key:
    """Return the key of a result for the loader of a fit.

    Args:
        loader: the training loader.
        trainer: the Trainer of the fit.
        rehearsal: the rehearsal of the loader.
        most_workers: the user's limit; None for none.
        in_slots: True for a result that a fit has found; False for one of ``lightning-feed tune``, which does not try
            batches in place with torch's own loader, so that no fit begins with it.
    """
    goal = goal_of(trainer, work=_ANY_WORK, most_workers=most_workers, budget_s=MOST_S)
    return key_of(loader, replace(goal, in_slots=in_slots), read_machine(), rehearsal)


class EarlierSearch(NamedTuple):
    """The searches for the number of workers of a fit's loader that have ended before the fit."""

    in_a_fit: bool = False
    by_the_command: bool = False


def earlier_search(trainer: Any, loaders: list[Any]) -> EarlierSearch:
    """Return the earlier searches for the only loader of a fit."""
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader) or trainer.lightning_module is None:
        return EarlierSearch()
    keys = [key_in_fit(loaders[0], trainer, Rehearsal(), in_slots=in_slots) for in_slots in (True, False)]
    return EarlierSearch(*map(Store().may_know, keys))


def steps_per_epoch(trainer: Any, loader: DataLoader[Batch]) -> float:
    """Return the batches of an epoch, before a fit; infinite if unknown."""
    batches = size_of(loader)
    if batches is None:
        return math.inf
    limit = trainer.limit_train_batches
    if isinstance(limit, float):
        return max(1, int(batches * limit))
    return max(1, min(batches, limit or batches))


def name_of_model(module: torch.nn.Module) -> str:
    """Return the class and number of parameters of a model, to distinguish models whose steps take different times."""
    kind = type(module)
    numbers = sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))
    return f"{kind.__module__}.{kind.__qualname__}, {numbers} parameters"


def work_of(measured: LoopMeasurements | Measurements) -> TrainingWork | None:
    """Return the work of a training step, from the steps of a run; None if too little was measured."""
    stats = measured.stats
    facts = measured.facts
    if stats.step_ms is None or stats.data_ms is None:
        return None
    step_ms = max(0.0, stats.step_ms - stats.data_ms)
    cpu_ms = facts.host.cpu_ms or 0.0
    if facts.loader.num_workers == 0:  # this thread loads, too
        cpu_ms -= facts.host.load_cpu_ms or 0.0
    on_device = facts.device_type != "cpu"
    saves_copy = facts.device_type in REGISTERING_DEVICES and facts.loader.may_use_slots
    return TrainingWork(
        step_s=1e-3 * step_ms,
        cpu_s=1e-3 * min(step_ms, max(0.0, cpu_ms)),
        threads=1 if on_device else torch.get_num_threads(),
        on_device=on_device,
        copy_s=1e-3 * min(step_ms, stats.copy_ms or 0.0) if saves_copy else 0.0,
    )


def slowest_work(works: list[TrainingWork | None]) -> TrainingWork:
    """Return the work of the slowest rank, which all ranks wait for; no work if any rank could not measure its own."""
    measured = [work for work in works if work is not None]
    if len(measured) < len(works):
        return TrainingWork()
    return max(measured, key=lambda work: work.step_s)


def tune_for_fit(loader: DataLoader[Batch], trainer: Any, goal: Goal, rehearsal: Rehearsal) -> Tuned | None:
    """Tune the training loader of a run. The loader itself is not iterated.

    With several ranks, one rank of each node runs the trials for all ranks of the node; the other ranks wait.

    Args:
        loader: the loader to tune.
        trainer: the Trainer of the run.
        goal: result of :func:`goal_of`.
        rehearsal: result of :func:`rehearsal_of`.

    Returns:
        The result; on all ranks None if torch.distributed does not connect them.

    Raises:
        FeedError: the loader cannot be tuned: its dataset raises or hangs, or the loader is empty.
    """

    def tune() -> Tuned:
        with tqdm(desc="tuning the training loader", unit=" trials", disable=None, leave=False) as bar:
            return tune_loader(
                loader, goal, rehearsal=rehearsal, on_trial=lambda _: bar.update(), stop=lambda: is_to_stop(trainer)
            )

    if trainer.world_size < 2:
        return tune()
    if not connected():
        logger.warning("The loaders are not tuned: torch.distributed does not connect the ranks, so they cannot agree.")
        return None
    return _once_per_node(tune, trainer)


def is_to_stop(trainer: Any) -> bool:
    """Return True once SIGTERM has come, on which Lightning ends the fit at its next hook."""
    return bool(getattr(trainer, "received_sigterm", False))


def _once_per_node(tune: Callable[[], Tuned], trainer: Any) -> Tuned:
    """Call ``tune`` on local rank 0, and return its result on all ranks of its node.

    Raises:
        LoaderError: ``tune`` failed on another rank, of any node.
        Exception: the error of ``tune``, on the rank that ran it.
    """
    answer: Tuned | str | None = None
    failure: Exception | None = None
    if trainer.local_rank == 0:
        try:
            answer = tune()
        except Exception as error:  # noqa: BLE001  # raised below, once the others know
            failure = error
            answer = f"{type(error).__name__}: {error}"
    answers = gather(trainer, (trainer.node_rank, answer))
    if failure is not None:
        raise failure
    for node, of_node in answers:
        if isinstance(of_node, str):  # raise on all nodes: ranks that train would wait for ranks that do not
            raise LoaderError(
                f"The rank that tunes the loaders of node {node} failed: {of_node.rstrip('.')}. See that rank's error."
            )
    tuned: Tuned = next(of_node for node, of_node in answers if node == trainer.node_rank and of_node is not None)
    return tuned
