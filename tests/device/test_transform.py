"""`zenflow()` from an optax user's point of view: its state, arguments, updates and mail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests.comparisons import describe
from tests.runs import Leaf, initial

RTOL = 1e-6  # a few float32 roundings


def make(learning_rate=1e-2, **options):
    settings = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}
    return zenflow_jax.zenflow(learning_rate, **{**settings, **options})


def example_params(dtype="float32"):
    # 2 of the 6 channels of "weight" are selected.
    return initial((Leaf("bias", (3,), None, dtype), Leaf("weight", (6, 3), -2, dtype)))


def test_all_kinds_of_init_agree():
    tx, params = make(), example_params("bfloat16")
    state = tx.init(params)
    compiled = jax.jit(tx.init)(params)
    assert jax.tree.structure(compiled) == jax.tree.structure(state)
    assert describe(compiled) == describe(state)
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)

    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    abstract = jax.eval_shape(lambda: params)
    around = jax.eval_shape(lambda: tx.init(params))
    for shaped in (jax.eval_shape(tx.init, params), around, tx.init(abstract)):
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shaped))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), shaped) == shapes


def test_the_state_is_a_plain_pytree_without_callables():
    def state():
        functions = {
            "mask": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
            "channel_axis": lambda path, leaf: -1,
            "resident": lambda path, leaf: False,
        }
        return make(lambda count: 1e-2, **functions).init(example_params())

    # New functions are never equal, so treedefs that held functions would differ, too.
    first, second = jax.tree.structure(state()), jax.tree.structure(state())
    assert first == second
    assert hash(first) == hash(second)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state()))


NESTED = {"block": {"bias": jnp.zeros(3), "weight": jnp.ones((4, 3))}, "head": jnp.ones((5, 2))}


def test_mask_selects_leaves_for_weight_decay_and_its_schedule_counts_from_zero():
    def decay(count):
        return 0.5 / (1.0 + count.astype(jnp.float32))

    tx = make(
        1.0, mask=lambda _: {"block": False, "head": True}, weight_decay=decay, topk_ratio=1.0
    )
    zeros = jax.tree.map(jnp.zeros_like, NESTED)
    updates, _ = jax.jit(tx.update)(zeros, tx.init(NESTED), NESTED)
    for x in updates["block"].values():
        np.testing.assert_array_equal(x, 0.0)
    np.testing.assert_array_equal(updates["head"], -0.5)


@pytest.mark.parametrize(
    ("shape", "options", "kept"),
    [
        ((2, 3, 4), {"channel_axis": -2}, (2, 1, 4)),
        ((2, 3, 4), {"channel_axis": 0}, (1, 3, 4)),
        ((2, 3, 4), {"channel_axis": lambda path, leaf: np.int64(leaf.ndim - 1)}, (2, 3, 2)),
        # The ratio is interpreted as a decimal, and the count is rounded up.
        ((5, 3), {"topk_ratio": 0.0}, (0, 3)),
        ((31, 3), {"topk_ratio": 0.1}, (4, 3)),
        ((100, 2), {"topk_ratio": 0.07}, (7, 2)),
        # A leaf without deferred channels is resident, and so is a leaf that the user names.
        ((0, 3), {"topk_ratio": 0.0}, None),
        ((3,), {"topk_ratio": 0.0}, None),
        ((5, 2), {"topk_ratio": 1.0}, None),
        ((5, 2), {"resident": lambda path, leaf: path[-1].key == "x"}, None),
    ],
)
def test_the_device_keeps_a_leafs_selected_channels_or_all_channels(shape, options, kept):
    state = make(**options).init({"x": jnp.ones(shape)})
    (leaf,), mail = state.leaves, state.mail
    assert leaf.mu.shape == leaf.nu.shape == (shape if kept is None else kept)
    assert leaf.spec.resident == (kept is None)
    assert (leaf.channels is None) == (leaf.scores is None) == (kept is None)
    assert bool(jax.tree.leaves(mail)) == (kept is not None)


def test_gradients_are_checked_as_they_arrive_and_squared_in_float32():
    params, tx = example_params("bfloat16"), make(eps=0.0, max_grad_norm=1e6)
    update = jax.jit(tx.update)
    # 300 squared is not a finite float16.
    for size, dtype in ((1e5, "float32"), (1e-9, "float32"), (300, "float16")):
        gradients = {name: jnp.full(p.shape, size, dtype) for name, p in params.items()}
        updates, state = update(gradients, tx.init(params), params)
        assert int(state.skipped) == 0
        assert np.asarray(updates["bias"]).all()
        leaf = state.leaves[1]
        np.testing.assert_allclose(leaf.mu, 0.1 * size, rtol=RTOL)
        np.testing.assert_allclose(leaf.scores, 3 * size**2, rtol=RTOL)
        np.testing.assert_allclose(state.grad_norm, 21**0.5 * size, rtol=RTOL)
