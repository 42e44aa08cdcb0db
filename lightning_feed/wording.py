"""Text for messages: printable text, names of code lines, counts, rates and sizes."""

import sys
import unicodedata
from pathlib import Path


def printable(text: str) -> str:
    """Escape control characters and invalid bytes in text from outside, such as a file name."""
    if text.isprintable():
        return text
    return "".join(map(_printable_character, text))


def printable_lines(text: str) -> str:
    """Escape the lines of a message like :func:`printable`, and keep the line ends."""
    return "\n".join(map(printable, text.split("\n")))


def _printable_character(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # Python's stand-in for a byte of a file name that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    category = unicodedata.category(character)
    is_control = category.startswith("C") or category in ("Zl", "Zp")
    if is_control and character != "\t":
        return character.encode("unicode_escape").decode()
    return character


def source_line(file: str, line: int) -> str:
    """Name a line of code for users: ``train.py:41``, or in a notebook ``Cell In[4], line 2``."""
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None:
            cell = shell.compile.format_code_name(file)
            if cell:
                return f"{' '.join(cell)}, line {line}"
    return f"{Path(file).name}:{line}"


def plural(count: int, thing: str, things: str = "") -> str:
    """Return a count with its noun: ``1 worker``, ``2 workers``, ``3 batches``."""
    if count == 1:
        return f"1 {thing}"
    return f"{count} {things or thing + 's'}"


def throughput(batches_per_s: float, batch_size: int | None) -> str:
    """Return a rate in samples per second; in batches per second if the batch size is unknown."""
    return f"{in_rate(batches_per_s * (batch_size or 1))} {rate_unit(batch_size)}"


def rate_unit(batch_size: int | None) -> str:
    """Return the unit of :func:`throughput`."""
    return "samples/s" if batch_size else "batches/s"


def in_rate(per_s: float) -> str:
    """Return a rate with at least three digits, and spaces between thousands."""
    digits = 2
    if per_s >= 100:
        digits = 0
    elif per_s >= 10:
        digits = 1
    return f"{per_s:,.{digits}f}".replace(",", " ")


def size_text(size: float) -> str:
    """Format bytes for people: ``"12.3 GiB"``."""
    if size < 1024:
        return f"{size:.0f} bytes"
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} GiB"
