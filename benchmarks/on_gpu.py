"""How does this project perform on a GPU? Answers all questions in twelve minutes.

    python -m benchmarks.on_gpu --out DIR --minutes 12
    python -m benchmarks.on_gpu --out DIR --rehearse              # the same, tiny, on a CPU
    python -m benchmarks.on_gpu --out DIR --only correct headline

Runs the stages in `STAGES`, the most valuable first. Each is a separate process with a time limit:
a stage that raises, aborts, hangs or runs out of memory keeps its earlier results and leaves the
GPU free for the next. The report names stages that did not fit in the budget.

`DIR/report.md` and `DIR/report.json` are complete at any moment: they are rewritten whenever a
stage has a new result, and when it ends. `DIR/log.txt` contains all output.

Needs only the library's packages, and no network. This process does not start jax, so the stages
have the whole GPU. To keep compiled programs for the next command, set JAX_COMPILATION_CACHE_DIR.
Answers: `benchmarks/LOG.md`.
"""

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.gpu_stages import report
from benchmarks.gpu_stages.__main__ import NO_GPU
from benchmarks.gpu_stages.notes import Notes, notes_path
from benchmarks.gpu_stages.report import Outcome

#: Maximum size of a stage's output to keep.
MOST_BYTES = 2**20
#: Grace period between a stage's time limit and its kill.
GRACE_S = 8.0
#: Time between two polls of a running stage.
_LOOK_S = 1.0


class StageLimits(NamedTuple):
    name: str
    question: str
    target: str  # module:function
    seconds: float  # time limit
    least: float  # with less time left, the stage does not start


def _stage(name: str, question: str, module: str, seconds: float, least: float) -> StageLimits:
    return StageLimits(name, question, f"benchmarks.gpu_stages.{module}:run", seconds, least)


STAGES = (
    _stage("layerwise", "does layer-by-layer training match AdamW?", "layerwise", 140, 40),
    _stage("facts", "what is this machine, and how fast are its parts?", "facts", 45, 15),
    _stage("correct", "are the results correct on this machine?", "correct", 120, 30),
    _stage("ways", "do all ways of sending gradients give the same results?", "ways", 120, 60),
    _stage(
        "step_time",
        "how long does a training step take, compared with all alternatives?",
        "step_times",
        185,
        60,
    ),
    _stage("headline", "how far beyond AdamW's limit can a model grow?", "headline", 110, 50),
)


def run(
    stages: Sequence[StageLimits],
    out: Path,
    *,
    seconds: float,
    rehearse: bool,
    command: str,
) -> list[Outcome]:
    """Runs the stages in turn and returns their outcomes; the report is complete after each.

    Args:
        stages: The stages.
        out: Folder for the report, created if missing.
        seconds: Total time for all stages.
        rehearse: Whether to run on a CPU, with tiny sizes.
        command: The command to name in the report.
    """
    deadline = time.monotonic() + seconds - GRACE_S
    # If only some stages run, they share the time of the rest.
    more = max(1.0, (seconds - GRACE_S) / max(sum(stage.seconds for stage in stages), 1.0))
    out.mkdir(parents=True, exist_ok=True)
    about = machine.summary() | {
        "date": datetime.datetime.now().isoformat(" ", "minutes"),
        "command": command,
        "rehearsal": rehearse,
    }
    outcomes = [Outcome(stage.name, stage.question) for stage in stages]
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "notes"
        work.mkdir()
        compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(scratch) / "cache"
        environment = _environment(Path(compiled), rehearse)
        about["pinned memory limit"] = f"{environment[_PINNED]} GiB"
        about["XLA_FLAGS"] = environment.get("XLA_FLAGS", "")
        (out / "log.txt").write_text("", encoding="utf-8")
        write = partial(report.write, out, work, about, outcomes)
        status = None
        for stage, outcome in zip(stages, outcomes, strict=True):
            left = deadline - time.monotonic()
            if status == NO_GPU:
                outcome.ended = "not run: there is no GPU"
            elif left < stage.least:
                outcome.ended = (
                    f"not run: {max(left, 0):.0f} s of the budget were left, but it needs "
                    f"{stage.least:.0f}"
                )
            else:
                limit = min(more * stage.seconds, left)
                try:
                    status = _run_stage(stage, outcome, limit, work, environment, rehearse, write)
                finally:
                    # Also runs when a signal ends this process.
                    _keep_output(stage, work, out)
                    write()
        write()
    return outcomes


_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
#: Share of host memory that jax may pin. Everything else that an engine keeps is pageable.
_PINNED_SHARE = 0.75


def _environment(cache: Path, rehearse: bool) -> dict[str, str]:
    """Returns the environment for the stages' processes."""
    changed = {
        # jax reads this when it starts its backend.
        _PINNED: str(max(1, int(_PINNED_SHARE * machine.host_bytes() / 2**30))),
        # The allocator's share. The default, 0.75, is too small for the headline; the rest is for
        # CUDA, its libraries and the code.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        # Stages share compiled programs.
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(machine.ROOT), os.environ.get("PYTHONPATH")])
        ),
    }
    if rehearse:
        changed["JAX_PLATFORMS"] = "cpu"
        # Compiling takes most of a rehearsal, and the programs' speed does not matter.
        changed["XLA_FLAGS"] = " ".join(
            [
                os.environ.get("XLA_FLAGS", ""),
                "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
                "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
            ]
        )
    elif [int(n) for n in re.findall(r"\d+", metadata.version("jax"))] < [0, 11, 1]:
        # Without it, this jax rejects streamed layers, because XLA would slice host memory wrongly.
        flag = "--xla_disable_hlo_passes=dynamic-slice-annotator"
        changed["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    own = {name: os.environ[name] for name in (_PINNED,) if name in os.environ}
    return os.environ | changed | own


def _run_stage(
    stage: StageLimits,
    outcome: Outcome,
    limit: float,
    work: Path,
    environment: dict[str, str],
    rehearse: bool,
    write: Callable[[], None],
) -> int | None:
    """Runs a stage, fills `outcome`, and returns the exit status; None if it was killed."""
    print(f"{stage.name}: {stage.question}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_stages", stage.target, "--name", stage.name]
    command += ["--folder", str(work), "--seconds", f"{limit:.1f}"]
    command += ["--rehearse"] if rehearse else []
    log, notes = work / f"{stage.name}.log", notes_path(work, stage.name)
    start = time.monotonic()
    outcome.ended = "interrupted while it ran"  # unless a line below replaces this
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=machine.ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            seen = None
            while process.poll() is None and time.monotonic() - start < limit + GRACE_S:
                try:
                    process.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    changed = notes.stat().st_mtime_ns if notes.exists() else None
                    if changed != seen:
                        seen = changed
                        outcome.seconds = time.monotonic() - start
                        write()
            status = process.poll()
        finally:
            outcome.seconds = time.monotonic() - start
            _end(process)
    failed = Notes(notes).data.get("failed")
    outcome.well = status == 0 and not failed
    if outcome.well:
        outcome.ended = "done"
    else:
        outcome.ended = f"failed: {failed}" if failed else machine.ended(status)
        outcome.last_lines = report.last_lines(log)
    print(f"  {outcome.ended.splitlines()[0]}, {outcome.seconds:.0f} s", flush=True)
    return status


def _end(process: subprocess.Popen) -> None:
    """Kills a stage and all of its child processes, which share its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all its processes have ended
    process.wait()


def _keep_output(stage: StageLimits, work: Path, out: Path) -> None:
    """Appends the stage's output to log.txt."""
    source = work / f"{stage.name}.log"
    output = source.read_bytes()[-MOST_BYTES:] if source.exists() else b""
    with (out / "log.txt").open("ab") as file:
        file.write(f"==== {stage.name}\n".encode() + output)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Lets SIGTERM end the running stage and keep the report, like Ctrl-C."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    names = [stage.name for stage in STAGES]
    add("--out", type=Path, required=True, help="folder for the report")
    add("--minutes", type=float, default=12.0, help="time for all stages together")
    add("--rehearse", action="store_true", help="run tiny models on this machine's CPU")
    add(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="STAGE",
        help=f"stages to run, out of {', '.join(names)}",
    )
    args = parser.parse_args()
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / "report.json").exists():
        parser.error(f"--out {args.out} is not empty and has no report. Pass another folder.")
    stages = [stage for stage in STAGES if stage.name in args.only]
    with _ends_on_signals():
        outcomes = run(
            stages,
            args.out,
            seconds=60 * args.minutes,
            rehearse=args.rehearse,
            command=" ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        )
    print(f"wrote {args.out / 'report.md'}")
    if not all(outcome.well for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
