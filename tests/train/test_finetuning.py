"""Fine-tuning with the real command, on tiny models, also with a program per layer."""

import json
import shutil
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_models import write_model
from tests.train import scripts
from tests.train.scripts import cut_short, flip_a_bit, largest_file
from train import finetune, generate
from train.cli.settings import task_name
from train.huggingface.loading import read_folder
from train.model import cross_entropy
from train.run import models, setup
from train.run.by_layer import micro_batches

SHORT = {
    "batch_size": 4,
    "learning_rate": 3e-3,
    "dtype": "float32",
    "topk_ratio": 0.25,
    "update_interval": 2,  # two groups of leaves, each with its own programs
    "length_buckets": 1,  # each bucket compiles another program
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


# In this process; `test_stopping.py` kills processes.
@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run", "no_picture")
def test_an_interrupted_epoch_is_bit_identical_after_it_resumes(tmp_path, capsys):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    more = {"epochs": 1, "keep": 9, "stream": "gradients", "dtype": "bfloat16"}
    config = write_config(tmp_path, **language(data) | {"model": str(origin)} | more)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finetune.main([config, "--run", whole.name]) == 0
    cut_short(whole, cut, after=10)
    flip_a_bit(largest_file(cut / "checkpoints" / "10"))
    assert finetune.main([config, "--run", cut.name]) == 2
    assert "checkpoint 10 in " in capsys.readouterr().err
    shutil.rmtree(cut / "checkpoints" / "10")
    assert finetune.main([config, "--run", cut.name]) == 0
    assert "resuming from checkpoint 5" in capsys.readouterr().out
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


METRICS = ("loss", "accuracy", "macro_f1")
CSV = "mood,review\n" + "kind,a fine film\nunkind,so bad\nso,it is a film\n" * 8


def metrics_in(text):
    """Returns the metrics in an evaluation's lines."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: float(words[1]) for words in lines if words[0] in METRICS}


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run", "no_picture")
def test_an_evaluation_after_a_run_gives_the_runs_metrics(tmp_path, capsys):
    data = scripts.write(tmp_path / "a.csv", CSV)
    settings = {"task": "classification", "data": str(data), "sequence_length": 12}
    settings |= {"text_column": "review", "label_column": "mood", "optimizer": "adamw"}
    settings |= {"model": str(write_model(tmp_path / "origin", "bert")), "save_every": 1}
    config, run = write_config(tmp_path, **settings), tmp_path / "a"
    assert finetune.main([config, "--steps", "2", "--run", run.name]) == 0
    shown = capsys.readouterr().out
    assert "newly initialized: classifier/bias, classifier/kernel, because the head" in shown
    assert scripts.summary(run)["classes"] == ["kind", "so", "unkind"]
    evaluation = [str(run / "settings.toml"), "--model", str(run / "model"), "--steps", "0"]
    assert finetune.main(evaluation) == 0
    expected = {name: float(x) for step, name, x in validations(run) if step == "2"}
    figures = metrics_in(capsys.readouterr().out)
    assert figures == pytest.approx({name: expected[name] for name in METRICS}, abs=1e-4)


BY_LAYER = {"optimizer": "adamw", "stream": "weights", "scan_layers": False}
# Weights and nats, float32: sums over micro-batches and parts have a different order.
ATOL = 1e-5


def trained(sources, steps, folder):
    """Returns the losses of some steps, the metrics after them, and the written weights."""
    job, state = setup.prepare(sources)
    batches, params = [job.batches[i] for i in range(steps)], job.model.params
    options = {"labels": job.task.labels, "texts": job.texts, "task": task_name(job.settings)}
    losses = []
    if job.layered is None:
        for batch in batches:
            params, state, loss, _ = job.train_step(params, state, batch)
            losses.append(loss)
        figures = job.validate(params)
        models.write(folder, job.model.origin, params, **options)
    else:
        outer = [weakref.ref(x) for x in jax.tree.leaves(params["outer"])]
        with setup.make_trainer(job) as trainer:
            assert not any(x() for x in outer), "the device has the outer weights twice"
            parts = job.settings.micro_batches
            losses = [trainer.step(*micro_batches(batch, parts)) for batch in batches]
            figures = job.validate(trainer)
            values = job.layered.leaves(trainer.master_params)
            models.write(folder, job.model.origin, job.layered.model, values, **options)
    return np.array(losses), figures, load_file(folder / "model.safetensors")


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize(
    ("name", "steps", "optimizer"),
    # A vocabulary in parts, a head that is the embedding, and classes. Muon's labels go by path.
    [("llama2", 3, "adamw"), ("qwen2", 0, "sgd"), ("bert", 3, "muon")],
)
def test_a_layerwise_run_equals_the_optimizer_on_the_device(
    tmp_path, monkeypatch, name, steps, optimizer
):
    model = write_model(tmp_path / "origin", name)
    monkeypatch.setattr(cross_entropy, "PART", 100)
    options = SHORT | (glue if name == "bert" else language)(tmp_path)
    options |= {"model": str(model), "steps": 3, "micro_batches": 2, "length_buckets": 1}
    # A key bias's gradient is only rounding error, which a small `eps` would enlarge.
    options |= {"eval_batches": 2, "keep_best": False, "eps": 1e-3}
    runs = [options | {"optimizer": optimizer}, options | BY_LAYER | {"optimizer": optimizer}]
    expected, layerwise = (
        trained(scripts.read(**run), steps, tmp_path / str(i)) for i, run in enumerate(runs)
    )
    np.testing.assert_allclose(layerwise[0], expected[0], atol=ATOL)
    assert layerwise[1] == pytest.approx(expected[1], abs=ATOL)
    weights = layerwise[2]
    assert weights.keys() == expected[2].keys() == load_file(model / "model.safetensors").keys()
    for key, x in expected[2].items():
        np.testing.assert_allclose(weights[key], x, atol=ATOL, err_msg=key)


def bits(folder):
    """Returns the bytes of the tensors in a folder."""
    return {name: x.tobytes() for name, x in load_file(folder / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run", "no_picture")
def test_a_layerwise_run_can_be_resumed_and_loaded(tmp_path, monkeypatch, capsys):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    monkeypatch.setattr(cross_entropy, "PART", 100)
    options = language(data) | BY_LAYER | {"model": str(origin), "dtype": "bfloat16", "steps": 12}
    options |= {"keep": 9, "keep_best": True, "learning_rate": 10.0}
    options |= {"warmup_steps": 40}  # the rate grows, and ruins the model
    config = write_config(tmp_path, **options)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert finetune.main([config, "--run", whole.name]) == 0
    shown = capsys.readouterr().out
    assert "model contains the weights of step 5, the best validated checkpoint" in shown
    cut_short(whole, cut, after=5)
    assert finetune.main([config, "--run", cut.name, "--layer-inputs", "host"]) == 0
    assert "resuming from checkpoint 5" in capsys.readouterr().out
    assert validations(whole) == validations(cut)
    assert bits(whole / "model") == bits(cut / "model")
    command = [config, "--model", str(whole / "model"), "--steps", "0", "--run", "None"]
    assert finetune.main(command) == 0
    loss = next(float(value) for step, _, value in validations(whole) if step == "5")
    assert f"loss {loss:.4f} nats" in capsys.readouterr().out
    assert generate.main(["--model", str(whole / "model"), "the cat", "--max-tokens", "3"]) == 0
