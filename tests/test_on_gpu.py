"""`benchmarks/on_gpu.py`: every stage runs through on a CPU, and whatever a stage does the report
is whole.
"""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import on_gpu
from benchmarks.gpu_stages import headline, machine, plan, programs, rivals, timelines
from benchmarks.gpu_stages.notes import Notes, Stage
from benchmarks.gpu_stages.plan import Machine
from benchmarks.on_gpu import STAGES
from benchmarks.step_time_model import llama, make_model
from benchmarks.step_time_peers import PEERS
from tests.failing_stages import failing
from zenflow_jax._exchange import pinned

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Stages share what is compiled, as they do in one command, and count it: nobody else's."""
    return tmp_path_factory.mktemp("compiled")


def run(stages, out, *, seconds=100.0):
    outcomes = on_gpu.run(stages, out, seconds=seconds, rehearse=True, command="a test")
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return outcomes, (out / "report.md").read_text(encoding="utf-8"), data


# --- stages ---------------------------------------------------------------------------------


def rehearse(name, out, cache):
    """Runs one stage as the command does; what it found, by title."""
    (stage,) = [stage for stage in STAGES if stage.name == name]
    (outcome,) = on_gpu.run([stage], out, seconds=600, rehearse=True, command="a test", cache=cache)
    text = (out / "report.md").read_text(encoding="utf-8")
    assert outcome.ended == "done", text + (out / "log.txt").read_text(encoding="utf-8")
    assert "A rehearsal on a CPU" in text
    (data,) = json.loads((out / "report.json").read_text(encoding="utf-8"))["stages"]
    return text, data


@pytest.mark.slow
def test_the_stage_of_facts_measures_every_part_of_the_machine(tmp_path, cache):
    text, data = rehearse("facts", tmp_path, cache)
    assert "| NumPy, pageable |" in text
    for copy in data["beside"].values():
        assert 0 < copy["together_s"]
        assert 0 < copy["after_s"]
    assert data["matmul_tflop_s"] > 0
    assert set(data["host_gb_s"]) == {"1", str(machine.cores())}


@pytest.mark.slow
def test_the_stage_of_correctness_asks_everything_and_all_of_it_is_so(tmp_path, cache):
    _, data = rehearse("correct", tmp_path, cache)
    assert all(row["verdict"] == "pass" for row in data["rows"])
    asked = " ".join(row["what"] for row in data["rows"])
    for what in ("optax.adamw", "S = 4", "donated: nnx.jit", "resume", "hand-over", "NaN"):
        assert what in asked


@pytest.mark.slow
def test_the_stage_of_step_times_compares_every_part_and_compiles_all_of_it_ahead(tmp_path, cache):
    text, data = rehearse("step_time", tmp_path, cache)
    parts = plan.step_time(Machine(0, 0), rehearse=True)
    assert set(data["parts"]) == {part.title for part in parts}
    for part in parts:
        assert set(data["parts"][part.title]) == set(part.peers)
        assert f"### {part.title}" in text
    # What was compiled ahead is what the first turns then run.
    assert data["compiled"] > 0
    assert data["compiled_late"] == 0
    assert (tmp_path / "step_time.png").stat().st_size > 0


@pytest.mark.slow
def test_the_stage_of_timelines_draws_the_default_and_says_why_there_is_no_worst(tmp_path, cache):
    text, data = rehearse("timeline", tmp_path, cache)
    assert data["timeline"]["peer"] == "zenflow-s4-r0.05"
    assert (tmp_path / "timeline.png").stat().st_size > 0
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    steps = [e for e in trace["traceEvents"] if e["name"].startswith("step ")]
    assert len(steps) >= 12
    assert "Not run: `step_time` has found no peer behind `adamw`." in text


def test_the_worst_pair_is_the_engine_s_peer_with_the_largest_idle_share():
    parts = plan.step_time(Machine(0, 0), rehearse=True)
    first, second = (part.title for part in parts[:2])
    figures = {
        first: {"adamw": {"idle": 0.0}, "parked": {"idle": 0.9}, "offload": {"idle": 0.5}},
        second: {"zenflow-s4-r0.05-device": {"idle": 0.6}, "offload": {"idle": None}},
        "of another plan": {"offload": {"idle": 0.8}},
    }
    worst = timelines._find_worst(figures, parts)
    assert (worst.part.title, worst.peer, worst.idle) == (second, "zenflow-s4-r0.05-device", 0.6)
    assert timelines._find_worst({}, parts) is None


@pytest.mark.slow
def test_the_stage_of_the_headline_trains_eight_steps_on_real_text(tmp_path, cache):
    text, data = rehearse("headline", tmp_path, cache)
    assert len(data["losses"]) == len(data["step_s"]) == 8
    assert 0 < min(data["losses"]) <= max(data["losses"]) < 2 * np.log(256)
    assert data["host_peak_bytes"] > 0
    assert data["adamw_fits"]  # a CPU refuses nothing
    assert "25,696 parameters, trained" in text


def test_a_headline_that_does_not_fit_is_tried_once_more_in_a_smaller_size(tmp_path, monkeypatch):
    tried = []

    def train(stage, device, chosen, model):
        tried.append(chosen.parameters)
        raise RuntimeError("step failed") from RuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(headline, "_train", train)
    monkeypatch.setattr(headline, "require_gpu", lambda stage: None)
    monkeypatch.setattr(headline, "usable_bytes", lambda device: H100.device_bytes)
    monkeypatch.setattr(machine, "host_bytes", lambda: H100.host_bytes)
    notes = Notes(tmp_path / "headline.notes.json")
    stage = Stage("headline", tmp_path, False, time.monotonic() + 1000, notes)
    with pytest.raises(RuntimeError, match="step failed"):
        headline.run(stage)
    assert len(tried) == 2
    assert tried[1] < 0.9 * tried[0]
    assert "did not fit" in " ".join(notes.sections)


@pytest.mark.slow
def test_the_stage_of_rivals_says_of_each_whether_it_ran_and_if_not_why(
    tmp_path, cache, monkeypatch
):
    text, data = rehearse("rivals", tmp_path, cache)
    assert list(data["rivals"]) == [rival.name for rival in rivals.RIVALS]
    for rival in rivals.RIVALS:
        said = data["rivals"][rival.name]["said"]
        absent = machine.missing(rival.needs)
        assert said == f"not run: {', '.join(absent)} not installed" if absent else said == "ran"
        assert f"| {rival.name} |" in text


# --- what is planned ------------------------------------------------------------------------

GIB = 2**30
H100 = programs.described("h100", 125)
H200 = programs.described("h200", 125)


def test_shapes_have_the_parameters_that_are_counted():
    for shape in plan.SHAPES[:2]:
        config = llama(1024, layers=2, **shape.sizes)
        assert (
            plan.parameters(config) == make_model(config, scan_layers=True, remat=True).parameters
        )


def test_the_headline_is_the_largest_shape_that_fits_into_both_memories():
    best = plan.headline(H100)
    device = plan.device_need(best.peer, scan=True, prefetch=False)
    host = plan.host_need(best.peer)
    layer = plan.parameters(best.config) - plan.parameters(
        best.config._replace(layers=best.config.layers - 1)
    )
    assert best.parameters * device <= H100.device_bytes
    assert best.parameters * host <= H100.host_bytes - plan.HOST_RESERVE
    larger = best.parameters + layer
    assert (
        larger * device > H100.device_bytes
        or larger * host > H100.host_bytes - plan.HOST_RESERVE
        or best.config.layers == 32
    )
    # More than AdamW trains there, and more than its state alone would leave room for.
    assert best.beats_adamw
    assert best.parameters * plan.ADAMW_STATE_BYTES > H100.device_bytes


def test_where_host_memory_is_too_little_to_beat_adamw_the_headline_says_so():
    assert not plan.headline(H200).beats_adamw
    assert plan.headline(H200._replace(host_bytes=256 * GIB)).beats_adamw
    assert plan.headline(Machine(GIB, GIB)) is None


def test_one_comparison_is_of_a_model_whose_adamw_state_does_not_fit_if_any_peer_has_room():
    _, config = plan.beyond_adamw(H100)
    assert plan.parameters(config) * plan.ADAMW_STATE_BYTES > H100.device_bytes
    (part,) = [part for part in plan.step_time(H100) if part.config == config]
    assert part.peers == ("adamw", "zenflow-s4-r0.05-device")
    # An H200 has more memory than a host of this size can keep up with.
    assert plan.beyond_adamw(H200) is None
    assert plan.beyond_adamw(H200._replace(host_bytes=512 * GIB)) is not None


@pytest.mark.parametrize("machine", [H100, H200, H200._replace(host_bytes=1024 * GIB)])
def test_peers_that_are_in_memory_together_have_room_there(machine):
    for part in plan.step_time(machine):
        n = plan.parameters(part.config)
        device = sum(plan.device_need(p, scan=part.scan, prefetch=True) for p in part.peers)
        host = sum(plan.host_need(p) for p in part.peers)
        room = machine.host_bytes - plan.HOST_RESERVE
        assert part.together == (n * device <= machine.device_bytes and n * host <= room)
    titles = [part.title for part in plan.step_time(machine)]
    assert len(set(titles)) == len(titles)


def test_what_a_peer_needs_in_host_memory_is_what_the_engine_keeps():
    """`plan.py` counts the mails that `pinned.buffers` allows."""
    for name, mails in plan._MAILS.items():
        params = jax.device_put({"w": jnp.ones((8, 4), jnp.bfloat16)}, jax.devices()[0])
        state = PEERS[name].make().init(params)
        assert pinned.buffers(state) == mails, name


def _small(program):
    return program._replace(config=program.config._replace(layers=1))


def _once(machines):
    """Each program of the stages once, of one layer: all others are the same again."""
    found = {(p.peer, p.scan): _small(p) for m in machines for p in programs.programs(m)}
    return list(found.values())


_made = functools.cache(make_model)  # most peers train the same


@pytest.mark.parametrize("program", _once([H100, H200]), ids=lambda p: f"{p.peer}-{p.scan}")
def test_every_step_of_the_stages_lowers_for_cuda(program, monkeypatch):
    monkeypatch.setattr(programs, "make_model", _made)
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        text = programs.lower_for_cuda(program)
    leaves = "annotate_device_placement" in text
    # Gradients that leave in the step, and state that is parked, go to host memory.
    sends = program.peer in ("zenflow-s4-r0.05", "offload", "offload-x4", "parked")
    assert leaves == sends


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_every_step_of_the_stages_compiles_where_cuda_s_compiler_is(gpu):
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if len(machine.missing(plugins)) == len(plugins):
        pytest.skip(f"needs jax's plugin for CUDA, got none of {', '.join(plugins)}")
    command = [sys.executable, "-m", "benchmarks.gpu_stages.programs", "--gpu", gpu]
    environment = {"JAX_PLATFORMS": "cuda", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    done = subprocess.run(
        [*command, "--layers", "1"],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(programs.programs(H100 if gpu == "h100" else H200))


# --- the command ----------------------------------------------------------------------------


def test_a_stage_that_goes_wrong_loses_only_itself_and_what_it_had_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE_S", 0.5)
    stages = [
        *failing("raises", "aborts", "has_no_memory"),
        *failing("hangs", seconds=1.0),
        *failing("ends_well"),
    ]
    outcomes, text, data = run(stages, tmp_path)
    assert [o.ended.splitlines()[0] for o in outcomes] == [
        "failed: ValueError: expected luck, got none",
        "its process died of SIGABRT",
        "failed: RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte",
        "killed: it had not ended after 1 s",
        "done",
    ]
    assert [o.well for o in outcomes] == [False, False, False, False, True]
    for stage, found in zip(stages, data["stages"], strict=True):
        assert f"what {stage.name} found" in text
        assert found["found"] == stage.name
    # What a stage said last is in the report: of the one that aborted, where it was.
    assert "failing_stages.py" in data["stages"][1]["last_lines"]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert [f"==== {stage.name}" in log for stage in stages] == [True] * 5


def test_a_stage_that_the_budget_does_not_allow_is_left_out_and_the_report_says_so(tmp_path):
    stages = [*failing("raises", least=1e6), *failing("ends_well")]
    outcomes, text, _ = run(stages, tmp_path)
    assert outcomes[0].ended.startswith("not run:")
    assert outcomes[0].ended.endswith("were left and it needs 1000000")
    assert outcomes[1].well
    assert outcomes[0].ended in text


def test_a_stage_alone_may_have_the_time_that_the_others_would_take(tmp_path):
    out = tmp_path
    run(failing("ends_well", seconds=10.0), out, seconds=100.0)
    alone = json.loads((out / "report.json").read_text(encoding="utf-8"))["stages"][0][
        "seconds_had"
    ]
    run(failing("ends_well", "raises", "aborts", seconds=80.0), out, seconds=100.0)
    among = json.loads((out / "report.json").read_text(encoding="utf-8"))["stages"][0][
        "seconds_had"
    ]
    assert alone > 80
    assert among <= 80


def test_the_report_has_what_a_stage_found_while_the_stage_still_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("REPORT", str(tmp_path / "report.md"))
    (outcome,), _, _ = run(failing("waits_for_the_report"), tmp_path)
    assert outcome.ended == "done"


@pytest.mark.slow
def test_a_command_that_is_ended_ends_its_stage_and_leaves_the_report(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from benchmarks import on_gpu\n"
        "from tests.failing_stages import failing\n"
        "with on_gpu._ends_on_signals():\n"
        f"    on_gpu.run(failing('hangs', 'ends_well'), Path({str(tmp_path)!r}), seconds=100,\n"
        "        rehearse=True, command='a test')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    try:
        # The report is written when the stage has found something, and again at the end.
        report, deadline = tmp_path / "report.md", time.monotonic() + 60
        while not (report.exists() and "what hangs found" in report.read_text(encoding="utf-8")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (pid,) = (int(p.read_text(encoding="ascii")) for p in tmp_path.glob("*/notes/pid"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    text = report.read_text(encoding="utf-8")
    assert "**cut off while it ran**" in text
    assert "| ends_well | not run yet |" in text
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_pictures_are_given_back_unless_they_are_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "MOST_BYTES", 1000)
    (tmp_path / "gone.png").write_bytes(b"of a former command")
    pictures = ("small.png", "large.png", "gone.png")
    _, text, _ = run(failing("leaves_pictures", pictures=pictures), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "log.txt",
        "report.json",
        "report.md",
        "small.png",
    ]
    assert "1,001 bytes, more than 1,000: left out" in text


def test_a_command_gives_back_eight_files_at_most():
    assert 3 + sum(len(stage.pictures) for stage in STAGES) <= 8


def test_without_a_gpu_it_says_so_once_and_runs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    outcomes = on_gpu.run(
        failing("asks_for_a_gpu", "ends_well"), tmp_path, seconds=100, rehearse=False, command=""
    )
    assert "expected a GPU, got jax" in outcomes[0].ended
    assert outcomes[1].ended == "not run: there is no GPU"


def test_what_is_missing_is_said_at_once_in_one_line(monkeypatch, tmp_path):
    absent = {"numpy": "numpy", "no_such_module.part": "no-such-package", "nor_this": "nor-this"}
    monkeypatch.setattr(machine, "NEEDED", absent)
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ended:
        on_gpu.main()
    assert ended.value.code == (
        "expected what the stages import, got no no-such-package nor-this: "
        "pip install no-such-package nor-this"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_starts_no_jax_and_the_stages_need_nothing_that_a_rented_gpu_may_lack():
    script = (
        "import sys, importlib\n"
        "from benchmarks import on_gpu\n"
        "assert 'jax' not in sys.modules\n"
        "for name in ('grain', 'tyro', 'tensorboardX', 'beartype', 'safetensors',\n"
        "             'tokenizers', 'pytest', 'hypothesis', 'torch', 'deepspeed'):\n"
        "    sys.modules[name] = None\n"
        "for stage in on_gpu.STAGES:\n"
        "    importlib.import_module(stage.target.split(':')[0])\n"
        "importlib.import_module('benchmarks.gpu_stages.checks')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_pinned_memory_is_bounded_by_the_host_unless_the_user_has_set_it(monkeypatch, tmp_path):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    monkeypatch.setattr(machine, "host_bytes", lambda: 128 * 2**30)
    environment = on_gpu._environment(tmp_path, rehearse=False)
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "96"
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "40")
    environment = on_gpu._environment(tmp_path, rehearse=False)
    assert environment["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == "40"


def test_notes_are_whole_however_often_they_are_written(tmp_path):
    notes = Notes(tmp_path / "a.notes.json")
    notes.put("One", "1")
    notes.keep(x=1)
    notes.put("Two", "2")
    notes.put("One", "changed")
    again = Notes(tmp_path / "a.notes.json")
    assert again.sections == {"One": "changed", "Two": "2"}
    assert again.data == {"x": 1}


def test_a_report_goes_to_no_folder_with_other_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.txt").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--rehearse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "expected --out with a new folder or one of a report" in capsys.readouterr().err
    assert (tmp_path / "log.txt").read_text() == "precious"
