"""Runs of the script whose layers lie in host memory: the files of runs whose layers do not."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_models import FIXTURES, write_model
from tests.train.scripts import TINY, cut_short, read
from tests.train.test_finetuning import glue, language, validations, write_config
from train import finetune
from train.checkpoints.writing import Checkpoints
from train.cli.settings import Settings, SettingsError
from train.distributed import host_memory
from train.distributed.sharding import mesh_over
from train.model import cross_entropy
from train.plan.planning import compiled_peak, folder_of_config, planned_step
from train.run import setup
from train.run.step import FETCHES
from zenflow_jax import planning

IN_HOST_MEMORY = {"scan_layers": True, "stream": "weights"}


def bits(folder):
    """The bytes of the tensors in a folder, all of which must be numbers."""
    tensors = load_file(folder / "model.safetensors")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in tensors.values())
    return {name: x.tobytes() for name, x in tensors.items()}


# Both keep the best, export every fifth step, and validate in between.
@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
@pytest.mark.parametrize(("task", "model"), [(language, "llama2"), (glue, "bert")])
def test_a_run_and_all_its_weights_have_the_bits_of_one_whose_layers_are_on_the_device(
    tmp_path, monkeypatch, capsys, task, model
):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", model)
    data.mkdir()
    more = {"steps": 12, "export_every": 5, "keep": 9, "keep_best": model == "bert"}
    # Layers in host memory make no provisional steps.
    more |= {"dtype": "bfloat16", "micro_batches": 1, "length_buckets": 1, "provisional_share": 0.0}
    config = write_config(tmp_path, **task(data) | {"model": str(origin)} | more)
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    stream = ["--stream", "weights"]
    # A decoder's vocabulary is in parts, in each of which channels are selected.
    monkeypatch.setattr(cross_entropy, "PART", 100)
    of_plain = [] if model == "bert" else ["--stream", "gradients"]
    assert finetune.main([config, "--run", plain.name, *of_plain]) == 0
    assert finetune.main([config, "--run", whole.name, *stream]) == 0
    cut_short(whole, cut, after=5)
    ends = "model"
    if model == "bert":
        ends = "model-5"  # and is read from the checkpoint at the end
        monkeypatch.setattr(Checkpoints, "_best_of", lambda *_: 5)
    assert finetune.main([config, "--run", cut.name, *stream]) == 0
    assert "resuming from checkpoint 5" in capsys.readouterr().out
    assert validations(plain) == validations(whole) == validations(cut)
    for name in ("model-5", "model-10", "model"):
        assert bits(plain / name) == bits(whole / name)
    assert bits(whole / ends) == bits(cut / "model")
    for run in (plain, whole):
        target = tmp_path / f"{run.name}-10"
        options = of_plain if run == plain else stream
        arguments = [config, "--run", run.name, *options, "--export", "10", str(target)]
        assert finetune.main(arguments) == 0
    assert bits(tmp_path / "plain-10") == bits(tmp_path / "whole-10") == bits(plain / "model-10")
    capsys.readouterr()
    assert finetune.main([config, "--run", cut.name, "--stream", "gradients"]) == 2
    message = capsys.readouterr().err
    assert "`stream`: expected weights, as in the run" in message
    assert "got gradients. Pass --stream weights" in message
    if model != "bert":
        again = tmp_path / "again"
        cut_short(plain, again, after=5)
        assert finetune.main([config, "--run", again.name, *of_plain]) == 0
        assert bits(again / "model") == bits(plain / "model")
        assert finetune.main([config, "--run", again.name, "--steps", "13"]) == 2
        assert "`stream`: expected gradients, as in the run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_the_plan_has_the_weights_in_host_memory(monkeypatch):
    monkeypatch.setattr(cross_entropy, "PART", 40)
    options = {"task": "language", "model": str(FIXTURES / "qwen3"), "data": "none"}
    options |= IN_HOST_MEMORY | {"update_interval": 1}
    settings = Settings(**options, remat=True, sequence_length=8)
    origin = folder_of_config(settings.model)
    planned = planned_step(settings, origin, None)
    moved = host_memory.nbytes(planned.params)
    plan = planning.plan(*planned)
    stacks = [x for x in jax.tree.leaves(planned.params) if x.ndim == 3]
    assert len(stacks) == 9  # seven of a block, embedding and head
    assert moved == sum(2 * x.size for x in stacks) == plan.host["weights"]
    every = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(planned.params))
    assert plan.device["weights"] == every - moved
    # Forward and backward.
    assert plan.to_device == 2 * moved
    mesh = mesh_over({"data": 1}, jax.devices()[:1])
    on_mesh = planned_step(dataclasses.replace(settings, mesh="data=1"), origin, mesh)
    assert planning.plan(*on_mesh).host["weights"] == host_memory.nbytes(on_mesh.params) > 0
    least = plan.device["weights"] + plan.device["optimizer state"]
    assert least < compiled_peak(settings, origin, mesh)


def test_what_cannot_be_trained_from_host_memory_is_refused_by_name():
    for name, value in (("optimizer", "adamw"), ("scan_layers", False)):
        with pytest.raises(SettingsError, match=f"`{name}`: expected .* as stream is 'weights'"):
            Settings(**IN_HOST_MEMORY | {name: value})
    sources = read(**TINY | {"layers": 16}, **IN_HOST_MEMORY, staleness=2, update_interval=16)
    with pytest.raises(SettingsError, match="got staleness=2"):
        setup.prepare(sources, lambda: None)


def test_xla_knows_the_option_for_fetches():
    assert jax.jit(lambda x: x + 1, compiler_options=FETCHES)(1) == 2
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": 1})(1)
