"""A run's results reach the trackers in `--report-to`: only finite ones, each at its step."""

import struct
import sys
import types
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from train.cli.settings import SettingsError
from train.log import trackers
from train.log.meter import Row
from train.log.run_log import RunLog
from train.log.trackers import check_reporter, reporter


def logged(folder, to):
    """A log of two rows and a validation."""
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
    runs, taken = [], []

    def init(**options):
        runs.append(options)
        finish = lambda: taken.append("finished")  # noqa: E731
        return types.SimpleNamespace(
            log=lambda figures, step: taken.append((step, figures)), finish=finish
        )

    monkeypatch.setitem(sys.modules, kind, types.SimpleNamespace(init=init))
    folder = Path("001-zenflow")
    for place, done in (("a", 0), ("a", 4), ("b", 0)):  # and a run with the same name elsewhere
        (tmp_path / place / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        logged(folder, reporter(kind, folder, done=done, config={"steps": 8}))
    assert taken == [*EXPECTED, "finished"] * 3
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) == (kind == "trackio")
    expected = {"project": "zenflow_jax", "name": folder.name, "resume": "allow"}
    assert expected.items() <= runs[0].items()
    assert runs[0]["config"] == {"steps": 8}
    assert runs[0].get("dir") == (folder.name if kind == "wandb" else None)


def test_tensorboard_gets_results_by_step_and_replaces_those_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "BOARD_EVERY_S", -1.0)
    board = reporter("tensorboard", tmp_path, done=3, config={})
    with monkeypatch.context() as in_a_run:
        in_a_run.setattr(board, "finish", lambda: None)
        logged(tmp_path, board)
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, events = file.read_bytes(), []
    board.finish()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert (events[1].step, events[1].session_log.status) == (4, 1)  # START
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(step, name, x) for step, figures in EXPECTED for name, x in figures.items()]


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    check_reporter("none")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match='for wandb is not installed .*pip install "wandb"'):
        check_reporter("wandb")
