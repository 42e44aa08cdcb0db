"""Where people see the report: in a notebook, and in a terminal beside a progress bar. Both are real."""

import os
import pty
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import warm

pytestmark = pytest.mark.slow  # a kernel, and terminals with programs of their own

FIT = """
import time, lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from lightning_feed import GPUStarvationCallback

class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        time.sleep(0.003)
        return super().training_step(batch, batch_idx)

starvation = GPUStarvationCallback()
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                     callbacks=[BAR(), starvation], limit_val_batches=0)
trainer.fit(Model(), DataLoader(RandomDataset(32, 105)))
"""
STARTS = ("FEED", "step", "wall", "cause", "why", "fix", "not", "note", "next:")
TUNE = "import lightning_feed; lightning_feed.tune(DataLoader(RandomDataset(32, 64)), budget_s=1)"


def _run_cells(*cells: str) -> list[list[Any]]:
    """The outputs of a notebook's cells, run in a kernel."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter about its own parts
        import nbformat
        from nbclient import NotebookClient

        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
        NotebookClient(notebook, timeout=120, iopub_timeout=60, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


def test_a_notebook_shows_reports_as_html_pages() -> None:
    """With ipywidgets, RichProgressBar draws itself at each printed line. A report in many prints once made it hang."""
    where = "print(starvation.report().measurements.facts.loader_code.words)"
    fit, report, text, place, tuned = _run_cells(
        FIT.replace("BAR", "RichProgressBar"), "starvation.report()", "repr(_)", where, TUNE
    )
    shown = [
        output.data
        for output in fit
        if output.output_type == "display_data" and "FEED  " in output.data.get("text/plain", "")
    ]
    assert len(shown) == 2  # after 200 steps, and at the end
    for page in (shown[-1], report[0].data):
        assert page["text/html"].startswith("<iframe srcdoc=")
        assert "lightning_feed report" in page["text/html"]
    assert len(text[0].data["text/plain"]) < 250
    assert place[0].text == "your training DataLoader (passed to trainer.fit)\n"
    assert "<b>num_workers=" in tuned[-1].data["text/html"]
    assert len(tuned[-1].data["text/plain"]) < 250


@pytest.mark.parametrize("bar", ["RichProgressBar", "TQDMProgressBar"])
def test_progress_bars_do_not_interrupt_a_report_in_a_terminal(bar: str, tmp_path: Path) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT.replace("BAR", bar))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "300", "LINES": "40"}
    process = warm.start([script], streams=(theirs, theirs, theirs), env=environment)
    os.close(theirs)
    screen = b""
    while True:
        try:
            screen += os.read(ours, 65536)
        except OSError:  # how Linux tells that nobody writes there any more
            break
    os.close(ours)
    assert process.wait(60) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode(errors="replace"))
    reports = re.findall(r"FEED  .*?next: [^\r\n]*", plain, re.DOTALL)
    assert len(reports) == 2
    assert not any("Epoch" in report for report in reports)
    for report in reports:
        starts = [line.split()[0] for line in re.split(r"[\r\n]+(?![\r\n ])", report)]
        assert set(starts) <= {*STARTS, "files"}, starts  # on a busy machine it cannot tell, and shows fewer lines
        assert (starts[0], starts[-1]) == ("FEED", "next:")
