"""An engine's state as a tree of arrays, which can be read on any number of devices and processes.

The arrays are global: each has the values of all devices. One small array has the rest as JSON; its
name is the layout's (`_version.py`), because libraries that compare names then show both versions.
"""

import json
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._exchange.parts import Part
from zenflow_jax._exchange.progress import RunState
from zenflow_jax._spec.adaptive import ScheduleState
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._version import LAYOUT_NAME

#: The sums of an open window's gradients and of their squares.
SUMS = ("total", "squares")
#: Arrays with a leaf's shape.
WIDE: tuple[str, ...] = ("master", "mu", "nu", *SUMS)
# The most characters of a number in JSON.
_NUMBER = 24


def options_of(state: ZenFlowState) -> dict[str, Any]:
    """Returns the options that a resumed run must share with the saved run, in JSON's types."""
    schedule = vars(state.schedule) | {"groups": state.schedule.groups > 1}
    for name in ("window", "select"):
        schedule[name] = schedule.pop(f"auto_{name}") or schedule[name]
    names = {"window": "update_interval", "select": "select_interval", "groups": "rolling"}
    plain = int | float | None  # other values are rules
    options = {
        f"`{names.get(name, name)}`": x if isinstance(x, plain) else str(x)
        for name, x in schedule.items()
    }
    return options | {
        leaf.spec.name: {
            "shape": list(leaf.spec.shape),
            "channel axis": leaf.spec.axis,
            "selected channels": leaf.spec.k,
            "weight decay": leaf.spec.decay,
            # Of each range. Only a mesh that divides a stack's layers changes their number.
            "groups": list(leaf.spec.groups),
        }
        for leaf in state.leaves
    }


def abstract_engine_state(opt_state: PyTree) -> dict[str, Any]:
    """Returns the tree of `HostEngine.state` without values, a template for restoring checkpoints.

    Args:
        opt_state: The result of `tx.init(params)`: arrays, or `ShapeDtypeStruct`s.

    Returns:
        A tree of `ShapeDtypeStruct`s with shapes and dtypes.

    Raises:
        ValueError: If `opt_state` does not have exactly one `ZenFlowState`.

    Examples:
        >>> import jax.numpy as jnp, zenflow_jax
        >>> opt_state = zenflow_jax.zenflow(1e-2).init({"w": jnp.ones((8, 4))})
        >>> tree = zenflow_jax.abstract_engine_state(opt_state)
        >>> tree["leaves"][0]["master"].shape
        (8, 4)
    """
    state = find_state(opt_state)
    run = encoded(RunState.first(state), state)
    return {
        "leaves": arrays_of_leaves(state),
        LAYOUT_NAME: jax.ShapeDtypeStruct(run.shape, run.dtype),
    }


def encoded(run: RunState, state: ZenFlowState) -> np.ndarray:
    """Returns the run's state and options as JSON, uint8; runs with equal options have equal sizes.

    `state` may be from any step.
    """

    def text(run: RunState) -> str:
        tree = vars(run) | {"options": options_of(state)}
        return json.dumps(tree, default=lambda x: x.tolist())

    # A checkpoint library needs the size before it reads the array.
    first = text(RunState.first(state))
    size = len(first) + _NUMBER * (first.count(",") + 1)
    return np.frombuffer(text(run).ljust(size).encode(), np.uint8)


def decoded(array: Any, state: ZenFlowState) -> tuple[RunState, dict[str, Any]]:
    """Returns the run state and options of an `encoded` array; `state` as in `encoded`."""
    tree = json.loads(bytes(np.asarray(array)))
    options, like = tree.pop("options"), RunState.first(state).schedule_state
    saved = zip(tree.pop("schedule_state"), like, strict=True)
    schedule_state = ScheduleState._make(np.asarray(x, y.dtype)[()] for x, y in saved)
    return RunState(**tree, schedule_state=schedule_state), options


def arrays_of_leaves(state: ZenFlowState) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Returns the saved arrays for each offloaded leaf."""
    arrays: list[dict[str, jax.ShapeDtypeStruct]] = []
    for spec in (leaf.spec for leaf in state.leaves if not leaf.spec.resident):
        leaf = dict.fromkeys(WIDE, jax.ShapeDtypeStruct(spec.on_host.shape, np.float32))
        leaf["steps"] = jax.ShapeDtypeStruct((*spec.stack, spec.n), np.int32)
        if spec.k:  # orbax cannot write empty arrays
            # The channels that were selected while the pending update's window was open.
            leaf["before"] = jax.ShapeDtypeStruct((*spec.stack, spec.k), np.int32)
        arrays.append(leaf)
    return arrays


def place_of(name: str, part: Part, spec: LeafSpec) -> tuple[slice, ...]:
    """Returns the place of a part's array in its leaf's array; `spec` is the leaf's."""
    if name in WIDE:
        return part.index
    assert part.spec.axis is not None
    channels = part.index[part.spec.axis]
    if name == "before":
        # Each piece of the channel axis holds its share of the selected channels, in order.
        channels = slice(channels.start * spec.k // spec.n, channels.stop * spec.k // spec.n)
    return (*part.index[: len(part.spec.stack)], channels)
