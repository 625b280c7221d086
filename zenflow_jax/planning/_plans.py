"""`plan()`: what a run takes of device and host, without either."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.memory import read
from zenflow_jax._device.state import ZenFlowState, find_state, with_interval
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._exchange.checks import check_host_state
from zenflow_jax.planning._compiled import INSTALL, peak_bytes
from zenflow_jax.planning._device_work import products
from zenflow_jax.planning._gpus import GPUS, Gpu
from zenflow_jax.planning._host_work import (
    BUSY,
    INTERVALS,
    busy_share,
    host_work,
    smallest_that_hides,
)
from zenflow_jax.planning._memory import device_memory, host_memory

#: Of what a GPU can do, what a step is taken to get: of its matrix products, as in
#: `benchmarks/projection.py`; and of its memory's bandwidth.
EFFICIENCY = 0.4
OF_BANDWIDTH = 0.7
#: Of its memory, what jax may be given, and what it takes if it is told nothing
#: (`XLA_PYTHON_CLIENT_MEM_FRACTION`). The rest is the driver's, for its kernels and libraries.
USABLE = 0.95
UNASKED = 0.75
#: Of a host's memory, what is left to the system, Python, CUDA and XLA.
HOST_RESERVE = 8 * 10**9


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run takes, and what there is.

    Attributes:
        gpu: The device that it is planned for.
        devices: How many of them.
        by: "compiler" if XLA has said what gradients and activations take, "shapes" if they are not
            in the plan.
        device: Bytes of one device at the peak of a step, by what they are for.
        host: Bytes of the host at most, likewise; all devices together. jax pins "mail" and
            "hand-over, pinned".
        checkpoint: Bytes of a checkpoint on disk: parameters, the optimizer's state, the engine's.
        to_host: Bytes that one device sends in a step.
        to_device: Bytes that one device gets in a step, on average.
        parameters: How many there are.
        flops: Of the matrix products of one device in a step.
        step_s: Seconds that a step must take, at the efficiency that is assumed.
        host_s: Seconds of host work that a step has to hide, on average; 0 without an engine.
        busy: The host's work as a share of the time that it may take, in the step with the most.
        bus: Likewise what crosses between device and host, in the direction with more of it.
        interval: Steps in a window; None without an engine, and where windows adapt.
        overlaps: Whether the host works while the device goes on.
        of_intervals: `busy` with windows of each length; empty where the host does not work beside
            the device, and where windows adapt.
        host_bytes_there: Bytes that the host has, assumed or said.
        host_bandwidth: Bytes a second of the host's memory, assumed, said, or measured.
    """

    gpu: Gpu
    devices: int
    by: str
    device: Mapping[str, int]
    host: Mapping[str, int]
    checkpoint: int
    to_host: int
    to_device: int
    parameters: int
    flops: float
    step_s: float
    host_s: float
    busy: float
    bus: float
    interval: int | None
    overlaps: bool
    of_intervals: Mapping[int, float]
    host_bytes_there: int
    host_bandwidth: float

    @property
    def device_bytes(self) -> int:
        """At the peak of a step, or of all but gradients and activations: see `by`."""
        return sum(self.device.values())

    @property
    def device_bytes_there(self) -> int:
        """What jax may be given of a device."""
        return int(USABLE * self.gpu.memory)

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def host_pinned(self) -> int:
        return sum(self.host.get(name, 0) for name in PINNED)

    @property
    def fits_device(self) -> bool:
        return self.device_bytes <= self.device_bytes_there

    @property
    def fits_host(self) -> bool:
        return not self.host or self.host_bytes + HOST_RESERVE <= self.host_bytes_there

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def hidden(self) -> float:
        """The share of the host's work that hides behind the device's."""
        if not self.overlaps:
            return 0.0
        return 1 / max(1.0, self.busy, self.bus)

    @property
    def smallest_interval(self) -> int | None:
        """Steps of the shortest windows that hide with a fifth to spare; None if none do."""
        return smallest_that_hides(self.of_intervals)

    @property
    def advice(self) -> str:
        """What to do, in a sentence or two; of a run that does not fit, all that it lacks."""
        return " ".join([self._of_memory(), *(self._of_time() if self.fits else ())])

    def _of_memory(self) -> str:
        spare = self.device_bytes_there - self.device_bytes
        lacks = []
        if not self.fits_device:
            lacks.append(
                f"the device lacks {gb(-spare)} (needs {gb(self.device_bytes)}{self._without()}, "
                f"has {gb(self.device_bytes_there)} for jax)"
            )
        if not self.fits_host:
            short = self.host_bytes + HOST_RESERVE - self.host_bytes_there
            lacks.append(
                f"the host lacks {gb(short)} (needs {gb(self.host_bytes)} and {gb(HOST_RESERVE)} "
                f"for all else, has {gb(self.host_bytes_there)})"
            )
        if lacks:
            return f"Does not fit: {' and '.join(lacks)}."
        text = f"Fits with {gb(spare)} of the device to spare"
        if self.device_bytes > UNASKED * self.gpu.memory:
            text += f", if XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE} is set"
        if self.by == "shapes":
            text += f"{self._without()}, which {INSTALL} adds to the plan"
        return f"{text}."

    def _without(self) -> str:
        return " without gradients and activations" if self.by == "shapes" else ""

    def with_peak(self, peak: int) -> "Plan":
        """The same plan with gradients and activations.

        Args:
            peak: What `peak_bytes` says of the step, compiled for such a device.
        """
        known = self.device["weights"] + self.device["optimizer state"]
        device = {**self.device, TEMPORARIES: max(peak - known, 0)}
        return dataclasses.replace(self, by="compiler", device=device)

    def _of_time(self) -> list[str]:
        if not self.overlaps:
            waits = f"Every step waits {self.host_s:.2g} s for the host."
            return [waits] if self.host else []
        if self.interval is None:
            return []
        said = [said_of_windows(self.interval, self.busy, self.smallest_interval)]
        if self.bus > BUSY:
            said.append(
                f"The bus needs {self.bus:.0%} of a step, with any update_interval: a larger batch "
                "gives it more time, send_gradients=per_window less to do."
            )
        return said


#: Of the classes of host memory, those that jax pins.
PINNED = ("mail", "hand-over, pinned")
#: Of the classes of device memory, the one that only a compiler knows.
TEMPORARIES = "gradients, activations"


def said_of_windows(interval: int, busy: float, smallest: int | None) -> str:
    """How busy the host is with these windows, and which longer ones would do if it is too busy.

    Args:
        interval: Steps in a window.
        busy: The share of its time that the host needs, in the step with the most work.
        smallest: Steps of the shortest windows that hide with a fifth to spare; None if none do.
    """
    text = f"The host needs {busy:.0%} of the available time with update_interval={interval}"
    if smallest is None:
        return (
            f"{text}, and more than {BUSY:.0%} with any up to {INTERVALS[-1]}. Use a larger batch, "
            "more threads or faster memory."
        )
    if smallest <= interval:
        return f"{text}."
    waits = ", so steps wait for it" if busy > 1 else ""
    return f"{text}{waits}: update_interval={smallest} needs at most {BUSY:.0%}."


@dataclasses.dataclass(frozen=True)
class Hiding:
    """How well the host's work hid in a run.

    Attributes:
        interval: Steps in a window.
        busy: The share of its time that the host needed, in the step with the most work.
        of_intervals: What `busy` would have been with other windows.
    """

    interval: int
    busy: float
    of_intervals: Mapping[int, float]

    @property
    def smallest_interval(self) -> int | None:
        """As of `Plan`."""
        return smallest_that_hides(self.of_intervals)

    @property
    def advice(self) -> str:
        """What to do, in a sentence."""
        return said_of_windows(self.interval, self.busy, self.smallest_interval)


def hiding(
    opt_state: Any, stats: EngineStats, seconds: float, *, host_state: str = "float32"
) -> Hiding | None:
    """How busy the host was in a run, and which windows would have hidden its work.

    Work with other windows follows from that which was measured, by the bytes that each moves.

    Args:
        opt_state: Of the run, as it ended.
        stats: `engine.stats` after it.
        seconds: What the steps in `stats` took together.
        host_state: As for `HostEngine`.

    Returns:
        None where there is nothing to say: before two windows, and where windows adapt or every
        step waits for its update.

    Raises:
        ValueError: If there is not one `ZenFlowState`, or `host_state` is unknown.
    """
    compact = check_host_state(host_state)
    state = find_state(opt_state)
    window = state.schedule.window
    if not isinstance(window, int) or state.schedule.staleness == 0 or stats.steps < 2 * window:
        return None
    # What the device alone would have taken, as it did not compute while the loop waited.
    step_s = max(seconds - stats.wait_s, 1e-9) / stats.steps
    before = int(read(state.step)) - stats.steps
    # In the warm-up each step updated everything.
    warm = min(max(state.schedule.full_warm_up_rounds - before, 0), stats.steps)
    moved = sum(
        steps * host_work(of, compact=compact).mean
        for of, steps in ((with_interval(state, 1), warm), (state, stats.steps - warm))
    )
    rate = moved / max(stats.work_s, 1e-9)

    def busy(of: ZenFlowState) -> float:
        return busy_share(of, rate, step_s, compact=compact)

    return Hiding(window, busy(state), {s: busy(with_interval(state, s)) for s in INTERVALS})


def plan(
    step: Any,
    params: Any,
    opt_state: Any,
    *arguments: Any,
    device: str | Gpu = "h100",
    host_memory_bytes: int | None = None,
    bandwidth: float | None = None,
    host_state: str = "float32",
    compiled: Any = None,
) -> Plan:
    """What training takes of a device and its host, from the shapes of a step's arguments alone.

    Args:
        step: The training step `(params, opt_state, *arguments)`, jitted with both donated.
        params: Its parameters: arrays, or `jax.ShapeDtypeStruct`s. On a mesh they have shardings.
        opt_state: What `tx.init(params)` gives, or `jax.eval_shape(tx.init, params)`.
        arguments: What else the step takes, such as a batch.
        device: One of "h100", "h200", "a100", "l40s", "rtx4090", "rtx3090", or another GPU's
            figures.
        host_memory_bytes: Of the machine with these devices. None: what is usual beside such
            devices.
        bandwidth: Bytes a second that host updates get out of the host's memory;
            `host_bandwidth()` measures it. None: what is assumed beside such a device.
        host_state: As for `HostEngine`.
        compiled: The step compiled for such a device, as for `described_mesh`. None: gradients and
            activations are not in the plan.

    Returns:
        Memory by class in bytes, bytes that cross, and seconds to hide.

    Raises:
        ValueError: If `device` or `host_state` is unknown.
        TypeError: If `step` is not jitted.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        >>> tx = zenflow_jax.zenflow(1e-4)
        >>> def train_step(params, opt_state, x):
        ...     gradients = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        ...     updates, opt_state = tx.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> x = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
        >>> found = zenflow_jax.plan(
        ...     jax.jit(train_step, donate_argnums=(0, 1)), params, tx.init(params), x
        ... )
        >>> found.fits, found.device["weights"]
        (True, 67108864)
    """
    if isinstance(device, str) and device not in GPUS:
        raise ValueError(
            f"`device` must be one of {', '.join(GPUS)}, got {device!r}. For another GPU pass its "
            "figures, as a `zenflow_jax.Gpu`."
        )
    if not hasattr(step, "trace"):
        raise TypeError(
            f"expected a step that is jitted, got {type(step).__name__}. Pass "
            "`jax.jit(step, donate_argnums=(0, 1))`."
        )
    check_host_state(host_state)
    gpu = GPUS[device] if isinstance(device, str) else device
    work = products(step.trace(params, opt_state, *arguments).jaxpr.jaxpr)
    devices, parts = _devices(params), _parts(arguments)
    weights = jax.tree.leaves(params)
    known = {
        "weights": sum(map(nbytes_here, weights)),
        "optimizer state": sum(map(nbytes_here, on_device(opt_state))),
    }
    # Weights and state are read and written as well.
    moved = work.moved_bytes / parts + 2 * sum(known.values())
    step_s = max(
        1e-9,
        work.flops / parts / (EFFICIENCY * gpu.flops),
        moved / (OF_BANDWIDTH * gpu.bandwidth),
    )
    usual, room = gpu.host_beside(devices)
    rate = bandwidth or usual
    states = _states(opt_state)
    beside = _Beside()
    if states:
        beside = _beside(states[0], gpu, devices, rate, step_s, host_state)
    saved = [*weights, *on_device(opt_state)]
    if beside.host:
        saved += jax.tree.leaves(abstract_engine_state(opt_state)["leaves"])
    found = Plan(
        gpu=gpu,
        devices=devices,
        by="shapes",
        device={**known, **beside.device},
        host=beside.host,
        checkpoint=sum(map(_nbytes, saved)),
        to_host=beside.to_host,
        to_device=beside.to_device,
        parameters=sum(math.prod(x.shape) for x in weights),
        flops=work.flops / parts,
        step_s=step_s,
        host_s=beside.host_s,
        busy=beside.busy,
        bus=beside.bus,
        interval=beside.interval,
        overlaps=beside.overlaps,
        of_intervals=beside.of_intervals,
        host_bytes_there=host_memory_bytes or room,
        host_bandwidth=rate,
    )
    return found if compiled is None else found.with_peak(peak_bytes(compiled))


@dataclasses.dataclass(frozen=True)
class _Beside:
    """What an engine adds; as of `Plan`. The defaults are those of a run without one."""

    device: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    to_host: int = 0
    to_device: int = 0
    host_s: float = 0.0
    busy: float = 0.0
    bus: float = 0.0
    interval: int | None = None
    overlaps: bool = False
    of_intervals: Mapping[int, float] = dataclasses.field(default_factory=dict)


def _beside(
    state: ZenFlowState, gpu: Gpu, devices: int, rate: float, step_s: float, host_state: str
) -> _Beside:
    """What an engine with this state takes beside a step of `step_s` seconds."""
    compact = check_host_state(host_state)

    def busy_with(one: ZenFlowState) -> float:
        return busy_share(one, rate, step_s, compact=compact)

    intervals = {s: busy_with(with_interval(state, s)) for s in INTERVALS}
    window, overlaps = state.schedule.window, state.schedule.staleness != 0
    there, need = device_memory(state), host_memory(state, host_state=host_state)
    to_host, to_device = _crossing(state, devices)
    return _Beside(
        device={"mail under way": there.mail // devices, "uploads": there.uploads // devices},
        host={
            "masters, moments": need.state,
            "sums": need.sums,
            "mail": need.mail,
            "hand-over, pinned": need.hand_over,
            "hand-over": need.hand_over,
            "a save": need.saving,
        },
        to_host=int(to_host),
        to_device=int(to_device),
        host_s=host_work(state, compact=compact).mean / rate,
        busy=busy_with(state),
        bus=max(to_host, to_device) / gpu.bus / step_s,
        interval=window if isinstance(window, int) else None,
        overlaps=overlaps,
        of_intervals=intervals if isinstance(window, int) and overlaps else {},
    )


def gb(nbytes: int | float) -> str:
    """Bytes for a reader, in units of 10**9."""
    amount = nbytes / 1e9
    return f"{amount:.0f} GB" if amount >= 100 else f"{amount:.1f} GB"


def _crossing(state: ZenFlowState, devices: int) -> tuple[float, float]:
    """Bytes that one device sends in a step, and gets in a step on average."""
    parts = [part for leaf in state.leaves if leaf.offloaded for part in leaf.spec.ranges]
    window = state.schedule.window if isinstance(state.schedule.window, int) else 2
    mails = sum(math.prod(x.shape) * x.mail_dtype.itemsize for x in parts)
    updates = sum(math.prod(x.shape) * x.dtype.itemsize for x in parts)
    steps = window if state.send_gradients.sums_on_device else 1
    return mails / steps / devices, updates / window / devices


def _states(opt_state: Any) -> list[ZenFlowState]:
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, ZenFlowState))
    return [x for x in found if isinstance(x, ZenFlowState) and x.offload]


def on_device(opt_state: Any) -> list[Any]:
    """The arrays of an optimizer's state, but for blank mail."""
    blank = set()
    for state in _states(opt_state):
        mail = () if state.send_gradients.sums_on_device else state.mail
        blank |= {id(x) for x in jax.tree.leaves((state.step_scalars, mail))}
    return [x for x in jax.tree.leaves(opt_state) if id(x) not in blank]


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def nbytes_here(x: Any) -> int:
    """Bytes of an array on each of its devices."""
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def _devices(params: Any) -> int:
    return max((_mesh_size(x) for x in jax.tree.leaves(params)), default=1)


def _mesh_size(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    return sharding.mesh.size if isinstance(sharding, NamedSharding) else 1


def _parts(arguments: Any) -> int:
    """Among how many devices a batch is divided."""
    shares = [
        math.prod(x.shape) // max(math.prod(x.sharding.shard_shape(x.shape)), 1)
        for x in jax.tree.leaves(arguments)
        if isinstance(getattr(x, "sharding", None), NamedSharding) and x.shape
    ]
    return max(shares, default=1)
