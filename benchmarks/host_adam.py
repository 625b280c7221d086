"""How close is the host update to the memory-bandwidth limit, and how does it compare with peers?

    python -m benchmarks.host_adam --millions 64 --rounds 13 --threads 2

Prints the median in ms with its interquartile range and the minimum, without compilation, and the
median ratio to the memory-bandwidth limit and to DeepSpeed's CPUAdam. The rows are interleaved in
one process and share their arrays. The limit moves the same bytes in the same order without
computing. Peers that are not installed are reported and skipped. Answers: `benchmarks/LOG.md`.

In zenflow, a bfloat16 weight is half of its master, so an update moves 2 bytes less than a peer's
update. Peers keep a float32 master, cast the gradient before their step, and cast the weight after
it, as in their own offloading.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import ml_dtypes
import numba
import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import HostArray, new_moments
from zenflow_jax._spec.scalars import AdamScalars, window_step

Run = Callable[[], object]
LIMIT, TORCH, DEEPSPEED = "memory bandwidth", "torch.optim.AdamW(fused)", "DeepSpeed CPUAdam"
WIDTH = 4096  # elements in a channel
RATE, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01


class Arrays(NamedTuple):
    """One leaf's state, `(1, n, WIDTH)`, which every row of the table uses."""

    p: np.ndarray
    m: np.ndarray
    v: np.ndarray
    g: np.ndarray
    g16: np.ndarray  # bfloat16
    out16: np.ndarray  # bfloat16: the upload, and one half of split masters
    rest16: np.ndarray  # int16: the other half
    compact: tuple[HostArray, HostArray]  # the same moments in 8 bits
    more16: list[np.ndarray]  # bfloat16, three other steps' gradients


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=64, help="elements, in 2**20")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    # OpenMP reads these variables when the peers load it. Passive: idle threads would otherwise
    # spin during the next row.
    os.environ |= {"OMP_NUM_THREADS": str(args.threads), "OMP_WAIT_POLICY": "PASSIVE"}

    arrays = new_arrays(args.millions)
    cases: dict[str, dict[str, Run]] = {}
    add_limits(cases, arrays, args.threads)
    for kernel, name in (("numba", "Numba"), ("numpy", "NumPy")):
        add_zenflow(cases, arrays, HostAdam(kernel, args.threads), name)
    for add_peer, name in ((add_torch, TORCH), (add_deepspeed, DEEPSPEED)):
        try:
            add_peer(cases, arrays, args.threads, name)
        except ImportError as error:
            print(f"left out: {name} ({error})")

    versions = f"numpy {np.__version__}, numba {numba.__version__}"
    print(f"{args.millions} Mi elements, {args.threads} threads, {args.rounds} rounds; {versions}")
    samples = interleaved(cases, args.rounds)
    for case, rows in samples.items():
        print(f"\n{case:54}{'ms':>12}{'least':>14}{'x limit':>9}{'x DeepSpeed':>13}")
        for name, ms in rows.items():
            quartiles = statistics.quantiles(ms, n=4)
            print(
                f"  {name:46}{quartiles[1]:12.1f} ± {quartiles[2] - quartiles[0]:<8.1f}"
                f"{min(ms):9.1f}{ratio(ms, rows.get(LIMIT)):>9}{ratio(ms, rows.get(DEEPSPEED)):>13}"
            )


def new_arrays(millions: int) -> Arrays:
    rng = np.random.default_rng(0)
    shape = (1, millions * 2**20 // WIDTH, WIDTH)
    p, g = (rng.standard_normal(shape, np.float32) for _ in range(2))
    m, v = np.full(shape, 1e-3, np.float32), np.full(shape, 1e-3, np.float32)
    g16 = g.astype(ml_dtypes.bfloat16)
    masters = HostArray.zeros(shape, g16.dtype)
    masters.write(p)
    assert masters.extra is not None
    compact = new_moments(shape, compact=True)
    for moment, x in zip(compact, (m, v), strict=True):
        moment.write(x)
    more = [g16.copy() for _ in range(3)]
    return Arrays(p, m, v, g, g16, masters.values, masters.extra, compact, more)


FLOAT32 = "float32 gradient (28 bytes)"
BFLOAT16 = "bf16 gradient, bf16 weight (26 bytes)"
WINDOW = "four bf16 gradients, bf16 weight (32 bytes)"


def add_limits(cases: dict[str, dict[str, Run]], x: Arrays, threads: int) -> None:
    pool = ThreadPoolExecutor(threads)

    def over_threads(function: Callable, *arrays: np.ndarray | None) -> Run:
        flat = [None if a is None else bits(a).reshape(-1) for a in arrays]
        edges = np.linspace(0, x.p.size, threads + 1).astype(int)

        def piece(begin: int, end: int) -> None:
            function(*(None if a is None else a[begin:end] for a in flat), np.float32(0))

        return lambda: list(pool.map(piece, edges[:-1], edges[1:]))

    whole, split = (x.p, None), (x.out16, x.rest16)
    for case, g, masters in ((FLOAT32, x.g, whole), (BFLOAT16, x.g16, split)):
        cases.setdefault(case, {})[LIMIT] = over_threads(stream, *masters, x.m, x.v, g)
    window = over_threads(stream_window, *split, x.m, x.v, x.g16, *x.more16)
    cases[WINDOW] = {LIMIT: window}


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


# Adding `zero` times the gradient does not change values, but the compiler cannot know this.
@numba.njit(nogil=True)
def stream(p, rest, m, v, g, zero):
    for i in range(p.size):
        x = zero * np.float32(g[i])
        m[i] += x
        v[i] += x
        if rest is None:
            p[i] += x
        else:
            p[i] ^= np.uint16(x)
            rest[i] ^= np.int16(x)


@numba.njit(nogil=True)
def stream_window(p, rest, m, v, g, h, j, k, zero):
    for i in range(p.size):
        x = zero * (np.float32(g[i]) + np.float32(h[i]) + np.float32(j[i]) + np.float32(k[i]))
        m[i] += x
        v[i] += x
        p[i] ^= np.uint16(x)
        rest[i] ^= np.int16(x)


def add_zenflow(cases: dict[str, dict[str, Run]], x: Arrays, adam: HostAdam, name: str) -> None:
    step = window_step(AdamScalars(RATE, B1, B2, 1 - B1, 1 - B2, EPS, DECAY), 1, False)
    channels = x.p.shape[:2]
    active = np.ones(channels, bool)
    whole, split = HostArray(x.p), HostArray(x.out16, x.rest16)

    def update(
        g,
        masters=split,
        more: Sequence[np.ndarray] = (),
        moments: tuple[HostArray, HostArray] = (HostArray(x.m), HostArray(x.v)),
    ) -> Run:
        gradients = [(a, 1.0) for a in (g, *more)]
        steps = np.full(active.shape, 10, np.int32)
        return lambda: list(adam.adamw(masters, *moments, steps, gradients, 0.25, active, step))

    cases[FLOAT32][name] = update(x.g, whole)
    cases[BFLOAT16][name] = update(x.g16)
    cases[WINDOW][name] = update(x.g16, more=x.more16)
    compact = update(x.g16, more=x.more16, moments=x.compact)
    cases[WINDOW][f"{name}, compact (20)"] = compact


def add_torch(cases: dict[str, dict[str, Run]], x: Arrays, threads: int, name: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    options = {"lr": RATE, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY}
    add_optimizer(cases, x, lambda p: torch.optim.AdamW([p], fused=True, **options), name)


def add_deepspeed(cases: dict[str, dict[str, Run]], x: Arrays, threads: int, name: str) -> None:
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]

    options = {"lr": RATE, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY}
    add_optimizer(cases, x, lambda p: DeepSpeedCPUAdam([p], adamw_mode=True, **options), name)


def add_optimizer(cases: dict[str, dict[str, Run]], x: Arrays, make: Callable, name: str) -> None:
    """Adds a torch optimizer that works on the same arrays, so that no row has better pages."""
    import torch  # pyright: ignore[reportMissingImports]

    p, g = torch.from_numpy(x.p.reshape(-1)), torch.from_numpy(x.g.reshape(-1))
    g16, out16, *more16 = (
        torch.from_numpy(bits(a).reshape(-1)).view(torch.bfloat16)
        for a in (x.g16, x.out16, *x.more16)
    )
    parameter = torch.nn.Parameter(p)
    parameter.grad = g
    optimizer = make(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    state["exp_avg"] = torch.from_numpy(x.m.reshape(-1))
    state["exp_avg_sq"] = torch.from_numpy(x.v.reshape(-1))
    sums = torch.zeros_like(g)

    def bfloat16() -> None:
        parameter.grad = sums.copy_(g16)
        optimizer.step()
        out16.copy_(p)

    def window() -> None:
        parameter.grad = sums.copy_(g16)
        for more in more16:
            sums.add_(more)
        optimizer.step()
        out16.copy_(p)

    def float32() -> None:
        parameter.grad = g
        optimizer.step()

    cases[FLOAT32][name] = float32
    cases[BFLOAT16][name] = bfloat16
    cases[WINDOW][name] = window


def interleaved(cases: dict[str, dict[str, Run]], rounds: int) -> dict[str, dict[str, list[float]]]:
    samples = {case: {name: [] for name in rows} for case, rows in cases.items()}
    for i in range(rounds + 1):  # the first compiles and is discarded
        for case, rows in cases.items():
            for name, run in rows.items():
                start = time.perf_counter()
                run()
                if i:
                    samples[case][name].append(1e3 * (time.perf_counter() - start))
    return samples


def ratio(ms: list[float], base: list[float] | None) -> str:
    if base is None:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(ms, base, strict=True)):.2f}"


if __name__ == "__main__":
    main()
