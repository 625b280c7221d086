"""Layers whose weights lie in pinned host memory: the same run, to the bit, or an error."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.device.streamed_runs import EACH_STEP, Run, batches, block, hosted, loss, model
from tests.resuming import copied
from zenflow_jax import streaming
from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._host.arrays import copied as aligned

WINDOWS = {"rolling": False, "window_scaling": None}
ON_HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)


def whole(dtype, *, bad=None, steps=14, **options):
    run = Run(dtype, **options)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.go(engine, 0, steps, bad)
        ended = run.end(engine, masters=dtype != "float32")
    assert run.program._cache_size() == 1
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bfloat16", {}),
        ("bfloat16", WINDOWS | {"body": jax.checkpoint(block, prevent_cse=False), "bad": 7}),
        # XLA contracts the last sum of a step to another operation, if it optimizes.
        ("float32", EACH_STEP | {"optimized": False}),
    ],
    ids=["default", "the paper's, a step skipped", "float32, each step"],
)
def test_a_run_has_the_bits_of_one_whose_layers_are_on_the_device(dtype, options):
    ours, expected = (whole(dtype, hosts=hosts, **options) for hosts in (True, False))
    kinds = {name: x.sharding.memory_kind for name, x in ours[0]["layers"].items()}
    assert kinds == {"up": HOST, "down": HOST, "scale": "device"}
    assert_same_bits(*(jax.tree.map(np.asarray, x) for x in (ours, expected)))


def test_a_run_goes_on_from_what_is_saved_between_two_flushes():
    run = Run("bfloat16", optimized=False)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.go(engine, 0, 8)
        saved = copied((run.params, run.state, engine.state()))
        run.go(engine, 8, 14)
        expected = run.end(engine)
    run.params, run.state, engine_state = saved
    run.losses = run.losses[:8]
    with zenflow_jax.HostEngine(run.params, run.state, engine_state=engine_state) as engine:
        run.go(engine, 8, 14)
        assert_same_bits(run.end(engine), expected)


def test_parameters_that_a_saver_has_put_together_are_put_there_again():
    run, batch = Run("bfloat16", optimized=False), next(batches(1, "bfloat16"))
    restored = jax.tree.map(
        # As orbax does: jax takes such an array to be on the device.
        lambda x: jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x]),
        run.params,
    )
    with zenflow_jax.HostEngine(restored, run.state) as engine:
        run.params = restored
        with pytest.raises(ValueError, match=r"jax does not know the memory: put them there again"):
            run.step(batch)
        run.params = jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), restored)
        run.go(engine, 0, 1)
        engine.flush(run.params, run.state)


@pytest.mark.parametrize("hosts", [True, False])
def test_a_run_does_not_go_on_with_layers_in_another_memory(hosts):
    run, other = (Run("bfloat16", hosts=x, optimized=False) for x in (hosts, not hosts))
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.go(engine, 0, 1)
        engine_state = engine.state()
        engine.flush(run.params, run.state)
    memory = ["the device's", "the host's"][hosts]
    with pytest.raises(ValueError, match=rf"memory of .*'down'\] is .*, but was {memory}"):
        zenflow_jax.HostEngine(other.params, other.state, engine_state=engine_state)


def test_a_step_that_donates_passes_them_on_and_one_that_does_not_is_told(caplog):
    for donate in (True, False):
        run = Run("bfloat16", donate=donate, optimized=False)
        # The first step is given memory of NumPy's, as of loaded weights.
        run.params = jax.tree.map(
            lambda x: jax.device_put(aligned(np.array(x)), x.sharding), run.params
        )
        with (
            caplog.at_level(logging.WARNING, "zenflow_jax"),
            zenflow_jax.HostEngine(run.params, run.state) as engine,
        ):
            run.go(engine, 0, 6)
            engine.flush(run.params, run.state)
        assert ("the step copies" in caplog.text) != donate


@pytest.mark.parametrize(("donate", "where"), [(True, "in the step"), (False, "between two steps")])
def test_what_changes_them_ends_the_run(donate, where):
    def halved(params):
        up = params["layers"]["up"]
        half = jax.device_put(jnp.asarray(0.5, up.dtype), jax.memory.Space.Host)
        return params | {"layers": params["layers"] | {"up": up * half}}

    run = Run("bfloat16", donate=donate, optimized=False)
    plain = run.program

    @functools.partial(jax.jit, donate_argnums=(0, 1) if donate else ())
    def step(params, state, x, y):
        params, state, value = plain(params, state, x, y)
        return halved(params), state, value

    engine = zenflow_jax.HostEngine(run.params, run.state)
    run.go(engine, 0, 4)
    if where == "in the step":
        run.program = step
    else:
        run.params = halved(run.params)
    with pytest.raises(RuntimeError, match=r"zenflow changed \['layers'\]\['up'\]"):
        run.go(engine, 4, 14)
    # The engine stays refused.
    for call in (
        lambda: engine.exchange(run.params, run.state),
        lambda: engine.flush(run.params, run.state),
        engine.state,
    ):
        with pytest.raises(RuntimeError, match=r"zenflow changed \['layers'\]\['up'\]"):
            call()
    engine.close()


def test_weights_that_are_loaded_after_init_or_not_whole_are_refused():
    run, other = Run("float32", optimized=False), hosted(model("bfloat16"))
    loaded = jax.tree.map(
        lambda x, y: jax.device_put(np.asarray(x, np.float32), y.sharding), other, run.params
    )
    with pytest.raises(ValueError, match=r"\['down'\] that `tx.init` saw, got others"):
        zenflow_jax.HostEngine(loaded, run.state)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.go(engine, 0, 1)
        with pytest.raises(ValueError, match=r"\['down'\] without NaN before the first step"):
            zenflow_jax.HostEngine(run.params, run.tx.init(run.params))
        run.params = loaded
        with pytest.raises(RuntimeError, match=r"zenflow changed \['layers'\]\['down'\]"):
            run.go(engine, 1, 2)
        engine.close()


def a_norm(params):
    layers = params["layers"]
    return params | {"layers": layers | {"scale": jax.device_put(layers["scale"], ON_HOST)}}


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({}, a_norm, r"a leaf of float32 \(3, 16\) at \['layers'\]\['scale'\]"),
        ({"topk_ratio": 1.0}, dict, r"a leaf of float32 \(3, 36, 16\)"),
        ({"send_gradients": "after_step"}, dict, "got another of these"),
        ({"staleness": 2}, dict, "got staleness=2"),
    ],
)
def test_what_cannot_be_trained_in_host_memory_is_refused_by_name(options, change, words):
    params = change(hosted(model("float32")))
    with pytest.raises(ValueError, match=f"expected in host memory only layers .*{words}"):
        zenflow_jax.zenflow(1e-2, **({"update_interval": 3} | options)).init(params)


def test_a_wrapper_that_withholds_updates_is_refused():
    params = hosted(model("float32"))
    tx = optax.apply_if_finite(zenflow_jax.zenflow(1e-2), 3)
    with pytest.raises(
        ValueError, match=r"`optax.ApplyIfFinite` .* layers in host memory.* whole batches"
    ):
        zenflow_jax.HostEngine(params, tx.init(params))


def test_steps_that_do_not_stream_them_are_refused():
    run, batch = Run("float32", optimized=False), next(batches(1, "float32"))
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), run.params)
    with pytest.raises(ValueError, match=r"`streaming.stream.* got an array at .*'down'"):
        run.tx.update(gradients, run.state, run.params)
    on_device = model("float32")
    with pytest.raises(ValueError, match=r"in the host's memory, where `tx.init` saw it"):
        streaming.stream(on_device, run.state)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.step(batch)
        with pytest.raises(ValueError, match=r"'down'\] is in device memory, but was in host"):
            engine.exchange(model("float32"), run.state)


def without_down(weights, x, y):
    def body(x, w):
        return block(x, w | {"down": jax.lax.stop_gradient(w["down"])})

    return loss(weights, x, y, body)


def test_a_gradient_without_a_layers_matrix_ends_the_run():
    run = Run("float32", full_warm_up_rounds=0)

    @jax.jit
    def step(params, state, x, y):
        weights = streaming.stream(params, state)
        gradients = jax.grad(without_down)(weights, x, y)
        updates, state = run.tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, 0.0

    run.program = step
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        with pytest.raises(RuntimeError, match="gradients of streamed layers"):
            run.go(engine, 0, 3)
    # Who has no engine sees it, too.
    assert np.isnan(run.state.leaves[1].master).all()


def test_updates_reach_parameters_in_other_ways_than_by_apply_updates():
    run, batch = Run("float32"), next(batches(1, "float32"))
    tx = optax.chain(optax.identity(), run.tx, optax.identity())
    state = TrainState.create(apply_fn=None, params=run.params, tx=tx)

    @jax.jit
    def step(state, x, y):
        weights = streaming.stream(state.params, state.opt_state)
        return state.apply_gradients(grads=jax.grad(loss)(weights, x, y))

    @jax.jit
    def update(params, state, x, y):
        weights = streaming.stream(params, state)
        return run.tx.update(jax.grad(loss)(weights, x, y), state, params)[0]

    with jax.numpy_dtype_promotion("standard"):
        updates = update(run.params, run.state, *batch)
        added = jax.tree.map(lambda p, u: p + u, run.params, updates)
        assert_same_bits(step(state, *batch).params, added)
    with pytest.raises(ValueError, match="custom node|Custom node|structure|Expected"):
        jax.tree.map(lambda u, p: u + p, updates, run.params)
    layers = updates["layers"]
    for behind in (optax.scale(0.0), optax.clip(1.0)):
        with pytest.raises(TypeError, match="key<fry>"):
            behind.update(layers, behind.init(layers))


def test_a_new_parameter_does_not_share_memory_with_the_hosts_array():
    x = aligned(np.ones((64, 64), np.float32))  # where jax would take it over
    copy = upload(x, jax.devices()[0], HOST)
    jax.block_until_ready(copy)
    x[:] = 2
    assert (np.asarray(copy) == 1).all()
