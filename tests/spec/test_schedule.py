"""When windows close and channels are selected, as a table of events after each step.

`test_agreement.py` compares adaptive rules with the reference.
"""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from zenflow_jax import AutoWindow
from zenflow_jax._spec.schedule import Schedule


def letter(boundary):
    assert boundary.closes or not boundary.selects
    if not boundary.closes:
        return "."
    mark = "s" if boundary.selects else "c"
    return mark.upper() if boundary.synchronous else mark


# Events after each step: "." for none, "c" if a window closes, "s" if channels are also selected
# (uppercase if the update reaches the parameters at once), "a" if the last window's update arrives
# while no window closes. Settings are window, select, warm-up, groups, staleness; there is a row
# for each group.
BOUNDARIES = [
    ((1, 1, 0, 1, 0), ["SSSSSS"]),
    ((1, 3, 0, 1, 1), ["scsccsccs"]),  # the first selection is at the first boundary
    ((2, 6, 0, 1, 2), [".s.c.s.c.c.s.c"]),
    ((2, 4, 1, 1, 2), ["S.c.s.c.s"]),  # with a warm-up, the first selection is at its end
    ((3, 6, 2, 1, 3), ["CS..c..s..c..s"]),
    ((4, 4, 3, 1, 4), ["CCS...s...s"]),
    # Groups that close their windows in turn.
    ((4, 8, 0, 4, 1), ["...sa..sa..c", "..sa..sa..ca", ".sa..sa..ca.", "sa..sa..ca.."]),
    ((4, 8, 0, 4, 4), ["...s...s...c", "..s...s...c.", ".s...s...c..", "s...s...c..."]),
    # Fewer leaves than steps in a window.
    ((4, 4, 0, 2, 3), ["...s..as..as", "..s..as..as."]),
    # One group, whose updates do not wait a whole window.
    ((3, 6, 0, 1, 2), ["..s.as.ac"]),
    ((3, 6, 2, 3, 2), ["CS..c.as.a", "CS.c.as.ac", "CSc.as.ac."]),
    # Intervals that end inside a window: the selection waits for the window's end.
    ((2, 5, 0, 2, 2), [".s.c.s.c.s.", "s.c.s.c.s.c"]),
    ((4, 3, 3, 4, 1), ["CCS...sa.", "CCS..sa..", "CCS.sa..s", "CCSca..sa"]),
]


@pytest.mark.parametrize(("settings", "expected"), BOUNDARIES, ids=lambda x: str(x))
def test_windows_close_and_channels_are_selected_as_in_the_table(settings, expected):
    schedule = Schedule(*settings, True)
    state = schedule.first_state(4)
    for group, row in enumerate(expected):
        letters, waits = "", False
        for t in range(1, len(row) + 1):
            boundary = schedule.boundary(t, state, group)
            # The boundary may report an arrival even if no update waits yet.
            arrives = waits and boundary.arrives
            letters += letter(boundary).replace(".", "a" if arrives else ".")
            waits = waits and not arrives
            if boundary.closes:
                assert not waits, "the next update would be made before this one arrives"
                waits = not boundary.synchronous
        assert letters == row, group


@pytest.mark.parametrize(
    ("share", "leaves", "needed"),
    # 7 of 100, not 8, although 0.07 * 100 is above 7.
    [(0.99, 10, 10), (0.99, 100, 99), (0.99, 101, 100), (0.07, 100, 7), (0.01, 3, 1)],
)
def test_a_window_closes_when_its_share_of_leaves_is_ripe(share, leaves, needed):
    for ripe in (needed - 1, needed):
        sums = np.array([2, *[1.5] * ripe, *[1] * (leaves - ripe), *[3] * leaves], np.float32)
        assert AutoWindow(share=share).is_ripe(sums) == (ripe == needed)


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        # Channels are selected every sixteen of the longest windows.
        (dict(update_interval=3), "select", 48),
        (dict(update_interval=AutoWindow(max_interval=5)), "select", 80),
        # An update arrives one step after its window, or at the end of the next window.
        (dict(update_interval=3), "staleness", 1),
        (dict(update_interval=3, rolling=False), "staleness", 3),
        (dict(update_interval=AutoWindow()), "staleness", None),
        # There are no provisional steps if no window outlasts its step.
        (dict(update_interval=1, staleness=0, provisional_share=0.5), "provisional_share", None),
        (dict(update_interval=1, provisional_share=0.5), "provisional_share", 0.5),
    ],
)
def test_default_arguments_follow_from_the_windows(options, name, expected):
    tx = zenflow_jax.zenflow(1e-2, window_scaling=None, **options)
    assert getattr(tx.init({"w": jnp.ones((8, 4))}).schedule, name) == expected


@pytest.mark.parametrize("options", [dict(rolling=False), dict(update_interval=AutoWindow())])
def test_scaled_steps_with_updates_a_window_late_raise_a_warning(options):
    with pytest.warns(UserWarning, match="Pass window_scaling=None"):
        zenflow_jax.zenflow(1e-2, **options)
    with warnings.catch_warnings(action="error"):
        zenflow_jax.zenflow(1e-2, window_scaling=None, **options)
        zenflow_jax.zenflow(1e-2)
