"""The documentation site. Build it with: sphinx-build -W --keep-going -b dirhtml docs build/site

Sphinx, since the docstrings use its roles and it checks their targets, and since Material for MkDocs, the obvious
alternative, says in every build that it ends in May 2027.
"""

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from sphinx.application import Sphinx

import lightning_feed

sys.path.insert(0, str(Path(__file__).parent))
import report_tables

project = "lightning_feed"
author = "the lightning_feed developers"
version = release = lightning_feed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["README.md"]  # the index for readers on GitHub

html_theme = "furo"
html_title = "lightning_feed"
html_logo = "images/logo.svg"
html_favicon = "images/logo.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["attrs_inline", "colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

CHILDREN = {
    "start": ["gallery", "how-to/loggers", "how-to/plain-pytorch", "how-to/ddp"],
    "choose": [
        *("how-to/tune", "how-to/threads", "how-to/images", "how-to/storage", "how-to/copy-less"),
        *("how-to/batches_in_place", "how-to/exact-resume", "recipes"),
    ],
    "reference/api": [
        *("reference/datamodule", "reference/callbacks", "reference/command-line", "reference/report"),
    ],
    "explanation": ["benchmarks", "compare"],
}
"""Page -> the pages below it in the sidebar. Not in the pages themselves: on GitHub they would show the directive."""

SEARCHED = {
    "start": {"slow": "# Start here", "GPU utilization": "# Start here"},
    "how-to/tune": {"num_workers": "# Find the number of workers"},
    "how-to/diagnose": {"too many open files": "## Check the machine"},
}
"""Page -> what is searched for -> the heading that the search is to find first."""


def complete_page(_: Sphinx, page: str, source: list[str]) -> None:
    """Add what only the site has: the tables of the report, entries for the search, and the sidebar."""
    source[0] = source[0].replace("<!-- tables of the report -->", report_tables.tables())
    for words, heading in SEARCHED.get(page, {}).items():
        before, found, after = source[0].partition(heading)
        line, _, rest = after.partition("\n")
        source[0] = f"{before}{found}{line}\n\n```{{index}} ! {words}\n```\n{rest}"
    if page in CHILDREN:
        pages = "\n".join(f"/{child}" for child in CHILDREN[page])
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def skip_hooks(*event: Any) -> bool | None:
    """Leave out of the API page what the Trainer calls, and not the user: the hooks of Lightning."""
    name = event[2]
    return True if hasattr(Callback, name) or hasattr(LightningDataModule, name) else None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", complete_page)
    app.connect("autodoc-skip-member", skip_hooks)
