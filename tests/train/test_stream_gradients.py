"""Runs of the script whose layers stream their gradients: cut short, resumed, and refused."""

import pytest
from safetensors.numpy import load_file

from tests.hf_models import write_model
from tests.train.scripts import cut_short
from tests.train.test_finetuning import language, validations, write_config
from train import finetune
from train.cli.settings import Settings, SettingsError
from train.model import cross_entropy


def bits(folder):
    """Returns the bytes of the tensors in a folder."""
    return {name: x.tobytes() for name, x in load_file(folder / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it", "no_picture")
def test_a_run_that_streams_resumes_with_the_same_bits_and_only_as_one(
    tmp_path, monkeypatch, capsys
):
    data, origin = tmp_path / "data", write_model(tmp_path / "origin", "llama2")
    data.mkdir()
    more = {"steps": 12, "export_every": 5, "keep": 9, "dtype": "bfloat16", "micro_batches": 1}
    more |= {"stream": "gradients", "scan_layers": True}
    config = write_config(tmp_path, **language(data) | {"model": str(origin)} | more)
    # A decoder's vocabulary is in parts, in each of which channels are selected.
    monkeypatch.setattr(cross_entropy, "PART", 100)
    run, cut = tmp_path / "run", tmp_path / "cut"
    assert finetune.main([config, "--run", run.name]) == 0
    cut_short(run, cut, after=5)
    assert finetune.main([config, "--run", cut.name]) == 0
    assert "resuming from checkpoint 5" in capsys.readouterr().out
    assert validations(run) == validations(cut)
    assert bits(run / "model") == bits(cut / "model")
    assert finetune.main([config, "--run", run.name, "--stream", "none", "--steps=13"]) == 2
    message = capsys.readouterr().err
    assert "`stream`: is none, but was gradients in the run" in message
    assert "Pass --stream gradients" in message


@pytest.mark.parametrize(("name", "value"), [("optimizer", "adamw"), ("scan_layers", False)])
def test_what_cannot_stream_is_refused_by_name(name, value):
    with pytest.raises(SettingsError, match=f"`{name}`: must be .* as stream is 'gradients'"):
        Settings(**{"scan_layers": True, "stream": "gradients", name: value})
