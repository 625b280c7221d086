"""An engine's state as a tree of arrays, which can be read on any number of devices and processes.

Arrays are global and in host memory. Large arrays are placed like their leaf's parts, so a
checkpoint library writes each part once, from a process that holds it. Small arrays are replicated
on every device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zenflow_jax import _version
from zenflow_jax._device.memory import HOST
from zenflow_jax._device.shards import Shard
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._exchange.parts import Part
from zenflow_jax._exchange.progress import NONE, Counts
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.rules import AutoSelect, AutoWindow
from zenflow_jax._spec.schedule import Schedule, ScheduleState, first_schedule_state

#: The sums of an open window's gradients and of their squares.
SUMS = ("total", "squares")
#: Arrays with a leaf's shape.
WIDE = ("master", "mu", "nu", *SUMS)
_NUMBERS = "step windows token skipped reselections open_steps counted pending".split()


def options_of(state: ZenFlowState) -> dict[str, Any]:
    """Returns the options that a resumed run must share with the saved run, as numbers."""
    schedule = state.schedule
    specs = [leaf.spec for leaf in state.leaves]
    rows = [(-1 if s.axis is None else s.axis, s.k, s.decay, len(s.groups)) for s in specs]
    numbers = {f.name for f in dataclasses.fields(schedule)} - {"window", "select", "groups"}
    return {
        # The number, the kind of rule, and the rule's share.
        "update_interval": np.array(_rule(schedule.window), np.float32),
        "select_interval": np.array(_rule(schedule.select), np.float32),
        "rolling": np.array(schedule.groups > 1, np.int32),
        # -1 for None.
        **{
            name: np.array(-1 if (x := getattr(schedule, name)) is None else x, np.float32)
            for name in sorted(numbers)
        },
        # For each leaf: channel axis (-1 if resident), selected channels, weight decay, ranges.
        "leaves": np.array(rows, np.int32).reshape(-1, 4),
        # For each range of each leaf.
        "groups": np.array([group for s in specs for group in s.groups], np.int32),
    }


def _rule(rule: Any) -> tuple[Any, ...]:
    match rule:
        case AutoWindow():
            return rule.max_interval, 1, rule.share
        case AutoSelect():
            return rule.max_windows, 1, rule.keep
        case _:
            return rule, 0, 0


def abstract_engine_state(opt_state: Any) -> dict[str, Any]:
    """Returns the tree of `HostEngine.state` without values, a template for restoring checkpoints.

    Args:
        opt_state: The result of `tx.init(params)`: arrays, or `ShapeDtypeStruct`s.

    Returns:
        A tree of `ShapeDtypeStruct`s with shapes, dtypes, shardings and memory kinds.

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
    leaves, none = arrays_of_leaves(state), [0] * state.schedule.groups
    counts = Counts(
        schedule_state=first_schedule_state(state.schedule, len(leaves)),
        open_steps=none,
        counted=none,
        pending=[NONE for _ in none],
        shares=np.full(len(none), np.nan, np.float32),
        fingerprints=np.zeros(len(state.leaves), np.uint32),
    )
    like = small_sharding(state)
    small = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like), small_arrays(counts, state)
    )
    return {"leaves": leaves, **small}


def small_sharding(state: ZenFlowState) -> jax.sharding.Sharding | None:
    """Returns the sharding of small arrays: like the state's scalars, but in host memory."""
    return state.step.sharding and state.step.sharding.with_memory_kind(HOST)


def small_arrays(counts: Counts, state: ZenFlowState) -> dict[str, Any]:
    """Makes the tree's small arrays, in NumPy; `state` may be from any step."""
    return {
        "counts": _counts_to_tree(counts, state.schedule),
        "options": options_of(state),
        # Named as in the optimizer state, so that a library that compares names shows both
        # versions.
        "layout": {_version.LAYOUT_NAME: np.array(_version.LAYOUT, np.int32)},
    }


def _counts_to_tree(counts: Counts, schedule: Schedule) -> dict[str, Any]:
    lengths = [counts.window_lengths.get(i, 0) for i in range(schedule.longest_window + 1)]
    return {
        **{name: np.array(getattr(counts, name), np.int32) for name in _NUMBERS},
        "window_lengths": np.array(lengths, np.int32),
        "shares": np.array(counts.shares, np.float32),
        "fingerprints": counts.fingerprints,
        "schedule_state": {
            name: np.array(x, np.int32 if name in ("length", "windows") else np.float32)
            for name, x in counts.schedule_state._asdict().items()
            if np.size(x)  # orbax cannot write empty arrays
        },
    }


def counts_from_tree(tree: Mapping[str, Any]) -> Counts:
    schedule_state: dict[str, Any] = dict.fromkeys(ScheduleState._fields, np.zeros(0, np.float32))
    schedule_state |= {name: np.asarray(x)[()] for name, x in tree["schedule_state"].items()}
    lengths = enumerate(np.asarray(tree["window_lengths"]).tolist())
    return Counts(
        **{name: np.asarray(tree[name]).tolist() for name in _NUMBERS},
        window_lengths={i: n for i, n in lengths if n},
        shares=np.asarray(tree["shares"]),
        fingerprints=np.asarray(tree["fingerprints"]),
        schedule_state=ScheduleState(**schedule_state),
    )


def arrays_of_leaves(state: ZenFlowState) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Returns the saved arrays for each offloaded leaf."""
    leaves = zip(state.leaves, state.mail, strict=True)
    return [_arrays_of(leaf.spec, mail) for leaf, mail in leaves if not leaf.spec.resident]


def _arrays_of(spec: LeafSpec, mail: Any) -> dict[str, Any]:
    """Returns a leaf's saved arrays, placed like its mail; an abstract leaf may lack a sharding."""
    sharding = mail.sharding
    wide = each = None
    if isinstance(sharding, NamedSharding):
        shard, mesh = Shard(spec), sharding.mesh
        wide = NamedSharding(mesh, shard.at_host(), memory_kind=HOST)
        each = NamedSharding(mesh, shard.at_channels(), memory_kind=HOST)
    elif sharding is not None:
        (device,) = sharding.device_set
        wide = each = SingleDeviceSharding(device, memory_kind=HOST)

    def counts(n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*spec.stack, n), np.int32, sharding=each)

    shape = spec.on_host.shape
    arrays = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=wide) for name in WIDE}
    arrays["steps"] = counts(spec.n)
    if spec.k:  # orbax cannot write empty arrays
        # The channels that were selected while the pending update's window was open.
        arrays["before"] = counts(spec.k)
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
