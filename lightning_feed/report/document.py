"""``feed_report.json``: a report as JSON, its schema, and reading it back."""

import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from lightning_feed.errors import ReportError
from lightning_feed.measure.experiment_results import ExperimentResults
from lightning_feed.measure.measurements import HookTime, LoopFacts, LoopMeasurements, Measurements
from lightning_feed.measure.stats import Confidence, LoaderStats, LoaderSteps, RankStats, StarvationStats, Timeline
from lightning_feed.measure.wall import WallStats
from lightning_feed.report.report import (
    Environment,
    Report,
    RunIdentity,
    rate,
    read_environment,
    read_identity,
)
from lightning_feed.verdict.diagnosis import Bottleneck, Cause, Diagnosis, Grade, Note, Remedy

NAME = "feed_report"
"""Name of the report's files, without the suffix."""
SCHEMA = "lightning_feed.report/1"
"""Name and version of the JSON format. Within a version, keys may be added, but existing keys keep their meaning."""


# --- the parts of the file ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A Diagnosis without its remedies and measurements."""

    bottleneck: Bottleneck
    cause: Cause
    grade: Grade
    confidence: Confidence
    evidence: tuple[Note, ...]
    notes: tuple[Note, ...] = ()
    why_not: tuple[Note, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Rates that follow from the step time."""

    batches_per_s: float | None
    """1000 / ``step.step_ms``."""
    samples_per_s: float | None
    """``batches_per_s`` times the batch size; None if the batch size is not known."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of ``feed_report.json`` other than ``schema`` and ``written_at``. All of them are always written."""

    identity: RunIdentity = field(default_factory=RunIdentity)
    environment: Environment
    run: LoopFacts
    verdict: Verdict
    step: StarvationStats
    throughput: Throughput
    loaders: LoaderStats
    ranks: RankStats | None
    hooks: tuple[HookTime, ...]
    by_loader: tuple[LoaderSteps, ...] = ()
    wall: WallStats | None = None
    timeline: Timeline | None = None
    validation: LoopMeasurements | None = None
    device_busy_pct: float | None = None
    """Share of the training steps' time in which the GPU ran any kernel, in percent, by NVML."""
    diagnosed: bool
    """True if ``diagnose`` ran. Otherwise all experiments are null."""
    experiments: ExperimentResults
    remedies: tuple[Remedy, ...]


def _parts_of(report: Report) -> Parts:
    diagnosis = report.diagnosis
    measured = diagnosis.measurements
    step_ms = measured.stats.step_ms
    return Parts(
        identity=report.run,
        environment=report.environment,
        run=measured.facts,
        verdict=Verdict(
            bottleneck=diagnosis.bottleneck,
            cause=diagnosis.cause,
            grade=diagnosis.grade,
            confidence=diagnosis.confidence,
            evidence=diagnosis.evidence,
            notes=diagnosis.notes,
            why_not=diagnosis.why_not,
        ),
        step=measured.stats,
        throughput=Throughput(
            batches_per_s=rate(step_ms, 1),
            samples_per_s=rate(step_ms, measured.facts.loader.batch_size),
        ),
        loaders=measured.loaders,
        ranks=measured.ranks,
        hooks=measured.hooks,
        by_loader=measured.by_loader,
        wall=measured.wall,
        timeline=measured.timeline,
        validation=measured.validation,
        device_busy_pct=measured.device_busy_pct,
        diagnosed=measured.diagnosed,
        experiments=measured.experiments,
        remedies=diagnosis.remedies,
    )


def _diagnosis_of(parts: Parts) -> Diagnosis:
    measured = Measurements(
        stats=parts.step,
        facts=parts.run,
        loaders=parts.loaders,
        ranks=parts.ranks,
        hooks=parts.hooks,
        by_loader=parts.by_loader,
        wall=parts.wall,
        timeline=parts.timeline,
        validation=parts.validation,
        device_busy_pct=parts.device_busy_pct,
        diagnosed=parts.diagnosed,
        experiments=parts.experiments,
    )
    return Diagnosis(**vars(parts.verdict), remedies=parts.remedies, measurements=measured)


# --- reports as JSON ----------------------------------------------------------------------------------------------


def make_report(diagnosis: Diagnosis, *, run: RunIdentity | None = None) -> Report:
    """Make a report of a verdict, with the present time and environment.

    Args:
        diagnosis: the verdict.
        run: the run that the verdict is about; None for a run without other reports.
    """
    return Report(
        diagnosis=diagnosis,
        environment=read_environment(),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        run=run or read_identity(),
    )


def as_document(report: Report) -> dict[str, Any]:
    """Return a report as a JSON object. The documentation's reference lists its keys. Figures that are not finite are
    None."""
    return {"schema": SCHEMA, "written_at": report.written_at, **to_plain(_parts_of(report))}


def as_json(report: Report) -> str:
    """Return a report as the text of ``feed_report.json``."""
    return json.dumps(as_document(report), indent=2, allow_nan=False) + "\n"


def read_document(path: str | Path) -> Report:
    """Read a report and check it.

    Args:
        path: the file, or a folder. The newest report in the folder is read; if it has none, the newest in its
            subfolders.

    Raises:
        ReportError: if there is no report, or when the file cannot be read, is not JSON, is of another version, or
            lacks a part.
    """
    try:
        file = _find_report(Path(path))
        text = file.read_bytes()
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}. Give a feed_report.json.") from error
    try:
        return from_document(json.loads(text, parse_constant=_refuse_constant), path=file)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file} is not JSON ({error}). Give a feed_report.json.") from error


def _find_report(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ReportError(f"{path} does not exist. Give a feed_report.json, or the folder of a run.")
    reports = _reports_among(path.iterdir()) or _reports_among(path.rglob(f"{NAME}*.json"))
    if not reports:
        raise ReportError(
            f"there is no {NAME}.json in {path} or below it. GPUStarvationCallback writes one into the folder of the "
            "logger, or into feed_reports of the Trainer's default_root_dir, and `lightning-feed diagnose` where --out "
            "says."
        )
    return max(reports, key=lambda file: (file.stat().st_mtime_ns, len(file.name), file.name))


def _reports_among(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if re.fullmatch(rf"{NAME}(-\d+)?\.json", file.name) and file.is_file()]


def from_document(document: object, *, path: Path | None = None) -> Report:
    """Rebuild a report from the JSON object made by :func:`as_document`.

    Args:
        document: the result of ``json.loads``.
        path: the file that the object was read from.

    Raises:
        ReportError: if the object is not a report of this version, or lacks a part.
    """
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise ReportError("this is no report of lightning_feed: it has no schema. Give a feed_report.json.")
    if document["schema"] != SCHEMA:
        raise ReportError(
            f"its schema is {document['schema'][:80]!r}, and this lightning_feed reads {SCHEMA!r}. Give a "
            "feed_report.json; update lightning_feed for one of a later version."
        )
    written_at = document.get("written_at")
    if not isinstance(written_at, str):
        raise ReportError("written_at is missing. Write the report again.")
    parts: Parts = _read(Parts, document, "")
    return Report(
        diagnosis=_diagnosis_of(parts),
        environment=parts.environment,
        written_at=written_at,
        run=parts.identity,
        path=path,
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


# --- dataclasses to JSON values, and back by the type hints of their fields ---------------------------------------


def to_plain(value: object) -> Any:
    """Convert a value for ``json.dumps(..., allow_nan=False)``. Numbers that are not finite become None.

    Raises:
        TypeError: for a value that is neither a dataclass, a sequence, a dict, text, a number nor None.
    """
    if isinstance(value, (NoneType, bool, str)):
        return value
    if isinstance(value, Integral):  # NumPy's numbers too
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (tuple, list)):
        return [to_plain(part) for part in value]
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(name): to_plain(part) for name, part in value.items()}
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _read(hint: Any, value: object, where: str) -> Any:
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, UnionType):
        return None if value is None else _read(_not_none(inner), value, where)
    if is_dataclass(hint):
        return _read_object(hint, value, where)
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if origin is dict:
        return _read_dict(inner[1], value, where)
    if origin is Literal:
        return value if value in inner else _refuse(where, value, f"one of {', '.join(map(repr, inner))}")
    return _read_scalar(hint, value, where)


def _read_object(kind: Any, value: object, where: str) -> Any:
    """Make a dataclass from a JSON object. Keys for which the dataclass has no field are ignored."""
    if not isinstance(value, dict):
        return _refuse(where, value, "an object")
    prefix = f"{where}." if where else ""
    hints = get_type_hints(kind)
    parts = {}
    for part in fields(kind):
        name = part.name
        if name in value:
            parts[name] = _read(hints[name], value[name], prefix + name)
        elif _is_required(part):
            raise ReportError(
                f"{prefix}{name} is missing from the report. Create the report again with the installed version of "
                "lightning_feed."
            )
    return kind(**parts)


def _read_dict(hint: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        return _refuse(where, value, "an object")
    return {name: _read(hint, part, f"{where}.{name}") for name, part in value.items()}


def _read_tuple(inner: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        return _refuse(where, value, "a list")
    kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
    if len(value) != len(kinds):
        return _refuse(where, value, f"a list of {len(kinds)}")
    return tuple(_read(kind, value[index], f"{where}[{index}]") for index, kind in enumerate(kinds))


def _read_scalar(hint: type, value: Any, where: str) -> Any:
    if hint is float and value is None:  # a figure that was not finite when it was written
        return math.nan
    json_types, largest, wanted = _SCALARS[hint]
    has_type = isinstance(value, json_types) and (hint is bool or not isinstance(value, bool))
    if not has_type or (largest and not abs(value) <= largest) or (hint is int and value != int(value)):
        return _refuse(where, value, wanted)
    return hint(value)


_SCALARS: dict[type, tuple[tuple[type, ...], float, str]] = {
    float: ((int, float), sys.float_info.max, "a finite number"),
    int: ((int, float), 2**63, "a whole number of up to 63 bits"),
    str: ((str,), 0, "text"),
    bool: ((bool,), 0, "true or false"),
}
"""Type -> its types in JSON, the largest absolute value (0: no limit), and its description for messages."""


def _refuse(where: str, value: object, wanted: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:60]}..."
    raise ReportError(f"{where or 'the report'} is {shown}, and must be {wanted}. Write the report again.")


def _not_none(kinds: tuple[Any, ...]) -> Any:
    (kind,) = (kind for kind in kinds if kind is not NoneType)
    return kind


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


# --- the schema ---------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every ``feed_report.json`` of this version obeys."""
    parts = _form(Parts)
    own = {"schema": {"const": SCHEMA}, "written_at": {"type": "string", "format": "date-time"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        "type": "object",
        "properties": {**own, **parts["properties"]},
        "required": [*own, *parts["required"]],
    }


def _form(hint: Any) -> dict[str, Any]:
    origin = get_origin(hint)
    inner = get_args(hint)
    if is_dataclass(hint):
        return _form_of_object(hint)
    if origin in (Union, UnionType):
        form = _form(_not_none(inner))
        if form == _form(float):
            return form
        return {"anyOf": [form, {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _form(inner[1])}
    if origin is tuple and inner[1:] == (...,):
        return {"type": "array", "items": _form(inner[0])}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_form(item) for item in inner], "minItems": len(inner), "items": False}
    kinds = {float: ["number", "null"], bool: "boolean", int: "integer", str: "string"}  # null: not finite
    return {"type": kinds[hint]}


def _form_of_object(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    required = [part.name for part in fields(kind) if _is_required(part)]
    return {"type": "object", "properties": {name: _form(hint) for name, hint in hints.items()}, "required": required}
