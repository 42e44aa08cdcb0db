"""Claims that a part of gpu_day.py checks on a device, and the JSON file in which the part leaves them.

A part is a function that is given a :class:`Report` and a time limit. It runs in a process of its own:

    python PROGRAM PART --out FILE --limit SECONDS
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One thing that was to be shown."""

    claim: str
    measured: float | str | None = None
    unit: str = ""
    goal: str = ""
    """As text, ``<= 3``; empty where a figure is only reported."""
    passed: bool | None = None
    """None: not measured, or without a goal."""
    detail: str = ""

    def __post_init__(self) -> None:
        texts = (self.claim, self.unit, self.goal, self.detail)
        number = isinstance(self.measured, (int, float)) and not isinstance(self.measured, bool)
        if (
            not all(isinstance(text, str) for text in texts)
            or self.passed not in (True, False, None)
            or not (self.measured is None or isinstance(self.measured, str) or number)
            or (number and not math.isfinite(self.measured))
        ):
            raise ValueError(f"not a claim: {self}")

    def line(self) -> str:
        """For people."""
        told = "not measured" if self.measured is None else f"{number_text(self.measured)} {self.unit}".rstrip()
        goal = f", goal {self.goal}" if self.goal else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{ {True: 'pass', False: 'FAIL', None: '-'}[self.passed]:4}  {self.claim}: {told}{goal}{detail}"


def at_most(claim: str, measured: float, bound: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a figure is no larger than ``bound``."""
    return _bounded(measured <= bound, f"<= {number_text(bound)}", measured, claim=claim, unit=unit, detail=detail)


def at_least(claim: str, measured: float, bound: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a figure is no smaller than ``bound``."""
    return _bounded(measured >= bound, f">= {number_text(bound)}", measured, claim=claim, unit=unit, detail=detail)


def _bounded(passed: bool, goal: str, measured: float, **texts: str) -> Claim:  # noqa: FBT001
    told = measured if math.isfinite(measured) else str(measured)
    return Claim(measured=told, goal=goal, passed=bool(passed), **texts)


def if_active(claim: Claim, *, active: bool) -> Claim:
    """A PrefetchCallback that stood aside shows nothing."""
    return claim if active else replace(claim, passed=False, detail="PrefetchCallback stood aside")


def number_text(value: float | str) -> str:
    """Three significant digits, large numbers whole, with commas."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


class Report:
    """What a part has found so far. Every addition is on the disk at once: a part may be killed at its time limit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.claims: list[Claim] = []
        self.rows: list[dict[str, Any]] = []
        """Of the part's table."""

    def add(self, *claims: Claim) -> None:
        """Add claims."""
        self.claims += claims
        self._write()

    def row(self, **columns: Any) -> None:
        """Add a row of the part's table."""
        self.rows.append(columns)
        self._write()

    def _write(self) -> None:
        write_whole(self._path, {"claims": [asdict(claim) for claim in self.claims], "rows": self.rows})


def read_report(path: Path) -> tuple[list[Claim], list[dict[str, Any]]]:
    """Claims and rows of a part.

    Raises:
        ValueError: when the file holds something else.
    """
    found = json.loads(path.read_text())
    known = {field.name for field in fields(Claim)}
    if not isinstance(found, dict) or not isinstance(found.get("claims"), list):
        raise ValueError("it holds no list of claims")
    if not all(isinstance(claim, dict) and "claim" in claim and claim.keys() <= known for claim in found["claims"]):
        raise ValueError("its claims have other fields")
    rows = found.get("rows", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("its rows are no rows")
    return [Claim(**claim) for claim in found["claims"]], rows


def write_whole(path: Path, value: Any) -> None:
    """An atomic JSON write: a reader, and an interruption, meet the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


PartFunction: TypeAlias = Callable[[Report, float], None]


def run_part(parts: Mapping[str, PartFunction]) -> None:
    """The command line of a program with parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which the part is killed")
    options = parser.parse_args()
    parts[options.part](Report(options.out), options.limit)
