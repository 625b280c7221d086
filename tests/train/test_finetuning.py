"""Every task with the real command, on a tiny model: half an epoch, interrupted and resumed."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.hf_models import write_model
from tests.train import scripts
from tests.train.scripts import cut_short, flip_a_bit, largest_file
from train import finetune
from train.cli.command_line import load_settings
from train.huggingface.loading import read_folder
from train.run import setup

SHORT = {
    "batch_size": 4,
    "learning_rate": 3e-3,
    "dtype": "float32",
    "topk_ratio": 0.25,
    "update_interval": 2,  # two groups of leaves, and as many programs of each kind
    "length_buckets": 1,  # each is a program of its own
    "max_grad_norm": 1.0,
    "evaluate_every": 10,
    "save_every": 5,
    "log_every": 5,
}
EXAMPLES = 80  # 20 steps


def write_config(folder: Path, **settings) -> str:
    return scripts.write_config(folder, **SHORT | {"output_dir": str(folder)} | settings)


def language(folder: Path) -> dict:
    texts = [f"the cat is on the mat {i % 7} and the dog is not" for i in range(EXAMPLES)]
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    settings = {"sequence_length": 40, "scan_layers": True}
    return {"task": "language", "data": str(data)} | settings


def glue(folder: Path) -> dict:
    rows = ["this movie is good\t1\n", "this movie is bad\t0\n", "a fine film\t1\n", "so bad\t0\n"]
    for name, times in (("train.tsv", EXAMPLES // 4), ("dev.tsv", 3)):
        (folder / name).write_text("sentence\tlabel\n" + "".join(rows * times), encoding="utf-8")
    settings = {"sequence_length": 12, "keep_best": True, "scan_layers": True}
    settings |= {"text_column": "sentence", "length_buckets": 2}
    return {"task": "classification", "data": str(folder)} | settings


def validations(run: Path) -> list[tuple[str, ...]]:
    return [tuple(row.values()) for row in scripts.rows(run / "validation.csv")]


# In this process; `test_going_on.py` kills processes.
@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_an_interrupted_epoch_is_bit_identical_after_it_resumes(tmp_path, capsys):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    more = {"epochs": 1, "keep": 9, "stream": "gradients", "dtype": "bfloat16"}
    config = write_config(tmp_path, **language(data) | {"model": str(origin)} | more)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finetune.main([config, "--run", whole.name]) == 0
    assert re.search(r"only \d+ steps: pass --epochs \d+ for 1\d\d, or a", capsys.readouterr().out)
    cut_short(whole, cut, after=10)
    flip_a_bit(largest_file(cut / "checkpoints" / "10"))
    assert finetune.main([config, "--run", cut.name]) == 0
    shown = capsys.readouterr().out
    assert "checkpoint 10 is damaged: " in shown
    assert "resuming from checkpoint 5" in shown
    assert (cut / "checkpoints" / "damaged-10").is_dir()
    before, *weights = (
        load_file(folder / "model.safetensors")
        for folder in (origin, whole / "model", cut / "model")
    )
    for name, x in weights[0].items():
        np.testing.assert_array_equal(x, weights[1][name])
    assert any(not np.array_equal(x, weights[0][name]) for name, x in before.items())
    assert validations(whole) == validations(cut)
    for file in data.iterdir():
        file.write_text(file.read_text().replace("is", "was"))
    assert finetune.main([config, "--run", cut.name, "--steps", "99"]) == 2
    assert "the data differs" in capsys.readouterr().err
    assert read_folder(whole / "model").config == read_folder(origin).config
    assert (whole / "model" / "tokenizer.json").is_file()


@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_a_mistake_ends_the_command_with_one_message(tmp_path, capsys):
    folder = write_model(tmp_path / "origin", "bert")
    for changed, expected in (
        ({"model": None}, "`model`: must be a path for classification"),
        ({"task": "standard_library"}, "`model`: must be left out for standard_library"),
        ({"task": "language"}, "the task language needs a decoder, such as a Llama or Qwen"),
        ({"data": "nowhere"}, "nowhere"),
        ({"micro_batches": 3}, "`micro_batches`: must be a number that divides batch_size, 4"),
        ({"sequence_length": 600}, "`sequence_length`: 600 exceeds the 20 positions of the model"),
        ({"steps": 0, "run": "a"}, f"pass --model {tmp_path / 'a' / 'model'}; otherwise"),
        ({"validation_share": 1.0}, "must be a share above 0 and below 1"),
    ):
        settings = {"model": str(folder), "steps": 2} | glue(tmp_path) | changed
        settings = {name: value for name, value in settings.items() if value is not None}
        assert finetune.main([write_config(tmp_path, **settings)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert expected in error


def test_a_head_is_kept_if_its_labels_are_the_tasks(tmp_path):
    folder = write_model(tmp_path / "origin", "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"classifier.weight": np.ones((2, 16), np.float32)}
    tensors |= {"classifier.bias": np.ones(2, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    settings = {"model": str(folder), "dtype": "float32"} | glue(tmp_path)
    for names, kept in (
        (["1", "0"], True),
        (["LABEL_0", "LABEL_1"], True),
        (["negative", "positive"], False),
    ):
        config["id2label"] = dict(enumerate(names))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model, *_ = setup.make_model(scripts.read(**settings))
        assert bool(np.all(model.params["classifier"]["kernel"] == 1)) == kept
        assert bool(model.drawn) != kept


def modified(folder):
    """Returns all paths under a folder, with modification times."""
    return {path: os.stat(path).st_mtime_ns for path in folder.rglob("*")}


METRICS = ("loss", "accuracy", "macro_f1")
CSV = "mood,review\n" + "kind,a fine film\nunkind,so bad\nso,it is a film\n" * 8


def metrics_in(text):
    """Returns the metrics in an evaluation's lines."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: float(words[1]) for words in lines if words[0] in METRICS}


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_an_evaluation_before_and_after_a_run_has_the_runs_metrics(tmp_path, capsys):
    data = scripts.write(tmp_path / "a.csv", CSV)
    settings = {"task": "classification", "data": str(data), "sequence_length": 12}
    settings |= {"text_column": "review", "label_column": "mood", "optimizer": "adamw"}
    settings |= {"model": str(write_model(tmp_path / "origin", "bert")), "save_every": 1}
    config, run = write_config(tmp_path, **settings), tmp_path / "a"

    def evaluated(*options):
        assert finetune.main([*options, "--steps", "0"]) == 0
        return capsys.readouterr().out

    before = modified(tmp_path)
    untrained = evaluated(config)
    assert modified(tmp_path) == before
    assert "on 3 validation examples" in untrained
    assert "an example; the model is trained on the text in ⟦⟧" in untrained
    heads = "head has the 3 classes no, perhaps, yes; the data has the 3 classes kind, so, unkind"
    assert "newly initialized, because " in untrained
    assert heads in untrained

    assert finetune.main([config, "--steps", "2", "--run", run.name]) == 0
    use = f'Try it: python -m train.generate --model {run / "model"} "A text"'
    assert capsys.readouterr().out.splitlines()[-1] == use
    assert finetune.main([str(run / "settings.toml"), "--steps", "0"]) == 2
    assert "pass --run None" in capsys.readouterr().err
    trained = evaluated(str(run / "settings.toml"), "--model", str(run / "model"))
    rows = {(int(step), name): float(x) for step, name, x in validations(run)}
    for step, text in ((0, untrained), (2, trained)):
        expected = {name: x for (at, name), x in rows.items() if at == step and name in METRICS}
        assert metrics_in(text) == pytest.approx(expected, abs=1e-4)

    # All rows in another file, with fewer classes.
    test = scripts.write(tmp_path / "test.csv", CSV.replace("so,it is a film\n", ""))
    options = ["--data", str(test), "--validation-share", "1", "--model", str(run / "model")]
    text = evaluated(config, *options)
    assert "on 16 validation examples" in text
    assert "newly initialized" not in text

    # An export has neither the data nor its classes, only what the checkpoints say about them.
    data.unlink()
    finetune.export(load_settings(run / "settings.toml"), "1", tmp_path / "out", print)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config["id2label"].values()) == ["kind", "so", "unkind"]
    assert load_file(tmp_path / "out" / "model.safetensors")["classifier.bias"].shape == (3,)


@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_non_finite_results_raise(tmp_path, capsys):
    origin = write_model(tmp_path / "origin", "bert")
    tensors = load_file(origin / "model.safetensors")
    tensors["classifier.bias"] = np.full(3, np.nan, np.float32)
    tensors["classifier.weight"] = np.zeros((3, 16), np.float32)
    save_file(tensors, origin / "model.safetensors")
    (tmp_path / "a.csv").write_text("text,label\na,no\nb,perhaps\nc,yes\n")
    settings = {"task": "classification", "data": str(tmp_path / "a.csv")}
    config = write_config(tmp_path, model=str(origin), sequence_length=8, steps=0, **settings)
    assert finetune.main([config]) == 2
    assert "the validation loss is nan" in capsys.readouterr().err
