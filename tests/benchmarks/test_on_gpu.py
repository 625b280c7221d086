"""`benchmarks/on_gpu.py`: stages run on a CPU, and the report is complete whatever a stage does."""

import importlib
import json
import time

import jax
import numpy as np
import pytest

from benchmarks import machine, on_gpu
from benchmarks.gpu_stages import checks, layerwise, ways
from benchmarks.gpu_stages.notes import Notes, Stage, notes_path
from benchmarks.on_gpu import STAGES
from benchmarks.step_time_memory import trace_step
from benchmarks.step_time_model import MODELS, make_model
from benchmarks.step_time_peers import PEERS
from tests.failing_stages import failing


# In this process; the tests of failing stages start processes. Other tests cover the other stages.
def rehearsed(name, folder):
    """Returns a stage's notes after its rehearsal."""
    (target,) = (stage.target for stage in STAGES if stage.name == name)
    module, function = target.split(":")
    notes = Notes(notes_path(folder, name))
    run = getattr(importlib.import_module(module), function)
    run(Stage(name, folder, rehearse=True, until=time.monotonic() + 2000, notes=notes))
    return notes


@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
def test_a_rehearsal_runs_its_stages_on_a_cpu(tmp_path, monkeypatch):
    for table in layerwise._HOST, layerwise._VARIANTS:
        monkeypatch.delitem(table, "during_backward")  # the other rows run the same code
    layers = rehearsed("layerwise", tmp_path).data
    first, *variants = layers["ways"]
    assert variants[-1][2] == "bit-identical"
    assert first[0] == "adamw"
    assert variants[0][2].startswith("losses differ by")
    assert [row[1] for row in layers["times"]] == ["after_backward"]

    facts = rehearsed("facts", tmp_path).data
    assert list(facts["crossings"]) == ["1 MiB", "4 MiB"]
    for rates in facts["crossings"].values():
        assert float(rates["NumPy, pageable"][0]) > 0
    assert all(copy["together_s"] > 0 for copy in facts["beside"].values())
    assert set(facts["host_gb_s"]) == {"1", str(machine.cores())}

    notes = rehearsed("headline", tmp_path)
    headline = notes.data
    assert len(headline["losses"]) == len(headline["step_s"]) == 8
    assert 0 < min(headline["losses"]) <= max(headline["losses"]) < 2 * np.log(256)
    assert "25,696 parameters, trained" in notes.sections


@pytest.mark.slow
@pytest.mark.usefixtures("promotion_as_users_have_it")
def test_questions_start_at_a_number_and_continue_after_a_failure(tmp_path, monkeypatch):
    def fails(_):
        raise AssertionError("3 of 4 differ")

    first, ask = next(iter(checks.questions(rehearse=True).items()))
    monkeypatch.setattr(checks, "QUESTIONS", {"a": print, "b": fails, first: ask})
    checks.answer(tmp_path / "rows", 1, rehearse=True)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text("utf-8").splitlines()]
    assert [row.get("verdict") for row in rows] == [
        *(None, "FAILED, AssertionError: 3 of 4 differ", None, "pass")
    ]


def test_runs_with_different_results_do_not_pass():
    start, first = [np.zeros(4)] * 2, ways.End([2.0, 1.0], 1.0, "a", [np.ones(4)] * 2)
    for streams, losses, digest, samples, passes in (
        (False, [2.0, 1.0], "a", 1.0, True),
        (False, [2.0, 1.0], "b", 1.0, False),
        (True, [2.0, 1.001], "b", 1.1, True),
        (True, [2.0, 1.1], "b", 1.1, False),
        (True, [2.0, 1.0], "b", 1.3, False),
        (True, [2.0, np.nan], "b", 1.0, False),
        (True, [2.0, 1.0], "b", np.nan, False),
    ):
        end = ways.End(losses, 1.0, digest, [np.ones(4), np.full(4, samples)])
        verdict = ways.compared(end, first, start, must_be_same=not streams)
        assert verdict.startswith("FAILED") != passes, verdict


@pytest.mark.parametrize(
    "name", ["adamw", "parked", "zenflow-s4-r0.05", "zenflow-s4-r0.05-streamed"]
)
def test_each_peers_step_can_be_lowered_for_cuda(name, monkeypatch):
    # jax before 0.11.1 rejects streamed layers without it.
    monkeypatch.setattr("zenflow_jax._device.gpu_faults._DISABLED", True)
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = on_device.with_memory_kind("pinned_host")
    preset = MODELS["1b"]
    with jax.numpy_dtype_promotion("standard"):  # as for users
        model = make_model(preset.config._replace(layers=1), scan_layers=True, remat=True)
        traced, _ = trace_step(
            PEERS[name],
            model,
            preset.batch,
            preset.length,
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host),
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    leaves = "annotate_device_placement" in text
    # Gradients that leave during the step, and parked state, go to host memory.
    sends = name != "adamw"
    assert leaves == sends


def test_a_failing_stage_loses_only_its_own_unfinished_results(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "GRACE_S", 0.5)
    monkeypatch.setenv("REPORT", str(tmp_path / "report.md"))
    stages = [
        *failing("raises", "aborts"),
        *failing("hangs", seconds=2.0),
        *failing("raises", least=1e6),
        *failing("ends_well"),
    ]
    outcomes = on_gpu.run(stages, tmp_path, seconds=100, rehearse=True, command="a test")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    saved = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["stages"]
    assert "A rehearsal on a CPU" in text
    assert [o.ended.splitlines()[0] for o in outcomes] == [
        "failed: ValueError: expected luck, got none",
        "killed by SIGABRT",
        "killed: it had not finished in time",
        f"not run: {outcomes[3].ended[9:].split()[0]} s of the budget were left, but it needs "
        "1000000",
        "done",
    ]
    assert [o.well for o in outcomes] == [False, False, False, False, True]
    for stage, data in zip(stages[:3], saved, strict=False):
        assert f"the result of {stage.name}" in text
        assert data["found"] == stage.name
    # The report has each stage's last message; for an aborted stage, its position.
    assert "failing_stages.py" in saved[1]["last_lines"]
    log = (tmp_path / "log.txt").read_text(encoding="utf-8")
    assert [log.count(f"==== {stage.name}") for stage in stages] == [1] * 5


def test_without_a_gpu_the_report_says_so_once_and_no_stage_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    outcomes = on_gpu.run(
        failing("asks_for_a_gpu", "ends_well"), tmp_path, seconds=100, rehearse=False, command=""
    )
    assert "no GPU: jax" in outcomes[0].ended
    assert outcomes[1].ended == "not run: there is no GPU"
    # Old versions of jax reject streamed layers on a GPU without this flag.
    facts = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["machine"]
    needed = jax.__version_info__ < (0, 11, 1)
    assert ("--xla_disable_hlo_passes=dynamic-slice-annotator" in facts["XLA_FLAGS"]) == needed
