"""The script's `--plan`: other batches and settings that fit, and the printed commands."""

import dataclasses
import json
import shlex
import shutil

import pytest

from tests.hf_models import FIXTURES
from tests.processes import assert_ends, start
from train import finetune
from train.cli.command_line import read_command_line
from train.plan import planning, report
from train.plan.planning import folder_of_config, planned_step
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, HOST_RESERVE

pytestmark = pytest.mark.usefixtures("as_scripts_run")

QUICKSTART = FIXTURES.parent.parent / "configs" / "quickstart.toml"


LAYERS = json.loads((FIXTURES / "llama3" / "config.json").read_text())["num_hidden_layers"]
RUN = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
RUN += ["--data", "a b", "--sequence-length", "64", "--remat", "--scan-layers"]


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(library, "has_compiler", lambda: False)


@pytest.fixture
def with_compiler(monkeypatch):
    """Replaces the compiler: each example takes 1 MB. Returns the list of compiled steps."""
    compiled = []

    def compiled_peak(run, origin, mesh):
        compiled.append(run)
        return 10**6 * (run.batch_size + LAYERS)

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
    assert plan.plan.device["uploads"] == 0 < plan.plan.late
    assert (plan.plan.by, plan.plan.host_capacity_bytes) == ("shapes", 64 * 10**9)
    assert planned(str(QUICKSTART), *run, "--optimizer", "adamw").plan.host == {}
    monkeypatch.setattr(planning, "plan_run", lambda *_: plan)
    assert finetune.main([str(QUICKSTART), *run, "--plan"]) == 0
    out = capsys.readouterr().out
    assert report.verdict(plan.plan) in out.replace("\n", " ")
    assert "A100" in out


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """Restores the table, in which tests change a GPU's memory."""
    monkeypatch.setitem(GPUS, "rtx4090", GPUS["rtx4090"])


def room_for(batch_size, peak):
    """Makes a GPU with just enough memory for a compact run; returns the arguments."""
    settings = read_command_line(RUN, program="p").settings
    settings = dataclasses.replace(settings, batch_size=batch_size, host_state="compact")
    step = planned_step(settings, folder_of_config(settings.model), None)
    plan = library.plan(*step, host_state="compact").with_peak(peak)
    memory = int(plan.device_bytes / 0.95) + 1
    GPUS["rtx4090"] = dataclasses.replace(GPUS["rtx4090"], memory=memory)
    host = (plan.host_bytes + HOST_RESERVE + 1) / 1e9  # plus room for rounding
    return ["--device", "rtx4090", "--host-memory", repr(host)]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_lists_commands_that_do(with_compiler, monkeypatch, capsys):
    run = [*RUN, "--batch-size=16"]
    room = room_for(8, peak=(8 + LAYERS) * 10**6)
    plan = planned(*run, *room)
    assert plan.plan.by == "compiler"
    assert set(plan.plan.short) == {"device", "host"}
    smaller = [{"batch_size": 8 // n, "host_state": "compact"} for n in (1, 2, 4)]
    assert [way.changes for way in plan.ways] == smaller
    assert len(with_compiler) == len(set(with_compiler))  # no step is compiled twice
    with monkeypatch.context() as patch:
        patch.setattr(planning, "plan_run", lambda *_: plan)
        assert finetune.main([*run, *room, "--plan"]) == 0
    out = capsys.readouterr().out
    commands = [
        line[2:].partition("  # device ")[0] for line in out.split("\n") if "  # dev" in line
    ]
    assert len(commands) == len(plan.ways)
    for command, way in zip(commands, plan.ways, strict=True):
        program, _, rest = command.partition(" -m train.finetune ")
        assert program.split()[-1] == "python"
        arguments = shlex.split(rest)
        assert not {x for x in arguments if x.startswith(("--plan", "--device", "--host-mem"))}
        again = planned(*arguments, *room)
        assert again.plan == way.plan
        assert not again.plan.short
    # The plan takes nearly all of the memory.
    program, _, rest = commands[0].partition(" -m train.finetune ")
    assert program == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python"
    settings = read_command_line(shlex.split(rest), program="p").settings
    assert (settings.data, settings.sequence_length, settings.remat) == ("a b", 64, True)
    assert settings.batch_size == 8
    assert settings.host_state == "compact"


def test_settings_that_save_memory_are_tried_before_smaller_batches_and_streamed_weights(
    without_compiler, monkeypatch
):
    tried, fitting = [], planned(*RUN).plan

    def only_by_layers(planner, run, *, compiles):
        tried.append((run.batch_size, run.host_state, run.remat, run.stream))
        return dataclasses.replace(fitting, host_capacity_bytes=10**12 * (run.stream == "weights"))

    monkeypatch.setattr(planning._Planner, "plan", only_by_layers)
    run = [*RUN, "--no-remat", "--batch-size", "4"]
    plan = planned(*run)
    savings = [(4, "compact", False), (4, "float32", True)]
    savings += [(batch, "compact", True) for batch in (4, 2, 1)]
    assert tried[1:] == [
        *((*saving, "none") for saving in savings),
        (4, "float32", False, "weights"),
    ]
    (way,) = plan.ways
    command = report.command_line(plan, way, run)
    settings = read_command_line(shlex.split(command)[3:], program="p").settings
    assert {name: getattr(settings, name) for name in way.changes} == dict(planning._BY_LAYERS)


def test_a_run_with_streamed_weights_is_planned(without_compiler, capsys, monkeypatch):
    run = [*RUN, "--no-scan-layers", "--stream", "weights", "--device", "rtx4090"]
    plan = planned(*run, "--optimizer", "muon")
    assert not plan.plan.short
    needs = {
        (optimizer, state): planned(
            *run, "--optimizer", optimizer, "--host-state", state, "--dtype", "bfloat16"
        ).plan
        for optimizer, state in [("adamw", "float32"), ("adamw", "compact"), ("sgd", "float32")]
    }
    # Pinned are only arrays from 64 KiB on, so all are on this model's device.
    saved = [x.checkpoint / x.parameters for x in needs.values()]
    assert saved == pytest.approx([12, 6.5, 4], rel=0.05)
    monkeypatch.setattr(planning, "plan_run", lambda *_: plan)
    assert finetune.main([*run, "--optimizer", "muon", "--plan"]) == 0
    out = capsys.readouterr().out.replace("\n", " ")
    assert report.verdict(plan.plan) in out


LIMIT = """if True:
    import sys
    from train.cli.command_line import read_command_line
    from train.plan.planning import pinned_limit
    limits = [
        pinned_limit(read_command_line([*sys.argv[1:], *more], program="p").settings)
        for more in ([], ["--mesh", "fsdp=2"], ["--layer-updates", "during_backward"])
    ]
    from jax._src import xla_bridge  # public functions start the backend (checked on jax 0.10.2)
    print(limits, list(xla_bridge._backends))
"""


@pytest.mark.slow
def test_the_limit_of_pinned_memory_is_known_before_jax_starts_a_backend():
    small = [str(QUICKSTART), "--stream", "weights", "--optimizer", "adamw", "--layers", "200"]
    run = start("-c", LIMIT, *small, "--width", "2048", "--heads", "16", "--ffn", "8192")
    # 13.4 B parameters of 14 bytes, of which "during_backward" saves the gradient's 2. A quarter
    # more is for fragmentation.
    assert assert_ends(run) == "[219, 110, 188] []\n"
