"""Tells the package where it lives as it is built: in the GitHub repository whose workflow builds it."""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Addresses(MetadataHookInterface):
    """What pyproject.toml cannot say, since a fork lives elsewhere. A package built by hand has no addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Hatch calls this with the table ``[project]``."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        server, repository = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
        if server and repository:
            home = f"{server}/{repository}"
            metadata["urls"] = {
                "Source": home,
                "Documentation": f"{home}/blob/main/docs/README.md",
                "Changelog": f"{home}/blob/main/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
            # A package's page has no files beside it that a link or a picture could name.
            readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/raw/main/", readme)
            readme = re.sub(r"(\]\()(?!https?:|#)", rf"\1{home}/blob/main/", readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}
