"""Configures Sphinx for `make docs`, which builds the site from the repository's pages.

Like optax and flax, the site uses furo and myst-nb: pages stay Markdown, notebooks are executed,
and docstrings become the API pages.
"""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import zenflow_jax

ROOT = Path(__file__).parents[1]
_log = logging.getLogger(__name__)

project = "zenflow_jax"
author = "The zenflow_jax authors"
version = release = zenflow_jax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["files.md", "style.md"]  # only for readers of the repository
root_doc = "index"

html_theme = "furo"
html_title = f"zenflow_jax {release}"
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
templates_path = []

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
suppress_warnings = [
    "myst.header",  # the log's pages begin below the first level
    "misc.highlighting_failure",  # fragments with "..." in them
]

nb_execution_mode = "force"
# This notebook needs downloaded weights and data, so the site shows its saved outputs.
nb_execution_excludepatterns = ["notebooks/minilm_sst2*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # for a busy machine
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_typehints = "none"  # docstrings already contain them
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"

#: Pages whose text is elsewhere in the repository.
_FROM = {
    "index": ROOT / "README.md",
    "results/log": ROOT / "benchmarks" / "LOG.md",
}
#: Pages whose Python blocks run in order as one program; the site shows the output.
_EXECUTED = {"index", "checkpoints", "deepspeed"}
_NOTEBOOK = """---
file_format: mystnb
kernelspec: {name: python3}
---
"""
#: The site's targets for links in the repository.
_LINKS = {
    r"\]\((?:\.\./)?docs/": "](",
    r"\]\((?:\.\./)?benchmarks/LOG\.md": "](/results/log.md",
    r"\]\(\.\./README\.md": "](/index.md",
    r"\[([^\]]*)\]\((?:\.\./|docs/)?files\.md[^)]*\)": r"`docs/files.md`",
    # Files in the repository that are not pages.
    r"\[([^\]]*)\]\(\.\./((?:train|zenflow_jax|examples)/[\w./]+)\)": r"\1 (`\2`)",
}


def _source(app: Sphinx, name: str, text: list[str]) -> None:
    """Replaces a page's text with the site's version."""
    if name in _FROM:
        source = _FROM[name]
        own, text[0] = text[0], source.read_text(encoding="utf-8")
        if name != "index":
            up = "../" * (1 + name.count("/"))
            folder = source.parent.relative_to(ROOT).as_posix()
            text[0] = re.sub(r"\]\(([\w]+\.png)\)", rf"]({up}{folder}/\1)", text[0])
        text[0] = f"{text[0]}\n{own}"
    for pattern, target in _LINKS.items():
        text[0] = re.sub(pattern, target, text[0])
    if name in _EXECUTED:
        text[0] = _NOTEBOOK + text[0].replace("\n```python\n", "\n```{code-cell} python3\n")


def _markdown_code(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Converts code in docstrings from Markdown's single backticks to double backticks."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", "\n".join(lines))
    lines[:] = text.split("\n")


def _all_is_documented(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns about public names that no page documents; a warning fails the build."""
    objects: dict[str, Any] = env.domaindata["py"]["objects"]
    for name in zenflow_jax.__all__:
        if f"zenflow_jax.{name}" not in objects:
            _log.warning("docs/api.md lacks the public name zenflow_jax.%s", name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _source)
    app.connect("autodoc-process-docstring", _markdown_code)
    app.connect("env-check-consistency", _all_is_documented)
