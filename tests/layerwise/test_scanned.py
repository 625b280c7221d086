"""Trains a loss that scans its layers; results equal those of three functions and of AdamW."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.layerwise.small_model import (
    BATCHES,
    LAYERS,
    MODEL,
    WIDTH,
    WORDS,
    check_close,
    check_equal,
    decayed,
    first,
    last,
    layer,
    new_params,
    reference,
)
from zenflow_jax import layerwise
from zenflow_jax.planning import UnfitRunError

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")

ADAMW = {"optimizer": optax.adamw(1e-2, weight_decay=0.1, mask=decayed)}


def stacked(params):
    """Returns parameters in the trainer's form as a tree with stacks."""
    layers = jax.tree.map(lambda *xs: np.stack(xs), *params["layers"])
    return params["outer"] | {"layers": layers, "absent": None}


def loss_fn(params, batch, **options):
    x, shared = first(params, batch)
    body = jax.checkpoint(lambda x, w: (layer(w, x, shared), None))
    x, _ = jax.lax.scan(body, x, params["layers"], **options)
    return last(params, x, batch)


def train(loss_fn, params, batches, where=None):
    """Returns the parameters and losses of a run."""
    model = layerwise.ScannedModel(loss_fn, params, batches[0], where=where)
    split = model.split(params)
    with layerwise.Trainer(split, **model.functions, **ADAMW) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches]
        return model.join(trainer.params()), losses


def test_a_scan_is_bit_identical_to_three_functions():
    params = new_params(jnp.bfloat16)
    with layerwise.Trainer(params, **MODEL, **ADAMW) as trainer:
        expected = [float(trainer.step(batch)) for batch in BATCHES]
        trained = trainer.params()
    params["layers"], trained["layers"] = params["layers"][::-1], trained["layers"][::-1]
    run = jax.jit(jax.checkpoint(partial(loss_fn, reverse=True, unroll=2)))
    got, losses = train(run, stacked(params), BATCHES)
    assert losses == expected
    check_equal(got, stacked(trained))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, scale):
        y = nn.Dropout(0.1, deterministic=False)(nn.tanh(nn.Dense(12)(x)))
        return x + scale * nn.Dense(WIDTH)(y), (jnp.mean(y**2), y)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="in")(x)
        axes = {"variable_axes": {"params": 0}, "in_axes": nn.broadcast}
        rngs = {"params": True, "dropout": True}
        scan = nn.scan(nn.remat(Block), split_rngs=rngs, length=LAYERS, **axes)
        return scan(name="layers")(x, x.mean())


def linen_loss(params, batch):
    """Reads an output of the scan, with its random keys in the batch."""
    params = jax.tree.map(lambda w: w.astype(jnp.float32), params)
    rngs = {"dropout": batch["key"]}
    x, (squares, _) = Linen().apply({"params": params}, batch["x"], rngs=rngs)
    loss = jnp.mean((x @ params["in"]["kernel"]) ** 2) + squares @ jnp.arange(LAYERS)
    return layerwise.WeightedLoss(loss, 2)


def encoder_and_decoder(params, batch):
    """Reads outer weights before the scan, in its first carry, in its body, and after it."""

    def encode(x, w):
        return jnp.tanh(x @ w + params["bias"]), None

    def decode(carry, inputs):
        (x, total), (w, number) = carry, inputs
        x = x + jnp.tanh(x @ w["in"] + number * encoded) @ params["out"]
        return (x, total + jnp.mean(x)), total

    encoded, _ = jax.lax.scan(encode, batch["x"] @ params["out"], params["encoder"])
    inputs = {"in": params["decoder"]}, jnp.arange(LAYERS) / LAYERS
    carry = jnp.broadcast_to(params["bias"], encoded.shape), jnp.zeros(())
    (x, total), totals = jax.lax.scan(decode, carry, inputs, reverse=True)
    loss = jnp.mean((x @ params["out"] + encoded) ** 2)
    return loss + total**2 + (totals @ jnp.arange(LAYERS)) ** 2


def linen_case():
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Linen().init(keys, X)["params"], linen_loss, None


def two_scans_case():
    shapes = {"encoder": (2, WIDTH, WIDTH), "decoder": (LAYERS, WIDTH, WIDTH)}
    shapes |= {"out": (WIDTH, WIDTH), "bias": (WIDTH,)}
    rng = np.random.default_rng(0)
    params = {name: jnp.float32(rng.normal(size=shape) / 3) for name, shape in shapes.items()}
    return params, encoder_and_decoder, lambda path, _: path[0].key == "decoder"


X = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)
SETS = [{"x": X + i, "key": jax.random.key(i)} for i in range(4)]


@pytest.mark.parametrize("case", [linen_case, two_scans_case])
def test_every_scan_gives_the_same_losses_as_adamw(case):
    params, loss_fn, where = case()

    def whole(params, batch):
        result = loss_fn(params, batch)
        return result.loss if isinstance(result, layerwise.WeightedLoss) else result

    expected, losses = reference(ADAMW["optimizer"], params, SETS, whole)
    got, values = train(loss_fn, params, SETS, where)
    np.testing.assert_allclose(values, losses, rtol=1e-5)
    check_close(got, expected)
    assert {type(x) for x in jax.tree.leaves(got)} == {np.ndarray}


def test_a_run_with_batches_of_two_shapes_resumes_bit_identically_from_shapes():
    batches = [x if i % 2 else x[:3] for i, x in enumerate(BATCHES)]
    in_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    params = jax.device_put(stacked(new_params()), in_host)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=in_host), params
    )
    model = layerwise.ScannedModel(loss_fn, shapes, batches[0])
    layers = [*model.split(params)["layers"]]
    assert {x.sharding.memory_kind for x in jax.tree.leaves(layers)} == {"pinned_host"}
    with layerwise.Trainer(model.split(params), **model.functions, **ADAMW) as trainer:
        for batch in batches[:3]:
            trainer.step(batch)
        state = trainer.state()
        expected = [float(trainer.step(batch)) for batch in batches[3:]]
        trained = model.join(trainer.params())
    split = model.split(shapes)
    with layerwise.Trainer(split, **model.functions, **ADAMW, state=state) as trainer:
        assert [float(trainer.step(batch)) for batch in batches[3:]] == expected
        check_equal(model.join(trainer.params()), trained)


CONSTANT = jnp.ones(WIDTH)


def twice(params, batch):
    return loss_fn(params, batch) + loss_fn(params, batch + 1)


def two_scans(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (x + w, None), jnp.zeros(WORDS), params["head"])
    return loss_fn(params, batch) + x.sum()


def captures(params, batch):
    return loss_fn(params | {"table": params["table"] + CONSTANT}, batch)


def stacks_itself(params, batch):
    """Scans weights that it has stacked, beside an embedding that it reads first."""
    x = params["table"][batch]
    layers = jnp.stack([params["w1"], params["w2"]])
    return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0])


LINE = r"test_scanned\.py:\d+:\d+ \("


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (twice, rf"'bias'\] is scanned 2 times, at .*{LINE}loss_fn.*ScannedModel\(where"),
        (two_scans, rf"'head'\] at .*{LINE}two_scans\) and .*'bias'\] at .*loss_fn\), but"),
        (stacks_itself, "scans no parameter layer by layer"),
        (captures, "uses an array float"),
    ],
)
def test_errors_about_a_loss_name_the_leaf_and_the_line(loss, text):
    params = stacked(new_params())
    if loss is stacks_itself:
        width = params["table"].shape[1]
        params = {"table": params["table"], **dict.fromkeys(("w1", "w2"), jnp.eye(width))}
    with pytest.raises(ValueError, match=text):
        train(loss, params, BATCHES[:1])


def test_parameters_of_another_model_are_rejected():
    params = stacked(new_params())
    model = layerwise.ScannedModel(loss_fn, params, BATCHES[0])
    split = model.split(params)
    assert len([*split["layers"]]) == len([*split["layers"]]) == LAYERS
    with pytest.raises(ValueError, match="4 functions for 3 layers"):
        layerwise.Trainer(split | {"layers": [*split["layers"]][1:]}, **model.functions, **ADAMW)
    shorter = params | {"layers": {name: x[:2] for name, x in params["layers"].items()}}
    for other in (shorter, {f"{name}_2": x for name, x in params.items()}):
        with pytest.raises(ValueError, match="Other parameters than .*'down'"):
            model.split(other)


def test_a_scan_in_the_other_direction_does_not_resume():
    params = stacked(new_params())
    model, other = (
        layerwise.ScannedModel(partial(loss_fn, reverse=x), params, BATCHES[0]) for x in (0, 1)
    )
    with layerwise.Trainer(model.split(params), **model.functions, **ADAMW) as trainer:
        state = trainer.state()
    with pytest.raises(UnfitRunError, match="order of layers"):
        layerwise.Trainer(other.split(params), **other.functions, **ADAMW, state=state)


def outputs_fn(params, batch, weight=1.0, *, logits=False):
    x, shared = first(params, batch)

    def body(x, w):
        return layer(w, x, shared), jnp.mean(x)

    x, means = jax.lax.scan(body, x, params["layers"])
    return (x @ params["head"], means) if logits else last(params, x, batch) + weight * means[0]


@pytest.mark.parametrize("kept", [True, False])
def test_evaluate_gives_the_values_of_another_loss_or_an_error(kept):
    params, batch = stacked(new_params()), BATCHES[0]
    loss = outputs_fn if kept else loss_fn
    model = layerwise.ScannedModel(loss, params, batch)
    logits = layerwise.ScannedModel(partial(outputs_fn, logits=True), params, batch)
    with layerwise.Trainer(model.split(params), **model.functions, **ADAMW) as trainer:
        if kept:
            got = trainer.evaluate(batch, logits.functions["last"])
            check_close(got, outputs_fn(params, batch, logits=True), atol=1e-6)
        else:
            with pytest.raises(ValueError, match="which the trained loss does not read"):
                trainer.evaluate(batch, logits.functions["last"])
