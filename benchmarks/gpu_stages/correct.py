"""Does it compute here what it should?

Asks each question of `checks.py`, in a process that is not this one: what must not happen is also
that a process aborts or hangs. Then that question has failed, and another process goes on with the
next. At last the tests that are marked `gpu`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages import machine
from benchmarks.gpu_stages.__main__ import NO_GPU
from benchmarks.gpu_stages.machine import NoGPU
from benchmarks.gpu_stages.notes import Stage, table

#: What `pytest` needs to run here at all.
_OF_TESTS = ("pytest", "beartype", "hypothesis")
#: A question that takes longer hangs. The first one of a process also starts jax and compiles; a
#: CPU in a rehearsal may be busy with anything.
_LONGEST_S, _LONGEST_REHEARSED_S = 45.0, 300.0
#: Left for the tests.
_FOR_TESTS_S = 12.0
_ROOT = Path(__file__).resolve().parents[2]
_HEAD = ["what", "largest difference", "tolerance", "verdict"]


def run(stage: Stage) -> None:
    rows = _ask_all(stage)
    failed = [row for row in rows if row["verdict"] != "pass"]
    tests = _pytest(stage)
    stage.notes.put("Tests marked `gpu`", tests)
    if failed or "failed" in tests:
        raise AssertionError(
            f"{len(failed)} of {len(rows)} rows did not pass"
            + (f", the first is: {failed[0]['what']}" if failed else "; see the tests")
        )


def _ask_all(stage: Stage) -> list[dict[str, Any]]:
    """The rows of all questions; the report has each as soon as it is there."""
    path = stage.folder / "correct.rows.jsonl"
    path.write_text("", encoding="utf-8")
    rows: list[dict[str, Any]] = []
    first, total = 0, None
    while total is None or first < total:
        ended = _ask(stage, path, first, rows)
        entries = _entries(path)
        if not entries:
            if ended == _name(NO_GPU):
                raise NoGPU("expected a GPU for the checks, got none; the log says what jax has.")
            raise RuntimeError(
                f"expected the process of the checks to begin, got its end before that: {ended}. "
                "Its output is in the log."
            )
        last = entries[-1]
        total, first = last["of"], last["number"] + 1
        if "rows" not in last:
            rows.append({"what": last["question"], "verdict": ended})
        if first < total and stage.left < _FOR_TESTS_S:
            rest = f"{total - first} more questions"
            rows.append({"what": rest, "verdict": "not asked: no time"})
            first = total
        _show(stage, rows)
    return rows


def _ask(stage: Stage, path: Path, first: int, rows: list[dict[str, Any]]) -> str:
    """Lets a process answer from question `first` on, appends its rows; how the process ended."""
    command = [sys.executable, "-m", "benchmarks.gpu_stages.checks", str(path), str(first)]
    command += ["--rehearse"] if stage.rehearse else []
    # The allocator takes no more than it needs: the tests come next, in a process of their own.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    longest = _LONGEST_REHEARSED_S if stage.rehearse else _LONGEST_S
    read, moved = len(_entries(path)), time.monotonic()
    process = subprocess.Popen(command, cwd=_ROOT, env=environment)
    try:
        while True:
            running = process.poll() is None
            new = _entries(path)[read:]
            if new:
                read, moved = read + len(new), time.monotonic()
                rows += [row for entry in new for row in entry.get("rows", ())]
                _show(stage, rows)
            if not running:
                return _name(process.returncode)
            waited = time.monotonic() - moved
            if waited > longest or stage.left < 0.5 * _FOR_TESTS_S:
                return f"killed: no answer after {waited:.0f} s"
            try:
                process.wait(0.2)
            except subprocess.TimeoutExpired:
                pass
    finally:
        process.kill()
        process.wait()


def _entries(path: Path) -> list[dict[str, Any]]:
    """What the process has written, its whole lines."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _show(stage: Stage, rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            row["what"],
            "-" if row.get("difference") is None else f"{row['difference']:.2g}",
            "-" if row.get("tolerance") is None else f"{row['tolerance']:.2g}",
            row["verdict"] if row["verdict"] == "pass" else f"**{row['verdict'].strip('*')}**",
        )
        for row in rows
    ]
    stage.notes.put("Each row by itself", table(_HEAD, cells))
    stage.notes.keep(rows=rows)


def _name(status: int) -> str:
    if status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    return f"the process ended with status {status}"


def _pytest(stage: Stage) -> str:
    """What `pytest -m gpu` says in its last line, or why it was not asked."""
    absent = machine.missing(_OF_TESTS)
    if absent:
        return f"not run: this machine has no {', '.join(absent)}"
    if stage.left < 0.5 * _FOR_TESTS_S:
        return f"not run: {max(stage.left, 0):.0f} s were left"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    # Only files that have such a test: to collect the others would take the time.
    files = [
        str(path)
        for path in sorted((_ROOT / "tests").glob("test_*.py"))
        if re.search(r"^@pytest\.mark\.gpu\b|^pytestmark = pytest\.mark\.gpu\b",
                     path.read_text(encoding="utf-8"), re.MULTILINE)
    ]  # fmt: skip
    if not files:
        return "none is marked so"
    try:
        done = subprocess.run(
            [*command, *files],
            cwd=_ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(stage.left - 1, 1),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "failed: they did not end in time"
    print(done.stdout, done.stderr)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return last if done.returncode == 0 else f"failed, exit status {done.returncode}: {last}"
