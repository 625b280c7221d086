"""A run's settings: the config file, the command line, and rejected values."""

import functools
import re
from pathlib import Path

import numpy as np
import pytest

from tests.train.scripts import TINY, write_config
from train import finetune
from train.cli.command_line import load_settings, read_command_line, to_toml
from train.cli.settings import Settings, SettingsError
from train.run.optimizers import learning_rate

CONFIGS = Path(__file__).parents[2] / "configs"


def config_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rolling = true", "unknown keys: rolling. Remove them."),
        ("steps = -1", "`steps`: must be a finite number of at least 0"),
        ("learning_rate = nan", "`learning_rate`: must be a finite number above 0, but is nan"),
        ('run = ".."', "`run`: must be the name of a folder"),
        ('stream = "weights"', "`optimizer`: must be 'adamw' or .* because stream is 'weights'"),
        ('optimizer = "sgd"\nhost_state = "compact"', "`host_state`: must be float32, because sgd"),
        ("warmup_share = 0.1\nwarmup_steps = 3", "`warmup_share`: must be left out, because"),
    ],
)
def test_a_mistake_in_the_file_raises_an_error_with_the_file_and_a_remedy(tmp_path, text, expected):
    path = config_file(tmp_path, text)
    with pytest.raises(SettingsError, match=f"(?s)^{re.escape(str(path))}.*{expected}"):
        load_settings(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_built_in_configs_are_read(path):
    assert load_settings(path).output_dir.startswith("runs/")


def test_the_settings_in_a_runs_folder_mean_this_folder_wherever_it_is(tmp_path, monkeypatch):
    run = tmp_path / "moved" / "first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "settings.toml").write_text('output_dir = "runs"\n')
    for where, config, place in (
        (tmp_path, run / "settings.toml", run.parent),
        (tmp_path, "moved/first/settings.toml", "moved"),
        (run, "settings.toml", ".."),
    ):
        monkeypatch.chdir(where)
        read = functools.partial(read_command_line, program="train")
        assert read([str(config)]).settings.output_dir == str(place)
        assert read([str(config), "--output-dir", "other"]).settings.output_dir == "other"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--stepz", "4"], "unrecognized arguments: --stepz 4"),
        (["--text-column", "body"], "`text_column`: must be text, since standard_library does not"),
        (["--optimizer", "adamw", "--output-dir", "job.toml"], "--output-dir"),
    ],
)
@pytest.mark.usefixtures("as_scripts_run")
def test_a_mistake_ends_the_command_with_one_line_and_code_2_and_creates_no_folder(
    tmp_path, monkeypatch, capsys, arguments, expected
):
    monkeypatch.chdir(tmp_path)
    assert finetune.main([write_config(tmp_path, **TINY), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["job.toml"]


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    text = 'steps = 30\nlearning_rate = 0.5\nweight_decay = 1\nselect_interval = "auto"'
    path = config_file(tmp_path, "\ufeff" + text)  # a byte order mark is not part of the text
    arguments = [str(path), "--learning-rate", "1e-2", "--max-grad-norm", "None", "--remat"]
    arguments += ["--update-interval", "auto", "--mesh", "tensor=8"]
    command = read_command_line(arguments, program="train")
    assert command.settings == Settings(
        steps=30,
        learning_rate=1e-2,
        weight_decay=1.0,
        max_grad_norm=None,
        remat=True,
        select_interval="auto",
        update_interval="auto",
        mesh="tensor=8",
    )
    assert isinstance(command.settings.weight_decay, float)


def test_settings_written_as_toml_read_back_as_the_same_settings(tmp_path):
    for changed in (
        {"output_dir": 'a "b" \\ c', "select_interval": 8, "learning_rate": 1e-9},
        {"update_interval": "auto", "select_interval": "auto", "full_warm_up_share": 0.05},
        {"host_state": "compact", "staleness": 2, "remat": True},
        {"text_column": "é 名 🙂 𠮷", "data": "".join(map(chr, range(256))) + "\u2028\U0010ffff"},
    ):
        settings = Settings(**changed)
        assert load_settings(config_file(tmp_path, to_toml(vars(settings)))) == settings


def test_a_warm_up_share_is_a_share_of_the_steps_rounded_up():
    for share, steps, rounds in ((0.0, 400, 0), (0.05, 401, 21), (0.07, 100, 7), (1e-3, 10, 1)):
        assert Settings(full_warm_up_share=share, steps=steps).warm_up_rounds == rounds
        options = {"learning_rate": 1.0, "schedule": "constant", "warmup_share": share}
        rates = learning_rate(Settings(steps=steps, **options))(np.arange(steps))
        assert np.sum(rates < 1) == rounds
