"""The documentation site. Build it with: sphinx-build -W --keep-going -b dirhtml docs build/site

Sphinx, since the docstrings use its roles and it checks their targets, and since Material for MkDocs, the obvious
alternative, says in every build that it ends in May 2027.
"""

import lightning_feed

project = "lightning_feed"
author = "the lightning_feed developers"
version = release = lightning_feed.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["README.md"]  # the index for readers on GitHub; index.md includes it

html_theme = "furo"
html_title = "lightning_feed"
html_static_path: list[str] = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
