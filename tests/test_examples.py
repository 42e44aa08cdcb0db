"""The examples run as a user runs them, on small input. What they measure is not judged here."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import warm

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(script: str, *arguments: str, cwd: Path) -> str:
    done = warm.run([EXAMPLES / script, *arguments], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quickstart_reports_on_a_plain_and_a_fed_run(class_folders: Path, tmp_path: Path) -> None:
    for file in list(class_folders.glob("*/*.jpg")):
        for copy in range(42):  # 32 batches of 16 in all: of a few steps there is no report
            (file.parent / f"{file.stem}_{copy}.jpg").symlink_to(file)
    printed = _run("quickstart.py", "--data", str(class_folders), "--fast", cwd=tmp_path)
    assert printed.count("FEED") >= 2  # a report for each run
    logs = tmp_path / "lightning_logs"
    assert {folder.name for folder in logs.iterdir()} == {"plain", "fed"}
    assert len(list(logs.glob("*/version_0/events.out.*"))) == 2
    assert not (tmp_path / "feed_demo").exists()


def test_before_after_prints_both_times_and_their_ratio(tmp_path: Path) -> None:
    printed = _run("before_after.py", "--samples", "64", "--delay-ms", "1", "--epochs", "1", cwd=tmp_path)
    assert re.search(r"^machine   \d+ CPUs, .+, Python 3\.\d+\.\d+, torch \d", printed, re.MULTILINE)
    seconds = {
        name: float(value)
        for name, value in re.findall(r"^(before|after) +([\d.]+) s per epoch", printed, re.MULTILINE)
    }
    assert seconds["before"] >= 64 * 0.001  # 64 sleeps, one after the other
    assert seconds["after"] > 0
    (ratio,) = re.findall(r"^ratio +([\d.]+) x$", printed, re.MULTILINE)
    assert float(ratio) > 0


@pytest.mark.nightly  # test_gallery.py compares its words and plots
@pytest.mark.alone  # beside other programs a diagnosis may find nothing to advise
def test_the_tour_notebook_runs_and_shows_its_committed_output(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter about its own parts
        import nbformat
        from nbclient import NotebookClient

        tour = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
        committed = _shown(tour)
        place = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(tour, timeout=240, iopub_timeout=60, kernel_name="python3", resources=place).execute()
    assert _shown(tour) == committed
    assert "image/png" in str(committed)


def _shown(notebook: Any) -> list[list[str]]:
    """The kinds of all outputs, cell by cell."""
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    return [sorted({kind for output in each for kind in output.get("data", [output.output_type])}) for each in outputs]
