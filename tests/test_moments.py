"""Moments in 8 bits: what codes stand for, and that both kernels make the same ones."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from tests import reference
from tests.test_host_adam import (
    BFLOAT16,
    KERNELS,
    STEP,
    bits,
    by_channel,
    new_gradient,
    new_state,
    some_channels,
    step,
)
from zenflow_jax._host import moments as moments_module
from zenflow_jax._host import numba_loops, numba_moments
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.moments import GROUP, Moment, bytes_of_moments, new_moments

# Groups in the middle of a channel, at its end, and chunks of the compiled loops, in both layouts.
WIDE = {  # (entries, rows, n, tail)
    "leading": (2, 1, 7, 37),
    "leading, groups without a rest": (1, 1, 3, 96),
    "leading, wide": (1, 1, 2, 4200),
    "trailing": (2, 70, 5, 1),
    "trailing, more lanes than a chunk": (1, 33, 2100, 1),
    "one channel": (2, 70, 1, 1),
}
# Where a step's square root is rounded in another place, a number may get the next code.
ANOTHER_CODE = 0.002


def twice(gradient: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """The gradient as a sum of two, as all steps here have them: Numba compiles each number."""
    return [(gradient, 0.5)] * 2


def put(kernel: str, moment: Moment, x: np.ndarray) -> None:
    """Writes all channels, as a hand-over does."""
    groups, _, n, _ = moment.shape
    every = np.broadcast_to(np.arange(n, dtype=np.int32), (groups, n)).copy()
    HostAdam(kernel, 1).put([moment], every, [x])


def written(x: np.ndarray, *, first: bool) -> Moment:
    moment = new_moments(x.shape, compact=True)[0 if first else 1]
    moment.write(x)
    return moment


def modelled(x: np.ndarray, *, first: bool) -> np.ndarray:
    """As the reference rounds each channel, laid out as `(entries, rows, n, tail)`."""
    channels = x.transpose(0, 2, 1, 3)
    found = np.empty_like(channels)
    for place in np.ndindex(channels.shape[:2]):
        found[place] = reference.compact_one(channels[place], first=first)
    return np.ascontiguousarray(found.transpose(0, 2, 1, 3))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("way", ["write", *KERNELS])
def test_every_code_of_every_unit_comes_back_bit_for_bit(first, way):
    least = moments_module.LEAST_FIRST * moments_module.PER_FIRST if first else 2.0**-74
    top = 3.3e38 / (127 * 187) if first else 1.8e19 / 254
    some = 1 if way == "write" else 7
    if first:
        units = np.arange(0xFF00, dtype=np.uint16)[::some]
    else:
        units = (np.arange(0, 0x7F8000, 199 * some, dtype=np.uint32) << 8).view(np.float32)
    wide = moments_module.widened(units)
    units = units[(wide > np.float32(least)) & (wide < np.float32(top))]
    # Each group has the largest code, and they all have each of the others.
    codes = np.arange(-127, 128) if first else np.arange(255)
    rest = np.resize(codes, (9, GROUP - 1))
    largest = np.where(np.arange(9)[:, None] % 2, 127, -127) if first else np.full((9, 1), 254)
    codes = np.concatenate([rest, largest], axis=1).reshape(-1)
    moment = new_moments((1, 1, units.size, codes.size), compact=True)[0 if first else 1]
    assert moment.units is not None
    moment.values[...] = codes
    moment.units[...] = units[:, None]
    x = moment.as_float32()
    assert np.isfinite(x).all()
    again = Moment.compact(moment.shape, moment.values.dtype)
    if way == "write":
        again.write(x)
    else:
        put(way, again, x)
    assert bits(again) == bits(moment)
    # The largest is exactly its code times its unit, so no rounding adds up.
    parts = np.float64(127 * 187 if first else 254) * moments_module.widened(units)
    exact = parts if first else (parts * parts).astype(np.float32)
    np.testing.assert_array_equal(abs(x).max(axis=(0, 1, 3)), exact)


@pytest.mark.parametrize("share", [1.0, 0.025])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_second_moment_follows_its_gradients_for_thousands_of_updates(steps, share):
    # Half of a group's gradients are smaller; all of them shrink in the end.
    rtol = 0.005 + 0.5 / (254 * share)  # half a code
    b2 = np.float32(0.999**steps)
    scale = np.resize(np.float32([1, share]), GROUP).reshape(1, 1, 1, GROUP)
    kept, exact = new_moments(scale.shape, compact=True)[1], np.zeros(scale.shape)
    for t in range(6000 // steps):
        g = scale * np.float32(1 if t * steps < 3000 else 0.1)
        kept.write(b2 * kept.as_float32() + (1 - b2) * g * g)
        exact = b2 * exact + (1 - b2) * np.float64(g) ** 2
    np.testing.assert_allclose(np.sqrt(kept.as_float32()), np.sqrt(exact), rtol=rtol)


@pytest.mark.parametrize("first", [True, False])
def test_the_largest_of_a_group_has_the_largest_code_whatever_its_bits(first):
    x = np.arange(0x3F800000, 0x40800000, 127, dtype=np.uint32).view(np.float32)
    # Each alone in its group.
    moment = written(x.reshape(1, 1, -1, 1), first=first)
    assert (moment.values == (127 if first else 254)).all()
    assert bits(written(moment.as_float32(), first=first)) == bits(moment)
    np.testing.assert_allclose(moment.as_float32().ravel(), x, rtol=2.0**-8)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_every_way_to_write_a_moment_is_the_references(first, shape):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    x[rng.random(shape) < 0.2] = 0
    # Groups that are all tiny, or huge, or zero; and second moments are not negative.
    x *= np.float32([1e-44, 1e-38, 1e-20, 1, 1e15, 0])[rng.integers(6, size=shape[2])][:, None]
    x = x if first else abs(x)
    expected = modelled(x, first=first)
    moment = written(x, first=first)
    np.testing.assert_array_equal(moment.as_float32(), expected)
    assert bits(written(moment.as_float32(), first=first)) == bits(moment)
    if not first:
        np.testing.assert_array_equal(expected > 0, x > 0)
    largest = abs(x).max()
    if largest > 1e-30:
        assert abs(expected).max() == pytest.approx(largest, rel=2.0**-7)
    for kernel in KERNELS:
        again = Moment.compact(shape, moment.values.dtype)
        put(kernel, again, x)
        assert bits(again) == bits(moment)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 3, 70), (1, 70, 3, 1)], ids=["leading", "trailing"])
def test_what_is_not_finite_comes_back_as_nan_and_its_neighbours_as_without_it(first, shape):
    rng = np.random.default_rng(0)
    x = abs(rng.standard_normal(shape).astype(np.float32))
    bad = rng.random(shape) < 0.1
    bad[:, :, 2] = True  # and where nothing else is
    clean = np.where(bad, np.float32(0), x)
    x[bad] = np.resize(np.float32([np.nan, np.inf, -np.inf, -np.nan]), int(bad.sum()))
    if not first:
        x[x == -np.inf] = np.inf
    moment = written(x, first=first)
    found = moment.as_float32()
    assert np.isnan(found[bad]).all()
    np.testing.assert_array_equal(found[~bad], written(clean, first=first).as_float32()[~bad])
    np.testing.assert_array_equal(found, modelled(x, first=first))
    for kernel in KERNELS:
        again = Moment.compact(shape, moment.values.dtype)
        put(kernel, again, x)
        assert bits(again) == bits(moment)
    again = written(found, first=first)
    assert bits(again) == bits(moment)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(1, 1, 3, 70), (1, 70, 3, 1)], ids=["leading", "trailing"])
def test_a_step_from_a_gradient_that_is_not_finite_poisons_no_neighbour(kernel, shape):
    bad, clean = (new_gradient(shape).copy() for _ in range(2))
    places = (
        ((0, 0), (0, 0), (0, 1), (5, 40)) if shape[1] == 1 else ((0, 0), (5, 40), (0, 1), (0,) * 2)
    )
    bad[places], clean[places] = [np.nan, np.inf], 0
    states = [new_state(shape, compact=True) for _ in range(2)]
    for state, gradient in zip(states, (bad, clean), strict=True):
        for _ in range(2):
            step(HostAdam(kernel, 1), state, twice(gradient), np.ones_like(state.steps, bool))
    far = np.ones(shape, bool)
    far[places] = False
    for ours, theirs in zip(*(state.wide for state in states), strict=True):
        assert np.isnan(ours[~far]).all()
        assert np.isfinite(ours[far]).all()
        # Without the largest of its group a neighbour is rounded in other units.
        np.testing.assert_allclose(ours[far], theirs[far], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *[(BFLOAT16, shape) for shape in WIDE.values()],
        (np.float32, (2, 70, 5, 1)),
        (np.float16, (2, 1, 7, 37)),
    ],
    ids=str,
)
def test_a_step_is_that_of_float32_moments_rounded_afterwards(kernel, dtype, shape):
    state, gradient = new_state(shape, dtype=dtype, compact=True), new_gradient(shape, dtype)
    active, before = some_channels(state), state.copy()
    plain = new_state(shape, dtype=dtype)
    for ours, theirs in zip(state[1:3], plain[1:3], strict=True):
        theirs.write(ours.as_float32())
    adam = HostAdam(kernel, 1)
    for each in (state, plain):
        step(adam, each, [(gradient, 0.7)] * 2, active, scale=0.5)
    on = np.broadcast_to(by_channel(active), shape)
    master, mu, nu = state.wide
    np.testing.assert_allclose(master, plain.wide[0], rtol=1e-6, atol=1e-6)
    assert bits(state.masters.to_upload[on]) == bits(master[on].astype(dtype))
    np.testing.assert_array_equal(state.steps, plain.steps)
    for ours, x, first in ((mu, plain.mu, True), (nu, plain.nu, False)):
        expected = modelled(x.as_float32(), first=first)
        different = ours[on] != expected[on]
        assert different.mean() <= ANOTHER_CODE
        np.testing.assert_allclose(ours[on], expected[on], rtol=0.05)
    for ours, old in zip((mu, nu), before.wide[1:], strict=True):
        assert bits(ours[~on]) == bits(old[~on])


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_bits_of_compact_moments_depend_on_neither_kernel_nor_threads_nor_tiles(shape):
    gradients = [(new_gradient(shape, BFLOAT16, i), 0.3 + i) for i in range(5)]

    def run(adam: HostAdam) -> list[bytes]:
        state = new_state(shape, dtype=BFLOAT16, compact=True)
        active = some_channels(state)
        step(adam, state, gradients, active, scale=1 / 3)
        step(adam, state, gradients[:2], ~active, scale=0.3)
        adam.close()
        return bits(*state)

    expected = run(HostAdam("numpy", 1))
    for kernel in KERNELS:
        for threads, tile in ((1, 97), (3, 1001), (1, None)):
            assert run(HostAdam(kernel, threads, tile=tile)) == expected


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_channels_that_take_no_step_keep_codes_and_units(kernel, shape):
    state, total = new_state(shape, compact=True), new_gradient(shape).copy()
    active = some_channels(state)
    off = np.broadcast_to(by_channel(~active), shape)
    total[off] = np.nan

    def kept() -> list[bytes]:
        units = []
        for x in (state.mu, state.nu):
            assert x.units is not None
            groups, _, n, tail = shape
            by = x.units.reshape((groups, -1, n, 1) if tail == 1 else (groups, 1, n, -1))
            units.append(by.transpose(0, 2, 1, 3)[~active])
        return bits(*(x.values[off] for x in (state.mu, state.nu)), *units, state.steps[~active])

    before = kept()
    adam = HostAdam(kernel, 2, tile=97)
    step(adam, state, twice(total), active)
    adam.close()
    assert kept() == before
    assert all(np.isfinite(x).all() for x in state.wide)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_compact_channels_are_handed_over_without_a_change_to_their_neighbours(kernel, shape):
    adam = HostAdam(kernel, 2, tile=101)
    state = new_state(shape, compact=True)
    groups, _, n, _ = shape
    rng = np.random.default_rng(0)
    k = -(-n // 3)
    channels = np.stack([np.sort(rng.permutation(n)[:k]) for _ in range(groups)]).astype(np.int32)
    before = state.wide
    arrays = (state.masters, state.mu, state.nu)
    taken = adam.take(arrays, channels)
    for x, some in zip(before, taken, strict=True):
        for group, index, rows in zip(x, channels, some, strict=True):
            np.testing.assert_array_equal(rows, group[:, index])
    unchanged = bits(*state)
    adam.put(arrays, channels, taken)
    assert bits(*state) == unchanged
    new = [rows + np.float32(1) for rows in taken]
    for rows in new:
        rows.flags.writeable = False  # as what came from a device is
    adam.put(arrays, channels, new)
    for x, old, rows, first in zip(state.wide[1:], before[1:], new[1:], (True, False), strict=True):
        rounded = modelled(rows, first=first)
        for group, was, index, some in zip(x, old, channels, rounded, strict=True):
            expected = was.copy()
            expected[:, index] = some
            np.testing.assert_array_equal(group, expected)
    adam.close()


@pytest.mark.parametrize("shape", WIDE.values(), ids=WIDE)
def test_any_range_of_a_moment_is_read_as_all_of_it_is(shape, monkeypatch):
    monkeypatch.setattr(moments_module, "_BLOCK", 64)  # so that it is read in pieces
    state = new_state(shape, compact=True)
    rng = np.random.default_rng(0)
    for moment, first in ((state.mu, True), (state.nu, False)):
        whole = modelled(moment.as_float32(), first=first).reshape(-1)
        assert bits(moment.as_float32().reshape(-1)) == bits(whole)
        for _ in range(20):
            begin, end = np.sort(rng.integers(0, whole.size + 1, 2)).tolist()
            out = np.full(end - begin, np.nan, np.float32)
            assert bits(moment.range(begin, end, out)) == bits(whole[begin:end])


def test_loops_that_are_kept_on_disk_are_compiled_again_when_what_they_are_made_of_changes():
    constants = {name: x for name, x in vars(moments_module).items() if name.isupper()}
    constants = {name: float(x) for name, x in constants.items() if not name.startswith("_")}
    code = Path(numba_loops.__file__).read_bytes() + repr(sorted(constants.items())).encode()
    assert numba_moments.MADE_OF == zlib.crc32(code), "write this number into numba_moments.py"


def test_compact_moments_take_two_bytes_and_three_sixteenths():
    for shape in ((1, 1, 64, 128), (2, 64, 32, 1)):
        mu, nu = new_moments(shape, compact=True)
        nbytes = sum(x.nbytes for x in (*mu.arrays, *nu.arrays))
        assert nbytes == bytes_of_moments(shape, compact=True) == 2.1875 * np.prod(shape)
    shape = (3, 5, 7, 1)
    for compact in (True, False):
        arrays = [x for moment in new_moments(shape, compact=compact) for x in moment.arrays]
        assert sum(x.nbytes for x in arrays) == bytes_of_moments(shape, compact=compact)


def test_a_step_of_a_big_compact_leaf_yields_between_chunks():
    shape = (1, 640, 8192, 1)  # 2.5 chunks
    state, gradient = new_state(shape, compact=True), np.ones(shape, np.float32)
    chunks = HostAdam("numba", 1).adamw(
        *state, twice(gradient), 1.0, np.ones((1, 8192), bool), STEP
    )
    assert 1 < sum(1 for _ in chunks) <= 4
