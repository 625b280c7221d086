"""zenflow in equinox loops: a scan over its own layers, and haliax's `Stacked`."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax.nn.scan import Stacked

import zenflow_jax
from zenflow_jax import layerwise, streaming

EXACT = {"update_interval": 1, "staleness": 0}
#: Losses near 8 in float32; the order of sums differs.
TOLERANCE = 1e-4
STEPS = 9
TOKENS = np.random.default_rng(0).integers(0, 64, (STEPS, 8, 16)).astype("int32")


class Block(eqx.Module):
    up: jax.Array
    down: jax.Array
    norm: jax.Array

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (32, 64)) / 6
        self.down = jax.random.normal(down, (64, 32)) / 8
        self.norm = jnp.ones(32)

    def __call__(self, x):
        return x + jax.nn.gelu((x * self.norm) @ self.up) @ self.down


class Model(eqx.Module):
    embedding: jax.Array
    layers: Block
    frozen: jax.Array
    loss_scale: float = eqx.field(static=True)

    def __init__(self, key):
        self.embedding = jax.random.normal(key, (64, 32)) / 2
        self.layers = eqx.filter_vmap(Block)(jax.random.split(key, 4))
        self.frozen = jnp.ones((32, 32))
        self.loss_scale = 1.0

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        @jax.checkpoint
        def body(x, layer):
            return eqx.combine(layer, static)(x), None

        x, _ = jax.lax.scan(body, self.embedding[tokens], arrays)
        return x @ self.frozen @ self.embedding.T


VOCAB, EMBED, MLP = hax.Axis("vocab", 64), hax.Axis("embed", 32), hax.Axis("mlp", 64)
LAYERS, POSITION = hax.Axis("layers", 4), hax.Axis("position", 16)


class NamedBlock(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        return NamedBlock(
            hnn.Linear.init(EMBED, MLP, key=up),
            hnn.Linear.init(MLP, EMBED, key=down),
            hnn.LayerNorm.init(EMBED),
        )

    def __call__(self, x):
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class NamedModel(eqx.Module):
    """A model of haliax, as in Levanter."""

    embedding: hnn.Embedding
    layers: Stacked
    frozen: hax.NamedArray

    def __init__(self, key):
        layers = Stacked.init(LAYERS, NamedBlock, gradient_checkpointing=True)
        self.embedding = hnn.Embedding.init(VOCAB, EMBED, key=key)
        self.layers = layers(key=jax.random.split(key, LAYERS.size))
        self.frozen = hax.ones(EMBED)

    def __call__(self, tokens):
        x = self.embedding.embed(hax.named(tokens, POSITION))
        return self.embedding.unembed(self.layers.fold(x) * self.frozen).array


def is_trained(model):
    """Marks all arrays but `frozen`."""
    trained = jax.tree.map(eqx.is_array, model)
    return eqx.tree_at(lambda m: jax.tree.leaves(m.frozen)[0], trained, replace=False)


def loss_fn(model, tokens):
    logits = jax.vmap(model)(tokens)
    targets = (tokens * 7 + 3) % 64
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(kind, tx, folder=None, *, stream=False, restart_at=None):
    """Returns losses and weights; the run restarts from equinox's own files after a step."""
    model = kind(jax.random.key(0))
    where = is_trained(model)
    weights, rest = eqx.partition(jax.jit(lambda: model)() if kind is Model else model, where)
    state = tx.init(weights)

    @eqx.filter_jit(donate="all-except-first")
    def step(tokens, weights, state):
        def loss_of(weights, tokens):
            return loss_fn(eqx.combine(weights, rest), tokens)

        if stream:
            loss_of = streaming.stream_scans(loss_of)
        read = streaming.stream(weights, state) if stream else weights
        loss, gradients = jax.value_and_grad(loss_of)(read, tokens)
        updates, state = tx.update(gradients, state, weights)
        return eqx.apply_updates(weights, updates), state, loss

    engine = None
    if isinstance(state, zenflow_jax.ZenFlowState):
        engine = zenflow_jax.HostEngine(weights, state)
    losses = []
    for i, tokens in enumerate(TOKENS):
        weights, state, loss = step(jnp.asarray(tokens), weights, state)
        losses.append(float(loss))
        if engine:
            weights, state = engine.exchange(weights, state)
        if i + 1 == restart_at:
            saved = (weights, state, engine.state())
            eqx.tree_serialise_leaves(folder / "run.eqx", saved)
            engine.close()
            weights, _ = eqx.partition(kind(jax.random.key(1)), where)
            state = tx.init(weights)
            like = (weights, state, zenflow_jax.abstract_engine_state(state))
            weights, state, engine_state = eqx.tree_deserialise_leaves(folder / "run.eqx", like)
            engine = zenflow_jax.HostEngine(weights, state, engine_state=engine_state)
    if engine:
        weights, state = engine.flush(weights, state)
        engine.close()
    return losses, jax.tree.map(np.asarray, jax.tree.leaves(weights))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [Model, NamedModel])
def test_training_has_the_same_losses_as_adamw(kind, stream):
    expected, _ = train(kind, optax.adamw(1e-2, weight_decay=1e-2))
    tx = zenflow_jax.zenflow(1e-2, weight_decay=1e-2, **EXACT)
    assert train(kind, tx, stream=stream)[0] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("kind", [Model, NamedModel])
def test_training_layer_by_layer_has_the_same_losses_as_adamw(kind):
    model = kind(jax.random.key(0))
    weights, rest = eqx.partition(model, is_trained(model))
    batches = [{"tokens": tokens, "rest": rest} for tokens in TOKENS]

    def loss_of(weights, batch):
        return loss_fn(eqx.combine(weights, batch["rest"]), batch["tokens"])

    scanned = layerwise.ScannedModel(loss_of, weights, batches[0])
    adamw = optax.adamw(1e-2, weight_decay=1e-2)
    with layerwise.Trainer(scanned.split(weights), **scanned.functions, optimizer=adamw) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches]
        trained = scanned.join(trainer.params())
    expected, expected_weights = train(kind, adamw)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    for x, y in zip(jax.tree.leaves(trained), expected_weights, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)


@pytest.mark.parametrize("kind", [Model, NamedModel])
def test_a_run_resumes_inside_a_window_from_equinox_own_file(kind, tmp_path):
    tx = zenflow_jax.zenflow(1e-2, weight_decay=1e-2)
    whole = train(kind, tx)
    resumed = train(kind, tx, tmp_path, restart_at=5)
    assert resumed[0] == whole[0]
    jax.tree.map(np.testing.assert_array_equal, resumed[1], whole[1])
