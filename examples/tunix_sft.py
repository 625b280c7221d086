"""Trains a small Qwen3 with Tunix's trainer and zenflow; the same command resumes the run.

    pip install zenflow_jax "google-tunix==0.1.7"
    python examples/tunix_sft.py runs/tunix --steps 40

`ZenFlowTrainer` is the part to copy. Tunix calls `_post_process_train_step` after each micro-batch,
before it saves or evaluates; the engine's state is saved in a folder beside Tunix's checkpoints.
"""

import argparse
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer
from tunix.sft import utils as masks

import zenflow_jax


class ZenFlowTrainer(peft_trainer.PeftTrainer):
    """Exchanges after each update, and flushes before it closes."""

    engine: zenflow_jax.HostEngine | None = None

    def _shard_optimizer(self, mesh):
        # Tunix would move the state by the model's partition specs, before it compiles.
        state = nnx.as_pure(self.optimizer.opt_state)
        state = zenflow_jax.place(nnx.as_pure(nnx.state(self.model, nnx.Param)), state)
        nnx.update(self.optimizer.opt_state, nnx.state(state))
        root, saved = self.config.checkpoint_root_directory, None
        self.saves = root and ocp.CheckpointManager(
            f"{root}_engine",
            item_handlers=zenflow_jax.EngineCheckpointHandler(),
            options=self.config.checkpointing_options,
        )
        if self.train_steps:  # Tunix has restored weights and optimizer state
            saved = self.saves.restore(self.train_steps, args=zenflow_jax.EngineRestore())
        params = nnx.as_pure(nnx.state(self.model, nnx.Param))
        self.engine = zenflow_jax.HostEngine(params, state, engine_state=saved)

    def _post_process_train_step(self, aux):
        micro_batches = self.config.get_with_default("gradient_accumulation_steps", 1)
        if (self._iter_steps + 1) % micro_batches:
            return
        self.engine.exchange_nnx(self.model, self.optimizer)
        step = self.train_steps + 1
        if step == self.config.max_steps:
            self.engine.flush_nnx(self.model, self.optimizer)
        if self.saves:  # Tunix saves this step next, by the same options
            last = step == self.config.max_steps
            self.saves.save(step, args=zenflow_jax.EngineSave(self.engine), force=last)

    def close(self):
        super().close()
        if self.saves:
            self.saves.close()
        self.engine.close()


def channel_axis(path, leaf):
    """Returns the axis of inputs: queries, keys and values are (model, heads, width) in Tunix."""
    return 0 if leaf.ndim == 3 and re.search("'[qkv]_proj'", jax.tree_util.keystr(path)) else -2


def batches(size: int, length: int, seed: int):
    """Yields sums as text, one byte per token; only answers count in the loss."""
    rng = np.random.default_rng(seed)
    while True:
        tokens, answers = np.zeros((size, length), np.int32), np.zeros((size, length), bool)
        for i, (a, b) in enumerate(rng.integers(100, size=(size, 2))):
            question, answer = f"{a}+{b}=".encode(), f"{a + b}.".encode()
            tokens[i, : len(question + answer)] = list(question + answer)
            answers[i, len(question) : len(question + answer)] = True
        yield {"tokens": tokens, "answers": answers}


def model_input(batch):
    is_token = batch["tokens"] > 0
    return {
        "input_tokens": batch["tokens"],
        "input_mask": batch["answers"],
        "positions": masks.build_positions_from_mask(is_token),
        "attention_mask": masks.make_causal_attn_mask(is_token),
    }


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("folder", type=Path, help="for checkpoints")
    flags.add_argument("--steps", type=int, default=40)
    options = flags.parse_args()
    shape = dict(num_layers=2, vocab_size=128, embed_dim=64, hidden_dim=128, num_heads=4)
    shape |= dict(head_dim=16, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6)
    axis_types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=axis_types)
    with mesh:
        config = qwen3.ModelConfig(**shape, dtype=jnp.float32, param_dtype=jnp.float32)
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        tx = zenflow_jax.zenflow(1e-3, channel_axis=channel_axis)
        training = peft_trainer.TrainingConfig(
            eval_every_n_steps=20,
            max_steps=options.steps,
            checkpoint_root_directory=str(options.folder.absolute()),
            checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=20),
        )
        trainer = ZenFlowTrainer(model, tx, training).with_gen_model_input_fn(model_input)
        trainer.train(batches(16, 16, seed=0), [next(batches(64, 16, seed=1))])


if __name__ == "__main__":
    main()
