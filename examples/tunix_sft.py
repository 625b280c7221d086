"""Fine-tunes all weights of a Qwen3 model on instructions, with Tunix's trainer and zenflow.

    pip install ".[tunix]"
    python examples/tunix_sft.py --model DIR --data alpaca_data.json --out runs/qwen3
    python examples/tunix_sft.py  # a small model with random weights, and a few records

DIR is a Hugging Face folder with a Qwen3 model: config.json, tokenizer.json, *.safetensors. The
data consists of records in Alpaca's format, {"instruction", "input", "output"}, in a JSON list or
one per line; only answers count in the loss. With --out the run saves checkpoints, and the same
command resumes from the last checkpoint. With several devices, the weights are sharded (FSDP).
"""

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from flax import nnx
from jax.sharding import AxisType
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_weights
from tunix.sft import hooks as tunix_hooks
from tunix.sft import peft_trainer
from tunix.sft import utils as tunix_masks

import zenflow_jax
from zenflow_jax.integrations.tunix import ZenFlowHooks, channel_axis

# The template for Alpaca's data: https://github.com/tatsu-lab/stanford_alpaca
HEAD = "Below is an instruction that describes a task{}. Write a response that appropriately "
HEAD += "completes the request.\n\n### Instruction:\n{}\n\n"
WITH_INPUT = ", paired with an input that provides further context"

SUMS = [
    {"instruction": "Add.", "input": f"{a} and {b}", "output": f"{a + b}"}
    for a in range(8)
    for b in range(8)
]
WORDS = [
    {"instruction": f"Repeat the word {word}.", "input": "", "output": word}
    for word in ("window", "channel", "mail", "step", "master", "moment", "host", "device")
]


def main(arguments: list[str] | None = None) -> ZenFlowHooks:
    options = parse(arguments)
    mesh = make_mesh()
    encode, end, vocabulary = read_tokenizer(options.model)
    examples = [example(record, encode, end) for record in read_records(options.data)]
    kept = [x for x in examples if len(x[0]) <= options.length]
    print(f"{len(kept)} of {len(examples)} records have at most {options.length} tokens")
    validation = kept[:: options.validate_every]
    training = [x for i, x in enumerate(kept) if i % options.validate_every]
    size = options.batch_size
    if len(training) < size or not validation:
        raise SystemExit(
            f"{len(training)} training and {len(validation)} validation records are too few: pass "
            f"at least {size} and one, or a smaller --batch-size"
        )
    if size % jax.device_count():
        raise SystemExit(f"{jax.device_count()} devices do not divide --batch-size {size} evenly")
    starts = range(0, len(validation), size)
    evaluation = [padded(validation[i : i + size], options.length, size) for i in starts]

    # The rate is injected so that it appears in the trainer's metrics.
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.learning_rate, max(options.steps // 30, 1), options.steps
    )
    make = optax.inject_hyperparams(
        zenflow_jax.zenflow,
        static_args=zenflow_jax.STATIC_ARGS,
        hyperparam_dtype=jnp.float32,  # otherwise optax rounds to the parameters' dtype
    )
    tx = make(
        learning_rate=schedule,
        topk_ratio=options.topk_ratio,
        update_interval=options.update_interval,
        max_grad_norm=1.0,
        channel_axis=channel_axis,
    )
    config = peft_trainer.TrainingConfig(
        max_steps=options.steps,
        eval_every_n_steps=options.evaluate_every,
        gradient_accumulation_steps=options.accumulate,
        checkpoint_root_directory=None if options.out is None else str(options.out.absolute()),
        checkpointing_options=ocp.CheckpointManagerOptions(
            save_interval_steps=options.save_every, max_to_keep=2
        ),
    )
    with mesh or contextlib.nullcontext():
        model = make_model(options.model, vocabulary, mesh, options.dtype)
        trainer = peft_trainer.PeftTrainer(model, tx, config)
        trainer.with_gen_model_input_fn(model_input)
        hooks = ZenFlowHooks(trainer, hooks=Printed(len(evaluation)))
        if trainer.train_steps:
            print(f"resuming from the checkpoint of step {trainer.train_steps}")
        trainer.train(batches(training, size, options.length, options.seed), evaluation)
    print(hooks.stats)
    return hooks


def parse(arguments: list[str] | None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    flags.add_argument("--model", type=Path, help="a Hugging Face folder with a Qwen3 model")
    flags.add_argument("--data", type=Path, help="records in Alpaca's format, .json or .jsonl")
    flags.add_argument("--out", type=Path, help="folder for checkpoints; default: no checkpoints")
    flags.add_argument("--steps", type=int, default=40, help="number of updates")
    flags.add_argument("--batch-size", type=int, default=8, help="records per micro-batch")
    flags.add_argument("--accumulate", type=int, help="micro-batches per update")
    flags.add_argument("--length", type=int, default=256, help="maximum tokens per record")
    flags.add_argument("--learning-rate", type=float, default=1e-3, help="2e-5 for real weights")
    flags.add_argument("--topk-ratio", type=float, default=0.05)
    flags.add_argument("--update-interval", type=int, default=4)
    flags.add_argument("--evaluate-every", type=int, default=20)
    flags.add_argument("--save-every", type=int, default=20)
    flags.add_argument(
        "--validate-every", type=int, default=10, help="validate on every n-th record"
    )
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    flags.add_argument("--seed", type=int, default=0)
    return flags.parse_args(arguments)


def make_mesh() -> Any:
    """Returns a mesh over all devices with the axes of Tunix's models; None for one device."""
    if jax.device_count() == 1:
        return None
    kinds = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((jax.device_count(), 1), ("fsdp", "tp"), axis_types=kinds)


# --- data ----------------------------------------------------------------------------------------


def read_records(path: Path | None) -> list[dict[str, str]]:
    if path is None:
        return SUMS + WORDS
    text = path.read_text()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    return json.loads(text)


def read_tokenizer(folder: Path | None) -> tuple[Any, int, int]:
    """Returns a function from text to tokens, the end token, and the vocabulary's size."""
    if folder is None:
        return lambda text: [1 + byte for byte in text.encode()], 0, 257
    settings = json.loads((folder / "config.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = settings["eos_token_id"]
    end = end[0] if isinstance(end, list) else end
    return (
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        end,
        settings["vocab_size"],
    )


def example(record: dict[str, str], encode: Any, end: int) -> tuple[list[int], int]:
    """Returns a record's tokens, and the number of prompt tokens."""
    text = record.get("input") or ""
    prompt = HEAD.format(WITH_INPUT if text else "", record["instruction"])
    prompt += f"### Input:\n{text}\n\n### Response:" if text else "### Response:"
    before = encode(prompt)
    return [*before, *encode(record["output"]), end], len(before)


def padded(examples: list[tuple[list[int], int]], length: int, size: int) -> dict[str, np.ndarray]:
    """Returns a batch; rows without an example do not count in the loss."""
    tokens = np.zeros((size, length), np.int32)
    is_token, answers = np.zeros((size, length), bool), np.zeros((size, length), bool)
    for i, (ids, prompt) in enumerate(examples):
        tokens[i, : len(ids)] = ids
        is_token[i, : len(ids)] = True
        answers[i, prompt : len(ids)] = True
    return {"tokens": tokens, "is_token": is_token, "answers": answers}


def batches(
    examples: list[tuple[list[int], int]], size: int, length: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches forever, in the seed's order; a resumed run skips batches that it has seen."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(examples))
        for start in range(0, len(order) - size + 1, size):
            chosen = [examples[i] for i in order[start : start + size]]
            yield padded(chosen, length, size)


def model_input(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the input of Tunix's default loss, which counts the tokens in `input_mask`."""
    return {
        "input_tokens": batch["tokens"],
        "input_mask": batch["answers"],
        "positions": tunix_masks.build_positions_from_mask(batch["is_token"]),
        "attention_mask": tunix_masks.make_causal_attn_mask(batch["is_token"]),
    }


# --- the model -----------------------------------------------------------------------------------


def make_model(folder: Path | None, vocabulary: int, mesh: Any, dtype: str) -> qwen3.Qwen3:
    kinds = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(dtype)}
    if folder is not None:
        config = qwen3.ModelConfig(**shape_of(folder), **kinds)
        return qwen3_weights.create_model_from_safe_tensors(
            str(folder), config, mesh, jnp.dtype(dtype)
        )
    config = qwen3.ModelConfig(
        num_layers=1,
        vocab_size=-(-vocabulary // 64) * 64,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        **kinds,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    if mesh is not None:
        state = nnx.state(model)
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def shape_of(folder: Path) -> dict[str, Any]:
    """Returns the arguments for Tunix's config, from a Hugging Face config.json."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "qwen3":
        raise SystemExit(
            f"{folder} has the model_type {config.get('model_type')}, not qwen3. For other models, "
            "change `make_model` to use another module in `tunix.models`."
        )
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    return {
        "num_layers": config["num_hidden_layers"],
        "vocab_size": config["vocab_size"],
        "embed_dim": config["hidden_size"],
        "hidden_dim": config["intermediate_size"],
        "num_heads": config["num_attention_heads"],
        "head_dim": config["head_dim"],
        "num_kv_heads": config["num_key_value_heads"],
        "rope_theta": int(rope),
        "norm_eps": config["rms_norm_eps"],
        "use_tied_embedding": config.get("tie_word_embeddings", False),
    }


class Printed(tunix_hooks.TrainingHooks):
    """Prints losses. Your own hooks work together with zenflow's."""

    def __init__(self, evaluation_batches: int):
        self._evaluation_batches = evaluation_batches

    def on_train_start(self, train_ctx):
        pass

    def on_train_end(self, train_ctx):
        pass

    def on_train_step_start(self, train_ctx):
        pass

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        print(f"step {train_step}  loss {float(train_loss):.4f}")

    def on_eval_step_start(self, train_ctx):
        pass

    def on_eval_step_end(self, train_ctx, eval_loss):
        mean = float(eval_loss) / self._evaluation_batches  # `eval_loss` is a sum
        print(f"after step {train_ctx.train_steps}  validation loss {mean:.4f}")


if __name__ == "__main__":
    main()
