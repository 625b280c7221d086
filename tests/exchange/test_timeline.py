"""A run's recorded spans, and their picture."""

import sys

import pytest

from tests.runs import FEW, Settings, Training
from zenflow_jax import Span, Timeline, plot_timeline

STEPS, INTERVAL = 9, 2
ROWS = ["device", "mail", "host", "upload", "caller"]
SETTINGS = Settings(topk_ratio=0.25, update_interval=INTERVAL, select_interval=2 * INTERVAL)


@pytest.fixture(scope="module")
def engine():
    """Returns an engine that was closed after nine steps in windows of two, a flush and a save."""
    with Training(FEW, SETTINGS) as training:
        training.go(STEPS)
        training.flush()
        training.engine.state()
        # The worker records the last piece of an update only after delivering it.
        training.engine.close()
        return training.engine


@pytest.fixture
def recorded(engine) -> Timeline:
    return engine.timeline


def of(timeline: Timeline, *kinds: str) -> list[Span]:
    return [span for span in timeline.spans if span.kind in kinds]


def by_number(timeline: Timeline, kind: str) -> dict[int, Span]:
    spans = of(timeline, kind)
    numbered = {span.number: span for span in spans}
    assert len(numbered) == len(spans), f"two {kind} with the same number"
    return numbered


def test_every_step_and_every_window_has_its_spans(recorded):
    assert recorded.steps == range(1, STEPS + 1)
    for kind in ("step", "copy", "unread", "take in", "exchange"):
        assert sorted(by_number(recorded, kind)) == list(recorded.steps), kind
    windows = list(recorded.steps)  # at each step, one leaf or the other closes a window
    for kind in ("wait for uploads", "upload"):
        assert sorted(by_number(recorded, kind)) == windows, kind
    # An update has several parts if mail was taken in during it.
    assert sorted({span.number for span in of(recorded, "update")}) == windows
    # At the first boundary, after step 1 or 2; then every four steps, from 3 or 4 on.
    assert sorted(by_number(recorded, "hand over")) == [1, 2, 3, 4, 7, 8]
    assert [span.number for span in of(recorded, "flush", "state")] == [STEPS, STEPS]


def test_spans_are_sorted_by_start_and_follow_the_order_of_events(recorded):
    starts = [span.start for span in recorded.spans]
    assert starts == sorted(starts)
    assert {span.row for span in recorded.spans} == set(ROWS)
    calls = of(recorded, "exchange", "flush", "state")
    waits = of(recorded, "wait for device", "wait for host")
    assert waits  # at least the hand-overs
    for wait in waits:
        around = [x.number for x in calls if x.start <= wait.start and wait.end <= x.end]
        assert around == [wait.number]
    steps, takes = by_number(recorded, "step"), by_number(recorded, "take in")
    copies, unread = by_number(recorded, "copy"), by_number(recorded, "unread")
    for t, step in steps.items():
        assert step.end == copies[t].start
        assert copies[t].end == unread[t].start
        assert unread[t].end <= takes[t].end
    uploads = by_number(recorded, "upload")
    for update in of(recorded, "update"):
        assert takes[update.number].end <= update.start
        assert update.end <= uploads[update.number].end


def test_the_stats_contain_the_seconds_of_all_spans(engine, recorded):
    def seconds(*kinds):
        return pytest.approx(sum(span.end - span.start for span in of(recorded, *kinds)))

    stats = engine.stats
    assert stats.exchange_s == seconds("exchange", "flush")
    assert stats.wait_s == seconds("wait for host")
    assert stats.work_s == seconds("take in", "update", "hand over", "wait for uploads")
    assert stats.seconds["upload"] == seconds("upload")
    assert "unread" not in stats.seconds  # waiting is not work


def test_the_picture_has_every_row_and_a_legend_and_an_error_names_a_missing_package(
    tmp_path, recorded, monkeypatch
):
    figure = plot_timeline(recorded, tmp_path / "timeline.svg", steps=recorded.steps[-4:])
    assert b"<svg" in (tmp_path / "timeline.svg").read_bytes()[:1000]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ROWS
    assert axes.get_title() == "steps 6 to 9"
    (legend,) = figure.legends
    assert {"step", "update"} <= {text.get_text() for text in legend.get_texts()}
    with pytest.raises(ValueError, match=r"No step in range\(100.*recorded: 1 to 9\)"):
        plot_timeline(recorded, steps=range(100, 110))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib is not installed"):
        plot_timeline(recorded)
