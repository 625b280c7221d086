"""zenflow in a loop of equinox, for a model of haliax, whose layers are `Stacked`."""

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


VOCAB, EMBED, MLP = hax.Axis("vocab", 64), hax.Axis("embed", 32), hax.Axis("mlp", 64)
LAYERS, POSITION = hax.Axis("layers", 4), hax.Axis("position", 16)


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear
    norm: hnn.LayerNorm

    @staticmethod
    def init(*, key):
        up, down = jax.random.split(key)
        return Block(
            hnn.Linear.init(EMBED, MLP, key=up),
            hnn.Linear.init(MLP, EMBED, key=down),
            hnn.LayerNorm.init(EMBED),
        )

    def __call__(self, x):
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class Model(eqx.Module):
    """A model of haliax, as in Levanter."""

    embedding: hnn.Embedding
    layers: Stacked
    frozen: hax.NamedArray

    def __init__(self, key):
        layers = Stacked.init(LAYERS, Block, gradient_checkpointing=True)
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


def train(tx, folder=None, *, stream=False, restart_at=None):
    """Returns losses and weights; the run restarts from equinox's own files after a step."""
    model = Model(jax.random.key(0))
    where = is_trained(model)
    weights, rest = eqx.partition(model, where)
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
            weights, _ = eqx.partition(Model(jax.random.key(1)), where)
            state = tx.init(weights)
            like = (weights, state, zenflow_jax.abstract_engine_state(state))
            weights, state, engine_state = eqx.tree_deserialise_leaves(folder / "run.eqx", like)
            state = zenflow_jax.place(weights, state)  # equinox leaves all arrays on the device
            engine = zenflow_jax.HostEngine(weights, state, engine_state=engine_state)
    if engine:
        weights, state = engine.flush(weights, state)
        engine.close()
    return losses, jax.tree.map(np.asarray, jax.tree.leaves(weights))


@pytest.mark.parametrize("stream", [False, True])
def test_training_has_the_same_losses_as_adamw(stream):
    expected, _ = train(optax.adamw(1e-2, weight_decay=1e-2))
    tx = zenflow_jax.zenflow(1e-2, weight_decay=1e-2, **EXACT)
    assert train(tx, stream=stream)[0] == pytest.approx(expected, abs=TOLERANCE)


def test_training_layer_by_layer_has_the_same_losses_as_adamw():
    model = Model(jax.random.key(0))
    weights, rest = eqx.partition(model, is_trained(model))
    batches = [{"tokens": tokens, "rest": rest} for tokens in TOKENS]

    def loss_of(weights, batch):
        return loss_fn(eqx.combine(weights, batch["rest"]), batch["tokens"])

    scanned = layerwise.ScannedModel(loss_of, weights, batches[0])
    adamw = optax.adamw(1e-2, weight_decay=1e-2)
    with layerwise.Trainer(scanned.split(weights), **scanned.functions, optimizer=adamw) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches]
        trained = scanned.join(trainer.params())
    expected, expected_weights = train(adamw)
    assert losses == pytest.approx(expected, abs=TOLERANCE)
    for x, y in zip(jax.tree.leaves(trained), expected_weights, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-3)


def test_a_run_resumes_inside_a_window_from_equinox_own_file(tmp_path):
    tx = zenflow_jax.zenflow(1e-2, weight_decay=1e-2)
    whole = train(tx)
    resumed = train(tx, tmp_path, restart_at=5)
    assert resumed[0] == whole[0]
    jax.tree.map(np.testing.assert_array_equal, resumed[1], whole[1])
