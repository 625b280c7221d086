"""Are the results on this GPU correct?

Runs the questions in `checks.py` in a separate process. If it aborts or hangs, the question has
failed, and a new process continues with the next question.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu_stages.__main__ import NO_GPU
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.machine import NoGPU

#: A question that takes longer is considered hung. The first question in a process also starts jax
#: and compiles; in a rehearsal, the CPU may be busy.
_LONGEST_S, _LONGEST_REHEARSED_S = 45.0, 300.0
#: With less time left, no further question starts.
_LEAST_S = 6.0


def run(stage: Stage) -> None:
    rows = _ask_all(stage)
    failed = [f"{name}: {verdict}" for name, verdict in rows.items() if verdict != "pass"]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(rows)} failed; the first was {failed[0]}")


def _ask_all(stage: Stage) -> dict[str, str]:
    """Returns the verdicts of all questions by name; each is added to the report at once."""
    path = stage.folder / "correct.rows.jsonl"
    path.write_text("", encoding="utf-8")
    rows: dict[str, str] = {}
    first, total = 0, None
    while total is None or first < total:
        status = _ask(stage, path, first, rows)
        entries = _entries(path)
        if not entries:
            if status == NO_GPU:
                raise NoGPU("The checks found no GPU. The log shows jax's devices.")
            raise RuntimeError(f"The checks did not start: their process {machine.ended(status)}.")
        last = entries[-1]
        total, first = last["of"], last["number"] + 1
        if "verdict" not in last:
            rows[last["question"]] = f"its process {machine.ended(status)}"
        if first < total and stage.left < 2 * _LEAST_S:
            rows[f"{total - first} more questions"] = "not asked: no time"
            first = total
        _show(stage, rows)
    return rows


def _ask(stage: Stage, path: Path, first: int, rows: dict[str, str]) -> int | None:
    """Lets a process answer from number `first` on; returns its exit status, None if killed."""
    command = [sys.executable, "-m", "benchmarks.gpu_stages.checks", str(path), str(first)]
    command += ["--rehearse"] if stage.rehearse else []
    longest = _LONGEST_REHEARSED_S if stage.rehearse else _LONGEST_S
    read, moved = len(_entries(path)), time.monotonic()
    process = subprocess.Popen(command, cwd=machine.ROOT, env=os.environ)
    question = ""
    try:
        while True:
            status = process.poll()
            new = _entries(path)[read:]
            for entry in new:
                question = entry.get("question", question)
                if "verdict" in entry:
                    rows[question] = entry["verdict"]
            if new:
                read, moved = read + len(new), time.monotonic()
                _show(stage, rows)
            if status is not None:
                return status
            if time.monotonic() - moved > longest or stage.left < _LEAST_S:
                return None
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
    finally:
        process.kill()
        process.wait()


def _entries(path: Path) -> list[dict[str, Any]]:
    """Returns the complete lines that the process has written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _show(stage: Stage, rows: dict[str, str]) -> None:
    cells = [(name, x if x == "pass" else f"**{x}**") for name, x in rows.items()]
    stage.notes.put("All questions", table(["question", "verdict"], cells))
    stage.notes.keep(rows=rows)
