"""`benchmarks/on_gpu.py`: every stage runs through on a CPU, and whatever a stage does the report
is whole.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.gpu_stages import machine
from benchmarks.gpu_stages.notes import Notes
from benchmarks.on_gpu import STAGES, StagePlan

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Stages share what is compiled, as they do in one command."""
    return tmp_path_factory.mktemp("compiled")


def failing(*names, seconds=20.0, least=0.0, pictures=()):
    return [
        StagePlan(name, "how?", f"tests.failing_stages:{name}", seconds, least, pictures)
        for name in names
    ]


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


def test_the_stage_of_facts_measures_every_part_of_the_machine(tmp_path, cache):
    text, data = rehearse("facts", tmp_path, cache)
    assert "| NumPy, pageable |" in text
    for copy in data["beside"].values():
        assert 0 < copy["together_s"]
        assert 0 < copy["after_s"]
    assert data["matmul_tflop_s"] > 0
    assert set(data["host_gb_s"]) == {"1", str(machine.cores())}


def test_the_stage_of_correctness_asks_everything_and_all_of_it_is_so(tmp_path, cache):
    _, data = rehearse("correct", tmp_path, cache)
    assert all(row["verdict"] == "pass" for row in data["rows"])
    asked = " ".join(row["what"] for row in data["rows"])
    for what in ("optax.adamw", "S = 4", "donated: nnx.jit", "resume", "hand-over", "NaN"):
        assert what in asked


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


def test_the_report_has_what_a_stage_found_while_the_stage_still_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("REPORT", str(tmp_path / "report.md"))
    (outcome,), _, _ = run(failing("waits_for_the_report"), tmp_path)
    assert outcome.ended == "done"


def test_a_command_that_is_ended_ends_its_stage_and_leaves_the_report(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from benchmarks import on_gpu\n"
        "from tests.test_on_gpu import failing\n"
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


def test_the_command_starts_no_jax_and_the_stages_need_nothing_that_a_rented_gpu_may_lack():
    script = (
        "import sys, importlib\n"
        "from benchmarks import on_gpu\n"
        "assert 'jax' not in sys.modules\n"
        "for name in ('grain', 'tyro', 'tensorboardX', 'beartype', 'safetensors', 'sklearn',\n"
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
