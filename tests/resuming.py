"""Runs that are saved at some step and go on in new objects."""

import copy
from pathlib import Path
from typing import Any

import jax
import numpy as np

import zenflow_jax
from tests import runs
from tests.runs import Plan, Settings, Training
from zenflow_jax._checkpoint.stored import StoredArray, read_engine_state

# Windows in turn, a warm-up, selections, a skipped step, and an early end of a window.
SETTINGS = Settings(
    topk_ratio=0.3,
    update_interval=4,
    select_interval=8,
    full_warm_up_rounds=2,
    weight_decay=0.1,
    max_grad_norm=5.0,
    provisional_share=0.5,
)
PLAN = Plan(19, bad=(8,), flush_at=(13,))
KERNEL = {"host_kernel": "numpy", "threads": 1}


def copied(tree: Any) -> Any:
    """Arrays that share nothing with those of the tree, placed alike."""
    return jax.tree.map(
        lambda x: jax.device_put(np.array(x), x.sharding) if isinstance(x, jax.Array) else x.copy(),
        tree,
    )


def saved(training: Training) -> Any:
    """Parameters, optimizer state and engine state."""
    return copied((training.params, training.state, training.engine.state()))


def resumed(training: Training, tree: Any, **engine: Any) -> Training:
    """A training that goes on from what was saved, with another engine."""
    new = copy.copy(training)
    new.params, new.state, engine_state = tree
    new.engine = zenflow_jax.HostEngine(
        new.params, new.state, engine_state=engine_state, **{**KERNEL, **engine}
    )
    return new


def go(training: Training, plan: Plan, until: int) -> None:
    """Follows a plan up to a step."""
    while training.t < until:
        t = training.t + 1
        training.step(bad=t in plan.bad)
        training.exchange()
        if t in plan.flush_at:
            training.flush()


def end(training: Training) -> Any:
    """Parameters and state at the end, without the token that each engine has of its own."""
    training.flush()
    return training.params, training.state._replace(token=None)


def without_tokens(tree: Any) -> Any:
    """What `saved` gave, without what each engine in a process has of its own."""
    params, state, engine_state = tree
    counts = {name: x for name, x in engine_state["counts"].items() if name != "token"}
    return params, state._replace(token=None), engine_state | {"counts": counts}


def counted(training: Training) -> dict[str, Any]:
    """What must go on where the saved run was."""
    stats = training.engine.stats
    names = ("steps", "skipped_steps", "windows", "window_lengths", "reselections", "kept_share")
    return {name: getattr(stats, name) for name in names}


def fail_elsewhere(engine: Any) -> None:
    """As if another process had failed, and this one's worker has ended with that."""
    engine._worker.fail("process 1 failed: the memory is gone")
    engine._worker._thread.join(60)
    assert not engine._worker._thread.is_alive()


def assert_saved(folder: Path, expected: dict) -> None:
    """What was written is what `engine.state()` gave at the same moment."""
    found = read_engine_state(folder)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    runs.assert_same_bits(
        (found["counts"], found["options"]), (expected["counts"], expected["options"])
    )
    counted = 0
    for mine, like in zip(found["leaves"], expected["leaves"], strict=True):
        for name, x in mine.items():
            assert isinstance(x, StoredArray)
            assert (x.shape, x.dtype) == (like[name].shape, like[name].dtype)
            if name != "total":
                runs.assert_same_bits(np.asarray(x), np.asarray(like[name]))
                continue
            for start, piece in x.pieces.items():
                place = tuple(slice(a, a + n) for a, n in zip(start, piece.shape, strict=True))
                runs.assert_same_bits(x[place], np.asarray(like[name])[place])
                counted += piece.shape[0] * piece.shape[1]
    assert (counted > 0) == bool(np.any(expected["counts"]["counted"]) and "total" in mine)
