"""Masters in two parts of 16 bits: what is uploaded is their cast, and nothing else is lost."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from tests.host.test_host_adam import BFLOAT16, DTYPES, KERNELS, bits, new_masters
from zenflow_jax._host import numba_loops
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import ALIGNMENT, PIECE, blank
from zenflow_jax._host.masters import Masters


@numba.njit(nogil=True)
def count_wrong(start, stop):
    """Of the numbers with these upper halves: how many are not as `masters.py` says.

    And how many have moved by their last bit. No branch: LLVM vectorizes both loops.
    """
    p, rest = np.empty(2**16, np.uint16), np.empty(2**16, np.int16)
    wrong = moved = 0
    for upper in range(start, stop):
        first = np.uint32(upper << 16)
        odd, infinite = np.uint32(upper & 1), (upper & 0x7F80) == 0x7F80
        quiet = np.uint16((upper & 0x8000) | 0x7FC0)
        for i in range(p.size):
            x = np.uint32(first | np.uint32(i)).view(np.float32)
            numba_loops._keep(x, p, rest, i, True)
        errors, ties = np.uint32(0), np.uint32(0)
        for i in range(p.size):
            lower = np.uint32(i)
            # To nearest, and where two are as near to the one whose last bit is 0.
            up = (lower > 0x8000) | ((lower == 0x8000) & (odd == 1))
            down = (lower == 0x8000) & (odd == 0)
            rounded = np.uint16(np.uint32(first >> np.uint32(16)) + np.uint32(up))
            found = np.float32(numba_loops._master(p, rest, i))
            same = found.view(np.uint32) == np.uint32(np.uint32(first | lower) - np.uint32(down))
            nan = infinite & (np.uint32(np.uint32(first | lower) & np.uint32(0x7FFFFF)) != 0)
            right = ((p[i] == rounded) & same & ~nan) | ((p[i] == quiet) & (found != found) & nan)
            errors = np.uint32(errors + np.uint32(~right))
            ties = np.uint32(ties + np.uint32(down & ~nan))
        wrong += errors
        moved += ties
    return wrong, moved


@pytest.mark.slow
def test_every_float32_comes_back_but_those_halfway_above_an_even_one_and_nans():
    edges = range(0, 2**16 + 1, 2**12)
    with ThreadPoolExecutor(numba.config.NUMBA_NUM_THREADS) as pool:
        counts = list(pool.map(count_wrong, edges[:-1], edges[1:]))
    wrong, moved = np.sum(counts, axis=0)
    assert wrong == 0
    assert moved == 2**15 - 2**7  # of each even upper half that is finite


@pytest.fixture(scope="module")
def numbers() -> np.ndarray:
    """Float32 of all lower halves with some upper ones, and of all upper ones with some lower."""
    upper = np.uint32([0, 1, 0x7F, 0x80, 0x3F80, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
    upper = np.concatenate([upper, upper | np.uint32(0x8000)])
    every = np.arange(2**16, dtype=np.uint32)
    lower = np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = [(upper[:, None] << 16 | every), (every[:, None] << 16 | lower)]
    return np.concatenate([x.reshape(-1) for x in bits]).view(np.float32)


def test_what_is_uploaded_is_the_cast_of_the_masters_bit_for_bit(numbers):
    number = ~np.isnan(numbers)
    with np.errstate(all="ignore"):
        for dtype in DTYPES:
            masters = new_masters(numbers, dtype)
            assert bits(masters.to_upload) == bits(numbers.astype(dtype))
            # Of what the masters are, not only of what they were set to.
            cast = masters.as_float32()[number].astype(dtype)
            assert bits(masters.to_upload[number]) == bits(cast)


def test_both_kernels_take_masters_apart_alike(numbers):
    rows, channels = numbers.reshape(1, 1, 1, -1), np.int32([[0]])
    masters = new_masters(rows, BFLOAT16)
    for kernel in KERNELS:
        moved = Masters.zeros(rows.shape, BFLOAT16)
        HostAdam(kernel, 1).put([moved], channels, [rows])
        assert bits(moved) == bits(masters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_that_were_read_are_written_back_bit_for_bit(dtype, numbers):
    masters = new_masters(numbers, dtype)
    assert bits(new_masters(masters.as_float32(), dtype)) == bits(masters)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_become_masters_without_rounding(dtype):
    """In pieces of which the last is not whole, from memory that is not contiguous."""
    x = np.random.default_rng(0).standard_normal((513, 514)).astype(dtype)
    assert x.size > 2 * PIECE
    for weights in (x, np.asfortranarray(x), x.astype(np.float32), x.astype(np.float32)[:, ::-1]):
        masters = new_masters(np.float32(1.001) * x.astype(np.float32), dtype)
        masters.write(weights)  # which leaves nothing of what was there
        assert bits(masters.as_float32()) == bits(np.ascontiguousarray(weights, np.float32))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_master_halfway_above_an_even_number_moves_once_where_channels_change_sides(kernel):
    # 1 + 2**-8 lies halfway between 1 and the next bfloat16, and rounds to 1.
    halfway, below = np.float32(1 + 2**-8), np.nextafter(np.float32(1 + 2**-8), np.float32(0))
    masters, channels = Masters.zeros((1, 1, 3, 2), BFLOAT16), np.int32([[1]])
    adam = HostAdam(kernel, 1)
    rows = np.full((1, 1, 1, 2), halfway)
    for _ in range(2):
        adam.put([masters], channels, [rows])
        (rows,) = adam.take([masters], channels)
        assert rows.ravel().tolist() == [below, below]
        assert masters.to_upload[0, 0, :, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", [1, 33, 10**5])
def test_arrays_are_where_jax_takes_them_over_without_a_copy(size):
    arrays = [blank((size,), dtype) for dtype in DTYPES for _ in range(9)]
    assert {x.ctypes.data % ALIGNMENT for x in arrays} == {0}
