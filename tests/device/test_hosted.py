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
from tests.comparisons import ATOL, assert_same_bits
from tests.device.streamed_runs import EACH_STEP, Run, batches, block, hosted, loss, model
from tests.reference import Reference, Settings
from tests.resuming import copied
from zenflow_jax import streaming
from zenflow_jax._device.memory import HOST, upload
from zenflow_jax._host.arrays import copied as aligned
from zenflow_jax.planning._steps import inner_jaxprs

ON_HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=HOST)
WINDOWS = {"rolling": False, "window_scaling": None}


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
        ("bfloat16", EACH_STEP | {"donate": False}),
        ("bfloat16", WINDOWS | {"body": jax.checkpoint(block, prevent_cse=False), "bad": 7}),
        ("bfloat16", EACH_STEP | {"staleness": 0, "full_warm_up_rounds": 0, "bad": 0}),
        # XLA contracts the last sum of a step to another operation, if it optimizes.
        ("float32", {"optimized": False, "transfer_dtype": jnp.bfloat16}),
        ("float32", EACH_STEP | {"optimized": False}),
        ("float32", {"topk_ratio": 0.0}),
    ],
    ids=[
        "default",
        "each step",
        "the paper's, a step skipped",
        "at once",
        "float32",
        "float32, each step",
        "float32, all deferred",
    ],
)
def test_a_run_has_the_bits_of_one_whose_layers_are_on_the_device(dtype, options):
    ours, expected = (whole(dtype, hosts=hosts, **options) for hosts in (True, False))
    kinds = {name: x.sharding.memory_kind for name, x in ours[0]["layers"].items()}
    assert kinds == {"up": HOST, "down": HOST, "scale": "device"}
    assert_same_bits(*(jax.tree.map(np.asarray, x) for x in (ours, expected)))


def test_a_run_goes_on_from_what_is_saved_between_two_flushes():
    run = Run("bfloat16")
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
    run, batch = Run("bfloat16"), next(batches(1, "bfloat16"))
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
    run, other = Run("bfloat16", hosts=hosts), Run("bfloat16", hosts=not hosts)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.go(engine, 0, 5)
        engine_state = engine.state()
        engine.flush(run.params, run.state)
    memory = ["the device's", "the host's"][hosts]
    with pytest.raises(ValueError, match=rf"memory of .*'down'\] .* run, {memory}, got"):
        zenflow_jax.HostEngine(other.params, other.state, engine_state=engine_state)


@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, (1, 2)),
        (EACH_STEP | {"donate": False}, (8, 9, 11)),
        (EACH_STEP | {"staleness": 0, "full_warm_up_rounds": 0}, (3, 4)),
    ],
    ids=["from the start", "later", "at once"],
)
def test_between_flushes_whoever_reads_them_without_the_selected_channels_sees_nan(options, ends):
    batch = next(batches(1, "bfloat16"))

    def loss_of(params):
        with jax.numpy_dtype_promotion("standard"):
            return loss(params, *batch)

    run, on_device = (Run("bfloat16", hosts=hosts, **options) for hosts in (True, False))
    with (
        zenflow_jax.HostEngine(run.params, run.state) as ours,
        zenflow_jax.HostEngine(on_device.params, on_device.state) as theirs,
    ):
        for start, end in zip((0, *ends), ends, strict=False):
            run.go(ours, start, end)
            on_device.go(theirs, start, end)
            assert np.isnan(loss_of(run.params))
            expected = loss_of(on_device.params)
            assert loss_of(streaming.stream(run.params, run.state)) == expected
            before = zenflow_jax.master_params(run.params, run.state, ours)
            run.params, run.state = ours.flush(run.params, run.state)
            on_device.params, on_device.state = theirs.flush(on_device.params, on_device.state)
            assert loss_of(run.params) == loss_of(on_device.params)
            masters = zenflow_jax.master_params(run.params, run.state, ours)
            expected = zenflow_jax.master_params(on_device.params, on_device.state, theirs)
            assert_same_bits(*(jax.tree.map(np.asarray, x) for x in (masters, expected)))
            for name in ("up", "down"):  # which have every update at any time
                assert_same_bits(before["layers"][name], masters["layers"][name])
            # Nothing is left to be brought in, and still they are up to date.
            again, run.state = ours.flush(run.params, run.state)
            assert_same_bits(again, run.params)
            run.params = again
        run.go(ours, ends[-1], ends[-1] + 1)
        with pytest.raises(RuntimeError, match="never reached the parameters"):
            ours.__exit__(None, None, None)


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


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("where", ["in the step", "between two steps"])
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
    with pytest.raises(RuntimeError, match=r"other values of \['layers'\]\['up'\]"):
        run.go(engine, 4, 14)
    # The engine stays refused.
    for call in (
        lambda: engine.exchange(run.params, run.state),
        lambda: engine.flush(run.params, run.state),
        engine.state,
    ):
        with pytest.raises(RuntimeError, match=r"other values of \['layers'\]\['up'\]"):
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
        with pytest.raises(RuntimeError, match=r"other values of \['layers'\]\['down'\]"):
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
        ValueError, match=r"layers in host memory, got ApplyIfFinite.* whole batches"
    ):
        zenflow_jax.HostEngine(params, tx.init(params))


def test_steps_that_do_not_stream_them_are_refused():
    run, batch = Run("float32", optimized=False), next(batches(1, "float32"))
    gradients = jax.grad(loss)(run.params, *batch)
    with pytest.raises(ValueError, match=r"`streaming.stream.* got an array at .*'down'"):
        run.tx.update(gradients, run.state, run.params)
    on_device = model("float32")
    with pytest.raises(ValueError, match=r"in the host's memory, where `tx.init` saw it"):
        streaming.stream(on_device, run.state)
    with zenflow_jax.HostEngine(run.params, run.state) as engine:
        run.step(batch)
        with pytest.raises(ValueError, match=r"'down'\] in the host's memory, .* the device's"):
            engine.exchange(model("float32"), run.state)


def used_twice(weights, x, y):
    return loss(weights, x, y) + loss(weights, 2 * x, y)


def without_down(weights, x, y):
    def body(x, w):
        return block(x, w | {"down": jax.lax.stop_gradient(w["down"])})

    return loss(weights, x, y, body)


@pytest.mark.parametrize("wrong_loss", [used_twice, without_down])
def test_a_misused_gradient_ends_the_run(wrong_loss):
    run = Run("float32", full_warm_up_rounds=0)

    @jax.jit
    def step(params, state, x, y):
        weights = streaming.stream(params, state)
        gradients = jax.grad(wrong_loss)(weights, x, y)
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


@pytest.mark.parametrize(
    "schedule",
    [
        {"update_interval": 2, "select_interval": 4},
        {"update_interval": 3, "select_interval": 6, "rolling": False},
    ],
    ids=["in turn", "together"],
)
def test_their_updates_equal_the_reference_beside_leaves_that_move_provisionally(schedule):
    settings = Settings(topk_ratio=0.3, provisional_share=0.5, **schedule)
    rng = np.random.default_rng(0)
    start = {name: rng.normal(size=(3, 6, 4)).astype(np.float32) for name in ("host", "still")}
    params = {
        "device": jax.device_put(start["still"], jax.devices()[0]),
        "host": jax.device_put(start["host"], ON_HOST),
    }
    names = ("topk_ratio", "weight_decay", "provisional_share", *schedule)
    tx = zenflow_jax.zenflow(1e-2, **{name: getattr(settings, name) for name in names})
    state = tx.init(params)
    slow = Reference(
        [start["still"], start["host"]],
        1e-2,
        settings,
        channel_axes=[-2, -2],
        hosted=[False, True],
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        def inner(weights):
            def body(total, layer):
                products = jax.tree.map(lambda w, g: jnp.sum(w * g), *layer)
                return total + sum(jax.tree.leaves(products)), None

            return streaming.scan_layers(body, jnp.zeros(()), (weights, gradients))[0]

        updates, state = tx.update(jax.grad(inner)(streaming.stream(params, state)), state, params)
        return optax.apply_updates(params, updates), state

    with zenflow_jax.HostEngine(params, state) as engine:
        for t in range(11):
            g = [rng.normal(size=(3, 6, 4)).astype(np.float32) for _ in range(2)]
            params, state = step(params, state, dict(zip(("device", "host"), g, strict=True)))
            params, state = engine.exchange(params, state)
            expected = slow.step(g)
            ours = np.asarray(params["host"])
            seen = ~np.isnan(ours)
            np.testing.assert_allclose(ours[seen], expected[1][seen], rtol=0, atol=ATOL)
            np.testing.assert_allclose(params["device"], expected[0], rtol=0, atol=ATOL)
            assert (~seen).any(), t
            if t in (4, 10):  # in mid-window, if all windows close together
                params, state = engine.flush(params, state)
                for x, y in zip(jax.tree.leaves(params), slow.flush(), strict=True):
                    np.testing.assert_allclose(x, y, rtol=0, atol=ATOL)


def test_a_new_parameter_does_not_share_memory_with_the_hosts_array():
    x = aligned(np.ones((64, 64), np.float32))  # where jax would take it over
    copy = upload(x, jax.devices()[0], HOST)
    jax.block_until_ready(copy)
    x[:] = 2
    assert (np.asarray(copy) == 1).all()


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in inner_jaxprs(equation.params):
            yield from equations(inner)


def test_nothing_is_put_to_host_memory_that_is_there():
    # XLA for GPUs (jax 0.10.2) compiles no such program.
    run = Run("bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        traced = run.program.trace(run.params, run.state, *next(batches(1, "bfloat16")))
    puts = [x for x in equations(traced.jaxpr.jaxpr) if x.primitive.name == "device_put"]
    places = [
        (one.aval.memory_space, other.aval.memory_space)
        for equation in puts
        for one, other in zip(equation.invars, equation.outvars, strict=True)
    ]
    host = jax.memory.Space.Host
    assert any(other == host for _, other in places)
    assert (host, host) not in places
