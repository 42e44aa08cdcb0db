"""Where the time of a whole run goes, and what lies inside computing and validation, as text."""

from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.verdict.diagnosis import LoopMeasurements, Measurements
from lightning_feed.watch.verdict.shares import in_ms
from lightning_feed.watch.wall import WallStats

VALIDATION_PCT = 10.0
"""Share of the run from which the console tells how validation divides."""


def wall_text(wall: WallStats | None) -> str:
    """``wall 17.2 s = train 2.6 | validation 9.1 | ...``; parts that would be 0.0 are left out. Empty: not measured."""
    if wall is None:
        return ""
    digits = 1 if wall.wall_s >= 10 else 2
    parts = [f"{part.name} {part.seconds:.{digits}f}" for part in wall.parts if round(part.seconds, digits)]
    return f"wall  {wall.wall_s:.{digits}f} s = {' | '.join(parts)}"


def compute_text(stats: StarvationStats) -> str:
    """`` (forward 4.9, backward 0.4, optimizer 0.6)``; empty where they were not told apart."""
    parts = compute_parts(stats)
    return f" ({', '.join(f'{name} {in_ms(ms, stats.step_ms or 0.0)}' for name, ms in parts)})" if parts else ""


def compute_parts(stats: StarvationStats) -> list[tuple[str, float]]:
    """(name, milliseconds) of what computing divides into, as far as it was told apart."""
    named = (("forward", stats.forward_ms), ("backward", stats.backward_ms), ("optimizer", stats.optimizer_ms))
    return [(name, ms) for name, ms in named if ms is not None]


def validation_text(measured: Measurements) -> str:
    """How the validation of a fit divides, where it is worth a line: else empty."""
    found, wall = measured.validation, measured.wall
    if found is None or wall is None or found.stats.step_ms is None:
        return ""
    if 100 * wall.seconds("validation") < VALIDATION_PCT * wall.wall_s:
        return ""
    whole = found.stats.step_ms
    parts = " | ".join(f"{name} {in_ms(ms, whole)}" for name, ms in loop_parts(found))
    loaders = "".join(
        f"; {one.name} waits {in_ms(one.data_idle_ms, whole)} of {in_ms(one.step_ms, whole)}" for one in found.by_loader
    )
    return f"valid step {in_ms(whole, whole)} ms = {parts}{loaders}"


def loop_parts(found: LoopMeasurements) -> list[tuple[str, float | None]]:
    """(name, milliseconds) of the parts of a validation step, which add up to it."""
    stats = found.stats
    return [
        ("compute", stats.compute_ms),
        ("data", stats.data_idle_ms),
        ("copy", stats.h2d_ms),
        ("other", stats.other_ms),
    ]
