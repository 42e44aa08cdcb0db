"""The pipeline from disk to model: samples per second that each part could do, and which is the bottleneck."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from lightning_feed.watch.experiments.results import NamedCost
from lightning_feed.watch.reports.report import rate
from lightning_feed.watch.verdict.diagnosis import Diagnosis, LoopFacts
from lightning_feed.watch.verdict.predict import NOT_TRANSFORMS, step_of
from lightning_feed.watch.verdict.shares import model_disturbed

_CHARACTERS = 32
"""Of the longest bar."""
_CUT = 3
"""The longest bar shows this many times the lowest rate; longer bars are cut. A copy may be 100 times as fast."""


Kind = Literal["stage", "part", "fit", "if", "remedy"]
_Row = tuple[Kind, str, float | None, str]
"""Of a bar: its kind and name, batches per second, and how they were found."""


class Bar(NamedTuple):
    """A rate in the pipeline's unit."""

    name: str
    per_s: float
    kind: Kind
    """A stage that every sample passes; a part of the loader, which shares its workers with the other parts; the fit as
    it ran; the loader under other circumstances; or the fit, predicted after a remedy, whose code is the name."""
    note: str = ""
    """How the figure was found."""
    narrowest: bool = False
    """The stage that limits the whole, or the part that limits the loader."""


class Pipeline(NamedTuple):
    """What was measured of the pipeline, in the order in which a sample passes its stages."""

    unit: str
    """``samples/s``, or ``batches/s`` where the batch size is not known."""
    bars: Sequence[Bar]
    full_per_s: float
    """What the longest bar stands for."""


def read_pipeline(diagnosis: Diagnosis) -> Pipeline | None:
    """The pipeline as far as experiments measured it. None: no stage was measured."""
    measured = diagnosis.measurements
    found, facts = measured.experiments, measured.facts
    if found is None:
        return None
    size = next((one for one in (found.batch_size, facts.batch_size) if one is not None and one > 0), None)
    rows: list[_Row] = [
        *(_sample_parts(found.costs, facts, size) if size is not None else ()),
        ("part", "collate, IPC", found.ceiling_per_s, "constant samples, same workers"),
        ("stage", "loader", found.loader_per_s, "alone, as configured"),
        ("stage", "copy", rate(found.copy_ms, 1), "one batch after the other"),
        ("stage", "model", None if model_disturbed(measured) else found.model_per_s, "the same device batch each step"),
        ("fit", "fit as it ran", rate(measured.stats.step_ms, 1), ""),
        ("if", "files in memory", found.cached_bytes_per_s, ""),
        ("if", "files on disk only", found.cold_per_s, ""),
        ("if", "no transforms", found.no_transform_per_s, ""),
        ("if", "uint8 images", found.as_uint8_per_s, ""),
        *(("remedy", one.code, rate(one.predicted_step_ms, 1), "") for one in diagnosis.remedies),
    ]
    scaled = [(kind, name, (size or 1) * per_s, note) for kind, name, per_s, note in rows if per_s is not None]
    bars = _mark([Bar(name, per_s, kind, note) for kind, name, per_s, note in scaled if 0 < per_s < math.inf])
    rates = [one.per_s for one in bars if one.kind in ("stage", "part")]
    if not rates:
        return None
    return Pipeline("samples/s" if size else "batches/s", bars, min(max(rates), _CUT * min(rates)))


def pipeline_text(pipeline: Pipeline) -> list[str]:
    """The pipeline as bars of characters, a line for each."""
    leads = {"stage": "", "part": "  ", "fit": "", "if": "if: loader, ", "remedy": "with: "}
    names = [leads[one.kind] + _short(one.name) for one in pipeline.bars]
    title = f"Pipeline ({pipeline.unit})"
    width = max(len(title) - 13, *map(len, names))
    lines = [title]
    for name, one in zip(names, pipeline.bars, strict=True):
        bar = "#" * max(1, round(_CHARACTERS * min(1.0, one.per_s / pipeline.full_per_s)))
        if one.per_s > pipeline.full_per_s:
            bar = bar[:-1] + ">"
        remark = "predicted" if one.kind == "remedy" else ""
        if one.narrowest:
            remark = "<- bottleneck" if one.kind == "stage" else "<- slowest part"
        lines.append(f"{name:{width}}{in_rate(one.per_s):>13}  {bar:{_CHARACTERS}}  {remark}".rstrip())
    return lines


def in_rate(per_s: float) -> str:
    """A rate with three digits or more, thousands apart."""
    digits = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:,.{digits}f}".replace(",", " ")


def _short(code: str, most: int = 44) -> str:
    code = " ".join(code.split())
    return code if len(code) <= most else f"{code[: most - 3]}..."


def _sample_parts(costs: tuple[NamedCost, ...], facts: LoopFacts, batch_size: int) -> Iterator[_Row]:
    """Reading, decoding and the transforms: what the workers could pass if each did nothing else.

    A worker is taken to run at full speed while there is a CPU for it.
    """
    if facts.num_workers is None:
        return
    grouped: dict[str, list[NamedCost]] = {name: [] for name in (*NOT_TRANSFORMS, "transforms")}
    for one in costs:
        step = step_of(one.name)
        grouped[step if step in NOT_TRANSFORMS else "transforms"].append(one)
    for name, some in grouped.items():
        wall_ms, cpu_ms = sum(one.wall_ms for one in some), sum(one.cpu_ms for one in some)
        per_s = rate(wall_ms, max(facts.num_workers, 1))
        if per_s is not None and facts.usable_cpus is not None and cpu_ms > 0:
            per_s = min(per_s, 1000 * facts.usable_cpus / cpu_ms)
        if per_s is not None:
            yield "part", name, per_s / batch_size, "cost of one sample, shared by the workers"


def _mark(bars: list[Bar]) -> list[Bar]:
    """Mark the narrowest of several stages, and the slowest part of a loader that is the narrowest."""
    stages, parts = ([one for one in bars if one.kind == kind] for kind in ("stage", "part"))
    narrow = min(stages, key=lambda one: one.per_s) if len(stages) > 1 else None
    marked = [narrow] if narrow else []
    if len(parts) > 1 and (narrow is None or narrow.name == "loader"):
        marked.append(min(parts, key=lambda one: one.per_s))
    return [one._replace(narrowest=one in marked) for one in bars]
