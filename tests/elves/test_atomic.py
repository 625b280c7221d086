"""Files that are written under another name until they are whole, and what a kill leaves."""

import pytest

from elves import atomic
from elves.atomic import atomic_path, remove_leftovers, write_text_atomically
from tests.processes import start

PRECIOUS = {"x.part", "x.tmp", "x.old", ".x.part", ".x.0123.part"}


@pytest.fixture
def place(tmp_path):
    """A place in a folder with files that look like somebody's temporary ones."""
    for name in PRECIOUS:
        (tmp_path / name).write_text("precious")
    return tmp_path / "x"


def names(place):
    return {p.name for p in place.parent.iterdir()}


def test_what_is_not_whole_is_removed_and_nothing_else(place):
    for folder in (False, True):
        with pytest.raises(ZeroDivisionError), atomic_path(place, folder=folder) as part:
            _ = 1 / (part.is_dir() - folder)
    assert names(place) == PRECIOUS
    write_text_atomically(place, "new")
    assert names(place) == PRECIOUS | {"x"}
    assert place.read_text() == "new"
    assert {(place.parent / name).read_text() for name in PRECIOUS} == {"precious"}


KILLED = """
import os, sys
from pathlib import Path
from elves.atomic import atomic_path
with atomic_path(Path(sys.argv[1]), folder=True) as part:
    print("writing", flush=True)
    sys.stdin.read()
    os._exit(1)
"""


def test_what_a_kill_has_left_is_removed_but_not_while_it_is_written(place):
    process = start("-c", KILLED, str(place))
    assert process.stdout.readline() == "writing\n"
    (half,) = names(place) - PRECIOUS
    remove_leftovers(place)
    write_text_atomically(place, "new")
    assert names(place) == PRECIOUS | {"x", half}
    process.communicate()
    write_text_atomically(place.with_name("y"), "new")
    assert half in names(place)  # of another place
    write_text_atomically(place, "newer")
    assert names(place) == PRECIOUS | {"x", "y"}


@pytest.mark.parametrize("folder", [False, True])
def test_a_part_that_another_process_removes_before_it_is_locked_is_made_again(
    place, monkeypatch, folder
):
    flock, rivals = atomic.fcntl.flock, [remove_leftovers]

    def late(file, how):
        if rivals:
            rivals.pop()(place)
        flock(file, how)

    monkeypatch.setattr(atomic.fcntl, "flock", late)
    with atomic_path(place, folder=folder) as part:
        assert not rivals
        (part / "x" if folder else part).write_text("new")
        remove_leftovers(place)
    assert (place / "x" if folder else place).read_text() == "new"
