"""``diagnose``: one part of the road changed at a time, timed, and everything put back as it was."""

from lightning_feed.diagnosing.outcomes import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
from lightning_feed.diagnosing.run import diagnose

__all__ = ["DiagnosisFailed", "DiagnosisInterrupted", "DiagnosisNotWritten", "diagnose"]
