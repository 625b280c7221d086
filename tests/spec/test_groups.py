"""Groups of leaves that close their windows together, worked out by hand for small trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax


def ranges_of(params, interval=4, **options):
    """Returns each leaf's ranges (first entries and groups), and the number of groups."""
    tx = zenflow_jax.zenflow(1e-2, update_interval=interval, **options)
    state = jax.eval_shape(tx.init, params)
    ranges = {}
    for name, leaf in zip(params, state.leaves, strict=True):
        starts = [part.start or 0 for part in leaf.spec.ranges]
        ends = [start + part.shape[0] for start, part in zip(starts, leaf.spec.ranges, strict=True)]
        assert (starts[1:], ends[-1]) == (ends[:-1], leaf.spec.shape[0])
        ranges[name] = (starts, list(leaf.spec.groups))
    return ranges, state.schedule.groups


def leaves_of(*rows):
    """Returns leaves w0, w1, ... with these numbers of rows and two channels each."""
    return {f"w{i}": jnp.zeros((n, 2)) for i, n in enumerate(rows)}


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        # The largest leaf goes first, and each leaf goes into the group with the fewest bytes.
        ((3, 9, 4, 7, 5), {"interval": 3}, [1, 0, 2, 1, 2]),
        # Among equal leaves and equal groups, the first is chosen.
        ((2, 2, 2, 2, 2), {"interval": 3}, [0, 1, 2, 0, 1]),
        # A leaf that is larger than a group's share gets its own group.
        ((2, 100, 2, 2), {"interval": 2}, [1, 0, 1, 1]),
        # With fewer leaves there are fewer groups; a one-step window has one group.
        ((2, 3), {}, [1, 0]),
        # Windows that close together have one group, too.
        ((2, 3, 4), {"interval": zenflow_jax.AutoWindow(4)}, [0, 0, 0]),
    ],
    ids=str,
)
def test_groups_of_leaves_equal_the_results_worked_out_by_hand(rows, options, expected):
    ranges, groups = ranges_of(leaves_of(*rows), **options)
    assert [group for _, group in ranges.values()] == [[group] for group in expected]
    assert groups == max(expected) + 1


def test_sizes_are_bytes_and_resident_leaves_are_in_no_group():
    # 48, 80 and 32 bytes: the small leaf joins the leaf with the most elements.
    half, single, small = jnp.zeros((6, 4), jnp.bfloat16), jnp.zeros((5, 4)), jnp.zeros((2, 4))
    ranges, _ = ranges_of({"half": half, "single": single, "small": small}, 2)
    assert [group for _, (group,) in ranges.values()] == [1, 0, 1]
    params = {"bias": jnp.zeros(1000), "kept": jnp.zeros((100, 100)), **leaves_of(3, 3)}
    ranges, groups = ranges_of(params, resident=lambda path, _: path[-1].key == "kept")
    assert (ranges["w0"], ranges["w1"], groups) == (([0], [0]), ([0], [1]), 2)
    # Without other leaves there is one group, whose windows have nothing to update.
    assert ranges_of({"bias": jnp.zeros(5)}, topk_ratio=1.0)[1] == 1


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
