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
import code_tables
import report_tables

project = "lightning_feed"
author = "the lightning_feed developers"
copyright = author
version = release = lightning_feed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

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
    "index": ["start", "how-to/diagnose", "choose", "recipes", "reference/api", "explanation"],
    "start": ["how-to/loggers", "how-to/ddp"],
    "choose": ["how-to/tune", "how-to/images", "how-to/storage", "how-to/batches_in_place"],
    "reference/api": ["reference/datamodule", "reference/callbacks", "reference/command-line", "reference/report"],
    "explanation": ["benchmarks"],
}
"""Page -> the pages below it in the sidebar. Not in the pages themselves: on GitHub they would show the directive."""

SEARCHED = {
    "start": {"slow": "# Start:", "GPU utilization": "# Start:"},
    "how-to/tune": {"num_workers": "# Tune:"},
    "how-to/diagnose": {"too many open files": "## Check the machine"},
}
"""Page -> what is searched for -> the heading that the search is to find first."""

MADE = {
    "<!-- tables of the report -->": report_tables.tables,
    "<!-- table of the tags -->": code_tables.tags,
    "<!-- options of the commands -->": code_tables.commands,
}
"""Comment in a page -> what takes its place."""

REPORT = "![The report of a run: the verdict, the parts of a step as a bar, the next step, and what to change]"


def complete_page(_: Sphinx, page: str, source: list[str]) -> None:
    """Add what only the site has: tables of the code, entries for the search, the sidebar, and a dark picture."""
    for comment, make in MADE.items():
        if comment in source[0]:
            source[0] = source[0].replace(comment, make())
    for words, heading in SEARCHED.get(page, {}).items():
        before, found, after = source[0].partition(heading)
        line, _, rest = after.partition("\n")
        source[0] = f"{before}{found}{line}\n\n```{{index}} ! {words}\n```\n{rest}"
    if page == "index":
        light, dark = (
            f"{REPORT}(images/{name}.png){{.only-{kind}}}"
            for name, kind in (("report", "light"), ("report-dark", "dark"))
        )
        source[0] = "---\nhide-toc: true\n---\n" + source[0].replace(f"{REPORT}(images/report.png)", light + dark)
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
