"""Estimates a run's needs on the device and the host, without running on either: `plan()`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.state import ZenFlowState, find_state, has_state
from zenflow_jax._spec.rules import check_int_or_none, is_compact
from zenflow_jax.planning._gpus import EFFICIENCY, Gpu, gpu_named
from zenflow_jax.planning._host_work import needs_of
from zenflow_jax.planning._steps import nbytes, peak_bytes, products

#: The largest share of GPU memory that jax may be allowed to use, and jax's default.
MAX_FRACTION = 0.95
DEFAULT_FRACTION = 0.75
#: Bytes of host memory for the system, Python, CUDA and XLA.
HOST_RESERVE = 8 * 10**9
#: The use of device memory that only a compiler can determine.
TEMPORARIES = "gradients, activations"
#: The part of a boundary's uploads that exceeds this memory, which is free by then.
LATE = "late uploads"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory and time that a run needs, and the machine's capacity.

    All times depend on `efficiency`; for others, use `dataclasses.replace(plan, efficiency=0.85)`.
    """

    gpu: Gpu
    devices: int
    parameters: int
    #: Bytes on one device at the peak of a step, by use. "late uploads" are the uploads at a
    #: boundary, minus "gradients, activations", which are freed by then.
    device: Mapping[str, int]
    host: Mapping[str, int]  #: Peak bytes on the host, by use, for all devices.
    pinned: int  #: Peak bytes of one device's pinned memory.
    checkpoint: int  #: Bytes on disk.
    host_capacity_bytes: int
    host_bandwidth: float  #: Bytes per second of the host's memory.
    flops: float  #: Operations of one device's products in a step, at the bfloat16 rate.
    moved: float  #: Bytes that one device reads and writes in its memory in a step.
    to_device: int = 0  #: Bytes that one device receives in a step, on average.
    to_host: int = 0  #: Bytes that one device sends.
    growing: int = 0  #: Bytes among these, in the busier direction, that grow with the batch.
    host_s: float = 0.0  #: Seconds of the host's work per step, on average.
    exposed_s: float = 0.0  #: Seconds of copies and the host's work that no program hides.
    #: Seconds per step of the host's work in the worst case, if it may take several steps.
    busiest_s: float = 0.0
    late: int = 0  #: Peak bytes that arrive at a boundary, beyond `prefetch_bytes`.
    efficiency: float = EFFICIENCY  #: The assumed share of the device's peak rate.

    @property
    def by(self) -> str:
        """Returns "compiler" if XLA planned gradients and activations, else "shapes"."""
        return "compiler" if TEMPORARIES in self.device else "shapes"

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
    def seconds(self) -> Mapping[str, float]:
        """Returns a step's work for each resource: "compute", the bus in each direction, "host"."""
        compute = self.gpu.seconds(self.flops, self.moved, self.efficiency)
        copies = {"to device": self.to_device, "to host": self.to_host}
        copies = {name: x / self.gpu.bus for name, x in copies.items()}
        return {"compute": compute, **copies, "host": self.host_s}

    @property
    def step_s(self) -> float:
        """Returns the seconds of a step: of the resource with the most work, or of all waits."""
        return max(self.seconds["compute"] + self.exposed_s, *self.seconds.values())

    @property
    def hidden(self) -> float:
        """Returns the share of a step in which the device computes."""
        return self.seconds["compute"] / self.step_s

    @property
    def compute_from(self) -> float | None:
        """Returns how many times larger a batch would hide all copies and work that can be hidden.

        None if no batch does, because copies grow with it.
        """
        compute, *rest = self.seconds.values()
        growing = self.growing / self.gpu.bus
        if compute <= growing:
            return None
        longest = max(self.busiest_s, max(rest) - self.exposed_s - growing, 0.0)
        return longest / (compute - growing)

    @property
    def short(self) -> Mapping[str, int]:
        """Returns the bytes that the "device" or the "host" lacks."""
        lacks = {"device": self.device_bytes - self.device_capacity_bytes}
        if self.host:
            lacks["host"] = self.host_bytes + HOST_RESERVE - self.host_capacity_bytes
        return {place: lack for place, lack in lacks.items() if lack > 0}

    def with_peak(self, peak: int) -> "Plan":
        """Returns the plan with gradients and activations, given the step's `peak_bytes`."""
        temporaries = max(peak - self.device["weights"] - self.device["optimizer state"], 0)
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
        host_memory_bytes, bandwidth: The memory of the machine with these devices, and its bytes
            per second. None: typical figures.
        host_state, prefetch_bytes: As for `HostEngine`, with its errors.
        compiled: The step, compiled for such devices, for example on a `described_mesh`. With None,
            the plan lacks gradients and activations.

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
        >>> needs.short, needs.device["weights"]
        ({}, 67108864)
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
    flops, moved = (x / shares_of(arguments) for x in work)
    devices = devices_of(weights)
    usual_rate, usual_bytes = gpu.host_beside(devices)
    rate, saved = bandwidth or usual_rate, [*weights, *state_arrays]
    host: dict[str, Any] = {"host": {}, "pinned": 0}
    if state is not None:
        saved += jax.tree.leaves(abstract_engine_state(opt_state)["leaves"])
        engine = needs_of(state, host_state=host_state, prefetch_bytes=prefetch_bytes)
        needs["mail under way"] = engine.under_way // devices
        needs["uploads"] = engine.uploads // devices
        needs |= {LATE: engine.late // devices} if engine.late else {}
        waits, host_s = state.schedule.staleness == 0, engine.mean / rate
        host = {
            "host": {
                "masters, moments": engine.state,
                "sums": engine.sums,
                "mail, pinned": engine.mail,
                "hand-over, pinned": engine.hand_over,
                "hand-over": engine.hand_over,
                "a save": engine.saving,
            },
            "pinned": (engine.mail + engine.hand_over) // devices,
            "to_device": int(engine.to_device / devices),
            "to_host": int(engine.to_host / devices),
            "host_s": host_s,
            "exposed_s": engine.late_mean / devices / gpu.bus + host_s * waits,
            "busiest_s": 0.0 if waits else engine.busiest / rate / engine.steps,
            "late": engine.late // devices,
        }
    estimate = Plan(
        gpu=gpu,
        devices=devices,
        parameters=sum(math.prod(x.shape) for x in weights),
        device=needs,
        checkpoint=sum(map(nbytes, saved)),
        host_capacity_bytes=usual_bytes if host_memory_bytes is None else host_memory_bytes,
        host_bandwidth=rate,
        flops=flops,
        moved=moved + 2 * sum(needs.values()),  # weights and state are also read and written
        **host,
    )
    return estimate if compiled is None else estimate.with_peak(peak_bytes(compiled))


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


def devices_of(arrays: Any) -> int:
    return max((x.sharding.mesh.size for x in arrays if _is_on_mesh(x)), default=1)


def shares_of(arguments: Any) -> int:
    on_mesh = [x for x in jax.tree.leaves(arguments) if _is_on_mesh(x) and x.shape]
    return max((nbytes(x) // max(nbytes_here(x), 1) for x in on_mesh), default=1)


def _is_on_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)
