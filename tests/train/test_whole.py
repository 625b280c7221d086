"""What is written beside its place, under a name of no user's, and what a kill leaves of it."""

import pytest

from tests.train.scripts import start
from train.whole import made_whole, remove_leftovers, replace_text


def of_user(folder):
    """Files and a folder that look like somebody's temporary ones; gives what is in them."""
    for name in ("x.part", "x.tmp", "x.old", ".x.part", ".x.0123.part"):
        (folder / name).write_text("precious")
    (folder / "x.part.d").mkdir()
    return names(folder)


def names(folder):
    return {p.name for p in folder.iterdir()}


def test_what_is_not_whole_is_removed_and_nothing_else(tmp_path):
    before = of_user(tmp_path)
    for folder in (False, True):
        with pytest.raises(ZeroDivisionError), made_whole(tmp_path / "x", folder=folder) as part:
            _ = 1 / (part.is_dir() - folder)
    assert names(tmp_path) == before
    replace_text(tmp_path / "x", "new")
    assert names(tmp_path) == before | {"x"}
    assert (tmp_path / "x").read_text() == "new"
    assert all((tmp_path / name).read_text() == "precious" for name in before - {"x.part.d"})


KILLED = """
import os, sys
from pathlib import Path
from train.whole import made_whole
place = Path(sys.argv[1])
with made_whole(place, folder=True) as part:
    (part / "half").write_text("x")
    print("writing", flush=True)
    sys.stdin.read()
    os._exit(1)
"""


def start_writing(place):
    """A process that writes to a place until its input ends, which kills it; gives it."""
    process = start("-c", KILLED, str(place))
    assert process.stdout.readline() == "writing\n"
    return process


def test_what_a_kill_has_left_is_removed_but_not_while_it_is_written(tmp_path):
    before = of_user(tmp_path)
    process = start_writing(tmp_path / "x")
    (half,) = names(tmp_path) - before
    remove_leftovers(tmp_path / "x")
    replace_text(tmp_path / "x", "new")
    assert names(tmp_path) == before | {"x", half}
    process.communicate()
    replace_text(tmp_path / "y", "new")
    assert half in names(tmp_path)  # of another place
    replace_text(tmp_path / "x", "newer")
    assert names(tmp_path) == before | {"x", "y"}
