"""Shows a plan: a table and sentences, a picture, or JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from train.command_line import PROGRAM, Planning
from train.planning import RunPlan, Way
from train.settings import option_words
from zenflow_jax.planning import (
    EFFICIENCY,
    HOST_RESERVE,
    INSTALL,
    TEMPORARIES,
    UNASKED,
    USABLE,
    Plan,
    gb,
)

ON_DEVICE = ("weights", "optimizer state", TEMPORARIES, "mail under way", "uploads", "late uploads")
# What follows from the attributes of a plan.
DERIVED = "by fits device_bytes device_bytes_there host_bytes host_pinned hidden advice".split()
ON_HOST = tuple(
    "masters, moments; sums; mail; weights; hand-over, pinned; hand-over; a save".split("; ")
)

# Of the picture, where each has a colour.
CLASSES = {
    "weights": ("weights",),
    "optimizer state, masters": ("optimizer state", "masters, moments"),
    TEMPORARIES: (TEMPORARIES,),
    "mail, sums": ("mail under way", "mail", "sums"),
    "uploads, hand-over": ("uploads", "late uploads", "hand-over, pinned", "hand-over"),
    "a save": ("a save",),
}


def show(run_plan: RunPlan, arguments: Sequence[str], console: Console) -> None:
    """Prints the plan; `arguments` are those of the command."""
    chosen, settings = run_plan.chosen, run_plan.settings
    devices = "" if chosen.devices == 1 else f" on {chosen.devices} devices"
    by = "the compiler" if chosen.by == "compiler" else "shapes: no gradients, no activations"
    table = Table(
        title=(
            f"{chosen.parameters:,} parameters, {settings.batch_size} x "
            f"{settings.sequence_length} tokens{devices}, {chosen.gpu.name}, by {by}"
        ),
        title_justify="left",
    )
    table.add_column("GB")
    for name in run_plan.of_optimizers:
        style = "bold" if name == settings.optimizer else None
        table.add_column(name, justify="right", style=style)
    plans = list(run_plan.of_optimizers.values())

    def row(name: str, amounts: Sequence[int | None], style: str | None = None) -> None:
        if any(amounts):
            table.add_row(name, *("" if x is None else _in_gb(x) for x in amounts), style=style)

    for name in ON_DEVICE:
        row(f"device: {name}", [x.device.get(name) for x in plans])
    row("device, in all", [x.device_bytes for x in plans], "bold")
    row("  of", [x.device_bytes_there for x in plans])
    table.add_section()
    for name in ON_HOST:
        pinned = " (pinned)" if name in ("mail", "weights") else ""
        row(f"host: {name}{pinned}", [x.host.get(name) for x in plans])
    row("host, in all", [x.host_bytes or None for x in plans], "bold")
    row("  of", [x.host_bytes_there - HOST_RESERVE for x in plans])
    table.add_section()
    row("a checkpoint on disk", [x.checkpoint for x in plans])
    row("a step, device to host", [x.to_host or None for x in plans])
    row("a step, host to device", [x.to_device or None for x in plans])
    table.add_section()
    table.add_row("a step takes at least, s", *(f"{x.step_s:.3g}" for x in plans))
    table.add_row("its host work, s", *(f"{x.host_s:.3g}" if x.host_s else "" for x in plans))
    table.add_row("of it hidden", *(f"{x.hidden:.0%}" if x.host else "" for x in plans))
    table.add_row("smallest update_interval to hide", *map(_smallest, plans))
    table.add_section()
    table.add_row("fits", *("yes" if x.fits else "no" for x in plans), style="bold")
    console.print(table)
    for line in said(run_plan, arguments):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def said(run_plan: RunPlan, arguments: Sequence[str]) -> list[str]:
    chosen, settings = run_plan.chosen, run_plan.settings
    how = "measured here" if run_plan.measured else "assumed"
    lines = [f"{settings.optimizer}: {chosen.advice}"]
    if run_plan.largest_batch is not None:
        lines.append(f"The largest batch found to fit the device: {run_plan.largest_batch}.")
    elif chosen.by == "compiler":
        lines.append("With these settings no batch fits the device.")
    else:
        lines.append(f"The largest batch depends on activations, which {INSTALL} adds.")
    if run_plan.ways:
        alone = "" if chosen.by == "compiler" else " (without gradients and activations)"
        lines.append(f"What fits{alone}:")
        for way in run_plan.ways:
            needs = f"device {gb(way.memory.device)}, host {gb(way.memory.host)}"
            lines.append(f"  {command_line(run_plan, way, arguments)}  # {needs}")
    elif not chosen.fits:
        lines.append(
            "Nor does it with a smaller batch or another --host-state, --update-interval, --remat, "
            "--scan-layers, --stream, --staleness or --prefetch-bytes: take a smaller "
            "--topk-ratio, a smaller model, or more devices (--mesh)."
        )
    lines.append(
        f"Taken: {EFFICIENCY:.0%} of {chosen.gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{chosen.gpu.bus / 1e9:.0f} GB/s of bus each way, {chosen.host_bandwidth / 1e9:.0f} GB/s "
        f"of host memory ({how})."
    )
    return lines


def command_line(run_plan: RunPlan, way: Way, arguments: Sequence[str]) -> str:
    """The command that trains in this way, made of the one that asked for the plan."""
    changes = dict(way.changes)
    if way.batch_size != run_plan.settings.batch_size:
        changes = {"batch_size": way.batch_size} | changes
    dropped = {field.name for field in dataclasses.fields(Planning)} | changes.keys()
    words, keep = PROGRAM.split(), True
    if way.memory.device > UNASKED * run_plan.chosen.gpu.memory:
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}")
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name.removeprefix("no_") not in dropped
        if keep:
            words.append(word)
    for name, value in changes.items():
        words += option_words(name, value)
    return shlex.join(words)


def write_json(run_plan: RunPlan, arguments: Sequence[str], path: Path) -> None:
    """Writes the plans, by the names of `zenflow_jax.planning.Plan`."""
    content = {
        "optimizer": run_plan.settings.optimizer,
        "batch_size": run_plan.settings.batch_size,
        "sequence_length": run_plan.settings.sequence_length,
        "largest_batch": run_plan.largest_batch,
        "host_bandwidth_measured": run_plan.measured,
        "what_fits": [
            {"command": command_line(run_plan, way, arguments), **way.memory._asdict()}
            for way in run_plan.ways
        ],
        "plans": {
            name: dataclasses.asdict(plan) | {key: getattr(plan, key) for key in DERIVED}
            for name, plan in run_plan.of_optimizers.items()
        },
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_picture(run_plan: RunPlan, path: Path) -> None:
    """Draws the memory of each optimizer as a bar, on the device above, on the host below."""
    from matplotlib.figure import Figure  # takes a third of a start

    chosen, plans = run_plan.chosen, run_plan.of_optimizers
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    on_device, on_host = figure.subplots(2, 1)
    # An optimizer that has all on the device has no bar below.
    on_hosts = {name: x.host for name, x in plans.items() if x.host}
    limits = chosen.device_bytes_there, chosen.host_bytes_there - HOST_RESERVE
    drawn = _draw(on_device, {name: x.device for name, x in plans.items()}, limits[0])
    drawn |= _draw(on_host, on_hosts, limits[1])
    without = "" if chosen.by == "compiler" else ", without gradients and activations"
    on_device.set_title(f"{chosen.gpu.name}{without}; dashed: all of its {gb(limits[0])}")
    on_host.set_title(f"host; dashed: all of its {gb(limits[1])}")
    labels = [label for label in CLASSES if label in drawn]
    handles = [drawn[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize="small")
    figure.savefig(path, dpi=120)


def _draw(axes: Any, needs: Mapping[str, Mapping[str, int]], limit: int) -> dict[str, Any]:
    """Draws a bar for each optimizer, its parts in GB, and the limit; returns bars by class."""
    drawn, ends = {}, np.zeros(len(needs))
    right = 1.15 * max(limit, *(sum(x.values()) for x in needs.values())) / 1e9
    for number, (label, parts) in enumerate(CLASSES.items()):
        widths = np.array([sum(x.get(part, 0) for part in parts) for x in needs.values()]) / 1e9
        if widths.any():
            drawn[label] = axes.barh([*needs], widths, left=ends, color=f"C{number}")
            texts = [f"{x:.1f}" if x > right / 45 else "" for x in widths]  # which have room
            axes.bar_label(drawn[label], texts, label_type="center", color="w", fontsize="small")
            ends += widths
    axes.axvline(limit / 1e9, color="black", linestyle="--")
    for i, end in enumerate(ends):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(end + right / 100, i, f"{end:.1f}", va="center", weight="bold", bbox=box)
    axes.set(xlim=(0, right), xlabel="GB")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def _smallest(plan: Plan) -> str:
    has_windows = plan.hides is not None and plan.hides.interval is not None
    return str(plan.hides.smallest_interval or "none") if has_windows else ""


def _in_gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.{1 if nbytes >= 1e10 else 3 if nbytes < 1e8 else 2}f}"
