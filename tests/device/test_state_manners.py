"""What users of optax do with any state they do with this one, and it is what they expect."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import runs
from zenflow_jax import STATIC_ARGS, ZenFlowState, zenflow

MODES = pytest.mark.parametrize("offload", [True, False], ids=["engine", "in_graph"])


def first(offload: bool = True, **options) -> ZenFlowState:
    return zenflow(1e-2, topk_ratio=0.25, offload=offload, **options).init(runs.initial(runs.FEW))


@MODES
def test_optax_finds_and_sets_by_name_what_is_in_a_chain(offload):
    tx = optax.chain(optax.clip(1.0), zenflow(1e-2, topk_ratio=0.25, offload=offload))
    state = tx.init(runs.initial(runs.FEW))
    assert optax.tree.get(state, "step") is state[1].step
    assert optax.tree.get(state, "ZenFlowState") is state[1]
    assert optax.tree.get(state, "no such name") is None
    reached = {id(x) for _, x in optax.tree.get_all_with_path(state, "mu")}
    assert reached >= {id(leaf.mu) for leaf in state[1].leaves}
    new = optax.tree.set(state, skipped=jnp.int32(3))
    assert int(optax.tree.get(new, "skipped")) == 3
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_a_learning_rate_that_is_injected_is_found_by_name():
    factory = optax.inject_hyperparams(zenflow, static_args=STATIC_ARGS)
    with jax.numpy_dtype_promotion("standard"):  # optax is not strict-clean
        state = factory(learning_rate=3e-2).init({"w": jnp.ones((8, 4))})
    assert float(optax.tree.get(state, "learning_rate")) == np.float32(3e-2)


def _donated(state):
    jax.jit(lambda x: jax.tree.map(jnp.copy, x), donate_argnums=0)(state)
    return state


def _traced(state):
    texts = []
    jax.eval_shape(lambda x: texts.append(repr(x)) or x.step, state)
    return texts[0]


@MODES
@pytest.mark.parametrize(
    ("change", "step"),
    [
        (lambda state: state, "7"),
        (jax.device_get, "7"),
        (_donated, ""),
        (_traced, ""),
        (lambda state: jax.tree.map(nnx.Variable, state), ""),
        (lambda state: jax.tree.map(lambda x: x.sharding, state), ""),
        (lambda state: jax.eval_shape(lambda: state), ""),
    ],
    ids=["arrays", "numpy", "donated", "traced", "nnx", "shardings", "shapes"],
)
def test_a_state_prints_a_line_for_each_leaf_and_no_content(change, step, offload):
    state = first(offload)._replace(step=jnp.int32(7))
    head, static, *leaves, end = str(change(state)).splitlines()
    assert head.startswith(f"ZenFlowState(step={step}")
    assert "Schedule(window=4, " in static
    assert [line.strip() for line in leaves] == [
        "['bias'] float32[5], resident",
        "['columns'] bfloat16[4,10], 1 of 4 channels of axis 0",
        "['rows'] float32[12,5], 3 of 12 channels of axis 0",
    ]
    assert end == ")"
