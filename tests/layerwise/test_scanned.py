"""A loss that scans its layers trains layer by layer, like three functions and like AdamW."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.layerwise.small_model import (
    BATCHES,
    LAYERS,
    MODEL,
    WIDTH,
    check_close,
    check_equal,
    first,
    last,
    layer,
    new_params,
    reference,
)
from zenflow_jax import layerwise, planning

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")

ADAMW = {"learning_rate": 1e-2, "weight_decay": 0.1}


def stacked(params):
    """Returns the trainer's form of parameters as a tree with stacks."""
    return params["outer"] | {
        "layers": jax.tree.map(lambda *xs: np.stack(xs), *params["layers"]),
        "unused": None,
    }


def loss_fn(params, batch, **options):
    x, shared = first(params, batch)
    body = jax.checkpoint(lambda x, w: (layer(w, x, shared), None))
    x, _ = jax.lax.scan(body, x, params["layers"], **options)
    return last(params, x, batch)


def train(loss_fn, params, batches, **options):
    """Returns the model, its parameters and losses."""
    model = layerwise.ScannedModel(loss_fn, params, batches[0])
    split = model.split(params)
    with layerwise.Trainer(split, **model.functions, **ADAMW, **options) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches]
        return model, model.join(trainer.params()), losses


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_has_the_bits_of_three_functions(dtype, reverse):
    params = new_params(dtype)
    with layerwise.Trainer(params, **MODEL, **ADAMW, frozen=[1]) as trainer:
        expected = [float(trainer.step(batch)) for batch in BATCHES]
        trained = trainer.params()
    order = -1 if reverse else 1
    params["layers"], trained["layers"] = params["layers"][::order], trained["layers"][::order]
    run = jax.jit(jax.checkpoint(partial(loss_fn, reverse=reverse, unroll=2)))
    model, got, losses = train(run, stacked(params), BATCHES, frozen=[1])
    assert losses == expected
    check_equal(got, stacked(trained))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        y = nn.Dropout(0.1, deterministic=False)(nn.tanh(nn.Dense(12)(x)))
        self.sow("losses", "squares", jnp.mean(y**2))
        return x + scale * nn.Dense(WIDTH)(y), jnp.mean(y, axis=-1)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="in")(x)
        axes = {"variable_axes": {"params": 0, "losses": 0}, "in_axes": nn.broadcast}
        rngs = {"params": True, "dropout": True}
        scan = nn.scan(nn.remat(Block), split_rngs=rngs, length=LAYERS, **axes)
        return scan(name="layers")(x, x.mean())


def linen_loss(params, batch):
    """Scans random keys, and reads one of the scan's outputs behind it."""
    params = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    (x, means), sown = Linen().apply(
        {"params": params}, batch["x"], rngs={"dropout": batch["key"]}, mutable=["losses"]
    )
    (squares,) = sown["losses"]["layers"]["squares"]
    y = x @ params["in"]["kernel"] + jnp.float32([1] * WIDTH)
    del means
    return layerwise.WeightedLoss(jnp.mean(y**2) + (squares * jnp.arange(LAYERS)).sum(), 2)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs))
        self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        self.scales = nnx.Param(jnp.linspace(0.5, 1, LAYERS))

    def __call__(self, x):
        @nnx.remat
        def block(x, layer, scale):
            return x + scale * jnp.tanh(layer(x))

        axes = {"in_axes": (nnx.Carry, 0, 0), "out_axes": nnx.Carry}
        return nnx.scan(block, **axes)(x, self.layers, self.scales[...])


def linen_case():
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Linen().init(keys, X)["params"], linen_loss


def nnx_case():
    graphdef, params = nnx.split(Nnx(nnx.Rngs(0)))
    return params, lambda params, batch: jnp.mean(nnx.merge(graphdef, params)(batch["x"]) ** 2)


X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
SETS = [{"x": X + i, "key": jax.random.key(i)} for i in range(4)]


@pytest.mark.parametrize("case", [linen_case, nnx_case])
def test_scans_of_libraries_have_the_losses_of_adamw(case):
    params, loss_fn = case()

    def whole(params, batch):
        result = loss_fn(params, batch)
        return result[0] if isinstance(result, layerwise.WeightedLoss) else result

    expected, losses = reference(optax.adamw(**ADAMW), params, SETS, whole)
    _, got, values = train(loss_fn, params, SETS)
    np.testing.assert_allclose(values, losses, rtol=1e-5)
    check_close(got, expected)
    assert {type(x) for x in jax.tree.leaves(got)} == {np.ndarray}
