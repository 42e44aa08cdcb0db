"""``diagnose``: one part of the road changed at a time, timed, and everything put back as it was."""

from lightning_feed.diagnosing.run import DiagnosisInterrupted, diagnose

__all__ = ["DiagnosisInterrupted", "diagnose"]
