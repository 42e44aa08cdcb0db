"""Shows what the package logs, from INFO on, in a program that has set up no logging of its own."""

import logging
import sys


class ConsoleHandler(logging.Handler):
    """Writes to ``stderr`` while the root logger has no handler: what has one shows our lines itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, as ``logging.lastResort`` does for warnings."""
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed, gone, or None: there is no other place to say it
            return


def show_lines() -> None:
    """Add the handler to the package's logger, once. A level that was set there stays."""
    package = logging.getLogger("lightning_feed")
    if not any(isinstance(one, ConsoleHandler) for one in package.handlers):
        package.addHandler(ConsoleHandler())
    if package.level == logging.NOTSET:
        package.setLevel(logging.INFO)
