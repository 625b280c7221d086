"""`--steps 0`: the figures of a model, and nothing written."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.tiny_model import write_model
from tests.train.test_finetuning import validations, write_config
from train import finetune
from train.command_line import load_settings
from train.settings import Settings, SettingsError

pytestmark = pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")


def everything(folder):
    """All that is below a folder, with times of change."""
    return {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")}


def shown(text):
    """The figures in the lines of an evaluation."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: float(words[1]) for words in lines if words[0] in FIGURES}


FIGURES = ("loss", "accuracy", "macro_f1")

CSV = "mood,review\n" + "kind,a fine film\nunkind,so bad\nso,it is a film\n" * 8


def own_classes(folder):
    (folder / "a.csv").write_text(CSV)
    settings = {"task": "classification", "data": str(folder / "a.csv"), "sequence_length": 12}
    return settings | {"text_column": "review", "label_column": "mood"}


@pytest.mark.slow
def test_the_figures_are_those_of_a_run_before_and_after_it(tmp_path, capsys):
    given = write_model(tmp_path / "given", "bert")
    settings = own_classes(tmp_path) | {"model": str(given), "length_buckets": 1, "save_every": 1}
    config = write_config(tmp_path, optimizer="adamw", **settings)
    before = everything(tmp_path)
    assert finetune.main([config, "--steps", "0"]) == 0
    text = capsys.readouterr().out
    assert everything(tmp_path) == before
    untrained = shown(text)
    assert "on 2 examples of validation" in text
    assert finetune.main([config, "--steps", "0", "--validation-share", "1"]) == 0
    assert "on 24 examples of validation" in capsys.readouterr().out

    assert finetune.main([config, "--steps", "2", "--run", "a"]) == 0
    in_run = {(int(step), name): float(x) for step, name, x in validations(tmp_path / "a")}
    capsys.readouterr()
    of_run = str(tmp_path / "a" / "model")
    of_it = str(tmp_path / "a" / "settings.toml")
    assert finetune.main([of_it, "--steps", "0"]) == 2
    assert "pass --run None" in capsys.readouterr().err
    assert finetune.main([of_it, "--steps", "0", "--model", of_run]) == 0
    trained = shown(capsys.readouterr().out)
    for step, figures in ((0, untrained), (2, trained)):
        then = {name: x for (at, name), x in in_run.items() if at == step}
        assert figures == pytest.approx(then, abs=1e-4)
    assert "drawn at random: classifier" in text

    # Who exports has neither the data nor its classes, but what the checkpoints say of them.
    (tmp_path / "a.csv").unlink()
    finetune.export(load_settings(tmp_path / "a" / "settings.toml"), "1", tmp_path / "out", print)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["kind", "so", "unkind"]
    assert load_file(tmp_path / "out" / "model.safetensors")["classifier.bias"].shape == (3,)


def test_what_only_a_training_has_is_refused(tmp_path, capsys):
    config = write_config(tmp_path, task="standard_library", steps=0)
    for arguments, expected in (
        (["--run", "a"], f"has trained pass --model {tmp_path / 'a' / 'model'}; for those of that"),
        (["--timeline", str(tmp_path / "a.png")], "`--timeline`: expected a training"),
    ):
        assert finetune.main([config, *arguments]) == 2
        assert expected in capsys.readouterr().err
    with pytest.raises(SettingsError, match="expected a share below 1"):
        Settings(validation_share=1.0)


def test_figures_that_are_not_finite_are_an_error(tmp_path, capsys):
    given = write_model(tmp_path / "given", "bert")
    tensors = load_file(given / "model.safetensors")
    tensors["classifier.bias"] = np.full(3, np.nan, np.float32)
    tensors["classifier.weight"] = np.zeros((3, 16), np.float32)
    save_file(tensors, given / "model.safetensors")
    (tmp_path / "a.csv").write_text("text,label\na,no\nb,perhaps\nc,yes\n")
    settings = {"task": "classification", "data": str(tmp_path / "a.csv")}
    config = write_config(tmp_path, model=str(given), sequence_length=8, steps=0, **settings)
    assert finetune.main([config]) == 2
    assert "expected a finite validation loss, got nan" in capsys.readouterr().err
