"""Restores an engine's saved state into the host half, if it fits the run.

Parameters, optimizer state and engine state must be from the same moment. Each engine draws a
number, which all processes in the run share, and which determines the tokens in the optimizer's and
the engine's state: if steps and tokens are equal, both are from the same moment. Parameters carry
no token, so the engine's state contains their checksum.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from zenflow_jax._checkpoint.tree import SUMS, arrays_of_leaves, decoded, options_of, place_of
from zenflow_jax._device.memory import read
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, Part
from zenflow_jax._exchange.progress import RunState
from zenflow_jax._exchange.updates import Updates
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.state import HostLeaf, HostState
from zenflow_jax._spec.checks import UnfitRunError
from zenflow_jax._version import LAYOUT_NAME


def resume_run(
    saved: PyTree,
    run: RunState,
    state: ZenFlowState,
    params: int,
    offloaded: OffloadedLeaves,
    worker: Worker,
    updates: Updates,
) -> None:
    """Resumes a saved run, with parameters that have this checksum."""
    if not offloaded.specs:
        return  # the whole state is in the optimizer state
    _check_same_run(run, int(read(state.step)), int(read(state.token)), params)
    _check_selection(worker.leaves())
    _resume_host(worker.host, run, saved["leaves"], offloaded)
    updates.resume(run.pending)


def _check_same_run(run: RunState, step: int, token: int, params: int) -> None:
    """Rejects optimizer state and parameters, by their checksum, from another moment."""
    if (run.step, run.token) != (step, token):
        problem = (
            f"`engine_state` was saved after step {run.step}, but `opt_state` after step "
            f"{step}{' of another run' if run.step == step else ''}"
        )
    elif run.params not in (0, params):
        problem = "`params` differ from those with which `engine_state` was saved"
    else:
        return
    raise ValueError(
        f"{problem}. Save and restore parameters, optimizer state and engine state together."
    )


def _check_selection(leaves: Sequence[HostLeaf]) -> None:
    """Rejects channels that were selected with fewer devices along their axis."""
    for leaf in leaves:
        channels = leaf.channels
        if channels.size and not 0 <= channels.min() <= channels.max() < leaf.spec.n:
            raise UnfitRunError(
                f"When the channels of {leaf.spec.name} were selected, its channel axis was split "
                "over fewer devices than now. Resume with at most as many devices along this axis."
            )


def _resume_host(
    host: HostState, run: RunState, leaves: Sequence[Mapping[str, Any]], offloaded: OffloadedLeaves
) -> None:
    """Copies saved arrays into a new host state's arrays, a part at a time."""
    # Arrays from files are lazy, and stay so.
    leaves = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, leaves)

    def arrays(part: Part) -> dict[str, np.ndarray]:
        spec, counted = offloaded.specs[part.leaf], run.counted[part.spec.group]
        names = [name for name in leaves[part.leaf] if counted or name not in SUMS]
        saved = {name: leaves[part.leaf][name][place_of(name, part, spec)] for name in names}
        if spec.k:
            saved["before"] = saved["before"] - part.first
        return saved

    host.resume(map(arrays, offloaded.parts), run.counted, closed=sum(run.window_lengths))


def check_resumed(saved: PyTree, state: ZenFlowState) -> RunState:
    """Returns the run state in an engine state; rejects another layout, other leaves or options."""
    names = dict(saved) if isinstance(saved, Mapping) else {}
    leaves = names.pop("leaves", None)
    if list(names) != [LAYOUT_NAME]:
        written = names.get("layout", names)  # to layout 3, the name was one level below
        raise UnfitRunError(
            f"This version reads {LAYOUT_NAME}, but `engine_state` has "
            f"{', '.join(map(str, written)) or 'none'}. Pass the result of `EngineRestore` or "
            "`state()`; continue another version's run with that version."
        )
    # Options come first, because different options also change the arrays.
    (run, old), new = decoded(names[LAYOUT_NAME], state), options_of(state)
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            raise UnfitRunError(
                f"This run differs from the saved run: {name} is {new.get(name)}, but was "
                f"{old.get(name)}. Resume with the saved run's parameters and options, and on a "
                "mesh that divides channels and layers alike; docs/checkpoints.md, "
                '"What may change", lists the rest.'
            )
    expected = arrays_of_leaves(state)
    # Otherwise a slice of a larger array would fit.
    shapes = [jax.tree.map(lambda x: (*x.shape, x.dtype), x) for x in (leaves, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "The arrays in `engine_state` differ from those in `abstract_engine_state(opt_state)`."
        )
    return run
