"""The report on the console, and as Markdown: ``feed_report.md``, and what loggers show as text."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain

from lightning_feed.errors import printable, printable_lines
from lightning_feed.watch.reports import sections
from lightning_feed.watch.reports.headline import headline, if_free, is_toy, trust
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.reports.sections import Section
from lightning_feed.watch.verdict.diagnosis import Diagnosis
from lightning_feed.watch.verdict.shares import toy_sentence


def as_text(diagnosis: Diagnosis) -> str:
    """The verdict, how a step divides, why, and what to change; a line each. With experiments, the pipeline behind it.

    Of steps so short that Python takes most of them: one sentence, and what experiments found.
    """
    measured = diagnosis.measurements
    told: list[Iterable[Section]] = [sections.pipeline_sections(diagnosis), sections.measured_sections(measured)]
    if diagnosis.bottleneck == "unknown" or diagnosis.stats.step_ms is None:
        first = f"no verdict: {next(iter(diagnosis.evidence), 'nothing was measured')}."
    elif is_toy(diagnosis):
        first = str(toy_sentence(diagnosis.stats.step_ms))
    else:
        first = f"{headline(diagnosis)} ({trust(diagnosis)})"
        time = sections.step_sections(diagnosis), sections.time_sections(measured)
        told = [*time, sections.advice_sections(diagnosis), *told]
    lines = chain.from_iterable(one.console_lines() for one in chain.from_iterable(told))
    return printable_lines("\n".join([f"FEED  {first}", *lines]))


# --- Markdown -----------------------------------------------------------------------------------------------------


def as_markdown(report: Report) -> str:
    """The whole report: verdict, step, causes, remedies, earlier predictions, pipeline, measurements, versions."""
    return "\n\n".join((diagnosis_markdown(report.diagnosis), *map(_markdown, sections.other_sections(report)))) + "\n"


def diagnosis_markdown(diagnosis: Diagnosis) -> str:
    """The verdict, the step and the remedies: short enough for a logger's text."""
    free = "" if is_toy(diagnosis) else if_free(diagnosis)
    said = "; ".join(one for one in (trust(diagnosis), free) if one)
    blocks = [f"# {_text(headline(diagnosis))}", f"{said[0].upper()}{said[1:]}."]
    told = [*sections.step_sections(diagnosis), *(() if is_toy(diagnosis) else sections.advice_sections(diagnosis))]
    return "\n\n".join(blocks + [_markdown(one) for one in told])


def _markdown(section: Section) -> str:
    if section.form == "list":
        body = "\n".join(f"- {_text(line)}" for (line,) in section.rows)
    elif section.pipeline is not None:
        lines = "\n".join(section.console_lines()).strip()
        fence = _fence(lines, least=3)
        body = f"{fence}text\n{lines}\n{fence}"
    else:
        body = _table(section.header or tuple("" for _ in section.rows[0]), section.rows)
    note = f"\n\n{_text(section.note)}" if section.note else ""
    return f"## {_text(section.title)}\n\n{body}{note}"


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    cells = [header, tuple("---" for _ in header), *((_code(first), *map(_text, others)) for first, *others in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _text(words: str) -> str:
    """Text that stays text in Markdown, also in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)


def _code(words: str) -> str:
    """Code that stays one line of code in the cell of a table."""
    flat = printable(re.sub(r"\s+", " ", words)).replace("|", "\\|")
    fence = _fence(flat)
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"


def _fence(text: str, least: int = 1) -> str:
    """More backquotes than stand together in a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))
