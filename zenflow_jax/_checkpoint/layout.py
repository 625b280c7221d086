"""Which layout a saved state has; another one than that of now is refused.

An engine's state says it under `layout`: in the name of an array, which contains the version of
zenflow_jax that wrote it. So does an optimizer state. The files of `EngineSave` say it in their
metadata too, where it is read before all else. What the numbers are is in `_version.py`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from zenflow_jax import _version


def written_by() -> dict[str, np.ndarray]:
    """What a tree says of its layout and version: an int32 () under the layout's name."""
    return {_version.LAYOUT_NAME: np.array(_version.version_number(), np.int32)}


def layout_of(name: str) -> int | None:
    """The number of a layout by the name of the array that says it; None if it is no such name.

    Examples:
        >>> layout_of("layout_12_of_zenflow_jax_1_3"), layout_of("mu")
        (12, None)
    """
    found = re.fullmatch(r"layout_(\d+)_of_zenflow_jax_[\d_]+", name)
    return int(found[1]) if found else None


def check_layout(number: int | None, version: str | None, what: str) -> None:
    """Refuses another layout than that of now.

    Args:
        number: Of the layout; None if what was saved does not say.
        version: Of the zenflow_jax that wrote it; None if it does not say.
        what: What has it.

    Raises:
        ValueError: If it is another one, or says nothing.
    """
    if number != _version.LAYOUT or version is None:
        raise ValueError(_refusal(what, number, version))


def check_state_layout(found: Mapping[str, Any]) -> None:
    """Refuses the optimizer state of another layout, which a saver has read as a dict.

    Raises:
        ValueError: If it is of another one, or says nothing.
    """
    check_layout(*_said_by(found), "a ZenFlowState")


def check_engine_layout(saved: Any) -> None:
    """Refuses the state of an engine that is of another layout.

    Raises:
        ValueError: If it is of another one, or says nothing.
    """
    if isinstance(saved, Mapping) and {"leaves", "counts"} <= saved.keys():
        check_layout(*_said_by(saved), "an `engine_state`")


def _said_by(saved: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """The number of a state's layout, and the version that wrote it; None where it is not said."""
    said = saved.get("layout")
    for name, version in said.items() if isinstance(said, Mapping) else ():
        number = layout_of(name)
        if number is not None:
            return number, _version.version_of(int(np.asarray(version)))
    return None, None


def _refusal(what: str, number: int | None, version: str | None) -> str:
    if number is None or version is None:
        came = "one that does not say its layout, of a version before 0.2.0"
        remedy = "Finish its run with that version"
    else:
        came = f"layout {number}, which zenflow_jax {version} wrote"
        newer = number > _version.LAYOUT
        remedy = (
            f"Go on with zenflow_jax {version}, or a later one"
            if newer
            else f"Finish its run with zenflow_jax {version}"
        )
    return (
        f"expected {what} of layout {_version.LAYOUT}, which zenflow_jax {_version.SINCE} reads, "
        f"got {came}. {remedy}; or begin a new run with its parameters, from `tx.init(params)`."
    )
