"""The report as text for the console."""

from collections.abc import Callable

from lightning_feed.watch.verdict.diagnosis import Diagnosis
from lightning_feed.watch.verdict.tree import in_ms

Printer = Callable[[str], object]


def as_text(diagnosis: Diagnosis) -> str:
    """The verdict, how a step divides, and what to change; a line each."""
    stats = diagnosis.stats
    if diagnosis.bottleneck == "unknown" or stats.step_ms is None:
        return f"FEED  no verdict: {diagnosis.evidence[0]}."
    lines = [f"FEED  {_headline(diagnosis)} (confidence {diagnosis.confidence}, {stats.steps} steps)"]
    parts = (
        ("compute", stats.compute_ms),
        ("data", stats.data_idle_ms),
        ("h2d", stats.h2d_ms),
        ("other", stats.other_ms),
    )
    whole = stats.step_ms
    split = f"step {in_ms(whole, whole)} ms = " + " | ".join(f"{name} {in_ms(ms, whole)}" for name, ms in parts)
    if stats.speedup_if_free is not None:
        split += f"        if data were free: {stats.speedup_if_free:.2f} x"
    lines.append(split)
    lines.append("why   " + "; ".join(diagnosis.evidence))
    for number, remedy in enumerate(diagnosis.remedies):
        predicted = remedy.predicted_step_ms
        at_best = "" if predicted is None else f" (at best {in_ms(predicted, whole)} ms a step)"
        lines.append(f"{'      ' if number else 'fix   '}{remedy.code}    # {remedy.why}{at_best}")
    return "\n".join(lines)


def _headline(diagnosis: Diagnosis) -> str:
    stats = diagnosis.stats
    waits = f"GPU idle {stats.starved_pct:.0f} % of each step waiting for data"
    if diagnosis.device_type == "cpu":
        waits = f"training waits for data {stats.starved_pct:.0f} % of each step"
    if diagnosis.bottleneck in ("data", "compute"):
        kind = diagnosis.grade if diagnosis.bottleneck == "data" else f"compute-bound, {diagnosis.grade}"
        return f"{kind}: {waits}"
    return f"{diagnosis.bottleneck}-bound, {diagnosis.grade}: {waits}"


def print_report(diagnosis: Diagnosis, printer: Printer | None) -> None:
    """Print the report, through ``printer`` where a progress bar would otherwise be drawn over."""
    (printer or print)(as_text(diagnosis))
