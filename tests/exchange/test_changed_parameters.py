"""What something else than zenflow does to the parameters is refused, and nothing else is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, Settings, Training

SETTINGS = Settings(topk_ratio=0.3, update_interval=2, select_interval=4, weight_decay=0.1)
REFUSED = "nothing but zenflow changes, got other values of"


TOGETHER = dataclasses.replace(SETTINGS, rolling=False)
MOVING = dataclasses.replace(SETTINGS, provisional_share=0.5)


def training(settings=SETTINGS, **more):
    return Training(FIRST, settings, host_kernel="numpy", threads=1, **more)


def clip(params):
    return {name: jnp.clip(p, -0.5, 0.5) for name, p in params.items()}


def load(params):
    return params | {"rows": runs.initial(FIRST, 1)["rows"]}


def one_layer(params):
    return params | {"stack": params["stack"].at[1].set(0)}


def turn(params):
    return params | {"columns": -params["columns"]}


@pytest.mark.parametrize(
    ("settings", "change", "names", "seen"),
    [
        (TOGETHER, clip, r"\['columns'\], \['rows'\], \['stack'\]", 6),
        (TOGETHER, load, r"\['rows'\]", 6),
        # The largest leaf takes turns with the other two: it is looked at where its update arrives.
        (SETTINGS, load, r"\['rows'\]", 7),
        (SETTINGS, one_layer, r"\['stack'\]", 6),
        (MOVING, clip, r"\['columns'\], \['stack'\]", 6),
        (MOVING, turn, r"\['columns'\]", 6),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_parameters_that_were_changed_between_two_steps_are_refused_by_name(
    settings, change, names, seen
):
    with training(settings) as run:
        run.go(5)
        run.params = change(run.params)
        with pytest.raises(RuntimeError, match=f"{REFUSED} {names} after step {seen}"):
            run.go(4)
        assert run.engine.stats.steps == seen + 1
        # And not again by accident.
        for call in (run.exchange, run.flush, run.engine.state):
            with pytest.raises(RuntimeError, match=REFUSED):
                call()


@pytest.mark.parametrize("settings", [SETTINGS, TOGETHER], ids=["rolling", "together"])
@pytest.mark.parametrize("ended_early", [False, True], ids=["", "flush"])
def test_parameters_that_were_changed_while_all_steps_are_skipped_are_refused(
    settings, ended_early
):
    def go_on(run):
        for _ in range(6):
            run.step(bad=True)
            run.exchange()
            if ended_early:
                run.flush()

    with training(settings) as run:
        run.go(4)
        for _ in range(4):
            run.step(bad=True)
            run.exchange()
        run.params = load(run.params)
        with pytest.raises(RuntimeError, match=f"{REFUSED} .'rows'. after step"):
            go_on(run)


def test_parameters_without_what_exchange_brought_are_refused_with_where_they_come_from():
    def go(run):
        for _ in range(12):
            run.step()
            stepped = run.params
            run.exchange()
            run.params = stepped

    with training() as run, pytest.raises(RuntimeError, match=f"{REFUSED}.*last `exchange` or"):
        go(run)


@pytest.mark.parametrize(
    "end",
    [
        lambda run: run.flush(),
        lambda run: run.engine.state(),
        lambda run: zenflow_jax.master_params(run.params, run.state, run.engine),
    ],
    ids=["flush", "state", "master_params"],
)
def test_parameters_that_were_changed_are_refused_before_they_are_saved(end):
    with training() as run:
        run.go(3)
        run.params = load(run.params)
        run.go(2)  # the second one brings this leaf's update
        with pytest.raises(RuntimeError, match=f"{REFUSED} .'rows'. after step 5"):
            end(run)


def test_parameters_that_were_changed_are_refused_by_a_flush_with_nothing_left_to_bring():
    settings = dataclasses.replace(SETTINGS, update_interval=1, staleness=0)
    with Training(FIRST, settings, host_kernel="numpy", threads=1) as run:
        run.go(5)
        run.params = load(run.params)
        run.go(1)
        with pytest.raises(RuntimeError, match=f"{REFUSED} .'rows'. after step 6"):
            run.flush()


PARAMS = {
    "bias": jnp.full(4, 0.5),
    "low": jnp.linspace(-1, 1, 96, dtype=jnp.bfloat16).reshape(12, 8),
    "wide": jnp.linspace(-1, 1, 96).reshape(12, 8),
}
OPTIONS = {"topk_ratio": 0.25, "update_interval": 2, "select_interval": 4}


def train(behind, params=PARAMS, between=lambda t, params: params, **options):
    """A run with something behind zenflow, or between its steps."""
    tx = optax.chain(zenflow_jax.zenflow(1e-2, **{**OPTIONS, **options}), *behind)

    @jax.jit
    def step(params, state, t):
        gradients = jax.tree.map(
            lambda p: jnp.sin(3 * p.astype(jnp.float32) + t).astype(p.dtype), params
        )
        with jax.numpy_dtype_promotion("standard"):
            more = {"value": jnp.float32(1)}
            updates, state = optax.with_extra_args_support(tx).update(
                gradients, state, params, **more
            )
            return optax.apply_updates(params, updates), state

    params = jax.device_put(params, jax.devices()[0])
    with jax.numpy_dtype_promotion("standard"):
        state = jax.jit(tx.init)(params)
    with zenflow_jax.HostEngine(params, state, host_kernel="numpy") as engine:
        for t in range(24):
            params, state = engine.exchange(*step(params, state, jnp.float32(t)))
            params = between(t, params)
        return engine.flush(params, state)[0]


FROZEN = {"bias": False, "low": False, "wide": True}


NONE_SELECTED = {"topk_ratio": 0.0, "provisional_share": 0.5}


@pytest.mark.parametrize(
    ("behind", "options"),
    [
        (optax.scale(0.5), {}),
        (optax.masked(optax.set_to_zero(), FROZEN), {}),
        (optax.add_decayed_weights(1e-2), {}),
        (optax.keep_params_nonnegative(), {}),
        (optax.contrib.reduce_on_plateau(factor=0.5, patience=1), {}),
        (optax.scale(0.5), NONE_SELECTED),
        (optax.add_decayed_weights(1e-2), NONE_SELECTED),
    ],
    ids=[
        "half",
        "frozen",
        "decay",
        "nonnegative",
        "plateau",
        "half of provisional steps",
        "decay beside provisional steps",
    ],
)
def test_what_acts_behind_zenflow_is_refused(behind, options):
    # A resident leaf would give it away.
    params = {name: p for name, p in PARAMS.items() if p.ndim > 1} if options else PARAMS
    with pytest.raises(RuntimeError, match=f"{REFUSED}.*Let zenflow be the last of its chain"):
        train([behind], params, **options)


def test_weights_of_some_steps_ago_are_no_provisional_step():
    """They are no further than provisional steps may move them, but by no multiple of one."""
    seen = []

    def some_steps_ago(t, params):
        seen.append(params["wide"])
        return params | {"wide": seen[t - 4]} if t == 14 else params

    with pytest.raises(RuntimeError, match=f"{REFUSED} .'wide'."):
        train([], between=some_steps_ago, update_interval=4, rolling=False)


@pytest.mark.parametrize(
    "options",
    [
        {"behind": [optax.identity()], "max_grad_norm": 0.05, "weight_decay": 0.5},
        {"behind": [], "full_warm_up_rounds": 3, "staleness": 0},
        {"behind": [], "b1": 0.0, "b2": 0.0, "eps": 1e-3, "send_gradients": "after_step"},
        {
            "behind": [],
            "send_gradients": "per_window",
            "topk_ratio": 0.0,
            "provisional_share": 0.5,
        },
        {"behind": [], "provisional_share": 1.0, "update_interval": 4, "select_interval": 4},
        {"behind": [], "topk_ratio": 1.0},
    ],
    ids=["identity", "warm-up", "no momentum", "none selected", "provisional", "all selected"],
)
def test_nothing_is_refused_that_leaves_the_updates_as_they_are(options):
    train(**options)


@pytest.mark.slow
def test_numbers_that_an_update_of_zero_may_change_are_not_taken_for_others():
    numbers = np.array([0.0, -0.0, 1e-40, -1e-40], np.float32)

    def filled(p):
        return jnp.asarray(np.resize(numbers, p.shape), p.dtype)

    params = jax.tree.map(filled, PARAMS)
    train([], params=params, topk_ratio=0.0, weight_decay=0.0)
    train([], params=params, topk_ratio=0.0, weight_decay=0.0, provisional_share=0.5)
    train([], params=jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), PARAMS))


@pytest.mark.parametrize("settings", [SETTINGS, MOVING], ids=["", "provisional"])
def test_bad_steps_and_flushes_are_not_taken_for_changes(settings):
    with training(settings) as run:
        for t in range(1, 20):
            run.step(bad=t % 3 == 0 or t in (7, 8))
            run.exchange()
            if t in (4, 9, 10):
                run.flush()
        run.flush()
