"""The report as one HTML page that needs nothing beside itself."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from lightning_feed.watch.reports.compare_text import check_text
from lightning_feed.watch.reports.html_road import road_section
from lightning_feed.watch.reports.html_style import CSS
from lightning_feed.watch.reports.markdown import MEANING, run_rows
from lightning_feed.watch.reports.report import Report, rate
from lightning_feed.watch.reports.road import in_rate
from lightning_feed.watch.reports.tables import tables
from lightning_feed.watch.reports.text import cause_text, headline_parts, interval, part_name, speedup, step_parts
from lightning_feed.watch.stats import StarvationStats
from lightning_feed.watch.verdict.diagnosis import Diagnosis, Remedy
from lightning_feed.watch.verdict.shares import in_ms, plural, toy_sentence

_COLOUR = {
    "data": "data",
    "copy": "h2d",
    "framework": "other",
    "compute": "good",
    "validation": "other",
    "checkpoints": "other",
    "unknown": "other",
}

_FIGURE = ' class="num"'


def as_html(report: Report) -> str:
    """A page with the verdict, the step as a stacked bar, remedies, the pipeline, and all that was found beside it.

    It loads nothing, runs no script, and is readable in light and dark, on a phone and on paper.
    """
    diagnosis = report.diagnosis
    title, _ = headline_parts(diagnosis)
    body = "\n".join((_head(report), *(part for part in _sections(report) if part)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n"
        f"<footer>lightning_feed {escape(report.environment.lightning_feed or '')} · {escape(report.written_at)} · "
        "times are means over the steps that count: not the first of an epoch, nor one after a validation</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def in_frame(page: str) -> str:
    """A page as part of another one, such as a notebook, whose look it leaves alone."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 640px; border: 0"></iframe>'


def _head(report: Report) -> str:
    diagnosis = report.diagnosis
    verdict, waits = headline_parts(diagnosis)
    colour = _COLOUR[diagnosis.bottleneck]
    said = f"{waits[:1].upper()}{waits[1:]}. " if waits else ""
    said += f"Confidence {diagnosis.confidence}, {plural(diagnosis.stats.steps, 'step')}."
    return (
        f'<header><p class="kicker"><i class="verdict {colour}"></i>lightning_feed report</p>\n'
        f"<h1>{escape(verdict[:1].upper() + verdict[1:])}</h1>\n"
        f'<p class="soft">{escape(said)}</p>\n'
        f'<div class="tiles">{"".join(_tiles(report))}</div></header>'
    )


def _tiles(report: Report) -> Iterator[str]:
    diagnosis, stats = report.diagnosis, report.diagnosis.stats
    if stats.starved_pct is not None:
        known = interval(diagnosis)
        between = "" if known is None else f", 95 % interval {known.replace('-', ' to ')}"
        yield _tile(f"{stats.starved_pct:.1f}", "%", f"of each step waiting for data{between}")
    if stats.step_ms:
        yield _tile(in_ms(stats.step_ms, stats.step_ms), "ms", "a step on average")
    per_s = rate(stats.step_ms, diagnosis.measurements.facts.batch_size)
    if per_s is not None:
        yield _tile(
            in_rate(per_s),
            "samples/s",
            "trained on each rank" if diagnosis.measurements.facts.world_size > 1 else "trained",
        )
    faster = speedup(diagnosis)
    if faster is not None:
        yield _tile(f"{faster:.2f}", "x", "as fast if data were free")


def _tile(figure: str, unit: str, words: str) -> str:
    return f'<div class="tile"><b>{escape(figure)} <small>{escape(unit)}</small></b><span>{escape(words)}</span></div>'


def _sections(report: Report) -> Iterator[str]:
    diagnosis, measured = report.diagnosis, report.diagnosis.measurements
    if diagnosis.stats.step_ms:
        yield _step_section(diagnosis, diagnosis.stats.step_ms)
    if toy_sentence(diagnosis.stats.step_ms) is None:
        yield from _advice(diagnosis)
    if report.report_card:
        yield _section("What an earlier report predicted for this run", _list(map(check_text, report.report_card)))
    yield road_section(diagnosis)
    for found in tables(measured):
        yield _section(found.title, _table(found.header, found.rows))
    pairs = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in run_rows(report))
    yield _section("Run and machine", f'<div class="two">{pairs}</div>')


def _advice(diagnosis: Diagnosis) -> Iterator[str]:
    why = [one for one in (cause_text(diagnosis), *diagnosis.evidence) if one]
    if why:
        yield _section("Why", _list(why))
    if diagnosis.remedies:
        fixes = "".join(_fix(one, diagnosis) for one in diagnosis.remedies)
        yield _section("What to change", f'<ol class="fixes">{fixes}</ol>')
    besides = (*diagnosis.why_not, *diagnosis.notes)
    if besides:
        yield _section("Notes", _list(besides))


def _step_section(diagnosis: Diagnosis, whole: float) -> str:
    drawn, at = [], 0.0
    for name, ms in step_parts(diagnosis):
        share = min(100 * (ms or 0) / whole, 100 - at)
        if share > 0:
            drawn.append(
                f'<rect class="{name}" x="{at:.3f}" y="0" width="{max(share - 0.2, 0.1):.3f}" height="10">'
                f"<title>{part_name(name)} {in_ms(ms, whole)} ms, {share:.1f} %</title></rect>"
            )
            at += share
    words = ", ".join(f"{part_name(name)} {in_ms(ms, whole)} ms" for name, ms in step_parts(diagnosis))
    bar = (
        f'<svg class="stack" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f"{''.join(drawn)}</svg>"
    )
    legend = "".join(
        f'<div><i class="{name}"></i><p>{part_name(name)} <b>{in_ms(ms, whole)} ms</b>{_share(ms, whole)}</p>'
        f"<span>{escape(MEANING[name])}</span></div>"
        for name, ms in step_parts(diagnosis)
    )
    return _section(
        f"Where a step of {in_ms(whole, whole)} ms goes",
        f'{bar}<div class="legend">{legend}</div>{_slack(diagnosis.stats)}',
    )


def _slack(stats: StarvationStats) -> str:
    if not stats.hidden_wait_ms or stats.next_wait_ms is None or stats.step_ms is None:
        return ""
    hidden, wait = in_ms(stats.hidden_wait_ms, stats.step_ms), in_ms(stats.next_wait_ms, stats.step_ms)
    return f'<p class="soft" style="margin-top:14px">Of {wait} ms in next(loader), {hidden} ms cost nothing.</p>'


def _share(ms: float | None, whole: float) -> str:
    return "" if ms is None else f' <span class="soft">{100 * ms / whole:.0f} %</span>'


def _fix(remedy: Remedy, diagnosis: Diagnosis) -> str:
    predicted, step = remedy.predicted_step_ms, diagnosis.stats.step_ms
    gain = ""
    if predicted is not None:
        per_s = rate(predicted, diagnosis.measurements.facts.batch_size)
        gain = f"<b>{in_ms(predicted, step or predicted)} ms</b> a step predicted"
        gain += "" if per_s is None else f"<br/><span class='soft'>{in_rate(per_s)} samples/s</span>"
    return (
        f'<li><code>{escape(remedy.code)}</code><span class="gain">{gain}</span>'
        f'<span class="why">{escape(f"{remedy.where}: {remedy.why}" if remedy.where else remedy.why)}</span></li>'
    )


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in lines)}</ul>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = _cells(header, "th") if any(header) else ""
    body = "".join(_cells(row, "td") for row in rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _cells(row: Sequence[str], kind: str) -> str:
    cells = (f"<{kind}{_FIGURE if at else ''}>{escape(one)}</{kind}>" for at, one in enumerate(row))
    return f"<tr>{''.join(cells)}</tr>"
