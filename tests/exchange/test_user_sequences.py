"""Random sequences of users' actions, right and wrong, against a model of the correct results.

After any sequence, either a call has raised an error that is written for users, or the parameters
must equal the slow reference's. A mistake may go unnoticed for a while, because gradients are read
late; by the next `flush` it must have been rejected, or must have done no harm. Correct actions are
never rejected.

The suite runs a few sequences. This command runs more, over more trees and settings::

    ZENFLOW_SEQUENCES=1000 python -m pytest -q -n 0 --hypothesis-seed 1 \\
      tests/exchange/test_user_sequences.py
"""

import copy
import functools
import os
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import zenflow_jax
from tests import comparisons, runs
from tests.reference import Settings
from tests.resuming import copied
from tests.runs import Leaf, Training

SEQUENCES = int(os.environ.get("ZENFLOW_SEQUENCES", "0"))
# Each world compiles once, which takes most of the time. These three cover all values of
# send_gradients, both dtypes, steps with and without donation, and rolling and common windows.
WORLDS = range(10_000) if SEQUENCES else (0, 4, 8)

SEED = 3162

# Errors meant for users; any other error is a failure.
REFUSALS = (RuntimeError, ValueError, TypeError)


class World(NamedTuple):
    """Parameters, and the settings of their training."""

    leaves: tuple[Leaf, ...]
    options: Settings
    donate: bool


@functools.cache
def world(number: int) -> World:
    """Returns equal gradients for equal numbers."""
    rng = np.random.default_rng((number, SEED))
    kinds = [((6, 3), -2), ((3, 7), -1), ((2, 5, 3), -2), ((4,), None), ((3, 2), None)]
    drawn = [0, *rng.integers(len(kinds), size=rng.integers(1, 3))]
    dtypes = ["float32", "bfloat16"]
    leaves = tuple(
        Leaf(name, *kinds[kind], dtypes[rng.integers(2)], bool(rng.integers(2)))
        for name, kind in zip("abc", rng.permutation(drawn), strict=False)
    )
    window = int(rng.integers(1, 5))
    stale = int(rng.integers(window + 1))
    options = Settings(
        topk_ratio=float(rng.choice([0.0, 0.3, 0.3, 1.0])),
        update_interval=window,
        select_interval=window * int(rng.integers(1, 3)),
        full_warm_up_rounds=int(rng.choice([0, 0, 2])),
        rolling=bool(rng.integers(3)),
        staleness=[None, stale, 0][rng.choice(3, p=[0.4, 0.4, 0.2])],
        window_scaling=[True, None][rng.integers(2)],
        weight_decay=0.1,
        max_grad_norm=float(rng.choice([2.0, 50.0])),
        send_gradients=str(rng.choice(["during_step", "after_step"])),
    )
    return World(leaves, options, donate=bool(rng.integers(2)))


class Checkpoint(NamedTuple):
    """A saved run, and the model at the same moment."""

    arrays: tuple[Any, Any, Any]  # parameters, state, engine's state
    reference: Any
    seed: int
    misuse: str  # mistakes that have not been rejected yet


class Refused(Exception):
    """Ends a run in which a mistake was made."""


class User:
    """A user at work. Methods without `_` are actions, with a number `n` that the user chooses."""

    def __init__(self, number: int):
        self._world = world(number)
        self._saved: list[Checkpoint] = []
        self.right_after_flush = 0
        self._start(0)

    def __call__(self, actions: list[tuple[str, int]]) -> None:
        """Takes these actions, and flushes at the end; after a rejection, starts a new run."""
        for name, n in actions:
            try:
                getattr(self, name)(n)
            except Refused:
                self._start(n)
        try:
            if not self._unmailed:
                self.flush(0)
        except Refused:
            pass
        finally:
            self._close()

    def step(self, n: int) -> None:
        if self._unmailed:
            self._note("a step that was not exchanged")
        run = self._run
        bad = n % 5 == 4
        gradients = runs.gradients(run.leaves, run.t + 1, run.seed, bad)
        self._reference.step(list(gradients.values()))
        self._call(run.step, bad=bad)
        self._unmailed = True

    def exchange(self, n: int) -> None:
        if not self._unmailed:
            self._note("an exchange without a step")
        self._call(self._run.exchange)
        self._unmailed = False
        self._check("exchange")
        self.right_after_flush += self._flushed and not self._misuse

    def train(self, n: int) -> None:
        if not self._unmailed:
            for i in range(1 + n % 6):
                self.step(n + i)
                self.exchange(n)

    def train_past_a_flush(self, n: int) -> None:
        if not self._unmailed:
            for action in (self.train, self.flush, self.train):
                action(n % 3)

    def flush(self, n: int) -> None:
        if self._unmailed:
            self._note("a flush before the exchange")
        before = self._run.values()
        self._call(self._run.flush)
        self._reference.flush()
        after = self._run.values()
        self._flushed = any(not np.array_equal(after[name], x) for name, x in before.items())
        if self._run.t > self._loaded_at:  # otherwise no step could have revealed a mistake
            misuse, self._misuse = self._misuse, ""
            self._check(f"flush ({misuse})")

    def look(self, n: int) -> None:
        if self._misuse or self._unmailed:
            return
        run = self._run
        masters = zenflow_jax.master_params(run.params, run.state, run.engine)
        for i, (name, param) in enumerate(run.values().items()):
            x, expected = np.asarray(masters[name]), self._reference.moments(i)[0]
            comparisons.assert_same_bits(x.astype(param.dtype), param)
            np.testing.assert_allclose(
                x, np.where(x == param, x, expected), rtol=0, atol=comparisons.ATOL
            )

    def keep_views_of_everything(self, n: int) -> None:
        self.views = jax.tree.map(np.asarray, (self._run.params, self._run.state))

    def flush_to_look_and_go_on(self, n: int) -> None:
        """Resumes from an earlier state."""
        run = self._run
        if self._unmailed or not run.t:
            return
        kept = run.params, run.state
        self._note("a run that resumes from before a flush")
        self._call(run.flush)
        run.params, run.state = kept

    def bring_to_the_host_and_back(self, n: int) -> None:
        """Copies a state as pickling does, or a trainer that places it again."""
        self._note("NumPy arrays, or a state that was moved")
        name = ("params", "state")[n % 2]
        # Through NumPy: a CPU device does not copy between its memories (jax 0.10.2).
        arrays = jax.device_get(getattr(self._run, name))
        back = jax.device_put(arrays, jax.devices()[0]) if n % 3 else arrays
        setattr(self._run, name, back)

    def load_other_weights(self, n: int) -> None:
        t = self._run.t
        # In a jitted step the library cannot raise, and a selected float32 parameter is its own
        # master: there the next step starts from the parameter that it gets, as with `optax.adamw`.
        noticed = self._world.options.topk_ratio < 1 and not (t == 1 and self._unmailed)
        if t and not noticed:
            return
        self._note("weights loaded during a run, or after the engine was created")
        self._run.params = runs.initial(self._run.leaves, 4 + n)
        self._loaded_at = t
        if t == 0:
            self._reference = self._model(4 + n)

    def start_another_run(self, n: int) -> None:
        self._start(n % 4)

    def save(self, n: int) -> None:
        run = self._run
        if run.t:
            misuse = "a checkpoint between a step and its exchange" if self._unmailed else ""
            arrays = copied((run.params, run.state, self._call(run.engine.state)))
            known = copy.deepcopy(self._reference), run.seed, self._misuse or misuse
            self._saved.append(Checkpoint(arrays, *known))

    def resume(self, n: int) -> None:
        if self._saved:
            one = self._saved[n % len(self._saved)]
            self._resume(one, one, one)

    def resume_from_a_mixture(self, n: int) -> None:
        # An engine compares parts of several checkpoints when it is created.
        if self._saved:
            self._resume(*(self._saved[n // k % len(self._saved)] for k in (1, 2, 3)))

    def _start(self, seed: int) -> None:
        self._close()
        leaves, options, donate = self._world
        # By default, samples may miss a single load.
        self._run = Training(leaves, options, seed=seed, donate=donate, check="all")
        self._reference, self._misuse, self._unmailed = self._model(seed), "", False
        self._loaded_at, self._flushed = -1, False

    def _resume(self, *parts: Checkpoint) -> None:
        self._start(parts[0].seed)
        arrays = [part.arrays[i] for i, part in enumerate(parts)]
        self._misuse = parts[0].misuse
        if not parts[0] is parts[1] is parts[2]:
            self._misuse = "a mixture of checkpoints"
        elif any(isinstance(x, np.ndarray) for x in jax.tree.leaves(arrays[:2])):
            self._misuse = "a checkpoint of NumPy arrays"
        self._unmailed = self._misuse == "a checkpoint between a step and its exchange"
        # If the parts differ harmlessly, they may come from any checkpoint.
        self._reference = copy.deepcopy(parts[0].reference)
        run = self._run
        run.params, run.state, engine_state = copied(arrays)
        self._call(run.renew, engine_state=engine_state)

    def _model(self, seed: int) -> Any:
        return comparisons.slow_run(self._world.leaves, self._world.options, seed)

    def _note(self, misuse: str) -> None:
        self._misuse = self._misuse or misuse

    def _call(self, function: Any, **options: Any) -> Any:
        """Calls a function; after a mistake, a rejection ends the run."""
        try:
            return function(**options)
        except REFUSALS as error:
            if not self._misuse:
                raise
            raise Refused from error

    def _check(self, after: str) -> None:
        """Checks that the parameters equal the reference's, if no mistake can still be detected."""
        if not self._misuse:
            expected = dict(zip(self._run.params, self._reference.params, strict=True))
            try:
                comparisons.assert_close([self._run.values()], [expected])
            except AssertionError as error:
                message = f"wrong weights after {after}, step {self._run.t}: {error}"
                raise AssertionError(message) from None

    def _close(self) -> None:
        if hasattr(self, "_run"):
            self._run.__exit__()


ACTIONS = ["train", *(name for name in vars(User) if name[0] != "_")]


@pytest.mark.slow
@pytest.mark.timeout(0 if SEQUENCES else 300)
@settings(
    max_examples=SEQUENCES or 25,
    derandomize=not SEQUENCES,
    # Shrinking a failing sequence takes minutes.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# The step after the load is skipped.
@example(4, [("train", 6), ("load_other_weights", 15), ("train", 19), ("flush", 5)])
@given(
    st.sampled_from(WORLDS),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 29)), min_size=10, max_size=20),
)
def test_all_actions_of_users_are_correct_or_rejected(number, actions):
    User(number)(actions)


@pytest.mark.slow
@pytest.mark.parametrize("number", WORLDS[:3])
def test_correct_steps_after_a_flush_inside_a_window_are_accepted(number):
    user = User(number)
    both = ("train_past_a_flush", 2), ("save", 0), ("resume", 0), ("train_past_a_flush", 2)
    user([("train", 4), *both])
    # For each engine whose flush changed the parameters, three steps equal the reference's.
    assert user.right_after_flush == 6
