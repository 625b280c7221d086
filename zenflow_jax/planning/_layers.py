"""Plans a run of `layerwise.Trainer`: sums of its work, and of its fullest moment."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Sharding
from jaxtyping import PyTree

from zenflow_jax._spec.checks import check_one_of
from zenflow_jax._spec.mesh import ArrayOrShape
from zenflow_jax.layerwise._dispatch import AHEAD, fetched_early
from zenflow_jax.layerwise._optimizer import Kind
from zenflow_jax.layerwise._programs import trace_model
from zenflow_jax.layerwise._tracing import types_of
from zenflow_jax.layerwise._trainer import _IN_FLIGHT
from zenflow_jax.layerwise._transfers import bytes_here, nbytes
from zenflow_jax.planning._gpus import Gpu, gpu_named
from zenflow_jax.planning._plans import TEMPORARIES, Plan, device_count, new_plan, share_count
from zenflow_jax.planning._steps import products

Shapes = tuple[jax.ShapeDtypeStruct, ...]


def plan_layerwise(
    params: Mapping[str, PyTree],
    batch: PyTree,
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
    """Plans a `layerwise.Trainer`.

    Arguments up to `in_flight_bytes` are the trainer's, and arrays may be `jax.ShapeDtypeStruct`s
    with shardings. `batch` is one of `micro_batches`. If `compiles`, all programs are compiled for
    the devices in the shardings, such as a `described_mesh`; otherwise the plan lacks temporaries.
    Plans with another optimizer, `updates` or `inputs` reuse the programs.
    """
    gpu = gpu_named(device)
    check_one_of("updates", updates, ("after_backward", "during_backward"))
    check_one_of("inputs", inputs, ("device", "host"))
    trees, kinds, updates_flops = _kinds_of(optimizer, params)
    types = jax.tree.map(lambda x, y: _at(y, getattr(x, "sharding", None)), batch, types_of(batch))
    functions = first, (layer,) * (len(trees) - 1) if callable(layer) else tuple(layer), last
    leaves, treedef = jax.tree.flatten((trees, types))
    several, at_once, on_host = micro_batches > 1, updates == "during_backward", inputs == "host"
    work = _work_of(functions, tuple(leaves), treedef, several, compiles)
    w = [x.weights_nbytes for x in kinds]
    u = [x.nbytes - x.weights_nbytes for x in kinds]
    largest = [max((bundle.nbytes for bundle in x.bundles), default=0) for x in kinds]
    in_flight = _IN_FLIGHT * max(largest[1:], default=0)
    in_flight = in_flight if in_flight_bytes is None else in_flight_bytes
    # Weights come for both passes. All arrays leave once. A second sweep also fetches the weights,
    # and sends gradients and takes them back, and nothing hides it.
    sent, kept = sum(w) * (not at_once), micro_batches * sum(work.inputs) * on_host
    sweep = (sum(w) + sent) * (not at_once)
    late, flights = _order(kinds, in_flight) if at_once else (sum(u), [0] * (len(w) + 1))
    flights.append(max(in_flight, largest[0]))
    moments = _moments(work, kinds, flights, micro_batches, on_host=on_host)
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
        host={name: device_count(weights) * x for name, x in host.items()},
        checkpoint=sum(
            nbytes(x) for kind in kinds for x in jax.tree.leaves((kind.weights, kind.others))
        ),
        flops=micro_batches * work.flops + updates_flops,
        to_device=2 * sum(w) - w[0] - w[-1] * (len(w) > 1) + sum(u) + sweep + kept,
        to_host=sum(w) + sum(u) + sent + kept,
        exposed=late + sweep,
    )


def pinned_bytes(
    params: Mapping[str, PyTree], optimizer: optax.GradientTransformation, *, gradients: bool
) -> int:
    """Returns one device's pinned bytes of weights, state and `gradients`, without a backend."""
    _, kinds, _ = _kinds_of(optimizer, params)
    return sum(x.nbytes + gradients * x.weights_nbytes for x in kinds)


def _kinds_of(
    optimizer: optax.GradientTransformation, params: Mapping[str, PyTree]
) -> tuple[list[PyTree], list[Kind], float]:
    """Returns the shapes of each block's weights, its kind, and the operations of all updates."""

    @functools.cache
    def kind_of(treedef: Any, leaves: Shapes) -> tuple[Kind, float]:
        kind, flops = Kind(treedef.unflatten(leaves), optimizer), 0.0
        for i, (x, (_, state)) in enumerate(zip(leaves, kind.others, strict=True)):
            tree = kind.alone(i, *_float32([x]))
            traced = jax.make_jaxpr(optimizer.update)(tree, state, tree)
            flops += products(traced.jaxpr) * bytes_here(x) / max(nbytes(x), 1)
        return kind, flops

    trees = jax.tree.map(lambda x: _at(x, x.sharding), [params["outer"], *params["layers"]])
    pairs = [kind_of(y, tuple(x)) for x, y in map(jax.tree.flatten, trees)]
    return trees, [kind for kind, _ in pairs], sum(flops for _, flops in pairs)


class _Work(NamedTuple):
    """The programs of one micro-batch; all bytes are those of one device.

    Lists have an entry for each block, and the last two have another one for the loss.
    """

    flops: float
    inputs: Sequence[int]  # kept for the backward pass
    shared: int  # what several layers keep together
    outer: int  # the gradient of the outer weights that `last` reads
    carries: Sequence[int]  # the gradient of the carry, and at the loss also the carry
    temporaries: Sequence[int]


@functools.lru_cache(maxsize=8)
def _work_of(
    functions: tuple[Callable, tuple[Callable, ...], Callable],
    leaves: Shapes,
    treedef: Any,
    several: bool,
    compiles: bool,
) -> _Work:
    """Traces the programs for weights and a batch, and compiles them if `compiles`."""
    trees, batch = treedef.unflatten(leaves)
    types = jax.tree.map(lambda x: _at(x, None), batch)
    known, flops = dict[Any, Any](), 0.0
    program = trace_model(*functions, trees[0], trees[1:], types, jax.jit)
    shares = share_count(batch)

    def call(function: Any, *args: PyTree) -> tuple[PyTree, int]:
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

    def size(arrays: PyTree) -> int:
        each = jax.tree.leaves(arrays)
        return sum(bytes_here(x) if x.sharding else nbytes(x) // shares for x in each)

    inputs, shared, carries, temporaries, steps = [0], {}, [], [], []
    x, varying = batch, []
    for block, tree in zip(program.blocks, trees, strict=True):
        out, _ = call(block.forward, tree, x)
        made = [_at(y, y.sharding) for y in out]  # new objects
        kept = [jax.tree.leaves(x)[j] for j in block.kept]
        new = dataclasses.replace(block, forward=lambda *_, made=made: made).run(None, x)
        g = [jax.tree.leaves(new)[j] for j in block.varying]
        run = block.backward(_places(g), _places(varying), several)[several]
        if steps:
            inputs.append(size(kept[: block.moving]))
            shared |= {id(y): y for y in kept[block.moving :]}
        steps.append((run, tree, g, kept))
        carries.append(size(g))
        x, varying = new, g
    share = jax.ShapeDtypeStruct((), jnp.float32)
    run = program.last.backward((), _places(varying), several)[several]
    kept = [jax.tree.leaves((x, batch))[j] for j in program.last.kept]
    ((g_outer, _), _), at_loss = call(run, None, trees[0], [share], kept)
    totals = [g_outer, *(_float32(tree) if several else None for tree in trees[1:])]
    for (step, *arguments), total in zip(steps, totals, strict=True):
        temporaries.append(call(step, total, *arguments)[1])
    outer = size([y for y in g_outer if y is not None])
    carries.append(size(x) + carries[-1])
    kept_by_all = size([*shared.values()])
    return _Work(flops, inputs, kept_by_all, outer, carries, [*temporaries, at_loss])


def _order(kinds: Sequence[Kind], in_flight: int) -> tuple[int, list[int]]:
    """Returns bytes of updates that no program hides, and those in flight behind each program.

    Before a block's program is dispatched, the state of the block above that does not come early
    has arrived, and so much has left that the block's own early state has room. The last entries
    are for the highest block's program and the loss.
    """
    early = [[x.bundles[i] for i in fetched_early(x.bundles, in_flight)] for x in kinds]
    arriving = [sum(x.others_nbytes for x in bundles) for bundles in early]
    counted = [sum(x.nbytes for x in bundles) for bundles in early]
    late = kinds[0].nbytes - kinds[0].weights_nbytes - arriving[0]
    for kind, comes, below in zip(kinds[1:], arriving[1:], counted, strict=False):
        late += max(kind.nbytes - kind.weights_nbytes - comes, kind.nbytes + below - in_flight)
    # The weights of a block that waits for its update are on the device anyway.
    flights = [in_flight - x + y for x, y in zip(counted[1:], arriving[1:], strict=True)]
    return late, [*flights, 0, 0]


def _moments(
    work: _Work,
    kinds: Sequence[Kind],
    flights: Sequence[int],
    micro_batches: int,
    *,
    on_host: bool,
) -> list[dict[str, int]]:
    """Returns the device's bytes, by use, in each block's backward program, at the loss and later.

    `flights` has an entry for each. The layers' inputs may wait `on_host`.
    """
    w = [x.weights_nbytes for x in kinds]
    # Of several micro-batches, the sum is float32, and the last program makes the gradient.
    sums = [(micro_batches > 1) * sum(map(bytes_here, _float32(x.weights))) for x in kinds]
    g = [max(x, total) + x * (total > x) for x, total in zip(w, sums, strict=True)]
    moments = []
    for i, new in enumerate([*g, 0]):
        weights = w[0] + sum(w[max(i - 1, 1) : i + AHEAD])
        inputs = sum(work.inputs[max(i - AHEAD, 0) * on_host : i + 1])
        held = micro_batches * (inputs + work.shared * (i > 0) + work.carries[i])
        gradients = work.outer + new + sum(w[i + 1 : i + 2])
        moments.append((weights, gradients, held, flights[i], work.temporaries[i]))
    moments.append((w[0], g[0], 0, flights[-1], 0))
    names = "weights", "gradients of weights", "layers' inputs", "updates in flight", TEMPORARIES
    return [dict(zip(names, uses, strict=True)) for uses in moments]


def _places(arrays: Sequence[jax.ShapeDtypeStruct]) -> tuple[Sharding | None, ...]:
    return tuple(x.sharding for x in arrays)


def _float32(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
    return [x.update(dtype=jnp.float32) for x in jax.tree.leaves(tree)]


def _at(x: ArrayOrShape, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)
