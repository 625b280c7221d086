"""README.md and docs/: Python blocks run unchanged, and links and options exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train import compress, finetune, generate

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def program(text: str) -> str:
    """Returns the blocks as one program, with every line at its place in the text.

    All other lines are blank, so that a traceback shows the page's line numbers.
    """
    inside, lines = False, []
    for line in text.splitlines():
        fence = line.startswith("```")
        if fence:
            inside = line == "```python"
        lines.append("" if fence or not inside else line)
    return "\n".join(lines) + "\n"


EXAMPLES = ("README.md", "docs/checkpoints.md", "docs/deepspeed.md")


# A separate process has jax's default settings, not those of the tests.
@pytest.mark.slow
def test_the_examples_of_each_page_run_in_order_as_one_program(tmp_path):
    for name in EXAMPLES:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "```python" in text
        (tmp_path / Path(name).name).write_text(program(text), encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; [*map(runpy.run_path, sys.argv[1:])]"]
        + [Path(name).name for name in EXAMPLES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_file_names_exist(page):
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if ":" in target:
            continue  # another site
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not heading or heading in headings(file), target
    # Checks files that a page names with their folder (in the library, without its folder).
    for name in re.findall(r"`(\w[\w.]*/[\w./]+\.(?:py|md|toml))`", text):
        assert (ROOT / name).exists() or (ROOT / "zenflow_jax" / name).exists(), name


def test_options_in_pages_exist_in_the_commands(capsys):
    for command in (finetune, generate, compress):
        with pytest.raises(SystemExit):
            command.main(["--help"])
    known = set(re.findall(r"--[a-z][a-z0-9-]*", capsys.readouterr().out))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        spans = [span for span in re.findall(r"`(--[^`]+)`", text) if "=" not in span]
        lines = re.findall(r"^zenflow-.*(?:\\\n.*)*", text, re.MULTILINE)
        lines += re.findall(r"`(zenflow-[^`]+)`", text)
        for name in re.findall(r"--[a-z][a-z0-9-]*", "\n".join(spans + lines)):
            off = "--" + name.removeprefix("--no-")
            assert name in known or off in known, f"{page.name}: {name}"


def headings(page: Path) -> list[str]:
    """Returns the anchors of a page's headings, as on GitHub."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
