"""Draws the loss of runs over their steps, side by side: docs/loss.svg.

zenflow-finetune quickstart --run zenflow
zenflow-finetune quickstart --run adamw --optimizer adamw
python docs/draw_loss.py runs/quickstart/zenflow runs/quickstart/adamw docs/loss.svg
"""

import csv
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

COLOURS = {"adamw": "#8a8a8a", "zenflow": "#2f6fde"}


def main(folders: list[Path], target: Path) -> None:
    # The same runs give the same file, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "zenflow_jax", "svg.fonttype": "none"})
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for folder in folders:
        colour = COLOURS[folder.name]
        rows = rows_of(folder / "metrics.csv")
        steps, losses = zip(*((int(x["step"]), float(x["loss"])) for x in rows), strict=True)
        axes.plot(steps, losses, color=colour, label=f"{folder.name}, training")
        last = rows_of(folder / "validation.csv")[-1]
        label = f"{folder.name}, validation: {float(last['value']):.2f}"
        axes.plot(int(last["step"]), float(last["value"]), "o", color=colour, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(1.6, 4))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=120)


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    *runs, picture = map(Path, sys.argv[1:])
    main(runs, picture)
