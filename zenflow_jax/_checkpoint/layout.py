"""Which layout a saved state has, and how an older one becomes that of now.

An engine's state says it under `layout`: in the name of an array, which contains the version of
zenflow_jax that wrote it. So does an optimizer state. The files of `EngineSave` say it in their
metadata too, where it is read before all else. What the numbers are is in `_version.py`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from zenflow_jax import _version

#: By the number of an older layout that can still be read, what makes the next layout of its tree.
#: Large arrays of the tree may be in files: pass them on as they are. The optimizer state is not in
#: it. `abstract_engine_state` is of the layout of now, so the first entry here owes users who
#: restore `engine.state()` by a template one of the older layout.
TO_NEXT: dict[int, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}


def written_by() -> dict[str, np.ndarray]:
    """What a tree says of its layout and version: an int32 () under the layout's name."""
    return {_version.layout_name(_version.LAYOUT): np.array(_version.version_number(), np.int32)}


def layout_of(name: str) -> int | None:
    """The number of a layout by the name of the array that says it; None if it is no such name.

    Examples:
        >>> layout_of("layout_12_of_zenflow_jax_1_3"), layout_of("mu")
        (12, None)
    """
    found = re.fullmatch(r"layout_(\d+)_of_zenflow_jax_[\d_]+", name)
    return int(found[1]) if found else None


def check_layout(number: int | None, version: str | None, what: str) -> None:
    """Refuses a layout of the engine's half that this version cannot read.

    Args:
        number: Of the layout; None if what was saved does not say.
        version: Of the zenflow_jax that wrote it; None if it does not say.
        what: What has it.

    Raises:
        ValueError: If it is newer than that of now, older than can be read, or says nothing.
    """
    now = _version.LAYOUT
    if number is None or version is None:
        raise ValueError(_refusal(what, now, None, None))
    if number > now or any(step not in TO_NEXT for step in range(number, now)):
        raise ValueError(_refusal(what, now, number, version))


def check_state_layout(found: Mapping[str, Any]) -> None:
    """Refuses the optimizer state of another layout, which a saver has read as a dict.

    Raises:
        ValueError: If it is of another one, or says nothing.
    """
    number, version = _said_by(found)
    if number != _version.STATE_LAYOUT:
        raise ValueError(_refusal("a ZenFlowState", _version.STATE_LAYOUT, number, version))


def in_layout_of_now(saved: Any) -> Any:
    """A saved engine's state in the layout of now; what is no such state is returned as it is.

    Raises:
        ValueError: If it is of a layout that cannot be read.
    """
    if not isinstance(saved, Mapping) or not {"leaves", "counts"} <= saved.keys():
        return saved
    number, version = _said_by(saved)
    check_layout(number, version, "an `engine_state`")
    assert number is not None
    for step in range(number, _version.LAYOUT):
        saved = TO_NEXT[step](saved)
    return {**saved, "layout": written_by()}


def _said_by(saved: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """The number of a state's layout, and the version that wrote it; None where it is not said."""
    said = saved.get("layout")
    for name, version in said.items() if isinstance(said, Mapping) else ():
        number = layout_of(name)
        if number is not None:
            return number, _version.version_of(int(np.asarray(version)))
    return None, None


def _refusal(what: str, now: int, number: int | None, version: str | None) -> str:
    if number is None:
        came = "one that does not say its layout, of a version before 0.2.0"
        remedy = "Finish its run with that version"
    else:
        came = f"layout {number}, which zenflow_jax {version} wrote"
        newer = number > now
        remedy = (
            f"Go on with zenflow_jax {version}, or a later one"
            if newer
            else f"Finish its run with zenflow_jax {version}"
        )
    return (
        f"expected {what} of layout {now}, which zenflow_jax {_version.__version__} reads, got "
        f"{came}. {remedy}; or begin a new run with its parameters, from `tx.init(params)`."
    )
