"""Estimates a run's needs on the device and the host, without running on either: `plan()`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.state import ZenFlowState, find_state, has_state
from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._spec.rules import check_int_or_none
from zenflow_jax.planning._gpus import Gpu, gpu_named
from zenflow_jax.planning._host_work import Needs, needs_of
from zenflow_jax.planning._steps import INSTALL, nbytes, peak_bytes, products

#: The largest share of GPU memory that jax may be allowed to use, and jax's default.
MAX_FRACTION = 0.95
DEFAULT_FRACTION = 0.75
#: The share of the available time that host or bus may take; a fifth stays in reserve.
BUSY = 0.8
#: Bytes of host memory for the system, Python, CUDA and XLA.
HOST_RESERVE = 8 * 10**9
#: The use of device memory that only a compiler can determine.
TEMPORARIES = "gradients, activations"
#: The part of a boundary's uploads that exceeds this memory, which is free by then.
LATE = "late uploads"
_WITHOUT = " without gradients and activations"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory and time that a run needs, and the machine's capacity.

    Attributes:
        gpu: The planned device.
        devices: Number of devices.
        device: Bytes on one device at the peak of a step, by use. "late uploads" are the uploads at
            a boundary, minus "gradients, activations", which are freed by then: 0 unless the
            boundary is the peak.
        checkpoint: Bytes of a checkpoint on disk: parameters and both states.
        parameters: Number of parameters.
        flops: Operations of one device's matrix products in a step.
        step_s: Seconds per step at the assumed efficiency, including waits for late uploads.
        host_capacity_bytes: Bytes of the host's memory, assumed or given.
        host_bandwidth: Bytes per second of the host's memory, assumed or given.
        host: Peak bytes on the host, by use, for all devices. jax pins "mail" and "hand-over,
            pinned". Empty without an engine.
        to_host: Bytes that one device sends in a step.
        to_device: Bytes that one device receives in a step, on average.
        late: Peak bytes that one device receives at a boundary, beyond `prefetch_bytes`.
        host_s: Seconds of host work per step, on average; 0 without an engine.
        busy: The share of the available time that this work needs, in the worst case; None without
            an engine, or if each step waits for it.
    """

    gpu: Gpu
    devices: int
    device: Mapping[str, int]
    checkpoint: int
    parameters: int
    flops: float
    step_s: float
    host_capacity_bytes: int
    host_bandwidth: float
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    to_host: int = 0
    to_device: int = 0
    late: int = 0
    host_s: float = 0.0
    busy: float | None = None

    @property
    def by(self) -> str:
        """Returns "compiler" if XLA planned gradients and activations, else "shapes"."""
        return "compiler" if TEMPORARIES in self.device else "shapes"

    @property
    def bus(self) -> float:
        """Returns the share of a step that the bus needs, in its busier direction."""
        return max(self.to_host, self.to_device) / self.gpu.bus / self.step_s

    @property
    def device_bytes(self) -> int:
        """Returns a device's bytes at a step's peak; if `by` is "shapes", without activations."""
        return sum(self.device.values())

    @property
    def device_capacity_bytes(self) -> int:
        """Returns the bytes of one device that jax may use."""
        return int(MAX_FRACTION * self.gpu.memory)

    @property
    def host_bytes(self) -> int:
        """Returns the host's peak bytes for all devices together."""
        return sum(self.host.values())

    @property
    def short(self) -> Mapping[str, str]:
        """Describes each shortage by its place: "device", "host" or "bus"."""
        short = {}
        lack = self.device_bytes - self.device_capacity_bytes
        if lack > 0:
            without = _WITHOUT if self.by == "shapes" else ""
            short["device"] = (
                f"the device is {gb(lack)} short (needs {gb(self.device_bytes)}{without}, jax has "
                f"{gb(self.device_capacity_bytes)})"
            )
        lack = self.host_bytes + HOST_RESERVE - self.host_capacity_bytes
        if self.host and lack > 0:
            short["host"] = (
                f"the host is {gb(lack)} short (needs {gb(self.host_bytes)} plus "
                f"{gb(HOST_RESERVE)} for everything else, has {gb(self.host_capacity_bytes)})"
            )
        if self.busy is not None and self.bus > BUSY:
            short["bus"] = (
                f"the bus needs {self.bus:.0%} of a step, whatever the update_interval: use a "
                "larger batch"
            )
        return short

    @property
    def fits(self) -> bool:
        """Returns whether both device and host have enough memory."""
        return self.short.keys() <= {"bus"}

    @property
    def hidden(self) -> float:
        """Returns the share of the host's work that the device's work hides."""
        return 0.0 if self.busy is None else 1 / max(1.0, self.busy, self.bus)

    @property
    def advice(self) -> str:
        """Returns one or two sentences of advice; if the run does not fit, lists every shortage."""
        short = dict(self.short)
        bus = short.pop("bus", "")
        if short:
            return f"Does not fit: {' and '.join(short.values())}."
        spare = self.device_capacity_bytes - self.device_bytes
        text = f"Fits with {gb(spare)} of the device to spare"
        if self.device_bytes > DEFAULT_FRACTION * self.gpu.memory:
            text += f", if XLA_PYTHON_CLIENT_MEM_FRACTION={MAX_FRACTION} is set"
        if self.by == "shapes":
            text += f"{_WITHOUT}, which the plan includes after {INSTALL}"
        return " ".join([f"{text}.", *self.on_time, *([f"T{bus[1:]}."] if bus else [])])

    @property
    def on_time(self) -> list[str]:
        """Returns sentences about the time of a step."""
        if self.busy is None:
            return [f"Every step waits {self.host_s:.2g} s for the host."] if self.host else []
        text = f"The host needs {self.busy:.0%} of the available time"
        if self.busy <= BUSY:
            return [f"{text}."]
        waits = ", so steps wait for it" if self.busy > 1 else ""
        return [
            f"{text}{waits}: use a larger update_interval or batch, more threads or faster memory."
        ]

    def with_peak(self, peak: int) -> "Plan":
        """Returns the plan with gradients and activations, given the step's `peak_bytes`."""
        known = self.device["weights"] + self.device["optimizer state"]
        temporaries = max(peak - known, 0)
        device = {**self.device, TEMPORARIES: temporaries}
        if self.late:
            device[LATE] = max(self.late - temporaries, 0)
        return dataclasses.replace(self, device=device)


def plan(
    step: Any,
    params: Any,
    opt_state: Any,
    *arguments: Any,
    device: str | Gpu = "h100",
    host_memory_bytes: int | None = None,
    bandwidth: float | None = None,
    host_state: str = "float32",
    prefetch_bytes: int | None = None,
    compiled: Any = None,
) -> Plan:
    """Plans the memory and time of training from the shapes of a step's arguments.

    Args:
        step: The training step `(params, opt_state, *arguments)`, jitted, with both donated.
        params: The parameters: arrays, or `jax.ShapeDtypeStruct`s, with shardings on a mesh.
        opt_state: The result of `tx.init(params)`, or `jax.eval_shape(tx.init, params)`.
        arguments: The step's other arguments, such as a batch.
        device: A key of `GPUS`, or another `Gpu`.
        host_memory_bytes: Memory of the machine with these devices. None means a typical amount.
        bandwidth: Bytes per second of host memory. None: a typical rate.
        host_state: As for `HostEngine`.
        prefetch_bytes: As for `HostEngine`. The loop waits for the remaining copies.
        compiled: The step, compiled for such devices, for example on a `described_mesh`. With None,
            the plan lacks gradients and activations.

    Raises:
        ValueError: If `device` or `host_state` is unknown, or `prefetch_bytes` is below 0.
        TypeError: If `step` is not jitted, or `prefetch_bytes` is not an int.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> from zenflow_jax.planning import plan
        >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
        >>> tx = zenflow_jax.zenflow(1e-4)
        >>> def train_step(params, opt_state, x):
        ...     gradients = jax.grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
        ...     updates, opt_state = tx.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> step = jax.jit(train_step, donate_argnums=(0, 1))
        >>> x = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
        >>> needs = plan(step, params, tx.init(params), x)
        >>> needs.fits, needs.device["weights"]
        (True, 67108864)
    """
    gpu = gpu_named(device)
    is_compact(host_state)
    check_int_or_none("prefetch_bytes", prefetch_bytes, 0)
    if not hasattr(step, "trace"):
        raise TypeError(
            f"`step` is a {type(step).__name__} that is not jitted. Pass "
            "`jax.jit(step, donate_argnums=(0, 1))`."
        )
    state = find_state(opt_state) if has_state(opt_state) else None
    weights, state_arrays = jax.tree.leaves(params), _on_device(opt_state, state)
    needs = {
        "weights": sum(map(nbytes_here, weights)),
        "optimizer state": sum(map(nbytes_here, state_arrays)),
    }
    work = products(step.trace(params, opt_state, *arguments).jaxpr.jaxpr)
    flops, moved_bytes = (x / shares_of(arguments) for x in work)
    moved_bytes += 2 * sum(needs.values())  # weights and state are also read and written
    step_s = max(1e-9, gpu.seconds(flops, moved_bytes))
    devices = max((x.sharding.mesh.size for x in weights if _is_on_mesh(x)), default=1)
    usual_rate, usual_bytes = gpu.host_beside(devices)
    rate = bandwidth or usual_rate
    saved, host_figures, waits_s = [*weights, *state_arrays], {}, 0.0
    if state is not None:
        saved += jax.tree.leaves(abstract_engine_state(opt_state)["leaves"])
        engine = needs_of(state, host_state=host_state, prefetch_bytes=prefetch_bytes)
        needs["mail under way"] = engine.under_way // devices
        needs["uploads"] = engine.uploads // devices
        host_figures = _host_figures(engine, devices, rate)
        if engine.late:
            needs[LATE] = host_figures["late"]
            waits_s += engine.late_mean / devices / gpu.bus
        if state.schedule.staleness != 0:
            host_figures["busy"] = engine.busiest / rate / (engine.steps * step_s)
    estimate = Plan(
        gpu=gpu,
        devices=devices,
        device=needs,
        checkpoint=sum(map(nbytes, saved)),
        parameters=sum(math.prod(x.shape) for x in weights),
        flops=flops,
        step_s=step_s + waits_s,
        host_capacity_bytes=usual_bytes if host_memory_bytes is None else host_memory_bytes,
        host_bandwidth=rate,
        **host_figures,
    )
    return estimate if compiled is None else estimate.with_peak(peak_bytes(compiled))


def _host_figures(needs: Needs, devices: int, rate: float) -> dict[str, Any]:
    """Returns a plan's fields for the host and the bus."""
    return {
        "host": {
            "masters, moments": needs.state,
            "sums": needs.sums,
            "mail": needs.mail,
            "hand-over, pinned": needs.hand_over,
            "hand-over": needs.hand_over,
            "a save": needs.saving,
        },
        "to_host": int(needs.to_host / devices),
        "to_device": int(needs.to_device / devices),
        "late": needs.late // devices,
        "host_s": needs.mean / rate,
    }


def gb(number: int | float) -> str:
    """Formats bytes in units of 10**9."""
    amount = number / 1e9
    return f"{amount:.0f} GB" if amount >= 100 else f"{amount:.1f} GB"


def _on_device(opt_state: Any, state: ZenFlowState | None) -> list[Any]:
    """Returns the arrays of an optimizer's state, except placeholder mail."""
    placeholders: Any = ()
    if state is not None:
        placeholders = {id(x) for x in jax.tree.leaves((state.step_scalars, state.mail))}
    return [x for x in jax.tree.leaves(opt_state) if id(x) not in placeholders]


def nbytes_here(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def shares_of(arguments: Any) -> int:
    on_mesh = [x for x in jax.tree.leaves(arguments) if _is_on_mesh(x) and x.shape]
    return max((nbytes(x) // max(nbytes_here(x), 1) for x in on_mesh), default=1)


def _is_on_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)
