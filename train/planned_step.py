"""The training step of a run as shapes: on devices that need not exist, without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train import models
from train.hf_config import ARCHITECTURES, CONFIG, read_config, read_json
from train.optimizers import make_optimizer
from train.pretrained import Pretrained
from train.settings import Settings
from train.sharding import batch_sharding, weight_shardings
from train.step import PER_EXAMPLE, make_train_step
from zenflow_jax import planning

# For a run whose steps and classes follow from its data: no size depends on the steps.
STEPS, LABELS = 1000, 2


class PlannedStep(NamedTuple):
    step: Callable
    params: Any
    opt_state: Any
    batch: Any


def folder_of_config(model: str) -> Pretrained:
    """A model's folder, of which only `config.json` is read."""
    path = Path(model) / CONFIG
    raw = read_json(path)
    config = read_config(path, raw)
    return Pretrained(Path(model), ARCHITECTURES[raw["model_type"]], config, {}, None, raw)


def planned_step(
    settings: Settings, origin: Pretrained | None, mesh: Mesh | None, *, placed: bool = False
) -> PlannedStep:
    """The step that a run would compile, its arguments `placed` also without a mesh."""
    kind = "decoder" if origin is None else origin.architecture
    if not settings.steps:
        settings = dataclasses.replace(settings, steps=STEPS)
    divided = mesh if settings.mesh else None
    build = models.builder(settings, divided, origin, labels=LABELS)
    graphdef, params = jax.eval_shape(lambda: models.split(build()))
    tx = make_optimizer(settings, steps_per_epoch=settings.steps)
    size, parts = settings.batch_size, settings.micro_batches
    sharding = None if mesh is None or not placed else NamedSharding(mesh, PartitionSpec())
    if divided is None:
        opt_state = jax.eval_shape(tx.init, params)
    else:
        params = jax.tree.map(_at, params, weight_shardings(divided, params))
        is_adamw = settings.optimizer == "adamw"
        everywhere = NamedSharding(divided, PartitionSpec())
        opt_state = _beside(tx, params, everywhere) if is_adamw else tx.init(params)
        sharding = batch_sharding(divided, size, parts)
    if sharding is not None:
        params, opt_state = planning.placed((params, opt_state), mesh)
    placement = divided and jax.tree.map(lambda x: x.sharding, (params, opt_state))
    step = make_train_step(
        graphdef,
        tx,
        PER_EXAMPLE[kind],
        micro_batches=parts,
        stream=settings.stream == "gradients",
        placement=placement,
    )

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *shape), jnp.int32, sharding=sharding)

    length = settings.sequence_length
    if kind == "decoder":
        return PlannedStep(step, params, opt_state, {"tokens": array(length + 1)})
    batch = {name: array(length) for name in ("tokens", "types", "mask")}
    return PlannedStep(step, params, opt_state, batch | {"label": array()})


def _at(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _beside(tx: Any, params: Any, everywhere: NamedSharding) -> Any:
    """A state whose moments lie as their parameters do, and all else `everywhere`."""
    return optax.tree.map_params(
        tx,
        lambda x, p: _at(x, p.sharding),
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda x: _at(x, everywhere),
    )
