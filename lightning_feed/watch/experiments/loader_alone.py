"""X3: the loader alone, as it is configured and with other numbers of workers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_feed.errors import FeedError
from lightning_feed.load.machine import Machine
from lightning_feed.load.rounds import LoaderRate, RoundLimits
from lightning_feed.load.variant import Changes, burst_of
from lightning_feed.watch.experiments.reads import ReadMarks, Reads
from lightning_feed.watch.experiments.subject import Part, rate_of, too_large

_TIMES = 3
"""Each number of workers is tried at most so often."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """What the loader gives by itself."""

    rate: LoaderRate
    first: list[Any]
    """The first batch of each loader."""
    reads: Reads | None
    """What its workers read meanwhile; None where the system does not tell."""


def measure_alone(parts: tuple[Part, ...], limits: RoundLimits) -> Alone:
    """Drain the loaders as they are configured. Samplers begin again at their end.

    Args:
        parts: the loaders, drained side by side.
        limits: how long.
    """
    burst = max(burst_of(part.loader) for part in parts)
    marks = ReadMarks(first=2 * burst, every=burst)
    rate, first = rate_of(parts, lambda part: Changes(endless=not part.stream), limits, on_batch=marks)
    return Alone(rate=rate, first=first, reads=marks.result())


def workers_to_try(parts: tuple[Part, ...], machine: Machine) -> list[int]:
    """Numbers of workers around the configured one and the number of CPUs, the most telling first; none is 0."""
    now = max(part.loader.num_workers for part in parts)
    cpus = max(1, machine.usable_cpus // len(parts))
    wanted = [cpus, 0, 1, 2 * now, now // 2, max(1, cpus // 2), now + 1]
    return [number for number in dict.fromkeys(wanted) if number <= max(2 * cpus, now) and number != now]


def measure_scaling(
    parts: tuple[Part, ...],
    sample_bytes: list[int],
    machine: Machine,
    limits: RoundLimits,
    *,
    go_on: Callable[[], bool],
) -> Iterator[tuple[int, float] | str]:
    """(num_workers, batches per second), one after the other, or why a number was not tried.

    All come again, the configured number among them, while there is time: rates of the same loader differ, and by how
    much tells what a difference between two numbers is worth.

    Args:
        parts: the loaders.
        sample_bytes: of a sample of each.
        machine: its limits.
        limits: for each number.
        go_on: asked before each.
    """
    numbers = workers_to_try(parts, machine)
    numbers.insert(min(2, len(numbers)), max(part.loader.num_workers for part in parts))
    for _ in range(_TIMES):
        for number in tuple(numbers):
            if not go_on():
                return
            reason = too_large(parts, sample_bytes, machine, number)
            try:
                if reason is None:
                    yield number, rate_of(parts, _with_workers(number), limits)[0].batches_per_s
            except FeedError as error:
                if number:  # without workers: a data set may ask which worker it is in
                    raise
                reason = str(error)
            if reason is not None:
                numbers.remove(number)
                yield f"{number} workers: {reason}"


def _with_workers(number: int) -> Callable[[Part], Changes]:
    return lambda part: Changes(num_workers=number, endless=not part.stream)
