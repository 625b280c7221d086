"""Runs that are saved by orbax in mid-window, and go on on other devices."""

import functools
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import zenflow_jax
from tests.meshes import LEAVES, STALE
from tests.runs import Plan, Training

PLAN = Plan(17, bad=(12,))
SAVED_AT = 11  # with an update on its way, and two steps in the open window

# NumPy, as wherever the kernel is not what is tested: in a fresh checkout each process would
# compile Numba's, which takes longer than everything else here. Both give the same bits.
ENGINE = {"host_kernel": "numpy", "threads": 1}
HERE = functools.partial(Training, LEAVES, STALE, donate=True, **ENGINE)


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def save(training: Training, folder: Path) -> None:
    engine_state = training.engine.state()
    tree = {"params": training.params, "opt_state": training.state, "engine": engine_state}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
        checkpointer.wait_until_finished()


def resume(training: Training, folder: Path) -> None:
    """A fresh training goes on from there."""
    training.engine.close()
    template = {
        "params": abstract(training.params),
        "opt_state": abstract(training.state),
        "engine": zenflow_jax.abstract_engine_state(training.state),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(folder, template)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(template), strict=True):
        if isinstance(y, jax.ShapeDtypeStruct):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            assert x.sharding.memory_kind == y.sharding.memory_kind
    training.params, training.state = found["params"], found["opt_state"]
    training.engine = zenflow_jax.HostEngine(
        training.params, training.state, engine_state=found["engine"], **ENGINE
    )
    training.t = int(training.state.step)


def follow(training: Training, until: int) -> None:
    while training.t < until:
        training.step(bad=training.t + 1 in PLAN.bad)
        training.exchange()
