"""How much device memory does the step of each peer in `step_time.py` need on a GPU?

    export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
    python -m benchmarks.step_time_memory --model 1b

Compiles the steps for an NVIDIA H200, without needing one, as `gpu_program.py` does, and prints the
same columns: bytes per parameter at the peak, for temporaries and for mail, and the share of mail
that leaves before the last matmul. An engine's arrays are not in the program: pending uploads (2
bytes), and gradients in flight (`-exchange`: 2 bytes). Answers: `benchmarks/LOG.md`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.program_report import COLUMNS, Report, report
from benchmarks.step_time_model import MODELS, Model, make_model
from benchmarks.step_time_peers import PEERS, Peer, is_parked, make_step
from zenflow_jax import planning


def compile_step(peer: Peer, model: Model, batch: int, length: int) -> Report:
    mesh = planning.described_mesh("h200", {"data": 1})
    device = NamedSharding(mesh, PartitionSpec())
    host = NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")

    def put(x: Any, sharding: NamedSharding = device) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    step, arguments = abstract_call(peer, model, batch, length, put, lambda x: put(x, host))
    return report(step.lower(*arguments).compile(), arguments[0])


def abstract_call(
    peer: Peer,
    model: Model,
    batch: int,
    length: int,
    put: Callable[[Any], jax.ShapeDtypeStruct],
    park: Callable[[Any], jax.ShapeDtypeStruct],
) -> tuple[Any, Any]:
    """Returns a peer's jitted step, and the shapes of its arguments: parameters, state, tokens.

    Args:
        peer: The peer.
        model: Its model.
        batch: Sequences in a step.
        length: Tokens in each sequence.
        put: Places a shape on the device.
        park: Places a shape in host memory.
    """
    optimizer = peer.make()
    params = jax.tree.map(put, model.shapes)
    # The step does not read the mail in `zenflow`'s state, so its memory does not matter.
    state = jax.tree.map(put, optimizer.abstract(params))
    if peer.name == "parked":
        state = jax.tree.map(lambda x: park(x) if is_parked(x) else x, state)
    placement = None if peer.offloads else jax.tree.map(lambda x: x.sharding, (params, state))
    tokens = put(jax.ShapeDtypeStruct((peer.micro_batches, batch, length + 1), jnp.int32))
    step = make_step(model.graphdef, optimizer, peer.micro_batches, placement)
    return step, (params, state, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--scan-layers", action="store_true")
    parser.add_argument("--peers", nargs="+", choices=PEERS, help="default: all different programs")
    args = parser.parse_args()
    different = [x for x in PEERS if "-s" not in x or x.startswith("zenflow-s4-r0.05")]
    preset = MODELS[args.model]
    model = make_model(preset.config, scan_layers=args.scan_layers, remat=True)
    print(
        f"{args.model}, {model.parameters / 1e6:,.2f} M parameters, {preset.batch} x "
        f"{preset.length} tokens, jax {jax.__version__}; bytes per parameter"
    )
    print(f"{COLUMNS}   matmuls left at the first copy")
    for name in args.peers or different:
        if name.endswith("-streamed") and not args.scan_layers:
            continue
        program = compile_step(PEERS[name], model, preset.batch, preset.length)
        print(f"{name:36} {program.row()}", flush=True)


if __name__ == "__main__":
    main()
