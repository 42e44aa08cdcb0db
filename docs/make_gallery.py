"""The pictures of the pages in docs, and the outputs of examples/tour.ipynb: all of real runs.

    python docs/make_gallery.py             # new runs, and all pictures of them: about five minutes
    python docs/make_gallery.py --redraw    # the same pictures and outputs with today's words: some seconds

Runs the demo, a diagnosis and the notebook in an empty folder, keeps their reports in docs/images/runs, and draws pages
with a headless Chromium and the terminal's lines as SVG. Needs the extra ``dev`` and Chromium (``apt-get install
chromium``). The pictures show what this machine measures: run it on one that does nothing else.

tests/test_gallery.py fails when a picture has words that the code no longer prints: a page keeps its words in the PNG.
"""

import argparse
import base64
import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console
from rich.text import Text

from lightning_feed import demo
from lightning_feed.measure.stats import custom_scalar_layout
from lightning_feed.report.compare import compare, comparison_text
from lightning_feed.report.document import read_document
from lightning_feed.report.files import as_html, as_text
from lightning_feed.report.report import Report
from lightning_feed.verdict.decide import decide

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
KEPT = IMAGES / "runs"
TOUR = ROOT / "examples" / "tour.ipynb"
COLUMNS = 110
WAIT_S = 60
LOGS = "feed_demo/logs/{}/version_0"
PROGRAM = "--data feed_demo/pictures-512"
"""Arguments of the program that is diagnosed."""
TOUR_RUNS = {"plain": "tour-plain", "fixed": "tour-fixed"}
"""Run of the notebook -> its report here."""


def main() -> None:
    """Make new runs if asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="make no new runs")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("No Chromium is installed: apt-get install chromium")
    shot = Screenshots(browser)
    if not parser.parse_args().redraw:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), shot)
    redraw_tour()
    for name, text in terminals().items():
        save_terminal(name, text)
    with tempfile.TemporaryDirectory() as folder:
        for name, page in pages().items():
            file = Path(folder, f"{name}.html")
            file.write_text(page, encoding="utf-8")
            shot.take(file.as_uri(), name, words_of(page))


# --- runs -------------------------------------------------------------------------------------------------------------


def measure(place: Path, shot: "Screenshots") -> None:
    """Run the notebook, the demo and a diagnosis, and keep their reports."""
    KEPT.mkdir(exist_ok=True)
    run_tour(place)
    keep("demo", command(place, "demo", "--json"), place)
    for name in demo.RUNS:
        keep(name, place.joinpath(LOGS.format(name), "feed_report.json").read_text(), place)
    shutil.copy(ROOT / "examples" / "quickstart.py", place)
    found = command(place, "diagnose", "--quick", "--json", "quickstart.py", "--", *PROGRAM.split())
    keep("diagnose", found, place)
    with tensorboard(place) as address:
        shot.take(f"{address}#custom_scalars", "tensorboard", chart_titles(), size=(1400, 830))


def keep(name: str, document: str, place: Path) -> None:
    """Write a JSON document into ``KEPT`` without the paths of this machine."""
    for folder in (place, ROOT, sysconfig.get_path("purelib")):
        document = document.replace(f"{folder}/", "")
    (KEPT / f"{name}.json").write_text(document.rstrip("\n") + "\n", encoding="utf-8")


def command(place: Path, *arguments: str) -> str:
    """What a command of ours prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "lightning_feed", *arguments]
    return subprocess.run(run, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def run_tour(place: Path) -> None:
    """Execute the notebook, keep it with its outputs, its reports, and its plots as ``tour-*.png``."""
    tour = nbformat.read(TOUR, as_version=4)
    cells = list(tour.cells)
    keeps = "from lightning_feed.report.document import as_json, make_report\nprint(as_json(make_report(found)))"
    tour.cells.append(nbformat.v4.new_code_cell(keeps))
    where = {"metadata": {"path": str(place)}}
    NotebookClient(tour, timeout=300, kernel_name="python3", resources=where, record_timing=False).execute()
    keep("tour-diagnose", tour.cells.pop().outputs[0].text, place)
    for name, kept in TOUR_RUNS.items():
        keep(kept, place.joinpath("runs", name, "version_0", "feed_report.json").read_text(), place)
    tour.metadata.pop("language_info", None)  # tells which Python ran it
    nbformat.write(tour, TOUR)
    for name, plot in tour_plots(cells).items():
        (IMAGES / f"tour-{name}.png").write_bytes(plot)


def tour_plots(cells: list[Any]) -> dict[str, bytes]:
    """The plots of the notebook that are pictures too. The first is not: the last shows it again."""
    outputs = (one for cell in cells for one in cell.get("outputs", ()))
    plots = [base64.b64decode(one.data["image/png"]) for one in outputs if "image/png" in one.get("data", {})]
    return dict(zip(("diagnosis", "after"), plots[1:], strict=True))


@contextlib.contextmanager
def tensorboard(place: Path) -> Iterator[str]:
    """The address of a TensorBoard server on this machine, as long as it is needed."""
    address = "http://127.0.0.1:6123/"
    run = [sys.executable, "-m", "tensorboard.main", "--logdir", "feed_demo/logs", "--host", "127.0.0.1"]
    server = subprocess.Popen([*run, "--port", "6123"], cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(address)
        yield address
    finally:
        server.terminate()
        server.wait()


def wait_for(address: str) -> None:
    """Until a server answers, and has read the runs."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback: no proxy
    latest = time.monotonic() + WAIT_S
    while True:
        try:
            with opener.open(f"{address}data/runs", timeout=5) as answer:
                if b"advised" in answer.read():
                    return
        except OSError:
            pass  # it is not there yet
        if time.monotonic() > latest:
            raise SystemExit("TensorBoard did not answer")
        time.sleep(0.5)


# --- what the code prints of the runs that are kept -------------------------------------------------------------------


def kept_report(name: str, run: str = "") -> Report:
    """A report that was kept, with the verdict and the words of today's code."""
    found = read_document(KEPT / f"{name}.json")
    return replace(found, diagnosis=decide(found.diagnosis.measurements), path=Path(run, "feed_report.json"))


def kept_demo() -> tuple[dict[str, Any], dict[str, Report]]:
    """The outcome of the demo, and its reports."""
    reports = {name: kept_report(name, LOGS.format(name)) for name in demo.RUNS}
    outcome = json.loads((KEPT / "demo.json").read_text(encoding="utf-8"))
    outcome["plain_report"] = as_text(reports["plain"].diagnosis, width=COLUMNS)
    for name, report in reports.items():
        outcome[name]["verdict"] = demo.verdict_words(report)
    return outcome, reports


def terminals() -> dict[str, str]:
    """Picture -> the lines on a terminal."""
    outcome, reports = kept_demo()
    found = kept_report("diagnose")
    plain, advised = (reports[name] for name in ("plain", "advised"))
    diagnosis = as_text(found.diagnosis, found.run, width=COLUMNS, arguments=PROGRAM)
    return {
        "demo": f"$ lightning-feed demo\n{demo.demo_text(outcome)}",
        "compare": f"$ lightning-feed compare {LOGS.format('plain')} {LOGS.format('advised')}\n"
        + comparison_text(compare(plain, advised)),
        "diagnose": f"$ lightning-feed diagnose --quick quickstart.py -- {PROGRAM}\n{diagnosis}",
    }


def pages() -> dict[str, str]:
    """Picture -> a page."""
    outcome, reports = kept_demo()
    return {
        "report": as_html(reports["plain"]),
        "demo": demo.demo_page(outcome, reports),
    }


def tour_texts(cells: list[Any]) -> list[tuple[Any, str]]:
    """The cells of the notebook that print what our code says, and the text."""
    plain, fixed = (kept_report(kept, f"runs/{name}/version_0") for name, kept in TOUR_RUNS.items())
    read = f"lightning-feed: {plain.path}, written {plain.written_at}\n"
    printed = io.StringIO()
    said = {
        "!{sys.executable} -m lightning_feed report": read + as_text(plain.diagnosis, plain.run, width=80) + "\n",
        "!{sys.executable} -m lightning_feed compare": comparison_text(compare(plain, fixed)) + "\n",
    }
    (advice,) = (cell for cell in cells if cell.source.startswith("for remedy in found.remedies"))
    with contextlib.redirect_stdout(printed):
        exec(advice.source, {"found": kept_report("tour-diagnose").diagnosis})
    texts = [(cell, text) for start, text in said.items() for cell in cells if cell.source.startswith(start)]
    return [*texts, (advice, printed.getvalue())]


def redraw_tour() -> None:
    """Put today's words into the outputs of the notebook."""
    tour = nbformat.read(TOUR, as_version=4)
    for cell, text in tour_texts(tour.cells):
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    nbformat.write(tour, TOUR)


def words_of(page: str) -> str:
    """The words on a page, without what is shown under the pointer."""
    body = re.sub(r"<(style|script)>.*?</\1>|<svg.*?</svg>", " ", page, flags=re.DOTALL)
    return one_line(html.unescape(re.sub("<[^>]*>", " ", body)))


def one_line(text: str) -> str:
    """Text without its line breaks, and without what begins the further lines of a comment."""
    return re.sub(r"[\s#]+", " ", text).strip()


def chart_titles() -> str:
    """The words of TensorBoard's page that are ours."""
    return one_line("; ".join(f"{name}: {', '.join(charts)}" for name, charts in custom_scalar_layout("core").items()))


# --- drawing ----------------------------------------------------------------------------------------------------------


def save_terminal(name: str, printed: str) -> None:
    """Lines as they look in a terminal of ``COLUMNS`` columns, as ``terminal-<name>.svg``."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(printed.rstrip("\n") + "\n"))  # without an empty line the last one is cut
    console.save_svg(str(IMAGES / f"terminal-{name}.svg"), title=f"lightning-feed {name}")


class Screenshots:
    """Takes pictures of pages."""

    def __init__(self, browser: str) -> None:
        quiet = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")
        self._command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--no-first-run", *quiet]

    def take(self, address: str, name: str, words: str, *, size: tuple[int, int] = (1000, 1300)) -> None:
        """Save the upper part of a page as ``<name>.png``, with the words of the page in it."""
        path = IMAGES / f"{name}.png"
        with tempfile.TemporaryDirectory() as profile:
            options = [
                f"--window-size={size[0]},{size[1]}",
                f"--user-data-dir={profile}",
                "--virtual-time-budget=30000",  # charts are drawn by scripts
                f"--screenshot={path}",
            ]
            subprocess.run([*self._command, *options, address], check=True, capture_output=True, timeout=WAIT_S)
        text = PngInfo()
        text.add_itxt("words", words)
        with Image.open(path) as picture:
            picture.save(path, pnginfo=text, optimize=True)


if __name__ == "__main__":
    main()
