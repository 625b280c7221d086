"""Does zenflow fine-tune a pretrained encoder as well as AdamW, and as DeepSpeed's own ZenFlow?

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 deepspeed==0.19.8 transformers==4.57.6 ninja numpy
    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.deepspeed_glue \\
        --python ENV/bin/python --model DIR --sst2 DIR --cola DIR

Fine-tunes on GLUE tasks with each method, on a CPU, in float32: the same weights with the same new
head, the same batches in the same order, the same rates, share of selected channels and full
warm-up. The seed sets the head and the order. torch and DeepSpeed run in `deepspeed_peer.py`, in
the other environment, which needs a C++ compiler; without `--python`, only this project's methods
run. Prints the metric and the loss on the whole dev set after the last step; then differences
between runs resumed from a checkpoint inside a window and uninterrupted ones. Answers:
`benchmarks/LOG.md`.

Results stay in `--folder`, so a repeated call makes only the missing runs.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import zenflow_jax
from train.cli.command_line import read_command_line
from train.cli.settings import Settings
from train.run import models
from train.run.optimizers import learning_rate
from train.run.setup import prepare, read
from train.tasks.batches import ROWS
from train.tasks.classification import score

CONFIG = "configs/glue_sst2.toml"
# The column names for CoLA, whose files have no header.
COLUMNS = "source\tlabel\tmark\tsentence\n"
# Inside a window of four steps, after the full warm-up of either task.
SAVED, RESUMED_STEPS = 72, 40


class Task(NamedTuple):
    name: str
    metric: str
    length: int  # in tokens; 9% of SST-2's and 3% of CoLA's dev sentences are longer
    steps: int
    learning_rate: float


TASKS = (Task("cola", "matthews", 20, 600, 5e-5), Task("sst2", "accuracy", 40, 300, 1e-4))


class Method(NamedTuple):
    interval: int | None = None  # zenflow's `update_interval`; None for AdamW
    torch: bool = False
    zenflow: dict[str, Any] | None = None  # DeepSpeed's options; {} for ZeRO-Offload
    repairs: tuple[str, ...] = ()  # of DeepSpeed


def _deepspeed(overlap: bool, *repairs: str) -> Method:
    return Method(4, True, {"overlap_step": overlap}, repairs)


METHODS = {
    "optax.adamw": Method(),
    "zenflow_jax, S = 4": Method(4),
    "zenflow_jax, S = 8": Method(8),
    "zenflow_jax, S = 16": Method(16),
    "torch AdamW": Method(torch=True),
    "DeepSpeed ZeRO-Offload": Method(torch=True, zenflow={}),
    "DeepSpeed ZenFlow as released, S = 4": _deepspeed(False),
    "DeepSpeed ZenFlow as released, overlap, S = 4": _deepspeed(True),
    "DeepSpeed ZenFlow, layout repaired, S = 4": _deepspeed(False, "layout"),
    "DeepSpeed ZenFlow, layout repaired, overlap, S = 4": _deepspeed(True, "layout"),
}
_RESUMED = re.compile(r"zenflow_jax, S = 4|DeepSpeed ZenFlow.*")


class Job(NamedTuple):
    settings: Settings
    steps: int  # at which the run ends; the schedule's length is in the settings
    checkpoint: Path
    resume: int  # the step of the checkpoint to start from; 0 for none


def settings_of(task: Task, method: Method, seed: int, args: argparse.Namespace) -> Settings:
    """Returns the settings of the real command."""
    data = Path(getattr(args, task.name))
    if task.name == "cola":
        original, data = data, args.folder / "cola"
        data.mkdir(parents=True, exist_ok=True)
        for file in ("train.tsv", "dev.tsv"):
            text = (original / file).read_text(encoding="utf-8")
            (data / file).write_text(COLUMNS + text, encoding="utf-8")
    options = {
        "--model": args.model,
        "--data": data,
        "--seed": seed,
        "--steps": task.steps,
        "--batch-size": args.batch_size,
        "--sequence-length": task.length,
        "--learning-rate": task.learning_rate,
        "--dtype": "float32",
        "--topk-ratio": 0.05,
        "--update-interval": method.interval or 4,
        "--optimizer": "zenflow" if method.interval else "adamw",
    }
    words = [str(part) for pair in options.items() for part in pair]
    return read_command_line([CONFIG, *words], program="zenflow-finetune").settings


def train(job: Job) -> dict[str, Any]:
    """Trains with jax, as `zenflow-finetune` does."""
    work, opt_state = prepare(read(job.settings))
    assert work.train_step is not None  # weights do not stream
    params, saved, file = work.model.params, None, job.checkpoint.with_suffix(".npz")
    if job.resume:
        target = (params, opt_state, zenflow_jax.abstract_engine_state(opt_state))
        values = np.load(file).values()
        *restored, saved = jax.tree.unflatten(jax.tree.structure(target), values)
        shardings = jax.tree.map(lambda x: x.sharding, target[:2])
        params, opt_state = jax.device_put(tuple(restored), shardings)
    losses = []
    with contextlib.ExitStack() as stack:
        engine = None
        if job.settings.has_engine:
            engine = zenflow_jax.HostEngine(params, opt_state, engine_state=saved)
            stack.enter_context(engine)
        for i in range(job.resume, job.steps):
            params, opt_state, loss, _ = work.train_step(params, opt_state, work.batches[i])
            if engine:
                params, opt_state = engine.exchange(params, opt_state)
            losses.append(float(loss))
            if engine and i + 1 == SAVED and not job.resume:
                np.savez(file, *jax.tree.leaves((params, opt_state, engine.state())))
        if engine:
            params, opt_state = engine.flush(params, opt_state)
        return {"losses": losses, **work.validate(params)}


def train_peer(python: str, data: Path, method: Method, job: Job) -> dict[str, Any]:
    """Trains with torch, in a process of the other environment."""
    if not (data / "batches.npz").exists():
        prepare_peer(data, job.settings)
    # DeepSpeed forms a group with itself, at an address on this machine.
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 20000)}
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    environment = os.environ | {"DS_ACCELERATOR": "cpu"} | address | ranks
    script = Path(__file__).with_name("deepspeed_peer.py")
    settings = json.dumps(peer_settings(method, job))
    command = [python, str(script), str(data), settings, str(job.checkpoint)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=environment, check=False, **output)
    if done.returncode:
        raise RuntimeError(f"{job.checkpoint} failed:\n{done.stdout[-3000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    labels = np.load(data / "batches.npz")["validation_labels"]
    return figures | score(np.array(figures.pop("predictions")), labels[labels >= 0])


def prepare_peer(data: Path, settings: Settings) -> None:
    """Writes the run's weights, with their new head, and its batches for torch."""
    sources = read(settings)
    job, _ = prepare(sources)
    labels = job.task.labels
    models.write(data / "model", job.model.origin, job.model.params, labels=labels)
    arrays = {}
    batches = {"train": [job.batches[i] for i in range(settings.steps)]}
    for split, each in (batches | {"validation": list(sources.sample)}).items():
        lengths = [batch["tokens"].shape[1] for batch in each]
        tokens = [
            np.pad(batch["tokens"] * batch["mask"], ((0, 0), (0, max(lengths) - length)))
            for batch, length in zip(each, lengths, strict=True)
        ]
        real = (np.where(batch.get(ROWS, 1), batch["label"], -100) for batch in each)
        arrays |= {split: np.stack(tokens), f"{split}_labels": np.stack(list(real))}
        arrays[f"{split}_lengths"] = np.array(lengths)
    np.savez(data / "batches.npz", **arrays)


def peer_settings(method: Method, job: Job) -> dict[str, Any]:
    """Returns the settings for `deepspeed_peer.py` that match the command's."""
    settings = job.settings
    schedule, zenflow = learning_rate(settings), method.zenflow
    if zenflow:
        zenflow = zenflow | {
            "topk_ratio": settings.topk_ratio,
            "update_interval": method.interval,
            "select_strategy": "step",
            "select_interval": 16 * method.interval,  # zenflow_jax's default
            "full_warm_up_rounds": settings.warm_up_rounds,
        }
    adamw = {"lr": settings.learning_rate, "betas": [settings.b1, 0.999], "eps": settings.eps}
    return {
        "zenflow": zenflow,
        "repairs": method.repairs,
        "adamw": adamw | {"weight_decay": settings.weight_decay},
        "clip": settings.max_grad_norm,
        "rates": [float(schedule(i)) for i in range(job.steps)],
        "batch": settings.batch_size,
        "steps": job.steps,
        "saves": [SAVED] * bool(zenflow and not job.resume),
        "resume": job.resume,
    }


def run(args: argparse.Namespace, task: Task, name: str, seed: int, resume: int = 0) -> dict:
    """Returns a run's figures, from its file if that exists."""
    method, data = METHODS[name], args.folder / f"{task.name}-{task.steps}-{seed}"
    checkpoint = data / re.sub(r"[^a-z0-9]+", "-", name.lower())
    file = checkpoint.with_suffix(f".{resume}.json" if resume else ".json")
    if not file.exists():
        data.mkdir(parents=True, exist_ok=True)
        steps = resume + RESUMED_STEPS if resume else task.steps
        job = Job(settings_of(task, method, seed, args), steps, checkpoint, resume)
        torch = method.torch
        figures = train_peer(args.python, data, method, job) if torch else train(job)
        file.write_text(json.dumps(figures), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def spread(values: list[float], digits: int) -> str:
    """Formats the mean, standard deviation and each of the values."""
    each = ", ".join(f"{x:.{digits}f}" for x in values)
    if len(values) == 1:
        return each
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f} ({each})"


def compare(args: argparse.Namespace, task: Task) -> None:
    """Prints a table of the runs of all methods."""
    print(f"\n| {task.name}, {task.steps} steps | {task.metric} | dev loss |\n|---|---|---|")
    for name in args.methods:
        runs = [run(args, task, name, seed) for seed in args.seeds]
        metrics = spread([100 * x[task.metric] for x in runs], 1)
        print(f"| {name} | {metrics} | {spread([x['loss'] for x in runs], 3)} |", flush=True)


def compare_resumed(args: argparse.Namespace, task: Task) -> None:
    """Prints differences between resumed and uninterrupted runs' losses."""
    header = f"saved after step {SAVED}: difference of the first loss | largest | mean"
    print(f"\n| {task.name}, {header} |\n|---|---|---|---|")
    for name in filter(_RESUMED.fullmatch, args.methods):
        whole = run(args, task, name, args.seeds[0])["losses"]
        resumed = run(args, task, name, args.seeds[0], resume=SAVED)["losses"]
        apart = np.abs(np.subtract(resumed, whole[SAVED : SAVED + RESUMED_STEPS]))
        print(f"| {name} | {apart[0]:.1e} | {apart.max():.1e} | {apart.mean():.1e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="the other environment's Python")
    parser.add_argument("--model", required=True, help="folder of the encoder")
    for task in TASKS:
        parser.add_argument(f"--{task.name}", help=f"folder with the data for {task.name}")
    parser.add_argument("--folder", type=Path, default=Path("runs/deepspeed_glue"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    args.methods = [x for x in args.methods if args.python or not METHODS[x].torch]
    for task in TASKS:
        if getattr(args, task.name) is not None:
            compare(args, task)
            compare_resumed(args, task)


if __name__ == "__main__":
    main()
