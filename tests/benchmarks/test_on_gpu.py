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
from benchmarks.gpu_stages import checks, headline, machine, programs, sizes
from benchmarks.gpu_stages.notes import Notes, Stage
from benchmarks.gpu_stages.sizes import Machine
from benchmarks.on_gpu import PICTURE, STAGES
from benchmarks.step_time_model import llama, make_model
from benchmarks.step_time_peers import PEERS
from tests.failing_stages import failing
from zenflow_jax._exchange import pinned

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Stages share what is compiled, as they do in one command, and count it: nobody else's."""
    return tmp_path_factory.mktemp("compiled")


def run(stages, out, *, seconds=100.0):
    outcomes = on_gpu.run(stages, out, seconds=seconds, rehearse=True, command="a test")
    data = json.loads((out / "report.json").read_text(encoding="utf-8"))
    return outcomes, (out / "report.md").read_text(encoding="utf-8"), data["stages"]


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
    assert all(copy["together_s"] > 0 for copy in data["beside"].values())
    assert data["matmul_tflop_s"] > 0
    assert set(data["host_gb_s"]) == {"1", str(machine.cores())}


@pytest.mark.slow
def test_the_stage_of_correctness_asks_everything_and_all_of_it_is_so(tmp_path, cache):
    _, data = rehearse("correct", tmp_path, cache)
    assert data["rows"] == dict.fromkeys(checks.QUESTIONS, "pass")


@pytest.mark.slow
def test_the_stage_of_step_times_compares_every_part_and_compiles_all_of_it_ahead(tmp_path, cache):
    text, data = rehearse("step_time", tmp_path, cache)
    parts = sizes.step_time(Machine(0, 0), rehearse=True)
    assert set(data["parts"]) == {part.title for part in parts}
    for part in parts:
        assert set(data["parts"][part.title]) == set(part.peers)
        assert f"### {part.title}" in text
    # What was compiled ahead is what the first turns then run.
    assert data["compiled"] > 0
    assert data["compiled_late"] == 0
    assert (tmp_path / PICTURE).stat().st_size > 0


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


# --- sizes ----------------------------------------------------------------------------------

H100 = programs.described("h100", 125)
H200 = programs.described("h200", 125)
GIB = 2**30


def test_the_headline_is_the_largest_shape_that_fits_into_both_memories():
    best = sizes.headline(H100)
    config = llama(1024, layers=2, **sizes.SHAPES[0].sizes)
    made = make_model(config, scan_layers=True, remat=True)
    assert sizes.parameters(config) == made.parameters
    device = sizes.device_need(best.peer, scan=True, prefetch=False)
    host, room = sizes.host_need(best.peer), H100.host_bytes - sizes.HOST_RESERVE
    assert best.parameters * device <= H100.device_bytes
    assert best.parameters * host <= room
    larger = sizes.parameters(best.config._replace(layers=best.config.layers + 1))
    assert larger * device > H100.device_bytes or larger * host > room
    # More than AdamW trains there, and more than its state alone would leave room for.
    assert best.beats_adamw
    assert best.parameters * sizes.ADAMW_STATE_BYTES > H100.device_bytes


def test_where_host_memory_is_too_little_to_beat_adamw_the_headline_says_so():
    assert not sizes.headline(H200).beats_adamw
    assert sizes.headline(H200._replace(host_bytes=256 * GIB)).beats_adamw
    assert sizes.headline(Machine(GIB, GIB)) is None


def test_one_comparison_is_of_a_model_whose_adamw_state_does_not_fit_if_any_peer_has_room():
    _, config = sizes.beyond_adamw(H100)
    assert sizes.parameters(config) * sizes.ADAMW_STATE_BYTES > H100.device_bytes
    parts = sizes.step_time(H100)
    (part,) = [part for part in parts if part.config == config]
    assert part.peers == ("adamw", "zenflow-s4-r0.05-device")
    assert [x.together for x in parts] == [True, True, False]
    # An H200 has more memory than a host of this size can keep up with.
    assert sizes.beyond_adamw(H200) is None


def test_what_a_peer_needs_in_host_memory_is_what_the_engine_keeps():
    """`sizes.py` counts the mails that `pinned.buffers` allows."""
    for name, mails in sizes._MAILS.items():
        params = jax.device_put({"w": jnp.ones((8, 4), jnp.bfloat16)}, jax.devices()[0])
        state = PEERS[name].make().init(params)
        assert pinned.buffers(state) == mails, name


def _once(machines):
    """Each program of the stages once, of one layer: all others are the same again."""
    one_layer = {
        (p.peer, p.scan): p._replace(config=p.config._replace(layers=1))
        for m in machines
        for p in programs.programs(m)
    }
    return list(one_layer.values())


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


# --- the command ----------------------------------------------------------------------------


def test_a_stage_that_goes_wrong_loses_only_itself_and_what_it_had_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE_S", 0.5)
    monkeypatch.setenv("REPORT", str(tmp_path / "report.md"))
    stages = [
        *failing("raises", "aborts"),
        *failing("hangs", seconds=2.0),
        *failing("raises", least=1e6),
        *failing("ends_well"),
    ]
    outcomes, text, found = run(stages, tmp_path)
    assert [o.ended.splitlines()[0] for o in outcomes] == [
        "failed: ValueError: expected luck, got none",
        "died of SIGABRT",
        "killed: it had not ended in time",
        f"not run: {outcomes[3].ended[9:].split()[0]} s of the budget were left and it needs "
        "1000000",
        "done",
    ]
    assert [o.well for o in outcomes] == [False, False, False, False, True]
    for stage, data in zip(stages[:3], found, strict=False):
        assert f"what {stage.name} found" in text
        assert data["found"] == stage.name
    # What a stage said last is in the report: of the one that aborted, where it was.
    assert "failing_stages.py" in found[1]["last_lines"]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert [log.count(f"==== {stage.name}") for stage in stages] == [1] * 5
    assert (tmp_path / PICTURE).exists()


@pytest.mark.parametrize(("seconds", "more"), [(10.0, True), (80.0, False)])
def test_a_stage_may_have_the_time_that_no_other_takes(tmp_path, seconds, more):
    others = [] if more else failing("raises", "aborts", seconds=seconds)
    stages = [*failing("ends_well", seconds=seconds), *others]
    _, _, found = run(stages, tmp_path)
    assert (found[0]["seconds_had"] > 80) == more


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
    report, noted = tmp_path / "report.md", tmp_path / "pid"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "REPORT": str(report)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (noted.exists() and noted.read_text(encoding="ascii")):
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    text = report.read_text(encoding="utf-8")
    assert "**cut off while it ran**" in text
    assert "| ends_well | not run yet |" in text
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text(encoding="ascii")), 0)


def test_without_a_gpu_it_says_so_once_and_runs_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    outcomes = on_gpu.run(
        failing("asks_for_a_gpu", "ends_well"), tmp_path, seconds=100, rehearse=False, command=""
    )
    assert "expected a GPU, got jax" in outcomes[0].ended
    assert outcomes[1].ended == "not run: there is no GPU"


def test_packages_that_are_missing_are_named_before_anything_is_written(monkeypatch, tmp_path):
    absent = {"numpy": "numpy", "no_such_module.part": "no-such-package"}
    monkeypatch.setattr(machine, "NEEDED", absent)
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="got no no-such-package: pip install no-such-package"):
        on_gpu.main()
    assert not (tmp_path / "out").exists()


def test_a_report_goes_to_no_folder_with_other_files(tmp_path, monkeypatch, capsys):
    (tmp_path / "log.txt").write_text("precious")
    monkeypatch.setattr(sys, "argv", ["on_gpu", "--rehearse", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        on_gpu.main()
    assert "expected --out with a new folder or one of a report" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_starts_no_jax_and_the_stages_need_nothing_that_a_rented_gpu_may_lack():
    script = (
        "import sys, importlib\n"
        "from benchmarks import on_gpu\n"
        "assert 'jax' not in sys.modules\n"
        "for name in ('grain', 'tyro', 'beartype', 'safetensors',\n"
        "             'tokenizers', 'pytest', 'hypothesis', 'torch', 'deepspeed'):\n"
        "    sys.modules[name] = None\n"
        "for stage in on_gpu.STAGES:\n"
        "    importlib.import_module(stage.target.split(':')[0])\n"
        "importlib.import_module('benchmarks.gpu_stages.checks')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_pinned_memory_is_bounded_by_the_host_unless_the_user_has_set_it(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "host_bytes", lambda: 128 * GIB)
    limit = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
    monkeypatch.delenv(limit, raising=False)
    assert on_gpu._environment(tmp_path, rehearse=False)[limit] == "96"
    monkeypatch.setenv(limit, "40")
    assert on_gpu._environment(tmp_path, rehearse=False)[limit] == "40"
