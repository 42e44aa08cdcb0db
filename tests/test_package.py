"""What a package says of itself."""

from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import lightning_feed

ROOT = Path(__file__).parents[1]


def test_the_version_is_defined_in_one_place() -> None:
    metadata = ProjectMetadata(str(ROOT), PluginManager())
    assert metadata.version == lightning_feed.__version__
    assert "version =" not in (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]


def test_the_package_readme_has_no_relative_links() -> None:
    readme = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    assert "](docs/" not in readme
    assert "](lightning_feed/" not in readme
    assert "exact" in readme
    assert "![" not in readme.replace("![](https:", "").replace("![CI](https:", "")
