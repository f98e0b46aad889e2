"""The site: Sphinx over docs/*.md, the notebooks and the docstrings; `docs/build` makes it.

The source directory is the repository, so that links between pages are those that a reader of the repository follows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from site_pages import generated, readable_docstring, report_colours  # noqa: E402

import fpsim  # noqa: E402

project = "fpsim and ada_loss"
author = "the maintainers of fpsim and ada_loss"
copyright = "the maintainers of fpsim and ada_loss, Apache-2.0"
version = release = fpsim.__version__

root_doc = "docs/index"
include_patterns = [
    "docs/*.md", "notebooks/*.ipynb", "benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
    "CODE_OF_CONDUCT.md",
]  # fmt: skip
exclude_patterns = [".venv", "build", "runs"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

nb_execution_mode = "off"  # notebooks are stored with their outputs; a test executes them again
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]  # of shell sessions and YAML with words left out

default_role = "literal"
autodoc_typehints = "none"  # the signature has them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "fpsim and ada_loss"
html_show_sourcelink = False
html_copy_source = False
html_css_files = ["site.css"]
html_static_path = ["site.css"]
html_theme_options = {f"{mode}_css_variables": colours for mode, colours in report_colours().items()}
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1)"]


def _fill(app: Any, docname: str, source: list[str]) -> None:
    source[0] = generated(docname, source[0])


def _docstring(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    # of a property napoleon takes the words before a colon in the first line for its type: an empty comment has none
    lines[:] = ["..", ""] * (what in ("attribute", "property")) + readable_docstring(lines)


def setup(app: Any) -> None:
    """Fill generated parts into pages, and read docstrings as they are written here."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
