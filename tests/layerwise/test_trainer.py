"""The layerwise trainer equals the optimizer on the whole model, in bounded memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.compilations import compilations
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
    masters_of,
    new_params,
    reference,
)
from zenflow_jax import layerwise
from zenflow_jax.layerwise import _optimizer, _transfers
from zenflow_jax.layerwise._dispatch import Dispatcher

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")


@pytest.mark.parametrize(
    ("updates", "parts", "inputs"),
    [("after_backward", 1, "device"), ("during_backward", 2, "host")],
)
def test_a_run_equals_adamw(updates, parts, inputs):
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 7)
    optimizer = optax.adamw(rate, weight_decay=0.1, mask=decayed)
    expected, losses = reference(optimizer, new_params(), BATCHES)
    with layerwise.Trainer(
        new_params(), **MODEL, optimizer=optimizer, updates=updates, inputs=inputs
    ) as trainer:
        got = [float(trainer.step(*np.split(batch, parts))) for batch in BATCHES]
        params = jax.tree.map(np.asarray, trainer.params())
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        check_close(params, expected)
        check_equal(masters_of(trainer), params)
        value = loss_of(params, BATCHES[0])
        np.testing.assert_allclose(trainer.evaluate(BATCHES[0]), value, rtol=1e-6)
        logits = trainer.evaluate(BATCHES[0], lambda outer, x, _: x @ outer["head"])
        assert logits.shape == (4, 5, WORDS)
        assert (trainer.steps, int(trainer.skipped)) == (len(BATCHES), 0)


def test_a_master_survives_a_weights_rounding():
    # 1 + n / 512 needs two more bits than bfloat16 has; a halfway case may move by one unit.
    numbers = np.arange(-300, 300, dtype=np.float32) / 512 + 1
    master = jnp.asarray(np.concatenate([numbers, 1 / numbers[5:], [3e38, -1e-30, 0.0]]))
    weight = _optimizer._rounded(master, jnp.bfloat16)
    made = _optimizer.master_of(weight, _optimizer._rest(master, weight))
    np.testing.assert_array_equal(weight, master.astype(jnp.bfloat16))
    off = np.asarray(made).view(np.int32) - np.asarray(master).view(np.int32)
    halfway = np.asarray(master).view(np.int32) & 0xFFFF == 0x8000
    assert set(off[halfway]) == {-1, 0}
    assert not off[~halfway].any()


def test_clipping_after_the_backward_pass_is_exact_and_during_it_is_close():
    limit, moves = 0.7, {}  # norms are at least 0.9
    whole = optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0))
    expected, _ = reference(whole, new_params(), BATCHES[:3])
    for updates in ("after_backward", "during_backward"):
        with layerwise.Trainer(
            new_params(), **MODEL, optimizer=optax.sgd(1.0), max_grad_norm=limit, updates=updates
        ) as trainer:
            for batch in BATCHES[:3]:
                before = jax.device_get(trainer.params())
                trainer.step(batch)
            after = jax.device_get(trainer.params())
        moves[updates] = jax.tree.map(lambda x, y: x - y, after, before)
        if updates == "after_backward":
            check_close(after, expected)
    assert float(optax.tree.norm(moves["during_backward"])) == pytest.approx(limit, rel=0.3)
    # A projection scales each layer by a number.
    for exact, projected in zip(*(x["layers"] for x in moves.values()), strict=True):
        ratio = float(optax.tree.norm(projected) / optax.tree.norm(exact))
        assert ratio == pytest.approx(1, abs=0.3)


def test_without_clipping_both_orders_of_updates_and_any_bytes_in_flight_give_the_same_bits():
    results = []
    for updates in ("after_backward", "during_backward"):
        for in_flight_bytes in (None, 0, 10**9):
            with layerwise.Trainer(
                new_params(jnp.bfloat16),
                **MODEL,
                optimizer=optax.lion(1e-2),
                updates=updates,
                in_flight_bytes=in_flight_bytes,
            ) as trainer:
                for batch in BATCHES[:3]:
                    trainer.step(batch)
                results.append(masters_of(trainer))
                params = trainer.params()
    # Weights are the casts of masters, which have more bits.
    check_equal(jax.tree.map(lambda x: x.astype(jnp.bfloat16), results[0]), params)
    assert not np.array_equal(results[0]["outer"]["head"], jnp.float32(params["outer"]["head"]))
    for result in results[1:]:
        check_equal(result, results[0])


def weighing(outer, x, batch):
    logits = x @ outer["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
    counted = batch[:, 1:] > 5
    targets = counted.sum()
    return layerwise.WeightedLoss((losses * counted).sum() / jnp.maximum(targets, 1), targets)


def test_micro_batches_are_weighted():
    def whole(params, batch):
        return loss_of(params, batch, ends=(first, lambda *args: weighing(*args)[0]))

    expected, losses = reference(optax.adamw(1e-2), new_params(), BATCHES, whole)
    model = MODEL | {"last": weighing}
    with layerwise.Trainer(new_params(), **model, optimizer=optax.adamw(1e-2)) as trainer:
        got = [float(trainer.step(*np.split(batch, 4))) for batch in BATCHES]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        check_close(trainer.params(), expected)


@pytest.mark.parametrize("kind", ["pinned_host", "device"])
def test_a_copy_has_the_type_of_a_device_put_but_runs_no_program(kind):
    start = {"pinned_host": "device", "device": "pinned_host"}[kind]
    at = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=start)
    x = jax.device_put(np.arange(11, dtype=np.float32), at)  # of no other test's shape
    put = jax.device_put(x, at.with_memory_kind(kind))
    with compilations() as names:
        (got,) = _transfers.moved(kind, [x])
        got.block_until_ready()
    assert names == []
    assert (got.aval, got.sharding, got.committed) == (put.aval, put.sharding, put.committed)
    np.testing.assert_array_equal(got, x)
    x.delete()
    np.testing.assert_array_equal(got, put)
    with pytest.raises(RuntimeError, match="deleted"):
        _transfers.moved(kind, [x])


def device_bytes():
    arrays = {id(x): x for x in jax.live_arrays() if not x.is_deleted()}
    return sum(x.nbytes for x in arrays.values() if x.sharding.memory_kind == "device")


@pytest.mark.parametrize("updates", ["after_backward", "during_backward"])
def test_the_device_holds_a_few_layers_however_many_micro_batches_there_are(monkeypatch, updates):
    most, original = {}, Dispatcher._fetch
    batches = [np.concatenate([batch] * 4) for batch in BATCHES]
    for parts in (1, 4, 16):
        with layerwise.Trainer(
            new_params(), **MODEL, optimizer=optax.adamw(1e-2), updates=updates
        ) as trainer:
            trainer.step(*np.split(batches[0], parts))
            trainer.wait()
            before, seen = device_bytes(), []

            def counted(*args, seen=seen):
                result = original(*args)
                seen.append(device_bytes())
                return result

            with monkeypatch.context() as patched:
                patched.setattr(Dispatcher, "_fetch", counted)
                trainer.step(*np.split(batches[1], parts))
            most[parts] = max(seen) - before
    outer, one = 4 * 2 * WORDS * WIDTH, 4 * (2 * 12 * WIDTH + WIDTH)
    inputs = 4 * LAYERS * (16 * 5 * WIDTH)
    # The outer weights and their gradient; weights of three layers, gradients of two, and the
    # state of three leaves; other arrays are small.
    assert most[1] < 2 * outer + 5 * one + 3 * 3 * outer + inputs + 3000
    assert max(most.values()) <= most[1] * 1.05


def test_a_trainer_without_an_optimizer_evaluates_and_holds_only_the_weights():
    params = new_params(jnp.bfloat16)
    with layerwise.Trainer(params, **MODEL, optimizer=None) as trainer:
        value = jax.jit(loss_of)(params, BATCHES[0])
        assert float(trainer.evaluate(BATCHES[0])) == pytest.approx(float(value), rel=1e-3)
        (saved,) = {tuple(leaf) for leaf in trainer.state()["leaves"]}
        assert saved == ("weight",)
        check_equal(masters_of(trainer), jax.tree.map(jnp.float32, params))
        with pytest.raises(ValueError, match="can only evaluate"):
            trainer.step(BATCHES[0])


def test_a_trainer_shares_no_array_with_its_caller():
    in_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for where in (in_host, jax.devices()[0]):
        params = jax.device_put(new_params(), where)
        with layerwise.Trainer(params, **MODEL, optimizer=optax.sgd(0.1)) as trainer:
            jax.tree.map(lambda x: x.delete(), params)
            assert np.isfinite(float(trainer.step(BATCHES[0])))
            held = trainer.params()
            trainer.step(BATCHES[1])
            assert np.isfinite(np.asarray(held["layers"][0]["up"])).all()


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
    with layerwise.Trainer(params, **model, optimizer=optax.sgd(1e-2)) as trainer:
        loss = trainer.step(batch)
        (program,) = trainer._dispatcher._programs.values()
    # All layers share the array of `half`, and their backward passes need only `half` and `x`.
    assert [dict(layer.passed) for layer in program.blocks[1:]] == [{1: 1}] * LAYERS
    assert [layer.kept for layer in program.blocks[1:]] == [(3, 1)] * LAYERS
    expected = jax.jit(loss_of, static_argnums=(2, 3))(params, batch, block, (start, finish))
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
