"""The report as one HTML page that needs nothing beside itself; its look is in ``page.html``."""

from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_feed.watch.reports import sections
from lightning_feed.watch.reports.headline import headline_parts, is_toy, speedup, trust
from lightning_feed.watch.reports.pipeline import in_rate
from lightning_feed.watch.reports.report import Report, rate
from lightning_feed.watch.verdict.shares import in_ms

if TYPE_CHECKING:
    from jinja2 import Template


_COLOURS = {"data": "data", "copy": "copy", "compute": "good"}
"""Bottleneck -> colour of its mark; grey for others."""


def as_html(report: Report) -> str:
    """A page with the verdict, the step as a stacked bar, remedies, the pipeline, and all that was found beside it.

    It loads nothing, runs no script, and is readable in light and dark, on a phone and on paper.
    """
    diagnosis = report.diagnosis
    verdict, waits = headline_parts(diagnosis)
    advice = () if is_toy(diagnosis) else sections.advice_sections(diagnosis)
    return _template().render(
        report=report,
        colour=_COLOURS.get(diagnosis.bottleneck, "other"),
        verdict=verdict[:1].upper() + verdict[1:],
        said=[f"{one[:1].upper()}{one[1:]}." for one in (waits, trust(diagnosis)) if one],
        tiles=_tiles(report),
        sections=[*sections.step_sections(diagnosis), *advice, *sections.other_sections(report)],
        in_rate=in_rate,
    )


def in_frame(page: str) -> str:
    """A page as part of another one, such as a notebook, whose look it leaves alone."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'


@cache
def _template() -> "Template":
    import jinja2  # here, since most of what imports this module writes no page

    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(text)


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    """(figure, unit, words) of what is known of the figures on top."""
    stats, facts = report.diagnosis.stats, report.diagnosis.measurements.facts
    per_s, faster = rate(stats.step_ms, facts.batch_size), speedup(report.diagnosis)
    tiles = []
    if stats.starved_pct is not None:
        tiles.append((f"{stats.starved_pct:.1f}", "%", "of each step waiting for data"))
    if stats.step_ms:
        tiles.append((in_ms(stats.step_ms, stats.step_ms), "ms", "a step on average"))
    if per_s is not None:
        tiles.append((in_rate(per_s), "samples/s", "trained on each rank" if facts.world_size > 1 else "trained"))
    if faster is not None:
        tiles.append((f"{faster:.2f}", "x", "as fast if data were free"))
    return tiles
