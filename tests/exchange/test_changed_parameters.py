"""The engine rejects changes to the parameters by other code, but not correct runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, Settings, Training
from zenflow_jax._device.adamw import change_of
from zenflow_jax._exchange import integrity

WINDOWS = {"update_interval": 2, "select_interval": 4}
SETTINGS = Settings(topk_ratio=0.3, weight_decay=0.1, provisional_share=None, **WINDOWS)
MOVING = dataclasses.replace(SETTINGS, provisional_share=0.5)
AT_ONCE = dataclasses.replace(SETTINGS, update_interval=1, staleness=0)
REFUSED = "Something other than zenflow changed"


def clip(params):
    return {name: jnp.clip(p, -0.5, 0.5) for name, p in params.items()}


def load(params):
    return params | {"rows": runs.initial(FIRST, 1)["rows"]}


def one_layer(params):
    return params | {"stack": params["stack"].at[1].set(0)}


def go(run):
    run.go(3)


def go_and(call):
    """Returns a function that takes the compared step and makes the call that must reject it."""

    def end(run):
        run.go(1)
        call(run)

    return end


@pytest.mark.parametrize(
    ("settings", "change", "end", "words"),
    [
        (SETTINGS, clip, go, r"\['columns'\], \['rows'\], \['stack'\]"),
        (MOVING, one_layer, go, r"\['stack'\]"),
        # Before they are saved.
        (MOVING, load, go_and(lambda x: x.engine.state()), r"\['rows'\]"),
        (AT_ONCE, load, go_and(Training.flush), r"\['rows'\]"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_parameters_changed_between_two_steps_are_rejected_by_name(settings, change, end, words):
    with Training(FIRST, settings) as run:
        run.go(8)  # the next step is compared
        run.params = change(run.params)
        with pytest.raises(RuntimeError, match=f"{REFUSED} {words} in or after step 9"):
            end(run)
        # The engine does not continue by accident, either.
        for call in (run.exchange, run.flush, run.engine.state):
            with pytest.raises(RuntimeError, match=f"{REFUSED}|was interrupted"):
                call()


PARAMS = {
    "bias": jnp.full(4, 0.5),
    "low": jnp.linspace(-1, 1, 96, dtype=jnp.bfloat16).reshape(12, 8),
    "wide": jnp.linspace(-1, 1, 96).reshape(12, 8),
}
WITHOUT_RESIDENT = {name: p for name, p in PARAMS.items() if p.ndim > 1}
MANY = {f"b{i}": PARAMS["bias"] for i in range(9)} | {"wide": PARAMS["wide"]}
OPTIONS = {"topk_ratio": 0.25, "provisional_share": None, **WINDOWS}
MOVES = {"provisional_share": 0.5}
NONE_SELECTED = {"topk_ratio": 0.0, **MOVES}


def filled(*numbers):
    return {
        name: jnp.asarray(np.resize(np.float32(numbers), p.shape), p.dtype)
        for name, p in PARAMS.items()
    }


def train(behind=(), params=PARAMS, between=lambda t, params: params, check="samples", **options):
    """Trains with a transformation after zenflow, or with changes between steps."""
    tx = optax.chain(zenflow_jax.zenflow(1e-2, **{**OPTIONS, **options}), *behind)

    @jax.jit
    def step(params, state, t):
        gradients = jax.tree.map(
            lambda p: jnp.nan_to_num(jnp.sin(3 * p.astype(jnp.float32) + t)).astype(p.dtype), params
        )
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

    params = jax.device_put(params, jax.devices()[0])
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(tx.init)(params)
    with zenflow_jax.HostEngine(params, state, host_kernel="numpy", check=check) as engine:
        for t in range(24):
            params, state = engine.exchange(*step(params, state, jnp.float32(t)))
            params = between(t, params)
        return engine.flush(params, state)[0]


@pytest.mark.parametrize(
    ("behind", "options"),
    [
        # There are many resident leaves, which are compared in turn.
        (
            optax.masked(optax.set_to_zero(), {name: name == "b1" for name in MANY}),
            {"params": MANY},
        ),
        # The tree lacks the leaf that would reveal the change.
        (optax.add_decayed_weights(1e-2), {"params": WITHOUT_RESIDENT, **NONE_SELECTED}),
        # Provisional steps may move weights just as far in a window, but not in a single step.
        (optax.scale(0.9), {"params": {"low": PARAMS["low"]}, **NONE_SELECTED}),
    ],
    ids=["frozen", "moving decay", "shorter steps in low precision"],
)
def test_transformations_after_zenflow_are_rejected(behind, options):
    with pytest.raises(RuntimeError, match=f"{REFUSED}.*Put zenflow last in its chain"):
        train([behind], **options)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("low", (11, 6)),
        ("wide", (1, 1)),  # selected
    ],
    ids=["deferred", "selected"],
)
def test_a_single_changed_number_is_rejected_if_all_numbers_are_compared(name, place):
    def set_one(t, params):
        return params | {name: params[name].at[place].multiply(1.02)} if t == 13 else params

    with pytest.raises(RuntimeError, match=f"{REFUSED} .'{name}'. in or after step 15"):
        train(between=set_one, check="all", **MOVES)


@pytest.mark.parametrize(
    "options",
    [
        {"behind": [optax.identity()], "max_grad_norm": 0.05, "weight_decay": 0.5},
        {"b1": 0.0, "b2": 0.0, "eps": 1e-3, "send_gradients": "after_step", **NONE_SELECTED},
        # Numbers that an update of zero may change, or that do not equal any number.
        {"params": filled(0.0, -0.0, 1e-40, -1e-40), "weight_decay": 0.0, **NONE_SELECTED},
        {"params": filled(np.nan), **MOVES},
    ],
)
def test_code_that_leaves_updates_unchanged_is_accepted(monkeypatch, options):
    compared, compare = [], integrity._compare

    def noted(*args):
        compared.append(compare(*args))
        return compared[-1]

    monkeypatch.setattr(integrity, "_compare", noted)
    train(check="all", **options)
    assert len(compared) == 23 * len(PARAMS)  # at each step from the second
    assert not any(map(int, compared))


def test_a_compiler_that_rounds_powers_differently_does_not_end_a_correct_run(monkeypatch):
    def by_another_compiler(p, mu, nu, steps, scalars, *, decay):
        b1, b2 = (b * (1 + 2.0**-23) for b in (scalars.b1, scalars.b2))
        return change_of(p, mu, nu, steps, scalars._replace(b1=b1, b2=b2), decay=decay)

    monkeypatch.setattr(integrity, "change_of", by_another_compiler)
    own = {"wide": PARAMS["wide"][:10]}  # whose program no other test has compiled
    for b2 in (0.999, 0.999999, 0.9999999):
        train(check="all", params=own, b2=b2)
