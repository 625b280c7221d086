"""Runs that are saved by orbax in mid-window, and go on on other devices."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import zenflow_jax
from tests import comparisons
from tests.meshes import LEAVES, STALE
from tests.runs import Plan, Training

PLAN = Plan(17, bad=(12,))
SAVED_AT = 9  # with an update of one leaf on its way, and a step in the other's open window

# NumPy, as wherever the kernel is not what is tested: in a fresh checkout each process would
# compile Numba's, which takes longer than everything else here. Both give the same bits.
ENGINE = {"host_kernel": "numpy", "threads": 1}
HERE = functools.partial(Training, LEAVES, STALE, donate=True, **ENGINE)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save(training: Training, folder: Path) -> None:
    """Both ways: the engine's state with the rest, and streamed into a folder of its own."""
    engine_state = training.engine.state()
    tree = {"params": training.params, "opt_state": training.state, "engine": engine_state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
        checkpointer.wait_until_finished()
    with ocp.AsyncCheckpointer(zenflow_jax.EngineCheckpointHandler()) as checkpointer:
        checkpointer.save(_streamed(folder), args=zenflow_jax.EngineSave(training.engine))
        checkpointer.wait_until_finished()


def resume(training: Training, folder: Path, **engine: Any) -> Any:
    """A fresh training goes on from there; both ways have the same for its devices.

    Returns:
        What `EngineRestore` gave.
    """
    training.engine.close()
    template = {
        "params": abstract(training.params),
        "opt_state": abstract(training.state),
        "engine": zenflow_jax.abstract_engine_state(training.state),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder, template)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        if isinstance(y, jax.ShapeDtypeStruct):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert x.sharding.memory_kind == y.sharding.memory_kind
    with ocp.Checkpointer(zenflow_jax.EngineCheckpointHandler()) as checkpointer:
        streamed = checkpointer.restore(_streamed(folder), args=zenflow_jax.EngineRestore())
    assert_same_state(restored["engine"], streamed)
    training.params, training.state = restored["params"], restored["opt_state"]
    training.engine = zenflow_jax.HostEngine(
        training.params, training.state, engine_state=streamed, **ENGINE, **engine
    )
    training.t = int(training.state.step)
    return streamed


def assert_same_state(placed: Any, streamed: Any) -> None:
    """This process's parts of a state are those of the streamed one."""
    comparisons.assert_same_bits(
        (placed["counts"], placed["options"]), (streamed["counts"], streamed["options"])
    )
    for shards, stored in zip(placed["leaves"], streamed["leaves"], strict=True):
        assert shards.keys() == stored.keys()
        for name in shards.keys() - {"total"}:  # of which a window without a step has none
            for shard in shards[name].addressable_shards:
                index = [
                    s.indices(n)[:2] for s, n in zip(shard.index, stored[name].shape, strict=True)
                ]
                expected = stored[name][tuple(slice(*ends) for ends in index)]
                np.testing.assert_array_equal(np.asarray(shard.data), expected)


def _streamed(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-engine")


def follow(training: Training, until: int) -> None:
    while training.t < until:
        training.step(bad=training.t + 1 in PLAN.bad)
        training.exchange()
