"""The allowed imports between folders: contracts in `pyproject.toml`, reasons in `docs/`."""

from tests.processes import assert_ends, start

LINT = "import importlinter.cli as cli; cli.lint_imports_command(['--no-cache'])"


def test_imports_go_one_way():
    # In a separate process, because it closes stdout.
    assert_ends(start("-c", LINT))
