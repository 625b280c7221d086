"""What does a window cost the host: mail kept until its update or added up as it comes, hand-over?

    python -m benchmarks.host_window --millions 256 --rounds 7 --threads 2

Takes in the bf16 mail of windows of 1 to 16 steps and makes their updates, as the engine's worker
does, without a device. Both ways take turns in one process, each on a state of its own; the bits of
masters and uploads are compared at the end. Prints for each length the median milliseconds of a
window, the median of the ratio over the rounds, and how much host memory sums and kept mail take.
Then what the host's part of a hand-over takes, all selected channels being others afterwards, and
its ratio to the update that follows it.
Answers: `benchmarks/LOG.md`.
"""

import argparse
import statistics
import time

import ml_dtypes
import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState, SelectedRows
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import AdamScalars
from zenflow_jax._plan.schedule import Schedule

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = (1, 2, 4, 8, 16)
WIDTH = 4096
SELECTED = 0.05
SCALARS = AdamScalars(1e-4, 0.9, 0.999, 0.1, 0.001, 1e-8, 0.01)


def new_host(leaves: int, adam: HostAdam, axis: int = 0) -> HostState:
    """Square bf16 matrices."""
    k = int(SELECTED * WIDTH)
    specs = [
        LeafSpec(f"w{i}", (WIDTH, WIDTH), BFLOAT16, axis=axis, k=k, decay=True)
        for i in range(leaves)
    ]
    rng = np.random.default_rng(0)
    weights = (rng.standard_normal(spec.shape, np.float32).astype(BFLOAT16) for spec in specs)
    chosen = (np.sort(rng.choice(WIDTH, k, replace=False))[None].astype(np.int32) for _ in specs)
    together = Schedule(4, 64, 0, groups=1, staleness=4, window_scaling=None)
    return HostState(specs, weights, chosen, adam, together)


def window(host: HostState, mails: list[list[np.ndarray]], length: int, *, keep: bool) -> float:
    """Makes one window; the most mails that were kept, sums that are no state included."""
    most = 0.0
    for step in range(length):
        host.note(SCALARS)
        host.add(mails[step % len(mails)], 0.9)
        if not keep:
            host.add_up()
        sums = sum(leaf.total is not None for leaf in host.leaves) / len(host.leaves)
        most = max(most, host.mails_kept + 2 * sums)  # float32, so twice a mail
    for _ in host.update(host.close_window(0), lambda i, leaf: None):
        pass
    return most


def hand_over(
    host: HostState, mails: list[list[np.ndarray]], rng: np.random.Generator
) -> tuple[float, float]:
    """The times of a hand-over and of the update that follows, in ms."""
    for step in range(4):
        host.note(SCALARS)
        host.add(mails[step % len(mails)], 0.9)
    closed = host.close_window(0)
    moved = []
    for leaf in host.leaves:
        shape = leaf.spec.view4(leaf.spec.k)
        chosen = rng.choice(np.setdiff1d(np.arange(WIDTH), leaf.channels), leaf.spec.k, False)
        master, mu, nu = (np.ones(shape, np.float32) for _ in range(3))
        leaving = SelectedRows(master, mu, nu, np.ones(shape[::2], np.int32))
        moved.append((leaving, np.sort(chosen)[None].astype(np.int32)))
    start = time.perf_counter()
    for i, (leaving, chosen) in enumerate(moved):
        host.hand_over(closed, i, leaving, chosen)
    middle = time.perf_counter()
    for _ in host.update(closed, lambda i, leaf: None):
        pass
    return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)


def check_bits(a: HostState, b: HostState) -> None:
    """Both have the same masters and the same weights to send."""
    for x, y in zip(a.leaves, b.leaves, strict=True):
        for ours, theirs in zip(x.master.arrays, y.master.arrays, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=256, help="parameters, in 2**20")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    adam = HostAdam(threads=args.threads)
    leaves = max(1, args.millions * 2**20 // WIDTH**2)
    halves = {keep: new_host(leaves, adam) for keep in (False, True)}
    rng = np.random.default_rng(1)
    mails = []
    for _ in range(2):  # two, so that none is in the cache when it comes again
        mail = [rng.standard_normal((WIDTH, WIDTH), np.float32).astype(BFLOAT16)] * leaves
        mail = [x.copy() for x in mail]
        for x in mail:
            x.flags.writeable = False
        mails.append(mail)
    print(f"{leaves * WIDTH**2 / 2**20:.0f} M bf16 parameters, {adam.threads} threads; ms a window")
    print(f"{'steps':>5} {'as it comes':>12} {'kept':>8} {'kept / as it comes':>19}   bytes beside")
    for length in LENGTHS:
        times: dict[bool, list[float]] = {False: [], True: []}
        most: dict[bool, float] = {}
        for turn in range(args.rounds + 1):
            for keep in (False, True) if turn % 2 else (True, False):
                start = time.perf_counter()
                most[keep] = window(halves[keep], mails, length, keep=keep)
                if turn:  # the first one compiles
                    times[keep].append(1e3 * (time.perf_counter() - start))
        ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
        print(
            f"{length:5} {statistics.median(times[False]):12.1f}"
            f" {statistics.median(times[True]):8.1f} {statistics.median(ratios):19.3f}"
            f"   {2 * most[False]:.0f} and {2 * most[True]:.0f} per parameter",
            flush=True,
        )
    check_bits(halves[False], halves[True])
    print("the same bits")
    del halves
    for axis, name in ((0, "leading"), (1, "trailing")):
        host = new_host(leaves, adam, axis)
        both = [hand_over(host, mails, rng) for _ in range(args.rounds + 1)][1:]
        print(
            f"hand-over, {name} channel axis: {statistics.median(x for x, _ in both):.1f} ms,"
            f" {statistics.median(x / y for x, y in both):.2f} of the update",
            flush=True,
        )
    adam.close()


if __name__ == "__main__":
    main()
