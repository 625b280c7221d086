"""The host's AdamW compared with the formula in float64, and with itself bit by bit."""

import itertools
import math

import numpy as np
import pytest

from tests.host.states import (
    BFLOAT16,
    DTYPES,
    KERNELS,
    SCALARS,
    STEP,
    bits,
    empty_sums,
    new_gradient,
    new_state,
    some_channels,
    step,
)
from zenflow_jax._host import adam as adam_module
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._spec.scalars import window_step

SHAPES = {  # (entries, n, width)
    "matrix": (1, 23, 37),
    "wider than a chunk": (1, 5, 9001),
    "stack": (3, 5, 17),
    "single elements": (2, 6, 1),
}
# Steps of RATE on parameters near 1, computed in float32, have a few rounding errors of 6e-8.
ATOL = 1e-6


# Each shape is tested with some of the dtypes.
SHAPES_AND_DTYPES = list(zip(SHAPES.values(), itertools.cycle(DTYPES)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES, ids=SHAPES)
def test_a_window_follows_the_formula_on_active_channels_and_keeps_all_other_bits(
    kernel, shape, dtype
):
    state = new_state(shape, dtype=dtype)
    weighed = [(new_gradient(shape, dtype, seed), 0.5 + seed) for seed in range(3)]
    active = some_channels(state)
    p, m, v = (x.astype(np.float64) for x in state.wide)
    clipped = np.stack([factor * g.astype(np.float64) for g, factor in weighed])
    n = state.steps[:, :, None] + 3.0
    rate, b1, b2, _, _, eps, decay = SCALARS
    m = b1**3 * m + (1 - b1**3) * clipped.mean(0)
    v = b2**3 * v + (1 - b2**3) * np.square(clipped).mean(0)
    p -= 3 * rate * ((m / (1 - b1**n)) / (np.sqrt(v / (1 - b2**n)) + eps) + decay * p)

    adam, sums = HostAdam(kernel, 1, tile=301), empty_sums(shape)
    adam.accumulate(sums, weighed[:2], first=True)
    on = np.broadcast_to(active[:, :, None], shape)
    # Uses all kinds of bits, including pairs that no master is split into.
    size = int((~on).sum())
    garbage = np.resize(np.float32([np.nan, -np.nan, np.inf, -0.0, 1e-45, -3e38]), size)
    for x in (state.mu.values, state.nu.values, *sums):
        x[~on] = garbage
    for x in state.masters.arrays:
        x[~on] = np.frombuffer(np.random.default_rng(0).bytes(size * x.itemsize), x.dtype)
    before = state.copy()
    of_window = window_step(SCALARS, 3, True)
    step(adam, state, weighed[2:], active, scale=1 / 3, of_window=of_window, sums=sums)

    master = state.masters.as_float32()
    for ours, exact in zip(state.wide, (p, m, v), strict=True):
        np.testing.assert_allclose(ours[on], exact[on], rtol=ATOL, atol=ATOL)
    for ours, old in zip(state.arrays, before.arrays, strict=True):
        assert bits(ours[~on]) == bits(old[~on])
    np.testing.assert_array_equal(state.steps, before.steps + 3 * active)
    assert bits(state.masters.values[on]) == bits(master[on].astype(dtype))


# Tests as many gradients as a compiled loop takes at once, and fewer.
@pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES, ids=SHAPES)
def test_results_do_not_depend_on_kernel_threads_or_tiles(shape, dtype):
    count = 8 if dtype == BFLOAT16 else 4
    weighed = [(new_gradient(shape, dtype, i), 0.3 + i) for i in range(count)]

    def run(adam: HostAdam, *parts: int) -> list[bytes]:
        """Sums these numbers of gradients before the step, and all others in the step."""
        state = new_state(shape, dtype=dtype)
        active = some_channels(state)
        rest, sums = weighed, empty_sums(shape)
        for part in parts:
            adam.accumulate(sums, rest[:part], first=rest is weighed)
            rest = rest[part:]
        step(adam, state, rest, active, scale=1 / 3, sums=sums if parts else None)
        step(adam, state, weighed, ~active, scale=0.3)
        adam.close()
        return bits(*state)

    expected = run(HostAdam("numpy", 1), *[1] * count)
    size = math.prod(shape)
    for kernel in KERNELS:
        for threads, tile in ((1, size // 9), (3, size // 3 + 1)):
            for parts in (count,), (2, count - 2), ():
                assert run(HostAdam(kernel, threads, tile=tile), *parts) == expected


@pytest.mark.parametrize("wrong", [-1, 23])
def test_channels_that_a_leaf_does_not_have_are_rejected(wrong):
    state = new_state(SHAPES["matrix"])
    with pytest.raises(ValueError, match=f"Channels .*{wrong}.* 0 to 22"):
        HostAdam("numpy", 1).take([state.masters], np.sort(np.int32([[3, wrong]])))


def test_adamw_yields_between_chunks_and_keeps_its_initial_choice_of_channels(monkeypatch):
    monkeypatch.setattr(adam_module, "_CHUNK", 1)
    shape = SHAPES["matrix"]
    state, unchanged = new_state(shape), new_state(shape)
    active = some_channels(state)
    step(HostAdam("numpy", 1), unchanged, new_gradient(shape), active)
    gradients = [(new_gradient(shape), 1.0)]
    chunks = HostAdam("numba", 1, tile=74).adamw(*state, gradients, 1.0, active, STEP)
    next(chunks)
    assert bits(*state) != bits(*unchanged)
    active[:] = True
    # Each chunk is a tile of two channels; one of twelve tiles has no active channel.
    assert len(list(chunks)) == 10
    assert bits(*state) == bits(*unchanged)


def test_a_failure_in_a_thread_reaches_the_caller():
    adam = HostAdam("numpy", 2, tile=100)
    shape = (1, 10, 100)
    sums = empty_sums(shape)
    sums.squares.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        adam.accumulate(sums, [(new_gradient(shape), 1.0)], first=True)
    adam.close()
