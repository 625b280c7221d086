"""Do more devices and more processes divide what the deferred half costs?

    python -m benchmarks.scaling

Runs a model of a few matrices on 1 to 8 forced CPU devices, in one process and in 2 and 4 that talk
over gloo, with and without `partition_replicated`. Bytes are per parameter of the whole model. The
devices share the cores of one machine, so the times say little: look at the counts. Answers:
`benchmarks/LOG.md`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zenflow_jax
from benchmarks.collectives import collectives

INTERVAL = 4
RATIO = 0.05

# The model, and the examples of a device.
MATRICES, WIDTH, BATCH = 8, 1024, 16
WARM_UP, WINDOWS = 2, 6  # windows not measured (they compile, and select), and measured
LAYOUTS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (4, 1), (4, 2))  # processes x devices
TIMEOUT_S = 150


class Variant(NamedTuple):
    axis: str  # of the mesh: "data" holds every matrix whole, "fsdp" cuts it
    partition: bool


def variants(devices: int) -> list[Variant]:
    found = [Variant("data", True)]
    if devices > 1:
        found.append(Variant("data", False))
    if devices == 8:
        found.append(Variant("fsdp", True))
    return found


class Result(NamedTuple):
    """Of one process. Bytes and seconds are those of a step unless said otherwise."""

    to_host: float  # bytes of mail of one device, from the arrays
    read: float  # bytes of mail that the engine read
    to_device: float  # bytes that the engine gave to one device
    host_bytes: int  # that the engine keeps in NumPy arrays
    pinned: int  # bytes of one step's mail on all devices of the process
    elements: int  # that a window's host update is about
    work_ms: float  # of the worker, a window
    exchange_ms: float  # of the caller, outside of boundaries, median
    boundary_ms: float
    sent: int  # bytes that one device sends to others
    sent_sgd: int  # the same with `optax.sgd` in place of `zenflow`


def measure(variant: Variant) -> Result:
    mesh = jax.make_mesh(
        (len(jax.devices()),), (variant.axis,), axis_types=(AxisType.Auto,), devices=jax.devices()
    )
    names = [f"w{i}" for i in range(MATRICES)]
    whole = NamedSharding(mesh, PartitionSpec())
    # Cut along the axis that is not the channels'.
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp")) if variant.axis == "fsdp" else whole
    rng = np.random.default_rng(0)

    def put(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(values.shape, sharding, values.__getitem__)

    def weights() -> dict[str, jax.Array]:
        scale = WIDTH**-0.5
        return {
            name: put((scale * rng.normal(size=(WIDTH, WIDTH))).astype(jnp.bfloat16), cut)
            for name in names
        }

    examples = rng.normal(size=(BATCH * mesh.size, WIDTH)).astype(jnp.bfloat16)
    batch = put(examples, NamedSharding(mesh, PartitionSpec(variant.axis)))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for name in names:
            x = jnp.tanh(x @ params[name])
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def compiled(tx: Any, params: Any, state: Any) -> Any:
        def step(params: Any, state: Any, batch: jax.Array) -> Any:
            updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()

    def sent(program: Any) -> int:
        return sum(c.sent for c in collectives(program.as_text()))

    params = weights()
    sgd = optax.sgd(1e-3)
    sent_sgd = sent(compiled(sgd, params, sgd.init(params)))
    tx = zenflow_jax.zenflow(
        1e-3,
        topk_ratio=RATIO,
        update_interval=INTERVAL,
        max_grad_norm=1.0,
        partition_replicated=variant.partition,
    )
    state = zenflow_jax.find_state(tx.init(params))
    step = compiled(tx, params, state)
    mail = jax.tree.leaves((state.mail, state.step_scalars))
    times: dict[bool, list[float]] = {False: [], True: []}
    with zenflow_jax.HostEngine(params, state) as engine:
        before = engine.stats
        for i in range(1, (WARM_UP + WINDOWS) * INTERVAL + 1):
            params, state = step(params, state, batch)
            jax.block_until_ready(params)
            start = time.perf_counter()
            params, state = engine.exchange(params, state)
            times[i % INTERVAL == 0].append(time.perf_counter() - start)
            if i == WARM_UP * INTERVAL:
                params, state = engine.flush(params, state)
                before = engine.stats
                times = {False: [], True: []}
        params, state = engine.flush(params, state)
        after = engine.stats
    steps = after.steps - before.steps
    return Result(
        to_host=sum(x.addressable_data(0).nbytes for x in mail),
        read=(after.bytes_to_host - before.bytes_to_host) / steps,
        to_device=(after.bytes_to_device - before.bytes_to_device)
        / steps
        / jax.local_device_count(),
        host_bytes=after.host_bytes,
        pinned=sum(s.data.nbytes for x in mail for s in x.addressable_shards),
        elements=sum(map(_deferred, state.leaves, state.mail)),
        work_ms=1e3 * (after.work_s - before.work_s) / WINDOWS,
        exchange_ms=1e3 * statistics.median(times[False]),
        boundary_ms=1e3 * statistics.median(times[True]),
        sent=sent(step),
        sent_sgd=sent_sgd,
    )


def _deferred(leaf: Any, mail: Any) -> int:
    """Elements of deferred channels in the parts of a leaf that this process has."""
    parts = {str(s.index): s.data.size for s in mail.addressable_shards}
    n, k = leaf.spec.n, leaf.spec.k
    return sum(parts.values()) * (n - k) // n


def one_process(index: int, processes: int, port: int) -> None:
    """What each started process runs: prints one line of JSON."""
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
    print(json.dumps([measure(variant) for variant in variants(jax.device_count())]))


def start(processes: int, devices: int) -> list[list[Result]]:
    """The results of each process, by variant."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.scaling", "--processes", str(processes)]
    started = [
        subprocess.Popen(
            [*command, "--port", str(port), "--process", str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise RuntimeError(f"a process failed: {[process.returncode for process in started]}")
    return [[Result(*r) for r in json.loads(out.splitlines()[-1])] for out in outputs]


def measured() -> None:
    parameters = MATRICES * WIDTH * WIDTH
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores; {MATRICES} matrices of {WIDTH}x{WIDTH}, "
        f"bfloat16, S = {INTERVAL}, ratio {RATIO}; bytes per parameter"
    )
    print(
        "processes x devices, mesh, parts |"
        " a device, a step: to the host, from it, sent to others (with sgd) |"
        " a process: mail, mail read, host arrays, million elements and ms of a host update |"
        " ms of an exchange, at a boundary"
    )
    for processes, devices in LAYOUTS:
        results = start(processes, devices)
        of_all = zip(*results, strict=True)
        for variant, of_each in zip(variants(processes * devices), of_all, strict=True):
            # The largest of all processes, where they differ.
            r = Result(*map(max, zip(*of_each, strict=True)))
            mesh = f"{variant.axis}={processes * devices}"
            n = parameters
            print(
                f"{processes}x{devices} {mesh:7} {'parts' if variant.partition else 'whole':5}",
                f"{r.to_host / n:6.3f} {r.to_device / n:6.3f}",
                f"{r.sent / n:6.3f} ({r.sent_sgd / n:.3f})",
                f"{r.pinned / n:6.3f} {r.read / n:6.3f} {r.host_bytes / n:7.3f}",
                f"{r.elements / 1e6:6.2f} {r.work_ms:6.1f}",
                f"{r.exchange_ms:6.2f} {r.boundary_ms:6.2f}",
                sep="  ",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("process", "processes", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is None:
        measured()
    else:
        one_process(args.process, args.processes, args.port)


if __name__ == "__main__":
    main()
