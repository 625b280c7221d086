"""Defaults of the schedule; `test_agreement.py` compares it with the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

import zenflow_jax
from zenflow_jax import AutoWindow


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
    ("window", "expected"), [(3, 48), (AutoWindow(max_interval=5), 80)], ids=str
)
def test_channels_are_selected_every_sixteen_of_the_longest_windows(window, expected):
    tx = zenflow_jax.zenflow(1e-2, window_scaling=None, update_interval=window)
    assert tx.init({"w": jnp.ones((8, 4))}).schedule.select == expected
