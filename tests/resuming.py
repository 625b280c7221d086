"""Runs that are saved at some step and resumed with new objects, or on other devices."""

import copy
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import zenflow_jax
from tests import comparisons, runs
from tests.runs import Plan, Training
from zenflow_jax._version import LAYOUT_NAME

SETTINGS = runs.EVERYTHING
# All steps in one group's window are skipped, which leaves an empty update pending after step 11.
PLAN = Plan(19, bad=(8, 9, 10, 11), flush_at=(13,))


def copied(tree: Any) -> Any:
    """Returns a deep copy of the tree, placed like it."""
    return jax.tree.map(
        lambda x: jax.device_put(np.array(x), x.sharding) if isinstance(x, jax.Array) else x.copy(),
        tree,
    )


def put_by_name(saved: Any, fresh: Any) -> Any:
    """Places a tree of NumPy arrays like a fresh tree, as in docs/checkpoints.md."""
    by_name = {jax.tree_util.keystr(k): x for k, x in jax.tree_util.tree_leaves_with_path(saved)}
    return jax.tree_util.tree_map_with_path(
        lambda k, like: jax.device_put(by_name[jax.tree_util.keystr(k)], like.sharding), fresh
    )


def saved(training: Training) -> Any:
    """Returns copies of parameters, optimizer state and engine state."""
    return copied((training.params, training.state, training.engine.state()))


def resumed(training: Training, tree: Any, **engine: Any) -> Training:
    """Returns a training that resumes from saved trees, with another engine."""
    new = copy.copy(training)
    new.engine, new.engine_options = None, {**runs.KERNEL, **engine}
    new.params, new.state, engine_state = tree
    new.renew(engine_state=engine_state)
    return new


def go(training: Training, plan: Plan, until: int) -> None:
    """Follows a plan up to a step."""
    training.go(until - training.t, plan)


def end(training: Training) -> Any:
    """Returns the final parameters and state, without the engine's own token."""
    training.flush()
    return training.params, training.state._replace(token=None)


def run_of(engine_state: Any) -> dict[str, Any]:
    """Returns the run state in an engine's state, and its options."""
    return json.loads(bytes(np.asarray(engine_state[LAYOUT_NAME])))


def without_tokens(tree: Any) -> Any:
    """Returns trees from `saved` without the tokens, which differ between engines."""
    params, state, engine_state = tree
    run = json.dumps(run_of(engine_state) | {"token": None})
    run = np.frombuffer(run.encode(), np.uint8)
    return params, state._replace(token=None), (engine_state["leaves"], run)


def counted(training: Training) -> dict[str, Any]:
    """Returns the counts that a resumed run must continue."""
    stats = training.engine.stats
    names = ("steps", "skipped_steps", "windows", "window_lengths", "reselections", "kept_share")
    return {name: getattr(stats, name) for name in names}


def save_by_orbax(training: Training, folder: Path, *, until: int = 0) -> Path:
    """Saves a run, which continues during the write; returns the engine's folder."""
    trees = {"params": training.params, "opt_state": training.state}
    items = {name: ocp.args.StandardSave(x) for name, x in trees.items()}
    step = training.t
    with ocp.CheckpointManager(folder) as manager:
        engine = zenflow_jax.EngineSave(training.engine)
        manager.save(step, args=ocp.args.Composite(engine=engine, **items))
        go(training, PLAN, until)
        manager.wait_until_finished()
    return folder / str(step) / "engine"


def resume_by_orbax(training: Training, folder: Path, **engine: Any) -> Any:
    """Resumes in a fresh training; returns the result of `EngineRestore`."""
    trees = {"params": training.params, "opt_state": training.state}
    template = jax.tree.map(ocp.utils.to_shape_dtype_struct, trees)
    items = {name: ocp.args.StandardRestore(x) for name, x in template.items()}
    with ocp.CheckpointManager(folder) as manager:
        args = ocp.args.Composite(engine=zenflow_jax.EngineRestore(), **items)
        restored = manager.restore(manager.latest_step(), args=args)
    training.params, training.state = restored.params, restored.opt_state
    training.renew(engine_state=restored.engine, **engine)
    return restored.engine


def read_engine_state(folder: Path) -> Any:
    return zenflow_jax.EngineCheckpointHandler().restore(folder)


def assert_saved(folder: Path, expected: dict) -> None:
    """Checks that the written state equals `engine.state()` at the same moment."""
    written = read_engine_state(folder)
    assert jax.tree.structure(written) == jax.tree.structure(expected)
    comparisons.assert_same_bits(written[LAYOUT_NAME], expected[LAYOUT_NAME])
    counted = 0
    for leaf, like in zip(written["leaves"], expected["leaves"], strict=True):
        for name, x in leaf.items():
            assert (x.shape, x.dtype) == (like[name].shape, like[name].dtype)
            if name != "total":
                comparisons.assert_same_bits(np.asarray(x), np.asarray(like[name]))
                continue
            for start, piece in x.pieces.items():
                place = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                comparisons.assert_same_bits(x[place], np.asarray(like[name])[place])
                counted += piece.shape[0] * piece.shape[1]
    assert (counted > 0) == bool(any(run_of(expected)["counted"]) and "total" in leaf)
