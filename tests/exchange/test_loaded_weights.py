"""Weights loaded after `tx.init`, or after the engine was created, are trained.

With `optax.adamw` the order makes no difference. Here, a run that loads weights late is compared,
bit by bit, with a run that has the same weights from the start.
"""

import numpy as np

import zenflow_jax
from tests import comparisons, runs
from tests.runs import FIRST, Plan, Settings, Training

# Windows roll, channels are handed over, and FIRST's resident leaves are low-precision and float32.
SETTINGS = Settings(
    topk_ratio=0.3, update_interval=2, select_interval=4, weight_decay=0.1, provisional_share=0.5
)
OTHER = runs.initial_values(FIRST, 1)


def masters(run):
    arrays = zenflow_jax.master_params(run.params, run.state, run.engine)
    return {name: np.array(x) for name, x in arrays.items()}


def outcome(run):
    """Returns the parameters after each of seven steps and a flush, and the masters."""
    # The first window has no step that counts.
    seen = [values for _, values in run.follow(Plan(7, bad=(1, 2)))]
    run.flush()
    return [*seen, run.values(), masters(run)]


def loaded(run, values, *, early=False):
    """Makes a run with other parameters, for the engine and, if `early`, also for the state."""
    run.params = runs.place(values, None)
    if early:
        run.state = run.tx.init(run.params)
    run.renew()
    return run


def test_weights_loaded_after_init_train_as_if_loaded_before_it():
    with Training(FIRST, SETTINGS) as run, Training(FIRST, SETTINGS) as expected:
        loaded(run, OTHER)
        loaded(expected, OTHER, early=True)
        casts = {name: x.astype(OTHER[name].dtype) for name, x in masters(run).items()}
        comparisons.assert_same_bits(casts, run.values())
        comparisons.assert_same_bits(outcome(run), outcome(expected))


def test_a_state_saved_before_the_first_step_adopts_the_parameters_restored_with_it():
    with Training(FIRST, SETTINGS) as run, Training(FIRST, SETTINGS) as expected:
        saved = run.engine.state()
        run.params = runs.place(OTHER, None)
        run.renew(engine_state=saved)
        loaded(expected, OTHER, early=True)
        comparisons.assert_same_bits(outcome(run), outcome(expected))
