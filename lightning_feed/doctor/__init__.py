"""The doctor: findings about the machine and environment, their sources, and their output."""

import dataclasses
import importlib
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal

from lightning_feed.errors import plural
from lightning_feed.extras import installed_version

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note", "ok")
"""Worst first."""
NOT_KNOWN = "not known"
SCHEMA = "lightning_feed.doctor/1"
WIDTH = 110


@dataclass(frozen=True)
class Finding:
    """One line of the output."""

    topic: str
    """The subject, in a word or two."""
    value: str
    """The value, with its unit; ``"not known"`` if it could not be read."""
    level: Level = "ok"
    """``"problem"`` breaks or cripples training, ``"warning"`` slows it, ``"note"`` is worth knowing."""
    meaning: str = ""
    """The meaning for feeding a GPU, or the reason why the value is unknown."""
    do: str = ""
    """The thing to do; empty if there is nothing to do."""

    def only_if(self, fault: bool) -> "Finding":  # noqa: FBT001  # it reads as a sentence
        """Return this finding if there is a fault, else only its topic and value."""
        return self if fault else Finding(self.topic, self.value)


def _limit(name: str) -> tuple[int, int]:
    resource = importlib.import_module("resource")  # not on every system
    soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return soft, hard


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of all findings: this machine and process by default; tests pass others."""

    root: Path = Path("/")
    """The file system to read ``proc``, ``sys`` and ``dev/shm`` from."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    load: Callable[[str], Any] = importlib.import_module
    """Imports a module; raises ImportError if it is missing."""
    version: Callable[[str], str | None] = installed_version
    requirements: Callable[[], list[str] | None] = lambda: requires("lightning-feed")
    """Requirements of this package, as in its metadata (``"torch>=2.6"``)."""
    limit: Callable[[str], tuple[int, int]] = _limit
    """(soft, hard) limit of open files (``"NOFILE"``) or of locked memory in bytes (``"MEMLOCK"``); -1: no limit."""
    wait: Callable[[float], object] = time.sleep
    """Waits for a number of seconds."""
    space: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    """(size, used, free) of the file system of a folder, bytes."""


def as_text(findings: Sequence[Finding]) -> str:
    """Findings as text, the worst first; within a level in the order of the checks."""
    topics = max((len(one.topic) for one in findings), default=0)
    lines = [line for one in sorted(findings, key=lambda one: LEVELS.index(one.level)) for line in _lines(one, topics)]
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS[:3]}
    said = [plural(count, level) for level, count in counts.items() if count]
    return "\n".join([*lines, "", (", ".join(said) or "Nothing to fix") + "."])


def _lines(one: Finding, topics: int) -> list[str]:
    mark = "PROBLEM" if one.level == "problem" else one.level
    head = f"{mark:<8} {one.topic:<{topics}}  "
    meaning = one.meaning and (f" ({one.meaning})" if one.level == "ok" else f": {one.meaning}")
    pad = " " * len(head)
    return _wrapped(head, pad, one.value + meaning) + _wrapped(f"{pad}-> ", f"{pad}   ", one.do)


def _wrapped(head: str, below: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=head, subsequent_indent=below, break_long_words=False)


def as_plain(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output of ``--json``: ``schema`` and ``findings``, in the order of the checks."""
    return {"schema": SCHEMA, "findings": [dataclasses.asdict(one) for one in findings]}
