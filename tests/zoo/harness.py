"""Runs a project of the zoo as its user does, as a program in a process of its own, and reads what was recorded.

A project is a folder of ``projects/`` with a ``row.json``: ``program`` (default ``train.py``), ``quick`` and ``full``
(arguments for a short and a long run), ``environment`` (of a short run), ``augments`` (workers draw random numbers, so
pixels depend on their number), ``reshuffles`` (the order depends on the number of workers: of a stream that is divided
among them, or of several loaders, whose shuffles draw their seeds in another order without workers), ``ranks``,
``faults`` (what the benchmark plants).
"""

import json
import os
import pickle
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import warm

HERE = Path(__file__).parent
RECORDER = HERE / "recorder"
PRELOADED = ["lightning.pytorch", "pytorch_lightning", "timm", "albumentations"]
"""Imported once, in the process that all programs are forked from: what the projects of the gate import."""
PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE.parent)!r})
from zoo.harness import main
sys.path.pop(0)
main(*sys.argv[1:])
"""
LIMIT_S, OTHER_RANKS_S = 240.0, 30.0


@dataclass(frozen=True, kw_only=True)
class Project:
    """A row of the zoo."""

    name: str
    program: str = "train.py"
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    augments: bool = False
    reshuffles: bool = False
    ranks: int = 1
    faults: dict[str, list[str]] = field(default_factory=dict)


def projects() -> dict[str, Project]:
    """All of them, by name."""
    rows = {}
    for path in sorted((HERE / "projects").iterdir()):
        row = json.loads((path / "row.json").read_text())
        lists = {key: tuple(row[key]) for key in ("quick", "full") if key in row}
        rows[path.name] = Project(name=path.name, **(row | lists))
    return rows


def copy_of(project: Project, folder: Path) -> Path:
    """The project's files in a folder of their own, without what the zoo knows of them."""
    shutil.copytree(HERE / "projects" / project.name, folder, ignore=shutil.ignore_patterns("row.json", "__pycache__"))
    return folder


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    printed: str
    exit_code: int | None
    """None: it did not end in time."""
    ranks: tuple[dict[str, Any], ...]
    """The record of each rank; none of a rank that never ended a fit."""
    measured: Any = None
    """What the report of rank 0 rests on."""

    @property
    def fine(self) -> bool:
        return self.exit_code == 0 and bool(self.ranks) and not any(rank["error"] for rank in self.ranks)

    def step_ms(self, warm_up: int = 20) -> float:
        """Mean time from the end of a step to that of the next, all that happens between them included."""
        ends = self.ranks[0]["ends"]
        return 1e3 * (ends[-1] - ends[warm_up]) / (len(ends) - 1 - warm_up)


def run(
    project: Project,
    folder: Path,
    *,
    feed: bool,
    steps: int,
    size: Literal["quick", "full"] = "quick",
    overrides: Sequence[str] = (),
) -> Outcome:
    """Run the program that lies in ``folder``, with both callbacks or without them."""
    out = folder / "recorded"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    environment = {
        **(project.environment if size == "quick" else {}),
        "PYTHONPATH": os.pathsep.join([str(RECORDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",  # of two, one waits for the other where programs outnumber the CPUs
        "LIGHTNING_FEED": "1" if feed else "0",
        "NO_ALBUMENTATIONS_UPDATE": "1",
        "ZOO_OUT": str(out),
        "ZOO_STEPS": str(steps),
        "ZOO_DIGESTS": "1000" if size == "quick" else "15",
    }
    argv = [str(folder / project.program), *(project.quick if size == "quick" else project.full), *overrides]
    program = warm.start_into(folder / "printed.txt", ["-c", PROGRAM, *argv], cwd=folder, env=os.environ | environment)
    exit_code: int | None = None
    try:
        exit_code = program.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    patience = time.monotonic() + OTHER_RANKS_S  # the program of rank 0 does not wait for those of the others
    while exit_code == 0 and len(list(out.glob("rank*.json"))) < project.ranks and time.monotonic() < patience:
        time.sleep(0.1)
    records = [json.loads(path.read_text()) for path in sorted(out.glob("rank*.json"))]
    pickled = out / "rank0.pickle"
    return Outcome(
        printed=(folder / "printed.txt").read_text(errors="replace"),
        exit_code=exit_code,
        ranks=tuple(records),
        measured=pickle.loads(pickled.read_bytes()) if pickled.exists() else None,
    )


def main(*argv: str) -> None:
    """Run a program or a notebook in this process, which was started for it."""
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch was imported before this was known
    if argv[0].endswith(".ipynb"):
        _notebook(Path(argv[0]))
    else:
        runpy.run_path(argv[0], run_name="__main__")


def _notebook(path: Path) -> None:
    """Run all cells, and print what they show."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=120, iopub_timeout=60, resources=place).execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            sys.stdout.write(output.get("text") or output.get("data", {}).get("text/plain", ""))
