"""A report as the JSON document ``feed_report.json``, and back."""

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_feed.errors import ReportError
from lightning_feed.watch.reports.compare import compare
from lightning_feed.watch.reports.environment import Environment, read_environment
from lightning_feed.watch.reports.files import find_report
from lightning_feed.watch.reports.plain import from_plain, to_plain
from lightning_feed.watch.reports.report import Parts, Report, from_parts, to_parts
from lightning_feed.watch.reports.schema import SCHEMA
from lightning_feed.watch.verdict.diagnosis import Diagnosis


def make_report(
    diagnosis: Diagnosis,
    *,
    environment: Environment | None = None,
    written_at: datetime | None = None,
    previous: Report | None = None,
) -> Report:
    """A report of a verdict, here and now.

    Args:
        diagnosis: the verdict.
        environment: None: that of this process.
        written_at: with its time zone; None: now.
        previous: the report of an earlier run. Its predictions for remedies that are in effect now are checked, and
            the result is the new report's ``report_card``.
    """
    when = (written_at or datetime.now(timezone.utc)).astimezone(timezone.utc)
    bare = Report(
        diagnosis=diagnosis,
        environment=environment or read_environment(),
        written_at=when.isoformat(timespec="seconds"),
    )
    if previous is None:
        return bare
    card = compare(previous, bare).predictions
    return Report(diagnosis=diagnosis, environment=bare.environment, written_at=bare.written_at, report_card=card)


def to_document(
    diagnosis: Diagnosis,
    *,
    environment: Environment | None = None,
    written_at: datetime | None = None,
    previous: Report | None = None,
) -> dict[str, Any]:
    """A verdict as a JSON object; see :func:`make_report` for the arguments and the reference for its keys."""
    return as_document(make_report(diagnosis, environment=environment, written_at=written_at, previous=previous))


def as_document(report: Report) -> dict[str, Any]:
    """A report as a JSON object. Figures that are not finite are None."""
    return {"schema": SCHEMA, "written_at": report.written_at, **to_plain(to_parts(report))}


def as_json(report: Report) -> str:
    """A report as the text of ``feed_report.json``."""
    return json.dumps(as_document(report), indent=2, allow_nan=False) + "\n"


def read_document(path: str | Path) -> Report:
    """Read a report and check it.

    Args:
        path: the file, or a folder with a ``feed_report.json`` in it or below it; of several the newest.

    Raises:
        ReportError: when there is none, or it cannot be read, is no JSON, not of this version, or lacks a part.
    """
    file = find_report(Path(path))
    try:
        document = json.loads(file.read_bytes(), parse_constant=_no_constant)
    except OSError as error:
        raise ReportError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file} is not JSON ({error}). Give a feed_report.json.") from error
    try:
        return from_document(document, path=file)
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from error


def from_document(document: object, *, path: Path | None = None) -> Report:
    """The report that :func:`as_document` made a JSON object of.

    Args:
        document: what ``json.loads`` gave.
        path: where it was read from.

    Raises:
        ReportError: when it is not a report of this version, or lacks a part.
    """
    if not isinstance(document, dict) or not isinstance(document.get("schema"), str):
        raise ReportError("this is no report of lightning_feed: it has no schema. Give a feed_report.json.")
    _check_schema(document["schema"])
    written_at = document.get("written_at")
    if not isinstance(written_at, str):
        raise ReportError("written_at is missing. Write the report anew.")
    return from_parts(from_plain(Parts, document, ""), written_at=written_at, path=path)


def _check_schema(found: str) -> None:
    if found == SCHEMA:
        return
    name, _, number = SCHEMA.rpartition("/")
    found_name, _, found_number = found.rpartition("/")
    if found_name == name and found_number.isdecimal() and int(found_number) > int(number):
        raise ReportError(
            f"its schema is {found!r}, and this lightning_feed reads {SCHEMA!r}. Update lightning_feed to read it."
        )
    raise ReportError(f"its schema is {found[:80]!r}, and not {SCHEMA!r}. Give a feed_report.json.")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")
