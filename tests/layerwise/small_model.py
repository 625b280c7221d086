"""A small model as functions, for the layerwise trainer, and its training with optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

WORDS, WIDTH, LAYERS = 24, 8, 4
BATCHES = [np.random.default_rng(i).integers(0, WORDS, (4, 6)) for i in range(7)]


def new_params(dtype=np.float32):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) / 3, dtype)

    return {
        "outer": {"table": draw(WORDS, WIDTH), "head": draw(WIDTH, WORDS)},
        "layers": [
            {"up": draw(WIDTH, 12), "down": draw(12, WIDTH), "bias": draw(WIDTH)}
            for _ in range(LAYERS)
        ],
    }


def first(outer, batch):
    # All layers share the positions; the scale depends on the outer weights.
    return outer["table"][batch[:, :-1]], (jnp.arange(5.0), jnp.mean(outer["table"]))


def layer(w, x, shared):
    positions, scale = shared
    y = jnp.tanh(x @ w["up"] + scale.astype(x.dtype)) @ w["down"] + w["bias"]
    return x + y * jnp.cos(positions).astype(x.dtype)[:, None]


def last(outer, x, batch):
    # The table has gradients from this line, from the shared scale and from the embedding.
    logits = (x @ (outer["head"] + outer["table"].T)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


MODEL = {"first": first, "layer": layer, "last": last}


def decayed(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in str(path), tree)


def loss_of(params, batch, function=layer, ends=(first, last)):
    carry, shared = ends[0](params["outer"], batch)
    for w in params["layers"]:
        carry = function(w, carry, shared)
    return ends[1](params["outer"], carry, batch)


def reference(tx, params, batches, loss=loss_of):
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch):
        value, g = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state, value

    losses = []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return params, losses


def check_close(tree, other, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), tree, other)


def check_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def masters_of(trainer):
    layers = [trainer.master_params(i) for i in range(LAYERS)]
    return {"outer": trainer.master_params("outer"), "layers": layers}
