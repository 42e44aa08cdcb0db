"""How a diagnosis may end other than with a verdict that is written: each end with what was measured by then."""

import signal
from pathlib import Path

from lightning_feed.errors import FeedError, ReportError
from lightning_feed.watch.verdict.diagnosis import Diagnosis


class DiagnosisInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM while experiments ran. Everything was put back; what had been measured by then is here."""

    def __init__(
        self,
        diagnosis: Diagnosis,
        written: list[Path],
        signal_number: int = signal.SIGINT,
        not_written: str | None = None,
    ) -> None:
        super().__init__("diagnose() was interrupted")
        self.diagnosis = diagnosis
        """The verdict on what was measured."""
        self.written = written
        """Its files."""
        self.signal_number = int(signal_number)
        """``signal.SIGINT`` or ``signal.SIGTERM``."""
        self.not_written = not_written
        """Why there are no files, though some were asked for."""


class DiagnosisFailed(FeedError):
    """The user's code failed after something had been measured. Everything was put back."""

    def __init__(self, message: str, diagnosis: Diagnosis, written: list[Path]) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict on what was measured before."""
        self.written = written
        """Its files."""


class DiagnosisNotWritten(ReportError):
    """All was measured, and the files could not be written."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis
        """The verdict."""


class ProgramEnded(FeedError):
    """The user's program ended before it called ``Trainer.fit``."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """What the command is to end with: the program's own, and 1 where that says that all is well."""
