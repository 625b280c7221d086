"""Plans the memory and time of a step from the shapes of its arguments: `plan()`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.state import find_state, has_state
from zenflow_jax._spec.mesh import HasShape
from zenflow_jax.layerwise._transfers import bytes_here, nbytes
from zenflow_jax.planning._gpus import EFFICIENCY, Gpu, gpu_named
from zenflow_jax.planning._host_work import needs_of
from zenflow_jax.planning._steps import products

#: The largest share of GPU memory that jax may be allowed to use, and jax's default.
MAX_FRACTION, DEFAULT_FRACTION = 0.95, 0.75
#: Bytes of host memory for the system, Python, CUDA and XLA.
HOST_RESERVE = 8 * 10**9
#: The use of device memory that only a compiler can determine.
TEMPORARIES = "gradients, activations"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run's memory and work, and a machine, which `dataclasses.replace` changes."""

    gpu: Gpu
    devices: int
    parameters: int
    host_capacity_bytes: int
    host_bandwidth: float  #: Bytes per second of the host's memory.
    device: Mapping[str, int]  #: Bytes on one device at the peak of a step, by use.
    checkpoint: int  #: Bytes on disk.
    flops: float  #: Operations of one device's products in a step, at the bfloat16 rate.
    #: Peak bytes on the host, by use, for all devices.
    host: Mapping[str, int] = dataclasses.field(default_factory=dict)
    to_device: int = 0  #: Bytes that one device receives in a step, on average.
    to_host: int = 0  #: Bytes that one device sends.
    exposed: float = 0.0  #: Bytes of these that no program hides.
    host_work: float = 0.0  #: Bytes that the host reads and writes per step, on average.
    waits: bool = False  #: Whether each step waits for this work.
    efficiency: float = EFFICIENCY  #: The assumed share of the device's peak rate.

    @property
    def device_bytes(self) -> int:
        """Returns a device's bytes at a step's peak, with activations if a compiler has counted."""
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
    def pinned(self) -> int:
        """Returns the peak bytes of one device's pinned memory."""
        return sum(x for name, x in self.host.items() if "pinned" in name) // self.devices

    @property
    def short(self) -> Mapping[str, int]:
        """Returns the bytes that the "device" or the "host" lacks."""
        lacks = {"device": self.device_bytes - self.device_capacity_bytes}
        if self.host:
            lacks["host"] = self.host_bytes + HOST_RESERVE - self.host_capacity_bytes
        return {place: lack for place, lack in lacks.items() if lack > 0}

    @property
    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds of a step's work for each resource."""
        return {
            "compute": max(self.flops / self.gpu.flops / self.efficiency, 1e-9),
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
        device = dict(self.device)
        device[TEMPORARIES] = max(peak - device["weights"] - device["optimizer state"], 0)
        return dataclasses.replace(self, device=device)


def plan(
    step: jax.stages.Wrapped,
    params: PyTree,
    opt_state: PyTree,
    *arguments: PyTree,
    device: str | Gpu = "h100",
    host_state: str = "float32",
) -> Plan:
    """Plans training, from the step `(params, opt_state, *arguments)`, jitted, with both donated.

    All arguments may be `jax.ShapeDtypeStruct`s, with shardings on a mesh. The plan lacks gradients
    and activations; `Plan.with_peak` adds them.

    Args:
        device: A key of `GPUS`, or another `Gpu`.
        host_state: As for `HostEngine`, with its errors.

    Examples:
        >>> import jax, zenflow_jax
        >>> from zenflow_jax.planning import plan
        >>> params = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
        >>> step = jax.jit(lambda *arguments: arguments, donate_argnums=(0, 1))
        >>> needs = plan(step, params, zenflow_jax.zenflow(1e-4).init(params))
        >>> needs.short, needs.device["weights"]
        ({}, 67108864)
    """
    gpu = gpu_named(device)
    weights, arrays = jax.tree.leaves(params), jax.tree.leaves(opt_state)
    engine, saved = {}, []
    if has_state(opt_state):
        state, devices = find_state(opt_state), device_count(weights)
        engine = needs_of(state, devices=devices, host_state=host_state)
        saved = jax.tree.leaves(abstract_engine_state(opt_state)["leaves"])
        # These are in host memory.
        placeholders = {*map(id, jax.tree.leaves((state.step_scalars, state.mail)))}
        arrays = [x for x in arrays if id(x) not in placeholders]
    by_use = {"weights": weights, "optimizer state": arrays}
    on_device = {name: sum(map(bytes_here, x)) for name, x in by_use.items()}
    flops = products(step.trace(params, opt_state, *arguments).jaxpr.jaxpr)
    return new_plan(
        gpu,
        weights,
        device=on_device | engine.pop("device", {}),
        checkpoint=sum(map(nbytes, (*weights, *arrays, *saved))),
        flops=flops / share_count(arguments),
        **engine,
    )


def new_plan(gpu: Gpu, weights: Sequence[HasShape], **fields: Any) -> Plan:
    """Returns a plan for these weights on a typical machine."""
    devices, parameters = device_count(weights), sum(math.prod(x.shape) for x in weights)
    rate, memory = gpu.host_beside(devices)
    return Plan(gpu, devices, parameters, memory, rate, **fields)


def device_count(arrays: Sequence[object]) -> int:
    return max(getattr(getattr(x, "sharding", None), "num_devices", 1) for x in arrays)


def share_count(arguments: PyTree) -> int:
    """Returns the number of shares that devices split the most divided argument into."""
    shares = [nbytes(x) // max(bytes_here(x), 1) for x in jax.tree.leaves(arguments)]
    return max([1, *shares])
