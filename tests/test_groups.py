"""Which leaves close their windows together: small trees, their groups worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax


def groups_of(params, interval=4, **options):
    """Each leaf's group, by name, and how many groups take turns."""
    tx = zenflow_jax.zenflow(1e-2, update_interval=interval, **options)
    state = jax.eval_shape(tx.init, params)
    groups = [leaf.spec.group for leaf in state.leaves]
    return dict(zip(params, groups, strict=True)), state.schedule.groups


def leaves_of(*rows, dtype=np.float32):
    """Leaves w0, w1, ... with so many rows of two channels."""
    return {f"w{i}": jnp.zeros((n, 2), dtype) for i, n in enumerate(rows)}


@pytest.mark.parametrize(
    ("rows", "interval", "expected"),
    [
        # The largest first, each into the group that has the least.
        ((3, 9, 4, 7, 5), 3, [1, 0, 2, 1, 2]),
        ((8, 7, 6, 5, 4), 2, [0, 1, 1, 0, 0]),
        # Of leaves as large, and of groups that have as much, the first one.
        ((2, 2, 2, 2, 2), 3, [0, 1, 2, 0, 1]),
        ((2, 4, 2, 4), 2, [0, 0, 1, 1]),
        # One that is larger than its share has a group of its own.
        ((2, 100, 2, 2), 2, [1, 0, 1, 1]),
        # Without a leaf for each group there are fewer groups; one window has one.
        ((2, 3), 4, [1, 0]),
        ((2,), 4, [0]),
        ((2, 3, 4), 1, [0, 0, 0]),
    ],
    ids=str,
)
def test_groups_of_leaves_are_as_worked_out_by_hand(rows, interval, expected):
    found, groups = groups_of(leaves_of(*rows), interval)
    assert list(found.values()) == expected
    assert groups == max(expected) + 1


@pytest.mark.parametrize("interval", [2, 4, 8])
def test_groups_have_nearly_equal_bytes_where_leaves_allow_it(interval):
    rng = np.random.default_rng(0)
    dtypes = [jnp.bfloat16, jnp.float32]
    params = {
        f"w{i:02}": jnp.zeros((int(n), 2), dtypes[i % 2])
        for i, n in enumerate(rng.integers(3, 60, size=40))
    }
    found, groups = groups_of(params, interval)
    assert groups == interval
    filled = np.zeros(groups)
    for name, group in found.items():
        filled[group] += params[name].nbytes
    # The last leaf that went into the fullest group came when it had the least of all.
    assert filled.max() - filled.min() <= max(x.nbytes for x in params.values())
    # And the small ones come last, to even out what the large ones left.
    assert filled.max() <= 1.1 * filled.mean()


def test_sizes_are_bytes_and_not_elements():
    params = {
        "half": jnp.zeros((6, 4), jnp.bfloat16),
        "single": jnp.zeros((5, 4), jnp.float32),
        "small": jnp.zeros((2, 4), jnp.float32),
    }
    # 48, 80 and 32 bytes: the small leaf joins the one of most elements.
    assert groups_of(params, 2) == ({"half": 1, "single": 0, "small": 1}, 2)


def test_leaves_that_never_travel_take_no_turn():
    params = {
        "bias": jnp.zeros(1000),
        "empty": jnp.zeros((0, 4)),
        "kept": jnp.zeros((100, 100)),
        "last": jnp.zeros((3, 2)),
        "scalar": jnp.zeros(()),
        "wide": jnp.zeros((2, 3)),
    }
    found, groups = groups_of(params, 4, resident=lambda path, _: path[-1].key == "kept")
    # As if the two others were all there is: of the same size, so the first has the first group.
    assert (found["last"], found["wide"], groups) == (0, 1, 2)
    # Without any there is one group, whose windows have nothing to update.
    assert groups_of({"bias": jnp.zeros(5)}, 4, offload=False)[1] == 1


@pytest.mark.parametrize(
    "options",
    [dict(rolling=False), dict(interval=zenflow_jax.AutoWindow(4))],
    ids=["together", "adaptive"],
)
def test_windows_that_close_together_have_one_group(options):
    assert groups_of(leaves_of(2, 3, 4), **options) == ({"w0": 0, "w1": 0, "w2": 0}, 1)


@pytest.mark.parametrize(
    "options",
    [
        dict(offload=False),
        dict(send_gradients="per_window"),
        dict(staleness=3, topk_ratio=0.4, transfer_dtype=jnp.bfloat16),
    ],
    ids=str,
)
def test_groups_know_shapes_dtypes_and_order_alone(options):
    params = leaves_of(8, 7, 6, 5, 4)
    assert groups_of(params, 3, **options) == groups_of(params, 3)
    # As in a run, whose parameters are arrays.
    state = zenflow_jax.zenflow(1e-2, update_interval=3, **options).init(params)
    assert [leaf.spec.group for leaf in state.leaves] == [0, 1, 2, 2, 1]
