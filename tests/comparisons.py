"""Holds runs to the slow reference or to `optax.adamw`, as close as each allows."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from tests.reference import Reference, Settings
from tests.runs import (
    History,
    Leaves,
    Plan,
    Training,
    fetch,
    gradients,
    initial_values,
    jitted,
    place,
    rate,
)

# Float32, the same operations in another order; parameters up to 4, where a unit in the last place
# is 2.4e-7; updates near 1e-2, of which `1 - b2**n`, in float32 on one side and in float64 on the
# other, may weigh 3e-5 each.
ATOL = 1e-6
# Moments are as large as gradients and their squares; relative to the largest of a leaf.
MOMENT_TOL = 1e-6
# A master off by ATOL is cast to the other neighbour where it lies that close to the middle of two:
# about one in 10,000 casts, and a deferred channel keeps what it has for a window.
FLIPPED = 0.005
# Of moments in 8 bits, in runs of some 20 steps, and of the masters that moved by them: a moment
# off by MOMENT_TOL gets another code about once in 10,000 times, and keeps what comes of it.
ANOTHER_CODE = 0.02
# Of the largest moment: a code more or less, and what the steps since have made of it.
CODES_APART = 0.03


KERNELS = ("numba", "numpy")
SEEDS = (0, 1)

# Of the norms in these runs, about half are above it.
MAX_NORM = 30.0

WARM = dict(
    topk_ratio=0.3,
    update_interval=3,
    select_interval=6,
    full_warm_up_rounds=5,
    max_grad_norm=MAX_NORM,
)


def seeded(leaves: Leaves, options: Settings, seed: int) -> Training:
    """A run whose gradients, kernel and threads go by the seed."""
    # Numba compiles each pair of dtypes anew; `test_host_adam.py` has those that differ.
    kernel = "numpy" if options.transfer_dtype else KERNELS[seed]
    return Training(leaves, options, seed=seed, host_kernel=kernel, threads=1 + seed)


def slow_run(leaves: Leaves, settings: Settings, seed: int = 0, **more: Any) -> Reference:
    """The slow reference, at the start of a run of these leaves."""
    return Reference(
        list(initial_values(leaves, seed).values()),
        rate,
        settings,
        channel_axes=[x.axis for x in leaves],
        decay=[x.decay for x in leaves],
        **more,
    )


def reference(
    leaves: Leaves,
    settings: Settings,
    plan: Plan,
    seed: int = 0,
    shards: Any = None,
    gradients: Callable[..., dict[str, np.ndarray]] = gradients,
    host_state: str = "float32",
) -> tuple[History, Any]:
    """The run of the slow NumPy reference, and the reference itself for its counts."""
    slow = slow_run(leaves, settings, seed, shards=shards, host_state=host_state)
    names = [x.name for x in leaves]
    params, selected = [], []
    for t in range(1, plan.steps + 1):
        new = slow.step(list(gradients(leaves, t, seed, t in plan.bad).values()))
        if t in plan.flush_at:
            new = slow.flush()
        params.append(dict(zip(names, new, strict=True)))
        selected.append({n: c for n, c in zip(names, slow.selected, strict=True) if c is not None})
    moments = {name: slow.moments(i) for i, name in enumerate(names)}
    return History(params, selected, moments, slow.skipped), slow


@functools.cache
def adamw_program(leaves: Leaves, clip: float | None, weight_decay: float) -> tuple[Any, Any]:
    """`optax.adamw`, with clipping in front of it if asked for, and its jitted step."""
    tx = optax.adamw(rate, weight_decay=weight_decay, mask={x.name: x.decay for x in leaves})
    if clip is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip), tx)
    return tx, jitted(tx)


def adamw(
    leaves: Leaves,
    clip: float | None,
    weight_decay: float,
    steps: int,
    seed: int,
    shardings: Any = None,
) -> Any:
    """Parameters after each step of `optax.adamw` on float32 masters, cast to their dtypes."""
    tx, step = adamw_program(leaves, clip, weight_decay)

    def wide(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return place({n: x.astype(np.float32) for n, x in values.items()}, shardings)

    masters = wide(initial_values(leaves, seed))
    state = jax.jit(tx.init)(masters)
    seen = []
    for t in range(1, steps + 1):
        masters, state = step(masters, state, wide(gradients(leaves, t, seed)))
        seen.append({x.name: fetch(masters[x.name]).astype(x.dtype) for x in leaves})
    return seen


def assert_close(ours: list[dict[str, np.ndarray]], theirs: list[dict[str, np.ndarray]]) -> None:
    """Step by step: float32 within ATOL, bfloat16 equal but for a few neighbours."""
    flipped = total = 0
    for t, (new, expected) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert new.keys() == expected.keys()
        for name, x in new.items():
            y = expected[name]
            assert x.dtype == y.dtype, name
            message = f"{name} after step {t}"
            if x.dtype == np.float32:
                np.testing.assert_allclose(x, y, rtol=0, atol=ATOL, err_msg=message)
                continue
            apart = np.abs(_rank(x) - _rank(y))
            assert apart.max(initial=0) <= 1, f"{message}: {apart.max()} bfloat16 numbers apart"
            flipped, total = flipped + np.count_nonzero(apart), total + x.size
    assert flipped <= FLIPPED * total, f"{flipped} of {total} bfloat16 values differ"


def _rank(x: np.ndarray) -> np.ndarray:
    """The place of each bfloat16 among all of them, both zeros at 0."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_agree(ours: History, theirs: History) -> None:
    """Parameters, selections, masters, moments, step counts."""
    assert_close(ours.params, theirs.params)
    assert ours.skipped == theirs.skipped
    for t, (selected, expected) in enumerate(
        zip(ours.selected, theirs.selected, strict=True), start=1
    ):
        for name, channels in selected.items():
            message = f"channels of {name} after step {t}"
            np.testing.assert_array_equal(channels, expected[name], err_msg=message)
    for name, (master, mu, nu, steps) in ours.moments.items():
        expected = theirs.moments[name]
        np.testing.assert_array_equal(steps, expected[3], err_msg=f"steps of {name}")
        np.testing.assert_allclose(master, expected[0], rtol=0, atol=ATOL, err_msg=name)
        for x, y in ((mu, expected[1]), (nu, expected[2])):
            atol = MOMENT_TOL * np.abs(y).max(initial=0)
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


def assert_agree_where_rounded(ours: History, theirs: History) -> None:
    """As `assert_agree`, with moments in 8 bits: a few get the next code, and change more."""
    assert ours.skipped == theirs.skipped
    for selected, expected in zip(ours.selected, theirs.selected, strict=True):
        assert_same_bits(selected, expected)
    apart = total = 0
    for name, (*wide, steps) in ours.moments.items():
        *expected, their_steps = theirs.moments[name]
        np.testing.assert_array_equal(steps, their_steps, err_msg=f"steps of {name}")
        for x, y, tolerance in zip(wide, expected, (ATOL, MOMENT_TOL, MOMENT_TOL), strict=True):
            largest = np.abs(y).max(initial=0)
            np.testing.assert_allclose(x, y, rtol=0, atol=CODES_APART * largest, err_msg=name)
            scale = 1 if tolerance == ATOL else largest
            apart += np.count_nonzero(np.abs(x - y) > tolerance * scale)
            total += x.size
    assert apart <= ANOTHER_CODE * total, f"{apart} of {total} numbers differ"


def assert_same_bits(ours: Any, theirs: Any) -> None:
    """Equal trees of arrays: structure, dtypes and every bit, NaN included."""
    left, right = jax.tree.flatten(ours), jax.tree.flatten(theirs)
    assert left[1] == right[1]
    for x, y in zip(left[0], right[0], strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes(), f"max difference {np.abs(x - y).max()}"
