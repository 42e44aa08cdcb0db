"""What to change of a loader between two epochs: a pure function of what was measured, and of what was changed before.

One change at a time, judged by the epoch after it. What made the step longer is taken back, and that is the end; so is
the third change. Changes go one way, to more or to fewer, so they cannot swing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
        """How full the queue is, 0 to 1."""
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
class Tried:
    """A move that has not been judged."""

    kind: Kind
    num_workers: int
    """Before it."""
    prefetch_factor: int | None
    """Before it."""
    figures: EpochFigures
    """Before it."""


@dataclass(frozen=True, kw_only=True)
class Online:
    """Where the tuning of a fit stands."""

    num_workers: int
    prefetch_factor: int | None
    moves: int = 0
    """Made so far. One that takes another back is not counted."""
    way: Kind | None = None
    """Of the moves so far. None: there was none."""
    tried: Tried | None = None
    """The last move, until it is judged."""
    frozen: str = ""
    """Why nothing is changed any more; empty while something may be."""
    held: str = ""
    """Why nothing was changed this time, although training is starved; empty where it is not."""


def decide(now: Online, figures: EpochFigures, room: Room) -> tuple[Online, Move | None]:
    """Judge the last move, or make the next one.

    Args:
        now: where the tuning stands.
        figures: of the epochs since it stood there.
        room: what the machine has left.

    Returns:
        Where it stands then, and the change to make before the next epoch, None for none.
    """
    if now.frozen or figures.steps < FEWEST_STEPS:
        return now, None
    now = replace(now, held="")
    if now.tried is not None:
        tried, fault = now.tried, _fault(now.tried, figures)
        if fault:
            back = replace(
                now,
                num_workers=tried.num_workers,
                prefetch_factor=tried.prefetch_factor,
                tried=None,
                frozen="the last change was taken back",
            )
            return back, _move(back, "back", f"the last change is taken back: {fault}")
        now = replace(now, tried=None)
    if now.moves >= MOST_MOVES:
        return replace(now, frozen=f"{MOST_MOVES} changes were made"), None
    return _next(now, figures, room)


def worst(of_ranks: Sequence[EpochFigures]) -> EpochFigures:
    """The figures that decide for all ranks: those of the rank that waits most, since the others wait for it."""
    return max(of_ranks, key=lambda one: (one.starved_pct, -(one.filled or 0.0)))


def _next(now: Online, figures: EpochFigures, room: Room) -> tuple[Online, Move | None]:
    wanted: tuple[Kind, int, int | None, str] | str = ""
    if figures.starved_pct >= STARVED_PCT:
        wanted = _when_starved(now, figures, room)
    elif figures.starved_pct < FED_PCT and now.way != "up":
        wanted = _when_fed(now, figures)
    if isinstance(wanted, str):
        return replace(now, held=wanted), None
    kind, workers, prefetch, reason = wanted
    then = replace(
        now,
        num_workers=workers,
        prefetch_factor=prefetch,
        moves=now.moves + 1,
        way=kind,
        tried=Tried(kind=kind, num_workers=now.num_workers, prefetch_factor=now.prefetch_factor, figures=figures),
    )
    return then, _move(then, kind, reason)


def _move(then: Online, kind: Kind, reason: str) -> Move:
    return Move(kind=kind, num_workers=then.num_workers, prefetch_factor=then.prefetch_factor, reason=reason)


def _when_starved(now: Online, figures: EpochFigures, room: Room) -> tuple[Kind, int, int | None, str] | str:
    """The change that feeds the training, or why there is none."""
    waits = f"each step of {figures.step_ms:.3g} ms waits {figures.data_idle_ms:.3g} ms ({figures.starved_pct:.0f} %)"
    workers, prefetch = now.num_workers, now.prefetch_factor or 2
    crowded = figures.run_queue_pct is not None and figures.run_queue_pct >= CROWDED_PCT
    if crowded and workers > room.usable_cpus and now.way != "up":
        lacking = f"{figures.run_queue_pct:.0f} % of the workers' time lacks a CPU"
        return "down", room.usable_cpus, prefetch, f"{waits}, and {lacking}: {room.usable_cpus} can be used"
    if now.way == "down":
        return f"{waits}, after workers were given back for a reason"
    filled = figures.filled
    if workers and filled is not None and filled >= READY_SHARE:
        return f"{waits} although {filled:.0%} of the queue is ready: neither workers nor prefetch are what is missing"
    if workers and filled is not None and filled >= FILLED_SHARE:
        deeper = min(2 * prefetch, MOST_PREFETCH)
        if deeper > prefetch and room.holds(workers, deeper):
            return "up", workers, deeper, f"{waits} although {filled:.0%} of the queue is ready: deeper, for jitter"
    if crowded:
        return f"{waits}, and no CPU is free: {figures.run_queue_pct:.0f} % of the workers' time lacks one"
    target = min(_workers_needed(now, figures), _workers_with_cpu(now, figures, room))
    while target > workers and not room.holds(target, prefetch):
        target -= 1
    if target > workers:
        return "up", target, prefetch, f"{waits}, and CPUs are free"
    return f"{waits}, and no more workers can be used: {_used(now, figures)} {room.usable_cpus} CPUs"


def _workers_needed(now: Online, figures: EpochFigures) -> int:
    """So many that a batch is made in the time that the rest of a step takes, with some headroom.

    A batch costs the workers ``num_workers`` steps now that they are behind; without workers, what is waited for.
    """
    rest_ms = max(figures.step_ms - figures.data_idle_ms, 0.01 * figures.step_ms)
    load_ms = now.num_workers * figures.step_ms if now.num_workers else figures.data_idle_ms
    return max(now.num_workers + 1, math.ceil(HEADROOM * load_ms / rest_ms))


def _workers_with_cpu(now: Online, figures: EpochFigures, room: Room) -> int:
    """For how many of them there are CPUs: more than CPUs where they mostly wait for a disk, four times at most."""
    if not now.num_workers or figures.on_cpu_pct is None:
        return room.usable_cpus
    return math.floor(room.usable_cpus / max(0.25, figures.on_cpu_pct / 100))


def _used(now: Online, figures: EpochFigures) -> str:
    if not now.num_workers or figures.on_cpu_pct is None:
        return f"{now.num_workers} on"
    return f"{now.num_workers} keep {now.num_workers * figures.on_cpu_pct / 100:.1f} busy of"


def _when_fed(now: Online, figures: EpochFigures) -> tuple[Kind, int, int | None, str] | str:
    """The change that gives back what is not needed."""
    filled, workers, prefetch = figures.filled, now.num_workers, now.prefetch_factor
    if filled is None or filled < FULL_SHARE or not workers:
        return ""
    ready = f"the queue is never empty ({figures.queue_ready:.1f} of {figures.queue_capacity:.0f} batches ready)"
    if figures.on_cpu_pct is None:
        fewer = math.ceil(0.75 * workers)
    else:  # half of them, but not fewer than what they compute needs
        fewer = max(math.ceil(workers / 2), math.ceil(1.25 * workers * figures.on_cpu_pct / 100))
    if fewer < workers:
        return "down", fewer, prefetch, f"{ready}: fewer workers do"
    if workers == 1 and prefetch is not None and prefetch > 2:
        return "down", workers, max(2, prefetch // 2), f"{ready}: fewer batches ahead do"
    return ""


def _fault(tried: Tried, after: EpochFigures) -> str:
    """What speaks against a move; empty for nothing."""
    before = tried.figures
    change = f"the step went from {before.step_ms:.3g} to {after.step_ms:.3g} ms"
    waiting = f"waiting from {before.starved_pct:.1f} to {after.starved_pct:.1f} %"
    if after.step_ms > before.step_ms * (1 + WORSE_PCT / 100):
        return f"{change}, {waiting}"
    if tried.kind == "down":
        starved = after.starved_pct >= STARVED_PCT and after.starved_pct > before.starved_pct + FED_PCT
        return f"{change}, {waiting}" if starved else ""
    faster = after.step_ms < before.step_ms * (1 - GAIN_PCT / 100)
    fed = after.starved_pct < before.starved_pct - GAIN_POINTS
    return "" if faster or fed else f"it brought nothing: {change}, {waiting}"
