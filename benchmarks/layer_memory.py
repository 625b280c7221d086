"""How much memory and time does training layer by layer take on a CPU, compared with AdamW?

    python -m benchmarks.layer_memory

Memory: each trainer runs 12 steps of a decoder in a separate process; the result is that process's
peak (`getrusage`) minus the peak with the model `tiny`. Another process compiles first.
Time: all trainers take turns in one process, two steps at a time. Answers: `benchmarks/LOG.md`.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.gpu_stages.device import host_peak_bytes
from benchmarks.gpu_stages.headline import batches
from benchmarks.gpu_stages.layerwise import drawn, layered_of, new_trainer
from benchmarks.step_time_model import MODELS, Model, make_model
from benchmarks.step_time_peers import MAX_GRAD_NORM, PEERS, Runner

STEPS, ROUNDS = 12, 6
_CLIPPED = {"max_grad_norm": MAX_GRAD_NORM}
#: Options for the trainer; None for AdamW without a scan.
WAYS: dict[str, dict[str, Any] | None] = {
    "adamw": None,
    "after_backward": _CLIPPED,
    "during_backward": _CLIPPED | {"updates": "during_backward"},
    "during_backward, compact": _CLIPPED | {"updates": "during_backward", "host_state": "compact"},
}


def stepper(
    way: str, model: Model, tokens: np.ndarray, stack: contextlib.ExitStack
) -> Callable[[int], None]:
    """Returns a function that takes `steps` steps and waits for their losses."""
    options = WAYS[way]
    if options is None:
        runner = Runner(PEERS["adamw"], model, tokens)
        runner.set_up()
        stack.callback(runner.take_down)

        def advance(steps: int) -> None:
            runner.advance(steps)
            runner.wait()

        return advance
    layered = layered_of(model)
    trainer = stack.enter_context(new_trainer(layered, drawn(model, layered), **options))

    def step(steps: int) -> None:
        losses = [trainer.step({"tokens": tokens[i % len(tokens)]}) for i in range(steps)]
        jax.block_until_ready(losses)

    return step


def in_a_process(way: str, model: str, cache: str) -> int:
    """Returns the peak memory of a process that trains."""
    command = [sys.executable, "-m", "benchmarks.layer_memory", "--one", way, "--model", model]
    caching = {"COMPILATION_CACHE_DIR": cache, "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment = os.environ | {f"JAX_{name}": value for name, value in caching.items()}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="cpu")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    config, batch, length = MODELS[args.model]
    model = make_model(config, scan_layers=False, remat=True)
    tokens = batches(STEPS, batch, length) % config.vocabulary
    if args.one:
        with contextlib.ExitStack() as stack:
            stepper(args.one, model, tokens, stack)(STEPS)
        return print(host_peak_bytes())
    print(f"{model.parameters:,} parameters, {batch} x {length} tokens, jax {jax.__version__}")
    peaks, times = {}, {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as cache:
        for way in WAYS:
            _, tiny, peak = (in_a_process(way, x, cache) for x in (args.model, "tiny", args.model))
            peaks[way] = (peak - tiny) / model.parameters
    with contextlib.ExitStack() as stack:
        steppers = {way: stepper(way, model, tokens, stack) for way in WAYS}
        for number in range(1 + ROUNDS):  # the first compiles
            for way, step in steppers.items():
                begin = time.perf_counter()
                step(2)
                times[way] += [(time.perf_counter() - begin) / 2] if number else []
    print("| way | bytes per parameter | a step, s | times AdamW's |\n|" + "---|" * 4)
    for way, seconds in times.items():
        ratio = statistics.median(x / y for x, y in zip(seconds, times["adamw"], strict=True))
        print(f"| {way} | {peaks[way]:.1f} | {statistics.median(seconds):.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
