"""8-bit moments: the meaning of codes, and equal codes from both kernels."""

import importlib
import math

import numpy as np
import pytest

from tests import arithmetic
from tests.host.states import BFLOAT16, KERNELS, bits, new_gradient, new_state, some_channels, step
from zenflow_jax._host import codes, numba_loops
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import HostArray, new_moments

# Shapes with buckets inside a channel and at its end, and chunks of the compiled loops.
WIDE = {  # (entries, n, width)
    "a rest after a bucket": (2, 7, 37),
    "whole buckets": (1, 3, 96),
    "wider than a chunk": (1, 2, 4200),
    "single elements": (2, 5, 1),
}
every_shape = pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
both_moments = pytest.mark.parametrize("first", [True, False])


def compact(x: np.ndarray, *, first: bool) -> HostArray:
    moment = new_moments(x.shape, compact=True)[0 if first else 1]
    moment.write(x)
    return moment


def rounded(x: np.ndarray, *, first: bool) -> np.ndarray:
    """Rounds like the reference, per channel."""
    result = np.empty_like(x)
    for place in np.ndindex(x.shape[:2]):
        result[place] = arithmetic.compact_one(x[place], first=first)
    return result


def numbers(shape: tuple[int, ...], *, first: bool) -> np.ndarray:
    """Returns values of any size, in tiny, huge or zero buckets; second moments are nonnegative."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    x[rng.random(shape) < 0.2] = 0
    x *= np.float32([1e-44, 1e-38, 1e-20, 1, 1e15, 0])[rng.integers(6, size=shape[1])][:, None]
    return x if first else abs(x)


def of_channels(moment: HostArray, channels: np.ndarray) -> list[bytes]:
    """Returns codes and scales of some channels, given as bool (entries, n)."""
    return bits(*(x[channels] for x in moment.arrays))


@both_moments
@every_shape
def test_written_moments_are_rounded_like_the_references_and_only_once(first, shape):
    x = numbers(shape, first=first)
    moment = compact(x, first=first)
    np.testing.assert_array_equal(moment.as_float32(), rounded(x, first=first))
    assert bits(compact(moment.as_float32(), first=first)) == bits(moment)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*zip((BFLOAT16, np.float32, BFLOAT16, np.float32), WIDE.values(), strict=True)],
    ids=WIDE,
)
def test_a_step_equals_a_step_with_float32_moments_that_are_then_rounded(kernel, dtype, shape):
    gradients = [(new_gradient(shape, dtype, i), 0.3 + i) for i in range(5)]
    for threads, tile in ((1, None), (3, max(97, math.prod(shape) // 20))):
        state, plain = (new_state(shape, dtype=dtype, compact=x) for x in (True, False))
        for ours, theirs in zip(state[1:3], plain[1:3], strict=True):
            theirs.write(ours.as_float32())
        active, before = some_channels(state), state.copy()
        adam = HostAdam(kernel, threads, tile=tile)
        for each in (state, plain):
            step(adam, each, gradients, active, scale=1 / 3)
        adam.close()
        assert bits(state.masters, state.steps) == bits(plain.masters, plain.steps)
        on = np.broadcast_to(active[:, :, None], shape)
        for i, first in ((1, True), (2, False)):
            expected = rounded(plain[i].as_float32(), first=first)
            np.testing.assert_array_equal(state[i].as_float32()[on], expected[on])
            assert of_channels(state[i], ~active) == of_channels(before[i], ~active)


@every_shape
def test_channels_are_handed_over_without_changing_their_neighbours(shape):
    entries, n, _ = shape
    ranks = np.random.default_rng(0).random((entries, n)).argsort(axis=1)
    chosen = ranks < -(-n // 3)
    channels = np.nonzero(chosen)[1].reshape(entries, -1).astype(np.int32)
    adam = HostAdam("numpy", 2)
    state = new_state(shape, compact=True)
    moments = state[1:3]
    before = state.copy()[1:3]
    taken, index = adam.take(moments, channels), channels[:, :, None]
    for moment, rows in zip(moments, taken, strict=True):
        np.testing.assert_array_equal(np.take_along_axis(moment.as_float32(), index, 1), rows)
    adam.put(moments, channels, taken)
    assert bits(*moments) == bits(*before)
    new = [numbers(taken[0].shape, first=first) for first in (True, False)]
    for rows in new:
        rows.flags.writeable = False  # like an array from a device
    adam.put(moments, channels, new)
    adam.close()
    for moment, old, rows, first in zip(moments, before, new, (True, False), strict=True):
        assert of_channels(moment, ~chosen) == of_channels(old, ~chosen)
        kept = np.take_along_axis(moment.as_float32(), index, 1)
        np.testing.assert_array_equal(kept, rounded(rows, first=first))


@every_shape
def test_a_moment_read_in_chunks_equals_the_whole_moment(shape):
    for moment, first in zip(new_state(shape, compact=True)[1:3], (True, False), strict=True):
        whole = rounded(moment.as_float32(), first=first).reshape(-1)
        assert bits(moment.as_float32().reshape(-1)) == bits(whole)
        for limit in (max(1, whole.size // 700), 100, whole.size):
            begins, chunks = zip(*moment.chunks(limit), strict=True)
            assert begins == (0, *np.cumsum([x.size for x in chunks])[:-1])
            assert bits(np.concatenate(chunks)) == bits(whole)


@pytest.mark.parametrize("name", ["BEND", "TOP_FIRST", "TOP_SECOND", "LEAST"])
def test_compiled_loops_cached_on_disk_reject_different_constants(name, monkeypatch):
    monkeypatch.setattr(codes, name, getattr(codes, name) + 1)
    with pytest.raises(AssertionError):
        importlib.reload(numba_loops)
