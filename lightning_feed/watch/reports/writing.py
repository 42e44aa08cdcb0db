"""Writes a report in all its forms into a folder."""

from pathlib import Path

from lightning_feed.watch.reports.document import as_json
from lightning_feed.watch.reports.files import NAME, write_whole
from lightning_feed.watch.reports.html import as_html
from lightning_feed.watch.reports.markdown import as_markdown
from lightning_feed.watch.reports.report import Report

_FORMS = {"json": as_json, "md": as_markdown, "html": as_html}


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write ``feed_report.json``, ``.md`` and ``.html`` into a folder, which is made where needed.

    Each file is whole or not there; a file of that name is replaced.

    Raises:
        ReportError: when one cannot be written.
    """
    written = []
    for form, as_form in _FORMS.items():
        path = Path(folder) / f"{NAME}.{form}"
        write_whole(path, as_form(report))
        written.append(path)
    return written
