"""What do adaptive windows do for the loss and for the host, against fixed ones?

    python -m benchmarks.adaptive

Trains the quickstart's model once with each rule (`--rules` for some), one run after the other,
from the same weights on the same batches. Prints a table and draws the length of windows over the
steps into `benchmarks/adaptive.png`. Answers: `benchmarks/LOG.md`.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

CONFIG = "configs/quickstart.toml"
AUTO = ["--update-interval", "auto"]
SELECT = ["--select-interval", "auto"]
NO_WARM_UP = ["--full-warm-up-rounds", "0"]
VARIANTS = {
    "adamw": ["--optimizer", "adamw"],
    **{f"S = {s}": ["--update-interval", str(s), *SELECT] for s in (1, 2, 4, 8, 16)},
    "auto": [*AUTO, *SELECT],
    "auto, at most 16": [*AUTO, *SELECT, "--auto-window-max-interval", "16"],
    "auto, half of the leaves": [*AUTO, *SELECT, "--auto-window-share", "0.5"],
    "S = 4, no warm-up": ["--update-interval", "4", *SELECT, *NO_WARM_UP],
    "auto, no warm-up": [*AUTO, *SELECT, *NO_WARM_UP],
    "auto, half, no warm-up": [*AUTO, *SELECT, *NO_WARM_UP, "--auto-window-share", "0.5"],
}


class Run(NamedTuple):
    summary: dict
    rows: list[dict[str, str]]


def train(options: list[str], folder: Path) -> Run:
    command = [sys.executable, "-m", "train.finetune", CONFIG, "--output-dir", str(folder)]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{options} failed:\n{done.stdout[-2000:]}")
    (made,) = folder.iterdir()
    with (made / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Run(json.loads((made / "summary.json").read_text()), rows)


def draw(runs: dict[str, Run], path: Path) -> None:
    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        if name.startswith("auto"):
            steps = [int(row["step"]) for row in run.rows if row["window_length"]]
            lengths = [float(row["window_length"]) for row in run.rows if row["window_length"]]
            axes.step(steps, lengths, where="pre", label=name)
    axes.set(xlabel="step", ylabel="steps in a window,\nmean of those closed in 10 steps")
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", type=Path, default=Path(__file__).with_name("adaptive.png"))
    parser.add_argument("--rules", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    print(
        "| rule | validation loss | windows | mean length | selections | kept | waited | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    runs = {}
    for name in args.rules:
        options = VARIANTS[name]
        with tempfile.TemporaryDirectory() as folder:
            run = train([*options, "--steps", str(args.steps), "--no-progress"], Path(folder))
        runs[name] = run
        s = run.summary
        ours = s["windows"] is not None
        figures = [
            f"{s['validation_after']['loss']:.3f}",
            str(s["windows"]) if ours else "-",
            f"{s['mean_window_length']:.2f}" if ours else "-",
            str(s["reselections"]) if ours else "-",
            f"{s['kept_share']:.1%}" if ours else "-",
            f"{s['wait_share']:.1%}" if ours else "-",
            f"{s['tokens_per_s']:,.0f}",
        ]
        print(f"| {name} | {' | '.join(figures)} |", flush=True)
    draw(runs, args.picture)


if __name__ == "__main__":
    main()
