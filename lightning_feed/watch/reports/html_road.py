"""The pipeline as bars of an HTML page: what each part could do, and what the remedies would give."""

from html import escape

from lightning_feed.watch.reports.road import Station, in_rate, read_road
from lightning_feed.watch.verdict.diagnosis import Diagnosis

_CUT = " cut"
"""The style of a bar that is longer than shown."""


def road_section(diagnosis: Diagnosis) -> str:
    """A section with a bar for each station. Empty where no station was measured."""
    road = read_road(diagnosis)
    if road is None:
        return ""
    most = road.full_per_s
    rows = [_station(one, most) for one in road.stations]
    if road.achieved_per_s is not None:
        rows += [_rule("What the fit did"), _row("fit", road.achieved_per_s, most, "compute")]
    if road.what_if:
        rows.append(_rule("The loader, if"))
        rows += [_row(escape(name.removeprefix("loader, ")), per_s, most, "other") for name, per_s in road.what_if]
    if road.remedies:
        rows.append(_rule("The fit, predicted after each change alone"))
        rows += [_row(f"<code>{escape(code)}</code>", per_s, most, "good") for code, per_s in road.remedies]
    note = (
        f'<p class="soft">Bars end at {in_rate(most)} {escape(road.unit)}; those that fade are longer.</p>'
        if any(_CUT in one for one in rows)
        else ""
    )
    return (
        f"<section><h2>Pipeline: {escape(road.unit)} that each part could do</h2>"
        f'<div class="road">{"".join(rows)}</div>{note}</section>'
    )


def _station(station: Station, most: float) -> str:
    tag = ""
    if station.narrowest:
        tag = f'<span class="tag">{"slowest part" if station.of_loader else "bottleneck"}</span>'
    name = f"{escape(station.name)}{tag}<small>{escape(station.note)}</small>"
    if station.of_loader:
        name = f'<span class="part">{escape(station.name)}</span>{tag}'
    return _row(name, station.per_s, most, "data" if station.narrowest else "compute")


def _row(name: str, per_s: float, most: float, colour: str) -> str:
    width = min(100.0, max(0.5, 100 * per_s / most))
    colour += _CUT if per_s > most else ""
    return (
        f'<div>{name}</div><div class="rate">{in_rate(per_s)}</div>'
        '<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="track" x="0" y="0" width="100" height="10"/>'
        f'<rect class="{colour}" x="0" y="0" width="{width:.3f}" height="10"/></svg>'
    )


def _rule(words: str) -> str:
    return f'<div class="rule">{escape(words)}</div>'
