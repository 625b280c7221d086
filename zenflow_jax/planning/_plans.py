"""Plans the memory and time of a step from the shapes of its arguments: `plan()`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.state import find_state, has_state
from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._spec.rules import check_int_or_none
from zenflow_jax.planning._gpus import EFFICIENCY, OF_BANDWIDTH, Gpu, gpu_named
from zenflow_jax.planning._host_work import needs_of
from zenflow_jax.planning._steps import nbytes, products

#: The largest share of GPU memory that jax may be allowed to use, and jax's default.
MAX_FRACTION, DEFAULT_FRACTION = 0.95, 0.75
#: Bytes of host memory for the system, Python, CUDA and XLA.
HOST_RESERVE = 8 * 10**9
#: The use of device memory that only a compiler can determine.
TEMPORARIES = "gradients, activations"
#: The part of a boundary's uploads that exceeds this memory, which is free by then.
LATE = "late uploads"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory and work of a run, and the machine's capacity and rates.

    `dataclasses.replace` changes the machine: `efficiency=0.85`, `host_capacity_bytes`,
    `host_bandwidth`.
    """

    gpu: Gpu
    devices: int
    parameters: int
    device: Mapping[str, int]  #: Bytes on one device at the peak of a step, by use.
    host: Mapping[str, int]  #: Peak bytes on the host, by use, for all devices.
    pinned: int  #: Peak bytes of one device's pinned memory.
    checkpoint: int  #: Bytes on disk.
    host_capacity_bytes: int
    host_bandwidth: float  #: Bytes per second of the host's memory.
    flops: float  #: Operations of one device's products in a step, at the bfloat16 rate.
    moved: float  #: Bytes that one device reads and writes in its memory in a step.
    to_device: int = 0  #: Bytes that one device receives in a step, on average.
    to_host: int = 0  #: Bytes that one device sends.
    exposed: float = 0.0  #: Bytes of these that no program hides.
    host_work: float = 0.0  #: Bytes that the host reads and writes per step, on average.
    waits: bool = False  #: Whether each step waits for this work.
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
    def short(self) -> Mapping[str, int]:
        """Returns the bytes that the "device" or the "host" lacks."""
        lacks = {"device": self.device_bytes - self.device_capacity_bytes}
        if self.host:
            lacks["host"] = self.host_bytes + HOST_RESERVE - self.host_capacity_bytes
        return {place: lack for place, lack in lacks.items() if lack > 0}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Returns a step's work for each resource: "compute", the bus in each direction, "host"."""
        compute = self.flops / self.gpu.flops / self.efficiency
        return {
            "compute": max(compute, self.moved / self.gpu.bandwidth / OF_BANDWIDTH, 1e-9),
            "to device": self.to_device / self.gpu.bus,
            "to host": self.to_host / self.gpu.bus,
            "host": self.host_work / self.host_bandwidth,
        }

    @property
    def exposed_s(self) -> float:
        """Returns the seconds of copies and host work that no program hides."""
        return self.exposed / self.gpu.bus + self.waits * self.seconds["host"]

    @property
    def step_s(self) -> float:
        """Returns the seconds of a step: of the resource with the most work, or of all waits."""
        return max(self.seconds["compute"] + self.exposed_s, *self.seconds.values())

    def with_peak(self, peak: int) -> "Plan":
        """Returns the plan with gradients and activations, given the step's `peak_bytes`."""
        temporaries = max(peak - self.device["weights"] - self.device["optimizer state"], 0)
        device = {**self.device, TEMPORARIES: temporaries}
        if LATE in device:
            device[LATE] = max(device[LATE] - temporaries, 0)
        return dataclasses.replace(self, device=device)


def plan(
    step: Any,
    params: Any,
    opt_state: Any,
    *arguments: Any,
    device: str | Gpu = "h100",
    host_state: str = "float32",
    prefetch_bytes: int | None = None,
) -> Plan:
    """Plans the memory and time of training from the shapes of a step's arguments.

    The plan lacks gradients and activations; `Plan.with_peak` adds them.

    Args:
        step: The training step `(params, opt_state, *arguments)`, jitted, with both donated.
        params: The parameters: arrays, or `jax.ShapeDtypeStruct`s, with shardings on a mesh.
        opt_state: The result of `tx.init(params)`, or `jax.eval_shape(tx.init, params)`.
        arguments: The step's other arguments, such as a batch.
        device: A key of `GPUS`, or another `Gpu`.
        host_state, prefetch_bytes: As for `HostEngine`, with its errors.

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
    state = find_state(opt_state) if has_state(opt_state) else None
    # Placeholders are in host memory.
    apart = jax.tree.leaves(state and (state.step_scalars, state.mail))
    arrays = [x for x in jax.tree.leaves(opt_state) if all(x is not y for y in apart)]
    weights, total = jax.tree.leaves(params), lambda arrays: sum(map(nbytes_here, arrays))
    devices, saved, host = devices_of(weights), [*weights, *arrays], {}
    needs = {"weights": total(weights), "optimizer state": total(arrays)}
    traced, more = step.trace(params, opt_state, *arguments), {}
    flops, moved = (x / shares_of(arguments) for x in products(traced.jaxpr.jaxpr))
    rate, memory = gpu.host_beside(devices)
    if state is not None:
        saved += jax.tree.leaves(abstract_engine_state(opt_state)["leaves"])
        engine = needs_of(state, host_state=host_state, prefetch_bytes=prefetch_bytes)
        needs["mail under way"] = engine.under_way // devices
        needs["uploads"] = engine.uploads // devices
        needs |= {LATE: engine.late // devices} if engine.late else {}
        host = {
            "masters, moments": engine.state,
            "sums": engine.sums,
            "mail, pinned": engine.mail,
            "hand-over, pinned": engine.hand_over,
            "hand-over": engine.hand_over,
            "a save": engine.saving,
        }
        more = {
            "to_device": int(engine.to_device / devices),
            "to_host": int(engine.to_host / devices),
            "exposed": engine.late_mean / devices,
            "host_work": engine.work,
            "waits": state.schedule.staleness == 0,
        }
    return Plan(
        gpu=gpu,
        devices=devices,
        parameters=sum(math.prod(x.shape) for x in weights),
        device=needs,
        host=host,
        pinned=sum(x for name, x in host.items() if "pinned" in name) // devices,
        checkpoint=sum(map(nbytes, saved)),
        host_capacity_bytes=memory,
        host_bandwidth=rate,
        flops=flops,
        moved=moved + 2 * sum(needs.values()),  # weights and state are also read and written
        **more,
    )


def nbytes_here(x: Any) -> int:
    """Returns an array's bytes on one device."""
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


def devices_of(arrays: Any) -> int:
    """Returns the number of devices of arrays with shardings."""
    return max((x.sharding.mesh.size for x in arrays if _is_on_mesh(x)), default=1)


def shares_of(arguments: Any) -> int:
    """Returns the number of shares that devices split the most divided argument into."""
    on_mesh = [x for x in jax.tree.leaves(arguments) if _is_on_mesh(x) and x.shape]
    return max((nbytes(x) // max(nbytes_here(x), 1) for x in on_mesh), default=1)


def _is_on_mesh(x: Any) -> bool:
    return isinstance(getattr(x, "sharding", None), NamedSharding)
