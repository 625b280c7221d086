"""Plans a run of `layerwise.Trainer`: the memory that it needs, and the time per step.

Follows the calls of `Dispatcher.step` twice, in its order: for the arrays that are alive on the
device, and for the times at which programs, copies and updates end.
"""

import bisect
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zenflow_jax._exchange.checks import is_compact
from zenflow_jax._spec.rules import check_one_of
from zenflow_jax.layerwise._dispatch import AHEAD
from zenflow_jax.layerwise._programs import (
    LayerProgram,
    ModelProgram,
    floats_of,
    shapes_of,
    trace_model,
)
from zenflow_jax.planning._gpus import Gpu, gpu_named
from zenflow_jax.planning._host_work import state_bytes
from zenflow_jax.planning._plans import TEMPORARIES, Plan, nbytes_here, shares_of
from zenflow_jax.planning._steps import nbytes, peak_bytes, products

#: A plan reports the batch size from which compute takes at least this share of a step.
BOUND = 0.95
_SCALES = [2 ** (k / 8) for k in range(-64, 65)]
_STEPS = 4  # until a step takes as long as the previous step


@dataclasses.dataclass(frozen=True)
class LayerPlan(Plan):
    """The plan of a run of `layerwise.Trainer`; `step_s` includes all waits.

    Attributes:
        seconds: The work of a step for each resource: "compute", the bus "to device" and "to
            host", and "host".
        compute_from: The factor by which the batch must grow for compute to take 95% of a step;
            None if no batch suffices.
    """

    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    compute_from: float | None = None

    @property
    def bottleneck(self) -> str:
        """Returns the resource with the most work in a step."""
        return max(self.seconds, key=self.seconds.__getitem__)

    @property
    def hidden(self) -> float:
        return self.seconds["compute"] / self.step_s

    @property
    def on_time(self) -> list[str]:
        work = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in self.seconds.items())
        text = f"A step takes {self.step_s:.2g} s; its bottleneck is {self.bottleneck} ({work})."
        if self.compute_from is None:
            return [f"{text} Compute does not reach {BOUND:.0%} of a step with any batch."]
        larger = f"{self.compute_from:.2g} times as large"
        return [f"{text} Compute takes {BOUND:.0%} of a step once the batch is {larger}."]


def plan_layerwise(
    params: Mapping[str, Any],
    batch: Any,
    *,
    first: Callable,
    layer: Callable | Sequence[Callable],
    last: Callable,
    micro_batches: int = 1,
    updates: str = "after_backward",
    inputs: str = "device",
    device: str | Gpu = "h100",
    host_memory_bytes: int | None = None,
    bandwidth: float | None = None,
    host_state: str = "float32",
    compiles: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> LayerPlan:
    """Plans the memory and time of `layerwise.Trainer`, which trains all weights.

    Args:
        params: As for the trainer, as arrays or `jax.ShapeDtypeStruct`s with shardings.
        batch: A micro-batch, in the same form.
        first, layer, last: The model, as for the trainer.
        micro_batches: The number of micro-batches in a step.
        updates, inputs, host_state: As for the trainer.
        device, host_memory_bytes, bandwidth: As for `plan`.
        compiles: Whether to compile all programs, for the devices in the shardings, for example of
            a `described_mesh`. Otherwise temporaries are left out.
        compiler_options: As in `jax.jit`.

    Raises:
        ValueError: If `device`, `updates`, `inputs` or `host_state` is unknown.
        TypeError: If the functions do not fit together.

    Examples:
        >>> import jax.numpy as jnp
        >>> from zenflow_jax.planning import plan_layerwise
        >>> w, x = jnp.zeros((2, 512, 512), jnp.bfloat16)
        >>> needs = plan_layerwise(
        ...     {"outer": {}, "layers": [w] * 10},
        ...     x,
        ...     first=lambda outer, x: (x, None),
        ...     layer=lambda w, x, _: x @ w,
        ...     last=lambda outer, x, batch: jnp.mean(x).astype(jnp.float32),
        ... )
        >>> needs.device["weights"] // 512**2, needs.bottleneck  # of two layers
        (4, 'host')
    """
    gpu = gpu_named(device)
    check_one_of("updates", updates, ("after_backward", "during_backward"))
    check_one_of("inputs", inputs, ("device", "host"))
    outer, layers = jax.tree.map(
        lambda x: _shape_at(x, x.sharding), (params["outer"], list(params["layers"]))
    )
    functions = [layer] * len(layers) if callable(layer) else layer
    options = [True] * (1 + len(layers)), compiler_options, {}
    program = trace_model(first, functions, last, outer, layers, shapes_of(batch), *options)
    costs = _Costs(gpu, shares_of(batch), compiles)
    step = _step_of(program, outer, layers, batch, costs, micro_batches, inputs == "host")
    blocks = [jax.tree.leaves(x) for x in (outer, *layers)]
    compact, leaves = is_compact(host_state), [x for block in blocks for x in block]
    state, moved = zip(*(_host_bytes(block, compact) for block in blocks), strict=True)
    devices = max((len(x.sharding.device_set) for x in leaves), default=1)
    usual_rate, usual_bytes = gpu.host_beside(devices)
    rate, at_once = bandwidth or usual_rate, updates == "during_backward"
    host = [x / rate for x in moved]
    to_host = sum(step.weights) + sum(step.sent)
    to_device = sum(step.weights) + sum(step.weights[1:-1]) + sum(step.taken)
    in_flight = sum(sorted(step.weights)[-AHEAD:] if at_once else step.weights)

    compute_s = sum(x.seconds for x in step.calls)

    def computes(scale: float) -> bool:
        return scale * compute_s >= BOUND * _period(step, gpu.bus, host, at_once, scale)

    index = bisect.bisect_left(_SCALES, True, key=computes)
    parameters = sum(x.size for x in leaves)
    return LayerPlan(
        gpu=gpu,
        devices=devices,
        device=_device_bytes(step),
        checkpoint=3 * 4 * parameters,
        parameters=parameters,
        flops=sum(x.flops for x in step.calls),
        step_s=_period(step, gpu.bus, host, at_once, 1.0),
        host_capacity_bytes=usual_bytes if host_memory_bytes is None else host_memory_bytes,
        host_bandwidth=rate,
        host={
            "masters, moments": sum(state),
            "weights, pinned": devices * sum(step.weights),
            "gradients, pinned": devices * in_flight,
            "layers' inputs, pinned": devices * sum(step.sent),
        },
        to_host=to_host,
        to_device=to_device,
        host_s=sum(host),
        seconds={
            "compute": compute_s,
            "to device": to_device / gpu.bus,
            "to host": to_host / gpu.bus,
            "host": sum(host),
        },
        compute_from=_SCALES[index] if index < len(_SCALES) else None,
    )


def _host_bytes(block: Sequence[Any], compact: bool) -> tuple[int, int]:
    """Returns the bytes of a block's state, and the bytes that its update reads and writes."""
    state = sum(state_bytes((1, 1, 1, x.size), x.dtype, compact=compact) for x in block)
    # An update also reads the gradient, and copies new weights from masters to pinned memory.
    return state, 2 * state + 3 * sum(map(nbytes, block))


class _Call(NamedTuple):
    """The costs of a program, on one device."""

    out: Any  # the results, as shapes
    extra: int  # bytes besides the arguments: temporaries, and results with memory of their own
    flops: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Costs:
    """Traces programs, and compiles them if `compiles`."""

    gpu: Gpu
    shares: int  # number of shares that devices split a batch into
    compiles: bool

    def call(self, program: Any, times: int, *args: Any) -> _Call:
        traced = program.trace(*args)
        flops, moved = (times * x / self.shares for x in products(traced.jaxpr.jaxpr))
        seconds = self.gpu.seconds(flops, moved)
        if not self.compiles:
            return _Call(traced.out_info, 0, flops, seconds)
        compiled = traced.lower().compile()
        extra = peak_bytes(compiled) - compiled.memory_analysis().argument_size_in_bytes
        out = jax.tree.map(_shape_at, traced.out_info, compiled.output_shardings)
        return _Call(out, extra, flops, seconds)

    def size(self, *arrays: Any) -> int:
        """Returns the bytes of arrays on one device; the same object counts once."""
        each = {id(x): x for x in jax.tree.leaves(arrays)}.values()
        return sum(nbytes_here(x) if x.sharding else nbytes(x) // self.shares for x in each)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The calls of `Dispatcher.step`. In `carries` and `kept`, each object stands for an array."""

    costs: _Costs
    parts: int  # micro-batches
    on_host: bool  # where the layers' inputs wait
    weights: list[int]  # bytes of each block on one device
    first: _Call
    forward: list[_Call]
    last: _Call
    backward: list[_Call]
    first_backward: _Call
    carries: list[list[Any]]  # before each layer, and after the last
    kept: list[list[Any]]  # inputs of each layer, kept for the backward pass

    @property
    def calls(self) -> list[_Call]:
        return [self.first, *self.forward, self.last, *self.backward, self.first_backward]

    @functools.cached_property
    def taken(self) -> list[int]:
        """Returns the bytes of each layer's inputs that come from the host."""
        return [self.parts * self.costs.size(x) * self.on_host for x in self.kept]

    @functools.cached_property
    def sent(self) -> list[int]:
        """Returns the bytes of each layer's inputs that go to the host, each array once."""
        pairs = zip([[], *self.kept], self.kept, strict=False)
        new = [[x for x in now if all(x is not y for y in old)] for old, now in pairs]
        return [self.parts * self.costs.size(x) * self.on_host for x in new]


def _step_of(
    program: ModelProgram,
    outer: Any,
    layers: Sequence[Any],
    batch: Any,
    costs: _Costs,
    parts: int,
    on_host: bool,
) -> _Step:
    """Follows `parts` micro-batches through the programs; each kind of layer is traced once."""
    first = costs.call(program.first, parts, outer, batch)
    carry, shared = first.out
    moving = [jax.tree.leaves(shared)[j] for j in program.moving]
    carries, kept, calls, kinds = [jax.tree.leaves(carry)], [], [], {}
    for layer, weights in zip(program.layers, layers, strict=True):
        kept.append([carries[-1][j] for j in layer.kept])
        if (kind := id(layer)) not in kinds:
            ahead = costs.call(layer.forward, parts, weights, carry, shared)
            g = floats_of(_carry_after(layer, ahead, carry))
            arguments = None, None, weights, g, moving, kept[-1], shared
            kinds[kind] = ahead, costs.call(layer.backward[1], parts, *arguments)
        calls.append(kinds[kind])
        carry = _carry_after(layer, calls[-1][0], carry)
        carries.append(jax.tree.leaves(carry))
    last = costs.call(program.last, parts, outer, carry, batch)
    arguments = None, None, outer, floats_of(carries[0]), moving, last.out[1][0], batch
    begin = costs.call(program.first_backward[1], parts, *arguments)
    sizes = [costs.size(x) for x in (outer, *layers)]
    ahead, back = ([pair[j] for pair in calls] for j in range(2))
    return _Step(costs, parts, on_host, sizes, first, ahead, last, back, begin, carries, kept)


def _carry_after(layer: LayerProgram, call: _Call, carry: Any) -> Any:
    """Returns the carry after a layer; arrays that the layer makes are new objects."""
    made = [_shape_at(x, x.sharding) for x in call.out]
    return dataclasses.replace(layer, forward=lambda *_: made).run(None, carry, None)


def _device_bytes(step: _Step) -> dict[str, int]:
    """Returns the bytes on one device at the peak of a step, by use.

    Python is at most `AHEAD` layers ahead of the device, and that many gradients leave at a time.
    """
    outer, *layers = step.weights
    costs, parts, carries, kept = step.costs, step.parts, step.carries, step.kept
    peak = {"weights": 0}

    def at(weights: int, gradients: int, carried: list[Any], g: list[Any], extra: int) -> None:
        nonlocal peak
        uses = {
            "weights": outer + weights,
            "gradients of weights": gradients,
            "layers' inputs": parts * (costs.size(carried) + costs.size(floats_of(g))),
        }
        if costs.compiles:
            uses[TEMPORARIES] = extra
        peak = max(peak, uses, key=lambda x: sum(x.values()))

    at(0, 0, [], [], step.first.extra)
    for i, call in enumerate(step.forward):
        waiting = kept[max(i - AHEAD, 0) if step.on_host else 0 : i + 1]
        others = (parts - 1) * costs.size(carries[i + 1])
        at(sum(layers[i : i + 2]), 0, [*waiting, carries[i]], [], call.extra + others)
    waiting = kept[-AHEAD:] if step.on_host else kept
    at(sum(layers[-1:]), (parts - 1) * outer, [*waiting, carries[-1]], [], step.last.extra)
    # Sums over micro-batches are float32.
    sums = 2 if parts > 1 else 0
    for i, call in enumerate(step.backward):
        leaving = parts * outer + sum(layers[i + 1 : i + 1 + AHEAD]) + sums * layers[i]
        waiting = kept[i if step.on_host else 0 : i + 1]
        at(sum(layers[max(i - 1, 0) : i + 1]), leaving, waiting, carries[i + 1], call.extra)
    leaving = (parts + sums) * outer + sum(layers[:AHEAD])
    at(0, leaving, [], carries[0], step.first_backward.extra)
    return peak


def _period(step: _Step, bus: float, host: list[float], at_once: bool, scale: float) -> float:
    """Returns the seconds between the ends of two steps, for batches `scale` times as large.

    A copy waits for the programs that Python dispatched earlier, because it may reuse their memory.
    Copies in one direction take turns.
    """
    names = ("python", "compute", "to device", "to host", "host")
    free: dict[str, float] = {name: 0.0 for name in names}
    ready, ends = [0.0] * len(step.weights), [0.0]
    decision, layers = 0.0, range(len(step.forward))

    def run(resource: str, seconds: float, *after: float) -> float:
        free[resource] = max(free[resource], free["python"], *after) + seconds
        return free[resource]

    def compute(call: _Call, *after: float) -> float:
        return run("compute", scale * call.seconds, *after)

    def wait(until: float) -> None:
        free["python"] = max(free["python"], until)

    def fetch(i: int) -> float:
        wait(ready[i])
        return run("to device", step.weights[i] / bus, free["compute"])

    def send(i: int, end: float) -> None:
        if at_once and len(updating) >= AHEAD:
            wait(updating.popleft())
        arrived = run("to host", step.weights[i] / bus, end)
        ready[i] = run("host", host[i], arrived) if at_once else arrived
        updating.append(ready[i])

    updating: deque[float] = deque()
    for _ in range(_STEPS):
        wait(decision)
        compute(step.first, fetch(0))
        weights = fetch(1) if layers else 0.0
        for i in layers:
            following = fetch(i + 2) if i + 1 < len(layers) else weights
            if step.sent[i]:
                run("to host", scale * step.sent[i] / bus, free["compute"])
            compute(step.forward[i], weights)
            weights = following
        compute(step.last)
        for i in reversed(layers):
            if step.taken[i]:
                taken = run("to device", scale * step.taken[i] / bus, free["compute"])
                weights = max(weights, taken)
            below = fetch(i) if i else 0.0
            send(i + 1, compute(step.backward[i], weights))
            weights = below
        send(0, compute(step.first_backward))
        ends.append(free["compute"])
        if not at_once:
            decision = free["compute"]
            ready = [run("host", seconds, decision, ready[i]) for i, seconds in enumerate(host)]
    return ends[-1] - ends[-2]


def _shape_at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
