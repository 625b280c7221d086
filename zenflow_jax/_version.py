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


def version_number() -> int:
    """This version as one number, three digits each for minor and patch.

    It is one, because a step on a mesh writes the sharding of a vector in another way than it came,
    and jit would compile that step twice.
    """
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", __version__)
    assert found is not None
    major, minor, patch = map(int, found.groups())
    return (major * 1000 + minor) * 1000 + patch


def version_of(number: int) -> str:
    """The version with this number.

    Examples:
        >>> version_of(1_002_034)
        '1.2.34'
    """
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
