"""Which leaves close their windows together: small trees, their groups worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from tests import runs


def groups_of(params, interval=4, **options):
    """Each leaf's group, by name, and how many groups take turns."""
    tx = zenflow_jax.zenflow(1e-2, update_interval=interval, **options)
    state = jax.eval_shape(tx.init, params)
    groups = [leaf.spec.group for leaf in state.leaves]
    return dict(zip(params, groups, strict=True)), state.schedule.groups


def ranges_of(shapes, interval, dtypes, **options):
    """Each leaf's ranges, by name, as their first and last entries and groups."""
    tx = zenflow_jax.zenflow(1e-2, update_interval=interval, **options)
    params = {name: jnp.zeros(shape, dtypes[name]) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, params)
    found = {}
    for name, leaf in zip(params, state.leaves, strict=True):
        starts = [part.start or 0 for part in leaf.spec.ranges]
        ends = [start + part.shape[0] for start, part in zip(starts, leaf.spec.ranges, strict=True)]
        assert (starts[1:], ends[-1]) == (ends[:-1], leaf.spec.shape[0])
        found[name] = (starts, list(leaf.spec.groups))
    return found, state.schedule.groups


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


SCANNED = {leaf.name: leaf.shape for leaf in runs.SCANNED}
DTYPES = {leaf.name: leaf.dtype for leaf in runs.SCANNED}


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        # 336, 160 and 384 bytes. In halves 144 + 192 and 128 + 256: the groups have 256, 320, 304.
        (3, {"layers": ([0, 3], [2, 1]), "rows": ([0], [2]), "wide": ([0, 1], [1, 0])}),
        # In halves they would have 256, 192, 160 and 272: too uneven. In four and three, from one
        # layer of 48 bytes and one of 128: 208, and three times 224.
        (
            4,
            {
                "layers": ([0, 1, 3, 5], [0, 1, 2, 3]),
                "rows": ([0], [0]),
                "wide": ([0, 1, 2], [1, 2, 3]),
            },
        ),
        # Even enough in one piece.
        (1, {"layers": ([0], [0]), "rows": ([0], [0]), "wide": ([0], [0])}),
        (2, {"layers": ([0], [1]), "rows": ([0], [1]), "wide": ([0], [0])}),
    ],
    ids=str,
)
def test_stacks_are_cut_where_groups_are_uneven_without_it(interval, expected):
    found, groups = ranges_of(SCANNED, interval, DTYPES)
    assert (found, groups) == (expected, interval)


def test_a_stack_alone_is_as_many_groups_as_it_has_layers_or_turns():
    for layers, interval, count in ((5, 4, 4), (3, 4, 3), (1, 4, 1)):
        found, groups = ranges_of({"all": (layers, 4, 2)}, interval, {"all": jnp.bfloat16})
        assert groups == count
        assert sorted(found["all"][1]) == list(range(count))


def test_a_large_scanned_model_has_even_groups_with_any_window():
    width, inner, layers = 4096, 11008, 32
    shapes = {
        "attention": (layers, width, 4 * width),
        "down": (layers, inner, width),
        "embedding": (32000, width),
        "gate": (layers, width, inner),
        "head": (width, 32000),
        "up": (layers, width, inner),
    }
    params = {name: jax.ShapeDtypeStruct(x, jnp.bfloat16) for name, x in shapes.items()}
    for interval in (2, 3, 4, 6, 8, 12, 16, 32):
        tx = zenflow_jax.zenflow(1e-2, update_interval=interval)
        state = jax.eval_shape(tx.init, params)
        filled = np.zeros(state.schedule.groups)
        for leaf in state.leaves:
            for part in leaf.spec.ranges:
                filled[part.group] += np.prod(part.shape)
        assert len(filled) == interval
        assert filled.max() <= 1.5 * filled.min(), interval


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
