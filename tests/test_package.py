"""What a package says of itself."""

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


def test_a_package_built_by_hand_has_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    core = ProjectMetadata(str(ROOT), PluginManager()).core
    assert core.urls == {}
    assert core.readme == (ROOT / "README.md").read_text()
