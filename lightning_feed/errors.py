"""The errors of lightning_feed. Every message says what was given, why it is wrong, and what to do."""

import sys
import unicodedata
from pathlib import Path


def printable(text: str) -> str:
    """Text from outside, such as a file name, with control characters and invalid bytes escaped."""
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Printable text of a message, with its line ends."""
    return "\n".join(map(printable, text.split("\n")))


def source_line(file: str, line: int) -> str:
    """Name of a line of code for users: ``train.py:41``, or in a notebook ``Cell In[4], line 2``."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    cell = shell.compile.format_code_name(file) if shell is not None else None
    return f"{' '.join(cell)}, line {line}" if cell else f"{Path(file).name}:{line}"


def _printable(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # Python's stand-in for a byte of a file name that is not UTF-8
        return f"\\x{ord(char) - 0xDC00:02x}"
    category = unicodedata.category(char)
    unsafe = (category[0] == "C" or category in ("Zl", "Zp")) and char != "\t"
    return char.encode("unicode_escape").decode() if unsafe else char


class FeedError(Exception):
    """Root of every error that lightning_feed raises on purpose.

    Its text is printable, even if it quotes names of files or classes with special characters.
    """

    exit_code = 1
    """The exit code of a command that ends with this error."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class SettingsError(FeedError, ValueError):
    """A setting that is impossible, or that would have no effect."""

    exit_code = 2


class DatasetError(FeedError, ValueError):
    """``make_dataset`` returned an unusable dataset, or a sample cannot be read."""


class LoaderError(FeedError, RuntimeError):
    """A loader could not start, failed or hangs."""


class ResumeError(FeedError, RuntimeError):
    """A checkpoint's loader state does not fit the loaders of this run."""


class MissingExtraError(FeedError, ImportError):
    """An optional dependency is needed but not installed. The message contains the pip line to paste."""


class DecodeError(DatasetError):
    """Bytes that are not an image, are cut short, or are not supported by the decoder."""


class ArchiveError(FeedError, OSError):
    """A pack or a staged copy could not be written, read or trusted."""


class ReportError(FeedError, ValueError):
    """A report that cannot be written, read or understood, or a run that is starved beyond the given limit."""


def plural(count: int, thing: str, things: str = "") -> str:
    """A count with its noun: ``1 worker``, ``2 workers``, ``3 batches``."""
    return f"{count} {thing if count == 1 else things or thing + 's'}"


def throughput(batches_per_s: float, batch_size: int | None) -> str:
    """A rate in samples per second; in batches per second if the batch size is unknown."""
    return f"{in_rate(batches_per_s * (batch_size or 1))} {rate_unit(batch_size)}"


def rate_unit(batch_size: int | None) -> str:
    """The unit of :func:`throughput`."""
    return "samples/s" if batch_size else "batches/s"


def in_rate(per_s: float) -> str:
    """A rate with at least three digits, and thousands separated."""
    digits = 0 if per_s >= 100 else 1 if per_s >= 10 else 2
    return f"{per_s:,.{digits}f}".replace(",", " ")
