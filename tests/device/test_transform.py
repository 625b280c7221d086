"""`zenflow()` as users of optax meet it: its state, what it emits, and every wrapper around it.

The arithmetic is held to `optax.adamw` and to the reference elsewhere; here a run inside a wrapper
is held to the same run without one.
"""

import dataclasses
import functools
import inspect
import re
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import zenflow_jax
from zenflow_jax import attach

# Float32 parameters up to 3 (a unit in the last place is 2.4e-7), the same operations compiled
# into another program, updates near 1e-2.
ATOL = 1e-6

DEVICE = jax.devices()[0]
STEPS = 5
LOW_PRECISION = ["bfloat16", "float16"]
DTYPES = ["float32", *LOW_PRECISION]
SETTINGS = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2, "offload": False}
# What each key of a run's parameters is: of "weight", 2 of 6 channels are selected.
SHAPES = {"bias": (3,), "weight": (6, 3)}


def schedule(count):
    return 1e-2 / (1.0 + 0.5 * count.astype(jnp.float32))


def make(learning_rate: Any = schedule, **options):
    return zenflow_jax.zenflow(learning_rate, **{**SETTINGS, **options})


def example_params(dtype: Any = "float32"):
    rng = np.random.default_rng(1)
    params = {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
    # Bound to a device as what a jitted step returns is, or the second step would compile anew.
    return jax.device_put(jax.tree.map(lambda p: jnp.asarray(p, dtype), params), DEVICE)


def gradients_at(step: int, dtype: Any = "float32"):
    rng = np.random.default_rng(100 + step)
    gradients = {
        # Channels of very different size, so that selections move.
        k: rng.normal(size=s).astype(np.float32) * np.exp(rng.normal(size=(*s[:-1], 1)))
        for k, s in SHAPES.items()
    }
    return jax.device_put(jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients), DEVICE)


def apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):  # a float32 update to a leaf of lower precision
        return optax.apply_updates(params, updates)


def train(tx, steps=STEPS, *, jit=True, params=None, gradients=gradients_at):
    """Parameters and state after some steps."""
    params = example_params() if params is None else params
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for t in range(1, steps + 1):
        with jax.numpy_dtype_promotion("standard"):  # optax's wrappers are not strict-clean
            updates, state = update(gradients(t), state, params)
        params = apply(params, updates)
    return params, state


PLAIN = make()  # one for all runs without a wrapper, so that they share a program


@functools.cache
def alone(steps=STEPS):
    """The run that wrapped ones are compared with."""
    return train(PLAIN, steps)[0]


def assert_close(actual, desired):
    for key in desired:
        a, b = (np.asarray(x[key], np.float32) for x in (actual, desired))
        np.testing.assert_allclose(a, b, rtol=0, atol=ATOL, err_msg=key)


def exchanged(state):
    """What an engine's exchange does to a state, as far as the next step can see."""
    return state._replace(token=jnp.zeros_like(state.token))


def describe(tree):
    """Everything about its arrays but the numbers."""
    return [
        (
            jax.tree_util.keystr(path),
            x.dtype.name,
            x.shape,
            x.weak_type,
            x.sharding,
            x.sharding.memory_kind,
            x.committed,
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


# --- inside optax's wrappers ----------------------------------------------------------------


def injected(learning_rate: Any = schedule, **options):
    factory = optax.inject_hyperparams(zenflow_jax.zenflow, static_args=zenflow_jax.STATIC_ARGS)
    return factory(learning_rate, **{**SETTINGS, **options})


# Each takes zenflow's options and gives a transformation that does the same as zenflow alone.
WRAPPERS = {
    "chain": lambda **o: optax.chain(optax.scale(4.0), optax.scale(0.25), make(**o)),
    "masked": lambda **o: optax.masked(make(**o), {"bias": True, "weight": True}),
    "partition": lambda **o: optax.partition(
        {"ours": make(**o), "frozen": optax.set_to_zero()}, {"bias": "ours", "weight": "ours"}
    ),
    "inject_hyperparams": injected,
    "apply_if_finite": lambda **o: optax.apply_if_finite(make(**o), 3),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_inside_a_wrapper_it_does_what_it_does_alone(wrapper):
    params, _ = train(WRAPPERS[wrapper]())
    assert_close(params, alone())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_engine_serves_it_inside_a_wrapper(wrapper):
    tx = WRAPPERS[wrapper](offload=True)
    params = example_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    with zenflow_jax.HostEngine(params, state, host_kernel="numpy", threads=1) as engine:
        for t in range(1, STEPS + 1):
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(gradients_at(t), state, params)
            params, state = engine.exchange(apply(params, updates), state)
        assert_close(params, alone())
        engine.flush(params, state)
    assert engine.stats.steps == STEPS


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_state_is_found_inside_a_wrapper(wrapper, offload):
    state = zenflow_jax.find_state(WRAPPERS[wrapper](offload=offload).init(example_params()))
    assert isinstance(state, zenflow_jax.ZenFlowState)
    assert state.offload is offload


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tree_map_params_reaches_the_state_inside_a_wrapper(wrapper, offload):
    tx = WRAPPERS[wrapper](offload=offload)
    state = tx.init(example_params())
    same = optax.tree_map_params(tx, lambda x: x, state)
    assert jax.tree.structure(same) == jax.tree.structure(state)

    marked = optax.tree_map_params(tx, lambda _: "params", state, transform_non_params=lambda _: 0)
    ours = zenflow_jax.find_state(marked)
    assert set(jax.tree.leaves(ours.leaves)) == {"params"}
    assert (ours.step, ours.skipped) == (0, 0)


def test_masked_leaves_the_other_leaves_alone():
    params, state = train(optax.masked(make(), {"bias": False, "weight": True}))
    np.testing.assert_allclose(params["weight"], alone()["weight"], rtol=0, atol=ATOL)
    expected = sum((gradients_at(t)["bias"] for t in range(1, STEPS + 1)), example_params()["bias"])
    np.testing.assert_allclose(params["bias"], expected, rtol=0, atol=ATOL)
    (leaf,) = zenflow_jax.find_state(state).leaves
    assert leaf.spec.name == "['weight']"


def test_partition_gives_each_group_its_own_optimizer():
    labels = {"bias": "sgd", "weight": "ours"}
    params, _ = train(optax.partition({"ours": make(), "sgd": optax.sgd(1e-2)}, labels))
    np.testing.assert_allclose(params["weight"], alone()["weight"], rtol=0, atol=ATOL)
    expected, _ = train(optax.sgd(1e-2))
    np.testing.assert_allclose(params["bias"], expected["bias"], rtol=0, atol=ATOL)


@pytest.mark.parametrize(
    "make_tx",
    [
        lambda tx: optax.masked(tx, {"bias": False, "weight": False}),
        lambda tx: optax.partition(
            {"ours": tx, "sgd": optax.sgd(1e-2)}, {"bias": "sgd", "weight": "sgd"}
        ),
    ],
    ids=["masked", "partition"],
)
def test_a_group_without_leaves_is_no_problem(make_tx):
    tx = make_tx(make(offload=True))
    params = example_params()
    state = tx.init(params)
    _, new = tx.update(gradients_at(1), state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("empty", [{}, (), {"none": None}], ids=str)
def test_parameters_without_leaves_keep_the_structure_of_the_state(empty, offload):
    tx = make(offload=offload)
    state = tx.init(empty)
    updates, new = tx.update(empty, state, empty)
    assert updates == empty
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize("start", [1e-2, jnp.float32(1e-2)], ids=["number", "array"])
def test_an_injected_learning_rate_may_be_set_between_steps(start):
    tx = injected(start)
    params = example_params()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(1, STEPS + 1):
        state.hyperparams["learning_rate"] = schedule(jnp.int32(t - 1))
        with jax.numpy_dtype_promotion("standard"):
            updates, state = update(gradients_at(t), state, params)
        params = apply(params, updates)
    assert_close(params, alone())


@pytest.mark.slow
def test_injected_hyperparameters_of_low_precision_leaves_are_kept_in_float32():
    # optax gives hyperparameters the parameters' dtype; bfloat16(0.999) is 1.
    params = example_params("bfloat16")
    factory = optax.inject_hyperparams(
        zenflow_jax.zenflow, zenflow_jax.STATIC_ARGS, hyperparam_dtype=jnp.float32
    )
    gradients = functools.partial(gradients_at, dtype="bfloat16")
    actual, _ = train(factory(schedule, **SETTINGS), 3, params=params, gradients=gradients)
    expected, _ = train(PLAIN, 3, params=params, gradients=gradients)
    for key in expected:
        np.testing.assert_array_equal(actual[key], expected[key])


def test_apply_if_finite_keeps_a_bad_step_from_being_counted():
    tx = optax.apply_if_finite(make(), 3)

    def with_a_bad_step(t):
        bad = jax.tree.map(lambda g: g * jnp.nan, gradients_at(t))
        return bad if t == 3 else gradients_at(t if t < 3 else t - 1)

    params, state = train(tx, STEPS + 1, gradients=with_a_bad_step)
    assert_close(params, alone())
    assert int(state.total_notfinite) == 1
    assert int(zenflow_jax.find_state(state).step) == STEPS
    assert int(zenflow_jax.find_state(state).skipped) == 0


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_apply_if_finite_refuses_low_precision_leaves(dtype):
    # A known limit: its other branch is zeros of the gradients' dtype, and zenflow's update is
    # float32, because only so is the sum with the parameter the cast of the master. zenflow skips
    # steps that are not finite by itself.
    params = example_params(dtype)
    tx = optax.apply_if_finite(make(), 3)
    state = tx.init(params)
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        tx.update(gradients_at(1, dtype), state, params)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multi_steps_makes_one_step_of_several_and_none_in_between(dtype):
    gradients = functools.partial(gradients_at, dtype=dtype)
    tx = optax.MultiSteps(make(), every_k_schedule=2)
    params = example_params(dtype)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for t in range(1, 4):
        for last in (False, True):
            # The mean of a gradient and itself is that gradient.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = update(gradients(t), state, params)
            assert last or not any(u.any() for u in jax.tree.leaves(updates))
            params = apply(params, updates)
            assert int(zenflow_jax.find_state(state).step) == (t if last else t - 1)
    expected, _ = train(PLAIN, 3, params=example_params(dtype), gradients=gradients)
    assert_close(params, expected)


# --- inside flax ----------------------------------------------------------------------------


def test_a_linen_train_state_does_what_it_does_alone():
    model = flax.linen.Dense(3)
    state = TrainState.create(apply_fn=model.apply, params=example_params(), tx=make())
    step = jax.jit(lambda state, gradients: state.apply_gradients(grads=gradients))
    for t in range(1, STEPS + 1):
        state = step(state, gradients_at(t))
    assert_close(state.params, alone())
    assert int(zenflow_jax.find_state(state).step) == STEPS


def test_an_engine_serves_a_linen_train_state():
    model = flax.linen.Dense(3)
    tx = make(offload=True)
    state = TrainState.create(apply_fn=model.apply, params=example_params(), tx=tx)
    step = jax.jit(lambda state, gradients: state.apply_gradients(grads=gradients))
    with zenflow_jax.HostEngine(
        state.params, state.opt_state, host_kernel="numpy", threads=1
    ) as engine:
        for t in range(1, STEPS + 1):
            state = step(state, gradients_at(t))
            params, opt_state = engine.exchange(state.params, state.opt_state)
            state = state.replace(params=params, opt_state=opt_state)
        assert_close(state.params, alone())
        engine.flush(state.params, state.opt_state)


class Model(nnx.Module):
    def __init__(self, params):
        self.bias = nnx.Param(params["bias"])
        self.weight = nnx.Param(params["weight"])
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))  # no parameter


@nnx.jit
def nnx_step(model, optimizer, gradients):
    def loss(model):  # whose gradients are those
        return sum(jnp.sum(getattr(model, key)[...] * g) for key, g in gradients.items())

    optimizer.update(model, nnx.grad(loss)(model))


def nnx_params(model):
    return {key: getattr(model, key)[...] for key in SHAPES}


def test_an_nnx_optimizer_does_what_it_does_alone():
    model = Model(example_params())
    optimizer = nnx.Optimizer(model, make(), wrt=nnx.Param)
    for t in range(1, STEPS + 1):
        nnx_step(model, optimizer, gradients_at(t))
    assert_close(nnx_params(model), alone())


def test_an_engine_serves_an_nnx_optimizer_in_place():
    model = Model(example_params())
    optimizer = nnx.Optimizer(model, make(offload=True), wrt=nnx.Param)
    with zenflow_jax.HostEngine(
        nnx.state(model, nnx.Param), optimizer.opt_state, host_kernel="numpy", threads=1
    ) as engine:
        for t in range(1, STEPS + 1):
            nnx_step(model, optimizer, gradients_at(t))
            engine.exchange_nnx(model, optimizer)
        assert_close(nnx_params(model), alone())
        engine.flush_nnx(model, optimizer)


def test_leaves_of_an_nnx_model_go_by_the_names_that_their_user_gave_them():
    seen = []
    make(resident=lambda path, leaf: seen.append(jax.tree_util.keystr(path))).init(
        nnx.state(Model(example_params()), nnx.Param)
    )
    state = make().init(nnx.state(Model(example_params()), nnx.Param))
    assert [leaf.spec.name for leaf in state.leaves] == ["['bias']", "['weight']"]
    assert len(seen) == 1
    assert "weight" in seen[0]


# --- under jax's transformations ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("offload", [False, True])
def test_jit_equals_eager(offload):
    # A boundary at every step, so that one step has all there is.
    tx = make(offload=offload, update_interval=1, select_interval=1, max_grad_norm=1.0)
    params = example_params()
    eager = tx.update(gradients_at(1), tx.init(params), params)
    compiled = jax.jit(tx.update)(gradients_at(1), tx.init(params), params)
    assert jax.tree.structure(compiled) == jax.tree.structure(eager)
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=ATOL, atol=ATOL)


def test_scan_equals_a_loop():
    def step(carry, gradients):
        params, state = carry
        updates, state = PLAIN.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), None

    params = example_params()
    gradients = jax.tree.map(lambda *g: jnp.stack(g), *map(gradients_at, range(1, STEPS + 1)))
    (params, state), _ = jax.jit(functools.partial(jax.lax.scan, step))(
        (params, PLAIN.init(params)), gradients
    )
    assert_close(params, alone())
    assert int(state.step) == STEPS


@pytest.mark.slow
def test_vmap_equals_a_loop_over_models():
    def several(first, start):
        return jax.tree.map(lambda *x: jnp.stack(x), *(first(start + i) for i in range(2)))

    def params_of(model):
        return jax.tree.map(lambda p: p + model, example_params())

    params = several(lambda model: params_of(float(model)), 0)
    state = jax.vmap(PLAIN.init)(params)
    update = jax.jit(jax.vmap(PLAIN.update))
    for t in range(1, 4):
        updates, state = update(several(gradients_at, 10 * t), state, params)
        params = optax.apply_updates(params, updates)
    for model in range(2):
        expected, _ = train(
            PLAIN,
            3,
            params=params_of(float(model)),
            gradients=lambda t, model=model: gradients_at(10 * t + model),
        )
        assert_close(jax.tree.map(lambda p, model=model: p[model], params), expected)


@pytest.mark.parametrize("offload", [False, True])
def test_an_update_moves_nothing_between_memories_unasked(offload):
    tx = make(offload=True) if offload else PLAIN
    params, gradients = example_params(), gradients_at(1)
    update = jax.jit(tx.update)
    _, state = update(gradients, tx.init(params), params)  # compiles; constants may move here
    state = exchanged(state) if offload else state
    with jax.transfer_guard("disallow"):
        update(gradients, state, params)


# --- the state ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offload", [False, True])
def test_all_ways_to_init_agree(offload, dtype):
    tx, params = make(offload=offload), example_params(dtype)
    state = tx.init(params)
    compiled = jax.jit(tx.init)(params)
    assert jax.tree.structure(compiled) == jax.tree.structure(state)
    assert describe(compiled) == describe(state)
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)

    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    abstract = jax.eval_shape(lambda: params)
    for shaped in (jax.eval_shape(tx.init, params), tx.init(abstract)):
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shaped))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shaped) == shapes


@pytest.mark.parametrize("offload", [False, True])
def test_init_under_jit_may_take_its_parameters_from_around_it(offload):
    tx, params = make(offload=offload), example_params()
    expected = jax.eval_shape(tx.init, params)
    assert jax.eval_shape(lambda: tx.init(params)) == expected
    state = jax.jit(lambda: tx.init(params))()
    assert jax.tree.structure(state) == jax.tree.structure(expected)


@pytest.mark.parametrize("offload", [False, True])
def test_the_state_of_numpy_parameters_is_made_of_jax_arrays(offload):
    params = example_params("bfloat16")
    state = make(offload=offload).init(jax.tree.map(np.asarray, params))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert jax.tree.structure(state) == jax.tree.structure(make(offload=offload).init(params))


@pytest.mark.parametrize("offload", [False, True])
def test_the_state_is_a_plain_pytree_without_callables(offload):
    def state():
        tx = make(
            lambda count: 1e-2,
            offload=offload,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            channel_axis=lambda path, leaf: -1,
            resident=lambda path, leaf: False,
        )
        return tx.init(example_params())

    # Functions made anew are never equal; a treedef that held one would not be either.
    first, second = jax.tree.structure(state()), jax.tree.structure(state())
    assert first == second
    assert hash(first) == hash(second)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state()))
    leaves, treedef = jax.tree.flatten(state())
    assert describe(jax.tree.unflatten(treedef, leaves)) == describe(state())


@pytest.mark.parametrize(
    ("offload", "learning_rate"),
    [
        (True, 1e-2),
        (True, np.float64(1e-2)),
        (True, jnp.float32(1e-2)),
        (True, lambda count: 1e-2),
        (True, optax.cosine_decay_schedule(1e-2, 9)),
        (False, 1e-2),
        (False, optax.cosine_decay_schedule(1e-2, 9)),
    ],
)
def test_nothing_about_the_state_changes_but_its_numbers(offload, learning_rate):
    assert_stable("bfloat16", offload, learning_rate)


def test_what_adaptive_windows_are_decided_by_has_its_shape_from_the_first_state_on():
    params = example_params()  # with leaves of both kinds
    tx = make(update_interval=zenflow_jax.AutoWindow(), offload=True)
    state = tx.init(params)
    _, after = jax.eval_shape(tx.update, params, state, params)
    before = [x.shape for x in state.step_scalars]
    assert [x.shape for x in after.step_scalars] == before


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("offload", [False, True])
def test_nothing_about_the_state_changes_whatever_the_dtype(offload, dtype):
    assert_stable(dtype, offload, 1e-2)


def assert_stable(dtype, offload, learning_rate):
    """Over updates that close windows and select; one program serves them all."""
    tx = make(learning_rate, offload=offload, max_grad_norm=1.0, full_warm_up_rounds=1)
    params = example_params(dtype)
    update = jax.jit(tx.update)
    state = tx.init(params)
    expected, treedef = describe(state), jax.tree.structure(state)
    for t in range(1, 5):
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules are not strict-clean
            updates, state = update(gradients_at(t, dtype), state, params)
        assert jax.tree.structure(state) == treedef
        assert describe(state) == expected
        params = apply(params, updates)
        if offload:
            state = exchanged(state)
    assert update._cache_size() == 1


def test_an_in_graph_step_compiles_once_for_parameters_that_no_device_was_named_for():
    # As optax's own optimizers do. With `offload=True` the mail's memory names a device, and so
    # must the parameters: HostEngine's documentation says how.
    params = {"bias": jnp.zeros(3)}
    tx = make()
    state = tx.init(params)
    update = jax.jit(tx.update)
    for _ in range(2):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1


def test_numpy_hyperparameters_do_not_widen_anything_under_x64():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tx = make(
            np.float64(1e-2),
            b2=np.float64(0.99),
            eps=np.float64(1e-8),
            weight_decay=np.float64(0.1),
            max_grad_norm=np.float64(1.0),
        )
        params = example_params()
        state = tx.init(params)
        updates, new = jax.jit(tx.update)(gradients_at(1), state, params)
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}
    assert describe(new) == describe(state)


# --- what the arguments mean ----------------------------------------------------------------


def specs(params=None, **options):
    state = make(**options).init(example_params() if params is None else params)
    return {leaf.spec.name: leaf.spec for leaf in state.leaves}


NESTED = {"block": {"bias": jnp.zeros(3), "weight": jnp.ones((4, 3))}, "head": jnp.ones((5, 2))}


@pytest.mark.parametrize(
    "mask",
    [
        {"block": {"bias": False, "weight": False}, "head": True},
        {"block": False, "head": True},
        lambda params: {"block": False, "head": True},
        lambda params: jax.tree.map(lambda p: p.shape == (5, 2), params),
    ],
    ids=["tree", "prefix", "function to a prefix", "function to a tree"],
)
def test_mask_says_where_weight_decay_applies(mask):
    tx = make(1.0, mask=mask, weight_decay=0.5, topk_ratio=1.0)
    zeros = jax.tree.map(jnp.zeros_like, NESTED)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(NESTED), NESTED)
    np.testing.assert_array_equal(updates["block"]["weight"], 0.0)
    np.testing.assert_array_equal(updates["block"]["bias"], 0.0)
    np.testing.assert_array_equal(updates["head"], -0.5)


@pytest.mark.parametrize(("mask", "decayed"), [(None, True), (True, True), (False, False)])
def test_one_mask_for_all_leaves(mask, decayed):
    assert {spec.decay for spec in specs(NESTED, mask=mask).values()} == {decayed}


def test_mask_inside_masked_may_name_all_leaves():
    tx = optax.masked(make(mask={"bias": True, "weight": False}), {"bias": False, "weight": True})
    (leaf,) = zenflow_jax.find_state(tx.init(example_params())).leaves
    assert (leaf.spec.name, leaf.spec.decay) == ("['weight']", False)


@pytest.mark.parametrize(
    ("axis", "selected"),
    [
        (-2, (2, 1, 4)),
        (1, (2, 1, 4)),
        (-1, (2, 3, 2)),
        (2, (2, 3, 2)),
        (0, (1, 3, 4)),
        (lambda path, leaf: leaf.ndim - 1, (2, 3, 2)),
        (lambda path, leaf: np.int64(-1), (2, 3, 2)),
    ],
)
def test_channel_axis_says_along_which_axis_channels_are_selected(axis, selected):
    params = {"x": jnp.ones((2, 3, 4))}
    (leaf,) = make(channel_axis=axis).init(params).leaves
    assert leaf.mu.shape == leaf.nu.shape == selected


def test_channel_axis_as_a_function_sees_path_and_leaf():
    seen = {}

    def axis(path, leaf):
        seen[jax.tree_util.keystr(path)] = (leaf.shape, leaf.dtype)
        return -1

    assert {spec.axis for spec in specs(channel_axis=axis).values()} == {None, 1}
    assert seen == {"['weight']": ((6, 3), np.dtype("float32"))}


def test_resident_keeps_a_leaf_wholly_on_the_device():
    tx = make(offload=True, resident=lambda path, leaf: path[-1].key == "head")
    state = tx.init(NESTED)
    resident = {leaf.spec.name: leaf.spec.resident for leaf in state.leaves}
    assert resident == {"['block']['bias']": True, "['block']['weight']": False, "['head']": True}
    kept = state.leaves[-1]
    assert kept.mu.shape == (5, 2)
    assert (state.mail[-1], kept.channels, kept.scores) == (None, None, None)


def test_scalars_vectors_and_empty_leaves_are_resident():
    params = {"empty": jnp.zeros((0, 3)), "scalar": jnp.zeros(()), "vector": jnp.zeros(3)}
    assert all(spec.resident for spec in specs(params, topk_ratio=0.0).values())


@pytest.mark.parametrize(
    ("ratio", "n", "k"),
    [(0.0, 5, 0), (0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0.01, 5, 1)],
)
@pytest.mark.parametrize("offload", [False, True])
def test_the_share_of_selected_channels_is_read_as_a_decimal_and_rounded_up(offload, ratio, n, k):
    state = make(offload=offload, topk_ratio=ratio).init({"x": jnp.ones((n, 2))})
    assert state.leaves[0].channels.tolist() == list(range(k))
    assert state.leaves[0].mu.shape == (k, 2)


@pytest.mark.parametrize(("ratio", "n"), [(1.0, 5), (0.9, 2), (0.5, 1)])
def test_a_leaf_with_every_channel_selected_is_resident(ratio, n):
    state = make(offload=True, topk_ratio=ratio).init({"x": jnp.ones((n, 2))})
    assert state.leaves[0].spec.resident
    assert state.mail == (None,)


# --- what it emits --------------------------------------------------------------------------


class Emitted(NamedTuple):
    """One step of the device half on a leaf of two axes."""

    old: np.ndarray
    new: np.ndarray  # the parameter after `apply_updates`
    update: np.ndarray
    leaf: Any  # its state after the step
    selected: np.ndarray


@functools.cache
def emitted(dtype, offload):
    """What the steps of an open window do to a stacked leaf of which 2 of 6 channels are selected.

    With a window that stays open nothing comes back, in-graph or from the host.
    """
    options = {"update_interval": 100, "select_interval": 100, "provisional_share": None}
    tx = make(0.1, offload=offload, **options)
    rng = np.random.default_rng(3)
    params = {"x": jax.device_put(jnp.asarray(rng.normal(size=(2, 6, 4)), dtype), DEVICE)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    steps = []
    for _ in range(20):
        gradients = {"x": jnp.asarray(rng.normal(size=(2, 6, 4)), dtype)}
        updates, state = update(gradients, state, params)
        new = apply(params, updates)
        (leaf,) = state.leaves
        arrays = (np.asarray(tree["x"]) for tree in (params, new, updates))
        steps.append(Emitted(*arrays, leaf, np.isin(np.arange(6), leaf.channels[0])))
        params = new
        state = exchanged(state) if offload else state
    return steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offload", [False, True])
def test_the_update_is_float32_and_exactly_zero_on_deferred_channels(offload, dtype):
    for step in emitted(dtype, offload):
        assert step.update.dtype == np.float32
        assert step.new.dtype == step.old.dtype
        np.testing.assert_array_equal(step.update[:, ~step.selected], 0.0)
        np.testing.assert_array_equal(step.new[:, ~step.selected], step.old[:, ~step.selected])
        assert (step.update[:, step.selected] != 0).any()


@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("offload", [False, True])
def test_apply_updates_gives_the_cast_of_the_master_on_selected_channels(offload, dtype):
    for step in emitted(dtype, offload):
        master = step.leaf.master
        assert master.dtype == jnp.float32
        assert (master != master.astype(dtype).astype(jnp.float32)).any()  # it knows more
        np.testing.assert_array_equal(step.new[:, step.selected], master.astype(dtype))


def test_a_float32_leaf_needs_no_master():
    assert all(step.leaf.master is None for step in emitted("float32", True))


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_that_is_not_finite_emits_zeros_and_is_counted(offload):
    tx = make(offload=offload, max_grad_norm=1.0)
    params = example_params("bfloat16")
    state = tx.init(params)
    update = jax.jit(tx.update)
    for bad in (jnp.nan, jnp.inf, -jnp.inf, 3e38):
        gradients = gradients_at(1, "bfloat16")
        gradients["bias"] = gradients["bias"].at[0].set(bad)  # a resident leaf counts too
        updates, new = update(gradients, state, params)
        for u in jax.tree.leaves(updates):
            np.testing.assert_array_equal(u, 0.0)
        assert (int(new.step), int(new.skipped)) == (1, 1)
        for old_leaf, new_leaf in zip(state.leaves, new.leaves, strict=True):
            for field in ("channels", "steps", "master", "mu", "nu", "scores"):
                np.testing.assert_array_equal(getattr(new_leaf, field), getattr(old_leaf, field))


# --- the mail -------------------------------------------------------------------------------


def host_leaves(tree):
    return [x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == "pinned_host"]


def test_the_mail_is_in_pinned_host_memory_and_the_rest_on_the_device():
    params = {**example_params(), "stack": jnp.ones((2, 4, 3))}
    state = make(offload=True).init(params)
    mail = jax.tree.leaves(state.mail)
    assert len(mail) == 2
    ours = {id(x) for x in host_leaves(state)}
    assert ours == {id(x) for x in jax.tree.leaves((mail, state.step_scalars))}
    others = {x.sharding.memory_kind for x in jax.tree.leaves(state) if id(x) not in ours}
    assert others == {DEVICE.default_memory().kind}


def test_nothing_in_host_memory_has_the_shape_of_anything_on_the_device():
    # Or a donated buffer could be given to the wrong one of them, which ends the process.
    params = {"a": jnp.ones((1, 8)), "b": jnp.ones((1, 1, 8)), "c": jnp.ones((8, 3))}
    state = make(offload=True).init(params)
    host = host_leaves(state)
    ids = {id(x) for x in host}
    device = [x for x in jax.tree.leaves((params, state)) if id(x) not in ids]
    assert min(x.ndim for x in host) > max(x.ndim for x in device)


def test_the_in_graph_state_has_nothing_in_host_memory():
    assert not host_leaves(make(offload=False).init(example_params()))


@pytest.mark.parametrize("clip", [None, 0.25], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mail_is_the_gradient_bit_for_bit(dtype, clip):
    params, gradients = example_params(dtype), gradients_at(1, dtype)
    tx = make(offload=True, max_grad_norm=clip)
    _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    mail = np.asarray(state.mail[1])
    assert mail.dtype == (jnp.float32 if dtype == "float16" else dtype)
    assert mail.tobytes() == np.asarray(gradients["weight"]).astype(mail.dtype).tobytes()


def test_a_gradient_of_another_dtype_is_mailed_in_the_dtype_of_its_leaf():
    params, gradients = example_params("bfloat16"), gradients_at(1, "float32")
    tx = make(offload=True)
    _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    expected = gradients["weight"].astype("bfloat16")
    np.testing.assert_array_equal(np.asarray(state.mail[1]).reshape(6, 3), expected)


def test_the_letter_holds_the_scalars_of_the_step():
    params = example_params()
    tx = make(
        lambda count: jnp.where(count == 0, 0.5, 0.25),
        b1=0.75,
        b2=0.5,
        eps=0.125,
        weight_decay=0.25,
        offload=True,
    )
    update = jax.jit(tx.update)
    state = tx.init(params)
    for step, rate, token in [(1, 0.5, 0), (2, 0.25, 77)]:
        state = state._replace(token=jax.device_put(jnp.int32(token), DEVICE))
        _, state = update(gradients_at(step), state, params)
        floats, ints = (np.asarray(x).ravel().tolist() for x in state.step_scalars[:2])
        assert floats == [rate, 0.75, 0.5, 0.25, 0.5, 0.125, 0.25, 1.0]
        assert ints == [step, token, 1]


def test_the_letter_holds_the_clipping_factor_of_the_whole_gradient():
    params = example_params()
    gradients = jax.tree.map(jnp.zeros_like, params)
    gradients["bias"] = gradients["bias"].at[0].set(3.0)
    gradients["weight"] = gradients["weight"].at[5, 0].set(4.0)  # a deferred channel
    for limit, factor in [(1.25, 0.25), (5.0, 1.0), (10.0, 1.0)]:
        tx = make(offload=True, max_grad_norm=limit)
        _, state = tx.update(gradients, tx.init(params), params)
        assert np.asarray(state.step_scalars.floats).ravel()[-1] == factor


def test_the_letter_says_that_a_gradient_was_not_finite():
    params = example_params()
    gradients = gradients_at(1)
    gradients["bias"] = gradients["bias"] * jnp.nan
    tx = make(offload=True)
    before = tx.init(params)
    _, state = tx.update(gradients, before, params)
    assert np.asarray(state.step_scalars.ints).ravel().tolist() == [1, int(before.token), 0]


def test_flush_warns_where_the_last_steps_of_an_in_graph_run_were_all_skipped(caplog):
    params = {"bias": jnp.zeros(3)}
    tx = make()
    state, update = tx.init(params), jax.jit(tx.update)
    for value, expected in ((jnp.nan, 1), (0.0, 0), (jnp.nan, 1), (jnp.inf, 2), (jnp.nan, 3)):
        zenflow_jax.flush(params, state)
        assert caplog.records == []
        _, state = update({"bias": jnp.full(3, value)}, state, params)
        assert int(state.skipped_in_a_row) == expected
    zenflow_jax.flush(params, state)
    (record,) = caplog.records
    assert "skipped the last 3 steps, up to step 5" in record.getMessage()


# --- the public surface ---------------------------------------------------------------------


def test_the_leading_arguments_and_defaults_are_those_of_adamw():
    ours = inspect.signature(zenflow_jax.zenflow).parameters
    theirs = inspect.signature(optax.adamw).parameters
    positional = [p.name for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # adamw has `eps_root` next, which a number meant for `weight_decay` must not be taken for.
    assert positional == list(theirs)[:4] == ["learning_rate", "b1", "b2", "eps"]
    shared = [name for name in theirs if name in ours]
    assert shared == [*positional, "weight_decay", "mask"]
    assert all(ours[name].default == theirs[name].default for name in shared)


def test_the_own_arguments_are_keyword_only_and_have_the_documented_defaults():
    ours = inspect.signature(zenflow_jax.zenflow).parameters.values()
    assert {p.name: p.default for p in ours if p.kind is p.KEYWORD_ONLY} == {
        "weight_decay": 1e-4,
        "mask": None,
        "topk_ratio": 0.1,
        "update_interval": 4,
        "select_interval": None,
        "full_warm_up_rounds": 0,
        "rolling": True,
        "staleness": None,
        "window_scaling": 0.5,
        "provisional_share": 0.5,
        "max_grad_norm": None,
        "channel_axis": -2,
        "resident": None,
        "partition_replicated": True,
        "param_shardings": None,
        "offload": True,
        "send_gradients": "during_step",
        "transfer_dtype": None,
    }


def test_static_args_are_all_arguments_that_are_no_numbers_shared_by_the_leaves():
    arguments = set(inspect.signature(zenflow_jax.zenflow).parameters)
    numbers = {"learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm"}
    assert set(zenflow_jax.STATIC_ARGS) == arguments - numbers


PUBLIC = {name: getattr(zenflow_jax, name) for name in zenflow_jax.__all__}
PUBLIC |= {"attach": attach.attach, "AttachedStep": attach.AttachedStep}
CALLS = [name for name, x in PUBLIC.items() if inspect.isroutine(x)]
CLASSES = [name for name, x in PUBLIC.items() if inspect.isclass(x)]


def test_the_public_names_are_few_and_what_dir_lists():
    modules = {"attach", "deepspeed", "integrations", "planning"}
    assert {n for n in dir(zenflow_jax) if n[0] != "_"} == {*zenflow_jax.__all__, *modules}
    assert len(zenflow_jax.__all__) <= 20
    assert all(inspect.ismodule(getattr(zenflow_jax, name)) for name in modules)
    with pytest.raises(AttributeError, match="no attribute 'plan'"):
        _ = zenflow_jax.plan


@pytest.mark.parametrize("name", [*CALLS, *(n for n in CLASSES if n != "AttachedStep")])
def test_every_public_name_has_an_example(name):
    assert ">>> " in (inspect.getdoc(PUBLIC[name]) or "")


def section(doc, title):
    """The names that a Google section of a docstring explains."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return re.findall(r"^    (\w+):", found[1], re.MULTILINE) if found else []


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_explains_its_arguments_and_what_comes_back(name):
    function = PUBLIC[name]
    doc = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    assert section(doc, "Args") == list(signature.parameters)
    if signature.return_annotation is not None:
        assert re.search(r"^Returns:\n    \S", doc, re.MULTILINE)


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_class_explains_its_arguments_or_attributes(name):
    cls = PUBLIC[name]
    doc = inspect.getdoc(cls) or ""
    if dataclasses.is_dataclass(cls):
        assert section(doc, "Attributes") == [f.name for f in dataclasses.fields(cls)]
    elif issubclass(cls, tuple):
        assert section(doc, "Attributes") == list(cls._fields)
    else:
        assert section(doc, "Args") == list(inspect.signature(cls).parameters)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (name, method)
        for name in CLASSES
        for method, x in vars(PUBLIC[name]).items()
        if not method.startswith("_") and inspect.isroutine(x)
    ],
)
def test_every_public_method_has_a_docstring_that_names_its_arguments(cls, method):
    function = getattr(PUBLIC[cls], method)
    doc = inspect.getdoc(function) or ""
    assert doc.endswith(".")
    assert all(
        re.search(rf"\b{name}\b", doc) for name in list(inspect.signature(function).parameters)[1:]
    )


def test_gradients_of_float16_leaves_are_looked_at_as_they_arrive():
    # float16 has infinity above 65,504 and zero below 6e-8: what it has of these gradients would
    # be skipped, or not move anything.
    params = {"bias": jnp.ones(3, jnp.float16), "weight": jnp.ones((6, 3), jnp.float16)}
    for options in ({}, {"topk_ratio": 1.0}):
        tx = make(eps=0.0, max_grad_norm=1e6, **options)
        update = jax.jit(tx.update)
        for size in (1e5, 1e-9):
            gradients = {name: jnp.full(p.shape, size) for name, p in params.items()}
            updates, state = update(gradients, tx.init(params), params)
            assert int(state.skipped) == 0
            assert np.asarray(updates["bias"]).all()
            assert np.asarray(updates["weight"])[:2].all()
            leaf = state.leaves[1]
            np.testing.assert_allclose(leaf.mu, 0.1 * size, rtol=1e-6)
            if leaf.scores is not None:
                np.testing.assert_allclose(leaf.scores, 3 * size**2, rtol=1e-6)


def test_gradients_of_float16_are_squared_in_float32():
    # Their squares are no finite float16: the step would be skipped.
    params = {"weight": jnp.ones((6, 3), jnp.float16)}
    tx = make()
    gradients = {"weight": jnp.full((6, 3), 300, jnp.float16)}
    _, state = jax.jit(tx.update)(gradients, tx.init(params), params)
    assert int(state.skipped) == 0
    np.testing.assert_allclose(state.leaves[0].scores, 3 * 300**2, rtol=1e-6)
