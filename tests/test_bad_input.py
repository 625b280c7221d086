"""Every detectable mistake is rejected before it does harm, by an error that names it.

`exchange/test_bad_calls.py` tests mistakes in calls of a running engine.

A row of a table is a call, the exception, and a word that must be in its message.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests.mistakes import (
    DEVICE,
    IN_HOST_MEMORY,
    NO_STATE,
    PARAMS,
    SQUARE,
    STATE,
    TWO_STATES,
    TX,
    assert_told,
    make,
    numpy_of,
    shapes_of,
    step,
    with_weight_in_host_memory,
)
from zenflow_jax import STATIC_ARGS, AutoSelect, AutoWindow, HostEngine, zenflow
from zenflow_jax.attach import attach

LOW = {"weight": jnp.ones((6, 3), jnp.bfloat16)}
ON_HOST = with_weight_in_host_memory(PARAMS)


def init(params, **options):
    return make(**options).init(params)


def engine(params=PARAMS, state=STATE, **options):
    """Creates an engine and, without an error, closes it."""
    with HostEngine(params, state, **{"host_kernel": "numpy", **options}):
        pass


def table(*rows):
    return pytest.mark.parametrize(("call", "exception", "word"), rows)


NEVER = [np.nan, np.inf, -1e-3, jnp.float32(np.nan), jnp.float32(-1e-3)]  # could only produce NaN
NO_NUMBER = ["0.1", np.ones(3), 1j, jnp.bfloat16(0.9), None]
# All numbers share a check, so only `learning_rate` gets all wrong values. Other options get values
# that their own limits and types reject.
WRONG = {
    "learning_rate": [*NEVER, *NO_NUMBER, {"weight": 1e-3}],
    "b1": [1.0, None, lambda count: 0.5],
    "b2": [2, np.nan],
    "eps": [-1e-3, "0.1"],
    "weight_decay": [np.inf, [0.1, 0.2]],
    "max_grad_norm": [0, np.nan, lambda count: 0.5],
    "topk_ratio": [10.0, -0.1, np.nan, None, True],
    "update_interval": [0, "auto", 2.0],
    "select_interval": [0, "epoch"],
    "full_warm_up_rounds": [-1, None],
    "staleness": [-1, 3, True],
    "window_scaling": [0.5, "sqrt"],
    "provisional_share": [2, "half"],
    "send_gradients": ["later", None],
    "transfer_dtype": ["float16"],
}
WRONG_ENGINE_OPTIONS = {
    "host_kernel": ["cuda"],
    "host_state": ["int8", None],
    "threads": [0, 1.5, "2"],
    "check": ["everything", None],
}


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (call, name, value)
        for call, options in ((make, WRONG), (engine, WRONG_ENGINE_OPTIONS))
        for name, values in options.items()
        for value in values
    ],
)
def test_an_invalid_option_is_rejected_by_name(call, name, value):
    assert_told(lambda: call(**{name: value}), (TypeError, ValueError), name)


WRONG_OPTIONS = [
    (lambda: make(update_interval=AutoWindow(), staleness=2), ValueError, "staleness"),
    (lambda: make(staleness=3, rolling=False), ValueError, "staleness"),
    (lambda: AutoWindow(max_interval=0), ValueError, "AutoWindow.max_interval"),
    (lambda: AutoWindow(share=2), ValueError, "AutoWindow.share"),
    (lambda: AutoSelect(keep=np.nan), ValueError, "AutoSelect.keep"),
    (lambda: AutoSelect(max_windows=2.5), TypeError, "AutoSelect.max_windows"),
    # bfloat16(0.999) is 1, which makes every parameter NaN. `optax.adamw` accepts it.
    (lambda: inject()(1e-2).init(LOW), TypeError, "hyperparam_dtype=jnp.float32"),
    (lambda: jax.jit(inject()(1e-2).init)(LOW), TypeError, "hyperparam_dtype=jnp.float32"),
]


def inject():
    return optax.inject_hyperparams(zenflow, static_args=STATIC_ARGS)


@pytest.mark.parametrize("dtype", ["complex64", "int32", "bool", "float8_e4m3fn", "float64"])
def test_leaves_with_unsupported_dtypes_are_rejected_by_name(dtype):
    with jax.enable_x64(True):
        params = {"good": jnp.ones(3, "float32"), "bad": [jnp.ones((6, 3), dtype)]}
        for call in (make().init, functools.partial(jax.eval_shape, make().init)):
            assert_told(lambda f=call: f(params), ValueError, f"['bad'][0] is {dtype}")


def test_a_clipping_norm_without_the_hidden_leaves_raises_a_warning(caplog):
    make(max_grad_norm=1.0).init(PARAMS)
    assert not caplog.records
    optax.masked(make(max_grad_norm=1.0), {"weight": True, "bias": False}).init(PARAMS)
    assert "norm of this `zenflow`'s leaves (1). `optax.partition` or" in caplog.text


WRONG_PARAMS = [
    (lambda: init({"dropout": jax.random.key(0), **PARAMS}), ValueError, "['dropout']"),
    (lambda: init(PARAMS, channel_axis=2), ValueError, "`channel_axis` is 2 for ['weight']"),
    (lambda: init(PARAMS, channel_axis=lambda path, x: None), ValueError, "is None for"),
    (lambda: init(PARAMS, mask=lambda params: [True]), ValueError, "`mask`"),
    (lambda: init(PARAMS, mask={"weight": None, "bias": False}), ValueError, "`mask`"),
    (lambda: init(PARAMS, lr_scale={"bias": 1, "weight": -1}), ValueError, "`lr_scale` is -1"),
    (lambda: init(PARAMS, lr_scale=np.inf), ValueError, "`lr_scale` is inf"),
    (lambda: init(ON_HOST), ValueError, IN_HOST_MEMORY),
]


def update(gradients=PARAMS, state=STATE, params=PARAMS, tx=TX):
    return tx.update(gradients, state, params)


def with_weight(x):
    return {**PARAMS, "weight": x}


def of_dtype(dtype):
    return with_weight(jnp.ones((6, 3), dtype))


FLOAT0 = with_weight(np.zeros((6, 3), jax.dtypes.float0))  # gradients of integers


@table(
    (lambda: update({**PARAMS, "more": jnp.ones(2)}), ValueError, "`gradients` has 3 leaves: "),
    (lambda: update(params=list(PARAMS.values())), ValueError, "2 leaves: [0], [1]. Pass"),
    (lambda: update(SQUARE), ValueError, "(3, 6)"),
    (lambda: update(params=of_dtype(jnp.bfloat16)), ValueError, "of bfloat16 (6, 3) at"),
    (lambda: update(of_dtype(jnp.complex64)), ValueError, "of complex64 (6, 3) at ['weight']"),
    (lambda: update(FLOAT0), ValueError, "at ['weight']"),
    (lambda: update(state=optax.adam(1e-2).init(PARAMS)), ValueError, "ZenFlowState"),
)
def test_an_unsuitable_update_is_rejected(call, exception, word):
    assert_told(call, exception, word)
    # It is also rejected inside the user's program, during tracing.
    assert_told(lambda: jax.jit(call)(), exception, word)


def test_init_and_update_inside_shard_map_are_rejected():
    mesh = jax.sharding.Mesh([DEVICE], "data")
    everywhere = jax.sharding.PartitionSpec()
    for name, call in (
        ("tx.init", lambda params: TX.init(params).step),
        ("tx.update", lambda params: TX.update(params, STATE, params)[0]),
    ):
        mapped = jax.shard_map(call, mesh=mesh, in_specs=everywhere, out_specs=everywhere)
        assert_told(lambda f=mapped: f(PARAMS), ValueError, f"`{name}` is called inside `jax.sha")


def test_a_second_update_without_exchange_returns_nan():
    tx = make()
    _, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    updates, _ = jax.jit(tx.update)(PARAMS, state, PARAMS)
    assert all(bool(jnp.isnan(u).all()) for u in jax.tree.leaves(updates))


ADAM = optax.adam(1.0).init(PARAMS)
TWO = optax.partition({"a": make(), "b": make()}, {"bias": "a", "weight": "b"}).init(PARAMS)


STACKED = jax.tree.map(lambda x: jnp.stack([x, x]), PARAMS)
HALF_RESTORED = STATE._replace(leaves=shapes_of(STATE.leaves))
NO_ENGINE = [
    (lambda: zenflow_jax.find_state(TWO), ValueError, TWO_STATES),
    (lambda: engine(state=ADAM), ValueError, NO_STATE),
    (lambda: engine(STACKED, jax.vmap(TX.init)(STACKED)), TypeError, "only 0-dim"),
    (lambda: engine(state=shapes_of(STATE)), TypeError, "at .step"),
    (lambda: zenflow_jax.place(PARAMS, HALF_RESTORED), TypeError, "at .leaves[0].steps"),
    (lambda: engine(numpy_of(PARAMS)), TypeError, "ndarray"),
    (lambda: engine(state=numpy_of(STATE)), TypeError, "ndarray"),
    (lambda: engine(state=optax.flatten(TX).init(PARAMS)), ValueError, "without `optax.flatten`"),
    (lambda: jax.jit(lambda p: (engine(p, TX.init(p)), p)[1])(PARAMS), TypeError, "Tracer"),
    (lambda: engine(state=step(PARAMS, STATE)[1]), ValueError, "is from step 1"),
    (lambda: engine(SQUARE), ValueError, "is float32 (3, 6)"),
    (lambda: engine(ON_HOST), ValueError, IN_HOST_MEMORY),
    (lambda: attach(step)(ON_HOST, STATE), ValueError, IN_HOST_MEMORY),
    (lambda: TX.init(of_dtype(jnp.float16)), ValueError, "Cast weights in float16 to bfloat16"),
    (lambda: engine(of_dtype(jnp.bfloat16)), ValueError, "is bfloat16 (6, 3)"),
]


@table(*WRONG_OPTIONS, *WRONG_PARAMS, *NO_ENGINE)
def test_a_mistake_is_rejected(call, exception, word):
    assert_told(call, exception, word)
