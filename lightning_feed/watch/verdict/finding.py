"""What a leaf of the verdict says."""

from dataclasses import dataclass

from lightning_feed.watch.verdict.diagnosis import Cause


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause, with the figures that speak for it."""

    cause: Cause
    because: tuple[str, ...] = ()
    """One sentence each."""
    sure: bool = True
    """Nothing that would have told otherwise is missing."""
    contradicted: bool = False
    """An experiment says otherwise: confidence is low, however good the figures."""
