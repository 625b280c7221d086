"""Does DeepSpeed's own ZenFlow fine-tune a pretrained encoder as well as zenflow_jax and AdamW?

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.deepspeed_glue \\
        --python ENV/bin/python --model DIR --sst2 DIR --cola DIR

Makes the jobs of `glue_parity.py` with each method, on a CPU, in float32: the same weights with the
same new head, the same batches in the same order, the same rates, share of selected channels and
full warm-up. torch and DeepSpeed run in `deepspeed_peer.py`, whose environment
`deepspeed_zenflow.py` describes. Each run is a process of its own. Prints the metric and the loss
on the whole dev set after the last step, CPU time per step, and peak memory; then differences
between runs resumed from a checkpoint inside a window and uninterrupted ones. Answers:
`benchmarks/LOG.md`.

Results stay in `--folder`, so a repeated call makes only the missing runs.
"""

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import zenflow_jax
from benchmarks.deepspeed_zenflow import Run as Losses
from benchmarks.deepspeed_zenflow import load, peer, resumed_row
from benchmarks.glue_parity import CONFIG, JOBS, options_of
from train.cli.command_line import read_command_line
from train.cli.settings import Settings
from train.run import models
from train.run.optimizers import learning_rate
from train.run.setup import prepare, read
from train.tasks.batches import ROWS
from train.tasks.classification import score

TITLES = ("CoLA, 600 steps", "SST-2, 300 steps")
# Inside a window of four steps, after the full warm-up of either task.
SAVED, RESUMED_STEPS = 72, 40
# By then, jax has compiled the step for each length of a batch.
UNTIMED_STEPS = 100


class Method(NamedTuple):
    variant: str  # of `VARIANTS`, for zenflow_jax; the torch runs take settings from it
    zenflow: dict[str, Any] | None = None  # DeepSpeed's options; {} for ZeRO-Offload
    repairs: tuple[str, ...] = ()  # of DeepSpeed
    torch: bool = False


def _deepspeed(overlap: bool, *repairs: str) -> Method:
    return Method("in turn, S = 4", {"overlap_step": overlap}, repairs, torch=True)


METHODS = {
    "torch AdamW": Method("adamw", torch=True),
    "DeepSpeed ZeRO-Offload": Method("adamw", {}, torch=True),
    "DeepSpeed ZenFlow as released, S = 4": _deepspeed(False),
    "DeepSpeed ZenFlow as released, overlap, S = 4": _deepspeed(True),
    "DeepSpeed ZenFlow, layout repaired, S = 4": _deepspeed(False, "layout"),
    "DeepSpeed ZenFlow, layout repaired, overlap, S = 4": _deepspeed(True, "layout"),
    "optax.adamw": Method("adamw"),
    "zenflow_jax, S = 4": Method("in turn, S = 4"),
    "zenflow_jax, S = 8": Method("in turn, S = 8"),
    "zenflow_jax, S = 16": Method("in turn, S = 16"),
    "zenflow_jax as in the paper, S = 4": Method("as in the paper, S = 4"),
}
_RESUMED = re.compile(r"zenflow_jax, S = 4|DeepSpeed ZenFlow.*")


class Job(NamedTuple):
    """A run, as its process gets it."""

    options: list[str]  # of the command `zenflow-finetune`
    steps: int  # at which it ends; the schedule's length is in the options
    checkpoint: str  # a folder
    resume: int  # the step of the checkpoint to start from; 0 for none

    @property
    def settings(self) -> Settings:
        return read_command_line([CONFIG, *self.options], program="zenflow-finetune").settings


def prepare_peer(data: Path, settings: Settings) -> None:
    """Writes the run's weights, with their new head, and its batches for torch."""
    sources = read(settings)
    job, _ = prepare(sources, lambda: None)
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


def train(job: Job) -> dict[str, Any]:
    """Trains with jax, as `zenflow-finetune` does."""
    settings, file = job.settings, Path(job.checkpoint).with_suffix(".npz")
    work, opt_state = prepare(read(settings), lambda: None)
    assert work.train_step is not None  # weights do not stream
    params, saved = work.model.params, None
    if job.resume:
        params, opt_state, saved = load(file, params, opt_state)
    losses, seconds = [], []
    with contextlib.ExitStack() as stack:
        engine = None
        if settings.has_engine:
            engine = zenflow_jax.HostEngine(params, opt_state, engine_state=saved)
            stack.enter_context(engine)
        for i in range(job.resume, job.steps):
            begun = time.process_time()
            params, opt_state, loss, _ = work.train_step(params, opt_state, work.batches[i])
            if engine:
                params, opt_state = engine.exchange(params, opt_state)
            losses.append(float(loss))
            seconds.append(time.process_time() - begun)
            if engine and i + 1 == SAVED and not job.resume:
                leaves = jax.tree.leaves((params, opt_state, engine.state()))
                np.savez(file, *leaves)
        if engine:
            params, opt_state = engine.flush(params, opt_state)
        figures = work.validate(params)
    return {"losses": losses, "seconds": seconds, **figures}


def peer_settings(method: Method, job: Job) -> dict[str, Any]:
    """Returns the settings for `deepspeed_peer.py` that match the command's."""
    settings = job.settings
    schedule, zenflow = learning_rate(settings), method.zenflow
    if zenflow:
        interval, warm_up = int(settings.update_interval), settings.warm_up_rounds
        zenflow = zenflow | {
            "topk_ratio": settings.topk_ratio,
            "update_interval": interval,
            "select_strategy": "step",
            "select_interval": 16 * interval,  # zenflow_jax's default
            "full_warm_up_rounds": warm_up,
        }
    adamw = {"lr": settings.learning_rate, "betas": [settings.b1, 0.999], "eps": settings.eps}
    return {
        "model": "BertForSequenceClassification",
        "zenflow": zenflow,
        "repairs": method.repairs,
        "adamw": adamw | {"weight_decay": settings.weight_decay},
        "decays": "matrices",
        "clip": settings.max_grad_norm,
        "rates": [float(schedule(i)) for i in range(job.steps)],
        "batch": settings.batch_size,
        "steps": job.steps,
        "saves": [SAVED] * bool(zenflow and not job.resume),
        "resume": job.resume,
    }


def measured(command: list[str], environment: dict[str, str] | None) -> tuple[str, float]:
    """Returns a process's output and its peak memory in GB, with its children's.

    Memory is sampled every three seconds; a page that processes share counts once.
    """
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    peak = 0.0
    with subprocess.Popen(command, env=environment, **pipe) as process:
        while True:
            try:
                output, _ = process.communicate(timeout=3)
                break
            except subprocess.TimeoutExpired:
                peak = max(peak, _memory(process.pid))
    if process.returncode:
        raise RuntimeError(f"{command} failed:\n{output[-3000:]}")
    return output, peak / 1e9


def _memory(process: int) -> int:
    """Returns the bytes that a process and its children occupy in memory."""
    folder = Path("/proc", str(process))
    try:
        sizes = (folder / "smaps_rollup").read_text()
        children = (folder / "task" / str(process) / "children").read_text().split()
    except OSError:  # it has ended
        return 0
    own = re.search(r"^Pss: +(\d+) kB", sizes, re.MULTILINE)
    return 1024 * int(own[1] if own else 0) + sum(_memory(int(child)) for child in children)


def run(args: argparse.Namespace, title: str, name: str, seed: int, resume: int = 0) -> dict:
    """Returns a run's figures, from its file if that exists."""
    method, task = METHODS[name], JOBS[title]
    data = args.folder / f"{task.task}-{task.steps}-{seed}"
    checkpoint = data / re.sub(r"[^a-z0-9]+", "-", name.lower())
    file = checkpoint.with_suffix(f".{resume}.json" if resume else ".json")
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    data.mkdir(parents=True, exist_ok=True)
    command = [*options_of(task, method.variant, seed, args), "--output-dir", str(data)]
    steps = resume + RESUMED_STEPS if resume else task.steps
    job = Job(command, steps, str(checkpoint), resume)
    if method.torch:
        if not (data / "batches.npz").exists():
            prepare_peer(data, job.settings)
        settings = peer_settings(method, job)
        output, peak = measured(*peer(args.python, data, settings, checkpoint))
        figures = json.loads(output.splitlines()[-1])
        labels = np.load(data / "batches.npz")["validation_labels"]
        figures |= score(np.array(figures.pop("predictions")), labels[labels >= 0])
        figures["loss"] = figures.pop("after")
    else:
        module = [sys.executable, "-m", "benchmarks.deepspeed_glue"]
        output, peak = measured([*module, "--job", json.dumps(job._asdict())], None)
        figures = json.loads(output.splitlines()[-1])
    figures["memory"] = peak
    file.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def spread(values: list[float], digits: int) -> str:
    """Formats the mean, standard deviation and each of the values."""
    each = ", ".join(f"{x:.{digits}f}" for x in values)
    if len(values) == 1:
        return each
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f} ({each})"


def compare(args: argparse.Namespace, title: str) -> None:
    """Prints a table of the runs of all methods."""
    metric = JOBS[title].metric
    runs: dict[str, list[dict]] = {name: [] for name in args.methods}
    for seed in args.seeds:
        for name in args.methods:
            runs[name].append(run(args, title, name, seed))
            figures = runs[name][-1]
            print(seed, name, figures[metric], figures["loss"], flush=True)
    header = f"| {title} | {metric} | dev loss | CPU s per step | peak memory, GB |"
    print(f"\n{header}\n{'|---' * 5}|")
    for name, each in runs.items():
        values = spread([100 * x[metric] for x in each], 1), spread([x["loss"] for x in each], 3)
        seconds = min(statistics.fmean(x["seconds"][UNTIMED_STEPS:]) for x in each)
        memory = max(x["memory"] for x in each)
        print(f"| {name} | {' | '.join(values)} | {seconds:.3f} | {memory:.2f} |")


def compare_resumed(args: argparse.Namespace, title: str) -> None:
    """Prints differences between resumed and uninterrupted runs' losses."""
    header = "| method | saved after step | difference of the first loss | largest | mean |"
    print(f"\n{title}\n{header}\n{'|---' * 5}|")
    for name in filter(_RESUMED.fullmatch, args.methods):
        whole = run(args, title, name, args.seeds[0])["losses"]
        resumed = run(args, title, name, args.seeds[0], resume=SAVED)["losses"]
        print(resumed_row(name, SAVED, Losses(whole, 0, 0), Losses(resumed, 0, 0)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", help="a run for this process, as JSON; the script starts itself")
    parser.add_argument("--python", help="the other environment's Python")
    parser.add_argument("--model", help="folder of the encoder")
    for task in ("sst2", "cola"):
        parser.add_argument(f"--{task}", help=f"folder with the data for {task}")
    parser.add_argument("--folder", type=Path, default=Path("runs/deepspeed_glue"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batch-size", type=int, default=16)
    args = parser.parse_args()
    if args.job:
        print(json.dumps(train(Job(**json.loads(args.job)))))
        return
    for title in TITLES:
        if getattr(args, JOBS[title].task) is None:
            continue
        compare(args, title)
        compare_resumed(args, title)


if __name__ == "__main__":
    main()
