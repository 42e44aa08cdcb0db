"""Changes to a loader between two epochs: the decision, a pure function of what was measured, and the change itself.

One change at a time, judged by the epoch after it. What made the step longer is taken back, and that is the end; so is
the third change. Changes go one way, to more or to fewer, so they cannot swing.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_feed.load.cloning import RoundLimits
from lightning_feed.load.loader import FeedLoader
from lightning_feed.load.settings import TORCH_PREFETCH, RayCluster
from lightning_feed.load.trials.trial import Setting, run_trial

STARVED_PCT = 5.0
"""From here on more is loaded at a time: the threshold of TensorFlow's input-pipeline analyzer."""
FED_PCT = 2.0
"""Below, workers may be given back."""
MOST_MOVES = 3
FEWEST_STEPS = 20
"""Steps that figures must rest on."""
WORSE_PCT = 5.0
"""A step longer by more is taken for worse. Smaller differences are seen between epochs of the same settings."""
GAIN_PCT = 2.0
"""A step shorter by less is no gain."""
GAIN_POINTS = 1.0
"""Nor is a share of waiting that fell by fewer percentage points."""
FULL_SHARE = 0.9
"""A queue that is fuller than this on average is never empty."""
FILLED_SHARE = 0.25
"""One that is fuller than this, and yet waited for, is empty only now and then: jitter."""
READY_SHARE = 0.75
"""With one fuller than this, it is not for lack of batches that training waits."""
HEADROOM = 1.1
"""How much faster than the training a loader should be."""
CROWDED_PCT = 30.0
"""Share of the workers' time spent ready to run without a CPU, from which there are too many of them."""
MOST_PREFETCH = 8

Kind = Literal["up", "down", "back"]


@dataclass(frozen=True, kw_only=True)
class EpochFigures:
    """What was measured since the last decision. Means over steps; None for what is not known."""

    steps: int
    step_ms: float
    data_idle_ms: float
    """Of a step: waiting for data."""
    queue_ready: float | None = None
    """Batches ready when one was asked for."""
    queue_capacity: float | None = None
    on_cpu_pct: float | None = None
    """Share of the workers' time on a CPU, mean over workers."""
    run_queue_pct: float | None = None
    """The same, ready to run without one."""

    @property
    def starved_pct(self) -> float:
        """Share of step time spent waiting for data, 0 to 100."""
        return 100 * self.data_idle_ms / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def filled(self) -> float | None:
        """Share of the queue that is filled, 0 to 1."""
        if self.queue_ready is None or not self.queue_capacity:
            return None
        return self.queue_ready / self.queue_capacity


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the machine leaves to one rank's loader."""

    usable_cpus: int
    most_in_flight: int | None = None
    """Batches that fit into shared memory at a time. None: not known."""
    most_workers: int | None = None
    """More would have nothing to do: the batches of an epoch. None: not known."""

    def holds(self, workers: int, prefetch: int) -> bool:
        """Whether so many workers, with so many batches each, are within it."""
        if self.most_workers is not None and workers > self.most_workers:
            return False
        return self.most_in_flight is None or workers * prefetch + 1 <= self.most_in_flight


@dataclass(frozen=True, kw_only=True)
class Move:
    """A change of the loader, for the epoch to come."""

    kind: Kind
    """``up``, ``down``, or ``back``: the last one is taken back."""
    num_workers: int
    prefetch_factor: int | None
    """None without workers."""
    reason: str
    """Why, with the figures, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class ControllerState:
    """Settings and history of the loader of one fit."""

    num_workers: int
    prefetch_factor: int | None
    moves: int = 0
    """Made so far. One that takes another back is not counted."""
    way: Kind | None = None
    """Direction of the moves so far. None: there was none."""
    before: "tuple[ControllerState, EpochFigures] | None" = None
    """State and figures before the last move, until it is judged."""
    frozen: str = ""
    """Why nothing is changed any more; empty while something may be."""
    held: str = ""
    """Why nothing was changed this time, although training is starved; empty where it is not."""


def decide(now: ControllerState, figures: EpochFigures, room: Room) -> tuple[ControllerState, Move | None]:
    """Judge the last move, or make the next one.

    Args:
        now: the present state.
        figures: of the epochs since it began.
        room: what the machine has left.

    Returns:
        The next state, and the change to make before the next epoch, None for none.
    """
    if now.frozen or figures.steps < FEWEST_STEPS:
        return now, None
    if now.before is not None:
        old, measured = now.before
        fault = _fault(now.way, measured, figures)
        if fault:
            move = Move(
                kind="back",
                num_workers=old.num_workers,
                prefetch_factor=old.prefetch_factor,
                reason=f"the last change is taken back: {fault}",
            )
            return _after(now, move, frozen="the last change was taken back"), move
    now = replace(now, held="", before=None)
    if now.moves >= MOST_MOVES:
        return replace(now, frozen=f"{MOST_MOVES} changes were made"), None
    wanted: Move | str = ""
    if figures.starved_pct >= STARVED_PCT:
        wanted = _when_starved(now, figures, room)
    elif figures.starved_pct < FED_PCT and now.way != "up":
        wanted = _when_fed(now, figures)
    if isinstance(wanted, str):
        return replace(now, held=wanted), None
    return _after(now, wanted, moves=now.moves + 1, way=wanted.kind, before=(now, figures)), wanted


def _after(now: ControllerState, move: Move, **changes: Any) -> ControllerState:
    kept = {"held": "", "before": None, **changes}
    return replace(now, num_workers=move.num_workers, prefetch_factor=move.prefetch_factor, **kept)


def worst(of_ranks: Sequence[EpochFigures]) -> EpochFigures:
    """The figures that decide for all ranks: those of the rank that waits most, since the others wait for it."""
    return max(of_ranks, key=lambda one: (one.starved_pct, -(one.filled or 0.0)))


def _when_starved(now: ControllerState, figures: EpochFigures, room: Room) -> Move | str:
    """The change that feeds the training, or why there is none."""
    waits = f"each step of {figures.step_ms:.3g} ms waits {figures.data_idle_ms:.3g} ms ({figures.starved_pct:.0f} %)"
    workers, prefetch, filled = now.num_workers, now.prefetch_factor or TORCH_PREFETCH, figures.filled
    lacking = f"{figures.run_queue_pct or 0:.0f} % of the workers' time lacks"
    crowded = (figures.run_queue_pct or 0.0) >= CROWDED_PCT
    if crowded and workers > room.usable_cpus and now.way != "up":
        why = f"{waits}, and {lacking} a CPU: {room.usable_cpus} can be used"
        return Move(kind="down", num_workers=room.usable_cpus, prefetch_factor=prefetch, reason=why)
    if now.way == "down":
        return f"{waits}, after workers were given back for a reason"
    if workers and filled is not None and filled >= READY_SHARE:
        return f"{waits} although {filled:.0%} of the queue is ready: neither workers nor prefetch are what is missing"
    if workers and filled is not None and filled >= FILLED_SHARE:
        deeper = min(2 * prefetch, MOST_PREFETCH)
        if deeper > prefetch and room.holds(workers, deeper):
            why = f"{waits} although {filled:.0%} of the queue is ready: deeper, for jitter"
            return Move(kind="up", num_workers=workers, prefetch_factor=deeper, reason=why)
    if crowded:
        return f"{waits}, and no CPU is free: {lacking} one"
    target = min(_workers_needed(now, figures), _workers_with_cpu(now, figures, room))
    while target > workers and not room.holds(target, prefetch):
        target -= 1
    if target > workers:
        return Move(kind="up", num_workers=target, prefetch_factor=prefetch, reason=f"{waits}, and CPUs are free")
    return f"{waits}, and no more workers can be used: {_used(now, figures)} {room.usable_cpus} CPUs"


def _workers_needed(now: ControllerState, figures: EpochFigures) -> int:
    """Workers that make a batch in the time that the rest of a step takes, with some headroom.

    A batch costs the workers ``num_workers`` steps now that they are behind; without workers, what is waited for.
    """
    rest_ms = max(figures.step_ms - figures.data_idle_ms, 0.01 * figures.step_ms)
    load_ms = now.num_workers * figures.step_ms if now.num_workers else figures.data_idle_ms
    return max(now.num_workers + 1, math.ceil(HEADROOM * load_ms / rest_ms))


def _workers_with_cpu(now: ControllerState, figures: EpochFigures, room: Room) -> int:
    """Workers for which there are CPUs: more than CPUs where they mostly wait for a disk, four times at most."""
    if not now.num_workers or figures.on_cpu_pct is None:
        return room.usable_cpus
    return math.floor(room.usable_cpus / max(0.25, figures.on_cpu_pct / 100))


def _used(now: ControllerState, figures: EpochFigures) -> str:
    if not now.num_workers or figures.on_cpu_pct is None:
        return f"{now.num_workers} on"
    return f"{now.num_workers} keep {now.num_workers * figures.on_cpu_pct / 100:.1f} busy of"


def _when_fed(now: ControllerState, figures: EpochFigures) -> Move | str:
    """The change that gives back what is not needed; empty for none."""
    filled, workers, prefetch = figures.filled, now.num_workers, now.prefetch_factor
    if filled is None or filled < FULL_SHARE or not workers:
        return ""
    ready = f"the queue is never empty ({figures.queue_ready:.1f} of {figures.queue_capacity:.0f} batches ready)"
    if figures.on_cpu_pct is None:
        fewer = math.ceil(0.75 * workers)
    else:  # half of them, but not fewer than what they compute needs
        fewer = max(math.ceil(workers / 2), math.ceil(1.25 * workers * figures.on_cpu_pct / 100))
    if fewer < workers:
        why = f"{ready}: fewer workers do"
        return Move(kind="down", num_workers=fewer, prefetch_factor=prefetch, reason=why)
    if workers == 1 and prefetch is not None and prefetch > TORCH_PREFETCH:
        shallower = max(TORCH_PREFETCH, prefetch // 2)
        why = f"{ready}: fewer batches ahead do"
        return Move(kind="down", num_workers=workers, prefetch_factor=shallower, reason=why)
    return ""


def _fault(way: Kind | None, before: EpochFigures, after: EpochFigures) -> str:
    """What speaks against a move; empty for nothing."""
    change = f"the step went from {before.step_ms:.3g} to {after.step_ms:.3g} ms"
    waiting = f"waiting from {before.starved_pct:.1f} to {after.starved_pct:.1f} %"
    if after.step_ms > before.step_ms * (1 + WORSE_PCT / 100):
        return f"{change}, {waiting}"
    if way == "down":
        starved = after.starved_pct >= STARVED_PCT and after.starved_pct > before.starved_pct + FED_PCT
        return f"{change}, {waiting}" if starved else ""
    faster = after.step_ms < before.step_ms * (1 - GAIN_PCT / 100)
    fed = after.starved_pct < before.starved_pct - GAIN_POINTS
    return "" if faster or fed else f"it brought nothing: {change}, {waiting}"


# --- the change -------------------------------------------------------------------------------------------------------


def why_fixed(loader: Any) -> str:
    """Why the workers of a loader cannot be changed between epochs; empty where they can."""
    name = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return f"the training loader ({name}) is no DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "the data set is iterable: what each worker gives depends on how many there are"
    known = getattr(type(loader), "__iter__", None) in (DataLoader.__iter__, FeedLoader.__iter__)
    if not known or getattr(type(loader), "_get_iterator", None) is not getattr(DataLoader, "_get_iterator", None):
        return f"the training loader ({name}) iterates in its own way"
    if getattr(loader, "workers", "process") == "thread" and not loader.num_workers:
        return "a loader made for threads, without any, cannot be given some"
    if isinstance(getattr(loader, "workers", None), RayCluster):
        return "Ray workers are on other machines, whose CPUs are not known here"
    return ""


def why_no_workers(loader: DataLoader[Any], *, most_s: float = 60.0) -> str:
    """Why a loader that has no worker processes cannot have them: one is tried. Empty where it can.

    A data set may hold what no other process can use: an open file, a CUDA tensor, a lambda.

    Args:
        loader: is not iterated; its data set is sent to a process, or forked with it.
        most_s: seconds until a batch must have come. Workers that are spawned import everything first.
    """
    limits = RoundLimits(min_s=0, min_rounds=1, warm_rounds=0, max_s=most_s)
    with warnings.catch_warnings():
        # Python's, of a fork beside threads; the run will say it itself, should it fork.
        warnings.filterwarnings("ignore", message="This process .* is multi-threaded", category=DeprecationWarning)
        try:
            failed = run_trial(loader, Setting(num_workers=1, prefetch_factor=1), limits).infeasible
        except Exception as error:  # noqa: BLE001  # whatever it is, it would end the training
            failed = f"{type(error).__name__}: {error}"
    return f"a worker process cannot load from the data set ({failed})" if failed else ""


def reconfigure(loader: DataLoader[Any], num_workers: int, prefetch_factor: int | None) -> Callable[[], None]:
    """Give a loader other workers from its next pass on. Those it keeps between passes are ended.

    ``num_workers`` and ``prefetch_factor`` may be set on a DataLoader, ``persistent_workers`` may not (torch 2.6 and
    2.15, ``DataLoader.__setattr__``). They are read when a pass begins; of persistent workers, when they start.

    Without the change, torch would not draw a seed for persistent workers, which are there already. For new ones it
    draws one, from ``loader.generator`` or from the global generator, and what is drawn from that afterwards, samples'
    order included, would be other than without the change. So it draws from a generator of ours, this once.

    Args:
        loader: of which :func:`why_fixed` has nothing to say.
        num_workers: 1 or more, or as many as it has.
        prefetch_factor: batches per worker.

    Returns:
        To be called when the next pass has begun: puts the loader's own generator back.
    """
    iterator: Any = getattr(loader, "_iterator", None) if loader.persistent_workers and loader.num_workers else None
    if isinstance(loader, FeedLoader):
        loader.close()  # a thread that reads ahead would go on with the old workers
    if iterator is not None:
        end = getattr(iterator, "_shutdown_workers", None) or getattr(iterator, "close", None)  # torch's, or threads
        if end is not None:
            end()
        loader._iterator = None
    if not isinstance(loader, FeedLoader) or loader.workers != "thread":
        # More workers than CPUs is what was decided, because they wait for something else.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
    loader.num_workers = num_workers
    loader.prefetch_factor = prefetch_factor
    own = loader.generator
    if iterator is not None:
        loader.generator = torch.Generator()
        loader.generator.manual_seed(num_workers)

    def put_back() -> None:
        loader.generator = own

    return put_back
