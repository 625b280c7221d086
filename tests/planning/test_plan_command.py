"""The script's `--plan`: other batches and settings that fit, and the printed commands."""

import dataclasses
import json
import shlex
import shutil
from typing import NamedTuple

import pytest

from tests.hf_models import FIXTURES
from train import finetune
from train.cli.command_line import read_command_line
from train.plan import planning, report
from train.plan.planning import folder_of_config, planned_step
from train.run import memory
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, HOST_RESERVE

pytestmark = pytest.mark.usefixtures("as_scripts_run")

QUICKSTART = FIXTURES.parent.parent / "configs" / "quickstart.toml"


LAYERS = json.loads((FIXTURES / "llama3" / "config.json").read_text())["num_hidden_layers"]
RUN = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
RUN += ["--data", "a b", "--sequence-length", "64", "--remat", "--scan-layers"]
# The same run, with fewer settings to change, because each change is traced.
FIXED = [*RUN, "--update-interval=1", "--prefetch-bytes=0"]


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(library, "has_compiler", lambda: False)


@pytest.fixture
def with_compiler(monkeypatch):
    """Replaces the compiler: each example takes 1 MB, or 2 without remat; scans take 10 MB more.

    Returns the list of compiled steps.
    """
    compiled = []

    def compiled_peak(run, origin, mesh):
        compiled.append((run.optimizer, run.batch_size))
        return 10**6 * ((1 if run.remat else 2) * run.batch_size + 10 * run.scan_layers + LAYERS)

    monkeypatch.setattr(library, "has_compiler", lambda: True)
    monkeypatch.setattr(planning, "mesh_of", lambda *_, **__: None)
    monkeypatch.setattr(planning, "compiled_peak", compiled_peak)
    return compiled


def planned(*arguments):
    """Returns the plan for a command."""
    command = read_command_line(arguments, program="p")
    return planning.plan_run(command.settings, command.planning)


def test_the_command_plans_from_config_json_alone(tmp_path, capsys, without_compiler, monkeypatch):
    shutil.copy(FIXTURES / "llama3" / "config.json", tmp_path)
    run = ["--task", "language", "--model", str(tmp_path), "--data", "nowhere", "--scan-layers"]
    run += ["--device", "a100", "--host-memory", "64", "--prefetch-bytes", "0"]
    plan = planned(str(QUICKSTART), *run)
    assert list(plan.of_optimizers) == ["adamw", "offload", "zenflow"]
    assert plan.chosen.device["uploads"] == 0 < plan.chosen.late
    assert (plan.chosen.by, plan.chosen.host_capacity_bytes) == ("shapes", 64 * 10**9)
    assert plan.of_optimizers["adamw"].host == {}
    monkeypatch.setattr(planning, "plan_run", lambda *_: plan)
    assert finetune.main([str(QUICKSTART), *run, "--plan"]) == 0
    out = capsys.readouterr().out
    assert plan.chosen.advice in out.replace("\n", " ")
    assert "A100" in out


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Restores the table, in which tests change a GPU's memory."""
    monkeypatch.setitem(GPUS, "rtx4090", GPUS["rtx4090"])


def room_for(batch_size, peak):
    """Makes a GPU with just enough memory for a compact run, unscanned; returns the arguments."""
    settings = read_command_line([*FIXED, "--no-scan-layers"], program="p").settings
    settings = dataclasses.replace(settings, batch_size=batch_size, host_state="compact")
    step = planned_step(settings, folder_of_config(settings.model), None)
    plan = library.plan(*step, host_state="compact").with_peak(peak)
    memory = int(plan.device_bytes / 0.95) + 1
    GPUS["rtx4090"] = dataclasses.replace(GPUS["rtx4090"], memory=memory)
    host = (plan.host_bytes + HOST_RESERVE + 1) / 1e9  # plus room for rounding
    return ["--device", "rtx4090", "--host-memory", repr(host)]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_lists_commands_that_do(with_compiler, monkeypatch, capsys):
    room = room_for(8, peak=(8 + LAYERS) * 10**6)
    plan = planned(*FIXED, "--batch-size=16", *room)
    assert plan.chosen.by == "compiler"
    assert set(plan.chosen.short) == {"device", "host"}
    assert 1 <= len(plan.ways) <= 3
    assert len(set(with_compiler)) <= planning.COMPILATIONS
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan_run", lambda *_: plan)
        assert finetune.main([*FIXED, "--batch-size=16", *room, "--plan"]) == 0
    out = capsys.readouterr().out
    commands = [
        line[2:].partition("  # device ")[0] for line in out.split("\n") if "  # dev" in line
    ]
    assert len(commands) == len(plan.ways)
    monkeypatch.setattr(planning, "OPTIMIZERS", ("zenflow",))
    for command, way in zip(commands, plan.ways, strict=True):
        program, _, rest = command.partition(" -m train.finetune ")
        assert program.split()[-1] == "python"
        arguments = shlex.split(rest)
        assert not {x for x in arguments if x.startswith(("--plan", "--device", "--host-mem"))}
        again = planned(*arguments, *room)
        assert again.chosen == way.plan
        assert again.chosen.fits
    # The plan takes nearly all of the memory.
    program, _, rest = commands[0].partition(" -m train.finetune ")
    assert program == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python"
    settings = read_command_line(shlex.split(rest), program="p").settings
    assert (settings.data, settings.sequence_length, settings.remat) == ("a b", 64, True)
    assert settings.batch_size == 8
    assert (settings.host_state, settings.scan_layers) == ("compact", False)


class OfShapes(NamedTuple):
    """A plan from shapes."""

    fits: bool
    by: str = "shapes"
    device_bytes: int = 0


def test_the_one_change_that_a_run_needs_is_recommended():
    settings, needed = read_command_line(RUN, program="p").settings, {"prefetch_bytes": 0}
    (way, *_) = planning.ways_that_fit(
        settings, settings.batch_size, lambda run: OfShapes(vars(run).items() >= needed.items())
    )
    assert way.changes == needed


def test_streamed_weights_are_recommended_if_nothing_else_fits(without_compiler, monkeypatch):
    monkeypatch.setattr(
        planning._Planner, "plan_to_fit", lambda _, run: OfShapes(run.stream == "weights")
    )
    none = dataclasses.replace(GPUS["rtx4090"], memory=1)
    monkeypatch.setitem(GPUS, "rtx4090", none)
    run = [*RUN, "--device", "rtx4090"]
    plan = planned(*run)
    (way, *_) = plan.ways
    assert way.batch_size == plan.settings.batch_size
    command = report.command_line(plan, way, run)
    settings = read_command_line(shlex.split(command)[3:], program="p").settings
    assert {name: getattr(settings, name) for name in way.changes} == dict(planning._BY_LAYERS)


def test_a_run_with_streamed_weights_is_planned_next_to_the_other_optimizers(
    without_compiler, capsys, monkeypatch
):
    run = [*RUN, "--no-scan-layers", "--optimizer", "offload", "--stream", "weights"]
    run += ["--device", "rtx4090", "--layer-updates", "during_backward"]
    plan = planned(*run)
    assert plan.chosen.fits
    assert plan.chosen.parameters == plan.of_optimizers["zenflow"].parameters
    assert plan.chosen.host["gradients, pinned"] < plan.chosen.host["weights, pinned"]
    monkeypatch.setattr(planning, "plan_run", lambda *_: plan)
    assert finetune.main([*run, "--plan"]) == 0
    out = capsys.readouterr().out
    assert "compute, s" in out
    assert plan.chosen.on_time[0] in out.replace("\n", " ")


def test_values_from_a_deepspeed_config_are_not_changed_by_recommendations(
    with_compiler, monkeypatch, tmp_path, capsys
):
    tried = []

    def fits_nowhere(_, run):
        tried.append(run.batch_size)
        return OfShapes(False, by="compiler")

    monkeypatch.setattr(planning._Planner, "plan_to_fit", fits_nowhere)
    room = room_for(8, peak=(8 + LAYERS) * 10**6)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 32}))
    run = [*RUN, "--batch-size=32", "--deepspeed", str(config), "--plan"]
    assert finetune.main([*run, *room]) == 0
    assert "No smaller batch and no other --host-state" in capsys.readouterr().out
    assert set(tried) == {32}


def test_a_run_that_exceeds_host_memory_is_rejected_before_data_is_read(monkeypatch, capsys):
    run = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
    run += ["--data", "nowhere"]
    monkeypatch.setattr(memory, "host_bytes", lambda: 20_000)
    assert finetune.main(run) == 2
    assert "`model`: not enough memory" in capsys.readouterr().err
    assert finetune.main([*run, "--force"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err  # the first file that is read
