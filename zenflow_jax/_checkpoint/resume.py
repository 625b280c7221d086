"""Puts an engine's saved state back into the host half, if it fits the run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.same_run import what_differs
from zenflow_jax._checkpoint.stream import StoredArray
from zenflow_jax._checkpoint.tree import (
    Counts,
    abstract_engine_state,
    counts_from_tree,
    place_of,
)
from zenflow_jax._device.memory import read
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, Part, piece_of
from zenflow_jax._host.state import HostState
from zenflow_jax._plan.leaf import LeafSpec


def _piece(tree: Mapping[str, Any], name: str, part: Part, spec: LeafSpec) -> np.ndarray:
    """A part's piece of a leaf's restored array, which may lie anywhere."""
    index = place_of(name, part, spec)
    x = tree[name]
    if isinstance(x, StoredArray):
        return x[index]
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


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What an engine continues from."""

    counts: Counts
    before: list[np.ndarray]  # each part's channels selected in the pending update's window
    refusal: str | None  # why it is not of the run and moment of the rest; None if it is


def resume(
    engine_state: Any,
    host: HostState,
    offloaded: OffloadedLeaves,
    found: Sequence[jax.Array],
    state: ZenFlowState,
) -> Resumed:
    """Puts a saved state into a new host state, and compares it with parameters and device state.

    Args:
        engine_state: A saved state that passes `check_resumed`.
        host: New.
        offloaded: The leaves whose arrays `host` has.
        found: The fingerprints of the parameters of all leaves.
        state: The device's state.

    Raises:
        ValueError: If channels cannot be on the devices of now.
    """
    counts = counts_from_tree(engine_state["counts"])
    parts, specs = offloaded.parts, offloaded.specs
    before = channels_before(parts, specs, engine_state["leaves"])
    _resume_host(host, parts, specs, engine_state["leaves"], counts)
    refusal = other_moment(engine_state, state) or what_differs(
        found, counts.fingerprints, [leaf.spec for leaf in state.leaves]
    )
    return Resumed(counts, before, refusal)


def _resume_host(
    host: HostState,
    parts: Sequence[Part],
    specs: Sequence[LeafSpec],
    leaves: Sequence[Mapping[str, Any]],
    counts: Counts,
) -> None:
    """Puts saved arrays into a new host state, a part at a time.

    Raises:
        ValueError: If channels cannot be on the devices of now.
    """
    for leaf, part in zip(host.leaves, parts, strict=True):
        if leaf.channels.size and not 0 <= leaf.channels.min() <= leaf.channels.max() < part.spec.n:
            raise ValueError(
                f"expected each device to have its share of the selected channels of "
                f"{part.spec.name}, got a selection that was made over fewer devices. Resume where "
                "no more devices divide its channel axis than in the saved run."
            )

    def arrays(part: Part) -> dict[str, np.ndarray]:
        of_leaf = leaves[part.leaf]
        names = ["master", "mu", "nu", "steps"]
        if counts.counted[part.spec.group] and "total" in of_leaf:
            names.append("total")
        return {name: _piece(of_leaf, name, part, specs[part.leaf]) for name in names}

    host.resume(
        map(arrays, parts),
        counts.counted,
        closed=counts.windows,
        scalars=counts.scalars,
    )


def channels_before(
    parts: Sequence[Part], specs: Sequence[LeafSpec], leaves: Sequence[Mapping[str, Any]]
) -> list[np.ndarray]:
    """Each part's channels that were selected while the pending update's window was open."""
    return [
        _piece(leaves[part.leaf], "before", part, specs[part.leaf])
        if part.spec.k
        else np.zeros((*part.spec.stack, 0), np.int32)
        for part in parts
    ]


def check_resumed(saved: Any, state: ZenFlowState) -> None:
    """Refuses an engine state of other leaves or options, naming the first difference."""
    expected = abstract_engine_state(state)
    # Options first: with other options the arrays differ, too.
    options = saved.get("options") if isinstance(saved, Mapping) else None
    if isinstance(options, Mapping) and options.keys() == expected["options"].keys():
        specs = [leaf.spec for leaf in state.leaves]
        _check_options(options, expected["options"], specs)
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
    """Why an engine state is not of the moment, or the run, of `state`; None if it is."""
    step, token = int(saved["counts"]["step"]), int(saved["counts"]["token"])
    given = int(read(state.step))
    if (given, int(read(state.token))) == (step, token):
        return None
    return (
        "expected the `opt_state` that `exchange` or `flush` returned when the engine's state was "
        f"taken, after step {step}, got one after step {given}"
        f"{' of another run' if given == step else ''}. Save and restore parameters, optimizer "
        "state and engine state together."
    )


_MAY_CHANGE = (
    "A resumed run needs the parameters, `topk_ratio`, `channel_axis`, `resident`, `mask`, "
    "intervals, warm-up, `rolling`, `staleness`, `window_scaling` and `provisional_share` of the "
    "saved one, and `send_gradients` as it was if that is 'per_window'. Learning rate, betas, eps, "
    "weight decay and `max_grad_norm` may be others, and so may devices, processes, "
    "`partition_replicated`, `host_kernel`, `host_state` and `threads`. "
    "A mesh may divide the layers of a stack if that of the saved run did, and else not."
)


def _check_options(
    saved: Mapping[str, Any], expected: Mapping[str, Any], specs: Sequence[LeafSpec]
) -> None:
    for name, value in expected.items():
        old, new = np.asarray(saved[name]), np.asarray(value)
        if name == "groups":
            continue  # with the leaves, which come first
        if name != "leaves":
            if old.shape != new.shape or np.any(old != new):
                raise ValueError(
                    f"expected `{name}` as in the saved run, {_in_words(name, old)}, got "
                    f"{_in_words(name, new)}. {_MAY_CHANGE}"
                )
            continue
        if len(old) != len(new):
            raise ValueError(
                f"expected parameters with {len(old)} leaves, as in the saved run, got "
                f"{len(new)}. {_MAY_CHANGE}"
            )
        # How many ranges a leaf has only a mesh changes, where it divides the layers of a stack.
        words = ("channel axis", "number of selected channels", "weight decay", "number of ranges")
        ends = np.cumsum(new[:, 3])[:-1]
        then, now = (np.split(np.asarray(x["groups"]), ends) for x in (saved, expected))
        for i, spec in enumerate(specs):
            pairs = list(zip(words, old[i].tolist(), new[i].tolist(), strict=True))
            pairs += [("group", int(x), int(y)) for x, y in zip(then[i], now[i], strict=False)]
            for word, x, y in pairs:
                if x != y:
                    raise ValueError(
                        f"expected the {word} of {spec.name} as in the saved run, {x}, got {y}. "
                        f"{_MAY_CHANGE}"
                    )


#: What a negative number stands for.
_OTHERWISE = {
    "window_scaling": "None",
    "provisional_share": "None",
    "staleness": "the next boundary",
}


def _in_words(name: str, option: np.ndarray) -> str:
    if name == "send_gradients":
        return '"per_window"' if option else "another value"
    if option.shape == ():
        return _OTHERWISE[name] if name in _OTHERWISE and option < 0 else f"{option.item():g}"
    number, rule, share = option.tolist()
    return f"{number:g}" + ("" if rule == 0 else f" (rule {rule:g}, share {share:g})")


def _first_words(x: Any) -> str:
    text = str(x)
    return text if len(text) < 200 else f"{text[:200]}..."
