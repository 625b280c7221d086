"""Does zenflow_jax learn as well as DeepSpeed's own ZenFlow, and does each resume exactly?

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 deepspeed==0.19.8 transformers==4.57.6 ninja numpy
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.deepspeed_zenflow --python ENV/bin/python

Trains a small Llama over bytes with each method, on a CPU, in float32: the same initial weights,
the same batches of text in the same order, the same AdamW and the same share of selected channels.
`deepspeed_peer.py` runs torch and DeepSpeed in their own environment, which needs a C++ compiler.
Prints validation losses after the last step, and compares runs that resume from a checkpoint with
uninterrupted runs, step by step. Does not measure time. Answers: `benchmarks/LOG.md`.

Results stay in `--folder`, so a repeated call makes only the missing runs.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

import zenflow_jax
from train.huggingface import loading
from train.run import models
from train.run.step import mean_loss, of_tokens
from train.tasks import standard_library

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": standard_library.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BATCH, LENGTH, VALIDATION_BATCHES = 8, 96, 16
LEARNING_RATE, WARM_UP, CLIP, RATIO = 1e-3, 20, 1.0, 0.1
ADAMW = {"eps": 1e-8, "weight_decay": 0.01}
# Checkpoints at the end of a window of four steps, and inside a window.
SAVED, RESUMED_STEPS = (40, 42), 40


class Method(NamedTuple):
    library: str  # "jax" or "torch"
    options: dict[str, Any] | None = None  # for ZenFlow; None for AdamW
    repairs: tuple[str, ...] = ()  # for DeepSpeed


def _deepspeed(interval: int, overlap: bool, *repairs: str) -> Method:
    options = {"topk_ratio": RATIO, "update_interval": interval, "overlap_step": overlap}
    selection = {"select_strategy": "step", "select_interval": 16 * interval}
    return Method("torch", options | selection, repairs)


def _jax(interval: int, **options: Any) -> Method:
    return Method("jax", {"topk_ratio": RATIO, "update_interval": interval, **options})


_PAPER = {"rolling": False, "window_scaling": None, "provisional_share": None}
METHODS = {
    "torch AdamW": Method("torch"),
    "optax AdamW": Method("jax"),
    "zenflow_jax, S = 4": _jax(4),
    "zenflow_jax, S = 8": _jax(8),
    "zenflow_jax as in the paper, S = 4": _jax(4, **_PAPER),
    "zenflow_jax as in the paper, no overlap, S = 4": _jax(4, **_PAPER, staleness=0),
    "DeepSpeed as released, S = 4": _deepspeed(4, False),
    "DeepSpeed as released, overlap, S = 4": _deepspeed(4, True),
    "DeepSpeed, layout repaired, S = 4": _deepspeed(4, False, "layout"),
    "DeepSpeed, layout repaired, overlap, S = 4": _deepspeed(4, True, "layout"),
    "DeepSpeed, both repaired, S = 4": _deepspeed(4, False, "layout", "selection"),
    "DeepSpeed, both repaired, overlap, S = 4": _deepspeed(4, True, "layout", "selection"),
    "DeepSpeed, layout repaired, S = 8": _deepspeed(8, False, "layout"),
    "DeepSpeed, layout repaired, overlap, S = 8": _deepspeed(8, True, "layout"),
}
_RESUMED = re.compile(r"(zenflow_jax|DeepSpeed as released.*|DeepSpeed, layout.*), S = 4")


class Run(NamedTuple):
    losses: list[float]
    before: float  # validation loss after set-up, before the first step
    after: float
    flushed: float | None = None


class Job(NamedTuple):
    data: Path  # weights and batches
    method: Method
    steps: int
    checkpoint: Path
    resume: int  # the step of the checkpoint to start from; 0 for none


def prepare(folder: Path, steps: int, seed: int) -> None:
    """Draws random weights and batches, and writes them to `folder`."""
    random = np.random.default_rng(seed)
    width, ffn = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    vocabulary = (LLAMA["vocab_size"], width)
    shapes = {"model.embed_tokens": vocabulary, "lm_head": vocabulary, "model.norm": (width,)}
    block = {f"self_attn.{x}_proj": (width, width) for x in "qkvo"}
    block |= {f"mlp.{x}_proj": (ffn, width) for x in ("gate", "up")}
    block |= {"mlp.down_proj": (width, ffn)}
    block |= {name: (width,) for name in ("input_layernorm", "post_attention_layernorm")}
    for i in range(LLAMA["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        values = random.normal(0, 0.02, shape) if len(shape) > 1 else np.ones(shape)
        return values.astype(np.float32)

    def batches(source: Any, random: np.random.Generator, count: int) -> np.ndarray:
        examples = random.integers(len(source), size=(count, BATCH)).tolist()
        return np.array([[source[i]["tokens"] for i in batch] for batch in examples])

    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    weights = {f"{name}.weight": draw(shape) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    (model / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    text = {"corpus_megabytes": 20.0, "validation_share": 0.05}
    task = standard_library.make(seed=0, sequence_length=LENGTH, **text)
    validation = batches(task.validation, np.random.default_rng(99), VALIDATION_BATCHES)
    train = batches(task.train, random, steps)
    np.savez(folder / "batches.npz", train=train, validation=validation)


def read_model(folder: Path) -> models.Model:
    origin = loading.read_folder(folder)
    dtypes = {"weight_dtype": jnp.float32, "compute_dtype": jnp.float32}
    build = functools.partial(loading.make_model, origin.config, labels=0, **dtypes)
    return models.make(lambda: build(rngs=nnx.Rngs(0)), None, origin, seed=0)


def make_optimizer(method: Method) -> Any:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        return LEARNING_RATE * jnp.minimum(1.0, (step + 1) / WARM_UP)

    if method.options is None:
        return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(schedule, **ADAMW))
    return zenflow_jax.zenflow(schedule, max_grad_norm=CLIP, **ADAMW, **method.options)


def train(job: Job) -> Run:
    """Trains with jax."""
    tokens, model = np.load(job.data / "batches.npz"), read_model(job.data / "model")
    tx = make_optimizer(job.method)

    @jax.jit
    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        return mean_loss(of_tokens(nnx.merge(model.graphdef, params), {"tokens": tokens}))[0]

    @jax.jit
    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def validate() -> float:
        return statistics.fmean(float(loss_of(params, x)) for x in tokens["validation"])

    params, opt_state, saved = model.params, tx.init(model.params), None
    if job.resume:
        file = job.checkpoint / f"{job.resume}.npz"
        params, opt_state, saved = load(file, params, opt_state)
    before, losses, flushed = validate(), [], None
    with contextlib.ExitStack() as stack:
        engine = None
        if job.method.options is not None:
            engine = zenflow_jax.HostEngine(params, opt_state, engine_state=saved)
            stack.enter_context(engine)
        for i in range(job.resume, job.steps):
            params, opt_state, loss = step(params, opt_state, tokens["train"][i])
            if engine:
                params, opt_state = engine.exchange(params, opt_state)
            losses.append(float(loss))
            if engine and i + 1 in SAVED and not job.resume:
                job.checkpoint.mkdir(exist_ok=True)
                leaves = jax.tree.leaves((params, opt_state, engine.state()))
                np.savez(job.checkpoint / f"{i + 1}.npz", *leaves)
        after = validate()
        if engine:
            params, opt_state = engine.flush(params, opt_state)
            flushed = validate()
    return Run(losses, before, after, flushed)


def load(file: Path, params: Any, opt_state: Any) -> tuple[Any, Any, Any]:
    """Reads a checkpoint; `params` and `opt_state` are those of a new run."""
    target = (params, opt_state, zenflow_jax.abstract_engine_state(opt_state))
    values = np.load(file).values()
    *restored, engine_state = jax.tree.unflatten(jax.tree.structure(target), values)
    shardings = jax.tree.map(lambda x: x.sharding, target[:2])
    return *jax.device_put(tuple(restored), shardings), engine_state


def train_peer(python: str, job: Job) -> Run:
    """Trains with torch, in a process of the other environment."""
    rates = [LEARNING_RATE * min(1, (step + 1) / WARM_UP) for step in range(job.steps)]
    settings = {
        "model": "LlamaForCausalLM",
        "zenflow": job.method.options,
        "repairs": job.method.repairs,
        "adamw": {"lr": LEARNING_RATE, "betas": [0.9, 0.999], **ADAMW},
        "decays": "all",
        "clip": CLIP,
        "rates": rates,
        "batch": BATCH,
        "steps": job.steps,
        "saves": SAVED if job.method.options and not job.resume else (),
        "resume": job.resume,
    }
    command, environment = peer(python, job.data, settings, job.checkpoint)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, check=False, **output)
    if done.returncode:
        raise RuntimeError(f"{job.checkpoint} failed:\n{done.stdout[-3000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    return Run(figures["losses"], figures["before"], figures["after"])


def peer(
    python: str, data: Path, settings: dict[str, Any], checkpoint: Path
) -> tuple[list[str], dict[str, str]]:
    """Returns the command and environment of a process that trains with torch."""
    # DeepSpeed forms a group with itself, at an address on this machine.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environment = os.environ | {"DS_ACCELERATOR": "cpu"} | address | ranks
    script = Path(__file__).with_name("deepspeed_peer.py")
    command = [python, str(script), str(data), json.dumps(settings), str(checkpoint)]
    return command, environment


def run(args: argparse.Namespace, name: str, seed: int, resume: int = 0) -> Run:
    """Returns a run, from its file if that exists."""
    data = args.folder / f"seed-{seed}-{args.steps}"
    if not (data / "batches.npz").exists():
        prepare(data, args.steps, seed)
    checkpoint = data / re.sub(r"[^a-z0-9]+", "-", name.lower())
    file = checkpoint.with_suffix(f".{resume}.json" if resume else ".json")
    if not file.exists():
        steps = resume + RESUMED_STEPS if resume else args.steps
        job = Job(data, METHODS[name], steps, checkpoint, resume)
        is_jax = job.method.library == "jax"
        result = train(job) if is_jax else train_peer(args.python, job)
        file.write_text(json.dumps(result._asdict()), encoding="utf-8")
    return Run(**json.loads(file.read_text(encoding="utf-8")))


def row(name: str, runs: list[Run]) -> str:
    """Formats a method's validation losses, one for each seed, with flushed ones in parentheses."""
    after = [f"{x.after:.3f}" + (f" ({x.flushed:.3f})" if x.flushed else "") for x in runs]
    before = [f"{x.before:.3f}" for x in runs]
    last = [f"{statistics.fmean(x.losses[-50:]):.3f}" for x in runs]
    return f"| {name} | {' | '.join(' / '.join(each) for each in (before, after, last))} |"


def resumed_row(name: str, step: int, whole: Run, resumed: Run) -> str:
    """Formats the differences between a resumed and an uninterrupted run's losses."""
    part = whole.losses[step : step + len(resumed.losses)]
    apart = [abs(x - y) for x, y in zip(resumed.losses, part, strict=True)]
    figures = (apart[0], max(apart), statistics.fmean(apart))
    return f"| {name} | {step} | {' | '.join(f'{x:.1e}' for x in figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="the other environment's Python")
    parser.add_argument("--folder", type=Path, default=Path("runs/deepspeed_zenflow"))
    parser.add_argument("--steps", type=int, default=304)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {name: [] for name in args.methods}
    for seed in args.seeds:
        for name in args.methods:
            runs[name].append(run(args, name, seed))
            print(f"seed {seed}: {row(name, runs[name][-1:])}", flush=True)
    print("\n| method | validation before | after | last 50 steps |\n|---|---|---|---|")
    for name in args.methods:
        print(row(name, runs[name]))
    print(
        "\n| method | saved after step | difference of the first loss | largest | mean |\n"
        + "|---" * 5
        + "|"
    )
    for name in filter(_RESUMED.fullmatch, args.methods):
        for step in (x for x in SAVED if x + RESUMED_STEPS <= args.steps):
            resumed = run(args, name, args.seeds[0], resume=step)
            print(resumed_row(name, step, runs[name][0], resumed), flush=True)


if __name__ == "__main__":
    main()
