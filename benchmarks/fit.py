"""Does `update_interval="fit"` choose the windows behind which the host's work hides?

    python -m benchmarks.fit --tokens 64 512

Trains a tree shaped like a small Llama, layer after layer on so many tokens: the more, the longer a
step takes, and the host's work stays the same. For each number of tokens a run with "fit" measures
and chooses. Then a run with windows of each length says what was to be foreseen: the share of the
device's time that the host worked, and the share of all time that the loop waited for it. Answers:
`benchmarks/LOG.md`.
"""

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import zenflow_jax
from benchmarks.evenness import FFN, LAYERS, WIDTH, parameters, shapes
from zenflow_jax._plan.rules import INTERVALS
from zenflow_jax._planner.fit import WindowFit

SETTLED, STEPS = 48, 96


def loss(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        query, key, value, out, gate, up, down = params[1 + 7 * i : 8 + 7 * i]
        x = x + jnp.tanh((x @ query) * (x @ key)) @ out + x @ value
        x = x + (jnp.tanh(x @ gate) * (x @ up)) @ down
        x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1)
    return jnp.mean(jnp.square((x @ params[-1]).astype(jnp.float32)))


def train(tokens: int, window: zenflow_jax.FitWindow) -> dict[str, float]:
    """Milliseconds of a step, and shares of time, once windows have changed."""
    params = [0.02 * x for x in parameters()]
    x = jax.random.normal(jax.random.key(1), (tokens, WIDTH), jnp.bfloat16)
    tx = zenflow_jax.zenflow(1e-5, topk_ratio=0.05, update_interval=window, select_interval=4096)
    state = tx.init(params)

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    with zenflow_jax.HostEngine(params, state) as engine:
        before, begin = engine.stats, time.perf_counter()
        for t in range(STEPS):
            if t == SETTLED:
                engine._settle()
                before, begin = engine.stats, time.perf_counter()
            params, state = step(params, state, x)
            params, state = engine.exchange(params, state)
        engine._settle()
        seconds, after = time.perf_counter() - begin, engine.stats
        device = sum(
            s.end - s.start
            for s in engine.timeline.spans
            if s.row == "device" and s.number > SETTLED
        )
        engine.flush(params, state)
    return {
        "interval": after.update_interval or 0,
        "step_ms": 1e3 * seconds / (STEPS - SETTLED),
        "worked": (after.work_s - before.work_s) / device,
        "waited": (after.wait_s - before.wait_s) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    args = parser.parse_args()
    size = sum(a * b for a, b in shapes())
    print(f"{size / 1e6:.0f} M bf16 parameters, width {WIDTH}, {FFN} between; {STEPS} steps")
    print("| tokens | S | foreseen: busy | host worked | loop waited | ms a step | chosen |")
    print("|---|---|---|---|---|---|---|")
    foreseen: dict[int, float] = {}
    busy = WindowFit.busy

    def noted(self: WindowFit, *args: Any, **more: Any) -> dict[int, float]:
        foreseen.update(found := busy(self, *args, **more))
        return found

    WindowFit.busy = noted
    for tokens in args.tokens:
        chosen = train(tokens, zenflow_jax.FitWindow())["interval"]
        for interval in INTERVALS:
            found = train(tokens, zenflow_jax.FitWindow(interval))
            print(
                f"| {tokens} | {interval} | {foreseen[interval]:.2f} | {found['worked']:.2f} | "
                f"{found['waited']:.2f} | {found['step_ms']:.0f} | "
                f"{'yes' if interval == chosen else ''} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
