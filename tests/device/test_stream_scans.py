"""Losses with their own scans: bit-identical to the plain loss, or an error that names the line."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from tests.comparisons import assert_same_bits
from zenflow_jax import streaming

LAYERS, WIDTH = 3, 8
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)

pytestmark = pytest.mark.usefixtures("as_scripts_run")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        y = nn.Dropout(0.1, deterministic=False)(nn.tanh(nn.Dense(12, use_bias=False)(x)))
        return x + scale * nn.Dense(WIDTH, use_bias=False)(y), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)
        axes = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast}
        scan = nn.scan(block, split_rngs=dict.fromkeys(KEYS, True), length=LAYERS, **axes)
        return scan(name="layers")(x, 0.5)[0]


class Nnx(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs))
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)

    def __call__(self, x):
        block = nnx.remat(lambda x, layer: x + jnp.tanh(layer(x)))
        return nnx.scan(block, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def linen_in_bfloat16(params, x):
    params, x = jax.tree.map(lambda w: w.astype(jnp.bfloat16), (params, x))
    run = jax.checkpoint(jax.jit(lambda w, x: Linen().apply({"params": w}, x, rngs=KEYS)))
    return run(params, x).astype(jnp.float32)


def block(x, layer):
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None


def one_example(params, x):  # as in Equinox
    return jax.lax.scan(block, x, params["layers"], reverse=True, unroll=LAYERS)[0]


def placed(params, x):
    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    whole = partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))
    layers = jax.checkpoint(partial(jax.tree.map, whole))(params["layers"])
    jax.tree.map(lambda w: w[0], layers)  # read only for its shape, as in haliax
    return jax.vmap(one_example, (None, 0))({"layers": layers}, x)


def stacks():
    rng = np.random.default_rng(0)
    shapes = {"up": (LAYERS, WIDTH, 12), "down": (LAYERS, 12, WIDTH)}
    layers = {name: rng.normal(size=shape) / 4 for name, shape in shapes.items()}
    return {"layers": jax.tree.map(jnp.float32, layers)}


def nnx_case():
    graphdef, params = nnx.split(Nnx(nnx.Rngs(0)))
    return nnx.as_pure(params), lambda params, x: nnx.merge(graphdef, params)(x)


CASES = {
    "linen, cast before the scan": lambda: (Linen().init(KEYS, X)["params"], linen_in_bfloat16),
    "nnx": nnx_case,
    "placed, with vmap": lambda: (stacks(), placed),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_whose_own_scan_streams_is_bit_identical_to_the_plain_model(case):
    if "vmap" in case and jax.__version__.startswith("0.11."):
        pytest.skip("this jax adds up the plain model's vmapped sums in another order")
    params, model = CASES[case]()
    tx = zenflow_jax.zenflow(1e-2, topk_ratio=0.3, max_grad_norm=0.1)
    state = zenflow_jax.find_state(tx.init(params))._replace(step=jnp.int32(1))

    def loss_fn(params, x, *, squares):
        y = model(params, x)
        return jnp.mean(y**2 if squares else y), {"outputs": y}

    @partial(jax.jit, static_argnums=2)
    def step(params, state, streams):
        weights = streaming.stream(params, state) if streams else params
        gradient = jax.value_and_grad(streaming.stream_scans(loss_fn), has_aux=True)
        loss, gradients = gradient(weights, X, squares=True)
        updates, new = tx.update(gradients, state, params)
        return loss, updates, zenflow_jax.find_state(new).mail

    assert_same_bits(step(params, state, True), step(params, state, False))


def squares(w):
    return jnp.sum(w**2)


def twice(params, x):
    return one_example(params, one_example(params, x))


def in_a_loop(params, x):
    return jax.lax.map(partial(one_example, params), x)


def transposed(params, x):
    up, down = (jnp.matrix_transpose(params["layers"][name]) for name in ("down", "up"))
    return jax.lax.scan(block, x, {"up": up, "down": down})[0]


LINE = r"test_stream_scans\.py:\d+:\d+ \("
MISUSES = {
    "read outside": (
        lambda params, x: one_example(params, x) + squares(params["layers"]["up"]),
        rf"`integer_pow` reads \['layers'\]\['up'\] at .*{LINE}squares",
    ),
    "loop": (in_a_loop, rf"`scan` reads \['layers'\]\['down'\] at .*{LINE}in_a_loop.*loop"),
    "two scans": (
        jax.checkpoint(jax.jit(twice)),
        rf"\['down'\] is scanned 2 times, at .*{LINE}one_example.* exactly once",
    ),
    "not read": (lambda params, x: x, r"\['layers'\]\['down'\] is not read, .* exactly once"),
    "returned": (
        lambda params, x: (one_example(params, x), params["layers"]["up"]),
        r"returns the stack \['layers'\]\['up'\]",
    ),
    "other axes": (transposed, rf"`transpose` reads .*{LINE}transposed.*Stack layers in"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_any_other_read_of_a_stack_raises_an_error_that_names_leaf_and_line(case):
    model, message = MISUSES[case]
    params = stacks()
    weights = streaming.stream(params, zenflow_jax.zenflow(1e-2).init(params))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(streaming.stream_scans(model), weights, X)
