"""A run's recorded spans."""

import pytest

from tests.runs import FEW, Settings, Training

STEPS, INTERVAL = 9, 2
ROWS = ["device", "mail", "host", "upload", "caller"]
SETTINGS = Settings(topk_ratio=0.25, update_interval=INTERVAL, select_interval=2 * INTERVAL)


@pytest.fixture(scope="module")
def engine():
    """Returns an engine after nine steps in windows of two, a flush and a save."""
    with Training(FEW, SETTINGS) as training:
        training.go(STEPS)
        training.flush()
        training.engine.state()
        yield training.engine


def of(engine, *kinds):
    return [span for span in engine.timeline if span.kind in kinds]


def by_step(engine, kind):
    spans = of(engine, kind)
    numbered = {span.step: span for span in spans}
    assert len(numbered) == len(spans), f"two {kind} in a step"
    return numbered


def test_every_step_and_every_window_has_its_spans_in_the_order_of_events(engine):
    steps = [*range(1, STEPS + 1)]
    # At each step, one leaf or the other closes a window.
    for kind in ("step", "copy", "unread", "take in", "exchange", "wait for uploads", "upload"):
        assert sorted(by_step(engine, kind)) == steps, kind
    # At the first boundary, after step 1 or 2; then every four steps, from 3 or 4 on.
    assert sorted(by_step(engine, "hand over")) == [1, 2, 3, 4, 7, 8]
    assert [span.step for span in of(engine, "flush", "state")] == [STEPS, STEPS]
    assert {span.row for span in engine.timeline} == set(ROWS)
    order = [by_step(engine, kind) for kind in ("step", "copy", "unread", "take in", "upload")]
    for step, copy, unread, take, upload in ([x[t] for x in order] for t in steps):
        assert step.end == copy.start
        assert copy.end == unread.start <= unread.end <= take.end <= upload.start
