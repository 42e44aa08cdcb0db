"""The pipeline from disk to model: samples per second that each part of it could do, and which is the bottleneck."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeGuard

from lightning_feed.watch.experiments.results import ExperimentResults, NamedCost
from lightning_feed.watch.reports.report import rate
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts
from lightning_feed.watch.verdict.predict import NOT_TRANSFORMS, step_of
from lightning_feed.watch.verdict.shares import model_disturbed

BAR = 32
"""Characters of the longest bar."""
CUT = 3
"""The longest bar shows this many times the lowest rate. What is longer is cut: a copy may be 100 times as fast."""
"""Costs that are stations of their own; the rest is what the transforms take. ``load`` is all of a sample that is not
told apart."""


@dataclass(frozen=True, kw_only=True)
class Station:
    """A place that every sample passes."""

    name: str
    per_s: float
    """What it could pass if the others took no time, in the pipeline's unit."""
    note: str
    """How the figure was found."""
    of_loader: bool = False
    """A part of the loader, which shares its workers with the other parts."""
    narrowest: bool = False
    """The one that limits the whole, or for a part of the loader: the loader."""


@dataclass(frozen=True, kw_only=True)
class Road:
    """The stations that were measured, in the order in which a sample passes them."""

    unit: str
    """``samples/s``, or ``batches/s`` where the batch size is not known."""
    stations: tuple[Station, ...]
    what_if: tuple[tuple[str, float], ...]
    """The loader under other circumstances, in the pipeline's unit."""
    achieved_per_s: float | None
    """What the fit did."""
    full_per_s: float
    """What the longest bar stands for. Rates above it are cut."""
    remedies: tuple[tuple[str, float], ...]
    """(code, predicted rate of the fit) of the remedies that have a prediction."""


def read_road(diagnosis: Diagnosis) -> Road | None:
    """The pipeline as far as experiments measured it. None: no station was measured."""
    measured = diagnosis.measurements
    found, facts = measured.experiments, measured.facts
    if found is None:
        return None
    if model_disturbed(measured):
        found = replace(found, model_per_s=None)
    size = next((one for one in (found.batch_size, facts.batch_size) if one is not None and one > 0), None)
    stations = _mark(tuple(one for one in _stations(found, facts, size) if _known(one.per_s)))
    if not stations:
        return None
    batch = size or 1
    achieved = rate(measured.stats.step_ms, batch)
    rates = [one.per_s for one in stations]
    return Road(
        unit="samples/s" if size else "batches/s",
        stations=stations,
        what_if=tuple(
            (name, batch * per_s)
            for name, per_s in (
                ("loader, files in memory", found.cached_bytes_per_s),
                ("loader, files on disk only", found.cold_per_s),
                ("loader, no transforms", found.no_transform_per_s),
                ("loader, uint8 pictures", found.as_uint8_per_s),
            )
            if per_s is not None and _known(batch * per_s)
        ),
        achieved_per_s=achieved if _known(achieved) else None,
        full_per_s=min(max(rates), CUT * min(rates)),
        remedies=tuple(
            (remedy.code, per_s)
            for remedy in diagnosis.remedies
            if _known(per_s := rate(remedy.predicted_step_ms, batch))
        ),
    )


def road_text(road: Road) -> str:
    """The pipeline as bars of characters, a line for each part."""
    rows = [(f"{'  ' if one.of_loader else ''}{one.name}", one.per_s, _remark(one)) for one in road.stations]
    if road.achieved_per_s is not None:
        rows.append(("fit as it ran", road.achieved_per_s, ""))
    rows += [(f"if: {name}", per_s, "") for name, per_s in road.what_if]
    rows += [(f"with: {_short(code)}", per_s, "predicted") for code, per_s in road.remedies]
    title, width = f"Pipeline ({road.unit})", max(len(name) for name, _, _ in rows)
    width = max(width, len(title) - 13)
    lines = [title]
    for name, per_s, remark in rows:
        bar = (
            "#" * max(1, round(BAR * (per_s / road.full_per_s))) if per_s <= road.full_per_s else "#" * (BAR - 1) + ">"
        )
        lines.append(f"{name:{width}}{in_rate(per_s):>13}  {bar:{BAR}}  {remark}".rstrip())
    return "\n".join(lines)


def in_rate(per_s: float) -> str:
    """A rate with three digits or more, thousands apart."""
    digits = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:,.{digits}f}".replace(",", " ")


def _remark(station: Station) -> str:
    return (
        "<- bottleneck"
        if station.narrowest and not station.of_loader
        else "<- slowest part"
        if station.narrowest
        else ""
    )


def _known(value: float | None) -> TypeGuard[float]:
    """Whether a figure was measured and can be drawn."""
    return value is not None and 0 < value < math.inf


def _short(code: str, most: int = 44) -> str:
    code = " ".join(code.split())
    return code if len(code) <= most else f"{code[: most - 3]}..."


def _stations(found: ExperimentResults, facts: LoopFacts, size: int | None) -> Iterator[Station]:
    batch = size or 1
    if size is not None:
        yield from _parts(found.costs, facts)
    if _known(found.ceiling_per_s):
        yield Station(
            name="collate, IPC",
            per_s=batch * found.ceiling_per_s,
            note="constant samples, same workers",
            of_loader=True,
        )
    if _known(found.loader_per_s):
        yield Station(name="loader", per_s=batch * found.loader_per_s, note="alone, as configured")
    if _known(found.copy_ms):
        yield Station(name="copy", per_s=batch * 1000 / found.copy_ms, note="one batch after the other")
    if _known(found.model_per_s):
        yield Station(name="model", per_s=batch * found.model_per_s, note="the same device batch again and again")


def _parts(costs: tuple[NamedCost, ...], facts: LoopFacts) -> Iterator[Station]:
    """Reading, decoding and the transforms: what the workers could pass if each did nothing else.

    A worker is taken to run at full speed while there is a CPU for it.
    """
    if facts.num_workers is None:
        return
    named = {name: [one for one in costs if step_of(one.name) == name] for name in NOT_TRANSFORMS}
    named["transforms"] = [one for one in costs if step_of(one.name) not in NOT_TRANSFORMS]
    for name, some in named.items():
        wall_ms, cpu_ms = sum(one.wall_ms for one in some), sum(one.cpu_ms for one in some)
        if not _known(wall_ms):
            continue
        per_s = 1000 * max(facts.num_workers, 1) / wall_ms
        if facts.usable_cpus is not None and cpu_ms > 0:
            per_s = min(per_s, 1000 * facts.usable_cpus / cpu_ms)
        yield Station(name=name, per_s=per_s, note="cost of one sample, shared by the workers", of_loader=True)


def _mark(stations: tuple[Station, ...]) -> tuple[Station, ...]:
    """Mark the narrowest where there are two to compare, and the slowest part of a loader that is the narrowest."""
    whole = [one for one in stations if not one.of_loader]
    parts = [one for one in stations if one.of_loader]
    narrow = min(whole, key=lambda one: one.per_s) if len(whole) > 1 else None
    marked = [narrow] if narrow else []
    if len(parts) > 1 and (narrow is None or narrow.name == "loader"):
        marked.append(min(parts, key=lambda one: one.per_s))
    return tuple(replace(one, narrowest=one in marked) for one in stations)
