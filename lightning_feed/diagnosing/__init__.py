"""``diagnose``: one part of the input pipeline changed at a time, timed, and what training changed put back."""

from lightning_feed.diagnosing.run import diagnose
from lightning_feed.diagnosing.safety import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten

__all__ = ["DiagnosisFailed", "DiagnosisInterrupted", "DiagnosisNotWritten", "diagnose"]
