"""`zenflow()` as users of optax meet it: its state, its arguments, what it emits and sends."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.device.small_runs import (
    DEVICE,
    DTYPES,
    LOW_PRECISION,
    PLAIN,
    apply,
    describe,
    example_params,
    exchanged,
    gradients_at,
    make,
)


@pytest.mark.parametrize("offload", [False, True])
def test_an_update_moves_nothing_between_memories_unasked(offload):
    tx = make(offload=True) if offload else PLAIN
    params, gradients = example_params(), gradients_at(1)
    update = jax.jit(tx.update)
    _, state = update(gradients, tx.init(params), params)  # compiles; constants may move here
    state = exchanged(state) if offload else state
    with jax.transfer_guard("disallow"):
        update(gradients, state, params)


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


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {"update_interval": zenflow_jax.AutoWindow(), "window_scaling": None}),
        ("float16", {}),
        ("bfloat16", {}),
        ("bfloat16", {"learning_rate": np.float64(1e-2)}),
        ("bfloat16", {"learning_rate": jnp.float32(1e-2)}),
        ("bfloat16", {"learning_rate": optax.cosine_decay_schedule(1e-2, 9)}),
    ],
)
def test_nothing_about_the_state_changes_but_its_numbers(offload, dtype, options):
    # Over updates that close windows and select; one program serves them all.
    tx = make(**{"offload": offload, "max_grad_norm": 1.0, "full_warm_up_rounds": 1, **options})
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
        state = exchanged(state) if offload else state
    assert update._cache_size() == 1


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
