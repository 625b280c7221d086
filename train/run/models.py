"""Makes a run's model, from the settings' sizes or from a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from elves.atomic import atomic_path
from train.cli.settings import StepSettings
from train.distributed import processes
from train.distributed.sharding import committed, weight_shardings
from train.huggingface import loading
from train.huggingface.saving import Entry, save_folder, write_by_first, write_file
from train.huggingface.tensors import leaf_name
from train.model.decoder import DecoderConfig, parts_that_stream
from train.model.encoder import EncoderConfig
from train.run.by_layer import LayeredModel, layered
from train.tasks import standard_library

# The trained weights in a run's folder.
WEIGHTS = "model.safetensors"  # of a model created from sizes
FOLDER = "model"  # of a model loaded from a folder: a folder in the same layout


class Model(NamedTuple):
    graphdef: nnx.GraphDef
    params: Any  # weights on their devices
    origin: loading.Pretrained | None  # the folder of the weights
    drawn: tuple[str, ...] = ()  # names of leaves that the folder lacks


def make(
    build: Callable[[], nnx.Module],
    mesh: Mesh | None,
    origin: loading.Pretrained | None,
    *,
    labels: Sequence[str] = (),
    seed: int,
) -> Model:
    """Creates the model of a `builder`, with the same weights on any mesh or without a mesh."""
    graphdef, shapes = jax.eval_shape(lambda: split(build()))
    if mesh is None and origin is None:
        graphdef, params = split(build())
        return Model(graphdef, committed(params), None)
    # Each device draws or reads only its shards, so the model need not fit on one device.
    shardings = mesh and weight_shardings(mesh, shapes)
    if origin is None:
        params = jax.jit(lambda: split(build())[1], out_shardings=shardings)()
        return Model(graphdef, params, None)
    anew = _heads_to_draw(origin, labels)
    params = loading.load_weights(origin, shapes, shardings, anew=anew, seed=seed)
    return Model(graphdef, params, origin, loading.newly_drawn(origin, shapes, anew=anew))


def make_layered(
    build: Callable[[], nnx.Module],
    mesh: Mesh | None,
    origin: loading.Pretrained | None,
    *,
    labels: Sequence[str] = (),
    seed: int,
) -> tuple[Model, LayeredModel]:
    """Creates the same model for `layerwise.Trainer`, with the trainer's parameters.

    Blocks are read from a folder when the trainer takes them, so that they need not all fit on the
    devices.
    """
    graphdef, model = abstract_layered(build, mesh)
    shapes, shardings = model.model, jax.tree.map(lambda x: x.sharding, model.model)
    if origin is None:
        params = jax.jit(lambda: split(build())[1], out_shardings=shardings)()
        own = params.pop("blocks")
        blocks: Iterable[Any] = (own.pop(i) for i in range(model.blocks))
        return Model(graphdef, model.divide(params, blocks), None), model
    anew = _heads_to_draw(origin, labels)

    def load(names: Any) -> Any:
        return loading.load_weights(origin, names(shapes), names(shardings), anew=anew, seed=seed)

    outer = load(lambda tree: {name: x for name, x in tree.items() if name != "blocks"})
    blocks = (
        load(lambda tree, i=i: {"blocks": {i: tree["blocks"][i]}})["blocks"][i]
        for i in range(model.blocks)
    )
    drawn = loading.newly_drawn(origin, shapes, anew=anew)
    return Model(graphdef, model.divide(outer, blocks), origin, drawn), model


def layered_shapes(graphdef: nnx.GraphDef, shapes: Any, shardings: Any) -> LayeredModel:
    """Returns the functions of a model for the trainer, with its weights as shapes."""
    shapes = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )
    model = layered(graphdef, shapes)
    outer = {name: x for name, x in shapes.items() if name != "blocks"}
    divided = model.divide(outer, [shapes["blocks"][i] for i in range(model.blocks)])
    return model._replace(shapes={**divided, "layers": list(divided["layers"])})


def abstract_layered(
    build: Callable[[], nnx.Module], mesh: Mesh | None = None, where: Sharding | None = None
) -> tuple[nnx.GraphDef, LayeredModel]:
    """Returns the definition of a model, and its functions and shapes for the trainer.

    Without a mesh, all shapes have the sharding `where`, by default on the first device.
    """
    graphdef, shapes = jax.eval_shape(lambda: split(build()))
    if mesh is not None:
        return graphdef, layered_shapes(graphdef, shapes, weight_shardings(mesh, shapes))
    where = where or SingleDeviceSharding(jax.local_devices()[0])
    return graphdef, layered_shapes(graphdef, shapes, jax.tree.map(lambda _: where, shapes))


def _heads_to_draw(origin: loading.Pretrained, labels: Sequence[str]) -> tuple[str, ...]:
    # The head is kept if it has these labels, in this order if its classes have names.
    names = [name.lower() for name in origin.class_names]
    fitting = ([f"label_{i}" for i in range(len(labels))], [x.lower() for x in labels])
    return () if names in fitting else ("classifier",)


def describe_new_weights(model: Model, labels: Sequence[str]) -> str:
    """Returns a line about weights that the folder lacks; "" if it lacks none."""
    if not model.drawn:
        return ""
    folder, names = model.origin.folder, model.origin.class_names
    reason = f"{folder} lacks them"
    if names and "classifier/kernel" in model.drawn:
        heads, own = (f"{len(x)} classes {', '.join(x[:5])}" for x in (names, labels))
        reason = f"the head of {folder} has the {heads}, and the data has the {own}"
    return f"newly initialized: {', '.join(model.drawn)}, because {reason}"


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Any]:
    """Returns the definition of a model, and its parameters as pure arrays."""
    graphdef, params = nnx.split(model)
    return graphdef, nnx.as_pure(params)


def config_of(
    origin: loading.Pretrained | None, run: StepSettings
) -> DecoderConfig | EncoderConfig:
    """Returns the folder's config, or the config of a small Llama 2 over bytes."""
    if origin is not None:
        return origin.config
    return DecoderConfig(
        **run.subset(("width", "layers", "heads", "ffn")),
        vocabulary=standard_library.VOCABULARY,
        kv_heads=run.heads,
        head_width=run.width // run.heads,
        positions=run.sequence_length,
    )


def builder(
    config: DecoderConfig | EncoderConfig,
    run: StepSettings,
    *,
    sharding: NamedSharding | None = None,
    labels: int = 0,
) -> Callable[[], nnx.Module]:
    """Returns a function that makes the model of these settings with random weights.

    `sharding` is the batch's sharding. If layers stream, embedding and head also stream, in parts,
    unless they are tied.
    """
    # Without an engine and a trainer, the weights are their own masters.
    dtype = run.dtype if run.has_engine or run.stream == "weights" else "float32"
    parts = parts_that_stream(config, run.stream)
    more = {"parts": parts} if parts > 1 else {}
    return lambda: loading.make_model(
        config,
        labels=labels,
        weight_dtype=jnp.dtype(dtype),
        compute_dtype=jnp.dtype(run.dtype),
        scan_layers=run.scan_layers,
        remat=run.remat,
        stream_sharding=sharding,
        rngs=nnx.Rngs(run.seed),
        **more,
    )


def write(
    folder: Path,
    origin: loading.Pretrained | None,
    params: Any,
    values: Iterator[Any] | None = None,
    **options: Any,
) -> None:
    """Writes the trained weights to `folder`, in the layout of the model's folder, if any.

    `values` replace the leaves of `params`; each is requested when it is written. `options` are
    passed to `save_folder`. A built-in model's weights are float32 safetensors, named by key path:
    `blocks.0.gate.kernel`.
    """
    if origin is not None:
        save_folder(folder, origin, params, values=values, **options)
        return
    leaves = jax.tree_util.tree_leaves_with_path(params)
    entries = [
        Entry(leaf_name(path).replace("/", "."), np.dtype(np.float32), x.shape)
        for path, x in leaves
    ]
    values = iter([x for _, x in leaves]) if values is None else values
    tensors = (np.ascontiguousarray(processes.gather(x), np.float32) for x in values)

    def write_tensors() -> None:
        with atomic_path(folder / WEIGHTS) as part:
            write_file(part, entries, tensors)

    write_by_first(folder / WEIGHTS, write_tensors, tensors)
