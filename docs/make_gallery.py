"""The pictures of docs/gallery.md, and the outputs of examples/tour.ipynb: all of real runs.

    python docs/make_gallery.py

Runs the demo, a diagnosis and the notebook in an empty folder, then takes pictures of pages with a headless Chromium
and of the terminal's lines as SVG. Needs the extra ``dev`` and Chromium (``apt-get install chromium``), and takes about
four minutes. The pictures show what this machine measures: run it on one that does nothing else.
"""

import base64
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 130
WAIT_S = 60


def main() -> None:
    """Run the demo in an empty folder, and take all pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("No Chromium is installed: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        run_tour(place)
        save_terminal("demo", command(place, "demo"))
        runs = {name: f"feed_demo/logs/{name}/version_0" for name in ("plain", "fed", "advised")}
        save_terminal("compare", command(place, "compare", runs["plain"], runs["advised"]))
        script, data = place / "quickstart.py", "feed_demo/pictures-512"
        shutil.copy(ROOT / "examples" / "quickstart.py", script)
        save_terminal("diagnose", command(place, "diagnose", "--quick", script.name, "--", "--data", data))
        shot = Screenshots(browser)
        shot.take(place.joinpath(runs["plain"], "feed_report.html").as_uri(), "report", (1000, 960))
        shot.take(place.joinpath(runs["advised"], "feed_report.html").as_uri(), "report-dark", (1000, 960), dark=True)
        with tensorboard(place) as address:
            shot.take(f"{address}#custom_scalars", "tensorboard", (1400, 780))


def run_tour(place: Path) -> None:
    """Execute the notebook, keep it with its outputs, and its plots as ``tour-*.png``."""
    path = ROOT / "examples" / "tour.ipynb"
    tour = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(place)}}
    NotebookClient(tour, timeout=300, kernel_name="python3", resources=where, record_timing=False).execute()
    tour.metadata.pop("language_info", None)  # tells which Python ran it
    nbformat.write(tour, path)
    outputs = (one for cell in tour.cells for one in cell.get("outputs", ()))
    plots = (one.data["image/png"] for one in outputs if "image/png" in one.get("data", {}))
    for name, plot in zip(("before", "diagnosis", "after"), plots, strict=True):
        if name != "before":  # which "after" shows again
            (IMAGES / f"tour-{name}.png").write_bytes(base64.b64decode(plot))


def command(place: Path, *arguments: str) -> str:
    """What a command of ours prints, with the line that starts it. Its paths are relative to ``place``."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(COLUMNS)}
    run = [sys.executable, "-m", "lightning_feed", *arguments]
    done = subprocess.run(run, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return f"$ lightning-feed {' '.join(arguments)}\n{done.stdout.replace(f'{place}/', '')}"


def save_terminal(name: str, printed: str) -> None:
    """Lines as they look in a terminal of ``COLUMNS`` columns, as ``terminal-<name>.svg``."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(printed.rstrip("\n") + "\n"))  # without an empty line the last one is cut
    console.save_svg(str(IMAGES / f"terminal-{name}.svg"), title=f"lightning-feed {name}")


class Screenshots:
    """Takes pictures of pages."""

    def __init__(self, browser: str) -> None:
        self._command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]

    def take(self, address: str, name: str, size: tuple[int, int], *, dark: bool = False) -> None:
        """Save the upper part of a page as ``<name>.png``."""
        options = [
            f"--window-size={size[0]},{size[1]}",
            "--virtual-time-budget=30000",  # charts are drawn by scripts
            f"--screenshot={IMAGES / name}.png",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        ]
        subprocess.run([*self._command, *options, address], check=True, capture_output=True, timeout=WAIT_S)


@contextmanager
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


if __name__ == "__main__":
    main()
