"""Runs of an engine, which tests compare with `comparisons.py`.

Gradients depend only on (seed, step), not on parameters, so a difference between two runs in one
step does not grow in the next.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import zenflow_jax
from tests.reference import Settings
from zenflow_jax._device.memory import read


class Leaf(NamedTuple):
    """A parameter. `axis` is its channel axis, counted from the end; None keeps it resident."""

    name: str
    shape: tuple[int, ...]
    axis: int | None
    dtype: str
    decay: bool = True
    speed: float = 1.0  # its `lr_scale`


Leaves = tuple[Leaf, ...]

# Names are in jax's order for dicts. Together, the three trees have channels on a leading or
# trailing axis, with and without a stack axis, and before the last two axes, mostly in both dtypes,
# and leaves that are resident because of their rank, the user's choice, or zero elements. A single
# tree with all of these would take three times as long to compile, in every setting. Leaves of the
# second tree have three learning rates.
FIRST: Leaves = (
    Leaf("bias", (5,), None, "bfloat16", decay=False),
    Leaf("columns", (4, 10), -1, "bfloat16"),
    Leaf("rows", (12, 5), -2, "float32"),
    Leaf("stack", (2, 7, 3), -2, "bfloat16"),
)
SECOND: Leaves = (
    Leaf("blocks", (6, 3, 2), -3, "bfloat16", speed=0.25),
    Leaf("kept", (3, 4), None, "float32", speed=3.0),
    Leaf("rows", (12, 5), -2, "bfloat16", decay=False, speed=3.0),
    Leaf("stacked_columns", (2, 3, 6), -1, "float32"),
)
THIRD: Leaves = (
    Leaf("columns", (4, 10), -1, "float32"),
    Leaf("none", (0, 3), None, "float32"),
    Leaf("stack", (2, 7, 3), -2, "float32", decay=False),
    Leaf("stacked_columns", (2, 3, 6), -1, "bfloat16"),
)
# These leaves are mostly stacks, which windows of three or four steps cut into ranges.
SCANNED: Leaves = (
    Leaf("layers", (7, 6, 4), -2, "bfloat16"),
    Leaf("rows", (10, 4), -2, "float32"),
    Leaf("wide", (3, 4, 8), -1, "float32", decay=False, speed=0.25),
)
# For tests that do not concern arithmetic.
FEW: Leaves = (
    Leaf("bias", (5,), None, "float32"),
    Leaf("columns", (4, 10), -1, "bfloat16"),
    Leaf("rows", (12, 5), -2, "float32"),
)
ONE: Leaves = (Leaf("columns", (4, 10), -1, "bfloat16"),)

# Has rolling windows, a warm-up, hand-overs, clipping and provisional steps.
EVERYTHING = Settings(
    topk_ratio=0.3,
    update_interval=4,
    select_interval=8,
    full_warm_up_rounds=2,
    weight_decay=0.1,
    max_grad_norm=5.0,
    provisional_share=0.5,
)
# Has windows of three steps, with a hand-over at each boundary.
BUSY = Settings(topk_ratio=0.3, update_interval=3, select_interval=3)
# Has longer windows, without hand-overs after the first.
CALM = Settings(topk_ratio=0.3, update_interval=4, select_interval=400)
# Like CALM, but all leaves close their windows together, and updates take a whole window.
TOGETHER = dataclasses.replace(CALM, rolling=False)
# The kernel that compiles only conversions. Both kernels give bit-identical results.
KERNEL = {"host_kernel": "numpy", "threads": 1}


class Plan(NamedTuple):
    """A run's length, and its special steps."""

    steps: int
    bad: tuple[int, ...] = ()  # steps whose gradient is not finite
    flush_at: tuple[int, ...] = ()  # steps after which the run is flushed


QUIET = Plan(0)


class History(NamedTuple):
    """A run's results."""

    params: list[dict[str, np.ndarray]]  # after each step
    selected: list[dict[str, np.ndarray]]  # channels after each step, without resident leaves
    moments: dict[str, tuple[np.ndarray, ...]]  # final master, mu, nu, steps in the leaf's shape
    skipped: int


def rate(count: Any) -> jax.Array:
    """Returns a schedule's rate, for a Python int or a traced int."""
    return 1e-2 * 0.95 ** jnp.asarray(count, jnp.float32)


@functools.cache
def rate_of(speed: float) -> Callable[[Any], jax.Array]:
    """Returns a multiple of the schedule `rate`; equal calls return the same function."""
    return rate if speed == 1 else lambda count: speed * rate(count)


def initial(leaves: Leaves, seed: int = 0) -> dict[str, jax.Array]:
    """Returns parameters, committed to the first device."""
    return place(initial_values(leaves, seed), None)


def initial_values(leaves: Leaves, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, 0))
    return {x.name: np.asarray(rng.normal(size=x.shape), np.dtype(x.dtype)) for x in leaves}


def place(values: dict[str, np.ndarray], shardings: Any) -> dict[str, jax.Array]:
    """Places arrays by their shardings or, without shardings, on this process's first device."""
    if shardings is None:
        return jax.device_put(values, jax.local_devices()[0])
    # Unlike `device_put`, this does not communicate with other processes.
    return {
        name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
        for name, x in values.items()
    }


def fetch(x: jax.Array) -> np.ndarray:
    """Copies a whole array, wherever its parts are."""
    whole = x.is_fully_addressable
    return np.array(x if whole else multihost_utils.process_allgather(x, tiled=True))


def gradients(leaves: Leaves, step: int, seed: int = 0, bad: bool = False) -> dict[str, np.ndarray]:
    """Returns a step's gradient, each leaf in its dtype; channels differ a lot, but briefly."""
    rng = np.random.default_rng((seed, step))
    values = {x.name: rng.normal(size=x.shape) * np.exp(rng.normal(size=x.shape)) for x in leaves}
    if bad:
        # Bad steps differ in the bad leaf, resident or offloaded, and in the bad value; the last
        # value is finite, but its square is not.
        names = [x.name for x in leaves if x.shape and 0 not in x.shape]
        flat = values[names[step % len(names)]].flat
        flat[step % len(flat)] = [np.nan, np.inf, 3e38][step % 3]
    return {x.name: np.asarray(values[x.name], np.dtype(x.dtype)) for x in leaves}


def apply(params: Any, updates: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
        return optax.apply_updates(params, updates)


def with_a_bit(x: jax.Array, place: tuple[int, ...], bit: int) -> jax.Array:
    """Returns `x` with a flipped bit, placed like `x`."""
    values = np.array(x)
    values.view(f"uint{8 * values.itemsize}")[place] ^= 1 << bit
    return jax.device_put(values, x.sharding)


def transformation(
    leaves: Leaves, settings: Settings, make: Any = zenflow_jax.zenflow, **more: Any
) -> Any:
    """Returns `zenflow` for these leaves; `make` may wrap it."""

    def of(path: Any) -> Leaf:
        # Not the last key, because flax nnx adds its own.
        return next(x for x in leaves if f"['{x.name}']" in jax.tree_util.keystr(path))

    return make(
        **{"learning_rate": rate, **vars(settings), **more},
        lr_scale=lambda path, _: of(path).speed,
        mask=lambda params: jax.tree.map_with_path(lambda path, _: of(path).decay, params),
        channel_axis=lambda path, _: of(path).axis,
        resident=lambda path, _: of(path).axis is None,
    )


@functools.cache
def programs(
    leaves: Leaves, settings: Settings, donate: bool, partition: bool, make: Any, optimized: bool
) -> tuple[Any, Any]:
    """Returns transformation and jitted step, compiled once for all runs."""
    tx = transformation(leaves, settings, make, partition_replicated=partition)
    return tx, jitted(tx, donate=donate)


@functools.cache
def init_on_devices(
    leaves: Leaves, settings: Settings, partition: bool, placed: tuple[tuple[str, Any], ...]
) -> Any:
    """Returns `tx.init` on a mesh as one program, shared by all runs.

    Outside jit, it consists of a hundred small programs, which compile again for each placement.
    """
    tx = transformation(
        leaves, settings, partition_replicated=partition, param_shardings=dict(placed)
    )
    return jax.jit(tx.init)


# Whether steps are compiled as for users, which `processes.QUICK_TO_COMPILE` disables.
optimized = False
OPTIMIZED = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_parallel_codegen_split_count": 32,
    "xla_backend_extra_options": "",
}


def jitted(tx: Any, *, donate: bool = False) -> Any:
    """Returns a user's training step, (params, state, gradients) to (params, state)."""

    @functools.partial(
        jax.jit,
        donate_argnums=(0, 1) if donate else (),
        compiler_options=OPTIMIZED if optimized else None,
    )
    def step(params, state, gradients):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = tx.update(gradients, state, params)
        return apply(params, updates), state

    return step


class Training:
    """A run with a user's loop: `step`, then `exchange`, sometimes `flush`.

    `shardings` contains a sharding for each leaf; None means one device. With `partition`, devices
    share the work on copies. `gradients` and `make` replace the function above and `zenflow`. All
    other arguments are for the engine.
    """

    def __init__(
        self,
        leaves: Leaves,
        settings: Settings,
        *,
        seed: int = 0,
        donate: bool = False,
        shardings: Any = None,
        partition: bool = True,
        send_gradients: str | None = None,
        gradients: Callable[..., dict[str, np.ndarray]] = gradients,
        make: Any = zenflow_jax.zenflow,
        **engine: Any,
    ):
        if send_gradients is not None:
            settings = dataclasses.replace(settings, send_gradients=send_gradients)
        self.settings, self.gradients = settings, gradients
        self.leaves, self.seed, self.shardings = leaves, seed, shardings
        self.tx, self.program = programs(leaves, settings, donate, partition, make, optimized)
        self.params = place(initial_values(leaves, seed), shardings)
        init = self.tx.init
        if shardings is not None:  # otherwise outside jit, like most users
            placed = tuple((leaf.name, shardings[leaf.name]) for leaf in leaves)
            init = init_on_devices(leaves, settings, partition, placed)
        self.state = init(self.params)
        self.engine: Any = None
        self.engine_options = {**KERNEL, **engine}
        self.renew()

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: Any) -> None:
        self.engine.close()

    def renew(self, **options: Any) -> None:
        """Replaces the engine with a new engine for the current parameters, state and step."""
        if self.engine is not None:
            self.engine.close()
        options = self.engine_options | options
        self.engine = zenflow_jax.HostEngine(self.params, self.state, **options)
        self.t = int(read(self.inner.step))

    def step(self, *, bad: bool = False) -> None:
        self.t += 1
        g = self.gradients(self.leaves, self.t, self.seed, bad)
        g = place(g, self.shardings) if self.shardings else jax.tree.map(jnp.asarray, g)
        self.params, self.state = self.program(self.params, self.state, g)

    def exchange(self) -> None:
        self.params, self.state = self.engine.exchange(self.params, self.state)

    def flush(self) -> None:
        self.params, self.state = self.engine.flush(self.params, self.state)

    def go(self, steps: int, plan: Plan = QUIET) -> None:
        """Takes `steps` steps of a plan, each with its exchange."""
        for _ in range(steps):
            self.step(bad=self.t + 1 in plan.bad)
            self.exchange()
            if self.t in plan.flush_at:
                self.flush()

    def follow(self, plan: Plan) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yields each step in the plan, with the parameters after it."""
        while self.t < plan.steps:
            self.go(1, plan)
            yield self.t, self.values()

    @property
    def inner(self) -> Any:
        """Returns zenflow's own state."""
        return zenflow_jax.find_state(self.state)

    # An engine's private parts.

    @property
    def on_their_way(self) -> list[Any]:
        """Returns futures of the pending updates, the oldest first."""
        return [update.done for update in self.engine._updates.pending.values()]

    @property
    def unread(self) -> list[Any]:
        """Returns the mail that the worker has not read, by step."""
        return list(self.engine._mailbox._unread)

    @property
    def host(self) -> Any:
        """Returns the worker's arrays."""
        return self.engine._worker.host

    def settle(self) -> None:
        """Waits until the worker is idle, without a flush."""
        self.engine._mailbox.drain()
        self.engine._updates.wait()

    def history(self, plan: Plan) -> History:
        params, selected = [], []
        for _, values in self.follow(plan):
            params.append(values)
            selected.append(self.selected())
        return History(params, selected, self.moments(), int(self.inner.skipped))

    def values(self) -> dict[str, np.ndarray]:
        return {name: fetch(p) for name, p in self.params.items()}

    def selected(self) -> dict[str, np.ndarray]:
        return {
            leaf.name: fetch(s.channels)
            for leaf, s in zip(self.leaves, self.inner.leaves, strict=True)
            if s.channels is not None
        }

    def moments(self) -> dict[str, tuple[np.ndarray, ...]]:
        """Returns every channel's state, from device or host."""
        of_leaves = {}
        on_host = self.engine.state()["leaves"]
        for leaf, s in zip(self.leaves, self.inner.leaves, strict=True):
            master = self.params[leaf.name] if s.master is None else s.master
            if s.channels is None:
                arrays = *map(np.array, (master, s.mu, s.nu)), np.full(leaf.shape, s.steps)
                of_leaves[leaf.name] = arrays
                continue
            channels = np.asarray(s.channels)
            if s.master is None:
                master = np.take_along_axis(np.array(master), _along(channels, leaf), leaf.axis)
            deferred = on_host.pop(0)
            steps = np.array(deferred["steps"])
            np.put_along_axis(steps, channels, np.asarray(s.steps), axis=-1)
            arrays = []
            for name, rows in (("master", master), ("mu", s.mu), ("nu", s.nu)):
                full = np.array(s.spec.turned(deferred[name]))
                np.put_along_axis(full, _along(channels, leaf), np.asarray(rows), axis=leaf.axis)
                arrays.append(full)
            of_leaves[leaf.name] = *arrays, np.broadcast_to(_along(steps, leaf), leaf.shape)
        return of_leaves


def _along(x: Any, leaf: Leaf) -> Any:
    """Returns `(*stack, channels)` with unit axes for the leaf's other axes."""
    axis = leaf.axis % len(leaf.shape)
    return np.expand_dims(x, [i for i in range(x.ndim - 1, len(leaf.shape)) if i != axis])
