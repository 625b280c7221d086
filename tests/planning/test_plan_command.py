"""The script's `--plan`: one chosen way, or all that fit, and the printed command."""

import dataclasses
import functools
import re
import shlex
import shutil

import pytest

from tests.hf_models import FIXTURES
from tests.processes import assert_ends, start
from train import finetune
from train.cli.command_line import read_command_line
from train.plan import planning
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, HOST_RESERVE

pytestmark = pytest.mark.usefixtures("as_scripts_run")

QUICKSTART = FIXTURES.parent.parent / "configs" / "quickstart.toml"
RUN = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
RUN += ["--data", "a b", "--sequence-length", "64", "--device", "rtx4090"]


@functools.cache
def planner_of_run():
    """Returns a planner whose traced steps all tests share."""
    command = read_command_line(RUN, program="p")
    return planning._Planner(command.settings, command.planning)


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.setattr(planning, "has_compiler", lambda: False)
    planner = planner_of_run()
    monkeypatch.setattr(planner, "_machine", {"host_capacity_bytes": 10**12})
    monkeypatch.setattr(planning, "_Planner", lambda *_: planner)
    return planner


def planned(*arguments, chosen=False):
    """Returns the plan for a command, and the lines that were shown meanwhile."""
    command, lines = read_command_line([*RUN, *arguments], program="p"), []
    options = {"chosen": chosen, "say": lines.append}
    return planning.plan_run(command.settings, command.planning, **options), lines


def limit(monkeypatch, *, device=None, host=None):
    """Limits the device's and the host's memory to these bytes."""
    memory = GPUS["rtx4090"].memory if device is None else int(device / library.MAX_FRACTION) + 1
    monkeypatch.setitem(GPUS, "rtx4090", dataclasses.replace(GPUS["rtx4090"], memory=memory))
    if host is not None:
        machine = {"host_capacity_bytes": host + HOST_RESERVE}
        monkeypatch.setattr(planner_of_run(), "_machine", machine)


def test_ways_that_fit_come_first_by_time_and_the_command_is_that_of_the_first(
    planner, monkeypatch, capsys
):
    plan, lines = planned()
    names = [way.name for way in plan.ways]
    assert (plan.plan, names[0], sorted(names)) == (None, "A", sorted(planning.WAYS))
    assert [line.partition(":")[0] for line in lines] == list(planning.WAYS)
    times = [float(f"{way.plan.step_s:.2g}") for way in plan.ways]
    assert times == sorted(times)
    of = {way.name: way for way in plan.ways}
    assert of["B"].plan.device_bytes < of["A"].plan.device_bytes
    # A has no room, and is the fastest.
    limit(monkeypatch, device=of["B"].plan.device_bytes)
    assert finetune.main([*RUN, "--plan"]) == 0
    *_, title = capsys.readouterr().out.partition("7,440 parameters, ")
    assert title.splitlines()[0] == "8 x 64 tokens, NVIDIA GeForce RTX 4090"
    rows = [line.split("│")[1:3] for line in title.splitlines() if line.startswith("│")]
    marks = {name.strip(): mark.strip() for mark, name in rows if name.strip()}
    taken = next(name for name, mark in marks.items() if mark)
    again = planned()[0].ways
    assert (taken, list(marks)) == (again[0].name, [way.name for way in again])
    lacking = [bool(way.plan.short) for way in again]
    assert lacking == sorted(lacking)
    assert "A" in [way.name for way in again if way.plan.short]
    command = title.partition("\nRun: ")[2].splitlines()[0]
    arguments = shlex.split(command.partition(" -m train.finetune ")[2])
    assert not {"--plan", "--device"} & set(arguments)
    settings = read_command_line(arguments, program="p").settings
    assert settings == of[taken].settings


def test_a_way_is_planned_with_settings_that_save_what_it_lacks(planner, monkeypatch):
    monkeypatch.setattr(planning, "WAYS", {x: planning.WAYS[x] for x in ("C", "F")})
    of = {way.name: way for way in planned()[0].ways}
    limit(monkeypatch, host=of["C"].plan.host_bytes - 1)
    way = {way.name: way for way in planned()[0].ways}["C"]
    assert way.changes == {"optimizer": "zenflow", "host_state": "compact"}
    assert not way.plan.short
    limit(monkeypatch, device=of["F"].plan.device_bytes - 1)
    way = {way.name: way for way in planned()[0].ways}["F"]
    assert way.settings.layer_inputs == "host"
    # Only a compiler knows what recomputing activations saves.
    limit(monkeypatch, device=of["C"].plan.device_bytes - 1)
    monkeypatch.setattr(planning, "WAYS", {"C": planning.WAYS["C"]})
    assert planned()[0].ways[0].plan.short
    limit(monkeypatch, device=10**9, host=10**9)
    monkeypatch.setattr(planner, "_compiles", True)
    monkeypatch.setattr(planner, "_peak", lambda run: 10**8 if run.remat else 2 * 10**9)
    assert planned()[0].ways[0].changes == {"optimizer": "zenflow", "remat": True}


def test_other_ways_are_planned_if_the_chosen_one_does_not_fit(planner, monkeypatch):
    monkeypatch.setattr(planning, "WAYS", {"A": planning.WAYS["A"]})
    chosen = planned("--optimizer", "offload", chosen=True)[0]
    assert (chosen.plan.short, chosen.ways) == ({}, [])
    limit(monkeypatch, host=0)
    chosen = planned("--optimizer", "offload", chosen=True)[0]
    assert set(chosen.plan.short) == {"host"}
    assert [way.name for way in chosen.ways] == ["A"]


def test_the_command_plans_a_chosen_way_from_config_json_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning, "has_compiler", lambda: False)
    shutil.copy(FIXTURES / "llama3" / "config.json", tmp_path)
    run = ["--task", "language", "--model", str(tmp_path), "--data", "nowhere"]
    run += ["--device", "a100", "--host-memory", "64", "--stream", "weights", "--optimizer", "muon"]
    assert finetune.main([str(QUICKSTART), *run, "--plan"]) == 0
    out = capsys.readouterr().out
    assert "Fits with" in out
    assert "A100" in out
    assert re.search(r"available +│ +56.0 │", out)


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
