"""Plans a run of `layerwise.Trainer`: sums of its work, and of its fullest moment."""

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
from zenflow_jax.planning._plans import (
    TEMPORARIES,
    Plan,
    devices_of,
    nbytes_here,
    new_plan,
    shares_of,
)
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
    compiles: bool = False,
) -> Plan:
    """Plans `layerwise.Trainer`, which trains all weights.

    Arguments up to `in_flight_bytes` are the trainer's, and arrays may be `jax.ShapeDtypeStruct`s
    with shardings. `batch` is one of `micro_batches`. If `compiles`, all programs are compiled for
    the devices in the shardings, such as a `described_mesh`; otherwise the plan lacks temporaries.
    Plans with another optimizer, `updates` or `inputs` reuse the programs.
    """
    gpu = gpu_named(device)
    check_one_of("updates", updates, ("after_backward", "during_backward"))
    check_one_of("inputs", inputs, ("device", "host"))
    blocks, trees = _blocks_of(optimizer, params)
    types = jax.tree.map(lambda x, y: _at(y, getattr(x, "sharding", None)), batch, shapes_of(batch))
    functions = first, (layer,) * (len(trees) - 1) if callable(layer) else tuple(layer), last
    leaves, treedef = jax.tree.flatten((trees, types))
    several, at_once, on_host = micro_batches > 1, updates == "during_backward", inputs == "host"
    work = _work_of(functions, tuple(leaves), treedef, several, compiles)
    w, u = [x.weights for x in blocks], [x.others for x in blocks]
    in_flight = _IN_FLIGHT * max((x.largest for x in blocks[1:]), default=0)
    in_flight = in_flight if in_flight_bytes is None else in_flight_bytes
    # Weights come for both passes. All arrays leave once. A second sweep also fetches the weights,
    # and sends gradients and takes them back, and nothing hides it.
    stay = 0 if at_once else gradients_kept(w, in_flight)
    sent, kept = sum(w[stay:]) * (not at_once), micro_batches * sum(work.inputs) * on_host
    sweep = (sum(w) + sent) * (not at_once)
    late = sum(max(x - in_flight // 2, 0) for x in u) if at_once else sum(u) + sweep
    on_device = sorted(work.inputs)[-AHEAD - 1 :] if on_host else work.inputs
    held = micro_batches * (sum(on_device) + work.carry)
    flights = in_flight * at_once, max(in_flight, blocks[0].largest)
    moments = _moments(work, trees, held, several, flights, stay)
    fullest = max(moments, key=lambda x: sum(x.values()))
    if not compiles:
        del fullest[TEMPORARIES]
    host = {"weights and state, pinned": sum(w) + sum(u), "gradients, pinned": sent}
    host |= {"layers' inputs, pinned": kept}
    weights = jax.tree.leaves(trees)
    return new_plan(
        gpu,
        weights,
        device=fullest,
        host={name: devices_of(weights) * x for name, x in host.items()},
        checkpoint=sum(x.saved for x in blocks),
        flops=micro_batches * work.flops + sum(x.flops for x in blocks),
        to_device=2 * sum(w) - w[0] - w[-1] * (len(w) > 1) + sum(u) + sweep + kept,
        to_host=sum(w) + sum(u) + sent + kept,
        exposed=late,
    )


def pinned_bytes(
    params: Mapping[str, Any], optimizer: optax.GradientTransformation, *, gradients: bool
) -> int:
    """Returns one device's pinned bytes of weights, state and `gradients`, without a backend."""
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

    def flops_of(x: Any, tree: Any) -> float:
        traced = jax.make_jaxpr(optimizer.update)(tree, jax.eval_shape(optimizer.init, tree), tree)
        return products(traced.jaxpr) * nbytes_here(x) / max(nbytes(x), 1)

    @functools.cache
    def block_of(treedef: Any, leaves: tuple[Any, ...]) -> _Block:
        shapes = [updater.shapes(treedef, i, x) for i, x in enumerate(leaves)]
        bundles = [*bundles_of(shapes, 0)]
        weights, sizes = sum(x.weights_nbytes for x in bundles), [x.nbytes for x in bundles]
        apart = [alone(treedef, i, x) for i, x in enumerate(_float32(leaves))]
        flops = sum(map(flops_of, leaves, apart))
        saved = sum(map(nbytes, flat(shapes)))
        return _Block(weights, sum(sizes) - weights, max(sizes, default=0), saved, flops)

    trees = jax.tree.map(lambda x: _at(x, x.sharding), [params["outer"], *params["layers"]])
    pairs = map(jax.tree.flatten, trees)
    return [block_of(treedef, tuple(leaves)) for leaves, treedef in pairs], trees


class _Work(NamedTuple):
    """The programs of one micro-batch; all bytes are those of one device."""

    flops: float
    inputs: Sequence[int]  # what each layer keeps for the backward pass
    carry: int  # the largest
    outer: int  # the gradient of the outer weights that `last` reads
    temporaries: Sequence[int]  # at the loss, in a layer, and in the backward program of `first`


@functools.lru_cache(maxsize=8)
def _work_of(
    functions: tuple[Callable, tuple[Callable, ...], Callable],
    leaves: tuple[Any, ...],
    treedef: Any,
    several: bool,
    compiles: bool,
) -> _Work:
    """Traces the programs for weights and a batch, and compiles them if `compiles`."""
    (outer, *layers), batch = treedef.unflatten(leaves)
    types = jax.tree.map(lambda x: _at(x, None), batch)
    trains, known, flops = [True] * (1 + len(layers)), {}, 0.0
    program = trace_model(*functions, outer, layers, types, trains, None, {})
    shares = shares_of(batch)

    def call(function: Any, *args: Any) -> tuple[Any, int]:
        """Returns the results as shapes, and the bytes of temporaries; adds up operations."""
        nonlocal flops
        if function not in known:
            traced = function.trace(*args)
            out, temporaries = traced.out_info, 0
            if compiles:
                compiled = traced.lower().compile()
                out = jax.tree.map(_at, out, compiled.output_shardings)
                temporaries = compiled.memory_analysis().temp_size_in_bytes
            known[function] = out, temporaries, products(traced.jaxpr.jaxpr) / shares
        flops += known[function][2]
        return known[function][:2]

    def size(arrays: Any) -> int:
        each = jax.tree.leaves(arrays)
        return sum(nbytes_here(x) if x.sharding else nbytes(x) // shares for x in each)

    (carry, shared), _ = call(program.first, outer, batch)
    begin, largest, temporaries = floats_of(carry), size(carry), 0
    moving = [jax.tree.leaves(shared)[j] for j in program.moving]
    weighing = (jax.ShapeDtypeStruct((), jnp.float32), None) if several else None
    inputs, previous = [], []
    for layer, tree in zip(program.layers, layers, strict=True):
        kept = [jax.tree.leaves(carry)[j] for j in layer.kept]
        inputs.append(size([x for x in kept if all(x is not y for y in previous)]))
        out, ahead = call(layer.forward, tree, carry, shared)
        # Arrays that the layer makes are new objects.
        made = [_at(x, x.sharding) for x in out]
        after = dataclasses.replace(layer, forward=lambda *_, made=made: made).run(
            None, carry, None
        )
        end = floats_of(after)
        run = layer.backward(*map(_places, (end, floats_of(carry), moving))).other
        total = _float32(tree) if several else None
        _, behind = call(run, total, weighing, tree, end, moving, kept, shared)
        temporaries, largest = max(temporaries, ahead, behind), max(largest, size(after))
        carry, previous = after, kept
    run = program.last(*map(_places, (floats_of(carry), moving)))[several]
    (_, g_outer, *_), at_loss = call(run, None, outer, carry, moving, batch)
    run = program.first_backward((), (), ()).other
    _, in_first = call(run, g_outer, weighing, outer, begin, moving, batch)
    temporaries = at_loss, temporaries, in_first
    return _Work(flops, inputs, largest, size(g_outer), temporaries)


def _moments(
    work: _Work,
    trees: Sequence[Any],
    held: int,
    several: bool,
    flights: tuple[int, int],
    stay: int,
) -> list[dict[str, int]]:
    """Returns the device's bytes, by use, at four moments of a step.

    `held` are the layers' inputs, `flights` the bytes in flight behind programs and in the end. The
    gradients of the `stay` lowest blocks wait for a second sweep.
    """
    w = [sum(map(nbytes_here, jax.tree.leaves(x))) for x in trees]
    # Of several micro-batches, the sum is float32, and the last program makes the gradient.
    sums = [sum(map(nbytes_here, _float32(x))) if several else 0 for x in trees]
    g = [max(x, total) + x * (total > x) for x, total in zip(w, sums, strict=True)]
    three = max(sum(w[i : i + AHEAD + 1]) for i in range(1, len(w)))
    most, outer = max(w[1:]), work.outer
    at_loss, in_layer, in_first = work.temporaries
    # At the loss, behind a layer, in the backward program of `first`, and with updates alone.
    moments = [
        (w[0] + most, outer, held, 0, at_loss),
        (w[0] + three, outer + max(g[1:]) + max(most, sum(w[2:stay])), held, flights[0], in_layer),
        (w[0] + most, outer + g[0] + max(most, sum(w[1:stay])), work.carry, flights[0], in_first),
        (w[0], max(g[0], sum(w[:stay])), 0, flights[1], 0),
    ]
    names = "weights", "gradients of weights", "layers' inputs", "updates in flight", TEMPORARIES
    return [dict(zip(names, uses, strict=True)) for uses in moments]


def _places(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.sharding for x in arrays)


def _float32(tree: Any) -> list[Any]:
    return [x.update(dtype=jnp.float32) for x in jax.tree.leaves(tree)]


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)
