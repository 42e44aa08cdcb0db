"""The documentation site. Build it with: sphinx-build -W --keep-going -b dirhtml docs build/site

Sphinx, since the docstrings use its roles and it checks their targets, and since Material for MkDocs, the obvious
alternative, says in every build that it ends in May 2027.
"""

import re
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
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

CHILDREN = {
    "index": {
        "Start": "start",
        "Diagnose": "how-to/diagnose",
        "Fix": "choose",
        "Recipes": "recipes",
        "Reference": "reference/api",
        "How it works": "explanation",
    },
    "start": {"Loggers": "how-to/loggers", "Several GPUs": "how-to/ddp"},
    "choose": {
        "Tune": "how-to/tune",
        "Images": "how-to/images",
        "Storage": "how-to/storage",
        "Batches": "how-to/batches_in_place",
    },
    "reference/api": {
        "Data modules": "reference/datamodule",
        "Callbacks": "reference/callbacks",
        "Command line": "reference/command-line",
        "Reports": "reference/report",
    },
    "explanation": {"Benchmarks": "benchmarks"},
}
"""Page -> the pages below it in the sidebar, by title. In the pages themselves GitHub would show the directive."""

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


def complete_page(_: Sphinx, page: str, source: list[str]) -> None:
    """Add what only the site has: tables of the code, entries for the search, and the sidebar."""
    for comment, make in MADE.items():
        if comment in source[0]:
            source[0] = source[0].replace(comment, make())
    for words, heading in SEARCHED.get(page, {}).items():
        before, found, after = source[0].partition(heading)
        line, _, rest = after.partition("\n")
        source[0] = f"{before}{found}{line}\n\n```{{index}} ! {words}\n```\n{rest}"
    if page == "index":
        source[0] = f"---\nhide-toc: true\n---\n{source[0]}"
    if page in CHILDREN:
        pages = "\n".join(f"{title} </{child}>" for title, child in CHILDREN[page].items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"


def break_code(*event: Any) -> None:
    """Let code in the cells of tables break after its punctuation, for narrow screens."""
    context = event[3]
    if "body" in context:
        context["body"] = re.sub(r'(?<=<span class="pre">)[^<]+', _with_breaks, context["body"])


def _with_breaks(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[\w\])])([_/=.,([]+)(?=\w)", r"\1<wbr>", code[0])


def prepare_docstring(*event: Any) -> None:
    """Link the pages that a docstring names. Of a field, let napoleon read no type before the first colon."""
    event[5][:] = [re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line) for line in event[5]]
    if event[1] in ("attribute", "property", "data"):
        event[5][:0] = ["..", ""]  # an empty comment, as the first line


def skip_hooks(*event: Any) -> bool | None:
    """Leave out of the API page what the Trainer calls, and not the user: the hooks of Lightning."""
    name = event[2]
    return True if hasattr(Callback, name) or hasattr(LightningDataModule, name) else None


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", complete_page)
    app.connect("html-page-context", break_code)
    app.connect("autodoc-process-docstring", prepare_docstring, priority=400)  # before napoleon's
    app.connect("autodoc-skip-member", skip_hooks)
