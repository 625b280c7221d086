"""Plans a run of `layerwise.Trainer`: the memory that it needs, and the work of a step.

Memory is that of the step's fullest moment; time is a sum for each resource. Optimizers differ in
the shapes of their state, and in the matrix products of their updates (Muon).

Letters: `w` bytes of a layer's weights on one device, `u` of all its arrays that an update replaces.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from zenflow_jax._spec.rules import check_one_of
from zenflow_jax.layerwise._blocks import BUNDLE_BYTES
from zenflow_jax.layerwise._optimizer import Updater, alone, flat, is_large
from zenflow_jax.layerwise._programs import (
    LayerProgram,
    ModelProgram,
    floats_of,
    shapes_of,
    trace_model,
)
from zenflow_jax.layerwise._trainer import IN_FLIGHT
from zenflow_jax.layerwise._updates import AHEAD
from zenflow_jax.planning._gpus import Gpu, gpu_named
from zenflow_jax.planning._plans import TEMPORARIES, Plan, nbytes_here, shares_of
from zenflow_jax.planning._steps import nbytes, products


@dataclasses.dataclass(frozen=True)
class LayerPlan(Plan):
    """The plan of a run of `layerwise.Trainer`.

    Attributes:
        moving: Bytes of `to_device` that grow with the batch.
    """

    moving: float = 0.0

    @property
    def seconds(self) -> Mapping[str, float]:
        """Returns the work of a step for each resource: "compute", and the bus in each direction."""
        copies = {"to device": self.to_device, "to host": self.to_host}
        return {"compute": self.compute_s} | {k: x / self.gpu.bus for k, x in copies.items()}

    @property
    def step_s(self) -> float:
        """Returns the time of the slower of compute and copies, and of copies that both wait for."""
        return max(self.compute_s + self.exposed / self.gpu.bus, *self.seconds.values())

    @property
    def bottleneck(self) -> str:
        """Returns the resource with the most work in a step."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def hidden(self) -> float:
        """Returns the share of a step in which the device computes."""
        return self.compute_s / self.step_s

    @property
    def compute_from(self) -> float | None:
        """Returns the factor by which a batch must grow to hide all copies that can be hidden.

        None if no batch suffices, because inputs that grow with it fill the bus.
        """
        fixed = max(self.to_device, self.to_host) - self.exposed - self.moving
        spare = self.compute_s * self.gpu.bus - self.moving
        return fixed / spare if spare > 0 else None


def plan_layerwise(
    params: Mapping[str, Any],
    batch: Any,
    *,
    first: Callable,
    layer: Callable | Sequence[Callable],
    last: Callable,
    optimizer: optax.GradientTransformation,
    micro_batches: int = 1,
    updates: str = "after_backward",
    inputs: str = "device",
    in_flight_bytes: int | None = None,
    device: str | Gpu = "h100",
    host_memory_bytes: int | None = None,
    compiles: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> LayerPlan:
    """Plans the memory and time of `layerwise.Trainer`, which trains all weights.

    Args:
        params: As for the trainer, as arrays or `jax.ShapeDtypeStruct`s with shardings.
        batch: A micro-batch, in the same form.
        first, layer, last, optimizer: The model and its optimizer, as for the trainer.
        micro_batches: The number of micro-batches in a step.
        updates, inputs, in_flight_bytes: As for the trainer.
        device, host_memory_bytes: As for `plan`.
        compiles: Whether to compile all programs, for the devices in the shardings, for example of
            a `described_mesh`. Otherwise temporaries are left out.
        compiler_options: As in `jax.jit`.

    Raises:
        ValueError: If `device`, `updates` or `inputs` is unknown.
        TypeError: If the functions do not fit together.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> from zenflow_jax.planning import plan_layerwise
        >>> w, x = jnp.zeros((2, 512, 512), jnp.bfloat16)
        >>> needs = plan_layerwise(
        ...     {"outer": {}, "layers": [w] * 10},
        ...     x,
        ...     first=lambda outer, x: (x, None),
        ...     layer=lambda w, x, _: x @ w,
        ...     last=lambda outer, x, batch: jnp.mean(x).astype(jnp.float32),
        ...     optimizer=optax.adamw(1e-4),
        ... )
        >>> needs.host["weights, state"] / needs.parameters, needs.bottleneck
        (12.0, 'to device')
    """
    gpu = gpu_named(device)
    check_one_of("updates", updates, ("after_backward", "during_backward"))
    check_one_of("inputs", inputs, ("device", "host"))
    blocks: list[Any] = jax.tree.map(
        lambda x: _shape_at(x, x.sharding), [params["outer"], *params["layers"]]
    )
    functions = [layer] * (len(blocks) - 1) if callable(layer) else layer
    options = [True] * len(blocks), compiler_options, {}
    program = trace_model(first, functions, last, blocks[0], blocks[1:], shapes_of(batch), *options)
    costs = _Costs(shares_of(batch), compiles)
    run = _Run(at_once=updates == "during_backward", parts=micro_batches, on_host=inputs == "host")
    step = _step_of(program, blocks, batch, costs, run)
    updater = Updater(optimizer, None)
    kept = [_kept(updater, optimizer, block) for block in blocks]
    largest = max((x for block in kept for x in block.bundles), default=0)
    in_flight = IN_FLIGHT * largest if in_flight_bytes is None else in_flight_bytes
    w, others = [x.weights for x in kept], [sum(x.bundles) - x.weights for x in kept]
    # Weights come twice, and with the optimizer's arrays leave once. A second sweep also sends
    # gradients and takes them back, with the weights; nothing hides it.
    twice, sweep = sum(w) + sum(w[1:-1]), 0 if run.at_once else sum(w)
    to_device = twice + sum(others) + 2 * sweep + step.taken
    to_host = sum(w) + sum(others) + sweep + step.sent
    exposed = sum(max(x - in_flight // 2, 0) for x in others)
    if not run.at_once:
        exposed = sum(others) + 2 * sweep
    leaves = jax.tree.leaves(blocks)
    devices = max((len(x.sharding.device_set) for x in leaves), default=1)
    _, usual_bytes = gpu.host_beside(devices)
    at_rest = {"weights, state": sum(w) + sum(others), "gradients": sweep, "inputs": step.sent}
    return LayerPlan(
        gpu=gpu,
        devices=devices,
        device=_device_bytes(step, w, in_flight, run, compiles),
        host={name: devices * x for name, x in at_rest.items()},
        pinned=sum(at_rest.values()),
        host_capacity_bytes=usual_bytes if host_memory_bytes is None else host_memory_bytes,
        host_bandwidth=gpu.host_beside(devices)[0],
        checkpoint=sum(x.checkpoint for x in kept),
        parameters=sum(x.size for x in leaves),
        flops=step.flops + sum(x.flops for x in kept),
        moved=step.moved,
        to_host=to_host,
        to_device=to_device,
        exposed=exposed,
        moving=float(step.taken),
    )
