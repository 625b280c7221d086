"""Groups of leaves that close their windows together, worked out by hand for small trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        # The largest leaf goes first, and each leaf goes into the group with the fewest bytes.
        ((3, 9, 4, 7, 5), {"update_interval": 3}, [1, 0, 2, 1, 2]),
        # Among equal leaves and equal groups, the first is chosen.
        ((2, 2, 2, 2, 2), {"update_interval": 3}, [0, 1, 2, 0, 1]),
        # A leaf that is larger than a group's share gets its own group.
        ((2, 100, 2, 2), {"update_interval": 2}, [1, 0, 1, 1]),
        # With fewer leaves there are fewer groups; a one-step window has one group.
        ((2, 3), {}, [1, 0]),
        # Leaves whose windows close together form one group, too.
        ((2, 3, 4), {"update_interval": zenflow_jax.AutoWindow(4)}, [0, 0, 0]),
    ],
    ids=str,
)
def test_groups_of_leaves_equal_the_results_worked_out_by_hand(rows, options, expected):
    tx = zenflow_jax.zenflow(1e-2, **{"update_interval": 4, **options})
    state = jax.eval_shape(tx.init, {f"w{i}": jnp.zeros((n, 2)) for i, n in enumerate(rows)})
    assert [leaf.spec.groups for leaf in state.leaves] == [(group,) for group in expected]
    assert state.schedule.groups == max(expected) + 1


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
