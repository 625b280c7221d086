"""Leaves are identified by their paths; a call may pass a part or all of a model's state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import zenflow_jax
from tests import comparisons

DEVICE = jax.devices()[0]
TX = zenflow_jax.zenflow(1e-2, topk_ratio=0.25, update_interval=1)


class Model(nnx.Module):
    """A model with statistics and random state between the parameters, which look like them."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])


def params_of(model):
    return nnx.state(model, nnx.Param)


@nnx.jit
def step_nnx(model, optimizer):
    optimizer.update(model, jax.tree.map(lambda p: jnp.sin(3 * p), params_of(model)))


def test_functions_and_trees_of_leaves_match_an_nnx_model_in_init_and_in_update():
    model = Model(nnx.Rngs(0))
    decayed = jax.tree.map(lambda p: p.ndim > 1, params_of(model))  # `nnx.Param`s of bools
    tx = zenflow_jax.zenflow(
        1e-2,
        lr_scale=lambda path, _: float(path[-1].key != "kernel"),
        resident=lambda path, _: path[-1].key == "kernel",
        mask=decayed,
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    before = nnx.to_pure_dict(params_of(model))
    step_nnx(model, optimizer)
    after = nnx.to_pure_dict(params_of(model))
    for i in range(2):
        comparisons.assert_same_bits(after["layers"][i]["kernel"], before["layers"][i]["kernel"])
    assert all(leaf.spec.resident for leaf in zenflow_jax.find_state(optimizer.opt_state).leaves)
    scales = jax.tree.map(lambda p: 0.5, params_of(model))
    (*_, last) = zenflow_jax.zenflow(1e-2, lr_scale=scales).init(params_of(model)).leaves
    assert last.spec.lr_scale == 0.5


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


W, V = jnp.ones((8, 3)), jnp.zeros((8, 3))


def test_leaves_with_other_paths_are_rejected_by_name():
    made, passed = jax.device_put((Pair(W, V), {"first": W, "second": V}), DEVICE)
    state = TX.init(made)
    with zenflow_jax.HostEngine(made, state, host_kernel="numpy") as engine:
        for call in (
            lambda: zenflow_jax.HostEngine(passed, state),
            lambda: engine.flush(passed, state),
            lambda: zenflow_jax.master_params(passed, state, engine),
            # The engine also rejects them between two boundaries, before any change.
            lambda: engine.exchange(passed, TX.update(made, state, made)[1]),
        ):
            with pytest.raises(ValueError, match=r"`params` lacks \.first, \.second"):
                call()


def test_trained_leaves_are_found_among_others_and_in_different_containers():
    made = jax.device_put({"w": (W, V), "b": jnp.zeros(3)}, DEVICE)
    passed = {"b": made["b"], "w": list(made["w"])}
    # Frozen leaves come before, between and after the trained leaves, and have their shape.
    frozen = {"a": W, "r": "base", "u": np.ones((8, 3)), "z": jax.random.key(0)}
    ends = []
    for first, second, last in (
        (made, made, made),
        (passed | frozen, made, passed),
        (made, passed | frozen, made | frozen),
    ):
        state = TX.init(made)
        with zenflow_jax.HostEngine(first, state, host_kernel="numpy") as engine:
            updates, state = TX.update(made, state, made)
            new, state = engine.exchange(second, state)
            assert jax.tree.structure(new) == jax.tree.structure(second)
            assert all(new[name] is x for name, x in frozen.items() if name in second)
            masters = zenflow_jax.master_params(second, state, engine)
            assert masters.keys() >= made.keys()
            new, state = engine.flush(last | {name: new[name] for name in made}, state)
            assert all(new[name] is x for name, x in frozen.items() if name in last)
            ends.append(jax.tree.leaves({name: new[name] for name in made}))
    assert (np.asarray(ends[0][1])[2:] != 1).all()
    for other in ends[1:]:
        comparisons.assert_same_bits(other, ends[0])
