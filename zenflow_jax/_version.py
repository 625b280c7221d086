"""The version of the library, and that of the layout of what it saves."""

import re

__version__ = "0.3.0"

#: The number of the layout of what is saved of a run: the arrays of `ZenFlowState`, the tree of
#: `HostEngine.state`, and the files of `EngineSave`. Raise it by one whenever a released version
#: would fail on what this one writes, or read something else in it: when an array gets another
#: name, shape, dtype, place or meaning, comes or goes. Other layouts are refused.
LAYOUT = 2
#: The first minor version that writes it.
SINCE = "0.3"
#: What the arrays are called that say it. Savers compare names: one that cannot restore a tree into
#: the place of another shows both names, and so the versions.
LAYOUT_NAME = f"layout_{LAYOUT}_of_zenflow_jax_{SINCE.replace('.', '_')}"


def version_number() -> int:
    """This version as one number, three digits each for minor and patch.

    It is one, because a step on a mesh writes the sharding of a vector in another way than it came,
    and jit would compile that step twice.
    """
    major, minor, patch = map(int, re.findall(r"\d+", __version__)[:3])
    return (major * 1000 + minor) * 1000 + patch


def version_of(number: int) -> str:
    """The version with this number.

    Examples:
        >>> version_of(1_002_034)
        '1.2.34'
    """
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"
