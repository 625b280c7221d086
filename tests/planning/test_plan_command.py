"""`--plan` of the script: the largest batch, ways that fit, and what is printed and written."""

import dataclasses
import json
import re
import shlex
import shutil

import matplotlib
import pytest

from tests.hf_models import FIXTURES
from train import finetune, memory, plan_report, planning
from train.command_line import read_command_line
from train.planning import folder_of_config, planned_step
from zenflow_jax import planning as library
from zenflow_jax.planning import GPUS, HOST_RESERVE, INSTALL, TEMPORARIES

pytestmark = pytest.mark.usefixtures("as_scripts_run")

QUICKSTART = FIXTURES.parent.parent / "configs" / "quickstart.toml"


@pytest.mark.parametrize(("slope", "first"), [(0.6, 2), (1.7, 500)])
def test_the_largest_batch_needs_few_compilations(slope, first):
    asked = []

    def needs(batch):
        asked.append(batch)
        return 300 + max(slope * batch * 3, 1.1 * slope * batch * 3 - 50)

    largest = planning.largest_batch(first, 2, 1000, 250, needs)
    limit = 750 / 3.3 / slope
    assert len(set(asked) - {first}) <= planning.COMPILATIONS
    assert 0.95 * limit - 2 <= largest <= limit
    assert largest % 2 == 0
    assert planning.largest_batch(4, 2, 1000, 900, lambda _: 2000) is None, "weights are too many"
    assert planning.largest_batch(4, 2, 1000, 1100, None) is None, "nothing is compiled"


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setattr(library, "has_compiler", lambda: False)


@pytest.fixture
def with_compiler(monkeypatch):
    """A compiler by which each example takes 1 MB, or 2 without remat; scanned 10 MB more.

    A layer takes 1 MB, but deep models 5 MB less than few layers say. Returns what was compiled.
    """
    compiled = []

    def compiled_peak(run, origin, mesh, layers):
        compiled.append((run.optimizer, run.batch_size, layers))
        each = 1 if run.remat else 2
        deep = layers - 5 * (layers > 8)
        return 10**6 * (each * run.batch_size + 10 * run.scan_layers + deep)

    monkeypatch.setattr(library, "has_compiler", lambda: True)
    monkeypatch.setattr(planning, "mesh_of", lambda *_, **__: None)
    monkeypatch.setattr(planning, "compiled_peak", compiled_peak)
    return compiled


def reported(tmp_path, *arguments):
    """The JSON that a run with --plan writes."""
    file = tmp_path / "plan.json"
    assert finetune.main([*arguments, "--plan", "--plan-json", str(file)]) == 0
    return json.loads(file.read_text())


@pytest.mark.slow
def test_of_a_deep_model_the_run_itself_is_compiled_and_other_optimizers_by_a_few_layers(
    tmp_path, with_compiler
):
    raw = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 12}))
    run = ["--task", "language", "--model", str(tmp_path), "--data", "x", "--batch-size", "16"]
    run += ["--remat", "--device", "h100", "--host-memory", "64", "--no-scan-layers"]
    report = reported(tmp_path, str(QUICKSTART), *run)
    of_step = ("weights", "optimizer state", TEMPORARIES)
    peaks = {k: sum(x["device"][y] for y in of_step) for k, x in report["plans"].items()}
    assert peaks == {"adamw": 28 * 10**6, "offload": 28 * 10**6, "zenflow": 23 * 10**6}
    assert {name for name, _, layers in with_compiler if layers == 12} == {"zenflow"}
    assert {layers for name, _, layers in with_compiler if name != "zenflow"} == {2, 4}
    assert len(set(with_compiler)) == len(with_compiler) <= 4 + 1 + planning.COMPILATIONS
    uploads = report["plans"]["zenflow"]["device"]["uploads"]
    limit = (0.95 * GPUS["h100"].memory - uploads) / 1e6
    assert 0.95 * limit - 7 <= report["largest_batch"] <= limit - 7


def test_the_command_plans_from_config_json_alone(tmp_path, capsys, without_compiler):
    shutil.copy(FIXTURES / "llama3" / "config.json", tmp_path)
    run = ["--task", "language", "--model", str(tmp_path), "--data", "nowhere", "--scan-layers"]
    run += ["--device", "a100", "--host-memory", "64", "--prefetch-bytes", "0"]
    report = reported(tmp_path, str(QUICKSTART), *run)
    assert report["plans"]["zenflow"]["device"]["uploads"] == 0 < report["plans"]["zenflow"]["late"]
    assert report["plans"]["zenflow"]["by"] == "shapes"
    assert list(report["plans"]) == ["adamw", "offload", "zenflow"]
    assert report["plans"]["zenflow"]["host_bytes_there"] == 64 * 10**9
    assert report["plans"]["adamw"]["host"] == {}
    assert report["largest_batch"] is None
    out = capsys.readouterr().out
    assert report["plans"]["zenflow"]["advice"] in out.replace("\n", " ")
    assert f"The largest batch depends on activations, which {INSTALL} adds." in out
    assert "A100" in out


def test_a_picture_has_amounts_on_its_bars_and_one_colour_for_each_class(
    tmp_path, monkeypatch, without_compiler
):
    plans = {}

    def plan_of_a_large_model(*arguments):
        run_plan = small(*arguments)
        for name, x in run_plan.of_optimizers.items():
            device, host = ({k: n * 1000 for k, n in y.items()} for y in (x.device, x.host))
            plans[name] = dataclasses.replace(x, device=device, host=host)
        return run_plan._replace(of_optimizers=plans)

    small, file = planning.plan_run, tmp_path / "plan.svg"
    monkeypatch.setattr(planning, "plan_run", plan_of_a_large_model)
    command = [str(QUICKSTART), "--plan", "--device", "h100", "--plan-picture", str(file)]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert finetune.main(command) == 0
    picture = file.read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    totals = [x.device_bytes for x in plans.values()] + [x.host_bytes for x in plans.values()]
    for amount in (plans["adamw"].device["weights"], *filter(None, totals)):
        assert f"{amount / 1e9:.1f}" in texts
    classes = {"weights", "optimizer state, masters", "mail, sums", "uploads, hand-over", "a save"}
    assert classes == classes.intersection(texts)
    kinds = [kind for parts in plan_report.CLASSES.values() for kind in parts]
    assert sorted(kinds) == sorted({*plan_report.ON_DEVICE, *plan_report.ON_HOST})
    # No gradients and activations, which only a compiler knows: theirs is green.
    colours = set(re.findall(r"fill: (#[0-9a-f]{6})", picture)) - {"#ffffff"}
    assert colours == {"#1f77b4", "#ff7f0e", "#d62728", "#9467bd", "#8c564b"}


LAYERS = json.loads((FIXTURES / "llama3" / "config.json").read_text())["num_hidden_layers"]
RUN = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
RUN += ["--data", "a b", "--sequence-length", "64", "--remat", "--scan-layers"]


def room_for(monkeypatch, batch_size, peak=None):
    """Makes a GPU with just enough memory for a compact run that is not scanned; its arguments."""
    settings = read_command_line([*RUN, "--no-scan-layers"], program="p").settings
    settings = dataclasses.replace(settings, batch_size=batch_size, host_state="compact")
    planned = planned_step(settings, folder_of_config(settings.model), None)
    plan = library.plan(*planned, host_state="compact")
    if peak is not None:
        plan = plan.with_peak(peak)
    gpu = dataclasses.replace(GPUS["rtx4090"], memory=int(plan.device_bytes / 0.95) + 1)
    monkeypatch.setitem(GPUS, "rtx4090", gpu)
    host = (plan.host_bytes + HOST_RESERVE + 1) / 1e9  # and what rounding may take
    return ["--device", "rtx4090", "--host-memory", repr(host)]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_says_which_commands_do(
    monkeypatch, with_compiler, tmp_path, capsys
):
    room = room_for(monkeypatch, 8, peak=(8 + LAYERS) * 10**6)
    report = reported(tmp_path, *RUN, "--batch-size=32", *room)
    plan = report["plans"]["zenflow"]
    assert plan["by"] == "compiler"
    assert "the device lacks" in plan["advice"]
    assert "the host lacks" in plan["advice"]
    commands = [way["command"] for way in report["what_fits"]]
    assert 1 <= len(commands) <= 3
    out = capsys.readouterr().out
    for command in commands:
        assert f"  {command}  # device " in out
        program, _, rest = command.partition(" -m train.finetune ")
        assert program.split()[-1] == "python"
        arguments = shlex.split(rest)
        assert not {x for x in arguments if x.startswith(("--plan", "--device", "--host-mem"))}
        again = reported(tmp_path, *arguments, *room)
        assert again["plans"]["zenflow"]["fits"]
        assert again["what_fits"] == []
    # It takes nearly all of the memory.
    program, _, rest = commands[0].partition(" -m train.finetune ")
    assert program == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python"
    settings = read_command_line(shlex.split(rest), program="p").settings
    assert (settings.data, settings.sequence_length, settings.remat) == ("a b", 64, True)
    assert settings.batch_size == 8
    assert (settings.host_state, settings.scan_layers) == ("compact", False)


@pytest.mark.slow
def test_where_the_device_has_no_room_for_the_weights_they_may_lie_in_host_memory(
    monkeypatch, tmp_path, without_compiler
):
    hosted = ["--stream", "weights", "--update-interval=1"]
    settings = read_command_line([*RUN, *hosted], program="p").settings
    plan = library.plan(*planned_step(settings, folder_of_config(settings.model), None))
    memory = int(plan.device_bytes / 0.95) + 1
    monkeypatch.setitem(GPUS, "rtx4090", dataclasses.replace(GPUS["rtx4090"], memory=memory))
    room = ["--device", "rtx4090", "--host-memory", "64"]
    report = reported(tmp_path, *RUN[:-1], *room)
    assert not report["plans"]["zenflow"]["fits"]
    (way, *_) = report["what_fits"]
    assert way["command"].endswith("--stream weights --scan-layers --update-interval 1")
    assert way["device"] == plan.device_bytes


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ([], {"prefetch_bytes": 0}),
        ([], {"stream": "weights", "update_interval": 1, "staleness": 0}),
        (["--stream=weights", "--update-interval=1"], {"staleness": 0}),
    ],
)
def test_one_change_is_advised_with_what_it_needs_and_none_that_cannot_be(given, needed):
    asked = []

    def memory_of(run):
        asked.append(run)
        return planning.Memory(0, 0, fits=vars(run).items() >= needed.items())

    settings = read_command_line([*RUN, *given], program="p").settings
    (way, *_) = planning.ways_that_fit(settings, settings.batch_size, memory_of)
    assert way.changes == needed
    hosted = [run for run in asked if run.stream == "weights"]
    assert hosted
    assert all(run.scan_layers and run.prefetch_bytes is None for run in hosted)
    assert not any(run.staleness == 0 for run in asked if run not in hosted)


def test_what_a_deepspeed_config_says_is_not_advised_to_be_changed(
    monkeypatch, with_compiler, tmp_path, capsys
):
    room = room_for(monkeypatch, 8, peak=(8 + LAYERS) * 10**6)
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 32}))
    run = [*RUN, "--batch-size=32", "--deepspeed", str(config), "--plan"]
    assert finetune.main([*run, *room]) == 0
    assert "Nor does it with a smaller batch" in capsys.readouterr().out


def test_a_run_that_the_host_cannot_hold_is_refused_before_data_are_looked_at(monkeypatch, capsys):
    run = [str(QUICKSTART), "--task", "language", "--model", str(FIXTURES / "llama3")]
    run += ["--data", "nowhere"]
    monkeypatch.setattr(memory, "host_bytes", lambda: 20_000)
    assert finetune.main(run) == 2
    assert "`model`: expected one" in capsys.readouterr().err
    assert finetune.main([*run, "--force"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err  # the first that is looked at
