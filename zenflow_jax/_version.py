"""The version of the library, and that of the layout of what it saves."""

import re

__version__ = "0.2.0"

#: The layout of what is saved of a run: the arrays of `ZenFlowState`, the tree of
#: `HostEngine.state`, and the files of `EngineSave`. Raise it by one, with an entry in `SINCE`,
#: whenever a released version would fail on what this one writes, or read something else in it:
#: when an array gets another name, shape, dtype, place or meaning, comes or goes. What can still be
#: read of older layouts is said in `_checkpoint/layout.py`. `tests/test_saved_layout.py` goes on
#: from a checkpoint of each released layout.
LAYOUT = 1
#: By layout, the first minor version that wrote it.
SINCE = {1: "0.2"}
#: The layout with which the arrays of `ZenFlowState` changed last. It stays behind `LAYOUT` where
#: only the engine's half has changed: savers restore a state into the place of one of the same
#: names, so that a state of another name can be converted by nobody.
STATE_LAYOUT = 1


def layout_name(number: int) -> str:
    """What the arrays that say which layout is saved are called, by its number.

    The number is in the name, because savers compare names: one that cannot restore a tree into the
    place of another shows both names, and so the versions.

    Examples:
        >>> layout_name(1)
        'layout_1_of_zenflow_jax_0_2'
    """
    return f"layout_{number}_of_zenflow_jax_{SINCE[number].replace('.', '_')}"


def version_numbers() -> tuple[int, int, int]:
    """Major, minor and patch number of this version."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", __version__)
    assert found is not None
    return int(found[1]), int(found[2]), int(found[3])
