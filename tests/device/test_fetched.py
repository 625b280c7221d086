"""A scan over layers in host memory is `jax.lax.scan`, and their gradients stay there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.comparisons import assert_same_bits
from zenflow_jax import streaming

LAYERS, WIDTH, INNER = 5, 8, 12


def layers(dtype="float32"):
    rng = np.random.default_rng(0)
    return {
        "up": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, INNER)) / 3, dtype),
        "down": jnp.asarray(rng.normal(size=(LAYERS, INNER, WIDTH)) / 4, dtype),
        "scale": jnp.ones((LAYERS, WIDTH), dtype),
        "number": jnp.arange(LAYERS),
    }


def in_host_memory(tree, *names):
    return {
        name: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) if name in names else x
        for name, x in tree.items()
    }


def loss(layers, x, bias):
    """Reads what it closes over, and carries and returns integers beside floats."""

    def layer(carry, w):
        x, count = carry
        inner = jnp.tanh((x * w["scale"][None]) @ w["up"] + bias[None])
        x = x + inner @ w["down"] * (1 + w["number"] % 2).astype(x.dtype)
        return (x, count + w["number"]), (x.mean(), w["number"])

    (x, count), (means, numbers) = streaming.scan_layers(layer, (x, jnp.int32(1)), layers)
    return jnp.sum(jnp.square(x.astype(jnp.float32))) + means.sum(), (count, numbers)


def of(layers, dtype="float32", loss=loss):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(6, WIDTH)), dtype)
    bias = jnp.full(INNER, 0.1, dtype)
    value = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(value)(layers, x, bias)


@pytest.mark.parametrize(
    ("dtype", "names"),
    [("float32", ("up", "down")), ("bfloat16", ("up", "down", "scale", "number"))],
)
def test_results_and_gradients_are_those_of_a_plain_scan(dtype, names):
    expected = of(layers(dtype), dtype)
    ours = of(in_host_memory(layers(dtype), *names), dtype)
    for name, x in ours[1][0].items():
        kind = "pinned_host" if name in names and name != "number" else "device"
        assert name == "number" or x.sharding.memory_kind == kind
    for one, other in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
        if other.dtype != jax.dtypes.float0:
            tolerance = 1e-6 if other.dtype == np.float32 else 2**-7
            np.testing.assert_allclose(
                np.float32(one), np.float32(other), rtol=tolerance, atol=tolerance
            )


def test_a_checkpoint_around_the_scan_changes_no_bit():
    hosted = in_host_memory(layers(), "up", "down")
    assert_same_bits(of(hosted, loss=jax.checkpoint(loss)), of(hosted))


def scanned(**options):
    hosted = in_host_memory(layers(), "up")
    return streaming.scan_layers(lambda x, w: (x + w["scale"].sum(), None), 1.0, hosted, **options)


def test_options_that_change_nothing_are_taken():
    expected, _ = scanned()
    for options in ({"unroll": 1, "reverse": False, "length": LAYERS}, {"unroll": False}):
        assert scanned(**options)[0] == expected == 1 + LAYERS * WIDTH


@pytest.mark.parametrize(
    "options", [{"reverse": True}, {"unroll": 2}, {"unroll": True}, {"length": LAYERS - 1}], ids=str
)
def test_options_that_change_the_scan_are_refused_by_name(options):
    (option,) = options
    with pytest.raises(ValueError, match=f"{option}={options[option]} does not work with 5 layers"):
        scanned(**options)
    with pytest.raises(TypeError, match="unrol"):
        scanned(unrol=1)


def test_vmap_around_the_scan_is_refused_where_it_would_add_up_gradients_in_host_memory():
    hosted = in_host_memory(layers(), "up", "down")

    def one(layers, x):
        inner = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)  # noqa: E731
        return streaming.scan_layers(inner, x, layers)[0].sum()

    def around(layers, x):
        return jax.vmap(jax.jit(one), (None, 0))(layers, x).sum()

    x = jnp.ones((3, WIDTH))
    expected = around(layers(), x)
    np.testing.assert_allclose(jax.jit(around)(hosted, x), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`jax.vmap` around .* Call it in the body"):
        jax.grad(around, allow_int=True)(hosted, x)


def test_stacks_of_other_lengths_are_refused():
    short = in_host_memory(layers(), "up") | {"scale": jnp.ones((LAYERS - 1, WIDTH))}
    with pytest.raises(ValueError, match=r"stacks of \[4, 5\] entries"):
        streaming.scan_layers(lambda x, w: (x, None), 1.0, short)
