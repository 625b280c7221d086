"""What does a GPU say about this project? Answers in twelve minutes, on any NVIDIA card.

    python -m benchmarks.on_gpu --out DIR
    python -m benchmarks.on_gpu --out DIR --only correct memory
    python -m benchmarks.on_gpu --out DIR --rehearse              # the same, tiny, on a CPU

Runs four functions: `correct` (`gpu_checks.py`), `memory`, `step_time` and `layerwise`
(`gpu_figures.py`). Each part of a function runs in a process of its own with a time limit: if it
raises, aborts, hangs or runs out of memory, its earlier results stay, and the next part has the
whole GPU. `DIR/report.md` is written after each function, from the last run of each, so several
commands may share a folder. `DIR/results.jsonl` gets each result at once, `DIR/log.txt` all output.

Needs the library's packages, and no network. To keep compiled programs for the next command, set
JAX_COMPILATION_CACHE_DIR. Answers: `benchmarks/LOG.md`.
"""

import argparse
import datetime
import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine

NO_GPU = 3  # exit status; the other parts would not find one either
PATIENCE = 10.0  # factor for a rehearsal's time limits, because the CPU may be busy


class Function(NamedTuple):
    """`target(rehearse)` returns the parts by name; each is called with a `Part`."""

    name: str
    question: str
    target: str  # module:function
    seconds: float  # time limit of all parts
    part_s: float  # time limit of a part


_CHECKS, _FIGURES = "benchmarks.gpu_checks", "benchmarks.gpu_figures"
FUNCTIONS = (
    Function("correct", "Are the results correct?", f"{_CHECKS}:correct", 160, 60),
    Function("memory", "How large a model can be trained?", f"{_FIGURES}:memory", 220, 130),
    Function("step_time", "How long is a step?", f"{_FIGURES}:step_times", 170, 100),
    Function("layerwise", "Does layerwise match optax?", f"{_FIGURES}:layerwise_parts", 170, 90),
)


class Part(NamedTuple):
    """The argument of a part; all results go through `note`."""

    function: str
    name: str
    path: Path  # of results.jsonl
    until: float  # time limit, in seconds of `time.monotonic`
    rehearse: bool

    def note(self, case: str, **figures: Any) -> None:
        """Adds figures to a row of the report; later values replace earlier values."""
        record = {"function": self.function, "part": self.name, "case": case}
        append(self.path, record | {"figures": figures})


def append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def records_of(path: Path, function: str) -> list[dict[str, Any]]:
    """Returns the records of a function's last run; the first one contains its parts' names."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = [x for x in map(json.loads, lines) if x["function"] == function]
    begin = max((i for i, x in enumerate(records) if "parts" in x), default=len(records))
    return records[begin:]


def run(function: Function, out: Path, environment: dict[str, str], *, rehearse: bool) -> int:
    """Runs a function's parts, and returns the exit status; 0 if all are done."""
    path, patience = out / "results.jsonl", PATIENCE if rehearse else 1.0
    until, number, parts = time.monotonic() + patience * function.seconds, 0, ["start"]
    append(path, {"function": function.name, "parts": parts})
    while number < len(parts) and (left := until - time.monotonic()) > 0:
        limit = min(patience * function.part_s, left)
        command = [sys.executable, "-um", "benchmarks.on_gpu", "--out", str(out.resolve())]
        command += ["--process", json.dumps([function, number, limit])]
        command += ["--rehearse"] if rehearse else []
        options = {"cwd": machine.ROOT, "env": environment, "timeout": limit + 2}
        with (out / "log.txt").open("ab") as log:
            try:
                done = subprocess.run(command, stdout=log, stderr=log, check=False, **options)
                status = done.returncode
            except subprocess.TimeoutExpired:
                status = None
        parts = records_of(path, function.name)[0]["parts"]
        if ends(path, function.name)[number][1] is None:
            end = {"ended": machine.ended(status), "s": None}
            append(path, {"function": function.name, "part": parts[number], **end})
        if status == NO_GPU:
            return NO_GPU
        number += 1
    return int(any(end != "done" for _, end, _ in ends(path, function.name)))


def answer(function: Function, number: int, seconds: float, out: Path, *, rehearse: bool) -> None:
    """Runs a part in this process, and records its end."""
    # A part that hangs prints its threads' stacks before it is killed.
    faulthandler.dump_traceback_later(seconds)
    path, start, outcome = out / "results.jsonl", time.monotonic(), "done"
    module, target = function.target.split(":")
    parts = getattr(importlib.import_module(module), target)(rehearse)
    if number == 0:
        append(path, {"function": function.name, "parts": list(parts)})
    name, work = list(parts.items())[number]
    try:
        work(Part(function.name, name, path, start + seconds, rehearse))
    except Exception as error:  # noqa: BLE001 - the report includes any error
        traceback.print_exc()
        outcome = f"FAILED, {type(error).__name__}: {' '.join(str(error).split())[:400]}"
    end = {"ended": outcome, "s": time.monotonic() - start}
    append(path, {"function": function.name, "part": name, **end})
    faulthandler.cancel_dump_traceback_later()


_PINNED = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


def environment_for(cache: str, *, rehearse: bool) -> dict[str, str]:
    """Returns the environment for the functions' processes, which share compiled programs."""
    changed = {
        # The allocator's share. The rest is for CUDA, its libraries and the code.
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = os.environ.get("XLA_FLAGS", "")
    if rehearse:
        changed["JAX_PLATFORMS"] = "cpu"
        # Compiling takes most of a rehearsal, and the programs' speed does not matter.
        flags += " --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        flags += " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
    elif [int(n) for n in re.findall(r"\d+", metadata.version("jax"))] < [0, 11, 1]:
        # Without it, this jax rejects streamed layers, because XLA would slice host memory wrongly.
        flags += " --xla_disable_hlo_passes=dynamic-slice-annotator"
    # jax reads the limit when it starts its backend; by default, it may pin this share.
    limit = str(max(1, int(0.85 * machine.host_bytes() / 2**30)))
    return {_PINNED: limit} | os.environ | changed | {"XLA_FLAGS": flags.strip()}


def ends(path: Path, function: str) -> list[tuple[str, str | None, float | None]]:
    """Returns each part's outcome, None if it did not end, and its seconds."""
    records = records_of(path, function)
    ended = {x["part"]: (x["ended"], x["s"]) for x in records if "ended" in x}
    return [(name, *ended.get(name, (None, None))) for name in records[0]["parts"]]


def write_report(out: Path, about: Mapping[str, Any]) -> None:
    """Writes report.md from the last run of every function."""
    path, title = out / "results.jsonl", "Rehearsal" if about["rehearsal"] else "Results"
    lines = [f"# {title} on {about['GPU']}, {about['date']}", ""]
    lines += [f"* {name}: {value}" for name, value in about.items()]
    for function in [x for x in FUNCTIONS if records_of(path, x.name)]:
        lines += ["", f"## {function.name}: {function.question}", "", outcomes(path, function.name)]
        of_parts: dict[str, dict[str, dict[str, Any]]] = {}
        for x in records_of(path, function.name):
            if "case" in x:
                of_parts.setdefault(x["part"], {}).setdefault(x["case"], {}).update(x["figures"])
        for part, cases in of_parts.items():
            columns = list(dict.fromkeys(column for x in cases.values() for column in x))
            rows = [(case, *map(x.get, columns)) for case, x in cases.items()]
            lines += ["", f"### {part}", "", table(("", *columns), rows)]
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def outcomes(path: Path, function: str) -> str:
    return table(("part", "outcome", "s"), ends(path, function))


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def measure(functions: Sequence[Function], out: Path, *, rehearse: bool) -> int:
    """Runs functions, writes the report after each, and returns the exit status."""
    out.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now().isoformat(" ", "minutes")
    about, failed = machine.summary() | {"date": date, "rehearsal": rehearse}, 0
    with tempfile.TemporaryDirectory() as folder:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or folder
        environment = environment_for(cache, rehearse=rehearse)
        about |= {name: environment[name] for name in (_PINNED, "XLA_FLAGS")}
        for function in functions:
            print(f"{function.name}: {function.question}", flush=True)
            try:
                status = run(function, out, environment, rehearse=rehearse)
            finally:
                write_report(out, about)  # also when a signal ends this process
            print(outcomes(out / "results.jsonl", function.name), flush=True)
            if status == NO_GPU:
                print("jax has no GPU. Install it with CUDA, or pass --rehearse to use this CPU.")
                return NO_GPU
            failed |= status
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, names = parser.add_argument, [x.name for x in FUNCTIONS]
    add("--out", type=Path, required=True, help="folder for the report")
    add("--rehearse", action="store_true", help="tiny models on this machine's CPU")
    add("--only", nargs="+", choices=names, default=names, help="functions to run")
    add("--process", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is None:
        # SIGTERM ends the running part and keeps the report, like Ctrl-C.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        chosen = [x for x in FUNCTIONS if x.name in args.only]
        sys.exit(measure(chosen, args.out, rehearse=args.rehearse))
    faulthandler.enable()
    if not args.rehearse:
        import jax  # only here, because the first process must leave the GPU alone

        if jax.devices()[0].platform == "cpu":
            sys.exit(NO_GPU)
    function, number, seconds = args.process
    answer(Function(*function), number, seconds, args.out, rehearse=args.rehearse)


if __name__ == "__main__":
    main()
