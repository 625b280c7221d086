"""Does zenflow reach AdamW's accuracy on real tasks, from pretrained weights?

    python -m benchmarks.glue_parity --model DIR --sst2 DIR --cola DIR

Fine-tunes an encoder on GLUE tasks with the real command, once for each optimizer and seed, from
the same weights and on the same batches in the same order, in float32. The seed sets the new head
and the order of the data. Prints a table with the task's metric on the whole dev set after the last
step (mean and standard deviation over seeds), and draws the training losses into
`benchmarks/glue_parity.png`. Answers: `benchmarks/LOG.md`.

Runs are kept in `--folder`, so a second start makes only the missing runs.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

CONFIG = "configs/glue_sst2.toml"
_ZENFLOW = ["--topk-ratio", "0.05", "--update-interval"]
VARIANTS = {
    "adamw": ["--optimizer", "adamw"],
    "at once, S = 4": [*_ZENFLOW, "4", "--no-rolling"],
    "as in the paper, S = 4": [*_ZENFLOW, "4", "--no-rolling", "--provisional-share", "0"],
    "in turn, S = 4, not scaled": [*_ZENFLOW, "4", "--window-scaling", "none"],
    "in turn, S = 4": [*_ZENFLOW, "4"],
    "in turn, S = 8": [*_ZENFLOW, "8"],
    "in turn, S = 16": [*_ZENFLOW, "16"],
}


# The column names for CoLA, whose files have no header.
COLUMNS = "source\tlabel\tmark\tsentence\n"


class Job(NamedTuple):
    task: str
    metric: str
    length: int  # in tokens; 9% of SST-2's and 3% of CoLA's dev sentences are longer
    steps: int
    learning_rate: float


JOBS = {
    "SST-2, 300 steps": Job("sst2", "accuracy", 40, 300, 1e-4),
    "CoLA, 1,600 steps": Job("cola", "matthews", 20, 1600, 5e-5),
    "CoLA, 600 steps": Job("cola", "matthews", 20, 600, 5e-5),
}


class Run(NamedTuple):
    metric: float
    steps: list[int]
    losses: list[float]


def options_of(job: Job, variant: str, seed: int, args: argparse.Namespace) -> list[str]:
    """Returns the command's options for a run, without the run's folder."""
    data = Path(getattr(args, job.task))
    if job.task == "cola":
        original, data = data, args.folder / "cola"
        data.mkdir(parents=True, exist_ok=True)
        for file in ("train.tsv", "dev.tsv"):
            text = (original / file).read_text(encoding="utf-8")
            (data / file).write_text(COLUMNS + text, encoding="utf-8")
    options = {
        "--model": args.model,
        "--data": data,
        "--seed": seed,
        "--steps": job.steps,
        "--batch-size": args.batch_size,
        "--sequence-length": job.length,
        "--learning-rate": job.learning_rate,
        "--dtype": "float32",
        "--evaluate-every": 0,
        "--save-every": 0,
    }
    pairs = [str(part) for pair in options.items() for part in pair]
    return ["--no-keep-best", *pairs, *VARIANTS[variant]]


def train(job: Job, variant: str, seed: int, args: argparse.Namespace) -> Run:
    words = (part.removeprefix("--") for part in VARIANTS[variant])
    name = "-".join([job.task, str(job.steps), *words, str(seed)])
    command = [sys.executable, "-m", "train.finetune", CONFIG]
    command += options_of(job, variant, seed, args)
    command += ["--output-dir", str(args.folder), "--run", name]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stdout[-2000:]}")
    folder = args.folder / name
    summary = json.loads((folder / "summary.json").read_text())
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Run(
        metric=summary["validation_after"][job.metric],
        steps=[int(row["step"]) for row in rows],
        losses=[float(row["loss"]) for row in rows],
    )


def smoothed(losses: list[float], width: int = 5) -> list[float]:
    """Returns the moving average over at most `width` losses."""
    parts = [losses[max(i - width + 1, 0) : i + 1] for i in range(len(losses))]
    return [statistics.fmean(part) for part in parts]


def draw(runs: dict[str, dict[str, list[Run]]], path: Path) -> None:
    figure = Figure(figsize=(5 * len(runs), 4), layout="constrained")
    for task, axes in zip(runs, figure.subplots(1, len(runs), squeeze=False)[0], strict=True):
        for variant, of_seeds in runs[task].items():
            mean = [statistics.fmean(at) for at in zip(*(r.losses for r in of_seeds), strict=True)]
            axes.plot(of_seeds[0].steps, smoothed(mean), label=variant)
        axes.set(title=task, xlabel="step", ylabel="training loss, mean over seeds and 50 steps")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the encoder")
    for task in ("sst2", "cola"):
        parser.add_argument(f"--{task}", help=f"folder with the data for {task}")
    parser.add_argument("--folder", type=Path, default=Path("runs/glue_parity"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--picture", type=Path, default=Path(__file__).with_name("glue_parity.png"))
    args = parser.parse_args()
    runs: dict[str, dict[str, list[Run]]] = {}
    for title, job in JOBS.items():
        if getattr(args, job.task) is None:
            continue
        runs[title] = {}
        print(f"\n| {title} | {job.metric} | standard deviation | each seed |\n|---|---|---|---|")
        for variant in args.variants:
            of_seeds = [train(job, variant, seed, args) for seed in range(args.seeds)]
            runs[title][variant] = of_seeds
            metrics = [100 * run.metric for run in of_seeds]
            spread = statistics.stdev(metrics) if len(metrics) > 1 else 0.0
            each = ", ".join(f"{m:.1f}" for m in metrics)
            print(f"| {variant} | {statistics.fmean(metrics):.1f} | {spread:.1f} | {each} |")
            sys.stdout.flush()
    if runs:
        draw(runs, args.picture)


if __name__ == "__main__":
    main()
