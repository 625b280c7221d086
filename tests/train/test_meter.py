"""A run's results: its meter, its count of skipped steps, and the trackers in `--report-to`."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from train.cli.settings import Settings
from train.log.meter import Meter, NotFiniteError, Row
from train.log.run_log import RunLog, reporter
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


def logged(folder, to):
    """Writes a log of two rows and a validation."""
    options = {"steps": 8, "console": Console(quiet=True)}
    with RunLog(folder, reporter=to, **options) as log:
        log.add(Row(4, 2.5, float("nan"), 0.0, 1))
        log.add(Row(8, 2.0, 10.0, 0.25, 0))
        log.validation(8, {"loss": 1.5})


FIRST = {"train/loss": 2.5, "train/wait_share": 0.0, "train/skipped": 1}
SECOND = {"train/loss": 2.0, "train/tokens_per_s": 10.0, "train/wait_share": 0.25}
EXPECTED = [(4, FIRST), (8, SECOND | {"train/skipped": 0}), (8, {"validation/loss": 1.5})]


@pytest.mark.parametrize("kind", ["trackio", "wandb"])
def test_trackio_and_wandb_get_results_by_step_and_resume_the_same_run(tmp_path, monkeypatch, kind):
    runs, calls = [], []

    def init(**options):
        runs.append(options)
        return types.SimpleNamespace(
            log=lambda figures, step: calls.append((step, figures)),
            finish=lambda: calls.append("finished"),
        )

    monkeypatch.setitem(sys.modules, kind, types.SimpleNamespace(init=init))
    folder = Path("001-zenflow")
    for place in ("a", "a", "b"):  # and a run with the same name elsewhere
        (tmp_path / place / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        logged(folder, reporter(kind, folder, config={"steps": 8}))
    assert calls == [*EXPECTED, "finished"] * 3
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) == (kind == "trackio")
    expected = {"project": "zenflow_jax", "name": folder.name, "resume": "allow"}
    assert expected.items() <= runs[0].items()
    assert runs[0]["config"] == {"steps": 8}
    assert runs[0].get("dir") == (folder.name if kind == "wandb" else None)
