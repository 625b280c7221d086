"""How long does a training step take with `zenflow`, compared with all alternatives?

    python -m benchmarks.step_time --model tiny --rounds 2
    python -m benchmarks.step_time --model 1b --rounds 5

The peers train the same model on the same batches, with bf16 weights and float32 masters:

* `adamw`: `optax.adamw`, all on the device, as fast as possible;
* `parked`: its state in pinned host memory, copied to the device and back inside the step;
* `offload`: all on the host, with waiting, as in ZeRO-Offload: an engine with windows of one step,
  no overlap, ratio 0;
* `offload-x4`: the same, once per 4 steps, whose gradients are summed on the device. Its figures
  are per step, so they compare with those of `zenflow-s4`;
* `zenflow-sS-rR`: windows of S steps, with overlap, ratio R; with `-exchange`, gradients leave
  while the next step runs; with `-streamed`, gradients of scanned layers leave inside the backward
  scan.

DeepSpeed is not included, because it needs torch with CUDA and a CUDA compiler.

In each round, the peers take turns in shuffled order. A peer first runs a window that is not timed,
so that an update is in flight as in the middle of a run, then `--steps` timed steps, and finally
waits until its host is idle. The loop waits for the device only before and after the timed steps.
Compiling and the first selection are not timed; later selections are (the last column counts them;
there is one in 16 windows, so a turn may have none). Each turn of a peer sets it up from the same
weights, and takes it down at the end.

Prints medians over the turns. "idle" is the share of the step beyond the time of `adamw`. The
device's peak is the allocator's peak in each peer's first turn. Peers run in ascending order of
memory, because the peak cannot be reset; "<=" marks an upper bound, which another peer had already
reached. Bytes are per parameter, and per step for transfers; "host arrays" are
those of the engine, without its pinned mail. On a CPU, all memory is the same and device and host
share the cores, so only the counts are meaningful. On a GPU, large models need
`XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`; the error contains the value. Answers: `benchmarks/LOG.md`.
"""

import argparse
import fnmatch
import random
import tempfile
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from benchmarks.step_time_model import MODELS, Model, make_model
from benchmarks.step_time_peers import PEERS, Peer, Runner
from benchmarks.step_time_report import Comparison, Result, table
from zenflow_jax import EngineStats

#: Number of different batches; a multiple of all peers' micro-batches.
BATCHES = 8
#: Windows until everything is compiled: the first boundary selects, and the second one merges the
#: first update.
WARM_UP = 3


def first_turn(runner: Runner, result: Result) -> None:
    """Compiles, and measures the device's memory."""
    device = jax.devices()[0]
    before = device.memory_stats()
    try:
        runner.set_up()
        runner.advance(WARM_UP * runner.peer.window)
        runner.settle()
    except RuntimeError as error:
        # This is XLA's error, or an engine's error that XLA's has caused.
        if "RESOURCE_EXHAUSTED" not in f"{error} {error.__cause__}":
            raise
        result.fits = False
    runner.take_down()
    after = device.memory_stats()
    if before and after:
        result.device_peak_bytes = after["peak_bytes_in_use"]
        result.device_peak_is_bound = after["peak_bytes_in_use"] == before["peak_bytes_in_use"]


def first_turns(
    both: list[tuple[Runner, Result]], until: float | None
) -> list[tuple[Runner, Result]]:
    """Gives each peer its first turn, within half of the time; returns peers that can continue."""
    half = None if until is None else (time.monotonic() + until) / 2
    for place, (runner, result) in enumerate(both):
        if half is not None and time.monotonic() > half and place > 1:
            result.left_out = True
            print(f"{runner.peer.name}: skipped for lack of time", flush=True)
            continue
        start = time.perf_counter()
        first_turn(runner, result)
        note = "" if result.fits else ", does not fit"
        print(
            f"{runner.peer.name}: first turn {time.perf_counter() - start:.1f} s{note}", flush=True
        )
    return [(runner, result) for runner, result in both if result.fits and not result.left_out]


def warm_up(runner: Runner) -> None:
    runner.set_up()
    runner.advance(runner.peer.window)  # the first boundary selects
    runner.settle()


def turn(runner: Runner, result: Result, steps: int) -> None:
    """Times some steps; the host is idle before and after."""
    window = runner.peer.window
    before = _stats(runner)
    for _ in range(window // runner.peer.micro_batches):
        runner.advance(runner.peer.micro_batches)
        _note_memory(runner, result)
    runner.wait()
    start = _stats(runner)
    began = time.perf_counter()
    runner.advance(steps)
    runner.wait()
    result.step_s.append((time.perf_counter() - began) / steps)
    result.wait_s.append((_stats(runner).wait_s - start.wait_s) / steps)
    _note_memory(runner, result)
    result.selections += _stats(runner).reselections - start.reselections
    runner.settle()
    # The host is idle at both ends, so this is its work for all steps.
    after, made = _stats(runner), window + steps
    parked = runner.parked_bytes
    result.work_s.append((after.work_s - before.work_s) / made)
    moved = after.bytes_to_host - before.bytes_to_host
    result.bytes_to_host.append(parked + moved / made)
    moved = after.bytes_to_device - before.bytes_to_device
    result.bytes_to_device.append(parked + moved / made)


def _stats(runner: Runner) -> EngineStats:
    return EngineStats() if runner.engine is None else runner.engine.stats


def _note_memory(runner: Runner, result: Result) -> None:
    host_bytes = _stats(runner).host_bytes + runner.parked_bytes
    result.host_bytes = max(result.host_bytes, host_bytes)


def compare(
    model: Model,
    peers: Sequence[Peer],
    *,
    batch: int,
    length: int,
    vocabulary: int,
    rounds: int,
    steps: int,
    save: Callable[[Comparison], None],
    until: float | None = None,
) -> Comparison:
    """Measures all peers at one batch size.

    `save` gets the results so far, after the first turns and after each round. No turn starts after
    `until`, in seconds of `time.monotonic`. First turns get half of the time; peers whose first
    turn does not start by then are left out, except the first two.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(vocabulary, size=(BATCHES, batch, length + 1), dtype=np.int32)
    comparison = Comparison(model.parameters, batch, length, [Result(peer.name) for peer in peers])
    both = [(Runner(p, model, tokens), r) for p, r in zip(peers, comparison.results, strict=True)]
    both = first_turns(both, until)
    save(comparison)
    longest = 0.0
    try:
        shuffle = random.Random(0).shuffle
        for i in range(rounds):
            if until is not None and time.monotonic() + longest > until:
                print(f"out of time after {i} rounds", flush=True)
                break
            start = time.perf_counter()
            shuffle(both)
            for runner, result in both:
                warm_up(runner)
                turn(runner, result, steps)
                runner.take_down()
            longest = max(longest, time.perf_counter() - start)
            print(f"round {i + 1}: {time.perf_counter() - start:.1f} s", flush=True)
            save(comparison)
    finally:
        for runner, _ in both:
            runner.take_down()
    return comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny")
    add("--batch", type=int, help="sequences in a step; default: the model's")
    add("--length", type=int, help="tokens in a sequence; default: the model's")
    add("--scan-layers", action="store_true")
    add("--peers", nargs="+", default=["*"], help="names or patterns such as 'zenflow-s4-*'")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=16, help="timed steps in a turn; whole windows for every peer")
    args = parser.parse_args()

    preset = MODELS[args.model]
    length = args.length or preset.length
    peers = [p for p in PEERS.values() if any(fnmatch.fnmatch(p.name, x) for x in args.peers)]
    peers = [p for p in peers if args.scan_layers or "-streamed" not in p.name]
    if not peers:
        parser.error(f"--peers {args.peers} matches none of {', '.join(PEERS)}")
    for peer in peers:
        if args.steps % peer.window:
            parser.error(f"--steps must be a multiple of {peer.window} for {peer.name}")
    config = preset.config._replace(positions=length)
    model = make_model(config, scan_layers=args.scan_layers, remat=True)
    batch = args.batch or preset.batch
    print(
        f"{args.model}, {model.parameters / 1e6:,.2f} M parameters, jax {jax.__version__}, "
        f"{jax.devices()[0].device_kind}, {batch} x {length} tokens in a step",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        # Peers that differ only in window length share a device program, which is compiled once.
        if jax.config.values["jax_compilation_cache_dir"] is None:
            jax.config.update("jax_compilation_cache_dir", folder)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        comparison = compare(
            model,
            peers,
            batch=batch,
            length=length,
            vocabulary=preset.config.vocabulary,
            rounds=args.rounds,
            steps=args.steps,
            save=lambda _: None,
        )
    print(f"\n{table(comparison)}")


if __name__ == "__main__":
    main()
