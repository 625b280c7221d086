"""How much host memory does a checkpoint add, and how long does the loop stand still for it?

    python -m benchmarks.save_memory --millions 268
    python -m benchmarks.save_memory --millions 268 --compressed

Trains square bfloat16 matrices with an engine, for a few steps, and saves parameters, optimizer
state without mail, and engine state with orbax: blocking, of a copy of the engine's state and of
its own arrays, and asynchronously while training goes on. Prints the process's peak resident memory
above what it had before the save, in bytes per parameter, and the seconds that the loop was held
up. Memory that the process has freed goes back to the system before each row. Answers:
`benchmarks/LOG.md`.
"""

import argparse
import ctypes
import gc
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import zenflow_jax
from benchmarks.watched import Most, most_resident

WIDTH = 4096
INTERVAL = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=268)
    parser.add_argument("--folder", type=Path, default=None, help="to save in; a temporary one")
    parser.add_argument("--compressed", action="store_true", help="as orbax does by default")
    parser.add_argument("--concurrent-gb", type=int, help="what orbax may have in work at once")
    args = parser.parse_args()
    count = max(1, round(args.millions * 1e6 / WIDTH**2))
    rng = np.random.default_rng(0)
    params = {
        f"w{i}": jax.device_put(
            rng.standard_normal((WIDTH, WIDTH), np.float32).astype(jnp.bfloat16), jax.devices()[0]
        )
        for i in range(count)
    }
    size = count * WIDTH**2
    tx = zenflow_jax.zenflow(1e-4, topk_ratio=0.05, update_interval=INTERVAL)
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        gradients = jax.tree.map(lambda p: p * 0.01, params)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    folder = Path(tempfile.mkdtemp(dir=args.folder))
    print(f"{size / 1e6:.0f} M parameters, jax {jax.__version__}, orbax {ocp.__version__}")
    print(f"{'':34} {'peak added, bytes per parameter':>32} {'held up, s':>12} {'in all, s':>10}")

    def show(name: str, peak: Most, held: float, total: float) -> None:
        print(f"{name:34} {peak.added / size:32.2f} {held:12.2f} {total:10.2f}", flush=True)

    try:
        with (
            zenflow_jax.HostEngine(params, state) as engine,
            ocp.AsyncCheckpointer(
                ocp.PyTreeCheckpointHandler(
                    use_compression=args.compressed, save_concurrent_gb=args.concurrent_gb
                )
            ) as checkpointer,
        ):

            def train(steps: int) -> None:
                nonlocal params, state
                for _ in range(steps):
                    params, state = engine.exchange(*step(params, state))
                jax.block_until_ready(params)

            def save(name: str, engine_state: Any) -> None:
                # Blank mail is no state; orbax would copy what has a leading axis of one.
                on_device = [
                    x for x in jax.tree.leaves(state) if x.sharding.memory_kind != "pinned_host"
                ]
                tree = {"params": params, "opt_state": on_device, "engine": engine_state}
                checkpointer.save(folder / name, ocp.args.PyTreeSave(tree))

            def measure(name: str, save: Callable[[], float]) -> None:
                engine.state()  # the worker is at rest before and after
                gc.collect()
                ctypes.CDLL("libc.so.6").malloc_trim(0)
                with most_resident() as peak:
                    start = time.perf_counter()
                    held = save()
                    total = time.perf_counter() - start
                show(name, peak, held, total)

            def none() -> float:
                train(2 * INTERVAL)
                return 0.0

            def blocking() -> float:
                start = time.perf_counter()
                save("blocking", engine.state())
                checkpointer.wait_until_finished()
                return time.perf_counter() - start

            def asynchronous() -> float:
                start = time.perf_counter()
                save("async", engine.state())
                held = time.perf_counter() - start
                train(2 * INTERVAL)
                checkpointer.wait_until_finished()
                return held

            def state_alone() -> float:
                start = time.perf_counter()
                engine.state()
                return time.perf_counter() - start

            train(3 * INTERVAL + 1)  # compiled, selected, and in mid-window
            measure("two windows, nothing saved", none)
            measure("engine.state() alone", state_alone)
            measure("blocking save", blocking)
            measure("async save, two windows meanwhile", asynchronous)
            written = sum(x.stat().st_size for x in (folder / "blocking").rglob("*") if x.is_file())
            print(f"written: {written / size:.2f} bytes per parameter")
            params, state = engine.flush(params, state)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
