"""Pictures and the notebook show what the code prints today, of the runs whose reports are kept beside them."""

import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from PIL import Image

from lightning_feed.report.files import mark_colour

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
AGAIN = "Run `python docs/make_gallery.py --redraw`."


@pytest.fixture(scope="module")
def gallery() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "docs" / "make_gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Jupyter about its own parts
        spec.loader.exec_module(module)
    return module


def _lines(picture: Path) -> str:
    """The text of a terminal's picture, line by line."""
    lines: dict[int, str] = {}
    for one in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"):
        line = re.search(r"line-(\d+)\)$", one.get("clip-path", ""))
        if line is not None:
            lines[int(line[1])] = lines.get(int(line[1]), "") + (one.text or "")
    return "\n".join(lines.get(at, "").replace("\xa0", " ").rstrip() for at in range(max(lines) + 1)).strip()


@pytest.mark.parametrize("name", ["demo", "compare", "diagnose"])
def test_terminal_pictures_show_the_current_output(name: str, gallery: ModuleType) -> None:
    printed = gallery.one_line(gallery.terminals()[name])
    assert gallery.one_line(_lines(IMAGES / f"terminal-{name}.svg")) == printed, AGAIN


@pytest.mark.parametrize("name", ["report", "demo"])
def test_screenshots_of_pages_show_their_current_text(name: str, gallery: ModuleType) -> None:
    with Image.open(IMAGES / f"{name}.png") as picture:
        assert picture.info["words"] == gallery.words_of(gallery.pages()[name]), AGAIN


def test_the_tensorboard_picture_shows_the_current_charts(gallery: ModuleType) -> None:
    with Image.open(IMAGES / "tensorboard.png") as picture:
        assert picture.info["words"] == gallery.chart_titles(), AGAIN


def test_the_tour_notebook_shows_the_current_words_and_plots(gallery: ModuleType) -> None:
    cells = gallery.nbformat.read(gallery.TOUR, as_version=4).cells
    texts = gallery.tour_texts(cells)
    assert len(texts) == 3
    for cell, text in texts:
        assert gallery.one_line("".join(one.text for one in cell.outputs)) == gallery.one_line(text), AGAIN
    for name, plot in gallery.tour_plots(cells).items():
        assert (IMAGES / f"tour-{name}.png").read_bytes() == plot, AGAIN


@pytest.mark.parametrize("name", ["advised", "tour-fixed"])
def test_kept_reports_of_fixed_runs_have_grade_ok(name: str, gallery: ModuleType) -> None:
    found = gallery.kept_report(name).diagnosis
    assert found.grade == "OK"
    assert mark_colour(found) == "good"


def test_kept_reports_contain_no_path_of_the_machine(gallery: ModuleType) -> None:
    for file in gallery.KEPT.iterdir():
        assert not re.search(r'"/(?!proc|dev)[a-z]', file.read_text()), file.name
