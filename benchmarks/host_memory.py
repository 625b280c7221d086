"""How much host memory does a run take, and how much of that is pinned? Beside the formula.

    python -m benchmarks.host_memory --millions 268

Trains square matrices for 12 steps on a CPU, each way in a process of its own, and saves
engine state, optimizer state and parameters with orbax after the eighth. Prints bytes per
parameter: the peak of the process above that of plain SGD on the same matrices, until the save and
with it; the most that jax had in pinned memory; the engine's arrays before the save; and what
`host_memory` says. On a CPU the process also has what would be on a device beside parameters: the
state of selected channels, the step's temporaries, an update that waits, and the parameters that a
merge makes; the column "device" has that, by the compiler and on paper. Code that is compiled
counts, too: the larger the model, the less. The device has so little to do that the host is always
late. Answers: `benchmarks/LOG.md`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import zenflow_jax
from benchmarks.gpu_stages.machine import status_bytes
from zenflow_jax.planning._host_work import needs_of

WIDTH, INTERVAL, RATIO = 4096, 4, 0.05
BEFORE, AFTER = 8, 4  # steps before the save and after it
# Of each way what the optimizer is told, and how the engine keeps moments.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "in turn": ({}, "float32"),
    "at once": ({"rolling": False}, "float32"),
    "after_step": ({"send_gradients": "after_step"}, "float32"),
    "per_window": ({"send_gradients": "per_window"}, "float32"),
    "compact": ({}, "compact"),
    "compact per_window": ({"send_gradients": "per_window"}, "compact"),
}


class Most:
    """The most that `measure` gave while this was open, asked again and again on a thread."""

    def __init__(self, measure: Callable[[], int], every_s: float):
        self._measure, self._every_s = measure, every_s

    def __enter__(self) -> "Most":
        self.most = self._measure()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most = max(self.most, self._measure())


def most_resident() -> Most:
    return Most(partial(status_bytes, "VmRSS"), every_s=0.01)


def pinned_now() -> int:
    """Bytes of jax's arrays in pinned memory."""
    sizes: dict[int, int] = {}  # by address: several arrays may be of one buffer
    for x in jax.live_arrays():
        if x.sharding.memory_kind == "pinned_host":
            try:
                sizes[x.unsafe_buffer_pointer()] = x.nbytes
            except (RuntimeError, ValueError):  # freed meanwhile
                continue
    return sum(sizes.values())


def matrices(count: int, dtype: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)

    def one() -> jax.Array:
        x = rng.standard_normal((WIDTH, WIDTH), np.float32).astype(dtype)
        return jax.device_put(x, jax.devices()[0])

    return {f"w{i}": one() for i in range(count)}


def plain(count: int, dtype: str) -> dict[str, float]:
    """The peak of a process that trains with SGD."""
    with most_resident() as peak:
        params = matrices(count, dtype)
        step = jax.jit(lambda p: jax.tree.map(lambda x: x - 1e-4 * (x * 0.01), p), donate_argnums=0)
        for _ in range(BEFORE + AFTER):
            params = step(params)
        jax.block_until_ready(params)
    return {"training": peak.most, "saving": peak.most}


def measured(way: str, count: int, dtype: str, folder: Path) -> dict[str, float]:
    """Peaks of a process that trains with zenflow and saves, and what the formula says."""
    options, host_state = WAYS[way]
    tx = zenflow_jax.zenflow(1e-4, topk_ratio=RATIO, update_interval=INTERVAL, **options)

    def one_step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda p: p * 0.01, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(one_step, donate_argnums=(0, 1))
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(use_compression=False),
        engine=zenflow_jax.EngineCheckpointHandler(),
    )
    with most_resident() as training, Most(pinned_now, every_s=0.02) as pinned:
        params = matrices(count, dtype)
        state = tx.init(params)
        need = needs_of(state, host_state=host_state)
        step = step.lower(params, state).compile()
        engine = zenflow_jax.HostEngine(params, state, host_state=host_state)
        for _ in range(BEFORE):
            params, state = engine.exchange(*step(params, state))
        jax.block_until_ready(params)
    kept = engine.stats
    with most_resident() as saving, ocp.AsyncCheckpointer(handler) as checkpointer:
        start = time.perf_counter()
        on_device = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind != "pinned_host"]
        tree = ocp.args.PyTreeSave({"params": params, "opt_state": on_device})
        items = ocp.args.Composite(state=tree, engine=zenflow_jax.EngineSave(engine))
        checkpointer.save(folder / "step", items)
        del tree, items, on_device
        held = time.perf_counter() - start
        for _ in range(AFTER):
            params, state = engine.exchange(*step(params, state))
        checkpointer.wait_until_finished()
        params, state = engine.flush(params, state)
    engine.close()
    program = step.memory_analysis()
    assert program is not None
    size, wide = count * WIDTH**2, jnp.dtype(dtype).itemsize
    groups = 1 if way == "at once" else INTERVAL
    of_step = program.argument_size_in_bytes + program.temp_size_in_bytes - wide * size
    if way == "after_step":  # mail, until it has left
        of_step += program.output_size_in_bytes - program.argument_size_in_bytes
    return {
        "training": training.most,
        "saving": max(training.most, saving.most),
        "pinned": pinned.most,
        "arrays": kept.host_bytes,
        "state": need.state,
        "sums": need.sums,
        "mail": need.mail,
        "hand_over": 2 * need.hand_over,
        "saves": need.saving,
        # Beside parameters: arguments and temporaries of the step; an update that waits; the
        # parameters that it becomes.
        "device": of_step + size * 2 * wide / groups,
        "held_s": held,
    }


def in_a_process(way: str, count: int, dtype: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.host_memory", "--one", way, str(count)]
    command += ["--dtype", dtype, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=268)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--folder", type=Path, default=None, help="to save in; a temporary one")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        if args.one:
            way, count = args.one[0], int(args.one[1])
            sgd = way == "sgd"
            peaks = plain(count, args.dtype) if sgd else measured(way, count, args.dtype, folder)
            print(json.dumps(peaks))
            return
        count = max(1, round(args.millions * 1e6 / WIDTH**2))
        size = count * WIDTH**2
        base = in_a_process("sgd", count, args.dtype, folder)
        print(f"{size / 1e6:.0f} M {args.dtype} parameters, S = {INTERVAL}, jax {jax.__version__}")
        print(f"SGD: {base['training'] / size:.1f} bytes per parameter in all; above it:")
        print(f"{'':18} {'measured':^31} | formula")
        columns = ("training", "saving", "pinned", "arrays")
        formula = ("state", "sums", "mail", "hand_over", "device", "saves")
        print(f"{'':18}", *(f"{x:>9}" for x in (*columns, *formula, "training", "held, s")))
        for way in WAYS:
            r = in_a_process(way, count, args.dtype, folder)
            for name, peak in base.items():
                r[name] -= peak
            of_training = sum(r[name] for name in formula if name != "saves")
            each = [*(r[name] for name in (*columns, *formula)), of_training]
            shown = (f"{x / size:9.2f}" for x in each)
            print(f"{way:18}", *shown, f"{r['held_s']:9.2f}", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
