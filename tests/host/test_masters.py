"""Masters in two 16-bit parts: uploads are their casts, and no other bit is lost."""

import numpy as np
import pytest

from tests.host.states import BFLOAT16, DTYPES, KERNELS, SCALARS, State, bits, new_masters, step
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import ALIGNMENT, HostArray, aligned_zeros, new_moments
from zenflow_jax._spec.scalars import window_step


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    """Returns all lower 16 bits with some upper bits, and all upper bits with some lower bits."""
    upper = np.uint32([0, 1, 0x7F, 0x80, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
    upper = np.concatenate([upper, upper | np.uint32(0x8000)])
    every = np.arange(2**16, dtype=np.uint32)
    lower = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = [(upper[:, None] << 16 | every), (every[:, None] << 16 | lower)]
    return np.concatenate([x.reshape(-1) for x in bits]).view(np.float32).reshape(1, 1, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_are_read_back_and_uploads_are_their_casts_bit_for_bit(dtype, numbers):
    masters = new_masters(numbers, dtype)
    with np.errstate(all="ignore"):
        assert bits(masters.values) == bits(numbers.astype(dtype))
        # Uploads are casts of the stored masters, not only of the written values.
        number, back = ~np.isnan(numbers), masters.as_float32()
        assert bits(masters.values[number]) == bits(back[number].astype(dtype))
    expected = numbers.view(np.uint32).copy()
    if dtype == BFLOAT16:
        # The last bit of a master halfway above an even number changes.
        expected -= (expected & 0x1FFFF) == 0x8000
    assert bits(back[number]) == bits(expected[number])
    assert np.isnan(back[~number]).all()
    assert bits(new_masters(back, dtype)) == bits(masters)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_kernels_split_masters_alike_and_a_step_at_rate_zero_keeps_every_bit(
    kernel, dtype, numbers
):
    p = numbers[np.isfinite(numbers)].reshape(1, 1, -1)
    masters, channels, steps = new_masters(p, dtype), np.int32([[0]]), np.zeros((1, 1), np.int32)
    adam, expected = HostAdam(kernel, 1), bits(masters)
    moved = HostArray.zeros(p.shape, np.dtype(dtype))
    for _ in range(2):  # as when channels are handed over
        adam.put([moved], channels, [p])
        (p,) = adam.take([moved], channels)
        assert bits(moved.as_float32()) == bits(masters.as_float32())
    state = State(masters, *new_moments(p.shape, compact=False), steps)
    rest = window_step(SCALARS._replace(learning_rate=0.0, weight_decay=0.0), 1, False)
    step(adam, state, np.zeros_like(p), np.ones((1, 1), bool), of_window=rest)
    assert bits(masters) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_become_masters_without_rounding(dtype):
    """Writes from memory that is not contiguous, too."""
    x = np.random.default_rng(0).standard_normal((1, 513, 514)).astype(dtype)
    for weights in (x, np.asfortranarray(x), x.astype(np.float32), x.astype(np.float32)[..., ::-1]):
        masters = new_masters(np.float32(1.001) * x.astype(np.float32), dtype)
        masters.write(weights)  # overwrites all earlier values
        assert bits(masters.as_float32()) == bits(np.ascontiguousarray(weights, np.float32))


@pytest.mark.parametrize("size", [1, 33, 10**5])
def test_jax_can_use_the_arrays_without_a_copy(size):
    arrays = [aligned_zeros((size,), dtype) for dtype in DTYPES for _ in range(9)]
    assert {x.ctypes.data % ALIGNMENT for x in arrays} == {0}
