"""Runs of the script whose layers lie in host memory: the files of runs whose layers do not."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.hf_models import FIXTURES, write_model
from tests.train.scripts import TINY, cut_short, read
from tests.train.test_finetuning import language, validations, write_config
from train import finetune
from train.cli.settings import Settings, SettingsError
from train.distributed import host_memory
from train.model import cross_entropy
from train.plan.planning import folder_of_config, planned_step
from train.run import setup
from train.run.step import FETCHES
from zenflow_jax import planning

IN_HOST_MEMORY = {"scan_layers": True, "stream": "weights"}


def bits(folder):
    """The bytes of the tensors in a folder, all of which must be numbers."""
    tensors = load_file(folder / "model.safetensors")
    assert all(np.isfinite(x.astype(np.float32)).all() for x in tensors.values())
    return {name: x.tobytes() for name, x in tensors.items()}


# Both export every fifth step, and validate in between.
@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_a_run_and_all_its_weights_have_the_bits_of_one_whose_layers_are_on_the_device(
    tmp_path, monkeypatch, capsys
):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    more = {"steps": 12, "export_every": 5, "keep": 9, "dtype": "bfloat16", "micro_batches": 1}
    # Layers in host memory make no provisional steps.
    more |= {"provisional_share": 0.0}
    config = write_config(tmp_path, **language(data) | {"model": str(origin)} | more)
    # A decoder's vocabulary is in parts, in each of which channels are selected.
    monkeypatch.setattr(cross_entropy, "PART", 100)
    runs = [tmp_path / stream for stream in ("gradients", "weights")]
    for run in runs:
        cut = run.with_name(f"{run.name}-cut")
        assert finetune.main([config, "--run", run.name, "--stream", run.name]) == 0
        cut_short(run, cut, after=5)
        assert finetune.main([config, "--run", cut.name, "--stream", run.name]) == 0
        assert "resuming from checkpoint 5" in capsys.readouterr().out
        assert validations(run) == validations(cut) == validations(runs[0])
        assert bits(run / "model") == bits(cut / "model")
    for name in ("model-5", "model-10", "model"):
        assert bits(runs[0] / name) == bits(runs[1] / name)
    for run, other in (runs, runs[::-1]):
        assert finetune.main([config, "--run", run.name, "--stream", other.name, "--steps=13"]) == 2
        message = capsys.readouterr().err
        assert f"`stream`: is {other.name}, but was {run.name} in the run" in message
        assert f"Pass --stream {run.name}" in message


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


def test_what_cannot_be_trained_from_host_memory_is_refused_by_name():
    for name, value in (("optimizer", "adamw"), ("scan_layers", False)):
        with pytest.raises(SettingsError, match=f"`{name}`: must be .* as stream is 'weights'"):
            Settings(**IN_HOST_MEMORY | {name: value})
    sources = read(**TINY | {"layers": 16}, **IN_HOST_MEMORY, staleness=2, update_interval=16)
    with pytest.raises(SettingsError, match="got staleness=2"):
        setup.prepare(sources, lambda: None)


def test_xla_knows_the_option_for_fetches():
    assert jax.jit(lambda x: x + 1, compiler_options=FETCHES)(1) == 2
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": 1})(1)
