"""The allowed imports between folders: contracts in `pyproject.toml`, reasons in `docs/`."""

from tests.processes import assert_ends, start

LINT = "import importlinter.cli as cli; cli.lint_imports_command(['--no-cache'])"


def test_imports_go_one_way():
    # In a separate process, because it closes stdout.
    assert_ends(start("-c", LINT))


def test_slow_imports_are_imported_on_first_use():
    code = """if True:
        import sys, zenflow_jax
        slow = {"flax", "numba", "orbax"}
        print(sorted(slow & sys.modules.keys()))
        tx = zenflow_jax.zenflow(1e-3)
        print(sorted(slow & sys.modules.keys()))
    """
    assert assert_ends(start("-c", code)) == "[]\n[]\n"
