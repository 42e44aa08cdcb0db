"""Shows a report to whoever watches: as text on the console, as a page in a notebook."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_feed.watch.reports.html import as_html, in_frame
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.reports.text import as_text

Printer = Callable[[str], object]


def show_report(report: Report, printer: Printer | None = None, written: Sequence[Path] = ()) -> None:
    """Show a report and where its files are: in a notebook as a page, else as text.

    Args:
        report: what to show.
        printer: prints above a live progress bar that would otherwise be drawn over the text; None: none does.
        written: its files.
    """
    text = as_text(report.diagnosis)
    if written:
        text += f"\nfiles {files_text(written)}"
    show = notebook_display()
    if show is None:
        print_text(text, printer)
    else:
        show({"text/plain": text, "text/html": in_frame(as_html(report))}, raw=True)


def files_text(written: Sequence[Path]) -> str:
    """Files that differ in their endings alone, in few words: ``runs/feed_report.html, .json, .md``."""
    first, *others = sorted(written)
    return ", ".join([str(first), *(one.suffix for one in others)])


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


def notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` where this process is the kernel of a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    session = getattr(getattr(shell, "kernel", None), "session", None)
    if session is None or getattr(session, "pid", None) != os.getpid():  # a fork cannot send to the notebook
        return None
    from IPython.display import display

    return display
