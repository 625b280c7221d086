"""Plans a run of `layerwise.Trainer`: memory at a step's fullest moment, and sums of its work."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenflow_jax._spec.rules import check_one_of
from zenflow_jax.layerwise._blocks import bundles_of
from zenflow_jax.layerwise._optimizer import Updater, alone, flat
from zenflow_jax.layerwise._programs import trace_model
from zenflow_jax.layerwise._tracing import floats_of, shapes_of
from zenflow_jax.layerwise._trainer import _IN_FLIGHT
from zenflow_jax.layerwise._updates import AHEAD, gradients_kept
from zenflow_jax.planning._gpus import Gpu, gpu_named
from zenflow_jax.planning._plans import TEMPORARIES, Plan, devices_of, nbytes_here, shares_of
from zenflow_jax.planning._steps import nbytes, products


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
) -> Plan:
    """Plans the memory and time of `layerwise.Trainer`, which trains all weights.

    Arguments up to `in_flight_bytes` are the trainer's, except as noted; `params` and `batch` may
    be `jax.ShapeDtypeStruct`s with shardings. Errors are the trainer's and `plan`'s.

    Args:
        batch: A micro-batch.
        micro_batches: The number of micro-batches in a step.
        device, host_memory_bytes: As for `plan`.
        compiles: Whether to compile all programs, for the devices in the shardings, for example of
            a `described_mesh`. Otherwise temporaries are left out.

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
        ...     optimizer=optax.sgd(1e-2),
        ... )
        >>> needs.host["weights and state, pinned"] / needs.parameters
        4.0
    """
    gpu = gpu_named(device)
    check_one_of("updates", updates, ("after_backward", "during_backward"))
    check_one_of("inputs", inputs, ("device", "host"))
    blocks, trees = _blocks_of(optimizer, params)
    w, u = [x.weights for x in blocks], [x.others for x in blocks]
    in_flight = _IN_FLIGHT * max(x.largest for x in blocks)
    in_flight = in_flight if in_flight_bytes is None else in_flight_bytes
    functions = [layer] * (len(trees) - 1) if callable(layer) else layer
    options = [True] * len(trees), compiler_options, {}
    program = trace_model(first, functions, last, trees[0], trees[1:], shapes_of(batch), *options)
    at_once, on_host = updates == "during_backward", inputs == "host"
    on_device = 0 if at_once else gradients_kept(w, in_flight)
    tracer, flight = _Tracer(shares_of(batch), compiles), in_flight if at_once else None
    flops, moved, inputs_bytes, peak = _follow(
        program,
        trees,
        batch,
        tracer,
        parts=micro_batches,
        on_host=on_host,
        flight=flight,
        on_device=on_device,
    )
    # Weights come for both passes. All arrays leave once. A second sweep also fetches the weights,
    # and sends gradients and takes them back, and nothing hides it.
    sent, kept = sum(w[on_device:]) * (not at_once), inputs_bytes * on_host
    sweep = (sum(w) + sent) * (not at_once)
    late = sum(max(x - in_flight // 2, 0) for x in u) if at_once else sum(u) + sweep
    second_sweep: dict[str, int] = {"weights": w[0], "updates in flight": in_flight}
    second_sweep["gradients of weights"] = sum(w[:on_device])
    devices = devices_of(jax.tree.leaves(trees))
    rate, usual_bytes = gpu.host_beside(devices)
    host = {"weights and state, pinned": sum(w) + sum(u), "gradients, pinned": sent}
    host |= {"layers' inputs, pinned": kept}
    return Plan(
        gpu=gpu,
        devices=devices,
        parameters=sum(x.size for x in jax.tree.leaves(trees)),
        device=max(peak, second_sweep, key=_total),
        host={name: devices * x for name, x in host.items()},
        pinned=_total(host),
        checkpoint=sum(x.saved for x in blocks),
        host_capacity_bytes=usual_bytes if host_memory_bytes is None else host_memory_bytes,
        host_bandwidth=rate,
        flops=flops + sum(x.flops for x in blocks),
        moved=moved,
        to_device=2 * sum(w) - w[0] - w[-1] * (len(w) > 1) + sum(u) + sweep + kept,
        to_host=sum(w) + sum(u) + sent + kept,
        growing=kept,
        exposed_s=late / gpu.bus,
    )


def pinned_bytes(
    params: Mapping[str, Any], optimizer: optax.GradientTransformation, *, gradients: bool
) -> int:
    """Returns the pinned bytes of weights, state and, if `gradients`, these, for one device.

    Unlike `plan_layerwise`, it starts no backend of jax, which reads the limit when it starts.
    """
    blocks, _ = _blocks_of(optimizer, params)
    return sum((1 + gradients) * x.weights + x.others for x in blocks)


class _Block(NamedTuple):
    """A block's bytes on one device, and its updates' operations there."""

    weights: int
    others: int  # that only updates read: the masters' rest, and the optimizer's state
    largest: int  # of the arrays that one program updates
    saved: int  # on disk, for all devices
    flops: float


def _blocks_of(
    optimizer: optax.GradientTransformation, params: Mapping[str, Any]
) -> tuple[list[_Block], list[Any]]:
    """Returns the blocks, and the shapes of their weights."""
    updater = Updater(optimizer, None)

    @functools.cache
    def block_of(treedef: Any, leaves: tuple[Any, ...]) -> _Block:
        shapes = [updater.shapes(treedef, i, x) for i, x in enumerate(leaves)]
        bundles = [*bundles_of(shapes, 0)]
        weights, flops = sum(x.weights_nbytes for x in bundles), 0.0
        for i, x in enumerate(leaves):
            tree = alone(treedef, i, jax.ShapeDtypeStruct(x.shape, jnp.float32))
            state = jax.eval_shape(optimizer.init, tree)
            traced = jax.make_jaxpr(optimizer.update)(tree, state, tree)
            flops += products(traced.jaxpr)[0] * nbytes_here(x) / max(nbytes(x), 1)
        return _Block(
            weights,
            sum(x.nbytes for x in bundles) - weights,
            max((x.nbytes for x in bundles), default=0),
            sum(map(nbytes, flat(shapes))),
            flops,
        )

    trees = [params["outer"], *params["layers"]]
    trees = jax.tree.map(lambda x: _shape_at(x, x.sharding), trees)
    pairs = map(jax.tree.flatten, trees)
    return [block_of(treedef, tuple(leaves)) for leaves, treedef in pairs], trees


class _Call(NamedTuple):
    out: Any  # the results, as shapes
    temporaries: int  # bytes on one device
    flops: float
    moved: float


@dataclasses.dataclass(frozen=True)
class _Tracer:
    """Traces programs, and compiles them if `compiles`."""

    shares: int  # number of shares that devices split a batch into
    compiles: bool

    def call(self, program: Any, *args: Any) -> _Call:
        traced = program.trace(*args)
        work = [x / self.shares for x in products(traced.jaxpr.jaxpr)]
        if not self.compiles:
            return _Call(traced.out_info, 0, *work)
        compiled = traced.lower().compile()
        out = jax.tree.map(_shape_at, traced.out_info, compiled.output_shardings)
        return _Call(out, compiled.memory_analysis().temp_size_in_bytes, *work)

    def size(self, arrays: Any) -> int:
        """Returns the bytes of arrays on one device; the same object counts once."""
        each = {id(x): x for x in jax.tree.leaves(arrays)}.values()
        return sum(nbytes_here(x) if x.sharding else nbytes(x) // self.shares for x in each)


def _follow(
    program: Any,
    trees: Sequence[Any],
    batch: Any,
    tracer: _Tracer,
    *,
    parts: int,
    on_host: bool,
    flight: int | None,
    on_device: int,
) -> tuple[float, float, int, Mapping[str, int]]:
    """Returns a step's operations and bytes moved, the inputs' bytes, and the device's peak.

    The layers' inputs wait `on_host` or on the device. During the backward pass, `flight` bytes are
    in flight for updates, unless these follow it (None); then the gradients of the `on_device`
    lowest blocks stay. Python is `AHEAD` layers ahead.
    """
    size, several, calls, peaks = tracer.size, parts > 1, [], []
    w = [size(x) for x in trees]
    sums: list[Any] = [None] * len(trees)
    if several:
        sums = [[_shape_at(y, y.sharding, jnp.float32) for y in jax.tree.leaves(x)] for x in trees]
    # Of several micro-batches, the sum is float32, and the last program makes the gradient.
    g = [max(size(x), b) + (size(x) > b) * b for x, b in zip(sums, w, strict=True)]
    weighing = (jax.ShapeDtypeStruct((), jnp.float32), None) if several else None

    def at(call: _Call, weights: int, gradients: int, inputs: Any, flight: int = 0) -> None:
        calls.append(call)
        uses = {"weights": w[0] + weights, "gradients of weights": gradients}
        uses |= {"layers' inputs": parts * size(inputs), "updates in flight": flight}
        peaks.append(uses | ({TEMPORARIES: call.temporaries} if tracer.compiles else {}))

    begin = tracer.call(program.first, trees[0], batch)
    carry, shared = begin.out
    at(begin, 0, 0, carry)
    moving = [jax.tree.leaves(shared)[j] for j in program.moving]
    carries, kept, new, kinds, backward = [carry], [], [], {}, []
    for i, (layer, weights) in enumerate(zip(program.layers, trees[1:], strict=True)):
        kept.append([jax.tree.leaves(carry)[j] for j in layer.kept])
        new += [x for x in kept[i] if not i or all(x is not y for y in kept[i - 1])]
        if (kind := id(layer)) not in kinds:
            ahead = tracer.call(layer.forward, weights, carry, shared)
            end = floats_of(_carry_after(layer, ahead, carry))
            places = map(_shardings, (end, floats_of(carry), moving))
            run = layer.backward(*places).other
            arguments = sums[i + 1], weighing, weights, end, moving, kept[i], shared
            kinds[kind] = ahead, tracer.call(run, *arguments)
        carries.append(carry := _carry_after(layer, kinds[kind][0], carry))
        waiting = kept[max(i - AHEAD, 0) if on_host else 0 :]
        at(kinds[kind][0], sum(w[i + 1 : i + 3]), 0, [waiting, carries[-2:]])
        backward.append(kinds[kind][1])
    g_first = floats_of(carries[0])
    run = program.last(*map(_shardings, (floats_of(carry), moving)))[several]
    last = tracer.call(run, None, trees[0], carry, moving, batch)
    outer = size(last.out[1])
    at(last, w[-1], outer, [kept[-AHEAD:] if on_host else kept, carry])
    for i in reversed(range(len(backward))):
        leaving = w[i + 2 : i + 3 if flight is not None else max(i + 2 + AHEAD, on_device)]
        alive = sum(w[max(i, 1) : i + 2]) + (sum(leaving) if flight is not None else 0)
        inputs = [kept[i if on_host else 0 : i + 1], floats_of(carries[i : i + 2])]
        at(backward[i], alive, outer + g[i + 1] + sum(leaving), inputs, flight or 0)
    run = program.first_backward((), (), ()).other
    end = tracer.call(run, last.out[1], weighing, trees[0], g_first, moving, batch)
    at(end, 0, outer + g[0] + sum(w[1 : max(2, on_device)]), g_first, flight or 0)
    flops, moved = (parts * sum(x) for x in zip(*((c.flops, c.moved) for c in calls), strict=True))
    return flops, moved, parts * size(new), max(peaks, key=_total)


def _carry_after(layer: Any, call: _Call, carry: Any) -> Any:
    """Returns the carry after a layer; arrays that the layer makes are new objects."""
    made = [_shape_at(x, x.sharding) for x in call.out]
    return dataclasses.replace(layer, forward=lambda *_: made).run(None, carry, None)


def _shardings(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in arrays)


def _shape_at(x: Any, sharding: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def _total(uses: Mapping[str, int]) -> int:
    return sum(uses.values())
