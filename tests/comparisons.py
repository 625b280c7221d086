"""Compares runs with the slow reference or with `optax.adamw`, as closely as rounding allows."""

import functools
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
    rate_of,
)

# The same float32 operations run in another order. Parameters are up to 4, where a unit in the last
# place is 2.4e-7. Updates are near 1e-2; `1 - b2**n`, in float32 on one side and float64 on the
# other, may add a relative error of 3e-5 to each.
ATOL = 1e-6
# Moments are as large as gradients and their squares, so this is relative to a leaf's largest
# moment.
MOMENT_TOL = 1e-6
# A master that is off by ATOL is cast to the other neighbour if it is that close to the middle.
# This affects one in 10,000 casts, and a deferred channel keeps the difference for a window.
FLIPPED = 0.005
# The share of different 8-bit moments in runs of about 20 steps, and of masters that they moved: a
# moment that is off by MOMENT_TOL gets a different code about once in 10,000 times, and keeps the
# difference.
ANOTHER_CODE = 0.02
# As a share of the largest moment: a code more or less, and its effect on later steps.
CODES_APART = 0.03


KERNELS = ("numba", "numpy")
SEEDS = (0, 1)

# About half of the norms in these runs exceed it.
MAX_NORM = 30.0

WARM = dict(
    topk_ratio=0.3,
    update_interval=3,
    select_interval=6,
    full_warm_up_rounds=5,
    max_grad_norm=MAX_NORM,
)


def seeded(leaves: Leaves, options: Settings, seed: int) -> Training:
    """Returns a run whose gradients, kernel and threads depend on the seed."""
    # Numba compiles each pair of dtypes separately; `test_host_adam.py` tests different pairs.
    kernel = "numpy" if options.transfer_dtype else KERNELS[seed]
    return Training(leaves, options, seed=seed, host_kernel=kernel, threads=1 + seed)


def slow_run(leaves: Leaves, settings: Settings, seed: int = 0, **more: Any) -> Reference:
    """Returns the slow reference at the start of a run with these leaves."""
    return Reference(
        list(initial_values(leaves, seed).values()),
        [rate_of(x.speed) for x in leaves],
        settings,
        channel_axes=[x.axis for x in leaves],
        decay=[x.decay for x in leaves],
        **more,
    )


def reference(
    training: Training, plan: Plan, shards: Any = None, host_state: str = "float32"
) -> tuple[History, Reference]:
    """Returns the slow reference's run with the same leaves and settings, and the reference."""
    leaves, seed = training.leaves, training.seed
    slow = slow_run(leaves, training.settings, seed, shards=shards, host_state=host_state)
    names = [x.name for x in leaves]
    params, selected = [], []
    for t in range(1, plan.steps + 1):
        new = slow.step(list(training.gradients(leaves, t, seed, t in plan.bad).values()))
        if t in plan.flush_at:
            new = slow.flush()
        params.append(dict(zip(names, new, strict=True)))
        selected.append({n: c for n, c in zip(names, slow.selected, strict=True) if c is not None})
    moments = {name: slow.moments(i) for i, name in enumerate(names)}
    return History(params, selected, moments, slow.skipped), slow


@functools.cache
def adamw_program(leaves: Leaves, clip: float | None, weight_decay: float) -> tuple[Any, Any]:
    """Returns `optax.adamw`, after clipping if `clip` is not None, and its jitted step."""
    labels = {x.name: f"{x.speed} {x.decay}" for x in leaves}
    groups = {
        labels[x.name]: optax.adamw(rate_of(x.speed), weight_decay=weight_decay * x.decay)
        for x in leaves
    }
    tx = optax.partition(groups, labels)
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
    """Returns the parameters after each step of `optax.adamw` on float32 masters."""
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


def assert_close(actual: list[dict[str, np.ndarray]], desired: list[dict[str, np.ndarray]]) -> None:
    """Compares each step: float32 within ATOL, bfloat16 equal except for a few neighbours."""
    flipped = total = 0
    for t, (new, expected) in enumerate(zip(actual, desired, strict=True), start=1):
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
    """Returns each number's rank among all bfloat16 numbers; both zeros have rank 0."""
    bits = x.view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def assert_agree(actual: History, desired: History) -> None:
    """Compares parameters, selections, masters, moments and step counts."""
    assert_close(actual.params, desired.params)
    assert actual.skipped == desired.skipped
    for t, (selected, expected) in enumerate(
        zip(actual.selected, desired.selected, strict=True), start=1
    ):
        for name, channels in selected.items():
            message = f"channels of {name} after step {t}"
            np.testing.assert_array_equal(channels, expected[name], err_msg=message)
    for name, (master, mu, nu, steps) in actual.moments.items():
        expected = desired.moments[name]
        np.testing.assert_array_equal(steps, expected[3], err_msg=f"steps of {name}")
        np.testing.assert_allclose(master, expected[0], rtol=0, atol=ATOL, err_msg=name)
        for x, y in ((mu, expected[1]), (nu, expected[2])):
            atol = MOMENT_TOL * np.abs(y).max(initial=0)
            np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=name)


def assert_agrees(training: Training, plan: Plan, shards: Any = None) -> Reference:
    """Compares a run, from its start, with the reference's; returns the reference."""
    host_state = training.engine_options.get("host_state", "float32")
    expected, slow = reference(training, plan, shards, host_state)
    compact = host_state == "compact"
    compare = assert_agree_where_rounded if compact else assert_agree
    compare(training.history(plan), expected)
    return slow


def assert_agree_where_rounded(actual: History, desired: History) -> None:
    """Compares like `assert_agree`, for 8-bit moments, a few of which may be off by one code."""
    assert actual.skipped == desired.skipped
    for selected, expected in zip(actual.selected, desired.selected, strict=True):
        assert_same_bits(selected, expected)
    apart = total = 0
    for name, (*wide, steps) in actual.moments.items():
        *expected, expected_steps = desired.moments[name]
        np.testing.assert_array_equal(steps, expected_steps, err_msg=f"steps of {name}")
        for x, y, tolerance in zip(wide, expected, (ATOL, MOMENT_TOL, MOMENT_TOL), strict=True):
            largest = np.abs(y).max(initial=0)
            np.testing.assert_allclose(x, y, rtol=0, atol=CODES_APART * largest, err_msg=name)
            scale = 1 if tolerance == ATOL else largest
            apart += np.count_nonzero(np.abs(x - y) > tolerance * scale)
            total += x.size
    assert apart <= ANOTHER_CODE * total, f"{apart} of {total} numbers differ"


def describe(tree: Any) -> list[Any]:
    """Returns everything about a tree's arrays except the numbers, in one spelling."""
    return [
        (
            jax.tree_util.keystr(path),
            (x.shape, x.dtype, x.weak_type, x.committed),
            x.sharding.memory_kind,
            x.sharding.devices_indices_map(x.shape),
        )
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def assert_same_bits(actual: Any, desired: Any) -> None:
    """Compares trees of arrays: structure, dtypes and every bit, including NaN."""
    left, right = jax.tree.flatten(actual), jax.tree.flatten(desired)
    assert left[1] == right[1]
    for x, y in zip(left[0], right[0], strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert x.tobytes() == y.tobytes(), f"max difference {np.abs(x - y).max()}"
