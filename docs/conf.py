"""How `make docs` builds the site, from the pages that one reads in the repository as well.

Sphinx with furo and myst-nb, as optax and flax have it: pages stay Markdown, notebooks are
executed, docstrings become the pages of the API.
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
exclude_patterns = ["files.md", "style.md"]  # for those who have the repository
root_doc = "index"

html_theme = "furo"
html_title = f"zenflow_jax {release}"
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
templates_path = []

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
suppress_warnings = [
    "myst.header",  # pages of the log begin below the first level
    "misc.highlighting_failure",  # fragments with "..." in them
]

nb_execution_mode = "force"
# It needs weights and data, which nothing here may download: the site has what it was saved with.
nb_execution_excludepatterns = ["notebooks/minilm_sst2*"]
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # on a machine that does much else
nb_execution_show_tb = True
nb_merge_streams = True

autodoc_typehints = "none"  # the docstrings say them
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
copybutton_exclude = ".linenos, .gp, .go"

#: Pages that stand elsewhere in the repository, and what is to be left out of them.
_FROM = {
    "index": ROOT / "README.md",
    "results/log": ROOT / "benchmarks" / "LOG.md",
}
#: Pages whose Python blocks run one after the other as a program; the site shows what they print.
_EXECUTED = {"index", "checkpoints", "deepspeed"}
_NOTEBOOK = """---
file_format: mystnb
kernelspec: {name: python3}
---
"""
#: What links in the repository lead to on the site.
_LINKS = {
    r"\]\((?:\.\./)?docs/": "](",
    r"\]\((?:\.\./)?benchmarks/LOG\.md": "](/results/log.md",
    r"\]\(\.\./README\.md": "](/index.md",
    r"\[([^\]]*)\]\((?:\.\./|docs/)?files\.md[^)]*\)": r"`docs/files.md`",
    # Files of the repository that are no pages.
    r"\[([^\]]*)\]\(\.\./((?:train|zenflow_jax|examples)/[\w./]+)\)": r"\1 (`\2`)",
}


def _source(app: Sphinx, name: str, text: list[str]) -> None:
    """A page's text as the site has it."""
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
    """Docstrings have code between single backticks, as Markdown has it."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", "\n".join(lines))
    lines[:] = text.split("\n")


def _all_is_documented(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns, which fails the build, of a public name that no page has."""
    objects: dict[str, Any] = env.domaindata["py"]["objects"]
    for name in zenflow_jax.__all__:
        if f"zenflow_jax.{name}" not in objects:
            _log.warning("docs/api.md lacks the public name zenflow_jax.%s", name)


def setup(app: Sphinx) -> None:
    app.connect("source-read", _source)
    app.connect("autodoc-process-docstring", _markdown_code)
    app.connect("env-check-consistency", _all_is_documented)
