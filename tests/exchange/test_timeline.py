"""What is recorded of a run, and the two forms in which it is shown."""

import dataclasses
import itertools
import json
import sys
import types

import pytest

from tests.runs import FEW, ONE, Settings, Training
from zenflow_jax import Span, Timeline, plot_timeline, save_trace
from zenflow_jax._diagnostics import timeline
from zenflow_jax._diagnostics.timeline import ROWS, Recorder

STEPS, INTERVAL = 9, 2
SETTINGS = Settings(topk_ratio=0.25, update_interval=INTERVAL, select_interval=2 * INTERVAL)


@pytest.fixture(scope="module", params=[True, False], ids=["in turn", "together"])
def rolling(request) -> bool:
    return request.param


@pytest.fixture(scope="module")
def recorded(rolling) -> Timeline:
    """Of nine steps in windows of two, flushed and saved."""
    with Training(FEW, dataclasses.replace(SETTINGS, rolling=rolling)) as training:
        training.go(STEPS)
        training.flush()
        training.engine.state()
        # The worker reports its last piece after it has given out the update.
        training.engine.close()
        return training.engine.timeline


def of(timeline: Timeline, *kinds: str) -> list[Span]:
    return [span for span in timeline.spans if span.kind in kinds]


def by_number(timeline: Timeline, kind: str) -> dict[int, Span]:
    spans = of(timeline, kind)
    numbered = {span.number: span for span in spans}
    assert len(numbered) == len(spans), f"two {kind} of one number"
    return numbered


def last_steps(rolling: bool) -> dict[int, int]:
    """After which step each window closes, by its number; `flush` closes the last one."""
    if rolling:  # with each step that of one leaf or of the other
        return {n: min(n, STEPS) for n in range(1, STEPS + 2)}
    return {n: min(INTERVAL * n, STEPS) for n in range(1, 1 + -(-STEPS // INTERVAL))}


def test_every_step_and_every_window_has_its_spans(recorded, rolling):
    assert recorded.steps == range(1, STEPS + 1)
    for kind in ("step", "copy", "unread", "take in", "exchange"):
        assert sorted(by_number(recorded, kind)) == list(recorded.steps), kind
    windows = list(last_steps(rolling))
    for kind in ("wait for uploads", "upload"):
        assert sorted(by_number(recorded, kind)) == windows, kind
    # In several parts where mail was taken in meanwhile.
    assert sorted({span.number for span in of(recorded, "update")}) == windows
    # At the first boundary, which is after step 2, or in turn after step 1 or 2; and then every
    # four steps, in turn from the third or the fourth on.
    handed_over = [1, 2, 3, 4, 7, 8] if rolling else [1, 2, 4]
    assert sorted(by_number(recorded, "hand over")) == handed_over
    assert [span.number for span in of(recorded, "flush", "state")] == [STEPS, STEPS]


@pytest.mark.parametrize(
    ("sending", "numbers", "sums"),
    # Of sums a second one for each window's last step.
    [("after_step", [1, 2, 3, 4], []), ("per_window", [1, 2, 2, 3, 4, 4], [1, 2])],
)
def test_mail_that_leaves_after_the_step_and_sums_of_the_device_are_recorded(
    sending, numbers, sums
):
    with Training(ONE, SETTINGS, send_gradients=sending) as training:
        training.go(4)
        training.flush()
        training.engine.close()
        timeline, stats = training.engine.timeline, training.engine.stats
    steps, copies = by_number(timeline, "step"), of(timeline, "copy")
    assert [span.number for span in copies] == numbers
    assert all(span.start >= steps[span.number].end for span in copies)
    assert sorted(by_number(timeline, "take in sums")) == sums
    assert stats.seconds["take in"] > 0


def test_spans_come_by_their_start_and_waits_lie_inside_the_calls_that_wait(recorded):
    starts = [span.start for span in recorded.spans]
    assert starts == sorted(starts)
    assert all(span.start <= span.end for span in recorded.spans)
    assert {span.row for span in recorded.spans} == set(ROWS)
    calls = of(recorded, "exchange", "flush", "state")
    one_at_a_time = [[x for x in recorded.spans if x.row == row] for row in ("device", "host")]
    for spans in (calls, *one_at_a_time):
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    waits = of(recorded, "wait for device", "wait for host")
    assert waits  # the flush at least, whose update begins in it
    for wait in waits:
        around = [x.number for x in calls if x.start <= wait.start and wait.end <= x.end]
        assert around == [wait.number]


def test_what_happens_to_a_step_happens_in_order(recorded, rolling):
    steps, takes = by_number(recorded, "step"), by_number(recorded, "take in")
    copies, unread = by_number(recorded, "copy"), by_number(recorded, "unread")
    uploads = by_number(recorded, "upload")
    for t, step in steps.items():
        assert step.end == copies[t].start
        assert copies[t].end == unread[t].start
        assert unread[t].end <= takes[t].end
    for update in of(recorded, "update"):
        last = last_steps(rolling)[update.number]
        assert takes[last].end <= update.start
        assert update.end <= uploads[update.number].end


def clock(monkeypatch) -> types.SimpleNamespace:
    """What the recorder takes for the time."""
    now = types.SimpleNamespace(s=0.0)
    fake = types.SimpleNamespace(perf_counter=lambda: now.s)
    monkeypatch.setattr(timeline, "time", fake)
    return now


def test_a_step_lasts_from_the_one_before_or_from_when_it_was_given(monkeypatch):
    now = clock(monkeypatch)
    recorder = Recorder()  # at 0
    now.s = 3.0
    first = recorder.step_taken()
    now.s = 4.0
    recorder.called("exchange", 1, 3.0)
    now.s = 5.0
    second = recorder.step_taken()
    for now.s, step, taken in ((6.0, 1, first), (8.0, 2, second)):
        recorder.step_ended(step, taken)
        now.s += 0.5
        recorder.mail_arrived(step)
    assert set(recorder.timeline().spans) == {
        Span("device", "dispatch", 0.0, 3.0, 1),  # somewhere in there it began
        Span("device", "step", 3.0, 6.0, 1),
        Span("caller", "exchange", 3.0, 4.0, 1),
        Span("device", "step", 6.0, 8.0, 2),  # given at 5, when the first was not over
        Span("mail", "copy", 6.0, 6.5, 1),
        Span("mail", "copy", 8.0, 8.5, 2),
    }
    seconds = recorder.seconds()
    assert (seconds["seconds"]["copy"], seconds["exchange_s"]) == (1.0, 1.0)


def test_pieces_that_follow_each_other_are_one_span_and_mail_parts_them(monkeypatch):
    now = clock(monkeypatch)
    recorder = Recorder()
    pieces = [("update", 1)] * 1000 + [("take in", 5)] + [("update", 1)] * 1000
    for now.s, (kind, number) in enumerate(pieces):
        recorder.works_at(kind, number)
    now.s += 1  # at which it is at work
    assert recorder.timeline().spans == (
        Span("host", "update", 0, 1000, 1),
        Span("host", "take in", 1000, 1001, 5),
        Span("host", "update", 1001, 2001, 1),
    )
    seconds = recorder.seconds()
    assert seconds["work_s"] == 2001
    assert seconds["seconds"] == {"update": 2000, "take in": 1}


def test_what_follows_the_last_step_after_a_pause_is_not_part_of_it():
    step, near, far = (
        Span("device", "step", 0.0, 10.0, 1),
        Span("host", "update", 10.5, 12.0, 1),
        Span("caller", "flush", 14.0, 15.0, 1),
    )
    timeline = Timeline((step, near, far))
    assert timeline.bounds(timeline.steps) == (0.0, 12.0)
    assert timeline.during(timeline.steps).spans == (step, near)


def events_in(folder):
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_the_trace_has_all_spans_as_complete_events_under_the_names_of_their_rows(
    tmp_path, recorded
):
    save_trace(recorded, tmp_path / "trace.json")
    events = events_in(tmp_path)
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(recorded.spans)
    assert all(names[e["tid"]] == e["cat"] for e in complete)
    assert min(e["ts"] for e in complete) == 0
    update = next(e for e in complete if e["name"] == "update 2")
    assert (update["cat"], update["args"]) == ("host", {"window": 2})


def test_spans_that_overlap_in_part_get_threads_of_their_own(tmp_path):
    """A viewer draws them wrongly in one thread; one inside another may stay there."""
    times = [(0.0, 4.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0), (4.0, 6.0)]
    spans = tuple(Span("mail", "unread", *time, n) for n, time in enumerate(times))
    save_trace(Timeline(spans), tmp_path / "trace.json")
    threads = {e["name"]: e["tid"] for e in events_in(tmp_path) if e["ph"] == "X"}
    others = {threads[f"unread {n}"] for n in (0, 1, 2, 4)}
    assert len(others) == 1
    assert threads["unread 3"] not in others


def test_the_picture_has_every_row_a_legend_and_the_steps_by_number(tmp_path, recorded):
    figure = plot_timeline(recorded, tmp_path / "timeline.svg", steps=recorded.steps[-4:])
    assert b"<svg" in (tmp_path / "timeline.svg").read_bytes()[:1000]
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(ROWS)
    assert (axes.get_title(), axes.get_xlabel()) == ("steps 6 to 9", "ms")
    (legend,) = figure.legends
    shown = {text.get_text() for text in legend.get_texts()}
    assert {"step", "update", "mail unread", "upload", "exchange"} <= shown


@pytest.mark.parametrize("steps", [range(100, 110), range(3, 3)], ids=str)
def test_steps_that_are_not_recorded_are_an_error_that_says_which_are(recorded, steps):
    words = rf"recorded \(1 to 9\), got range\({steps.start}.*Take a part of `timeline.steps`"
    with pytest.raises(ValueError, match=words):
        plot_timeline(recorded, steps=steps)
    with pytest.raises(ValueError, match=r"recorded \(none\)"):
        plot_timeline(Timeline(()))


def test_without_matplotlib_the_error_says_what_to_install_and_what_does_without(
    monkeypatch, recorded
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="expected matplotlib .*save_trace"):
        plot_timeline(recorded)
