"""A run's results: its meter, and its count of skipped steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.cli.settings import Settings
from train.log.meter import Meter, NotFiniteError
from train.run.optimizers import make_optimizer, skipped_steps


def meter_of(log_every, **more):
    options = {"max_skipped": 10, "remedy": "Look there."} | more
    return Meter(log_every=log_every, stats=None, **options)


def metered(meter, loss, skipped=0):
    """Returns a step of ten tokens."""
    return meter.step(jnp.float32(loss), skipped=jnp.int32(skipped), tokens=10)


def test_the_meter_reads_a_loss_only_when_an_interval_has_passed():
    meter = meter_of(2)
    meter.start()
    assert meter.since_start().tokens_per_s is None
    rows = [metered(meter, i) for i in range(1, 8)]
    assert [row and (row.step, row.loss) for row in rows] == [
        None, None, (1, 1.0), (2, 2.0), None, (4, 3.5), None,
    ]  # fmt: skip
    assert [(row.step, row.loss) for row in meter.drain()] == [(6, 5.5), (7, 7.0)]
    assert list(meter.drain()) == []


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


@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_skipped_steps_change_nothing_in_adamw_and_are_counted():
    tx = make_optimizer(Settings(optimizer="adamw", max_grad_norm=1.0, steps=9))
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    update = jax.jit(tx.update)
    good = jax.tree.map(jnp.sin, params)
    _, state = update(good, tx.init(params), params)
    for bad in (jnp.nan, jnp.inf, jnp.float32(3e38)):  # finite, but its square is not
        updates, after = update(good | {"scale": params["scale"] * bad}, state, params)
        assert all(not np.any(x) for x in jax.tree.leaves(updates))
        assert int(skipped_steps(after)) == int(skipped_steps(state)) + 1
        jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
        state = after
    # Afterwards the run continues as if they had not happened.
    expected, _ = update(good, tx.init(params)._replace(inner=state.inner), params)
    updates, _ = update(good, state, params)
    jax.tree.map(np.testing.assert_array_equal, updates, expected)


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
