"""Claims that a part of gpu_day.py checks, and the JSON file in which the part leaves them.

A part is a function that adds to a :class:`Report`. It runs in a process of its own:

    python PROGRAM PART --out FILE --limit SECONDS
"""

import argparse
import json
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
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

    def line(self) -> str:
        """For people."""
        verdict = {True: "pass", False: "FAIL", None: "-"}[self.passed]
        goal = f", goal {self.goal}" if self.goal else ""
        detail = f" ({self.detail})" if self.detail else ""
        return f"{verdict:4}  {self.claim}: {self.value()}{goal}{detail}"

    def value(self) -> str:
        """What was measured, with its unit."""
        if self.measured is None:
            return "not measured"
        return f"{number_text(self.measured)} {self.unit}".rstrip()


def at_most(claim: str, measured: float, bound: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a figure is no larger than ``bound``."""
    goal = f"<= {number_text(bound)}"
    return Claim(claim=claim, measured=measured, unit=unit, goal=goal, passed=measured <= bound, detail=detail)


def at_least(claim: str, measured: float, bound: float, unit: str = "", detail: str = "") -> Claim:
    """A claim that a figure is no smaller than ``bound``."""
    goal = f">= {number_text(bound)}"
    return Claim(claim=claim, measured=measured, unit=unit, goal=goal, passed=measured >= bound, detail=detail)


def if_active(claim: Claim, *, active: bool) -> Claim:
    """A PrefetchCallback that stood aside shows nothing."""
    return claim if active else replace(claim, passed=False, detail="PrefetchCallback stood aside")


def number_text(value: float | str | None) -> str:
    """Three significant digits, large numbers whole, with commas."""
    if value is None:
        return ""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


class Report:
    """What a part has found so far. Every addition is on the disk at once: a part may be killed at its time limit.

    Args:
        path: the JSON file.
        machine: facts about the machine.
    """

    def __init__(self, path: Path, machine: dict[str, Any] | None = None) -> None:
        self._path = path
        self._machine = machine or {}
        self.claims: list[Claim] = []
        self.rows: list[dict[str, Any]] = []
        """Of the part's table."""
        self._write()

    def add(self, *claims: Claim) -> None:
        """Add claims."""
        self.claims += claims
        self._write()

    def row(self, **columns: Any) -> None:
        """Add a row of the part's table."""
        self.rows.append(columns)
        self._write()

    def _write(self) -> None:
        claims = [asdict(claim) for claim in self.claims]
        write_whole(self._path, {"machine": self._machine, "claims": claims, "rows": self.rows})


def write_whole(path: Path, value: Any) -> None:
    """An atomic JSON write: a reader, and an interruption, meet the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def machine_facts() -> dict[str, Any]:
    """The GPU, None where there is none; driver, versions and CPUs."""
    import torch
    from pynvml import NVMLError, nvmlInit, nvmlSystemGetDriverVersion

    from lightning_feed.extras import installed_version
    from lightning_feed.machine.limits import read_machine

    try:
        nvmlInit()
        driver = nvmlSystemGetDriverVersion()
    except NVMLError:
        driver = None
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "torchvision": installed_version("torchvision"),
        "lightning": installed_version("lightning"),
        "python": platform.python_version(),
        "cpus": read_machine().usable_cpus,
    }


PartFunction: TypeAlias = Callable[[Report, float], None]
"""Takes the report, and the seconds after which it is killed."""


def run_part(parts: Mapping[str, PartFunction], *, needs_device: bool = True) -> None:
    """The command line of a program with parts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which the part is killed")
    options = parser.parse_args()
    machine = machine_facts()
    report = Report(options.out, machine)
    if needs_device and machine["device"] is None:
        report.add(Claim(claim=options.part, detail="needs a CUDA device"))
        return
    parts[options.part](report, options.limit)
