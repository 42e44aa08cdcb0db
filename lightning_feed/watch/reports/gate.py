"""A gate for CI: is training starved beyond a limit?"""

from lightning_feed.errors import ReportError
from lightning_feed.watch.reports.report import Report


def check_starved(report: Report, *, above_pct: float) -> str:
    """Say that a run is within the limit.

    What counts is ``starved_pct``; with several ranks the larger of it and of what all ranks together lose
    (``ranks.starved_pct``), because the rank that wrote the report may be fed while it waits for another.

    Args:
        report: of the run.
        above_pct: the largest share of step time that may be spent waiting for data, 0 to 100.

    Returns:
        The result in a line.

    Raises:
        ReportError: when the share is above the limit, or was not measured.
    """
    stats, ranks = report.diagnosis.stats, report.diagnosis.measurements.ranks
    if report.diagnosis.grade == "not measured" or stats.starved_pct is None:
        alone = report.diagnosis.measurements.experiments is not None and not stats.steps
        todo = "Diagnose a LightningModule with it." if alone else "Train longer with GPUStarvationCallback."
        raise ReportError(
            f"nothing to hold against the limit of {above_pct:g} %: {stats.steps} steps were measured. {todo}"
        )
    starved, whose = stats.starved_pct, "starved_pct"
    if ranks is not None and ranks.starved_pct is not None and ranks.starved_pct > starved:
        starved, whose = ranks.starved_pct, "ranks.starved_pct"
    said = f"{whose} is {starved:.2f}, limit {above_pct:g} (confidence {report.diagnosis.confidence})"
    if starved > above_pct:
        raise ReportError(f"{said}: training waits too long for data")
    return f"{said}: fine"
