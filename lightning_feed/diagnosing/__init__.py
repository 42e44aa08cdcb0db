"""``diagnose``: one part of the input pipeline changed at a time, timed, and what training changed put back."""

from lightning_feed.diagnosing.failures import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
from lightning_feed.diagnosing.run import diagnose

__all__ = ["DiagnosisFailed", "DiagnosisInterrupted", "DiagnosisNotWritten", "diagnose"]
