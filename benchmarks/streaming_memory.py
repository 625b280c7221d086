"""How much memory does a run with streamed layers need, compared with its plan?

    python -m benchmarks.streaming_memory

Trains a decoder with scanned layers for 12 steps on a CPU, saves with orbax and continues, with a
process for each peer of `step_time.py`. Prints bytes per parameter: the process's peak, above that
of a process with the model `tiny`, in training and with the save; the peak of the latter; and the
plan's host and device, with the temporaries of the step as XLA compiles it for this CPU. Another
process compiles and caches the programs first. For the peers' speed, run
`python -m benchmarks.step_time --model cpu --scan-layers`. Results: `benchmarks/LOG.md`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp

import zenflow_jax
from benchmarks.step_time_model import MODELS, make_model
from benchmarks.step_time_peers import PEERS, Runner
from zenflow_jax import planning

STEPS = 12
WAYS = (
    "zenflow-s4-r0.05",
    "zenflow-s4-r0.05-streamed",
)


def peak_bytes() -> int:
    """Returns this process's peak memory in RAM."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def save(runner: Runner) -> None:
    """Saves parameters, optimizer state without placeholder mail, and engine state; waits."""
    state = runner.state._replace(mail=None, step_scalars=None)
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_compression=False),
        engine=zenflow_jax.EngineCheckpointHandler(),
    )
    with tempfile.TemporaryDirectory() as folder, ocp.AsyncCheckpointer(handler) as checkpointer:
        tree = ocp.args.PyTreeSave(jax.tree.leaves((runner.params, state)))
        items = ocp.args.Composite(state=tree, engine=zenflow_jax.EngineSave(runner.engine))
        checkpointer.save(f"{folder}/step", items)
        checkpointer.wait_until_finished()


def measured(way: str, args: argparse.Namespace) -> Sequence[int]:
    """Returns parameters, bytes in training and with the save, planned host and device bytes."""
    config, batch, length = MODELS[args.model]
    model = make_model(config, scan_layers=True, remat=True)
    shape = (STEPS, batch, length + 1)
    tokens = np.random.default_rng(0).integers(config.vocabulary, size=shape, dtype=np.int32)
    runner = Runner(PEERS[way], model, tokens)
    runner.set_up()
    runner.advance(args.steps)
    runner.wait()
    training = peak_bytes()
    save(runner)
    runner.advance(4)
    runner.settle()
    saving = peak_bytes()
    runner.take_down()
    runner.set_up()
    arguments = runner.params, runner.state, runner._batches[0]
    plan = planning.plan(runner._step, *arguments)
    program = runner._step.lower(*arguments).compile().memory_analysis()
    runner.take_down()
    device = plan.device_bytes + program.temp_size_in_bytes
    return model.parameters, training, saving, plan.host_bytes, device


def in_a_process(way: str, model: str, steps: int, cache: str) -> Sequence[int]:
    command = [sys.executable, "-m", "benchmarks.streaming_memory", "--one", way, "--model", model]
    command += ["--steps", str(steps), "--cache", cache]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="cpu")
    add("--one", choices=WAYS, help=argparse.SUPPRESS)
    add("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    add("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        jax.config.update("jax_compilation_cache_dir", args.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        print(json.dumps(measured(args.one, args)))
        return
    print(f"{args.model}, {STEPS} steps, jax {jax.__version__}; bytes per parameter")
    print("| peer | training | with a save | process | plan: host | device |\n|" + "---|" * 6)
    with tempfile.TemporaryDirectory() as cache:
        for way in WAYS:
            in_a_process(way, args.model, 4, cache)
            _, *process = in_a_process(way, "tiny", STEPS, cache)
            n, training, saving, *planned = in_a_process(way, args.model, STEPS, cache)
            each = (training - process[0], saving - process[1], process[0], *planned)
            print(f"| {way} | {' | '.join(f'{x / n:.1f}' for x in each)} |", flush=True)


if __name__ == "__main__":
    main()
