"""Writes reports into a folder, and shows them on the console or in a notebook."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_feed.archive.files import atomic_write
from lightning_feed.errors import ReportError
from lightning_feed.watch.reports.document import NAME, as_json
from lightning_feed.watch.reports.html import as_html, in_frame
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.reports.text import as_markdown, as_text

Printer = Callable[[str], object]


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write ``feed_report.json``, ``.md`` and ``.html`` into a folder, which is made where needed.

    Each file is whole or not there; a file of that name is replaced.

    Raises:
        ReportError: when one cannot be written.
    """
    forms = {"json": as_json(report), "md": as_markdown(report), "html": as_html(report)}
    paths = [Path(folder) / f"{NAME}.{form}" for form in forms]
    for path, text in zip(paths, forms.values(), strict=True):
        write_whole(path, text)
    return paths


def write_whole(path: Path, text: str) -> None:
    """Write a text file, making its folder where needed. What is there stays until all of the new one is written.

    Raises:
        ReportError: when it cannot be written. What was there is unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))  # names of users' hooks may hold what UTF-8 cannot
    except OSError as error:
        raise ReportError(f"{path} could not be written: {error.strerror or error}.") from error


def check_writable(folder: Path) -> None:
    """See that files can be written into a folder, or into the one that it would be made in. Leaves nothing.

    Raises:
        ReportError: when they cannot.
    """
    try:
        there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ReportError(
            f"reports cannot be written into {folder}: {error.strerror or error}. Give another folder."
        ) from error


# --- showing ------------------------------------------------------------------------------------------------------


def show_report(report: Report, printer: Printer | None = None, written: Sequence[Path] = ()) -> None:
    """Show a report and where its files are: in a notebook as a page, else as text.

    Args:
        report: what to show.
        printer: prints above a live progress bar that would otherwise be drawn over the text; None: none does.
        written: its files, which differ in their endings alone.
    """
    text = as_text(report.diagnosis)
    if written:
        first, *others = sorted(written)
        text += f"\nfiles {', '.join([str(first), *(one.suffix for one in others)])}"
    show = _notebook_display()
    if show is None:
        print_text(text, printer)
    else:
        show({"text/plain": text, "text/html": in_frame(as_html(report))}, raw=True)


def print_text(text: str, printer: Printer | None = None) -> None:
    """Print lines, through ``printer`` where there is one.

    All in one call that ends with a line end. Rich stands in for ``sys.stdout`` while it draws a bar, and keeps an
    unfinished line back: a bar drawn then stands between our lines, and in a notebook draws itself without end.

    What the output cannot encode is escaped. Nothing is left in a buffer that cannot be written, as on a full disk or
    into a closed pipe: Python would fail with it once more when it ends, and make the exit code of a good run 120.
    """
    out = sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if printer is not None:
        printer(text)
    elif out is sys.__stdout__ and out is not None and "write" not in vars(out):  # nobody listens in between
        out.flush()
        with open(out.fileno(), "w", encoding=encoding, closefd=False) as own:
            own.write(f"{text}\n")
    else:
        out.write(f"{text}\n")
        out.flush()


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` where this process is the kernel of a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    session = getattr(getattr(shell, "kernel", None), "session", None)
    if session is None or getattr(session, "pid", None) != os.getpid():  # a fork cannot send to the notebook
        return None
    from IPython.display import display

    return display
