"""What do `zenflow`'s update and `exchange` cost beside `optax.adamw`'s update?

    python -m benchmarks.overhead --repeats 40
    python -m benchmarks.overhead --repeats 20 --rest 0.05 --send-gradients after_step

The same float32 tree, whole on a CPU device, once as few large leaves and once as ever more small
ones. On a CPU nothing is offloaded: mail and uploads are copies in the same memory and the worker
takes cores from the device, so the first table bounds the overhead from above. The second has
leaves so small that what is left is the cost of Python and dispatch, with its growth per leaf.
With `--rest` the loop sleeps before each exchange, so that the worker is at rest, as it is beside a
longer step, and what is left of `exchange` is the caller's own. Medians with quartiles, the
optimizers step by step in turn: windows of all leaves at once, and of leaves in turn. "Slowest" is
the median of those steps of a window that take longest. Answers: `benchmarks/LOG.md`.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import zenflow_jax

Tree = dict[str, jax.Array]
INTERVAL = 4


class Case(NamedTuple):
    leaves: int
    rows: int
    columns: int


class Times(NamedTuple):
    """Milliseconds: lower quartile, median, upper quartile."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:9.2f} ({self.low:.2f}-{self.high:.2f})"


def times(samples: list[float]) -> Times:
    return Times(*statistics.quantiles([1e3 * s for s in samples], n=4))


class AdamW:
    """The peer: one jitted update, donated as users do."""

    def __init__(self, params: Tree):
        tx = optax.adamw(1e-3)
        self.params, self.state = params, tx.init(params)
        self.step = jax.jit(partial(_update, tx), donate_argnums=(0, 1))

    def __call__(self, gradients: Tree) -> dict[str, float]:
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, gradients)
        jax.block_until_ready(self.params)
        return {"step": time.perf_counter() - start}


class ZenFlow:
    """Update and exchange; the exchange by itself, for each step of a window."""

    def __init__(self, params: Tree, sending: str, rest: float, *, rolling: bool):
        tx = zenflow_jax.zenflow(
            1e-3,
            topk_ratio=0.05,
            update_interval=INTERVAL,
            send_gradients=sending,
            rolling=rolling,
        )
        self.rest = rest
        self.params, self.state = params, tx.init(params)
        self.engine = zenflow_jax.HostEngine(self.params, self.state)
        self.step = jax.jit(partial(_update, tx), donate_argnums=(0, 1))
        self.count = 0

    def __call__(self, gradients: Tree) -> dict[str, float]:
        self.count += 1
        start = time.perf_counter()
        self.params, self.state = self.step(self.params, self.state, gradients)
        jax.block_until_ready(self.params)
        update = time.perf_counter() - start
        time.sleep(self.rest)
        done = time.perf_counter()
        self.params, self.state = self.engine.exchange(self.params, self.state)
        returned = time.perf_counter()
        jax.block_until_ready(self.params)
        end = time.perf_counter()
        exchange = returned - done
        where = f"exchange {self.count % INTERVAL}"
        return {
            "step": update + end - done,
            "update": update,
            "exchange": exchange,
            where: exchange,
        }


def _update(
    tx: optax.GradientTransformation, params: Tree, state: Any, gradients: Tree
) -> tuple[Tree, Any]:
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def measure(case: Case, repeats: int, sending: str, rest: float) -> None:
    device = jax.devices()[0]
    names = [f"leaf{i:04}" for i in range(case.leaves)]

    def tree(seed: int) -> Tree:
        keys = jax.random.split(jax.random.key(seed), case.leaves)
        shape = (case.rows, case.columns)
        return jax.device_put(
            {n: jax.random.normal(k, shape, jnp.float32) for n, k in zip(names, keys, strict=True)},
            device,
        )

    ours = {
        "in turn": ZenFlow(tree(0), sending, rest, rolling=True),
        "at once": ZenFlow(tree(0), sending, rest, rolling=False),
    }
    runs: dict[str, Callable[[Tree], dict[str, float]]] = {"adamw": AdamW(tree(0)), **ours}
    gradients = tree(1)
    samples: dict[tuple[str, str], list[float]] = {}
    # A whole number of windows; the first ones compile, the first boundaries also select.
    before = {name: run.engine.stats for name, run in ours.items()}
    for i in range(repeats * INTERVAL + 2 * INTERVAL):
        if i == 2 * INTERVAL:
            before = {name: run.engine.stats for name, run in ours.items()}
        for name, run in runs.items():
            for part, seconds in run(gradients).items():
                if i >= 2 * INTERVAL:
                    samples.setdefault((name, part), []).append(seconds)
    got = {key: times(s) for key, s in samples.items()}
    for name, run in ours.items():
        old, after = before[name], run.engine.stats
        run.engine.close()
        ratio = got[name, "step"].median / got["adamw", "step"].median
        print(
            f"{case.leaves:6} x {case.rows}x{case.columns}, {name}",
            got["adamw", "step"],
            got[name, "update"],
            got[name, "exchange"],
            max((got[name, f"exchange {i}"] for i in range(INTERVAL)), key=lambda t: t.median),
            f"{ratio:7.2f}",
            f"{1e3 * (after.work_s - old.work_s) / (after.steps - old.steps):9.2f}",
            sep="  ",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20, help="windows measured")
    parser.add_argument("--millions", type=int, default=16, help="parameters of the large trees")
    ways = ("during_step", "after_step")
    parser.add_argument("--send-gradients", choices=ways, default=ways[0])
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 100, 300, 1000])
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each exchange")
    args = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; ms: median (quartiles)")
    print(
        "  leaves x shape | adamw update | zenflow update | exchange | slowest |"
        " whole step / adamw | worker per step"
    )
    for leaves in (10, 100):
        large = Case(leaves, args.millions * 1_000_000 // (leaves * 1000), 1000)
        measure(large, args.repeats, args.send_gradients, args.rest)
    for leaves in args.leaves:
        measure(Case(leaves, 16, 16), args.repeats, args.send_gradients, args.rest)


if __name__ == "__main__":
    main()
