"""The pages tell the truth: their Python runs, their commands parse, their tables agree with the code."""

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_feed
from lightning_feed import LoaderSettings, cli, errors
from lightning_feed.measure.loop import FIRST_STEPS
from lightning_feed.measure.stats import MIN_STEPS, SOME_STEPS, choose_tags, tag_table
from lightning_feed.measure.windows import WARM_UP_STEPS
from lightning_feed.report.document import read_document
from lightning_feed.report.files import as_text
from lightning_feed.report.next_step import ENOUGH_STEPS
from lightning_feed.verdict.decide import decide

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [
    # The pages show short runs on the CPU, on tiny data; Lightning has something to say about each of these.
    pytest.mark.filterwarnings("ignore:The number of training batches:UserWarning"),
    # The page on resuming goes on in the folder of the run that it resumes.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    # Of Ray 2.60, when it starts its processes and when it is shut down.
    pytest.mark.filterwarnings("ignore:unclosed file.*/ray/:ResourceWarning"),
    # A data module has four loaders, whichever splits there are, and the readers' model does not validate.
]

# What the pages call the reader's own: a dataset of uint8 pictures, a folder of such in class folders, and a model.
PRELUDE = """
import pathlib as _pathlib

import PIL.Image as _image
import torch as _torch
from {package} import LightningModule as _LightningModule

photos = _pathlib.Path("photos")
for _name in ("crow", "wren"):
    (photos / _name).mkdir(parents=True)
    for _index in range(12):
        _image.new("RGB", (48, 40), (20 * _index, 90, 30)).save(photos / _name / f"{{_index}}.jpg")


class BirdsDataset(_torch.utils.data.Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return _torch.full((3, 32, 32), index, dtype=_torch.uint8), index % 2


class _Model(_LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = _torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return _torch.nn.functional.cross_entropy(self.layer(batch[0].float().mean((2, 3))), batch[1])

    def configure_optimizers(self):
        return _torch.optim.SGD(self.parameters(), lr=0.1)


model = _Model()
"""


def _blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in CODE.findall(page.read_text()) if kind == language]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- code ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()  # its processes, which pages start
    for name in set(sys.modules) - before:
        if name.startswith("page_"):
            del sys.modules[name]


PYTHON_PAGES = [
    pytest.param(page, marks=[pytest.mark.slow] if 'workers="ray"' in page.read_text() else [], id=_name(page))
    for page in PAGES
    if _blocks(page, "python")
]


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_python_code_on_the_pages_runs(page: Path, reader_folder: Path) -> None:
    blocks = _blocks(page, "python")
    for name in ("timm", "transformers"):  # of the extra `zoo`
        if any(f"import {name}" in block or f"from {name} " in block for block in blocks):
            pytest.importorskip(name)
    package = "pytorch_lightning" if any("pytorch_lightning" in block for block in blocks) else "lightning.pytorch"
    module_name = f"page_{page.stem.replace('-', '_')}"
    file = reader_folder / f"{module_name}.py"
    file.write_text(PRELUDE.format(package=package) + "\n\n".join(blocks))
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # workers find the page's classes by this name
    spec.loader.exec_module(module)


def test_commands_on_the_pages_are_accepted_by_the_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_run", lambda arguments: 0)
    names = "demo|doctor|diagnose|report|compare|tune|pack|stage"
    for page in PAGES:
        for command in re.findall(rf"lightning-feed ((?:{names})\b[^`\n&|]*)", page.read_text()):
            assert cli.main(shlex.split(command, comments=True)) == 0, page


def test_yaml_on_the_pages_names_existing_callbacks_and_arguments() -> None:
    yaml = importlib.import_module("yaml")
    blocks = [block for page in PAGES for block in _blocks(page, "yaml")]
    assert blocks
    for block in blocks:
        for callback in yaml.safe_load(block)["trainer"]["callbacks"]:
            hydra = "_target_" in callback  # whose arguments stand beside the class, LightningCLI's in init_args
            module, name = callback.pop("_target_" if hydra else "class_path").rsplit(".", 1)
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            assert set(callback if hydra else callback["init_args"]) <= set(parameters)


def test_links_on_the_pages_lead_to_existing_files() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == [], page


def test_pages_that_the_package_names_exist() -> None:
    named = {
        page
        for file in (ROOT / "lightning_feed").rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text())
        if "docs/examples" not in page
    }
    assert named
    assert {page for page in named if not (ROOT / page).exists()} == set()


def test_every_page_is_linked_from_the_home() -> None:
    home = ROOT / "docs/index.md"
    linked = {(home.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+\.md)\)", home.read_text())}
    assert {page for page in PAGES if page.parent != ROOT and page != home} == linked


def test_code_lines_on_the_pages_have_at_most_80_characters() -> None:
    for page in PAGES:
        if page.parent != ROOT:
            assert [
                line for _, body in CODE.findall(page.read_text()) for line in body.splitlines() if len(line) > 80
            ] == []


def test_the_readme_has_at_most_100_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_report_in_the_readme_matches_the_run_in_the_picture() -> None:
    report = read_document(ROOT / "docs/images/runs/plain.json")
    today = decide(report.diagnosis.measurements)
    printed = as_text(today, report.run, width=80).splitlines()
    (shown,) = _blocks(ROOT / "README.md", "text")
    assert [line for line in shown.splitlines() if line != "..." and line not in printed] == []


def test_step_counts_on_the_start_page_match_the_code() -> None:
    text = " ".join((ROOT / "docs/start.md").read_text().split())
    low = WARM_UP_STEPS + SOME_STEPS
    for words in (f"after {FIRST_STEPS} steps or a minute", f"about {low}", f"fewer than {ENOUGH_STEPS}"):
        assert words in text
    assert f"{MIN_STEPS} measured" in text


# --- the site -----------------------------------------------------------------------------------------------------


def _of_the_site(test: Any) -> Any:
    """Mark a test that needs the site, so that one worker builds it for all of them."""
    return pytest.mark.slow(pytest.mark.xdist_group("site")(test))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, as the gate has just built it, or built now."""
    if "LIGHTNING_FEED_SITE" in os.environ:
        return Path(os.environ["LIGHTNING_FEED_SITE"])
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "dirhtml", str(ROOT / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@_of_the_site
def test_the_sidebar_is_short_and_collapsed(site: Path) -> None:
    page = (site / "index.html").read_text()
    sidebar = page[page.index('class="sidebar-tree"') :].partition("</aside>")[0]
    assert re.findall(r"toctree-l1", sidebar)
    assert len(re.findall(r"toctree-l\d", sidebar)) <= 25
    assert 'class="toctree-checkbox"' in sidebar
    assert "checked" not in re.sub("toctree-checkbox", "", sidebar)


REFERENCE = ("api", "datamodule", "callbacks", "command-line", "report")


@pytest.fixture(scope="module")
def documented(site: Path) -> set[str]:
    """The names that the reference pages describe, as in ``FastDataModule.make_dataset``."""
    pages = "".join((site / "reference" / page / "index.html").read_text() for page in REFERENCE)
    names = re.findall(r'<dt class="sig[^>]*id="lightning_feed\.([^"]+)"', pages)
    return {name.removeprefix("errors.") for name in names}


@_of_the_site
def test_the_reference_describes_public_names_without_hooks_of_lightning(documented: set[str]) -> None:
    assert set(lightning_feed.__all__) <= documented
    assert {"FastDataModule.make_dataset", "FastDataModule.wrap", "GPUStarvationCallback.report"} <= documented
    assert not [name for name in documented if re.search(r"\.(on_|setup|teardown|transfer_batch)", name)]


@_of_the_site
def test_the_reference_describes_every_setting_and_every_error(documented: set[str]) -> None:
    assert {f"LoaderSettings.{field.name}" for field in dataclasses.fields(LoaderSettings)} <= documented
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert {one.__name__ for one in classes if issubclass(one, errors.FeedError)} <= documented


@_of_the_site
def test_the_command_line_page_describes_every_option(site: Path) -> None:
    page = (site / "reference/command-line/index.html").read_text()
    (commands,) = (one for one in cli.make_parser()._actions if isinstance(one, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        section = page[page.index(f'<section id="{name}">') :].partition("</section>")[0]
        options = re.findall(r'<span class="pre">(-[-\w]+)</span>', section)
        named = {one.option_strings[-1] for one in parser._actions if one.option_strings}
        assert named - {"--help"} <= set(options), name


@_of_the_site
def test_the_page_on_loggers_describes_every_tag(site: Path) -> None:
    page = (site / "how-to/loggers/index.html").read_text().replace("<wbr>", "")
    rows = re.findall(
        r'<tr[^>]*><td><p><code[^>]*><span class="pre">(feed\w*/\w+)</span></code></p></td>\s*<td><p>(?=\w)', page
    )
    assert rows == list(tag_table())


@_of_the_site
def test_no_page_shows_a_comment_for_the_build(site: Path) -> None:
    for page in PAGES[1:]:
        for comment in re.findall(r"<!-- .+? -->", page.read_text()):
            path = page.relative_to(ROOT / "docs").with_suffix("")
            built = site / "index.html" if path.name == "index" else site / path / "index.html"
            assert comment not in built.read_text()


@_of_the_site
@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("slow", "start"),
        ("GPU utilization", "start"),
        ("num_workers", "how-to/tune"),
        ("too many open files", "how-to/diagnose"),
    ],
)
def test_the_site_search_finds_the_right_page_first(site: Path, words: str, page: str) -> None:
    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    # A main entry scores 100 if it equals what is searched for, a title 16 at most, a name 26, a term in the text 5.
    ((number, _, main),) = index["indexentries"][words.lower()]
    assert (index["docnames"][number], main) == (page, True)


# --- the report ---------------------------------------------------------------------------------------------------


def test_every_key_of_the_report_has_a_row_with_its_meaning() -> None:
    spec = importlib.util.spec_from_file_location("report_tables", ROOT / "docs/report_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.*) \|$", module.tables(), re.MULTILINE)
    assert {"starved_pct", "most_gain_pct", "others_cpu_pct"} <= {name for name, _, _ in rows}
    assert [name for name, value, meaning in rows if not value or not meaning] == []


# --- tags ---------------------------------------------------------------------------------------------------------


def test_the_page_on_loggers_names_exactly_the_core_tags() -> None:
    text = (ROOT / "docs/how-to/loggers.md").read_text()
    section = text[text.index("## All tags") :].partition("`GPUStarvationCallback(tags=")[0]
    core = choose_tags(dict.fromkeys(tag_table(), 1.0), "core")
    assert set(re.findall(r"`(feed\w*/\w+)`", section)) == set(core)
