"""Do the stages' steps fit on a GPU, and does the compiler accept them?

    export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
    python -m benchmarks.gpu_stages.programs --gpu h100 --host-gib 125

Compiles every step that `step_time` and `headline` would run on such a machine, without needing one
(see `gpu_program.py`), and prints each step's device memory next to the allocator's limit. The
engine's bytes between steps, from `sizes.py`, are added. Answers: `benchmarks/LOG.md`.
"""

import argparse
import sys
import time
from typing import Any, NamedTuple

import jax

from benchmarks.gpu_stages import sizes
from benchmarks.gpu_stages.sizes import Machine
from benchmarks.step_time_memory import compile_step, trace_step
from benchmarks.step_time_model import make_model
from benchmarks.step_time_peers import PEERS
from train.model.decoder import DecoderConfig
from zenflow_jax.planning._gpus import GPUS

#: jax's share of a GPU's memory in `on_gpu.py`, minus CUDA's part: 0.7 GB on other GPUs.
_SHARE, _TAKEN = 0.92, 7e8


class Program(NamedTuple):
    """A step in a stage."""

    peer: str
    config: DecoderConfig
    scan: bool
    batch: int
    length: int
    held: float  # memory of the engine between steps, bytes per parameter
    expected: bool = True  # whether the step should fit


def described(gpu: str, host_gib: float) -> Machine:
    """Returns jax's share of a machine's memory."""
    return Machine(int(_SHARE * (GPUS[gpu].memory - _TAKEN)), int(host_gib * 2**30))


def programs(machine: Machine) -> list[Program]:
    """Returns every step of the stages once; windows of other lengths share the program."""
    known: dict[Any, Program] = {}

    def add(peer: str, prefetch: bool, *rest: Any, expected: bool = True) -> None:
        peer = sizes.program(peer)
        held = sizes.device_need(peer, scan=False, prefetch=prefetch) - sizes.STEP_BYTES[peer][0]
        new = Program(peer, *rest, held=held, expected=expected)
        known.setdefault(new[:5], new)

    beyond = sizes.beyond_adamw(machine)
    for part in sizes.step_time(machine):
        for peer in part.peers:
            fits = peer != "adamw" or beyond is None or part.config != beyond[1]
            add(peer, True, part.config, part.scan, part.batch, part.length, expected=fits)
    best = sizes.headline(machine)
    if best is not None:
        add(best.peer, False, best.config, True, best.batch, best.length)
        fits = not best.beats_adamw
        add("adamw", False, best.config, True, best.batch, best.length, expected=fits)
    return list(known.values())


def lower_for_cuda(program: Program) -> str:
    """Returns the program that XLA receives for a GPU, without needing a GPU or its compiler."""
    device = jax.devices()[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    model = make_model(program.config, scan_layers=program.scan, remat=True)
    traced, _ = trace_step(
        PEERS[program.peer],
        model,
        program.batch,
        program.length,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_device),
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=host),
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=("h100", "h200"), default="h100")
    parser.add_argument("--host-gib", type=float, default=125.0)
    parser.add_argument("--layers", type=int, help="layers per model, to check only compiling")
    parser.add_argument("--only", nargs="+", choices=("written", "scanned"), default=[])
    args = parser.parse_args()
    machine = described(args.gpu, args.host_gib)
    room = machine.device_bytes / 1e9
    print(f"{args.gpu}, {room:.1f} GB for jax, host {args.host_gib} GiB, jax {jax.__version__}")
    print(
        "| peer | parameters, M | layers | tokens | step's peak, GB | per parameter | held | fits |"
    )
    print("|" + "---|" * 8)
    for program in programs(machine):
        how = "scanned" if program.scan else "written"
        if args.only and how not in args.only:
            continue
        config = program.config
        if args.layers is not None:
            config = config._replace(layers=args.layers)
        start = time.monotonic()
        model = make_model(config, scan_layers=program.scan, remat=True)
        n, tokens = model.parameters, program.batch * program.length
        compiled = compile_step(PEERS[program.peer], model, program.batch, program.length, args.gpu)
        peak, held = compiled.peak_bytes / 1e9, program.held * n / 1e9
        fits = peak + held <= room
        note = "" if fits == program.expected else ", **not as planned**"
        print(
            f"| {program.peer} | {n / 1e6:,.0f} | {how} | {tokens:,} | {peak:.2f} "
            f"| {compiled.peak_bytes / n:.2f} | {held:.2f} | {'yes' if fits else 'no'}{note} |",
            flush=True,
        )
        del compiled
        print(f"{time.monotonic() - start:.0f} s", flush=True, file=sys.stderr)


if __name__ == "__main__":
    main()
