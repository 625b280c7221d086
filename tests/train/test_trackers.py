"""A run's results reach the trackers in `--report-to`: only finite ones, each at its step."""

import sys
import types
from pathlib import Path

import pytest
from rich.console import Console

from train.cli.settings import SettingsError
from train.log.meter import Row
from train.log.run_log import RunLog, check_reporter, reporter


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
    for place in ("a", "a", "b"):  # and a run with the same name elsewhere
        (tmp_path / place / folder).mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(tmp_path / place)
        logged(folder, reporter(kind, folder, config={"steps": 8}))
    assert taken == [*EXPECTED, "finished"] * 3
    assert runs[0] == runs[1]
    assert (runs[0] == runs[2]) == (kind == "trackio")
    expected = {"project": "zenflow_jax", "name": folder.name, "resume": "allow"}
    assert expected.items() <= runs[0].items()
    assert runs[0]["config"] == {"steps": 8}
    assert runs[0].get("dir") == (folder.name if kind == "wandb" else None)


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    check_reporter("none")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingsError, match="for wandb is not installed.*pip install wandb"):
        check_reporter("wandb")
