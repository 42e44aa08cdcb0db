"""The rules of the house: the map is true, the road has one direction, and importing the package is cheap."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_feed
from lightning_feed.errors import FeedError, MissingExtraError
from lightning_feed.extras import require

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_feed"
ROAD = ("machine", "storage", "load", "images", "transfer", "measure", "trials", "verdict", "report")
DOORS = ("_host", "in_fit", "callbacks", "data", "diagnosing")
"""Folders that may import Lightning, each only those before it, and all of the road."""
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
FILES = sorted(PACKAGE.rglob("*.py"))
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".json", ".txt", ""}


def _relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


# --- the map ------------------------------------------------------------------------------------------------------


def _mapped() -> dict[str, str]:
    """Path in the package -> the half line that the map gives it."""
    tree = (PACKAGE / "README.md").read_text().split("```text\n")[1].split("```")[0]
    mapped: dict[str, str] = {}
    folders: list[str] = []
    for line in tree.splitlines()[1:]:
        drawn = re.fullmatch(r"((?:│   )*)[├└]── (\S+)\s+(\S.*)", line)
        assert drawn, f"not a line of the map: {line!r}"
        bars, name, words = drawn.groups()
        del folders[len(bars) // 4 :]
        path = "".join(folders) + name
        if name.endswith("/"):
            folders.append(name)
        assert path not in mapped, f"{path} stands twice in the map"
        mapped[path] = words
    return mapped


def _on_disk() -> set[str]:
    files = {_relative(p) for p in PACKAGE.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    folders = {f"{name.rpartition('/')[0]}/" for name in files if "/" in name}
    # A station's __init__.py is the folder's own line.
    return {name for name in files if not name.endswith("/__init__.py")} | folders


def test_the_module_map_lists_exactly_the_files_on_disk() -> None:
    assert set(_mapped()) == _on_disk()


# --- the import rule ----------------------------------------------------------------------------------------------


def _imports(source: str) -> set[str]:
    """Every module imported anywhere in a file, in functions and under TYPE_CHECKING too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute in this package"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _breaks_rule(relative: str, imported: str) -> bool:
    """Whether a file (path in the package) may not import this dotted name."""
    top, *rest = imported.split(".")
    place = relative.split("/")[0] if "/" in relative else ""
    if top in LIGHTNING:
        return place in ROAD or relative in {"__init__.py", "wording.py", "errors.py", "extras.py"}
    if top != "lightning_feed" or not place:
        return False
    order = ("wording", "errors", "extras", "autoload", *ROAD, *DOORS)
    if place == "_host":
        return rest[:1] not in (["_host"], ["errors"])
    return not rest or rest[0] not in order[: order.index(place) + 1]


def test_imports_follow_the_order_of_the_folders() -> None:
    broken = {
        f"{_relative(path)}: {name}"
        for path in FILES
        for name in _imports(path.read_text())
        if _breaks_rule(_relative(path), name)
    }
    assert broken == set()


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def test_modules_have_no_circular_imports() -> None:
    names = {_module(path): path for path in FILES}
    left = {}
    for name, path in names.items():
        imported = {found.removeprefix("lightning_feed.") for found in _imports(path.read_text())}
        needs = {found if found in names else found.rpartition(".")[0] for found in imported}  # a module, or its name
        left[name] = needs & names.keys() - {name}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert left == {}


def test_the_import_rule_detects_violations() -> None:
    for file, line, broken in (
        ("machine/limits.py", "from lightning_feed.transfer.batch_tree import hold", True),
        ("machine/limits.py", "import lightning.pytorch", True),
        ("machine/limits.py", "from lightning_feed import datamodule", True),
        ("_host/hooks.py", "import lightning.pytorch", False),
        ("_host/hooks.py", "from lightning_feed.transfer.batch_tree import hold", True),
        ("measure/waits.py", "from lightning_feed.load.settings import LoaderSettings", False),
        ("measure/waits.py", "from lightning_feed.errors import FeedError", False),
        ("diagnosing/run.py", "from lightning.pytorch import Trainer", False),
        ("diagnosing/run.py", "from lightning_feed.data.images import ImageFolderDataModule", False),
        ("data/images.py", "from lightning_feed.diagnosing.run import diagnose", True),
        ("errors.py", "def f():\n    import pytorch_lightning", True),
        ("data/datamodule.py", "from lightning.pytorch import LightningDataModule", False),
    ):
        assert any(_breaks_rule(file, name) for name in _imports(line)) is broken, (file, line)


@pytest.mark.parametrize(
    "command",
    [
        "import lightning_feed; dir(lightning_feed); lightning_feed.__version__",
        "import lightning_feed.autoload; assert lightning_feed.autoload.callbacks() == []",
        "import runpy, sys; sys.argv = ['lightning_feed', '--help']\n"
        "try: runpy.run_module('lightning_feed', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code",
        "import lightning_feed; lightning_feed.FeedError",
    ],
    ids=["import", "autoload", "help", "error"],
)
def test_heavy_packages_are_not_imported_before_they_are_needed(command: str) -> None:
    heavy = "{'torch', 'lightning', 'pytorch_lightning', 'torchvision', 'numpy', 'PIL', 'skimage'}"
    code = (
        f"import os; os.environ.pop('LIGHTNING_FEED', None)\n{command}\nimport sys; print({heavy} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


def test_image_worker_modules_do_not_import_torchvision_or_lightning() -> None:
    """It brings torch's compiler along: 2 s of CPU time for each worker."""
    code = (
        "import lightning_feed.images.image_dataset, lightning_feed.load.loader, lightning_feed.load.worker\n"
        "import sys; print({'torchvision', 'torch._dynamo', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


# --- the words ----------------------------------------------------------------------------------------------------

QUESTIONS = {"What", "Which", "How", "Whether", "Where", "Who", "When", "Why", "That"}


def _docstrings(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands by itself: docstrings, of attributes too."""
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
        yield from _docstrings(getattr(node, "body", []))


def test_docstrings_open_with_a_noun_phrase_or_a_verb() -> None:
    opened = {
        f"{_relative(path)}:{line}": text.partition("\n")[0]
        for path in FILES
        for line, text in _docstrings(ast.parse(path.read_text()).body)
        if text.split()[0].strip("`,.:") in QUESTIONS
    }
    assert opened == {}


# --- public names -------------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_resolve() -> None:
    assert lightning_feed.__all__ == sorted(lightning_feed.__all__)
    for name in lightning_feed.__all__:
        assert getattr(lightning_feed, name).__name__ == name
        assert name in dir(lightning_feed)
    with pytest.raises(AttributeError, match="no attribute 'FastLoader'"):
        lightning_feed.FastLoader  # noqa: B018


def test_lazy_names_match_those_that_type_checkers_see() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == lightning_feed._HOMES
    assert sorted(seen) == lightning_feed.__all__


def test_every_public_name_is_in_the_reference() -> None:
    headings = [
        line
        for page in (ROOT / "docs/reference").glob("*.md")
        for line in page.read_text().splitlines()
        if "# " in line
    ]
    found = {word for line in headings for word in re.findall(r"`(\w+)", line)}
    assert set(lightning_feed.__all__) <= found


# --- files --------------------------------------------------------------------------------------------------------


def test_files_contain_no_path_of_a_private_machine() -> None:
    private = re.compile(r"(?<![\w.:/])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/\S+")
    folders = [PACKAGE, *(ROOT / name for name in ("tests", "examples", "docs", "benchmarks", ".ci"))]
    paths = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(p for folder in folders for p in folder.rglob("*"))]
    found = {
        f"{path.relative_to(ROOT)}:{number}": line
        for path in paths
        if path.is_file()
        and path.suffix in TEXT_SUFFIXES
        and path != Path(__file__)
        and "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    }
    assert found == {}


# --- extras -------------------------------------------------------------------------------------------------------


def test_a_missing_extra_names_the_pip_line() -> None:
    with pytest.raises(
        MissingExtraError, match=r"making pictures needs no_such_module\. .*pip install 'lightning-feed\[demo\]'"
    ):
        require("no_such_module.data", extra="demo", why="making pictures")


def test_a_broken_extra_is_not_reported_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import something_it_needs_itself\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="something_it_needs_itself") as caught:
        require("half_installed", extra="demo", why="a test")
    assert not isinstance(caught.value, FeedError)
