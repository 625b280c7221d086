"""A run's results: its meter, and its count of skipped steps."""

import jax.numpy as jnp
import numpy as np
import pytest

from train.log.meter import Meter, NotFiniteError


def meter_of(log_every, **more):
    options = {"max_skipped": 10, "remedy": "Look there."} | more
    return Meter(log_every=log_every, stats=None, **options)


def metered(meter, loss, skipped=0):
    """Returns a step of ten tokens."""
    return meter.step(jnp.float32(loss), skipped=jnp.int32(skipped), tokens=10)


def test_an_intervals_loss_covers_its_steps_that_were_not_skipped():
    figures = [(1, 0), (jnp.nan, 1), (3, 1), (jnp.inf, 2), (9, 3), (jnp.nan, 4), (7, 4)]
    meter = meter_of(2)
    meter.start()
    rows = [metered(meter, *figures[0])]
    # A run that stops and resumes inside an interval has the same rows.
    for i, figure in enumerate(figures[1:], start=1):
        state = meter.state()
        metered(meter, 99)  # later steps do not change a state, which another thread writes
        [*meter.drain()]
        meter = meter_of(2, steps_done=i, state=state)
        meter.start()
        rows.append(metered(meter, *figure))
    rows = [row for row in [*rows, *meter.drain()] if row]
    np.testing.assert_equal(rows, meter.rows)
    assert [(row.step, row.skipped) for row in rows] == [*((1, 0), (2, 1), (4, 1), (6, 2), (7, 0))]
    np.testing.assert_equal([row.loss for row in rows], [1, np.nan, 3, np.nan, 7])


def counted(totals, **options):
    """Returns a meter whose steps had these counts of skipped steps."""
    meter = meter_of(3, **options)
    meter.start()
    for total in totals:
        metered(meter, 1.0, total)
    list(meter.drain())
    meter.finish()
    return meter


def test_a_run_stops_after_too_many_consecutive_skipped_steps_or_if_all_are_skipped():
    with pytest.raises(NotFiniteError, match="steps 4 to 6 were skipped.*Look there"):
        counted([0, 1, 1, 2, 3, 4, 5, 6], max_skipped=3)
    meter = counted([1, 2, 2, 3, 4, 4], max_skipped=3)
    assert (meter.total_skipped, meter.skipped_last()) == (4, False)
    state = counted([1, 2, 3, 4, 5, 5]).state()
    with pytest.raises(NotFiniteError, match="steps 7 to 8 were skipped"):
        counted([6, 7], steps_done=6, state=state)
    counted([], steps_done=6, state=state)  # without steps, no verdict
