"""Errors of the layerwise trainer, and steps whose gradient or loss is not finite."""

import re

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
    check_close,
    check_equal,
    first,
    last,
    layer,
    new_params,
)
from zenflow_jax import layerwise
from zenflow_jax.layerwise import _trainer

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")

SQUARE = jnp.ones((WIDTH, WIDTH))
KEY = jax.random.key(0)
TWO = jnp.float32(2.0)
SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)
times_square = jax.jit(lambda x: x @ SQUARE)
BAD = np.where(np.arange(24).reshape(4, 6) == 0, -7, BATCHES[2])  # its first token is -7


def step_and_wait(trainer, batch):
    trainer.step(batch)
    trainer.wait()


def nan_in_layer(number, when):
    """Returns a model with a finite loss, but a non-finite gradient from one layer on downwards."""

    def broken_layer(w, x, shared):
        new, broken = layer(w, x, shared[:2]), shared[2]
        # The root's derivative at zero is infinite, and zero times infinity is NaN.
        return new + (jnp.sqrt(jnp.where(broken, 0.0 * new, 1.0)) - jnp.where(broken, 0.0, 1.0))

    def broken_first(outer, batch):
        x, shared = first(outer, batch)
        return x, (*shared, batch[0, 0] == when)

    layers = [lambda w, x, shared: layer(w, x, shared[:2])] * LAYERS
    layers[number] = broken_layer
    return {"first": broken_first, "layer": layers, "last": last}


def test_a_non_finite_gradient_changes_nothing_with_updates_after_the_backward_pass():
    batches = [*BATCHES[:2], BAD, *BATCHES[3:5]]
    options = {"optimizer": optax.adamw(optax.linear_schedule(1e-2, 0, 10)), "max_grad_norm": 1.0}
    with layerwise.Trainer(new_params(), **nan_in_layer(1, -7), **options) as trainer:
        for batch in batches:
            trainer.step(batch)
        got = trainer.params()
        assert int(trainer.skipped) == 1
        assert trainer.state()["counts"]["counted"] == 4
    with layerwise.Trainer(new_params(), **MODEL, **options) as trainer:
        for batch in [*BATCHES[:2], *BATCHES[3:5]]:
            trainer.step(batch)
        check_close(got, trainer.params(), atol=1e-6)


def test_a_non_finite_gradient_ends_a_run_that_has_already_updated_layers():
    options = {"optimizer": optax.adamw(1e-2), "updates": "during_backward"}
    with layerwise.Trainer(new_params(), **nan_in_layer(1, -7), **options) as trainer:
        trainer.step(BATCHES[0])
        with pytest.raises(FloatingPointError, match=r"layers\.1 is not finite in step 2"):
            step_and_wait(trainer, BAD)
        for call in (trainer.params, trainer.state, lambda: trainer.step(BATCHES[0])):
            with pytest.raises(FloatingPointError, match="Resume from the last checkpoint"):
                call()
        trainer.close()


@pytest.mark.parametrize(
    ("updates", "leaf"), [("after_backward", "outer.head"), ("during_backward", "layers.3.bias")]
)
def test_a_schedule_that_returns_nan_ends_the_run_by_the_leafs_name(updates, leaf):
    rate = optax.adamw(lambda n: jnp.where(n < 2, 1e-2, jnp.nan))
    with layerwise.Trainer(new_params(), **MODEL, optimizer=rate, updates=updates) as trainer:
        for batch in BATCHES[:3]:
            trainer.step(batch)
        with pytest.raises(FloatingPointError, match=f"{leaf} is not finite in step 3"):
            trainer.step(BATCHES[3])
        trainer.close()


@pytest.mark.parametrize("updates", ["after_backward", "during_backward"])
def test_a_non_finite_loss_skips_the_step_until_a_resumed_run_has_skipped_too_many(updates):
    weights = new_params()
    options = {
        "first": first,
        "layer": layer,
        "last": lambda outer, x, batch: last(outer, x, batch) / (batch[0, 0] != -7),
        "optimizer": optax.adamw(1e-2),
        "updates": updates,
    }
    with layerwise.Trainer(weights, **options) as trainer:
        trainer.step(BAD)
        check_equal(trainer.params(), weights)
        trainer.step(BATCHES[0])
        assert not np.array_equal(trainer.params()["outer"]["head"], weights["outer"]["head"])
        trainer.step(BAD)
        state = trainer.state()
    with layerwise.Trainer(weights, **options, state=state) as trainer:
        assert int(trainer.skipped) == 2
        for _ in range(_trainer._MAX_SKIPPED - 1):
            trainer.step(BAD)
        with pytest.raises(FloatingPointError, match="up to step 33, were skipped"):
            step_and_wait(trainer, BAD)
        trainer.close()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"first": lambda outer, batch: batch}, TypeError, r"must return \(carry, shared\)"),
        ({"last": lambda o, x, b: (x.mean(), x.max())}, TypeError, r"a `layerwise.WeightedLoss`"),
        ({"last": lambda o, x, b: TWO * x.mean()}, ValueError, r"`last` uses .*or Python numbers"),
        ({"layer": lambda w, x, s: x @ w["missing"]}, KeyError, "in layer 0"),
        ({"layer": lambda w, x, s: times_square(x)}, ValueError, "not among its arg"),
        ({"last": lambda o, x, b: jax.random.normal(KEY)}, ValueError, "`last` uses a random key"),
        ({"params": {"outer": {}, "layers": iter([])}}, ValueError, "has no layers"),
        ({"params": {"outer": SHAPE.update(dtype="int8"), "layers": []}}, TypeError, "is int8"),
        ({"params": {"outer": jax.nn.relu, "layers": []}}, TypeError, r"outer is .*eqx.filter\(bl"),
        ({"params": {"outer": SHAPE, "layers": []}}, TypeError, "without a sharding"),
    ],
)
def test_unsuitable_arguments_are_rejected(change, error, text):
    arguments = {"params": new_params(), **MODEL, "optimizer": optax.sgd(1e-2), **change}
    with pytest.raises(error) as caught:
        with layerwise.Trainer(arguments.pop("params"), **arguments) as trainer:
            trainer.step(BATCHES[0])
    notes = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(text, notes), notes


def test_calls_after_an_interrupted_step_are_rejected(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with layerwise.Trainer(new_params(), **MODEL, optimizer=optax.sgd(1e-2)) as trainer:
        trainer.step(BATCHES[0])
        with monkeypatch.context() as patched:
            patched.setattr(trainer._dispatcher, "_update_waiting", interrupt)
            with pytest.raises(KeyboardInterrupt):
                trainer.step(BATCHES[1])
        with pytest.raises(RuntimeError, match="interrupted"):
            trainer.params()
        trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step(BATCHES[0])
