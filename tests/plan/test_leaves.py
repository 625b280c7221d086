"""Leaves are known by their paths: the trained part, all parameters and a model's whole state are
one run's, in any call, and what is not the same leaf is refused by name.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zenflow_jax
from tests import comparisons

STEPS = 5
DEVICE = jax.devices()[0]
TX = zenflow_jax.zenflow(1e-2, topk_ratio=0.25, update_interval=2)
#: Frozen leaves stand before, between and behind the trained ones, and have their shape.
FROZEN = ("a_base", "n_base", "z_base")
TRAINED = ("lora", "more")


def start():
    keys = jax.random.split(jax.random.key(0), 5)
    tree = {
        name: {"w": jax.random.normal(key, (8, 3))}
        for name, key in zip(sorted((*FROZEN, *TRAINED)), keys, strict=True)
    }
    return jax.device_put(tree, DEVICE)


def of(names, tree):
    return {name: tree[name] for name in names}


@functools.cache
def program():
    """A step on the trained part alone, compiled once."""

    @jax.jit
    def step(params, state, t):
        gradients = jax.tree.map(lambda p: jnp.sin(3 * p + t.astype(jnp.float32)), params)
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def train(made_with, exchanged, flushed):
    """The whole tree after some steps on its trained part, by an engine that gets other parts."""
    whole = start()
    state = TX.init(of(TRAINED, whole))
    with zenflow_jax.HostEngine(of(made_with, whole), state, host_kernel="numpy") as engine:
        for t in range(STEPS):
            trained, state = program()(of(TRAINED, whole), state, jnp.int32(t))
            whole |= trained
            new, state = engine.exchange(of(exchanged, whole), state)
            whole |= new
        masters = zenflow_jax.master_params(of(exchanged, whole), state, engine)
        assert masters.keys() == set(exchanged)
        new, state = engine.flush(of(flushed, whole), state)
        whole |= new
    return whole


@functools.cache
def expected():
    return train(TRAINED, TRAINED, TRAINED)


ALL = (*FROZEN, *TRAINED)
FEWER = (FROZEN[0], *TRAINED)


@pytest.mark.parametrize(
    ("made_with", "exchanged", "flushed"),
    [
        (TRAINED, ALL, ALL),
        (ALL, TRAINED, ALL),
        (ALL, FEWER, TRAINED),
        (FEWER, ALL, FEWER),
    ],
    ids=["part, all", "all, part", "all, fewer, part", "fewer, all"],
)
def test_every_call_may_have_another_part_of_the_parameters(made_with, exchanged, flushed):
    actual = train(made_with, exchanged, flushed)
    comparisons.assert_same_bits(actual, expected())
    comparisons.assert_same_bits(of(FROZEN, actual), of(FROZEN, start()))


class Model(nnx.Module):
    """Statistics and random state lie between the parameters, and look like them."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])


@nnx.jit
def step_nnx(model, optimizer):
    optimizer.update(model, jax.tree.map(lambda p: jnp.sin(3 * p), nnx.state(model, nnx.Param)))


def train_nnx(made_with, exchanged):
    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), DEVICE))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    statistics = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))
    state = optimizer.opt_state
    with zenflow_jax.HostEngine(made_with(model), state, host_kernel="numpy") as engine:
        for _ in range(STEPS):
            step_nnx(model, optimizer)
            params, new = engine.exchange(exchanged(model), nnx.as_pure(optimizer.opt_state))
            nnx.update(model, params)
            nnx.update(optimizer.opt_state, nnx.state(new))
        engine.flush_nnx(model, optimizer)
    comparisons.assert_same_bits(nnx.to_pure_dict(nnx.state(model, nnx.BatchStat)), statistics)
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def params_of(model):
    return nnx.state(model, nnx.Param)


@pytest.mark.slow
def test_all_of_an_nnx_model_or_its_parameters_alone_are_the_same_run():
    plain = train_nnx(params_of, params_of)
    comparisons.assert_same_bits(train_nnx(nnx.state, params_of), plain)
    comparisons.assert_same_bits(train_nnx(params_of, nnx.state), plain)
    comparisons.assert_same_bits(
        train_nnx(nnx.state, lambda model: nnx.as_pure(params_of(model))), plain
    )


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


W, V = jnp.ones((8, 3)), jnp.zeros((8, 3))


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        (
            {"kernel": W, "scale": V},
            {"alpha": W, "kernel": V},
            ["['scale']", "['alpha']", "without it", "nnx.state(model)"],
        ),
        ({"b": W, "w": V}, {"model": {"b": W, "w": V}}, ["['b']", "['model']['b']"]),
        (Pair(W, V), {"first": W, "second": V}, [".first", "['first']"]),
        ([W, V], {"0": W, "1": V}, ["[0]", "['0']"]),
        ({"w": [W, V]}, {"w": [W]}, ["['w'][1]", "got 1 leaves"]),
    ],
    ids=["renamed", "deeper", "another kind", "numbers as words", "one less"],
)
def test_leaves_of_other_paths_are_refused_with_both(made, given, words):
    made, given = jax.device_put((made, given), DEVICE)
    state = TX.init(made)
    with zenflow_jax.HostEngine(made, state, host_kernel="numpy") as engine:
        for call in (
            lambda: zenflow_jax.HostEngine(given, state),
            lambda: engine.flush(given, state),
            lambda: zenflow_jax.master_params(given, state, engine),
            # Between two boundaries, too, before anything is done.
            lambda: engine.exchange(given, TX.update(made, state, made)[1]),
        ):
            with pytest.raises(ValueError, match="expected `params` with the leaf") as caught:
                call()
            assert not [word for word in words if word not in str(caught.value)], caught.value


@jax.tree_util.register_pytree_with_keys_class
class Twins(list):
    """A container of a user's own, all of whose leaves have one path."""

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), leaf) for leaf in self], None

    def tree_flatten(self):
        return list(self), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(leaves)


def test_leaves_of_one_path_are_told_apart_by_their_order_or_refused():
    made = jax.device_put(Twins([jnp.ones((8, 3)), jnp.zeros((8, 3)), 3 * jnp.ones(3)]), DEVICE)
    state = TX.init(made)
    with zenflow_jax.HostEngine(made, state, host_kernel="numpy") as engine:
        updates, state = TX.update(made, state, made)
        params, state = engine.exchange(optax.apply_updates(made, updates), state)
        with pytest.raises(ValueError, match=r"expected 3 leaves at \.w,.*got 2: leaves of"):
            engine.flush(Twins(made[:2]), state)
        # Each had the gradient that is its own value: down where that was 1, untouched where 0.
        params, state = engine.flush(params, state)
    assert (params[0] < 0.995).all()
    comparisons.assert_same_bits(params[1], made[1])


def test_a_list_for_a_tuple_and_a_dict_in_another_order_are_the_same_leaves():
    made = jax.device_put({"w": (W, V), "b": jnp.zeros(3)}, DEVICE)
    given = {"b": made["b"], "w": list(made["w"])}
    state = TX.init(made)
    with zenflow_jax.HostEngine(made, state, host_kernel="numpy") as engine:
        _, state = TX.update(made, state, made)
        new, state = engine.exchange(given, state)
        assert jax.tree.structure(new) == jax.tree.structure(given)
        new, state = engine.flush(made, state)
        assert jax.tree.structure(new) == jax.tree.structure(made)
    assert (np.asarray(new["w"][0])[2:] != 1).all()


def test_what_is_no_leaf_of_the_state_may_be_anything():
    made = jax.device_put({"w": W}, DEVICE)
    state = TX.init(made)
    whole = made | {"name": "base", "table": np.ones((8, 3)), "key": jax.random.key(0)}
    with zenflow_jax.HostEngine(whole, state, host_kernel="numpy") as engine:
        _, state = TX.update(made, state, made)
        new, state = engine.exchange(whole, state)
        new, state = engine.flush(new, state)
    assert {k: new[k] is whole[k] for k in whole} == {
        "w": False,
        "name": True,
        "table": True,
        "key": True,
    }
