"""How even is the load of host and bus over the steps of a window?

    python -m benchmarks.evenness

Trains nothing: a tree shaped like a small Llama takes steps with gradients that are drawn once,
with windows that leaves close in turn, and with windows that close at once. After every exchange
the loop waits until the host has nothing to do, so that bytes and seconds belong to the step that
caused them. Prints both for each step of a window, medians over the windows that are measured, and
the ratio of the largest to the mean. Answers: `benchmarks/LOG.md`.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import optax

import zenflow_jax

LAYERS, WIDTH, FFN, VOCABULARY = 8, 512, 1408, 8192


def shapes() -> list[tuple[int, int]]:
    layer = [*[(WIDTH, WIDTH)] * 4, *[(WIDTH, FFN)] * 2, (FFN, WIDTH)]
    return [(VOCABULARY, WIDTH), *layer * LAYERS, (WIDTH, VOCABULARY)]


def parameters() -> list[jax.Array]:
    """Drawn, and on the device."""
    keys = jax.random.split(jax.random.key(0), len(shapes()))
    params = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes(), strict=True)]
    return jax.device_put(params, jax.devices()[0])


def measure(
    window: int, sending: str, windows: int, *, rolling: bool
) -> tuple[list[float], list[float]]:
    """Megabytes to the device and milliseconds of the host's work, for each step of a window."""
    params = parameters()
    gradients = jax.tree.map(lambda p: p * 1e-2, params)
    tx = zenflow_jax.zenflow(
        1e-4,
        topk_ratio=0.05,
        update_interval=window,
        select_interval=1000 * window,  # the first selection is over before anything is measured
        rolling=rolling,
        send_gradients=sending,
    )
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with zenflow_jax.HostEngine(params, state) as engine:
        found: list[tuple[list[float], list[float]]] = [([], []) for _ in range(window)]
        before = engine.stats
        for i in range(window * (windows + 2)):
            params, state = step(params, state)
            params, state = engine.exchange(params, state)
            engine._settle()
            after = engine.stats
            if i >= 2 * window:
                sent, worked = found[i % window]
                sent.append((after.bytes_to_device - before.bytes_to_device) / 1e6)
                worked.append(1e3 * (after.work_s - before.work_s))
            before = after
        engine.flush(params, state)
    return (
        [statistics.median(sent) for sent, _ in found],
        [statistics.median(worked) for _, worked in found],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--windows", type=int, default=8, help="how many are measured")
    parser.add_argument("--send-gradients", default="during_step")
    args = parser.parse_args()
    size = sum(a * b for a, b in shapes())
    print(
        f"{size / 1e6:.0f} M bf16 parameters in {len(shapes())} leaves, S = {args.window}, medians"
    )
    print("| windows close | what | each step of a window | largest / mean |\n|---|---|---|---|")
    for rolling, name in ((True, "in turn"), (False, "at once")):
        rows = measure(args.window, args.send_gradients, args.windows, rolling=rolling)
        for what, values in zip(("MB to the device", "ms of the host"), rows, strict=True):
            each = ", ".join(f"{x:.1f}" for x in values)
            ratio = max(values) / statistics.fmean(values)
            print(f"| {name} | {what} | {each} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
