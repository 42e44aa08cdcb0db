"""``diagnose``: changes one part of the input pipeline at a time, times it, and restores what training changed."""

from lightning_feed.diagnosing.failures import DiagnosisFailed, DiagnosisInterrupted, DiagnosisNotWritten
from lightning_feed.diagnosing.run import diagnose

__all__ = ["DiagnosisFailed", "DiagnosisInterrupted", "DiagnosisNotWritten", "diagnose"]
