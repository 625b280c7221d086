"""Random sequences of what users do, right and wrong, against a model of what must hold.

Whatever was done, a call may refuse it with an error that is written for users, or the parameters
must be those of the slow reference. A wrong thing may go unnoticed for a while, as gradients are
read late; by the next `flush` it must have been refused, or have done no harm. What was done right
is never refused.

A few of them belong to the suite. For as long as one likes, over more trees and settings::

    ZENFLOW_SEQUENCES=1000 python -m pytest -q -n 0 --hypothesis-seed 1 \\
      tests/exchange/test_user_sequences.py
"""

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import zenflow_jax
from tests import comparisons, runs
from tests.reference import Reference, Settings
from tests.resuming import copied
from tests.runs import Leaf

SEQUENCES = int(os.environ.get("ZENFLOW_SEQUENCES", "0"))
# Each is compiled once, which is what the time goes to.
WORLDS = 10_000 if SEQUENCES else 6

# Makes the first few worlds have one each of what matters most.
SEED = 3162

# What a user may be told; anything else that is raised was not meant for them.
REFUSALS = (RuntimeError, ValueError, TypeError)


class World(NamedTuple):
    """Parameters, and how they are trained."""

    leaves: tuple[Leaf, ...]
    options: Settings
    offload: bool
    donate: bool


@functools.cache
def world(number: int) -> World:
    """The same for the same number."""
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
        window_scaling=[0.5, None, 0.0, 1.0][rng.integers(4)],
        weight_decay=0.1,
        max_grad_norm=float(rng.choice([2.0, 50.0])),
        send_gradients=str(rng.choice(["during_step", "after_step", "per_window"])),
    )
    return World(leaves, options, offload=number % 4 != 3, donate=bool(rng.integers(2)))


class Checkpoint(NamedTuple):
    """What was saved, and what the model knew."""

    params: Any
    state: Any
    engine_state: Any
    reference: Any
    run: int
    torn: bool  # a step had been made that was not exchanged
    misuse: str  # what had been done wrong and was not refused yet


class UserSequences(RuleBasedStateMachine):
    """One user at work. A method that begins with `_` is not theirs."""

    @initialize(number=st.integers(0, WORLDS - 1))
    def begin(self, number: int) -> None:
        self.world = world(number)
        args = self.world.offload, self.world.donate, True, False
        self.tx, self.program = runs.programs(self.world.leaves, self.world.options, *args)
        self.saved: list[Checkpoint] = []
        self.runs = 0  # started so far
        self.engine: Any = None
        self._start(0)

    @precondition(lambda self: self.engine is None and self.world.offload)
    @rule()
    def make_the_engine(self) -> None:
        if self.unmailed:
            self.misuse = "an engine made after the first step"
        self._make_engine()

    @precondition(lambda self: self._ready() and not self.unmailed)
    @rule(kind=st.sampled_from([*["plain"] * 6, "not finite", "frozen by zeros"]))
    def step_and_exchange(self, kind: str) -> None:
        self._step(kind)
        self._exchange()

    @precondition(lambda self: self._ready() and not self.unmailed)
    @rule(times=st.integers(2, 6))
    def train_on(self, times: int) -> None:
        for _ in range(times):
            if not self.over:
                self.step_and_exchange("plain")

    @precondition(lambda self: self._ready() and not self.unmailed)
    @rule()
    def flush(self) -> None:
        self._flush()

    @precondition(lambda self: self._ready() and not self.unmailed and not self.misuse)
    @rule()
    def look_at_the_masters(self) -> None:
        masters = zenflow_jax.master_params(self.params, self.state, self.engine)
        for x, expected in zip(masters.values(), self._masters(), strict=True):
            np.testing.assert_allclose(x, expected, rtol=0, atol=comparisons.ATOL)

    @rule()
    def keep_views_of_everything(self) -> None:
        self.views = jax.tree.map(np.asarray, (self.params, self.state))

    @precondition(lambda self: self._ready() and self.t > 0)
    @rule()
    def save(self) -> None:
        with self._may_refuse():
            engine_state = None if self.engine is None else self.engine.state()
            arrays = copied((self.params, self.state, engine_state))
            known = copy.deepcopy(self.reference), self.run, self.unmailed, self.misuse
            self.saved.append(Checkpoint(*arrays, *known))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def resume(self, data: Any) -> None:
        kept = data.draw(st.sampled_from(self.saved), label="checkpoint")
        self._resume(kept, kept, kept)

    @rule(seed=st.integers(0, 3))
    def start_another_run(self, seed: int) -> None:
        self._start(seed)

    @precondition(lambda self: not self.over and self._loading_is_seen())
    @rule(seed=st.integers(4, 6))
    def load_other_weights(self, seed: int) -> None:
        if self.t:
            self._note("weights loaded in mid-run")
        elif self.engine is not None:
            self._note("weights loaded after the engine was made")
        self._load(seed)

    @precondition(lambda self: self._ready())
    @rule()
    def forget_to_exchange(self) -> None:
        if self.unmailed and self.world.offload:
            self._note("a step that was not exchanged")
        self._step()

    @precondition(lambda self: self._ready() and self.unmailed)
    @rule()
    def exchange_late(self) -> None:
        self._exchange()

    @precondition(lambda self: self._ready() and self.world.offload)
    @rule()
    def exchange_twice(self) -> None:
        if not self.unmailed:
            self._note("an exchange without a step")
        self._exchange()
        if not self.over:
            self._flush()

    @precondition(lambda self: self._ready() and not self.unmailed and self.t > 0)
    @rule()
    def flush_to_look_and_go_on(self) -> None:
        """Goes on from what there was before; in-graph that is right, `flush` being pure."""
        kept = self.params, self.state
        if self.world.offload:
            self._note("a run that goes on from before a flush")
        self._apply("flush")
        self.params, self.state = kept

    @precondition(lambda self: not self.over)
    @rule(what=st.sampled_from(["state", "params"]))
    def bring_to_the_host_and_back(self, what: str) -> None:
        """What pickling, or a trainer that re-places what it is given, makes of a state."""
        if self.world.offload:
            self._note(f"{what} of NumPy arrays")
        setattr(self, what, jax.device_get(getattr(self, what)))

    @precondition(lambda self: not self.over)
    @rule()
    def move_the_state_to_the_device(self) -> None:
        self._note("a state that was moved")
        # By way of NumPy: between its memories a CPU device copies nothing by itself (jax 0.10.2).
        self.state = jax.device_put(jax.device_get(self.state), jax.devices()[0])

    # Parts of several checkpoints are compared where an engine is made of them.
    @precondition(lambda self: len(self.saved) > 1 and self.world.offload)
    @rule(data=st.data())
    def resume_from_a_mixture(self, data: Any) -> None:
        a, b, c = (data.draw(st.sampled_from(self.saved), label=x) for x in ("params", "b", "c"))
        if not a is b is c:
            self._resume(a, b, c)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self._ready() and not self.unmailed:
                self._flush()
        finally:
            self._close()

    def _begin(self, run: int, misuse: str, unmailed: bool) -> None:
        self._close()
        self.over, self.run, self.misuse, self.unmailed = False, run, misuse, unmailed

    def _start(self, seed: int) -> None:
        self.runs += 1
        self._begin(self.runs, "", False)
        self._load(seed)
        with self._may_refuse():
            self.state = self.tx.init(self.params)

    def _load(self, seed: int) -> None:
        leaves = self.world.leaves
        self.params = runs.initial(leaves, seed)
        self.reference = Reference(
            list(runs.initial_values(leaves, seed).values()),
            runs.rate,
            self.world.options,
            channel_axes=[x.axis for x in leaves],
            decay=[x.decay for x in leaves],
        )

    def _close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        self.engine = None

    def _resume(self, of_params: Checkpoint, of_state: Checkpoint, of_engine: Checkpoint) -> None:
        misuse, arrays = "", jax.tree.leaves((of_params.params, of_params.state))
        if not (of_params is of_state is of_engine):
            misuse = "parameters, state and engine of several checkpoints"
        elif of_params.torn:
            misuse = "a checkpoint made between a step and its exchange"
        elif of_params.misuse:
            misuse = f"a checkpoint after {of_params.misuse}"
        elif self.world.offload and any(isinstance(x, np.ndarray) for x in arrays):
            misuse = "a checkpoint of NumPy arrays"
        self._begin(of_params.run, misuse, of_params.torn)
        # Where the parts differ without harm, they are those of any.
        self.reference = copy.deepcopy(of_params.reference)
        self.params, self.state, engine_state = copied(
            (of_params.params, of_state.state, of_engine.engine_state)
        )
        if self.world.offload:
            self._make_engine(engine_state)

    def _make_engine(self, engine_state: Any = None) -> None:
        with self._may_refuse():
            self.engine = zenflow_jax.HostEngine(
                self.params, self.state, engine_state=engine_state, threads=1
            )

    @property
    def t(self) -> int:
        return self.reference.step_count

    def _ready(self) -> bool:
        return not self.over and (self.engine is not None or not self.world.offload)

    def _note(self, misuse: str) -> None:
        self.misuse = self.misuse or misuse

    def _loading_is_seen(self) -> bool:
        """Whether other weights are right or noticed; what the first exchange gets is not.

        In a jitted step the library cannot raise, and a float32 parameter that is selected is its
        own master: there the next step starts from what it gets, as that of `optax.adamw` does.
        """
        noticed = self.world.offload and self.world.options.topk_ratio < 1
        return self.t == 0 or (noticed and not (self.t == 1 and self.unmailed))

    def _masters(self) -> list[np.ndarray]:
        return [self.reference.moments(i)[0] for i in range(len(self.world.leaves))]

    def _step(self, kind: str = "plain") -> None:
        gradients = runs.gradients(self.world.leaves, self.t + 1, self.run)
        if kind != "plain":
            gradients["a"] = np.full_like(gradients["a"], np.nan if kind == "not finite" else 0)
        self.reference.step(list(gradients.values()))
        self.unmailed = self.world.offload
        with self._may_refuse():
            gradients = jax.tree.map(jnp.asarray, gradients)
            self.params, self.state = self.program(self.params, self.state, gradients)
        if not self.world.offload:
            self._check("a step")

    def _exchange(self) -> None:
        if self.over or not self.world.offload:
            return
        self._apply("exchange")
        self.unmailed = False
        self._check("exchange")

    def _flush(self) -> None:
        if self.unmailed:
            self._note("a flush before the exchange")
        self._apply("flush")
        self.reference.flush()
        if not self.over:
            misuse, self.misuse = self.misuse, ""
            self._check(f"flush ({misuse})" if misuse else "flush")

    def _apply(self, name: str) -> None:
        call = zenflow_jax.flush if self.engine is None else getattr(self.engine, name)
        with self._may_refuse():
            self.params, self.state = call(self.params, self.state)

    def _check(self, after: str) -> None:
        """The parameters are the reference's, unless something wrong may still be noticed."""
        if not (self.over or self.misuse):
            self._compare(self.params, self.reference.params, after)

    def _compare(self, params: dict[str, Any], expected: Any, after: str) -> None:
        theirs = dict(zip(params, map(np.array, expected), strict=True))
        both = [{name: np.array(x) for name, x in params.items()}], [theirs]
        try:
            comparisons.assert_close(*both)
        except AssertionError as error:
            self.over = True  # the first one is what is to be seen
            raise AssertionError(f"wrong weights after {after}, step {self.t}: {error}") from None

    @contextlib.contextmanager
    def _may_refuse(self) -> Iterator[None]:
        """Around a call: what was done wrong may be refused, and that is the end of the run."""
        try:
            yield
        except BaseException as error:
            self.over = True
            if not self.misuse or not isinstance(error, REFUSALS):
                raise
            self._close()


UserSequences.TestCase.settings = settings(
    max_examples=SEQUENCES or 30,
    stateful_step_count=25,
    deadline=None,
    derandomize=not SEQUENCES,
    # Every example of the long run is worth more than a short one of the first failure.
    phases=[Phase.explicit, Phase.generate, *([] if SEQUENCES else [Phase.shrink])],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
class TestUserSequences(UserSequences.TestCase):
    """Whatever users do is right, or refused."""
