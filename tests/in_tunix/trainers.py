"""Makes Tunix trainers for the tests, on one device or on a mesh."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.interpreters import pxla
from tunix.sft import hooks as tunix_hooks
from tunix.sft import peft_trainer
from tunix.utils import env_utils

import zenflow_jax

env_utils.setup_sharding_environment()  # like Tunix's models

VOCABULARY, WIDTH, BATCH, LENGTH = 16, 8, 4, 6
ENGINE = {"host_kernel": "numpy"}
#: Makes zenflow equal AdamW.
AS_ADAMW: dict[str, Any] = dict(update_interval=1, staleness=0)
#: Windows of several steps, late updates, and a selection within 12 steps.
LATE: dict[str, Any] = dict(update_interval=2, select_interval=4, topk_ratio=0.25)


class Model(nnx.Module):
    """An embedding and a matrix, with the call and the sharding metadata of Tunix's models."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any = np.float32):
        draw = nnx.initializers.normal(0.5, dtype)
        self.embedding = nnx.Param(
            draw(rngs.params(), (VOCABULARY, WIDTH)), sharding=(None, "fsdp")
        )
        self.bias = nnx.Param(jax.numpy.zeros(VOCABULARY, dtype), sharding=(None,))
        self.head = nnx.Param(draw(rngs.params(), (WIDTH, VOCABULARY)), sharding=("fsdp", None))

    def __call__(self, tokens, positions, cache, mask):
        del positions, mask
        x = jax.numpy.tanh(self.embedding[...][tokens])
        return x @ self.head[...] + self.bias[...], cache


def mesh_of(devices: int) -> Any:
    """Returns a mesh for `with`, like those of Tunix's users; for 0 devices, there is no mesh."""
    if not devices:
        return contextlib.nullcontext()
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("fsdp",), axis_types=auto, devices=jax.devices()[:devices])


def make_model(devices: int, dtype: Any = np.float32) -> Model:
    """Returns a model that is equal on all meshes; call this inside `with mesh_of(devices)`."""
    model = Model(nnx.Rngs(0), dtype)
    if devices:
        state = nnx.state(model)
        places = nnx.get_named_sharding(state, pxla.thread_resources.env.physical_mesh)
        nnx.update(model, jax.device_put(state, places))
    return model


def config(steps: int, folder: Any = None, every: int = 2, **more: Any) -> Any:
    """Returns a trainer's settings; with a folder, it saves every `every` steps."""
    options = ocp.CheckpointManagerOptions(save_interval_steps=every, max_to_keep=2)
    settings = dict(eval_every_n_steps=3, max_steps=steps, pbar_description=None)
    if folder is not None:
        settings |= dict(checkpoint_root_directory=str(folder), checkpointing_options=options)
    return peft_trainer.TrainingConfig(**(settings | more))


def make_trainer(
    tx: Any, steps: int, folder: Any = None, every: int = 2, devices: int = 0, **more: Any
) -> Any:
    """Returns a trainer of the class `kind`; call this inside `with mesh_of(devices)`."""
    kind = more.pop("kind", peft_trainer.PeftTrainer)
    return kind(make_model(devices), tx, config(steps, folder, every, **more))


def batches(seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches without end for Tunix's default loss; every call yields the same batches."""
    rng = np.random.default_rng(seed)
    while True:
        yield {
            "input_tokens": rng.integers(0, VOCABULARY, (BATCH, LENGTH)),
            "input_mask": np.ones((BATCH, LENGTH), bool),
            "positions": np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH)),
            "attention_mask": np.ones((BATCH, LENGTH, LENGTH), bool),
        }


def zenflow(rate: Any = 1e-2, **options: Any) -> Any:
    return zenflow_jax.zenflow(rate, weight_decay=0.1, **options)


def weights(model: nnx.Module) -> dict[str, np.ndarray]:
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {name: np.array(x) for name, x in state.items()}


class Conditional(peft_trainer.PeftTrainer):
    """Accumulates gradients like Tunix after 0.1.7 and MaxText: the update is in `nnx.cond`."""

    def __init__(self, model: nnx.Module, optimizer: Any, settings: Any):
        every, settings.gradient_accumulation_steps = settings.gradient_accumulation_steps, None
        super().__init__(model, optimizer, settings)
        settings.gradient_accumulation_steps = every
        # The step changes only attributes of its arguments.
        zeros = jax.tree.map(jax.numpy.zeros_like, nnx.as_pure(nnx.state(model, nnx.Param)))
        self.optimizer.sums = nnx.data(jax.tree.map(nnx.Variable, zeros))
        self.optimizer.summed = nnx.Variable(jax.numpy.zeros((), int))

    def create_train_step_fn(self) -> Any:
        every = self.config.gradient_accumulation_steps

        def update(model: Any, optimizer: Any) -> None:
            params = nnx.state(model, nnx.Param)
            sums = jax.tree.leaves(nnx.as_pure(optimizer.sums))
            optimizer.update(model, jax.tree.unflatten(jax.tree.structure(params), sums))
            for name, x in optimizer.sums.items():
                optimizer.sums[name][...] = jax.numpy.zeros_like(x[...])

        def train_step(model: Any, optimizer: Any, inputs: Any) -> Any:
            loss, gradients = nnx.value_and_grad(self.loss_fn)(model, **inputs)
            for name, g in nnx.to_pure_dict(gradients).items():
                optimizer.sums[name][...] += g / every
            optimizer.summed[...] += 1
            last = optimizer.summed[...] % every == 0
            nnx.cond(last, update, lambda model, optimizer: None, model, optimizer)
            return loss, None, jax.numpy.zeros(())

        return train_step


class Recorder(tunix_hooks.TrainingHooks):
    """A user's hooks, which record calls, losses and the weights at evaluations."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.losses: list[float] = []
        self.evaluated: list[dict[str, np.ndarray]] = []

    def on_train_start(self, train_ctx):
        self.calls.append("train start")

    def on_train_end(self, train_ctx):
        self.calls.append("train end")

    def on_train_step_start(self, train_ctx):
        self.calls.append("step start")

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.calls.append("step end")
        self.losses.append(float(train_loss))

    def on_eval_step_start(self, train_ctx):
        self.calls.append("evaluation step")
        self.evaluated.append(weights(train_ctx.model))

    def on_eval_step_end(self, train_ctx, eval_loss):
        self.calls.append("evaluation end")
