"""Files that have a temporary name until they are complete, and leftovers of a killed process."""

import pytest

from elves import atomic
from elves.atomic import atomic_path, remove_leftovers, write_text_atomically
from tests.processes import start

PRECIOUS = {"x.part", "x.tmp", "x.old", ".x.part", ".x.0123.part"}


@pytest.fixture
def place(tmp_path):
    """Returns a path in a folder with files whose names look like temporary files."""
    for name in PRECIOUS:
        (tmp_path / name).write_text("precious")
    return tmp_path / "x"


def names(place):
    return {p.name for p in place.parent.iterdir()}


def test_only_incomplete_files_are_removed(place):
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


def test_a_killed_process_leaves_files_that_are_removed_but_not_during_a_write(place):
    process = start("-c", KILLED, str(place))
    assert process.stdout.readline() == "writing\n"
    (half,) = names(place) - PRECIOUS
    remove_leftovers(place)
    write_text_atomically(place, "new")
    assert names(place) == PRECIOUS | {"x", half}
    process.communicate()
    write_text_atomically(place.with_name("y"), "new")
    assert half in names(place)  # of another path
    write_text_atomically(place, "newer")
    assert names(place) == PRECIOUS | {"x", "y"}


@pytest.mark.parametrize("folder", [False, True])
def test_a_temporary_file_removed_by_another_process_before_it_is_locked_is_created_again(
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
