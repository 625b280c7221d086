"""Layers whose gradients leave inside the backward scan: a bit-identical run, or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.device.streamed_runs import OPTIONS, batches, block, loss, model, run
from zenflow_jax import streaming
from zenflow_jax._device import gpu_faults
from zenflow_jax._device.step import _pack_signs, _unpack_signs
from zenflow_jax._device.streamed import _as_floats, _as_packed

HALVES = slice(None, 2), slice(2, None)
ATOL = 1e-6  # updates near 1e-2; float32 sums in different orders


@pytest.mark.slow
def test_a_run_with_streamed_layers_is_bit_identical_to_a_run_without_them():
    # One step is skipped. Without compiler optimization, the order of float32 sums differs.
    def channel_axis(path, _):
        return -1 if "up" in str(path) else -2

    runs = (run("bfloat16", stream=x, bad=7, channel_axis=channel_axis) for x in (True, False))
    assert_same_bits(*runs)


@pytest.mark.parametrize("stream", [True, False])
def test_the_backward_scan_stacks_gradients_only_in_host_memory(stream):
    params = model("float32")
    tx = zenflow_jax.zenflow(1e-2, topk_ratio=0.1)

    def step(params, opt_state, x, y):
        weights = streaming.stream(params, opt_state) if stream else params
        return tx.update(jax.grad(loss)(weights, x, y), opt_state, params)

    program = jax.make_jaxpr(step)(params, tx.init(params), *next(batches(1, "float32")))
    stacked = [
        x.aval
        for equation in program.eqns
        if equation.primitive.name == "scan"
        for x in equation.outvars
        if x.aval.size == params["layers"]["up"].size
    ]
    assert len(stacked) == 2
    kind = jax.memory.Space.Host if stream else jax.memory.Space.Device
    assert all(x.memory_space == kind for x in stacked)


def test_packed_signs_are_normal_floats_that_stay_equal_when_zeros_are_added():
    packed = np.uint32([0, 1, 3**19 - 1])
    floats = _as_floats(jnp.asarray(packed))
    normal = np.finfo(np.float32)
    assert all(normal.tiny <= abs(x) <= normal.max for x in floats.tolist())
    np.testing.assert_array_equal(_as_packed(floats + jnp.zeros_like(floats)), packed)


def scaled(weights, x, y):
    # Changes the gradients after norms and mail were computed.
    return jax.tree.map(lambda g: 0.5 * g, jax.grad(loss)(weights, x, y))


def of_a_small_mean(weights, x, y):
    gradient = jax.grad(lambda *of: 1e-6 * loss(*of))
    halves = gradient(weights, x[:16], y[:16]), gradient(weights, x[16:], y[16:])
    return jax.tree.map(lambda *g: sum(g) / 2, *halves)


def of_a_layer_used_twice(weights, x, y):
    return jax.grad(lambda w: loss(w, x, y) + loss(w, 2 * x, y))(weights)


def updates_from(gradients_of, channels=0):
    """Returns a step's updates; layers stream the channels `channels` after the selected ones."""
    params, tx = model("float32"), zenflow_jax.zenflow(1e-2, **OPTIONS)
    opt_state = tx.init(params)
    leaves = [
        leaf if leaf.channels is None else leaf.replace(channels=leaf.channels + channels)
        for leaf in opt_state.leaves
    ]
    before = opt_state._replace(leaves=opt_state.leaves.replace(leaves))

    @jax.jit
    def step(params, opt_state, before, x, y):
        gradients = gradients_of(streaming.stream(params, before), x, y)
        return tx.update(gradients, opt_state, params)[0]

    return jax.tree.leaves(step(params, opt_state, before, *next(batches(1, "float32"))))


@pytest.mark.parametrize(
    ("gradients_of", "channels"),
    [(of_a_small_mean, 0), (of_a_layer_used_twice, 0), (scaled, 0), (jax.grad(loss), 1)],
)
def test_gradients_that_do_not_come_from_exactly_one_use_end_the_run(gradients_of, channels):
    assert all(np.isnan(x).all() for x in updates_from(gradients_of, channels))


def test_layers_can_be_split_over_several_scans():
    def in_halves(weights, x, y):
        layers, head = weights["layers"], weights["head"]
        first, rest = (jax.tree.map(lambda w, part=part: w[part], layers) for part in HALVES)
        x, _ = streaming.scan_layers(block, x, first)
        return loss({"layers": rest, "head": head}, x, y)

    whole, halves = updates_from(jax.grad(loss)), updates_from(jax.grad(in_halves))
    for x, y in zip(whole, halves, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=ATOL)


def cast(x):
    return x.astype(jnp.bfloat16)


def test_other_uses_of_streamed_weights_raise_an_error():
    params, tx = model("float32"), zenflow_jax.zenflow(1e-2)
    state, batch = tx.init(params), next(batches(1, "float32"))
    weights = streaming.stream(params, state)
    norm = optax.clip_by_global_norm(1e6)
    after_step = zenflow_jax.zenflow(1e-2, send_gradients="after_step").init(params)
    for call, words in (
        # The derivative would be zero.
        (lambda: jax.grad(lambda p: loss(streaming.stream(p, state), *batch))(params), "inside"),
        (lambda: norm.update(jax.grad(loss)(weights, *batch), norm.init(None)), "memory_space"),
        (lambda: jax.grad(loss)(jax.tree.map(cast, weights), *batch), "in the scan's body"),
        (
            lambda: jax.grad(loss)(jax.tree.map(lambda x: x[:, None], weights), *batch),
            "Cast or reshape it in the scan's body",
        ),
        (lambda: streaming.stream(params, after_step), "state has send_gradients='after_step'"),
        (lambda: tx.update(params, state, weights), "has a Streamed of"),
    ):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(call)


def test_a_device_that_streams_wrong_gradients_is_rejected(monkeypatch):
    right = streaming.layer_weights
    monkeypatch.setattr(streaming, "layer_weights", lambda layer: 2 * right(layer))
    with pytest.raises(RuntimeError, match=r"differ by .*%.*`--stream none`"):
        streaming.check_device()


def traced_step():
    params, tx = model("float32"), zenflow_jax.zenflow(1e-2)
    state = tx.init(params)

    def step(params, state, x, y):
        return tx.update(jax.grad(loss)(streaming.stream(params, state), x, y), state, params)

    with jax.numpy_dtype_promotion("standard"):
        return jax.jit(step).trace(params, state, *next(batches(1, "float32")))


def test_a_program_for_a_gpu_is_rejected_if_jax_slices_host_memory_wrongly(monkeypatch):
    monkeypatch.setattr(gpu_faults, "_FIXED_VERSION", (99,))
    traced = traced_step()
    traced.lower()
    with pytest.raises(NotImplementedError, match=r"xla#46231.*0\.11\.1 .*Python 3\.12"):
        traced.lower(lowering_platforms=("cuda",))
    # Too late: XLA has already read its flags.
    monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=dynamic-slice-annotator")
    with pytest.raises(NotImplementedError, match="before Python starts"):
        traced.lower(lowering_platforms=("cuda",))
    monkeypatch.setattr(gpu_faults, "_DISABLED", True)
    traced.lower(lowering_platforms=("cuda",))


def test_a_program_for_a_gpu_is_rejected_if_xla_would_pipeline_copies_to_the_host(monkeypatch):
    monkeypatch.setattr(gpu_faults, "_FIXED_VERSION", (0,))
    traced_step().lower(lowering_platforms=("cuda",))
    try:
        jax.config.update("jax_optimization_level", "O1")
        traced = traced_step()
        traced.lower()
        with pytest.raises(NotImplementedError, match=r"xla#45393.*_level .*unset, or .*annotator"):
            traced.lower(lowering_platforms=("cuda",))
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
def test_signs_are_packed_without_a_concatenation_and_unpacked_with_one(dtype):
    # jax 0.10.2 and 0.11.0 miscompile a concatenation of a concatenation on GPUs.
    def joined(signs):
        return _pack_signs(jnp.concatenate([signs, -signs]), 0, dtype)

    signs = jnp.asarray(np.resize([1, 0, -1, 1], (23, 3)), jnp.float32)
    packed = joined(signs)
    assert len(packed) == 2  # 46 rows leave a remainder
    assert str(jax.make_jaxpr(joined)(signs)).count("concatenate") == 1
    unpack = lambda *packed: _unpack_signs(packed, 0, 46)  # noqa: E731
    assert str(jax.make_jaxpr(unpack)(*packed)).count("concatenate") == 1
    np.testing.assert_array_equal(unpack(*packed), np.concatenate([signs, -signs]))
