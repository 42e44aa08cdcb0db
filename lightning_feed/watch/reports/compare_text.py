"""A comparison of two reports as text for the console."""

from lightning_feed.errors import printable_lines
from lightning_feed.watch.reports.compare import Changed, Comparison, Figure
from lightning_feed.watch.reports.report import RemedyCheck

_NAME, _COLUMN = 14, 11


def comparison_text(found: Comparison) -> str:
    """What changed, figure by figure, and what became of the predictions."""
    lines = [f"before   {found.before}", f"after    {found.after}"]
    verdict = f"{found.verdict_before} -> {found.verdict_after}" if found.verdict_changed else found.verdict_before
    lines.append(f"verdict  {verdict}{'' if found.verdict_changed else ' (unchanged)'}")
    lines.append(f"changed  {_changes(found.settings) or 'no setting that the reports tell of'}")
    if found.versions:
        lines.append(f"versions {_changes(found.versions)}")
    lines.append(f"{'':{_NAME}}{'before':>{_COLUMN}}{'after':>{_COLUMN}}")
    lines += [_row(one) for one in found.figures if (one.before, one.after) != (None, None)]
    if found.starved_within_noise is not None:
        said = "overlap: within noise" if found.starved_within_noise else "do not overlap: more than noise"
        lines.append(f"noise    the 95 % intervals of starved_pct {said}")
    lines += [f"check    {check_text(one)}" for one in found.predictions]
    if not found.predictions:
        lines.append("check    none of the earlier report's remedies is in effect in the later run")
    if found.unchecked:
        lines.append(f"unknown  the reports do not tell whether these are in effect: {'; '.join(found.unchecked)}")
    lines += [f"caution  {one}" for one in found.cautions]
    return printable_lines("\n".join(lines))


def check_text(check: RemedyCheck) -> str:
    """One prediction and what became of it."""
    if check.predicted_step_ms is None:
        outcome = "nothing was predicted"
    elif check.achieved_step_ms is None:
        outcome = f"predicted step {check.predicted_step_ms:.1f} ms, achieved not measured"
    else:
        outcome = f"predicted step {check.predicted_step_ms:.1f} ms, achieved {check.achieved_step_ms:.1f} ms"
    error = "" if check.error_pct is None else f", error {check.error_pct:+.1f} %"
    also = f" (also changed: {', '.join(check.also_changed)})" if check.also_changed else ""
    return f"{check.changes}: {outcome}{error}{also}"


def _changes(changes: tuple[Changed, ...]) -> str:
    return "; ".join(f"{one.name} {one.before} -> {one.after}" for one in changes)


def _row(figure: Figure) -> str:
    change = "" if figure.change_pct is None or figure.name.endswith("_pct") else f"{figure.change_pct:+8.0f} %"
    if figure.name.endswith("_pct") and figure.before is not None and figure.after is not None:
        change = f"{figure.after - figure.before:+8.1f} points"
    return f"{figure.name:{_NAME}}{_cell(figure.before)}{_cell(figure.after)}{change}"


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}':>{_COLUMN}}"
