"""A resumed run needs trees from the same step of the same run; all other sets are rejected."""

import gc
import weakref

import jax.numpy as jnp
import pytest

from tests import runs
from tests.resuming import PLAN, SETTINGS, copied, go, resumed, run_of, saved
from tests.runs import FIRST, SECOND, Leaf, Training
from zenflow_jax._device.checksums import checksum

TOGETHER = "Save and restore parameters, optimizer state and engine state together"


def other(leaves, step, seed, bad):
    """Returns gradients for a run with the same weights on different data."""
    return runs.gradients(leaves, step, seed + 1, bad)


def checksum_in(tree):
    return run_of(tree[2])["params"]


def refused(training, tree, words):
    with pytest.raises(ValueError, match=f"{words}.*{TOGETHER}"):
        resumed(training, tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_and_place_affects_the_checksum(dtype):
    leaves = (Leaf("v", (6, 5), -2, dtype), Leaf("w", (6, 5), -2, dtype))
    params = runs.initial(leaves)
    v, w = params["v"], params["w"]
    expected = checksum([v, w])
    changed = [[w, v], [v, w[::-1]]]
    for bit in range(8 * w.dtype.itemsize):
        changed += [[v, runs.with_a_bit(w, (bit % 6, i), bit)] for i in range(5)]
    assert expected not in {checksum(x) for x in changed}


def test_parameters_with_a_changed_value_are_rejected():
    with Training(SECOND, SETTINGS, donate=True) as training:
        # Non-finite values are compared, too.
        training.params["rows"] = training.params["rows"].at[7].set(jnp.nan)
        go(training, PLAN, 11)  # updates are in flight
        params, state, engine_state = saved(training)
        resumed(training, (params, state, engine_state)).engine.close()
        fresh = runs.initial(SECOND)
        for name, x in params.items():
            bit = runs.with_a_bit(x, tuple(n - 1 for n in x.shape), 0)
            for mixed in (params | {name: bit}, params | {name: fresh[name]}):
                refused(training, (mixed, state, engine_state), "`params` differ from those")


def test_trees_from_other_steps_or_runs_are_rejected():
    with Training(FIRST, SETTINGS) as training:
        training.go(5)
        earlier = saved(training)
        training.go(1)
        checkpoint = saved(training)
    params, state, engine_state = checkpoint
    words = "saved after step {}, but `opt_state` after step {}"
    refused(training, (params, state, earlier[2]), words.format(5, 6))
    refused(training, (params, earlier[1], engine_state), words.format(6, 5))
    refused(training, (earlier[0], state, engine_state), "`params` differ from those")
    first, second = resumed(training, checkpoint), resumed(training, checkpoint)
    second.gradients = other
    with first, second:
        for each in (first, second):
            each.go(1)
        params, state, _ = saved(first)
        refused(training, (params, state, saved(second)[2]), "after step 7 of another run")


def test_deleted_parameters_are_not_compared():
    with Training(FIRST, SETTINGS, donate=True) as training:
        assert checksum_in(saved(training)) == 0  # parameters may be loaded
        training.go(11)
        assert checksum_in(saved(training))
        gone = weakref.ref(training.params["rows"])
        training.params = training.params | copied({"rows": training.params["rows"]})
        gc.collect()
        assert gone() is None, "the engine keeps parameters alive"
        params, state, engine_state = saved(training)
        mixed = params | {"rows": params["rows"] + 1}
        resumed(training, (mixed, state, engine_state)).engine.close()
        training.flush()
        assert checksum_in(saved(training))
        training.step()  # donates the parameters
        assert checksum_in(saved(training)) == 0
