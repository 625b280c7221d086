"""A resumed run needs trees from the same step of the same run; all other sets are rejected."""

import dataclasses
import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from tests import runs
from tests.resuming import PLAN, SETTINGS, copied, go, resumed, saved
from tests.runs import FIRST, SECOND, Leaf, Training
from zenflow_jax._device.samples import fingerprints


def other(leaves, step, seed, bad):
    """Returns gradients for a run with the same weights on different data."""
    return runs.gradients(leaves, step, seed + 1, bad)


def refused(training, tree, words):
    with pytest.raises(ValueError, match=words):
        resumed(training, tree)


def of(name):
    return rf"values of \['{name}'\] in `params` changed .*together, and do not change"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_bit_of_a_parameter_affects_its_fingerprint(dtype):
    leaves = (Leaf("w", (6, 5), -2, dtype),)
    params = runs.initial(leaves)
    specs = [leaf.spec for leaf in runs.transformation(leaves, SETTINGS).init(params).leaves]

    def fingerprint(x):
        return int(fingerprints([x], specs)[0])

    expected = fingerprint(params["w"])
    for place in np.ndindex(6, 5):
        for bit in range(8 * params["w"].dtype.itemsize):
            assert fingerprint(runs.with_a_bit(params["w"], place, bit)) != expected
    assert fingerprint(params["w"][::-1]) != expected
    swapped = params["w"].at[(0, 1), (1, 0)].set(params["w"][(1, 0), (0, 1)])
    assert fingerprint(swapped) != expected


@pytest.mark.slow
def test_a_parameter_with_a_flipped_bit_is_rejected_by_name():
    settings = dataclasses.replace(SETTINGS, staleness=2)
    rng = np.random.default_rng(0)
    with Training(SECOND, settings, donate=True) as training:
        # Non-finite values are compared, too.
        training.params["rows"] = training.params["rows"].at[7].set(jnp.nan)
        for t in (1, 8, 11, 13):  # after a skipped step, with updates in flight, or after a flush
            go(training, PLAN, t)
            params, state, engine_state = saved(training)
            resumed(training, (params, state, engine_state)).engine.close()
            for name, x in params.items():
                place = tuple(rng.integers(0, x.shape))
                mixed = params | {name: runs.with_a_bit(x, place, 0)}
                refused(training, (mixed, state, engine_state), of(name))
            mixed = params | {"rows": jnp.nan_to_num(params["rows"])}
            refused(training, (mixed, state, engine_state), of("rows"))


def test_deleted_parameters_have_no_fingerprint_and_are_not_compared():
    def known():
        """Returns, for each leaf, whether the engine's state contains its fingerprint."""
        sums = training.engine.state()["counts"]["fingerprints"]
        return dict(zip(training.params, (sums != 0).tolist(), strict=True))

    with Training(FIRST, SETTINGS, donate=True) as training:
        # Other parameters may be loaded before the first step.
        assert not any(known().values())
        training.go(11)
        assert all(known().values())
        gone = weakref.ref(training.params["rows"])
        training.params = training.params | copied({"rows": training.params["rows"]})
        gc.collect()
        assert gone() is None, "the engine keeps parameters alive"
        assert [name for name, x in known().items() if not x] == ["rows"]
        params, state, engine_state = saved(training)
        mixed = params | {"rows": params["rows"] + 1}
        resumed(training, (mixed, state, engine_state)).engine.close()
        training.flush()
        assert all(known().values())
        training.step()  # donates the parameters
        assert not any(known().values())


def test_two_runs_resumed_from_one_checkpoint_are_separate_runs():
    with Training(FIRST, SETTINGS) as training:
        training.go(6)
        checkpoint = saved(training)
    first, second = resumed(training, checkpoint), resumed(training, checkpoint)
    second.gradients = other
    with first, second:
        for each in (first, second):
            each.go(1)
        params, state, _ = saved(first)
        refused(training, (params, state, saved(second)[2]), "after step 7 of another run")
