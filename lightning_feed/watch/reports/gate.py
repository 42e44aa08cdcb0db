"""A gate for CI: is training starved beyond a limit?"""

from lightning_feed.errors import ReportError
from lightning_feed.watch.reports.report import Report
from lightning_feed.watch.verdict.diagnosis import Measurements
from lightning_feed.watch.verdict.shares import shares_of

FIRST_BATCH = "the share of each epoch before its first batch"


def check_starved(report: Report, *, above_pct: float) -> str:
    """Say that a run is within the limit.

    What counts is what the grade of the verdict goes by, the largest of three shares: ``starved_pct``; with several
    ranks what all of them together lose (``ranks.starved_pct``), because the rank that wrote the report may be fed
    while it waits for another; and what of an epoch goes by before its first batch, which lies in no step. Where the
    model alone takes as long as a step nothing is lost, as the verdict says.

    Args:
        report: of the run.
        above_pct: the largest share of step time that may be spent waiting for data, 0 to 100.

    Returns:
        The result in a line.

    Raises:
        ReportError: when the share is above the limit, or was not measured.
    """
    stats, measured = report.diagnosis.stats, report.diagnosis.measurements
    if report.diagnosis.grade == "not measured" or stats.starved_pct is None:
        alone = measured.experiments is not None and not stats.steps
        todo = "Diagnose a LightningModule with it." if alone else "Train longer with GPUStarvationCallback."
        raise ReportError(
            f"nothing to hold against the limit of {above_pct:g} %: {stats.steps} steps were measured. {todo}"
        )
    starved, whose = _largest(measured, stats.starved_pct)
    said = f"{whose} is {starved:.2f}, limit {above_pct:g} (confidence {report.diagnosis.confidence})"
    if starved <= above_pct:
        return f"{said}: fine"
    shares = shares_of(measured)
    if shares is not None and shares.acquitted:
        return f"{said}: fine, the model alone takes as long as a step"
    raise ReportError(f"{said}: training waits too long for data")


def _largest(measured: Measurements, starved_pct: float) -> tuple[float, str]:
    ranks, shares = measured.ranks, shares_of(measured)
    known = [(starved_pct, "starved_pct")]
    if ranks is not None and ranks.starved_pct is not None:
        known.append((ranks.starved_pct, "ranks.starved_pct"))
    if shares is not None and shares.epoch_pct is not None:
        known.append((shares.epoch_pct, FIRST_BATCH))
    return max(known, key=lambda one: one[0])
