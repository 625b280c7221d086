"""Compiles steps of a small model, and the engine's programs between them, for a described GPU."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import zenflow_jax
from benchmarks import gpu_program, host_access, program_report
from train.cli.settings import StepSettings
from zenflow_jax import planning, streaming
from zenflow_jax._device import boundary
from zenflow_jax.layerwise._optimizer import Kind
from zenflow_jax.layerwise._progress import Progress

LAYERS, WIDTH, INNER, CLASSES, ROWS = 4, 256, 1024, 512, 64


class Figures(NamedTuple):
    """A program's figures in the table; `peak` in bytes per parameter, `hidden` as a share."""

    peak: float
    hidden: float  # share of the mail that is sent before the last matmuls
    to_host: int  # number of copies of whole arrays
    to_device: int
    slices: int  # slices of host memory in loops, by the copy engine
    kernels: int  # that read or write host memory
    stacks: int  # stacks of layers copied whole on the device: new weights into donated memory


class Compiled(NamedTuple):
    """A compiled program's figures, and the faults in its text."""

    figures: Figures
    wrong: list[str]  # slices with a wrong index
    in_loops: list[str]  # kernels in loops that read or write host memory


def _shapes(dtype: Any, *, scanned: bool) -> dict[str, Any]:
    layer = {"up": (WIDTH, INNER), "down": (INNER, WIDTH), "scale": (WIDTH,)}

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    if scanned:
        layers: Any = {name: array(LAYERS, *shape) for name, shape in layer.items()}
    else:
        layers = [{name: array(*shape) for name, shape in layer.items()} for _ in range(LAYERS)]
    return {"layers": layers, "head": array(WIDTH, CLASSES)}


def _block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh((x * w["scale"][None]) @ w["up"]) @ w["down"], None


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    if isinstance(params["layers"], dict):
        x, _ = streaming.scan_layers(jax.checkpoint(_block), x, params["layers"])
    else:
        for w in params["layers"]:
            x, _ = _block(x, w)
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Step(NamedTuple):
    """The options of a training step to compile."""

    dtype: Any = jnp.bfloat16
    scanned: bool = False
    streamed: bool = False
    mesh: str | None = None  # an axis of four devices
    options: tuple[tuple[str, Any], ...] = (("max_grad_norm", 1.0),)

    def arguments(self) -> tuple[Any, Any, Any]:
        """Returns the transformation, parameters and state, as shapes on the described devices."""
        mesh = planning.described_mesh("h200", {self.mesh or "data": 4 if self.mesh else 1})
        shapes = _shapes(self.dtype, scanned=self.scanned or self.streamed)
        spread = "fsdp" in mesh.shape

        def at(x: Any) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec(*[None] * (len(x.shape) - 1), "fsdp") if spread else None
            where = NamedSharding(mesh, spec or PartitionSpec())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        params = jax.tree.map(at, shapes)
        tx = zenflow_jax.zenflow(1e-3, topk_ratio=0.05, **dict(self.options))
        state = jax.eval_shape(tx.init, params) if self.mesh is None else tx.init(params)
        return tx, params, planning.placed(state, mesh)

    def compile(self) -> Compiled:
        tx, params, state = self.arguments()
        mesh = params["head"].sharding.mesh

        def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
            weights = streaming.stream(params, state) if self.streamed else params
            value, gradients = jax.value_and_grad(_loss)(weights, x, y)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        batch = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
        x = jax.ShapeDtypeStruct((ROWS * mesh.size, WIDTH), self.dtype, sharding=batch)
        y = jax.ShapeDtypeStruct((ROWS * mesh.size,), jnp.int32, sharding=batch)
        places = jax.tree.map(lambda x: x.sharding, params)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(places, None, None))
        return inspect(jitted.lower(params, state, x, y).compile(), params)


def inspect(compiled: Any, params: Any) -> Compiled:
    """Returns the figures of a compiled program."""
    text, report = compiled.as_text(), program_report.report(compiled, params)
    traffic = host_access.traffic(text)
    mail = sum(size for size, _ in report.copies)
    hidden = sum(size for size, left in report.copies if left > 0)
    stacks = [x for x in jax.tree.leaves(params) if len(x.shape) > 2]
    least = min((math.prod(x.shape) * x.dtype.itemsize for x in stacks), default=math.inf)
    figures = Figures(
        peak=round(report.peak_bytes / report.parameters, 3),
        hidden=round(hidden / mail, 3) if mail else 0.0,
        to_host=traffic.to_host,
        to_device=traffic.to_device,
        slices=traffic.right,
        kernels=len(traffic.kernels),
        stacks=len(list(host_access.large_copies(text, least))) if stacks else 0,
    )
    return Compiled(
        figures=figures,
        wrong=traffic.wrong,
        in_loops=[x for x in traffic.kernels if not x.startswith("main")],
    )


def merge(step: Step) -> Compiled:
    """Compiles the program that merges the largest group's update into the parameters."""
    _, params, state = step.arguments()
    return inspect(gpu_program.lowered_merge(params, state).compile(), params)


def hand_over(program: Callable) -> Compiled:
    """Compiles a program of a selection, for all leaves of one group."""
    at_once = Step(options=(("max_grad_norm", 1.0), ("rolling", False)))
    _, params, state = at_once.arguments()
    leaves = [leaf for leaf in state.leaves if not leaf.spec.resident]
    weights = [
        x
        for x, leaf in zip(jax.tree.leaves(params), state.leaves, strict=True)
        if not leaf.spec.resident
    ]
    channels, masters = [x.channels for x in leaves], [x.master for x in leaves]
    arguments = {
        boundary.choose: (weights, [x.scores for x in leaves], channels, masters),
        boundary.enter: (weights, masters, channels),
    }[program]
    specs = tuple(leaf.spec.anonymous for leaf in leaves)
    return inspect(program.lower(*arguments, specs=specs).compile(), params)


def script_step(model: str | None = None, **settings: Any) -> Compiled:
    """Compiles the script's step for a decoder, or for the model in a folder."""
    from train.huggingface.loading import read_folder
    from train.plan import planning as plans

    run = StepSettings(
        optimizer="zenflow",
        layers=3,
        width=WIDTH,
        heads=4,
        sequence_length=64,
        batch_size=4,
        **settings,
    )
    origin = None if model is None else read_folder(model)
    mesh = planning.described_mesh("rtx4090", {"data": 1})
    planned = plans.planned_step(run, origin, mesh, placed=True)
    return inspect(plans.compiled_step(planned), planned.params)


def check_device_step() -> Compiled:
    """Compiles the program of `streaming.check_device`, with streamed gradients."""
    step, params, opt_state, x = streaming.trial()
    mesh = planning.described_mesh("h200", {"data": 1})
    shapes = planning.placed((params, opt_state, x), mesh)
    return inspect(step.lower(*shapes, True).compile(), params)


def layer_update() -> Any:
    """Compiles AdamW's update of a bfloat16 leaf that waits in host memory."""
    where = NamedSharding(planning.described_mesh("h200", {"data": 1}), PartitionSpec())

    def shape(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    weight = shape(jnp.bfloat16, WIDTH, INNER)
    (bundle,) = Kind({"w": weight}, optax.adamw(1e-3)).bundles
    number, norm, shares = shape(jnp.int32), shape(jnp.float32), shape(jnp.float32, 1)
    progress = Progress(number, number, shares, norm, shape(jnp.bool), number, shares)
    program: Any = bundle.update
    return program.lower([weight], progress, number, *jax.tree.leaves(bundle.shapes)).compile()


AFTER, UNCLIPPED = (("max_grad_norm", 1.0), ("send_gradients", "after_step")), ()
#: Programs that copy only whole arrays to and from the host.
PLAIN: dict[str, Callable[[], Compiled]] = {
    "written": Step().compile,
    "written, float32, without clipping": Step(jnp.float32, options=UNCLIPPED).compile,
    "scanned": Step(scanned=True).compile,
    "scanned, after_step": Step(scanned=True, options=AFTER).compile,
    "written, data=4": Step(mesh="data").compile,
    "merge": functools.partial(merge, Step()),
    "merge, scanned": functools.partial(merge, Step(scanned=True)),
    "choose": functools.partial(hand_over, boundary.choose),
    "enter": functools.partial(hand_over, boundary.enter),
    "script, encoder": functools.partial(script_step, "tests/fixtures/bert"),
}
#: Programs that slice host memory in loops, which jax before 0.11.1 miscompiles.
STREAMING: dict[str, Callable[[], Compiled]] = {
    "streamed": Step(streamed=True).compile,
    "streamed, float32, without clipping": Step(
        jnp.float32, streamed=True, options=UNCLIPPED
    ).compile,
    "streamed, fsdp=4": Step(streamed=True, mesh="fsdp").compile,
    "check_device": check_device_step,
    "script, streamed": functools.partial(script_step, stream="gradients", scan_layers=True),
}
