"""Writes a report in all its forms into a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lightning_feed.watch.reports.document import as_json
from lightning_feed.watch.reports.files import NAME, write_whole
from lightning_feed.watch.reports.html import as_html
from lightning_feed.watch.reports.markdown import as_markdown
from lightning_feed.watch.reports.report import Report

Form = Literal["json", "md", "html"]
_FORMS = {"json": as_json, "md": as_markdown, "html": as_html}


def write_report(report: Report, folder: str | Path, *, forms: Sequence[Form] = ("json", "md")) -> list[Path]:
    """Write ``feed_report.json``, ``.md``, ``.html`` into a folder, which is made where needed.

    Each file is whole or not there; a file of that name is replaced.

    Raises:
        ReportError: when one cannot be written.
    """
    written = []
    for form in forms:
        path = Path(folder) / f"{NAME}.{form}"
        write_whole(path, _FORMS[form](report))
        written.append(path)
    return written
