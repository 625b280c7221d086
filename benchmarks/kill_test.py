"""Is the result of a repeatedly killed run bit-identical to that of an uninterrupted run?

    python -m benchmarks.kill_test --kills 25

Starts `python -m train.finetune` with a tiny model, kills it with SIGKILL, starts it again, and so
on; then lets it finish. A third of the kills happen while a checkpoint is written, a sixth in the
first seconds of a start, and the rest at random moments during training. Compares the final model,
every array in the final checkpoint, and the losses in the metrics with those of an uninterrupted
run. Prints a line for each kill and one for the result, and exits with 1 if anything differs.
Answers: `benchmarks/LOG.md`.

Everything runs on a CPU: `JAX_PLATFORMS=cpu` is set. Compiling would dominate a start's time, so
the compiler does not optimize, and all starts reuse the uninterrupted run's compiled programs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]

# These settings cover saves inside a window, with an update in flight; selections; and a warm-up.
CONFIG = """
corpus_megabytes = 0.3
sequence_length = 16
batch_size = 2
width = 16
layers = 1
heads = 2
ffn = 24
learning_rate = 1e-2
topk_ratio = 0.25
update_interval = 4
select_interval = 12
full_warm_up_rounds = 3
max_grad_norm = 1.0
log_every = 3
eval_batches = 2
"""
SAVE_EVERY = 5

# Number of saves per start before it is killed, which determines the run's length.
SAVES = 3
STEPS_PER_KILL = SAVE_EVERY * (SAVES + 2)

LONGEST_START_S = 120


class Result(NamedTuple):
    """The result of a run that was killed."""

    kills: int
    while_writing: int  # number of kills that left a half-written checkpoint
    differences: list[str]  # from the uninterrupted run; should be empty


def kill_test(folder: Path, *, kills: int, seed: int, start_s: float = 5.0, **words: str) -> Result:
    """Starts both runs in `folder` and compares them.

    Args:
        folder: An empty folder.
        kills: Number of kills.
        seed: Seed for the moments of the kills.
        start_s: Approximate time from a start to its first steps, for kills during the start.
        words: Further settings, such as the optimizer.

    Raises:
        RuntimeError: If a start fails without being killed.
    """
    config = write_config(folder, steps=STEPS_PER_KILL * kills + 13, **words)
    end(start(config, "whole"))

    moments = random.Random(seed)
    run = folder / "killed"
    while_writing = 0
    for kill in range(1, kills + 1):
        process = start(config, run.name)
        moment = moments.choice(["writing", "writing", "training", "training", "training", "start"])
        kill_at(moment, process, run / "checkpoints", moments, start_s)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            raise RuntimeError(f"a start exited on its own with code {process.returncode}")
        half = moment != "start" and bool(half_written(run / "checkpoints"))
        while_writing += half
        whole = ", ".join(map(str, sorted(steps_of(run / "checkpoints"))))
        state = ", one half written" if half else ""
        print(f"kill {kill} ({moment}): checkpoints {whole or 'none'}{state}", flush=True)
    end(start(config, run.name))
    return Result(kills, while_writing, differences(folder / "whole", run))


def write_config(folder: Path, *, steps: int, **words: str) -> Path:
    """Writes the settings for runs in `folder`; returns the file."""
    config = folder / "job.toml"
    settings = CONFIG + f'save_every = {SAVE_EVERY}\noutput_dir = "{folder}"\nsteps = {steps}\n'
    settings += "".join(f'{name} = "{word}"\n' for name, word in words.items())
    if words.get("stream", "none") != "none":
        settings = settings.replace("layers = 1", "layers = 2\nscan_layers = true")
    config.write_text(settings, encoding="utf-8")
    return config


def start(config: Path, run: str, *options: str) -> subprocess.Popen:
    """Starts the script; all output goes to its stdout."""
    command = [sys.executable, "-m", "train.finetune", config, "--run", run, *options]
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        # Reuses an existing cache of compiled programs.
        "JAX_COMPILATION_CACHE_DIR": os.environ.get(
            "JAX_COMPILATION_CACHE_DIR", str(config.parent / "compiled")
        ),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen) -> None:
    """Waits until a start that is not killed has finished."""
    output, _ = process.communicate(timeout=3 * LONGEST_START_S)
    if process.returncode:
        raise RuntimeError(f"a start failed with code {process.returncode}:\n{output}")


def kill_at(
    moment: str,
    process: subprocess.Popen,
    checkpoints: Path,
    moments: random.Random,
    start_s: float,
) -> None:
    """Waits for the moment and kills the process."""
    if moment == "start":
        time.sleep(moments.uniform(0.0, start_s))
        process.kill()
        return
    saved = max(steps_of(checkpoints), default=0)
    target = saved + SAVE_EVERY * moments.randrange(SAVES)
    # A start first removes files that the previous kill left.
    wait_for(lambda: not half_written(checkpoints), process)
    wait_for(lambda: max(steps_of(checkpoints), default=0) >= target, process)
    # A step takes 2 to 10 ms, a save 30.
    if moment == "writing":
        wait_for(lambda: half_written(checkpoints), process)
        time.sleep(moments.uniform(0.0, 0.03))
    else:
        time.sleep(moments.uniform(0.0, 0.2))
    process.kill()


def wait_for(condition, process: subprocess.Popen) -> None:
    """Polls often, because the condition may hold for only milliseconds."""
    deadline = time.monotonic() + LONGEST_START_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            output, _ = process.communicate()
            raise RuntimeError(f"a start exited, or never reached its checkpoints:\n{output}")
        time.sleep(0.001)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def steps_of(checkpoints: Path) -> set[int]:
    """Returns the steps of complete checkpoints, which have their final name."""
    return {int(name) for name in names_in(checkpoints) if name.isdecimal()}


def half_written(checkpoints: Path) -> list[str]:
    return [name for name in names_in(checkpoints) if not name.isdecimal()]


def differences(whole: Path, killed: Path) -> list[str]:
    """Lists all values that are not bit-identical in both runs."""
    different = []
    models = [(run / "model.safetensors").read_bytes() for run in (whole, killed)]
    if models[0] != models[1]:
        different.append("model.safetensors")
    last = [max(steps_of(run / "checkpoints")) for run in (whole, killed)]
    trees = [
        final_arrays(run / "checkpoints" / str(step))
        for run, step in zip((whole, killed), last, strict=True)
    ]
    if last[0] != last[1] or trees[0].keys() != trees[1].keys():
        different.append(f"the last checkpoints, {last[0]} and {last[1]}")
    else:
        different += [
            name
            for name, x in trees[0].items()
            if without_token(name, x) != without_token(name, trees[1][name])
        ]
    if losses(whole) != losses(killed):
        different.append("metrics.csv")
    return different


def without_token(name: str, x: np.ndarray) -> Any:
    """Returns an array's value without a token, whose random number differs between starts."""
    if name.endswith("token"):
        return None
    # The engine's run state is JSON.
    return json.loads(bytes(x)) | {"token": None} if name.startswith("layout_") else x.tobytes()


def final_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns all arrays in a checkpoint, by name."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(checkpoint / "state").item_metadata.tree
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
        arrays = checkpointer.restore(checkpoint / "state", restore_args=args)
    for path in (checkpoint / "engine").glob("*.safetensors"):  # none with adamw
        arrays |= load_file(path)
    return arrays


def losses(run: Path) -> list[tuple[str, ...]]:
    """Returns step and loss of every row, without speeds."""
    with open(run / "metrics.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [(row["step"], row["loss"]) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=["zenflow", "adamw"], default="zenflow")
    parser.add_argument("--stream", choices=["none", "gradients"], default="none")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = kill_test(Path(folder), **vars(options))
    verdict = (
        f"DIFFERENT: {', '.join(result.differences)}" if result.differences else "bit-identical"
    )
    print(
        f"{options.optimizer}, stream {options.stream}: {result.kills} kills, "
        f"{result.while_writing} of them while a checkpoint was written, "
        f"{time.perf_counter() - begin:.0f} s: {verdict}"
    )
    return 1 if result.differences else 0


if __name__ == "__main__":
    sys.exit(main())
