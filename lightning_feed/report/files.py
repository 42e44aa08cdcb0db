"""A report as text, Markdown and one HTML page; written into a folder, and shown on the console or in a notebook."""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from html import escape
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_feed.errors import ReportError
from lightning_feed.machine.private_files import atomic_write
from lightning_feed.report import sections
from lightning_feed.report.charts import charts
from lightning_feed.report.document import NAME, as_json, make_report
from lightning_feed.report.next_step import ARGUMENTS, next_step, other_notes
from lightning_feed.report.report import (
    Report,
    RunIdentity,
    arguments_now,
    best_speedup,
    fastest,
    headline,
    headline_parts,
    is_toy,
    rate,
    speedup,
    trust,
)
from lightning_feed.report.sections import Section
from lightning_feed.report.words import in_ms, toy_sentence, words
from lightning_feed.verdict.diagnosis import Diagnosis, Grade
from lightning_feed.wording import in_rate, plural, printable, printable_lines

if TYPE_CHECKING:
    from jinja2 import Template

Printer = Callable[[str], object]


# --- the console --------------------------------------------------------------------------------------------------


NARROWEST = 40
NO_TERMINAL = 100
"""Smallest width of a line in characters, and the width without a terminal."""


def as_text(
    diagnosis: Diagnosis,
    run: RunIdentity | None = None,
    *,
    beside: Sequence[str] = (),
    width: int | None = None,
    arguments: str = ARGUMENTS,
    before: Diagnosis | None = None,
) -> str:
    """Return the verdict, the parts of a step, the reasons, the changes to make, the pipeline if measured, and the next
    step.

    If steps are so short that Python takes most of their time, the text is one sentence, with the results of
    experiments and the next step.

    Args:
        diagnosis: the verdict.
        run: the run that the verdict is about; None if unknown.
        beside: lines to print before the last line, without line breaks in them.
        width: characters per line; None for the terminal's width.
        arguments: the program's arguments as typed in a shell, for commands that measure more.
        before: the last verdict that was shown for the same run; None if there was none.
    """
    measured = diagnosis.measurements
    shown: list[Section] = []
    if _judged(diagnosis):
        notes = other_notes(diagnosis, run, arguments=arguments)
        shown += sections.step_sections(diagnosis)
        shown += sections.time_sections(measured)
        shown += sections.advice_sections(diagnosis, notes)
    shown += sections.pipeline_sections(diagnosis)
    shown += sections.measured_sections(measured)
    step = next_step(diagnosis, run, arguments=arguments)
    return _in_lines(_first_line(diagnosis, before), step, shown, beside, width)


def as_short_text(
    report: Report,
    *,
    beside: Sequence[str] = (),
    width: int | None = None,
    arguments: str = ARGUMENTS,
) -> str:
    """Return the verdict and the next step, for a report whose other sections were shown before."""
    step = next_step(report.diagnosis, report.run, arguments=arguments)
    return _in_lines(_first_line(report.diagnosis), step, (), beside, width)


def as_line(report: Report, written: Sequence[Path] = ()) -> str:
    """Return the verdict in one line, for one of many short fits."""
    diagnosis = report.diagnosis
    cut_short = diagnosis.measurements.facts.cut_short
    details = [plural(diagnosis.stats.steps, "step"), *(str(path) for path in written if path.suffix == ".html")]
    line = f"FEED  {headline(diagnosis)} ({', '.join(details)})"
    if cut_short is not None:
        line += f"; the loader ended after {cut_short[0]} of {cut_short[1]} batches"
    return printable(line)


def _judged(diagnosis: Diagnosis) -> bool:
    """Return True if there is a verdict, and steps are long enough for advice."""
    return diagnosis.bottleneck != "unknown" and diagnosis.stats.step_ms is not None and not is_toy(diagnosis)


def _first_line(diagnosis: Diagnosis, before: Diagnosis | None = None) -> str:
    if _judged(diagnosis):
        return f"{headline(diagnosis)} ({trust(diagnosis)}){_retracted(diagnosis, before)}"
    if is_toy(diagnosis):
        return str(toy_sentence(diagnosis.stats.step_ms))
    reason = "nothing was measured"
    if diagnosis.evidence:
        reason = words(diagnosis.evidence[0], diagnosis.measurements)
    return f"{headline(diagnosis)}: {reason}."


def _retracted(diagnosis: Diagnosis, before: Diagnosis | None) -> str:
    """Return the sentence that withdraws the verdict of an earlier report of the same run; empty if it still holds."""
    if before is None or before.bottleneck == "unknown" or _still_holds(before, diagnosis):
        return ""
    verdict, _ = headline_parts(before)
    if before.remedies:
        verdict += f", try {before.remedies[0].change}"
    return f". No longer true, as reported after {plural(before.stats.steps, 'step')}: {verdict}"


def _still_holds(before: Diagnosis, diagnosis: Diagnosis) -> bool:
    """Return True if the bottleneck is the same, and the first change that was advised, if any, still comes first."""
    if before.bottleneck != diagnosis.bottleneck:
        return False
    advised = [remedy.change for remedy in before.remedies[:1]]
    return not advised or advised == [remedy.change for remedy in diagnosis.remedies[:1]]


def _in_lines(first: str, step: str, shown: Iterable[Section], beside: Sequence[str], width: int | None) -> str:
    if width is None:
        width = max(NARROWEST, shutil.get_terminal_size((NO_TERMINAL, 24)).columns)
    lines = [sections.folded(f"FEED  {first}", width)]
    for section in shown:
        lines += section.console_lines(width)
    lines += [*beside, sections.folded(f"next: {step}", width)]
    return printable_lines("\n".join(lines))


# --- Markdown -----------------------------------------------------------------------------------------------------


def as_markdown(report: Report) -> str:
    """Return the whole report: verdict, step, causes, remedies, pipeline, measurements, versions."""
    shown = (*_first_sections(report), *sections.other_sections(report))
    return _in_markdown(report, shown) + "\n"


def short_markdown(report: Report) -> str:
    """Return the verdict, the step and the remedies: short enough for a logger's text."""
    return _in_markdown(report, _first_sections(report))


def _first_sections(report: Report) -> tuple[Section, ...]:
    diagnosis = report.diagnosis
    step = tuple(sections.step_sections(diagnosis))
    if is_toy(diagnosis):
        return step
    advice = sections.advice_sections(diagnosis, other_notes(diagnosis, report.run))
    return (*step, *sorted(advice, key=lambda section: section.form != "remedies"))


def _in_markdown(report: Report, shown: Iterable[Section]) -> str:
    diagnosis = report.diagnosis
    title = ": ".join(filter(None, (report.run.name, headline(diagnosis))))
    subtitle = trust(diagnosis)
    if not is_toy(diagnosis) and fastest(diagnosis):
        subtitle += f"; {fastest(diagnosis)}"
    blocks = [f"# {_text(title)}", _sentence(subtitle), *map(_markdown, shown)]
    return "\n\n".join([*blocks, f"next: {_with_code(next_step(diagnosis, report.run))}"])


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def _markdown(section: Section) -> str:
    if section.form == "list":
        body = "\n".join(f"- {_with_code(line)}" for (line,) in section.rows)
    elif section.pipeline is not None:
        lines = "\n".join(sections.pipeline_text(section.pipeline))
        fence = _fence(lines, least=3)
        body = f"{fence}text\n{lines}\n{fence}"
    else:
        body = _table(section.header or tuple("" for _ in section.rows[0]), section.rows)
    note = f"\n\n{_text(section.note)}" if section.note else ""
    return f"## {_text(section.title)}\n\n{body}{note}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [
        header,
        tuple("---" for _ in header),
        *((_code(first), *map(_with_code, others)) for first, *others in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _text(words: str) -> str:
    """Escape text so that Markdown does not read it as markup, also in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)


def _with_code(words: str) -> str:
    """Markdown of a text whose parts between backquotes are code."""
    return "".join(_code(code) if code else _text(text) for text, code in in_backquotes(words))


def _code(words: str) -> str:
    """Code between backquotes, on one line, so that it may stand in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("|", "\\|")
    fence = _fence(flat)
    if len(fence) > 1:
        return f"{fence} {flat} {fence}"
    return f"`{flat}`"


def _fence(text: str, least: int = 1) -> str:
    """Backquotes to enclose a text: at least ``least``, and more than the longest run of backquotes in the text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


# --- HTML ---------------------------------------------------------------------------------------------------------

_COLOURS: dict[Grade, str] = {
    "OK": "good",
    "slightly data-bound": "copy",
    "moderately data-bound": "copy",
    "highly data-bound": "data",
}
"""Grade -> colour of the mark: green, amber and red; grey for others."""


def mark_colour(diagnosis: Diagnosis) -> str:
    """Return the colour of the mark on a page, as a CSS class."""
    others_limit = diagnosis.bottleneck == "compute" and diagnosis.cause == "oversubscribed"  # by other programs
    if diagnosis.bottleneck == "unknown" or others_limit:
        return "other"
    if diagnosis.grade == "OK" and diagnosis.bottleneck != "compute":
        return "copy"
    return _COLOURS.get(diagnosis.grade, "other")


def as_html(report: Report) -> str:
    """Return a page with the verdict, the step as a stacked bar, the remedies, the pipeline, and all other findings.

    The page loads nothing, and is readable in light and dark mode, on a phone and on paper. Its only script adds the
    buttons that copy code.
    """
    diagnosis = report.diagnosis
    verdict, waits = headline_parts(diagnosis)
    return page_template("page.html").render(
        report=report,
        colour=mark_colour(diagnosis),
        title=f"{report.run.name}: {verdict}" if report.run.name else verdict[:1].upper() + verdict[1:],
        next_step=next_step(diagnosis, report.run),
        subtitle=" ".join(_sentence(words) for words in (waits, trust(diagnosis)) if words),
        tiles=_tiles(report),
        sections=[*_first_sections(report), *sections.other_sections(report)],
        charts=charts(diagnosis.measurements.timeline),
    )


def in_backquotes(words: str) -> list[tuple[str, str]]:
    """Return the parts of a sentence: (text, "") for text, and ("", code) for code between backquotes."""
    parts = enumerate(re.split("`([^`]+)`", words))
    return [("", part) if index % 2 else (part, "") for index, part in parts if part]


def unbroken(words: str) -> str:
    """Return a sentence in which no line break comes between a figure and its unit."""
    units = r"%|/s\b|(?:[kMG]?B|[KMG]iB|m?s|x|CPUs?|samples?|steps?|workers?)\b"
    return re.sub(rf"(?<=\d) (?={units})", "\N{NO-BREAK SPACE}", words)


def in_frame(page: str) -> str:
    """Return a page as a frame inside another page, such as a notebook, without changing the style of that page."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'


def _framed(report: Report) -> str:
    return in_frame(as_html(report))


Report.page = _framed
Diagnosis.page = lambda diagnosis: _framed(make_report(diagnosis))


@cache
def page_template(name: str) -> "Template":
    """Return the Jinja template with this file name in this folder."""
    import jinja2  # here, because most programs that import this module write no page

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["unbroken"] = unbroken
    return environment.get_template(name, globals={"in_rate": in_rate, "in_ms": in_ms, "in_backquotes": in_backquotes})


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(figure, unit, description) for each figure at the top of the page, if known."""
    stats = report.diagnosis.stats
    facts = report.diagnosis.measurements.facts
    per_s = rate(stats.step_ms, facts.loader.batch_size)
    factor = speedup(report.diagnosis)
    best = best_speedup(report.diagnosis)
    tiles = []
    if stats.step_ms:
        tiles.append((in_ms(stats.step_ms, stats.step_ms), "ms", "a step on average"))
    if per_s is not None:
        tiles.append((in_rate(per_s), "samples/s", "trained on each rank" if facts.world_size > 1 else "trained"))
    if factor is not None and best is not None and best < factor:
        tiles.append((f"{best:.2f}", "x", "as fast at most, with what is advised"))
    elif factor is not None:
        tiles.append((f"{factor:.2f}", "x", "as fast if data were free"))
    return tiles


# --- files --------------------------------------------------------------------------------------------------------


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write ``feed_report.json``, ``.md`` and ``.html`` into a folder, which is made if it does not exist.

    Each file is written completely or not at all. Earlier files of the same run are replaced. If the folder holds files
    of another run, the new ones are named ``feed_report-2``, and so on.

    Raises:
        ReportError: if a file cannot be written.
    """
    forms = {"json": as_json(report), "md": as_markdown(report), "html": as_html(report)}
    names = chain([NAME], (f"{NAME}-{number}" for number in count(2)))
    name = next(name for name in names if _is_free(Path(folder, f"{name}.json"), report.run.id))
    paths = [Path(folder, f"{name}.{form}") for form in forms]
    for path, text in zip(paths, forms.values(), strict=True):
        write_whole(path, text)
    return paths


def _is_free(path: Path, run_id: str) -> bool:
    """Return True if a report of this run may be written to ``path``: there is no file, or a report of the same run."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        raise ReportError(f"{path} could not be read: {error.strerror or error}.") from error
    return bool(run_id) and f'"{run_id}"' in text


def write_whole(path: Path, text: str) -> None:
    """Write a text file, and make its folder if needed. An existing file is replaced once the new one is complete.

    Raises:
        ReportError: if the file cannot be written. An existing file is then unchanged.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(text.encode("utf-8", "backslashreplace"))  # names of hooks may hold characters UTF-8 lacks
    except OSError as error:
        raise ReportError(f"{path} could not be written: {error.strerror or error}.") from error


def check_writable(folder: Path) -> None:
    """Check that files can be written into a folder, or into the nearest parent that exists. Leaves no file behind.

    Raises:
        ReportError: if files cannot be written there.
    """
    try:
        existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ReportError(
            f"reports cannot be written into {folder}: {error.strerror or error}. Give another folder; on the command "
            "line with --out."
        ) from error


# --- showing ------------------------------------------------------------------------------------------------------


Form = Literal["full", "short", "line"]
"""The part of a report that the console shows: the full report, the verdict with the next step, or one line."""


def show_report(
    report: Report,
    printer: Printer | None = None,
    written: Sequence[Path] = (),
    *,
    form: Form = "full",
    before: Diagnosis | None = None,
) -> None:
    """Show a report of this process and where its files are: in a notebook as a page, else as text.

    Args:
        report: the report to show.
        printer: prints above a live progress bar, which would otherwise be drawn over the text; None if there is no
            such bar.
        written: the report's files, which differ only in their suffixes.
        form: the part of the report that the console shows.
        before: the last verdict that was shown for the same run; None if there was none.
    """
    files = _files_line(written)
    arguments = arguments_now()
    full = as_text(report.diagnosis, report.run, beside=files, arguments=arguments, before=before)
    show = _notebook_display()
    if show is not None:
        show({"text/plain": full, "text/html": in_frame(as_html(report))}, raw=True)
    elif form == "line":
        print_text(as_line(report, written), printer)
    else:
        print_text(full if form == "full" else as_short_text(report, beside=files, arguments=arguments), printer)


def _files_line(written: Sequence[Path]) -> list[str]:
    if not written:
        return []
    first, *others = sorted(written)
    return [f"files {', '.join([str(first), *(path.suffix for path in others)])}"]


def print_text(text: str, printer: Printer | None = None) -> None:
    """Print lines, through ``printer`` if it is given.

    All lines are written in one call, with a line break at the end. Rich replaces ``sys.stdout`` while it draws a bar,
    and holds an unfinished line back: a bar drawn at that time would appear between our lines, and in a notebook would
    be drawn again without end.

    Characters that the output cannot encode are escaped. If writing fails, as on a full disk or into a closed pipe, no
    text stays in a buffer. Otherwise Python would try to write the text again at exit, fail, and end a good run with
    exit code 120.
    """
    out = sys.stdout
    encoding = getattr(out, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    if printer is not None:
        printer(text)
    elif out is sys.__stdout__ and out is not None and "write" not in vars(out):  # stdout is not replaced or patched
        out.flush()
        with open(out.fileno(), "w", encoding=encoding, closefd=False) as own:
            own.write(f"{text}\n")
    else:
        out.write(f"{text}\n")
        out.flush()


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display`` if this process is the kernel of a notebook; else None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    session = getattr(getattr(shell, "kernel", None), "session", None)
    if session is None or getattr(session, "pid", None) != os.getpid():  # a fork cannot send to the notebook
        return None
    from IPython.display import display

    return display
