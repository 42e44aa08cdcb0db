"""The doctor: its findings on machine and environment, where they are read from, and how they are shown."""

import dataclasses
import importlib
import os
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from typing import Any, Literal

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
    """The value, with its unit; ``"not known"`` where it could not be read."""
    level: Level = "ok"
    """``"problem"`` breaks or cripples training, ``"warning"`` slows it, ``"note"`` is worth knowing."""
    meaning: str = ""
    """Its meaning for feeding a GPU, or why it is not known."""
    do: str = ""
    """The thing to do; "" where there is nothing to do."""

    def only_if(self, fault: bool) -> "Finding":  # noqa: FBT001  # it reads as a sentence
        """This where there is a fault, else the topic and the value alone."""
        return self if fault else Finding(self.topic, self.value)


def _open_files() -> tuple[int, int]:
    resource = importlib.import_module("resource")  # not on every system
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft, hard


def _locked_memory() -> int:
    resource = importlib.import_module("resource")
    return int(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of all findings: by default this machine and this process; tests give others."""

    root: Path = Path("/")
    """The file system to read ``proc``, ``sys`` and ``dev/shm`` from."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    load: Callable[[str], Any] = importlib.import_module
    """Imports a module; an ImportError says that it is absent."""
    version: Callable[[str], str | None] = installed_version
    requirements: Callable[[], list[str] | None] = lambda: requires("lightning-feed")
    """Requirements of this package, as in its metadata (``"torch>=2.6"``)."""
    open_files: Callable[[], tuple[int, int]] = _open_files
    """(soft, hard) limit of open files; -1 is no limit."""
    locked_memory: Callable[[], int] = _locked_memory
    """Limit of locked memory, bytes; -1 is no limit."""
    space: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage
    """(size, used, free) of the file system of a folder, bytes."""


def as_text(findings: Sequence[Finding]) -> str:
    """Findings as a screen of text: the worst first; within a level in the order in which they were found."""
    topics = max((len(one.topic) for one in findings), default=0)
    lines: list[str] = []
    for one in sorted(findings, key=lambda one: LEVELS.index(one.level)):
        mark = "PROBLEM" if one.level == "problem" else one.level
        head = f"{mark:<8} {one.topic:<{topics}}  "
        told = f"{one.value} ({one.meaning})" if one.meaning and one.level == "ok" else one.value
        if one.meaning and one.level != "ok":
            told += f": {one.meaning}"
        pad = " " * len(head)
        lines += textwrap.wrap(head + told, WIDTH, subsequent_indent=pad, break_long_words=False)
        if one.do:
            arrow, below = f"{pad}-> ", f"{pad}   "
            lines += textwrap.wrap(one.do, WIDTH, initial_indent=arrow, subsequent_indent=below, break_long_words=False)
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS[:3]}
    said = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count]
    return "\n".join([*lines, "", (", ".join(said) or "Nothing to fix") + "."])


def as_plain(findings: Sequence[Finding]) -> dict[str, Any]:
    """The output of ``--json``: ``schema`` and ``findings``, in the order in which they were found."""
    return {"schema": SCHEMA, "findings": [dataclasses.asdict(one) for one in findings]}
