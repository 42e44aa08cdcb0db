"""One thing that was looked at: what it is, what it means, what to do."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note", "ok")
"""Worst first."""
NOT_KNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the screen."""

    topic: str
    """What was looked at, in a word or two."""
    value: str
    """What was found, with its unit; ``"not known"`` where it could not be read."""
    level: Level = "ok"
    """``"problem"`` breaks or cripples training, ``"warning"`` slows it, ``"note"`` is worth knowing."""
    meaning: str = ""
    """What it means for feeding a GPU, or why it is not known."""
    do: str = ""
    """What to do; "" where there is nothing to do."""
