"""An engine's state as a tree of arrays, for checkpoints: out of the host half, and back into it.

Large arrays are global ones, in host memory, placed like the parts of the leaf that they belong to:
whoever writes them writes each part once, from a process that has it. What is small and the same on
every process is NumPy. Nothing in the tree depends on how many devices or processes there are, so
it can be read into another number of them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from zenflow_jax._adam import AdamScalars
from zenflow_jax._aligned import blank
from zenflow_jax._channels import LeafSpec
from zenflow_jax._host_half import HostHalf, HostLeaf
from zenflow_jax._parts import Part, assemble, by_leaf, host_channels, piece_of
from zenflow_jax._placement import HOST, read
from zenflow_jax._schedule import (
    AutoSelect,
    AutoWindow,
    EpochSelect,
    Schedule,
    Tally,
    first_tally,
    longest,
)
from zenflow_jax._shards import Layout
from zenflow_jax._state import ZenFlowState, find_state

# Of the update that has not reached the parameters: there is none; there is; it is about nothing,
# because no step of its window counted.
NONE, PENDING, EMPTY = 0, 1, 2

#: Arrays of a leaf's shape.
WIDE = ("master", "mu", "nu", "total")


@dataclasses.dataclass(frozen=True)
class Counts:
    """What an engine counts. Python numbers, and what a `Tally` has."""

    tally: Tally
    step: int = 0
    open_steps: int = 0  # of the open window, skipped ones included
    counted: int = 0  # of them those that are in the sums
    windows: int = 0  # closed so far
    pending: int = NONE
    ticket: int = 0  # that the next step carries
    skipped: int = 0
    reselections: int = 0
    window_lengths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    scalars: AdamScalars | None = None  # of the last step; None before the first
    update_scalars: AdamScalars | None = None  # of the last window that closed; None before
    kept: float | None = None


_NUMBERS = (
    "step",
    "open_steps",
    "counted",
    "windows",
    "pending",
    "ticket",
    "skipped",
    "reselections",
)


def counts_to_tree(counts: Counts, schedule: Schedule) -> dict[str, np.ndarray]:
    lengths = np.zeros(longest(schedule.window) + 1, np.int32)
    for length, count in counts.window_lengths.items():
        lengths[length] = count
    tree = {name: np.array(getattr(counts, name), np.int32) for name in _NUMBERS}
    return tree | {
        "window_lengths": lengths,
        "scalars": _scalars_to_tree(counts.scalars),
        "update_scalars": _scalars_to_tree(counts.update_scalars),
        "kept": np.array(np.nan if counts.kept is None else counts.kept, np.float32),
        "tally": {
            name: np.array(x, np.int32 if name in ("length", "windows") else np.float32)
            for name, x in counts.tally._asdict().items()
            if np.size(x)  # orbax writes no empty arrays
        },
    }


def _scalars_to_tree(scalars: AdamScalars | None) -> np.ndarray:
    return np.array(scalars or [0.0] * len(AdamScalars._fields), np.float32)


def counts_from_tree(tree: Mapping[str, Any]) -> Counts:
    tally = {name: np.asarray(x) for name, x in tree["tally"].items()}
    nothing = np.zeros(0, np.float32)
    lengths = np.asarray(tree["window_lengths"])
    kept = float(tree["kept"])
    return Counts(
        **{name: int(tree[name]) for name in _NUMBERS},
        window_lengths={i: int(n) for i, n in enumerate(lengths) if n},
        scalars=AdamScalars(*map(float, np.asarray(tree["scalars"]))),
        update_scalars=AdamScalars(*map(float, np.asarray(tree["update_scalars"]))),
        tally=Tally(
            length=int(tally["length"]),
            counted=np.float32(tally["counted"]),
            deferred=tally.get("deferred", nothing),
            selected=tally.get("selected", nothing),
            windows=int(tally["windows"]),
            kept=np.float32(tally["kept"]),
        ),
        kept=None if math.isnan(kept) else kept,
    )


def options_of(state: ZenFlowState) -> dict[str, Any]:
    """What a resumed run must have as the saved one had it, in numbers."""
    schedule = state.schedule
    window, select = schedule.window, schedule.select
    if isinstance(window, AutoWindow):
        windows = (window.max_interval, 1, window.share)
    else:
        windows = (window, 0, 0)
    if isinstance(select, AutoSelect):
        selects = (select.max_windows, 1, select.keep)
    elif isinstance(select, EpochSelect):
        selects = (select.steps, 2, 0)
    else:
        selects = (select, 0, 0)
    rows = [(-1 if s.axis is None else s.axis, s.k, s.decay) for s in _specs(state)]
    return {
        # The number, the kind of rule, and the rule's share.
        "update_interval": np.array(windows, np.float32),
        "select_interval": np.array(selects, np.float32),
        "full_warm_up_rounds": np.array(schedule.full_warm_up_rounds, np.int32),
        "overlap_step": np.array(schedule.overlap_step, np.int32),
        # 1 where the device adds up, whose sums are not here.
        "accumulate": np.array(state.delivery == "window", np.int32),
        # Of each leaf channel axis (-1 if it is resident), selected channels, weight decay.
        "leaves": np.array(rows, np.int32).reshape(-1, 3),
    }


def abstract_engine_state(opt_state: Any) -> dict[str, Any]:
    """What `HostEngine.state` returns, without values: to restore a checkpoint straight into place.

    Args:
        opt_state: What `tx.init(params)` returned: arrays, or `ShapeDtypeStruct`s.

    Returns:
        A tree of `ShapeDtypeStruct`s with shapes, dtypes, shardings and memory kinds, and of small
        NumPy arrays where the state has them.

    Raises:
        ValueError: If there is not one `ZenFlowState` with `offload=True` in `opt_state`.
    """
    state = find_state(opt_state)
    if not state.offload:
        raise ValueError(
            "expected a state of `zenflow(..., offload=True)`, got one that has its deferred half "
            "in itself. Save that state alone: it is all there is."
        )
    travelling = [
        (leaf.spec, mail)
        for leaf, mail in zip(state.leaves, state.mail, strict=True)
        if leaf.travels
    ]
    tally = first_tally(state.schedule, len(travelling))
    return {
        "leaves": [
            {
                name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
                for name, (shape, dtype, sharding) in arrays_of(spec, mail, state.delivery).items()
            }
            for spec, mail in travelling
        ],
        "counts": counts_to_tree(Counts(tally=tally), state.schedule),
        "options": options_of(state),
    }


def arrays_of(
    spec: LeafSpec, mail: Any, delivery: str
) -> dict[str, tuple[tuple[int, ...], Any, Any]]:
    """Shape, dtype and sharding of each array that is kept for a leaf; `mail` shows where it is.

    The sharding is None where nobody knows: of an abstract leaf that was not told where it is.
    """
    sharding = mail.sharding
    if isinstance(sharding, NamedSharding):
        layout, mesh = Layout(spec), sharding.mesh
        wide, each = (
            NamedSharding(mesh, x, memory_kind=HOST) for x in (layout.part, layout.channels)
        )
    elif sharding is None:
        wide = each = None
    else:
        (device,) = sharding.device_set
        wide = each = SingleDeviceSharding(device, memory_kind=HOST)
    arrays = {
        **{name: (spec.shape, np.dtype(np.float32), wide) for name in WIDE},
        "steps": ((*spec.stack, spec.n), np.dtype(np.int32), each),
    }
    if delivery == "window":
        del arrays["total"]  # in the optimizer state, as its mail
    if spec.k:  # orbax writes no empty arrays
        # Channels selected while the pending update's window was open, if there is one.
        arrays["before"] = ((*spec.stack, spec.k), np.dtype(np.int32), each)
    return arrays


def leaves_to_trees(
    leaves: Sequence[HostLeaf],
    counted: int,
    parts: Sequence[Part],
    arrays: Sequence[Mapping[str, tuple[tuple[int, ...], Any, Any]]],
    before: Sequence[jax.Array] | None,
    take: Callable[[np.ndarray], np.ndarray],
) -> list[dict[str, jax.Array]]:
    """What the host half has of each leaf that travels.

    Args:
        leaves: Its arrays, at rest.
        counted: Steps in its sums.
        parts: Of what it has them.
        arrays: Of each leaf its `arrays_of`.
        before: Channels selected during the pending update's window, if others are now.
        take: Makes of one of those arrays one that the result may have: a copy, or what is lent.
    """
    pieces: dict[str, list[list[jax.Array | None]]] = {}
    for leaf, part in zip(leaves, parts, strict=True):
        spec = part.spec
        channels = (
            leaf.channels if before is None else host_channels(part.of(before[part.leaf]), part)
        )
        # Sums that nothing was added to yet are not there, or are those of a former window.
        total = leaf.total if counted else None
        sums = []
        if "total" in arrays[part.leaf]:
            sums = [("total", blank(spec.shape) if total is None else take(total), spec.shape)]
        for name, x, shape in (
            ("master", take(leaf.master), spec.shape),
            ("mu", take(leaf.mu), spec.shape),
            ("nu", take(leaf.nu), spec.shape),
            *sums,
            ("steps", take(leaf.steps), (*spec.stack, spec.n)),
            ("before", channels + part.first, (*spec.stack, spec.k)),
        ):
            # Nothing empty: nobody asks for it, and GPUs have none in host memory.
            on_devices = [
                _beside(x.reshape(shape), device) if x.size else None for device in part.devices
            ]
            pieces.setdefault(name, []).append(on_devices)
    # What a device's host memory cannot alias is still being copied.
    jax.block_until_ready(pieces)
    columns = {name: by_leaf(parts, found) for name, found in pieces.items()}
    return [
        {
            name: assemble(columns[name][i], shape, sharding)
            for name, (shape, _, sharding) in of_leaf.items()
        }
        for i, of_leaf in enumerate(arrays)
    ]


def _piece(tree: Mapping[str, Any], name: str, part: Part, spec: LeafSpec) -> np.ndarray:
    """What belongs to a part of a leaf's restored array, which may lie anywhere."""
    index = part.index
    if name not in WIDE:
        assert part.spec.axis is not None
        channels = index[part.spec.axis]
        if name == "before":
            # Each piece of the channel axis has its share of them, in order.
            channels = slice(channels.start * spec.k // spec.n, channels.stop * spec.k // spec.n)
        index = (*index[: len(part.spec.stack)], channels)
    x = tree[name]
    piece = piece_of(x, index) if isinstance(x, jax.Array) else None
    if piece is not None:
        return piece
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)[index]
    raise ValueError(
        f"expected this process's part {part.index} of {name} of {part.spec.name} in its memory, "
        f"got an array on {x.sharding}. Restore with `abstract_engine_state(opt_state)` as the "
        "template."
    )


def resume_half(
    half: HostHalf,
    parts: Sequence[Part],
    specs: Sequence[LeafSpec],
    leaves: Sequence[Mapping[str, Any]],
    counts: Counts,
) -> None:
    """Puts what was saved into a host half that is new, a part at a time.

    Raises:
        ValueError: If channels cannot be on the devices of now.
    """
    for leaf, part in zip(half.leaves, parts, strict=True):
        if leaf.channels.size and not 0 <= leaf.channels.min() <= leaf.channels.max() < part.spec.n:
            raise ValueError(
                f"expected each device to have its share of the selected channels of "
                f"{part.spec.name}, got a selection that was made over fewer devices. Resume where "
                "no more devices divide its channel axis than in the saved run."
            )

    def arrays(part: Part) -> dict[str, np.ndarray]:
        of_leaf = leaves[part.leaf]
        names = ["master", "mu", "nu", "steps"]
        if counts.counted and "total" in of_leaf:
            names.append("total")
        return {name: _piece(of_leaf, name, part, specs[part.leaf]) for name in names}

    half.resume(
        map(arrays, parts),
        counted=counts.counted,
        windows=counts.windows,
        scalars=counts.scalars,
        update_scalars=counts.update_scalars,
    )


def channels_before(
    parts: Sequence[Part], specs: Sequence[LeafSpec], leaves: Sequence[Mapping[str, Any]]
) -> list[np.ndarray]:
    """Of each part the channels that were selected while the pending update's window was open."""
    return [
        _piece(leaves[part.leaf], "before", part, specs[part.leaf])
        if part.spec.k
        else np.zeros((*part.spec.stack, 0), np.int32)
        for part in parts
    ]


def check_resumed(saved: Any, state: ZenFlowState) -> None:
    """Refuses an engine state of other leaves or options, naming the first difference."""
    expected = abstract_engine_state(state)
    # Options first: others have other arrays, too.
    options = saved.get("options") if isinstance(saved, Mapping) else None
    if isinstance(options, Mapping) and options.keys() == expected["options"].keys():
        _check_options(options, expected["options"], _specs(state))
    counts = saved.get("counts") if isinstance(saved, Mapping) else None
    if isinstance(counts, Mapping) and "run" in counts:
        raise ValueError(
            "expected an `engine_state` that says of which run it is, got one of a version of "
            "zenflow_jax that did not write that yet. Finish its run with that version, or begin a "
            "new one with its parameters: `tx.init(params)` and an engine without `engine_state`."
        )
    if jax.tree.structure(saved) != jax.tree.structure(expected):
        raise ValueError(
            "expected `engine_state` with the structure of `abstract_engine_state(opt_state)`, got "
            f"{_first_words(jax.tree.structure(saved))}. Pass what `engine.state()` returned for a "
            "run with the same parameters and options."
        )
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(saved), jax.tree.leaves(expected), strict=True
    ):
        if tuple(x.shape) != tuple(y.shape) or x.dtype != y.dtype:
            raise ValueError(
                f"expected {y.dtype} {tuple(y.shape)} at {jax.tree_util.keystr(path)} of "
                f"`engine_state`, got {x.dtype} {tuple(x.shape)}. {_MAY_CHANGE}"
            )


def other_moment(saved: Any, state: ZenFlowState) -> str | None:
    """What says that an engine state is not of the moment, or the run, of `state`; or None."""
    step, ticket = int(saved["counts"]["step"]), int(saved["counts"]["ticket"])
    given = int(read(state.step))
    if (given, int(read(state.ticket))) == (step, ticket):
        return None
    return (
        "expected the `opt_state` that `exchange` or `flush` returned when the engine's state was "
        f"taken, after step {step}, got one after step {given}"
        f"{' of another run' if given == step else ''}. Save and restore parameters, optimizer "
        "state and engine state together."
    )


_MAY_CHANGE = (
    "A resumed run needs the parameters, `topk_ratio`, `channel_axis`, `resident`, `mask`, "
    "intervals, warm-up, `overlap_step` and `accumulate` of the saved one. Learning rate, betas, "
    "eps, weight decay and `max_grad_norm` may be others, and so may devices, processes, "
    "`partition_replicated`, `host_kernel` and `threads`."
)


def _check_options(
    saved: Mapping[str, Any], expected: Mapping[str, Any], specs: Sequence[LeafSpec]
) -> None:
    for name, value in expected.items():
        old, new = np.asarray(saved[name]), np.asarray(value)
        if name != "leaves":
            if old.shape != new.shape or np.any(old != new):
                raise ValueError(
                    f"expected `{name}` as in the saved run, {_in_words(old)}, got "
                    f"{_in_words(new)}. {_MAY_CHANGE}"
                )
            continue
        if len(old) != len(new):
            raise ValueError(
                f"expected parameters with {len(old)} leaves, as in the saved run, got {len(new)}. "
                f"{_MAY_CHANGE}"
            )
        for spec, before, now in zip(specs, old.tolist(), new.tolist(), strict=True):
            words = ("channel axis", "number of selected channels", "weight decay")
            for word, x, y in zip(words, before, now, strict=True):
                if x != y:
                    raise ValueError(
                        f"expected the {word} of {spec.name} as in the saved run, {x}, got {y}. "
                        f"{_MAY_CHANGE}"
                    )


def _in_words(option: np.ndarray) -> str:
    if option.shape == ():
        return str(option.item())
    number, rule, share = option.tolist()
    return f"{number:g}" + ("" if rule == 0 else f" (rule {rule:g}, share {share:g})")


def _specs(state: ZenFlowState) -> list[LeafSpec]:
    return [leaf.spec for leaf in state.leaves]


def _beside(x: np.ndarray, device: Any) -> jax.Array:
    """In host memory beside the device; on a CPU `x` itself, so nobody else may have it."""
    return jax.device_put(x, SingleDeviceSharding(device, memory_kind=HOST))


def _first_words(x: Any) -> str:
    text = str(x)
    return text if len(text) < 200 else f"{text[:200]}..."
