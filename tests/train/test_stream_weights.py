"""The script with streamed weights, one program per layer: equal to AdamW."""

import weakref

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_models import write_model
from tests.train.scripts import cut_short, read
from tests.train.test_finetuning import SHORT, glue, language, validations, write_config
from train import finetune, generate
from train.cli.settings import Settings, SettingsError, task_name
from train.model import cross_entropy
from train.run import models, setup
from train.run.by_layer import micro_batches

BY_LAYER = {"optimizer": "offload", "stream": "weights", "scan_layers": False}
# Weights and nats, float32: sums over micro-batches and parts have a different order.
ATOL = 1e-5


def trained(sources, steps, folder):
    """Returns the losses of some steps, the metrics after them, and the written weights."""
    job, state = setup.prepare(sources, lambda: None)
    batches, params = [job.batches[i] for i in range(steps)], job.model.params
    options = {"labels": job.task.labels, "texts": job.texts, "task": task_name(job.values)}
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
    ("name", "steps"),
    # A vocabulary in parts, a head that is the embedding, and classes.
    [("llama2", 3), ("qwen2", 0), ("bert", 3)],
)
def test_a_layerwise_run_equals_adamw(tmp_path, monkeypatch, name, steps):
    model = write_model(tmp_path / "origin", name)
    monkeypatch.setattr(cross_entropy, "PART", 100)
    options = SHORT | (glue if name == "bert" else language)(tmp_path)
    options |= {"model": str(model), "steps": 3, "micro_batches": 2, "length_buckets": 1}
    # A key's bias has only rounding as its gradient, which a small `eps` would enlarge.
    options |= {"eval_batches": 2, "keep_best": False, "eps": 1e-3}
    expected = trained(read(**options | {"optimizer": "adamw"}), steps, tmp_path / "adamw")
    layerwise = trained(read(**options | BY_LAYER), steps, tmp_path / "by_layer")
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
def test_a_layerwise_run_resumes_exports_and_is_read_again(tmp_path, monkeypatch, capsys):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    monkeypatch.setattr(cross_entropy, "PART", 100)
    options = language(data) | BY_LAYER | {"model": str(origin), "dtype": "bfloat16", "steps": 12}
    options |= {"keep": 9, "keep_best": True, "learning_rate": 10.0}
    options |= {"warmup_steps": 40}  # the rate grows, and spoils the model
    config = write_config(tmp_path, **options)
    whole, cut, out = tmp_path / "whole", tmp_path / "cut", tmp_path / "exported"
    assert finetune.main([config, "--run", whole.name]) == 0
    shown = capsys.readouterr().out
    assert "model contains the weights of step 5, the best validated checkpoint" in shown
    cut_short(whole, cut, after=5)
    assert finetune.main([config, "--run", cut.name, "--layer-inputs", "host"]) == 0
    assert "resuming from checkpoint 5" in capsys.readouterr().out
    assert validations(whole) == validations(cut)
    assert bits(whole / "model") == bits(cut / "model")
    assert finetune.main([config, "--run", whole.name, "--export", "5", str(out)]) == 0
    assert bits(out) == bits(whole / "model")
    command = [config, "--model", str(whole / "model"), "--steps", "0", "--run", "None"]
    assert finetune.main(command) == 0
    loss = next(float(value) for step, _, value in validations(whole) if step == "5")
    assert f"loss {loss:.4f} nats" in capsys.readouterr().out
    assert generate.main(["--model", str(whole / "model"), "the cat", "--max-tokens", "3"]) == 0


@pytest.mark.parametrize(
    ("options", "name", "stream"),
    [
        (BY_LAYER | {"optimizer": "adamw"}, "optimizer", "weights"),
        (BY_LAYER | {"scan_layers": True}, "scan_layers", "weights"),
        ({"layer_inputs": "host"}, "layer_inputs", "none"),
    ],
)
def test_options_that_do_not_suit_a_layerwise_run_are_rejected_by_name(options, name, stream):
    with pytest.raises(SettingsError, match=f"`{name}`: must be .* because stream is '{stream}'"):
        Settings(**options)
