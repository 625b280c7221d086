"""The layerwise trainer equals AdamW on the whole model, and rejects unsuitable arguments."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zenflow_jax
from zenflow_jax import layerwise

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")

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
    # Positions are the same for all layers; the scale depends on the outer weights.
    return outer["table"][batch[:, :-1]], (jnp.arange(5.0), jnp.mean(outer["table"]))


def layer(w, x, shared):
    positions, scale = shared
    y = jnp.tanh(x @ w["up"] + scale.astype(x.dtype)) @ w["down"] + w["bias"]
    return x + y * jnp.cos(positions).astype(x.dtype)[:, None]


def last(outer, x, batch):
    # The table has gradients from this line, from the shared scale and from the embedding.
    logits = (x @ (outer["head"] + outer["table"].T)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


SQUARE = jnp.ones((WIDTH, WIDTH))
FLOAT8 = jnp.ones(2, jnp.float8_e4m3fn)
times_square = jax.jit(lambda x: x @ SQUARE)
MODEL = {"first": first, "layer": layer, "last": last}


def loss_of(params, batch, functions=(layer,) * LAYERS, ends=(first, last)):
    carry, shared = ends[0](params["outer"], batch)
    for function, w in zip(functions, params["layers"], strict=True):
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


def step_and_wait(trainer, batch):
    trainer.step(batch)
    trainer.wait()


def decayed(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: "bias" not in str(path), tree)


@pytest.mark.parametrize("updates", ["after_backward", "during_backward"])
@pytest.mark.parametrize(
    ("parts", "inputs", "kernel"), [(1, "device", "numba"), (2, "host", "numpy")]
)
def test_a_run_equals_adamw(updates, parts, inputs, kernel):
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 7)
    tx = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=decayed)
    expected, losses = reference(tx, new_params(), BATCHES)
    options = {"updates": updates, "inputs": inputs, "host_kernel": kernel, "mask": decayed}
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


def test_clipping_after_the_backward_pass_is_exact_and_during_it_is_close():
    limit = 0.7  # norms are at least 0.9
    # Without memory or curvature AdamW moves by the sign; a large eps makes it follow the size.
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


def test_layers_may_be_of_several_kinds_be_frozen_or_hold_parts_of_a_table():
    """Like a decoder with a split vocabulary: an embedding, layers, a norm."""
    outer = new_params()["outer"]
    rows, head = np.split(np.asarray(outer["table"]), 3), np.split(np.asarray(outer["head"]).T, 3)

    def start(outer, batch):
        tokens = batch[:, :-1]
        return (jnp.zeros((*tokens.shape, WIDTH)), jnp.int32(0)), (tokens, batch[:, 1:])

    def embed(part, carry, shared):
        (x, begin), tokens = carry, shared[0] - carry[1]
        inside = (tokens >= 0) & (tokens < len(part))
        taken = part[jnp.clip(tokens, 0, len(part) - 1)]
        return jnp.where(inside[..., None], taken, x), begin + len(part)

    def block(w, carry, shared):
        x, begin = carry
        return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["bias"], begin * 0

    def end(part, carry, shared):
        zeros = jnp.zeros(shared[1].shape)
        x, begin, total, target = (*carry, zeros, zeros)[:4]
        logits = x @ part.T
        at = jax.nn.one_hot(shared[1] - begin, len(part))
        return x, begin + len(part), total + jnp.exp(logits).sum(-1), target + (logits * at).sum(-1)

    def finish(outer, carry, batch):
        return jnp.mean(jnp.log(carry[2]) - carry[3])

    functions = [jax.checkpoint(embed)] * 3 + [block] * LAYERS + [end] * 3
    params = {"outer": {}, "layers": [*rows, *new_params()["layers"], *head]}
    frozen = [4, 5]

    def whole(params, batch):
        layers = [
            jax.lax.stop_gradient(w) if i in frozen else w for i, w in enumerate(params["layers"])
        ]
        return loss_of({"outer": {}, "layers": layers}, batch, functions, (start, finish))

    tx = optax.adamw(1e-2, weight_decay=0.0)
    expected, losses = reference(tx, params, BATCHES, whole)
    model = {"first": start, "layer": functions, "last": finish}
    with layerwise.Trainer(
        params, **model, learning_rate=1e-2, weight_decay=0.0, frozen=frozen
    ) as trainer:
        got = [float(trainer.step(batch)) for batch in BATCHES]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        check_close(trainer.params(), expected)
        (program,) = trainer._dispatcher._programs.values()
    check_equal(trainer._blocks[5].leaves[0].pieces, ())
    # The input of an embedding's part is not kept, and the head's parts share one input.
    assert [x.kept for x in program.layers[:3]] == [(1,)] * 3
    assert [dict(x.passed) for x in program.layers[-2:]] == [{0: 0}] * 2


def test_python_numbers_promote_as_in_any_jitted_function():
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


@pytest.mark.parametrize("host_state", ["float32", "compact"])
@pytest.mark.parametrize("by", ["state", "orbax"])
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


def test_a_state_fits_only_the_same_frozen_layers():
    with layerwise.Trainer(new_params(), **MODEL, learning_rate=0.1, frozen=[0]) as trainer:
        state = trainer.state()
        for name in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"No layer is named .'{name}'.: .* 0 to 3"):
                trainer.master_params(name)
    for frozen in ([1], [0, 1], []):
        with pytest.raises(zenflow_jax.planning.UnfitRunError, match="and `frozen`"):
            layerwise.Trainer(new_params(), **MODEL, learning_rate=0.1, frozen=frozen, state=state)


def nan_in_layer(number, when):
    """A model whose gradient, but not its loss, is not finite in one layer and those below."""

    @jax.custom_vjp
    def break_gradient(x, broken):
        return x

    break_gradient.defvjp(
        lambda x, broken: (x, broken), lambda broken, g: (jnp.where(broken, jnp.nan, g), None)
    )

    def make(i):
        def broken_layer(w, x, shared):
            new = layer(w, x, shared[:2])
            return break_gradient(new, shared[2]) if i == number else new

        return broken_layer

    def broken_first(outer, batch):
        x, shared = first(outer, batch)
        return x, (*shared, batch[0, 0] == when)

    return {"first": broken_first, "layer": [make(i) for i in range(LAYERS)], "last": last}


def test_a_non_finite_gradient_changes_nothing_after_the_backward_pass():
    bad = BATCHES[2].copy()
    bad[0, 0] = -7
    batches = [*BATCHES[:2], bad, *BATCHES[3:5]]
    rate = optax.linear_schedule(1e-2, 0, 10)
    with layerwise.Trainer(
        new_params(), **nan_in_layer(1, -7), learning_rate=rate, max_grad_norm=1.0
    ) as trainer:
        for batch in batches:
            trainer.step(batch)
        got = trainer.params()
        assert trainer.stats.skipped_steps == 1
        assert trainer.state()["counts"]["counted"] == 4
    with layerwise.Trainer(new_params(), **MODEL, learning_rate=rate, max_grad_norm=1.0) as trainer:
        for batch in [*BATCHES[:2], *BATCHES[3:5]]:
            trainer.step(batch)
        check_close(got, trainer.params(), atol=1e-6)


def test_a_non_finite_gradient_ends_a_run_that_has_already_updated_layers():
    bad = BATCHES[2].copy()
    bad[0, 0] = -7
    options = {"learning_rate": 1e-2, "updates": "during_backward"}
    with layerwise.Trainer(new_params(), **nan_in_layer(1, -7), **options) as trainer:
        trainer.step(BATCHES[0])
        with pytest.raises(FloatingPointError, match="layers.1 is not finite in step 2"):
            step_and_wait(trainer, bad)
        for call in (trainer.params, trainer.state, lambda: trainer.step(BATCHES[0])):
            with pytest.raises(FloatingPointError, match="Resume from the last checkpoint"):
                call()
        trainer.close()


def test_a_non_finite_loss_skips_the_step_in_both_modes():
    for updates in ("after_backward", "during_backward"):
        weights = new_params()
        with layerwise.Trainer(
            weights,
            first=first,
            layer=layer,
            last=lambda outer, x, batch: last(outer, x, batch) / (batch[0, 0] != -7),
            learning_rate=1e-2,
            updates=updates,
            max_skipped=2,
        ) as trainer:
            bad = BATCHES[0].copy()
            bad[0, 0] = -7
            trainer.step(bad)
            check_equal(trainer.params(), weights)
            trainer.step(BATCHES[0])
            assert not np.array_equal(trainer.params()["outer"]["head"], weights["outer"]["head"])
            trainer.step(bad)
            with pytest.raises(FloatingPointError, match="last 2 steps"):
                step_and_wait(trainer, bad)
            trainer.close()


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


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"first": lambda outer, batch: batch}, TypeError, r"must return \(carry, shared\)"),
        ({"last": lambda outer, x, batch: x}, TypeError, "must return a float scalar"),
        ({"last": lambda o, x, b: (x.mean(), x.max())}, TypeError, r"a `layerwise.WeightedLoss`"),
        ({"last": lambda o, x, b: (x @ SQUARE).mean()}, ValueError, "`last` uses an array"),
        (
            {"layer": lambda w, x, s: x @ w["up"]},
            TypeError,
            r"layer 1, called with .*5, 12",
        ),
        ({"layer": lambda w, x, s: x @ w["missing"]}, KeyError, "in layer 0"),
        ({"layer": lambda w, x, s: x @ SQUARE}, ValueError, "not among its arg"),
        ({"layer": lambda w, x, s: times_square(x)}, ValueError, "not among its arg"),
        ({"layer": [layer] * 3}, ValueError, "3 functions for 4 layers"),
        ({"frozen": [4]}, ValueError, "the layers are 0 to 3"),
        ({"updates": "late"}, ValueError, "during_backward"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm"),
        ({"params": {"outer": {}, "layers": [np.arange(3)]}}, TypeError, "layers.0 is int.., but"),
        ({"params": {"layers": []}}, TypeError, '"outer" and "layers"'),
        ({"params": {"outer": {}, "layers": {"up": SQUARE}}}, TypeError, "is a mapping"),
        ({"params": {"outer": FLOAT8, "layers": []}}, TypeError, "outer is float8_e4m3fn"),
        ({"mask": lambda tree: dict.fromkeys("abc", True)}, TypeError, "`mask` and .* differ"),
    ],
)
def test_unsuitable_arguments_are_rejected(change, error, text):
    arguments = {"params": new_params(), **MODEL, "learning_rate": 1e-2, **change}
    with pytest.raises(error) as caught:
        with layerwise.Trainer(arguments.pop("params"), **arguments) as trainer:
            trainer.step(BATCHES[0])
    notes = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(text, notes), notes


def test_calls_after_an_interrupted_step_are_rejected(monkeypatch):
    with layerwise.Trainer(new_params(), **MODEL, learning_rate=1e-2) as trainer:
        trainer.step(BATCHES[0])

        def interrupt(*_):
            raise KeyboardInterrupt

        reported = []
        monkeypatch.setattr(trainer._peers, "report", reported.append)
        monkeypatch.setattr(trainer._dispatcher, "_send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(BATCHES[1])
        assert reported == ["KeyboardInterrupt()"]  # to other processes, which would wait
        with pytest.raises(RuntimeError, match="interrupted"):
            trainer.params()
        trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step(BATCHES[0])
