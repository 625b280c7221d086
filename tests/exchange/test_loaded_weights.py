"""Weights that are loaded after `tx.init`, or after the engine was made, are those that train.

To `optax.adamw` the order makes no difference; a run that loads late is held, bit by bit, to the
same run that had its weights from the start.
"""

import dataclasses

import numpy as np
import pytest

import zenflow_jax
from tests import runs
from tests.runs import FIRST, Settings, Training

STEPS = 7
#: Windows in turn; channels that change hands; in FIRST are resident, low-precision and float32
#: leaves.
SETTINGS = Settings(
    topk_ratio=0.3, update_interval=2, select_interval=4, weight_decay=0.1, provisional_share=0.5
)
OTHER = runs.initial_values(FIRST, 1)


def training(settings=SETTINGS, **more):
    return Training(FIRST, settings, host_kernel="numpy", threads=1, **more)


def expected(offload, bad=()):
    """The weights from the start."""
    with training(offload=offload) as run:
        if offload:
            run.engine.close()
        run.params = runs.place(OTHER, None)
        run.state = run.tx.init(run.params)
        if offload:
            run.engine = zenflow_jax.HostEngine(run.params, run.state, host_kernel="numpy")
        return finish(run, bad)


def finish(run, bad=()):
    seen = []
    for t in range(1, STEPS + 1):
        run.step(bad=t in bad)
        run.exchange()
        seen.append(run.values())
    run.flush()
    masters = zenflow_jax.master_params(run.params, run.state, run.engine)
    return [*seen, run.values(), {name: np.array(x) for name, x in masters.items()}]


@pytest.mark.parametrize("bad", [(), (1, 2)], ids=["all counted", "first window skipped"])
@pytest.mark.parametrize("offload", [False, True], ids=["in graph", "engine"])
def test_weights_loaded_after_init_train_as_if_they_had_been_there(offload, bad):
    with training(offload=offload) as run:
        if offload:
            run.engine.close()
        run.params = runs.place(OTHER, None)
        if offload:
            run.engine = zenflow_jax.HostEngine(run.params, run.state, host_kernel="numpy")
        runs.assert_same_bits(finish(run, bad), expected(offload, bad))


@pytest.mark.parametrize("leaf", [None, "columns"], ids=["all", "one leaf"])
def test_weights_loaded_after_the_engine_was_made_train_as_if_they_had_been_there(leaf):
    values = OTHER if leaf is None else runs.initial_values(FIRST) | {leaf: OTHER[leaf]}
    with training() as run, training(offload=False) as oracle:
        run.params = oracle.params = runs.place(values, None)
        oracle.state = oracle.tx.init(oracle.params)
        mine, theirs = finish(run), finish(oracle)
    runs.assert_close(mine, theirs)


@pytest.mark.parametrize("offload", [False, True], ids=["in graph", "engine"])
def test_the_masters_of_loaded_weights_are_those_before_the_first_step_and_after_it(offload):
    # Else an update would be on its way after the first step.
    settings = dataclasses.replace(SETTINGS, rolling=False)
    with training(settings, offload=offload) as run:
        run.params = runs.place(OTHER, None)
        for _ in range(2):
            masters = zenflow_jax.master_params(run.params, run.state, run.engine)
            for name, x in run.values().items():
                cast = np.array(masters[name]).astype(x.dtype)
                np.testing.assert_array_equal(cast, x, err_msg=name)
            run.go(1)


def test_one_bit_of_a_deferred_channel_is_noticed():
    with training() as run:
        rows = runs.initial_values(FIRST)["rows"].copy()
        rows[-1, -1] = np.nextafter(rows[-1, -1], np.float32(9))
        run.params = run.params | runs.place({"rows": rows}, None)
        masters = zenflow_jax.master_params(run.params, run.state, run.engine)
        np.testing.assert_array_equal(np.array(masters["rows"]), rows)


def test_what_was_saved_before_the_first_step_follows_the_parameters_beside_it():
    with training() as run:
        saved = run.engine.state()
        run.params = runs.place(OTHER, None)
        run.engine.close()
        run.engine = zenflow_jax.HostEngine(
            run.params, run.state, host_kernel="numpy", engine_state=saved
        )
        runs.assert_same_bits(finish(run), expected(True))
