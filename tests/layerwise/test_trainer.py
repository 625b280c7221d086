"""The layerwise trainer equals AdamW on the whole model, and resumes bit-identically."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zenflow_jax
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
    loss_of,
    new_params,
    reference,
)
from zenflow_jax import layerwise
from zenflow_jax.layerwise._dispatch import Dispatcher

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")


def masters_of(trainer):
    layers = [trainer.master_params(i) for i in range(LAYERS)]
    return {"outer": trainer.master_params("outer"), "layers": layers}


@pytest.mark.parametrize(
    ("updates", "parts", "inputs", "kernel"),
    [("after_backward", 1, "device", "numba"), ("during_backward", 2, "host", "numpy")],
)
def test_a_run_equals_adamw(updates, parts, inputs, kernel):
    def mask(tree):
        of_layers = [decayed(w) for w in tree["layers"]]
        of_layers[1] = False  # the frozen layer
        return {"outer": decayed(tree["outer"]), "layers": of_layers}

    def with_a_frozen_layer(params, batch):
        layers = list(params["layers"])
        layers[1] = jax.lax.stop_gradient(layers[1])
        return loss_of(params | {"layers": layers}, batch)

    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 7)
    tx = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=mask)
    expected, losses = reference(tx, new_params(), BATCHES, with_a_frozen_layer)
    options = {"updates": updates, "inputs": inputs, "host_kernel": kernel}
    options |= {"frozen": [1], "mask": decayed}
    with layerwise.Trainer(
        new_params(), **MODEL, learning_rate=rate, b2=0.99, weight_decay=0.1, **options
    ) as trainer:
        got = [float(trainer.step(*np.split(batch, parts))) for batch in BATCHES]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        check_close(trainer.params(), expected)
        check_equal(masters_of(trainer), trainer.params())
        value = loss_of(trainer.params(), BATCHES[0])
        np.testing.assert_allclose(trainer.evaluate(BATCHES[0]), value, rtol=1e-6)
        logits = trainer.evaluate(BATCHES[0], lambda outer, x, _: x @ outer["head"])
        assert logits.shape == (4, 5, WORDS)
        assert trainer.stats.steps == len(BATCHES)
        assert {"forward", "backward"} <= {span.kind for span in trainer.timeline.spans}
        check_equal(trainer._blocks[2].leaves[0].pieces, ())  # a frozen layer has no moments


def test_clipping_after_the_backward_pass_is_exact_and_during_it_is_close():
    limit = 0.7  # norms are at least 0.9
    # Without memory of earlier gradients, AdamW moves by the sign, and with a large eps by the
    # size.
    adam = {"learning_rate": 1.0, "b1": 0.0, "b2": 0.0, "eps": 1e4, "weight_decay": 0.0}
    moves = {}
    for updates in ("after_backward", "during_backward"):
        with layerwise.Trainer(
            new_params(), **MODEL, **adam, max_grad_norm=limit, updates=updates
        ) as trainer:
            for batch in BATCHES[:3]:
                before = trainer.params()
                trainer.step(batch)
            after = trainer.params()
        moves[updates] = jax.tree.map(lambda x, y: (x - y) * 1e4, after, before)
        norm = float(optax.tree.norm(moves[updates]))
        assert norm == pytest.approx(limit, rel=1e-3 if updates == "after_backward" else 0.3)
    # A projection scales each layer by a number.
    for exact, projected in zip(*(x["layers"] for x in moves.values()), strict=True):
        ratio = float(optax.tree.norm(projected) / optax.tree.norm(exact))
        check_close(projected, jax.tree.map(lambda x, r=ratio: x * r, exact), atol=1e-3)


@pytest.mark.parametrize(("inputs", "memory"), [("device", "device"), ("host", "pinned_host")])
def test_layer_inputs_are_kept_in_the_memory_that_inputs_names(inputs, memory, monkeypatch):
    keep, kinds = Dispatcher._keep, set()

    def kept(*args):
        result = keep(*args)
        kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(result))
        return result

    monkeypatch.setattr(Dispatcher, "_keep", kept)
    with layerwise.Trainer(new_params(), **MODEL, learning_rate=1e-2, inputs=inputs) as trainer:
        trainer.step(BATCHES[0])
    assert kinds == {memory}


def test_micro_batches_are_weighted():
    def weighing(outer, x, batch):
        logits = x @ outer["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        counted = batch[:, 1:] > 5
        targets = counted.sum()
        return layerwise.WeightedLoss((losses * counted).sum() / jnp.maximum(targets, 1), targets)

    def whole(params, batch):
        return loss_of(params, batch, ends=(first, lambda *args: weighing(*args)[0]))

    expected, losses = reference(optax.adamw(1e-2), new_params(), BATCHES, whole)
    with layerwise.Trainer(
        new_params(), **(MODEL | {"last": weighing}), learning_rate=1e-2
    ) as trainer:
        got = [float(trainer.step(*np.split(batch, 4))) for batch in BATCHES]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        check_close(trainer.params(), expected)


def test_python_numbers_promote_and_a_backward_pass_gets_only_inputs_that_it_needs():
    def start(outer, batch):
        x = outer["table"][batch["tokens"][:, :-1]]
        return {"x": x, "kept": x * batch["scale"], "count": 2, "half": 0.5}, None

    def block(w, carry, _):
        x = jnp.tanh(carry["x"] @ w["up"]) @ w["down"] * carry["half"]
        return carry | {"x": x, "kept": carry["kept"] + x, "count": carry["count"] - 1}

    def finish(outer, carry, batch):
        return last(outer, carry["kept"] * (carry["count"] == 2 - LAYERS), batch["tokens"])

    params = new_params(jnp.bfloat16)
    batch = {"tokens": BATCHES[0], "scale": 0.5}
    model = {"first": start, "layer": block, "last": finish}
    with layerwise.Trainer(params, **model, learning_rate=1e-2) as trainer:
        loss = trainer.step(batch)
        (program,) = trainer._dispatcher._programs.values()
    # All layers share the array of `half`, and their backward passes need only `half` and `x`.
    assert [dict(layer.passed) for layer in program.layers] == [{1: 1}] * LAYERS
    assert [layer.kept for layer in program.layers] == [(1, 3)] * LAYERS
    expected = jax.jit(loss_of, static_argnums=(2, 3))(
        params, batch, (block,) * LAYERS, (start, finish)
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)


def test_bfloat16_weights_are_the_casts_of_float32_masters():
    with layerwise.Trainer(new_params(jnp.bfloat16), **MODEL, learning_rate=1e-2) as trainer:
        for batch in BATCHES:
            loss = trainer.step(batch)
        masters, params = masters_of(trainer), trainer.params()
        assert trainer.stats.host_bytes == 12 * sum(x.size for x in jax.tree.leaves(params))
    _, losses = reference(optax.adamw(1e-2), new_params(), BATCHES)
    assert float(loss) == pytest.approx(losses[-1], rel=2e-2)
    check_equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters), params)


@pytest.mark.parametrize(("host_state", "by"), [("compact", "state"), ("float32", "orbax")])
def test_a_resumed_run_is_bit_identical(tmp_path, host_state, by):
    updates = "during_backward" if by == "orbax" else "after_backward"
    options = {**MODEL, "learning_rate": optax.linear_schedule(1e-2, 0, 7), "updates": updates}
    options |= {"host_state": host_state, "max_grad_norm": 0.5}
    dtype = jnp.bfloat16
    manager = ocp.CheckpointManager(tmp_path)
    with layerwise.Trainer(new_params(dtype), **options) as trainer, manager:
        for batch in BATCHES[:3]:
            trainer.step(batch)
        if by == "state":
            saved = trainer.state()
        else:
            manager.save(3, args=zenflow_jax.EngineSave(trainer))
        for batch in BATCHES[3:]:  # while orbax writes
            trainer.step(batch)
        expected = masters_of(trainer)
        manager.wait_until_finished()
        if by == "orbax":
            saved = manager.restore(3, args=zenflow_jax.EngineRestore())
        with layerwise.Trainer(new_params(dtype), **options, state=saved) as resumed:
            assert resumed.steps == 3
            for batch in BATCHES[3:]:
                resumed.step(batch)
            check_equal(masters_of(resumed), expected)


def test_the_device_holds_the_weights_of_two_layers_at_a_time(monkeypatch):
    from zenflow_jax.layerwise._blocks import Block

    most = []

    def count():
        live = [x for x in jax.live_arrays() if x.shape == (WIDTH, 12) and not x.is_deleted()]
        return sum(x.sharding.memory_kind == "device" for x in live)

    def counting(block, weights):
        fetched = original(block, weights)
        most.append(count())
        return fetched

    params = jax.tree.map(np.asarray, new_params())
    with layerwise.Trainer(params, **MODEL, learning_rate=1e-2) as trainer:
        trainer.step(BATCHES[0])
        trainer.wait()
        original = Block.to_device
        monkeypatch.setattr(Block, "to_device", counting)
        before = count()
        trainer.step(BATCHES[1])
    # Two layers' weights, and the gradients in flight.
    assert 2 <= max(most) - before <= 4, most
