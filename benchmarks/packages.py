"""Packages with Lightning inside: is the printed place right, does its code work when pasted, what does it change?

For each package that is installed, a small training of `package_programs/` runs on the CPU:

* as it is, and with ``LIGHTNING_FEED=1``: the weights must be the same, bit for bit
* with ``LIGHTNING_FEED=1`` and one worker, given by the code that the report's place asks for: the report must count
  one worker then
* in interleaved pairs without and with that worker: milliseconds a step

It prints the rows of `docs/compatibility.md`, and the ``pip`` line of each package that is missing.

    python benchmarks/packages.py [--pairs 2] [--only scvi,darts] [--json FILE]
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_feed.measure.measurements import Place

PROGRAMS = Path(__file__).parent / "package_programs"
PIP = {
    "chemprop": "chemprop",
    "darts": "darts",
    "gluonts": "gluonts",
    "lightly": "lightly",
    "nequip": "nequip",
    "neuralforecast": "neuralforecast",
    "pytorch_tabular": "pytorch_tabular",
    "scvi": "scvi-tools",
    "torchgeo": "torchgeo",
}
MARK = "  # settings"
LIMIT_S = 400


@dataclass(frozen=True, kw_only=True)
class Row:
    package: str
    version: str
    same_weights: bool
    place: str
    code: str
    """Empty: it loads without a DataLoader, so there is no number of workers."""
    pasted: bool
    """The report counts one worker after that code was pasted."""
    without_ms: tuple[float, ...]
    with_ms: tuple[float, ...]


class Training:
    """One program, run in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.text, self.folder = (PROGRAMS / f"{name}.py").read_text(), folder

    def run(self, feed: str, code: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """The report, which is empty without ``feed``, and the weights."""
        for old in self.folder.rglob("feed_report.json"):
            old.unlink()
        (self.folder / "train.py").write_text(_with_settings(self.text, code) if code else self.text)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "train.py"],
            cwd=self.folder, env={**os.environ, "LIGHTNING_FEED": feed}, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        reports = sorted(self.folder.rglob("feed_report.json"), key=lambda file: file.stat().st_mtime)
        weights = torch.load(self.folder / "weights.pt", weights_only=False)
        return json.loads(reports[-1].read_text()) if reports else {}, weights


def _with_settings(text: str, code: str) -> str:
    """The program with further arguments in the line that it marks."""
    lines = text.splitlines(keepends=True)
    (number,) = (number for number, line in enumerate(lines) if line.rstrip().endswith(MARK.strip()))
    before, close, after = lines[number].partition(MARK)[0].rpartition(")")
    lines[number] = f"{before}, {code}{close}{after}\n"
    return "".join(lines)


def row_of(name: str, pairs: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        training = Training(name, Path(folder))
        _, plain = training.run("0")
        report, weights = training.run("1")
        place = Place(**{**report["run"]["place"], "names": tuple(map(tuple, report["run"]["place"]["names"]))})
        has_workers = report["run"]["num_workers"] is not None
        code = place.code(num_workers=1) if has_workers else ""
        feed, pasted = ("tune", "") if place.form == "callback" else ("1", code)
        without, with_worker = [report], []
        for number in range(pairs if code else 0):
            if number:
                without.append(training.run("1")[0])
            with_worker.append(training.run(feed, pasted)[0])
    return Row(
        package=name,
        version=importlib.metadata.version(PIP[name]),
        same_weights=_same(plain, weights),
        place=place.words,
        code="LIGHTNING_FEED=tune" if feed == "tune" else code,
        pasted=all(one["run"]["num_workers"] == 1 for one in with_worker),
        without_ms=tuple(one["step"]["step_ms"] for one in without),
        with_ms=tuple(one["step"]["step_ms"] for one in with_worker),
    )


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    tensors = [key for key, value in one.items() if isinstance(value, torch.Tensor)]
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in tensors)


def line_of(row: Row) -> str:
    """A row of the table in `docs/compatibility.md`."""
    weights = "the same" if row.same_weights else "**differ**"
    if not row.code:
        return f"| {row.package} {row.version} | - | {row.place} | {weights} | {_ms(row.without_ms)} | - |"
    code = f"`{row.code}`" if row.pasted else f"`{row.code}` **without effect**"
    steps = f"{_ms(row.without_ms)} | {_ms(row.with_ms)}"
    return f"| {row.package} {row.version} | {code} | {row.place} | {weights} | {steps} |"


def _ms(steps: tuple[float, ...]) -> str:
    if len(steps) == 1:
        return f"{steps[0]:.1f}"
    return f"{statistics.median(steps):.1f} ({min(steps):.1f} to {max(steps):.1f})"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--only", default=",".join(PIP))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    rows = []
    for name in chosen.only.split(","):
        if _version(PIP[name]) is None:
            print(f"{name} is not installed:  pip install {PIP[name]}")
            continue
        try:
            rows.append(row_of(name, chosen.pairs))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name} failed: {error}")
            continue
        print(line_of(rows[-1]), flush=True)
        if chosen.json:
            chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
