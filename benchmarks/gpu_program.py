"""How much memory does a compiled training step use on a GPU, and when does mail leave?

    export JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
    python -m benchmarks.gpu_program
    python -m benchmarks.gpu_program --devices 8

Compiles the steps of a Llama-shaped model with `optax.adamw` and `zenflow` for an NVIDIA H200. No
GPU is needed: `pip install "jax[cuda12]"` is enough, on any x86 machine. Prints for each step the
device's peak bytes per parameter (arguments, outputs and temporaries, without aliases), the
engine's bytes on the device, and their sum; then the share of mail whose copy starts before the
last matmul, so that the backward pass can hide it; and the program that merges the largest group's
update. With several devices it also prints the bytes that they exchange in a step. Bytes are per
device; parameters are those of the whole model. Answers: `benchmarks/LOG.md`.
"""

import argparse
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zenflow_jax
from benchmarks.program_report import COLUMNS, Report, report
from train.model import vocabulary
from train.model.attention import attention
from train.model.cross_entropy import token_losses
from zenflow_jax import planning, streaming
from zenflow_jax._device import boundary
from zenflow_jax._device.shards import Shard
from zenflow_jax._exchange.parts import part_sharding
from zenflow_jax._spec.groups import group_specs
from zenflow_jax.planning._host_work import needs_of


class Shape(NamedTuple):
    """A decoder of the Llama family, by default with 953 million parameters.

    `batch` is the number of sequences on one device.
    """

    vocabulary: int = 32000
    width: int = 2048
    layers: int = 16
    heads: int = 16
    ffn: int = 5632
    batch: int = 4
    length: int = 1024


def weights(shape: Shape, scanned: bool, parts: int = 1) -> dict[str, Any]:
    """Returns the parameters' shapes; if `parts` > 1, embedding and head are stacks."""

    def w(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16)

    d, f = shape.width, shape.ffn
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(["norm1", "norm2"], (d,))
    layer |= dict.fromkeys(["q", "k", "v", "o"], (d, d))
    layer |= dict.fromkeys(["gate", "up"], (d, f)) | {"down": (f, d)}
    if scanned:
        layers: Any = {name: w(shape.layers, *dims) for name, dims in layer.items()}
    else:
        layers = [{name: w(*dims) for name, dims in layer.items()} for _ in range(shape.layers)]
    in_parts, words = (parts,) if parts > 1 else (), shape.vocabulary // parts
    return {
        "embedding": w(*in_parts, words, d),
        "head": w(*in_parts, d, words),
        "layers": layers,
        "norm": w(d),
    }


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-5)
    return x32.astype(x.dtype) * scale


def _layer(heads: int, x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    batch, length, width = x.shape
    h = _norm(x, w["norm1"])
    q, k, v = ((h @ w[name]).reshape(batch, length, heads, width // heads) for name in "qkv")
    attended = attention(q, k, v, causal=True)
    x = x + attended.reshape(batch, length, width) @ w["o"]
    h = _norm(x, w["norm2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def loss(shape: Shape, mesh: Mesh, params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    layer = jax.checkpoint(partial(_layer, shape.heads))

    def placed(x: jax.Array) -> jax.Array:
        # Otherwise the compiler may divide activations like the weights, not along the batch.
        return jax.lax.with_sharding_constraint(x, batch_sharding(mesh)) if mesh.size > 1 else x

    table, head, dtype = params["embedding"], params["head"], params["norm"].dtype
    in_parts = len(table.shape) > 2
    x = placed(
        vocabulary.embedded(table, tokens[:, :-1], dtype) if in_parts else table[tokens[:, :-1]]
    )
    if isinstance(params["layers"], dict):
        x, _ = streaming.scan_layers(lambda x, w: (placed(layer(x, w)), None), x, params["layers"])
    else:
        for w in params["layers"]:
            x = placed(layer(x, w))
    x, targets = _norm(x, params["norm"]), tokens[:, 1:]
    if in_parts:
        losses = vocabulary.token_losses(x.astype(jnp.float32), head, targets, dtype)
        return jnp.mean(losses)
    if mesh.size == 1:
        return jnp.mean(token_losses(x, head, targets, axis=1))
    logits = placed((x @ head).astype(jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def weight_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Divides a matrix over `fsdp` along its last axis, which is not the channel axis."""
    cut = len(shape) > 1 and "fsdp" in mesh.shape
    spec = PartitionSpec(*[None] * (len(shape) - 1), "fsdp") if cut else PartitionSpec()
    return NamedSharding(mesh, spec)


class Program(NamedTuple):
    """A step of (params, state, tokens), and the function that makes its state."""

    step: Callable[..., Any]
    init: Callable[[Any], Any]
    scanned: bool = False
    in_parts: bool = False  # whether embedding and head also stream


def adamw_step(shape: Shape, mesh: Mesh, max_grad_norm: float) -> Program:
    """Makes the usual step, whose bf16 weights are cast from the optimizer's float32 masters."""
    tx = optax.chain(optax.clip_by_global_norm(max_grad_norm), optax.adamw(1e-4))

    def init(params: Any) -> Any:
        master = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return master, tx.init(master)

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        master, opt_state = state
        value, gradients = jax.value_and_grad(partial(loss, shape, mesh))(params, tokens)
        updates, opt_state = tx.update(gradients, opt_state, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda m: m.astype(jnp.bfloat16), master)
        return params, (master, opt_state), value

    # Plain shapes, because moments and masters are placed like their parameters.
    return Program(step, partial(jax.eval_shape, init))


def zenflow_step(
    shape: Shape,
    mesh: Mesh,
    max_grad_norm: float | None,
    front: bool = False,
    scanned: bool = False,
    streamed: bool = False,
    partition: bool = True,
    **options: Any,
) -> Program:
    tx = zenflow_jax.zenflow(
        1e-4,
        topk_ratio=0.05,
        max_grad_norm=None if front else max_grad_norm,
        partition_replicated=partition,
        **options,
    )
    if front:
        assert max_grad_norm is not None
        tx = optax.chain(optax.clip_by_global_norm(max_grad_norm), tx)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        weights = streaming.stream(params, opt_state) if streamed else params
        value, gradients = jax.value_and_grad(partial(loss, shape, mesh))(weights, tokens)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    # A mesh of one device needs no placements.
    init = tx.init if mesh.size > 1 else partial(jax.eval_shape, tx.init)
    return Program(step, init, scanned or streamed, streamed)


def arguments(program: Program, shape: Shape, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Returns the step's arguments, as shapes placed on the mesh."""

    def put(x: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
        # A described device has no host memory for arguments. The step does not read mail, so jit
        # drops those arguments and their memory does not matter.
        known = getattr(x, "sharding", None)
        sharding = sharding or (
            NamedSharding(mesh, known.spec) if known else weight_sharding(mesh, x.shape)
        )
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    parts = vocabulary.parts_of(shape.vocabulary) if program.in_parts else 1
    params = jax.tree.map(put, weights(shape, program.scanned, parts))
    state = jax.tree.map(put, program.init(params))
    tokens = jax.ShapeDtypeStruct((shape.batch * mesh.size, shape.length + 1), jnp.int32)
    return params, state, put(tokens, batch_sharding(mesh))


def compile_step(program: Program, shape: Shape, mesh: Mesh) -> Report:
    params, state, tokens = arguments(program, shape, mesh)
    # By default the compiler may place the results of replicated arguments anywhere.
    kept = None
    if mesh.size > 1:
        kept = jax.tree.map(lambda x: x.sharding, params)
    step = jax.jit(program.step, donate_argnums=(0, 1), out_shardings=(kept, None, None))
    states = [x for x in jax.tree.leaves(state, is_leaf=_is_zenflow) if _is_zenflow(x)]
    return report(step.lower(params, state, tokens).compile(), params)._replace(
        engine_bytes=sum(sum(needs_of(x)["device"].values()) for x in states)
    )


def _is_zenflow(x: Any) -> bool:
    return isinstance(x, zenflow_jax.ZenFlowState)


def compile_merge(program: Program, shape: Shape, mesh: Mesh) -> Report:
    """Compiles the engine's program that merges the largest group's update."""
    params, state, _ = arguments(program, shape, mesh)
    return report(lowered_merge(params, state).compile(), params)


def lowered_merge(params: Any, state: zenflow_jax.ZenFlowState) -> Any:
    """Returns the merge program, lowered for the shapes of parameters and state."""
    specs = [leaf.spec for leaf in state.leaves]
    groups = [group_specs(specs, group) for group in range(state.schedule.groups)]
    largest = max(groups, key=lambda group: sum(math.prod(x.shape) for x in group.values()))
    weights = jax.tree.leaves(params)
    merged, specs = tuple(weights[i] for i in largest), tuple(largest.values())
    uploads = [
        jax.ShapeDtypeStruct(spec.on_host.shape, p.dtype, sharding=part_sharding(p, spec))
        for p, spec in zip(merged, specs, strict=True)
    ]
    where, devices = merged[0].sharding, 1
    if isinstance(where, NamedSharding):
        devices = where.mesh.size
        where = NamedSharding(where.mesh, Shard(specs[0]).at_each_device())
    shape = devices, sum(boundary.channel_widths(specs))
    rows = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
    split = boundary.split_uploads(uploads, specs)
    static = {"specs": specs, "schedule": state.schedule}
    return boundary.merge.lower(merged, *split, rows, rows, None, **static)


def one_device(shape: Shape) -> None:
    mesh = planning.described_mesh("h200", {"data": 1})
    clipped = partial(zenflow_step, shape, mesh, 1.0)
    programs = {
        "optax.adamw, float32 master": adamw_step(shape, mesh, 1.0),
        "zenflow": zenflow_step(shape, mesh, None),
        "zenflow(max_grad_norm=1)": clipped(),
        "zenflow after clip_by_global_norm": clipped(front=True),
        "zenflow(max_grad_norm=1), scanned": clipped(scanned=True),
        "the same, streamed": clipped(streamed=True),
        "scanned, after_step": clipped(scanned=True, send_gradients="after_step"),
    }
    print(f"{COLUMNS}   matmuls left at the first copy")
    for name, program in programs.items():
        print(f"{name:36} {compile_step(program, shape, mesh).row()}", flush=True)
    merges = {
        "merge in turn": clipped(),
        "merge at once": clipped(rolling=False),
        "merge in turn, scanned": clipped(scanned=True),
        "the same, windows of 16": clipped(scanned=True, update_interval=16),
    }
    for name, program in merges.items():
        print(f"{name:36} {compile_merge(program, shape, mesh).row()}", flush=True)


def many_devices(shape: Shape, devices: int) -> None:
    print(
        f"{COLUMNS} {'sent':>6}   "
        "matmuls left at the first copy; between devices: operations by kind, bytes of results"
    )
    for sizes in ({"data": devices}, {"fsdp": devices}, {"data": 2, "fsdp": devices // 2}):
        mesh = planning.described_mesh("h200", sizes)
        print(", ".join(f"{name}={size}" for name, size in sizes.items()))
        zenflow = zenflow_step(shape, mesh, 1.0)
        reports = {
            "optax.adamw, float32 master": partial(compile_step, adamw_step(shape, mesh, 1.0)),
            "zenflow(max_grad_norm=1)": partial(compile_step, zenflow),
            "  merge, a step": partial(compile_merge, zenflow),
        }
        if "data" in sizes:
            whole = zenflow_step(shape, mesh, 1.0, partition=False)
            reports["zenflow, partition_replicated=False"] = partial(compile_step, whole)
            reports["  merge, a step "] = partial(compile_merge, whole)
        for name, compiled in reports.items():
            print(f"  {name:34} {_with_collectives(compiled(shape, mesh))}", flush=True)


def _with_collectives(report: Report) -> str:
    n = report.parameters
    operations = report.collectives
    counts, size = Counter(c.kind for c in operations), Counter[str]()
    for c in operations:
        size[c.kind] += c.nbytes
    kinds = ", ".join(f"{counts[k]} {k} {size[k] / n:.2f}" for k in sorted(counts))
    return f"{report.row(f' {sum(c.sent for c in operations) / n:6.2f}')}; {kinds}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in Shape._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--devices", type=int, default=1, help="mesh size, an even number")
    options = vars(parser.parse_args())
    devices = options.pop("devices")
    shape = Shape(**options)
    print(f"{shape}, jax {jax.__version__}; bytes per parameter")
    if devices == 1:
        one_device(shape)
    else:
        many_devices(shape, devices)


if __name__ == "__main__":
    main()
