"""Answers the questions of `correct` in `on_gpu.py`.

A question compares runs with `optax.adamw`, with the slow NumPy reference (`tests/reference.py`),
or bit by bit with another form of the same run. It raises an `AssertionError` that describes the
difference. Runs and comparisons come from the tests (`tests/runs.py`, `tests/comparisons.py`).
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import zenflow_jax
from benchmarks.on_gpu import Part
from tests import comparisons, runs
from tests.comparisons import assert_same_bits
from tests.reference import Settings
from tests.runs import SCANNED, SECOND, THIRD, Leaf, Leaves, Plan, Training
from zenflow_jax import streaming

SETTINGS = Settings(weight_decay=0.01, topk_ratio=0.2, update_interval=4, select_interval=8)
STEPS = 18  # four windows and an open window, two selections
#: Large enough that transfers take a while.
MANY: Leaves = (
    Leaf("bias", (2048,), None, "float32"),
    Leaf("columns", (2, 1024, 8192), -1, "bfloat16"),
    Leaf("rows", (8192, 2048), -2, "float32"),
)


def correct(rehearse: bool) -> dict[str, Callable[[Part], None]]:
    """Returns the questions, the most important first."""
    if not rehearse:  # twice the CPU's, because powers and roots round differently on a GPU
        comparisons.ATOL = comparisons.MOMENT_TOL = 2e-6
    return {
        # Streaming is unusable if this fails.
        "streamed gradients equal those of a plain scan": lambda _: streaming.check_device(),
        "S = 1 is `optax.adamw`": windows_of_one_step_are_adamw,
        "runs equal the reference": runs_equal_the_reference,
        "mail that leaves later: the same bits": mail_that_leaves_later_has_the_same_bits,
        "resume: the same bits": a_resumed_run_has_the_same_bits,
        "`master_params`, then steps at once": masters_of_an_open_window_are_not_overwritten,
        "donation: the same bits": donation_changes_no_bit,
    }


def windows_of_one_step_are_adamw(_: Part) -> None:
    settings = dataclasses.replace(SETTINGS, update_interval=1, staleness=0, select_interval=5)
    expected = comparisons.adamw(SECOND, None, settings.weight_decay, STEPS, seed=0)
    with Training(SECOND, settings) as training:
        comparisons.assert_close([params for _, params in training.follow(Plan(STEPS))], expected)


REFERENCE: dict[str, tuple[Leaves, dict[str, Any], Plan]] = {
    "stacks in ranges, with steps of NaN": (SCANNED, {}, Plan(STEPS, bad=(6, 7), flush_at=(11,))),
    "windows of four steps": (SECOND, {}, Plan(STEPS)),
    "clipping": (SECOND, {"max_grad_norm": 30.0}, Plan(STEPS)),
    "hand-over at every window": (SECOND, {"select_interval": 4}, Plan(STEPS)),
    "mail in bfloat16": (THIRD, {"transfer_dtype": "bfloat16"}, Plan(STEPS)),
}


def runs_equal_the_reference(part: Part) -> None:
    for name, (leaves, options, plan) in list(REFERENCE.items())[: 1 if part.rehearse else None]:
        part.note(name, verdict="FAILED")
        settings = dataclasses.replace(SETTINGS, **options)
        with Training(leaves, settings) as training:
            slow = comparisons.assert_agrees(training, plan)
            assert training.engine.stats.reselections == slow.reselections > 1
        part.note(name, verdict="pass")


@functools.partial(jax.jit, static_argnums=0)
def _drawn(leaves: Leaves, step: Any, seed: Any, bad: Any) -> dict[str, jax.Array]:
    """Returns a step's gradient for large leaves, drawn on the device, which is fast."""
    del bad
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys = {x: jax.random.fold_in(key, i) for i, x in enumerate(leaves)}
    return {x.name: jax.random.normal(key, x.shape, x.dtype) for x, key in keys.items()}


def _large(part: Part, **options: Any) -> Training:
    return Training(SECOND if part.rehearse else MANY, SETTINGS, gradients=_drawn, **options)


def _flushed(training: Training, steps: int = STEPS) -> dict[str, np.ndarray]:
    """Returns the parameters after `steps` steps and a flush."""
    with training:
        training.go(steps)
        training.flush()
        return training.values()


def mail_that_leaves_later_has_the_same_bits(part: Part) -> None:
    expected = _flushed(_large(part))
    # The second is the same run again.
    for options in ({"send_gradients": "after_step"}, {}, {"threads": 2}):
        assert_same_bits(_flushed(_large(part, **options)), expected)


def a_resumed_run_has_the_same_bits(part: Part) -> None:
    """Resumes inside a window, with an update in flight."""
    with _large(part) as training:
        training.go(10)
        params, engine_state = jax.device_get((training.params, training.engine.state()))
        # Values without their shardings, as in a checkpoint.
        places = jax.tree.map(lambda x: x.sharding, training.state)
        state = jax.tree.map(np.array, training.state)
        expected = _flushed(training, STEPS - 10)
    again = _large(part)
    again.engine.close()
    again.t = 10
    again.params = runs.place(params, None)
    again.state = jax.tree.map(jax.device_put, state, places)
    again.engine = zenflow_jax.HostEngine(again.params, again.state, engine_state=engine_state)
    assert_same_bits(_flushed(again, STEPS - 10), expected)


def masters_of_an_open_window_are_not_overwritten(part: Part) -> None:
    """Makes the next windows overwrite the memory that the uploads of `master_params` read."""
    ends = []
    for wait in (True, False):
        with _large(part) as training:
            training.go(10)
            live = zenflow_jax.master_params(training.params, training.state, training.engine)
            if wait:
                live = jax.device_get(live)
            training.go(4)
            ends.append((jax.device_get(live), training.values()))
    assert_same_bits(*ends)


def donation_changes_no_bit(part: Part) -> None:
    def run(donate: tuple[int, ...], sending: str) -> Any:
        training = _large(part, send_gradients=sending)
        training.program = jax.jit(runs.jitted(training.tx), donate_argnums=donate)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some donated buffers are not usable
            return _flushed(training)

    for sending in ("during_step", "after_step"):
        expected = run((), sending)
        # Parameters and state; also gradients.
        for donate in ((0, 1), (0, 1, 2)):
            assert_same_bits(run(donate, sending), expected)
