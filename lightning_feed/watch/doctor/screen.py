"""Findings as one screen of text, or as JSON."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from lightning_feed.watch.doctor.finding import LEVELS, Finding

SCHEMA = "lightning_feed.doctor/1"
WIDTH = 110
MARKS = {"problem": "PROBLEM", "warning": "warning", "note": "note", "ok": "ok"}


def as_text(findings: Sequence[Finding]) -> str:
    """Worst first; within a level in the order in which they were found."""
    topics = max((len(one.topic) for one in findings), default=0)
    lines: list[str] = []
    for one in sorted(findings, key=lambda one: LEVELS.index(one.level)):
        head = f"{MARKS[one.level]:<8} {one.topic:<{topics}}  "
        told = f"{one.value} ({one.meaning})" if one.meaning and one.level == "ok" else one.value
        if one.meaning and one.level != "ok":
            told += f": {one.meaning}"
        lines += textwrap.wrap(head + told, WIDTH, subsequent_indent=" " * len(head), break_long_words=False)
        if one.do:
            pad = " " * len(head)
            lines += textwrap.wrap(
                "-> " + one.do, WIDTH, initial_indent=pad, subsequent_indent=pad + "   ", break_long_words=False
            )
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS[:3]}
    said = [f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count]
    return "\n".join([*lines, "", (", ".join(said) or "Nothing to mend") + "."])


def as_plain(findings: Sequence[Finding]) -> dict[str, Any]:
    """What ``--json`` prints: ``schema`` and ``findings``, in the order in which they were found."""
    return {"schema": SCHEMA, "findings": [dataclasses.asdict(one) for one in findings]}
