"""What a package says of itself."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

ROOT = Path(__file__).parents[1]


def test_a_package_that_a_workflow_builds_leads_to_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/feed")
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.urls["Source"] == "https://github.com/someone/feed"
    assert "](docs/" not in core.readme
    assert "](https://github.com/someone/feed/raw/main/docs/images/" in core.readme
    assert "](https://github.com/someone/feed/blob/main/docs/start.md)" in core.readme


@pytest.mark.parametrize("package", ["lightning_feed", "lightning_feed.pl"])
@pytest.mark.parametrize("name", ["DaliDataModule"])
def test_a_name_that_is_gone_says_what_to_do(package: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name} is gone from lightning_feed. Return DALI's own iterator"):
        getattr(importlib.import_module(package), name)


def test_a_package_built_by_hand_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.urls == {}
    assert core.readme == (ROOT / "README.md").read_text()


def test_earlier_names_of_documented_modules_lead_to_those_of_today() -> None:
    code = (
        "from lightning_feed.watch.reports.document import read_document\n"
        "from lightning_feed.watch.reports.files import write_report\n"
        "print(read_document.__module__, write_report.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["lightning_feed.report.document", "lightning_feed.report.files"]
