"""`benchmarks/on_gpu.py`: functions run on a CPU, and the report keeps all results."""

import numpy as np
import pytest

from benchmarks import on_gpu
from benchmarks.gpu_figures import differences

STREAMED = "zenflow-s4-r0.05-streamed"


# The part of `memory` with streamed layers compiles for minutes; `step_time` has a smaller one.
@pytest.mark.slow
@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize(("number", "parts"), [(0, 7), (1, 2), (2, 1), (3, 2)])
def test_a_rehearsal_of_each_function_succeeds(number, parts, tmp_path):
    lines = ["steps of NaN | pass |", "| trained, loss", f"{STREAMED} | 1 turns |", "| True |"]
    function = on_gpu.FUNCTIONS[number]
    for part in range(parts):
        on_gpu.answer(function, part, 3600, tmp_path, rehearse=True)
    ends = on_gpu.ends(tmp_path / "results.jsonl", function.name)
    assert [end for _, end, _ in ends[:parts]] == ["done"] * parts
    on_gpu.write_report(tmp_path, {"GPU": "none", "date": "today", "rehearsal": True})
    assert lines[number] in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_different_weights_and_losses_are_noticed():
    start, end, half = ([np.full(4, x)] for x in (0, 1, 0.5))
    expected = [2.0, 1.0], end
    assert differences(expected, expected, start) == (0, 0)
    assert differences(([2.0, 1.1], half), expected, start) == pytest.approx((0.1, 0.5))
    nan = [2.0, np.nan], [np.full(4, np.nan)]
    assert np.isnan(differences(nan, expected, start)).all()


def test_a_failing_part_loses_only_its_own_unfinished_results(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "PATIENCE", 1.0)
    targets = {x: f"tests.failing_parts:{x}" for x in ("parts", "broken")}
    functions = [on_gpu.Function(name, "?", x, 100, 4) for name, x in targets.items()]
    monkeypatch.setattr(on_gpu, "FUNCTIONS", functions)
    assert on_gpu.measure(functions, tmp_path, rehearse=True) == 1
    ends = on_gpu.ends(tmp_path / "results.jsonl", "parts")
    assert [end for _, end, _ in ends] == [
        "FAILED, ValueError: expected luck, got none",
        "killed by SIGABRT",
        "killed: it had not finished in time",
        "done",
    ]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert all(f"the result of {name}" in text for name, _, _ in ends)
    assert on_gpu.ends(tmp_path / "results.jsonl", "broken")[0][1] == "exited with status 1"
    # A part that aborts or hangs also leaves its position in the log.
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").count("in work") >= 3


def test_without_a_gpu_no_part_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert on_gpu.measure(on_gpu.FUNCTIONS, tmp_path, rehearse=False) == on_gpu.NO_GPU
    assert (tmp_path / "results.jsonl").read_text(encoding="utf-8").count("ended") == 1
