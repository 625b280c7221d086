"""What does this project do on a GPU? Everything, in one command and twelve minutes.

    python -m benchmarks.on_gpu --out DIR --minutes 12
    python -m benchmarks.on_gpu --out DIR --rehearse              # the same on a CPU, tiny
    python -m benchmarks.on_gpu --out DIR --only correct headline

Runs the stages of `STAGES`, the most valuable first. Each is a process of its own with a limit of
time: one that raises, aborts, hangs or has no memory loses what it had not found yet, and the next
one finds the GPU free. What the budget does not allow any more is left out, and said.

`DIR/report.md` and `DIR/report.json` are whole at any moment: they are written again while a stage
runs whenever it has found something, and when it has ended. A picture lies beside them, and log.txt
has all output.

Needs the packages that the library needs and matplotlib, nothing else; no network. This process
starts no jax, so all of the GPU is the stages'. Answers: `benchmarks/LOG.md`.
"""

import argparse
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.gpu_stages import report
from benchmarks.gpu_stages.__main__ import NO_GPU
from benchmarks.gpu_stages.notes import Notes, notes_path
from benchmarks.gpu_stages.report import Outcome

#: Of the output of one stage.
MOST_BYTES = 2**20
#: What the stage `step_time` draws.
PICTURE = "step_time.png"
#: Between the moment at which a stage should have ended and the one at which it is killed.
GRACE_S = 8.0
#: Between two looks at a stage that runs.
_LOOK_S = 1.0


class StageLimits(NamedTuple):
    name: str
    question: str
    target: str  # module:function
    seconds: float  # it gets at most
    least: float  # with less left it is not begun


def _stage(name: str, question: str, module: str, seconds: float, least: float) -> StageLimits:
    return StageLimits(name, question, f"benchmarks.gpu_stages.{module}:run", seconds, least)


STAGES = (
    _stage("layerwise", "do layers train by themselves as with AdamW?", "layerwise", 140, 40),
    _stage("facts", "what is this machine, and how fast are its parts?", "facts", 45, 15),
    _stage("correct", "does it compute here what it should?", "correct", 120, 30),
    _stage("ways", "does each way of sending gradients train the same?", "ways", 120, 60),
    _stage(
        "step_time",
        "what does a training step cost, beside everything else one could do?",
        "step_times",
        185,
        60,
    ),
    _stage(
        "headline", "how large a model trains here that would not with AdamW?", "headline", 110, 50
    ),
)


def run(
    stages: Sequence[StageLimits],
    out: Path,
    *,
    seconds: float,
    rehearse: bool,
    command: str,
    cache: Path | None = None,
) -> list[Outcome]:
    """Runs the stages in turn; the report is whole after each, whatever happens. How each went.

    Args:
        stages: What to run.
        out: Folder for the report; made if it is not there.
        seconds: For all of them together.
        rehearse: On a CPU, with tiny sizes.
        command: What the report says it was made with.
        cache: Folder for compiled programs; None for what JAX_COMPILATION_CACHE_DIR says, or one
            that is gone at the end.
    """
    deadline = time.monotonic() + seconds - GRACE_S
    # Some stages alone may have what the others would have taken.
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
        compiled = cache or os.environ.get("JAX_COMPILATION_CACHE_DIR") or Path(scratch) / "cache"
        environment = _environment(Path(compiled), rehearse)
        about["pinned memory limit"] = f"{environment[_PINNED]} GiB"
        (out / "log.txt").write_text("", encoding="utf-8")
        write = partial(report.write, out, work, about, outcomes)
        status = None
        for stage, outcome in zip(stages, outcomes, strict=True):
            left = deadline - time.monotonic()
            if status == NO_GPU:
                outcome.ended = "not run: there is no GPU"
            elif left < stage.least:
                outcome.ended = (
                    f"not run: {max(left, 0):.0f} s of the budget were left and it needs "
                    f"{stage.least:.0f}"
                )
            else:
                limit = min(more * stage.seconds, left)
                try:
                    status = _run_stage(stage, outcome, limit, work, environment, rehearse, write)
                finally:
                    # Also when this process is told to end.
                    _keep_output(stage, work, out)
                    write()
        write()
    return outcomes


_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
#: Share of host memory that jax may pin. Everything else that an engine keeps is pageable.
_PINNED_SHARE = 0.75


def _environment(cache: Path, rehearse: bool) -> dict[str, str]:
    """Of the stages' processes."""
    changed = {
        # Read when jax starts its backend.
        _PINNED: str(max(1, int(_PINNED_SHARE * machine.host_bytes() / 2**30))),
        # The allocator's share; its default, 0.75, is too little for the headline. What is left is
        # for CUDA itself, its libraries and the code.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        # A peer of one stage is a program of the next.
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
        # Compiling is most of a rehearsal, and nobody waits for what is compiled.
        changed["XLA_FLAGS"] = " ".join(
            [
                os.environ.get("XLA_FLAGS", ""),
                "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
                "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
            ]
        )
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
    """Runs one stage and says in `outcome` how it went; its exit status, None if it was killed."""
    print(f"{stage.name}: {stage.question}", flush=True)
    command = [sys.executable, "-m", "benchmarks.gpu_stages", stage.target, "--name", stage.name]
    command += ["--folder", str(work), "--seconds", f"{limit:.1f}"]
    command += ["--rehearse"] if rehearse else []
    log, notes = work / f"{stage.name}.log", notes_path(work, stage.name)
    start = time.monotonic()
    outcome.ended = "cut off while it ran"  # unless one of the lines below says otherwise
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
    """Kills a stage with everything that it has started: it leads a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody of it is left
    process.wait()


def _keep_output(stage: StageLimits, work: Path, out: Path) -> None:
    """Appends what the stage has printed to log.txt, and copies the picture if it has drawn one."""
    source = work / f"{stage.name}.log"
    output = source.read_bytes()[-MOST_BYTES:] if source.exists() else b""
    with (out / "log.txt").open("ab") as file:
        file.write(f"==== {stage.name}\n".encode() + output)
    if (work / PICTURE).exists():
        shutil.copyfile(work / PICTURE, out / PICTURE)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """Has SIGTERM end the stage that runs and leave the report, as Ctrl-C does."""

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
    add("--minutes", type=float, default=12.0, help="for everything together")
    add("--rehearse", action="store_true", help="on this machine's CPU, with tiny models")
    add(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="STAGE",
        help=f"of {', '.join(names)}",
    )
    add("--cache", type=Path, help="folder that keeps compiled programs for the next command")
    args = parser.parse_args()
    if args.out.is_dir() and any(args.out.iterdir()) and not (args.out / "report.json").exists():
        parser.error(f"expected --out with a new folder or one of a report, got {args.out}")
    stages = [stage for stage in STAGES if stage.name in args.only]
    with _ends_on_signals():
        outcomes = run(
            stages,
            args.out,
            seconds=60 * args.minutes,
            rehearse=args.rehearse,
            command=" ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
            cache=args.cache,
        )
    print(f"written: {args.out / 'report.md'}")
    if not all(outcome.well for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
