"""What is shown of a plan: a table, a line of JSON for programs, a picture."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from train.planning import RunPlan, Way
from train.sayings import PROGRAM
from train.settings import Planning
from zenflow_jax.planning import (
    EFFICIENCY,
    HOST_RESERVE,
    INSTALL,
    PINNED,
    TEMPORARIES,
    UNASKED,
    USABLE,
    Plan,
    gb,
)

CLASSES = ("weights", "optimizer state", TEMPORARIES)
OF_ENGINE = ("mail under way", "uploads")
OF_HOST = ("masters, moments", "sums", "mail", "hand-over, pinned", "hand-over", "a save")


def show(found: RunPlan, arguments: Sequence[str], console: Console) -> None:
    """Prints the plan; `arguments` are those of the command."""
    chosen, settings = found.chosen, found.settings
    devices = "" if chosen.devices == 1 else f" on {chosen.devices} devices"
    table = Table(
        title=(
            f"{chosen.parameters:,} parameters, {settings.batch_size} x "
            f"{settings.sequence_length} tokens{devices}, {chosen.gpu.name}, by {_by(chosen)}"
        ),
        title_justify="left",
    )
    table.add_column("GB")
    plans = found.of_optimizers
    for name in plans:
        is_it = name == settings.optimizer
        table.add_column(name, justify="right", style="bold" if is_it else None)
    for name in (*CLASSES, *OF_ENGINE):
        _row(table, f"device: {name}", [x.device.get(name) for x in plans.values()])
    _row(table, "device, in all", [x.device_bytes for x in plans.values()], "bold")
    _row(table, "  of", [x.device_bytes_there for x in plans.values()], end=True)
    for name in OF_HOST:
        pinned = " (pinned)" if name == "mail" else ""
        _row(table, f"host: {name}{pinned}", [x.host.get(name) for x in plans.values()])
    _row(table, "host, in all", [x.host_bytes or None for x in plans.values()], "bold")
    there = [x.host_bytes_there - HOST_RESERVE for x in plans.values()]
    _row(table, "  of", there, end=True)
    _row(table, "a checkpoint on disk", [x.checkpoint for x in plans.values()])
    _row(table, "a step, device to host", [x.to_host or None for x in plans.values()])
    _row(table, "a step, host to device", [x.to_device or None for x in plans.values()], end=True)
    _text(table, "a step must take, s", [f"{x.step_s:.3g}" for x in plans.values()])
    hosts = [x.host_s for x in plans.values()]
    _text(table, "its host work, s", [f"{x:.3g}" if x else "" for x in hosts])
    hidden = [f"{x.hidden:.0%}" if x.host else "" for x in plans.values()]
    _text(table, "of it hidden", hidden)
    smallest = [_smallest(x) for x in plans.values()]
    _text(table, "smallest update_interval to hide", smallest, end=True)
    _text(table, "fits", ["yes" if x.fits else "no" for x in plans.values()], style="bold")
    console.print(table)
    for line in said(found, arguments):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def said(found: RunPlan, arguments: Sequence[str]) -> list[str]:
    """The plan in sentences."""
    chosen, settings = found.chosen, found.settings
    how = "measured here" if found.measured else "assumed"
    efficiency = (
        f"Taken: {EFFICIENCY:.0%} of {chosen.gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{chosen.gpu.bus / 1e9:.0f} GB/s of bus each way, {chosen.host_bandwidth / 1e9:.0f} GB/s "
        f"of host memory ({how})."
    )
    lines = [f"{settings.optimizer}: {chosen.advice}"]
    if found.largest_batch is not None:
        lines.append(f"The largest batch that was found to fit the device: {found.largest_batch}.")
    elif chosen.by == "compiler":
        lines.append("With these settings no batch fits the device.")
    else:
        lines.append(f"The largest batch depends on activations, which {INSTALL} adds.")
    if found.ways:
        alone = "" if chosen.by == "compiler" else " (without gradients and activations)"
        lines.append(f"What fits{alone}:")
        for way in found.ways:
            needs = f"device {gb(way.memory.device)}, host {gb(way.memory.host)}"
            lines.append(f"  {command_line(found, way, arguments)}  # {needs}")
    elif not chosen.fits:
        lines.append(
            "Nor does it with a smaller batch, --host-state compact, another --update-interval, "
            "--remat or --no-scan-layers: take a smaller model, or more devices (--mesh)."
        )
    return [*lines, efficiency]


def command_line(found: RunPlan, way: Way, arguments: Sequence[str]) -> str:
    """The command that trains in this way, made of the one that asked for the plan."""
    changes = dict(way.changes)
    if way.batch_size != found.settings.batch_size:
        changes = {"batch_size": way.batch_size} | changes
    dropped = {field.name for field in dataclasses.fields(Planning)} | changes.keys()
    words, keep = PROGRAM.split(), True
    if way.memory.device > UNASKED * found.chosen.gpu.memory:
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={USABLE}")
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name.removeprefix("no_") not in dropped
        if keep:
            words.append(word)
    for name, value in changes.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return shlex.join(words)


def as_dict(found: RunPlan, arguments: Sequence[str]) -> dict[str, Any]:
    """The plan for programs: bytes, seconds, shares; `arguments` are those of the command."""
    chosen = found.chosen
    return {
        "device": chosen.gpu.name,
        "devices": chosen.devices,
        "by": chosen.by,
        "parameters": chosen.parameters,
        "batch_size": found.settings.batch_size,
        "sequence_length": found.settings.sequence_length,
        "optimizer": found.settings.optimizer,
        "largest_batch": found.largest_batch,
        "host_bandwidth": chosen.host_bandwidth,
        "host_bandwidth_measured": found.measured,
        "advice": chosen.advice,
        "what_fits": [
            {
                "command": command_line(found, way, arguments),
                "device_bytes": way.memory.device,
                "host_bytes": way.memory.host,
            }
            for way in found.ways
        ],
        "plans": {name: _of_one(x) for name, x in found.of_optimizers.items()},
    }


def write_json(found: RunPlan, arguments: Sequence[str], path: Path) -> None:
    path.write_text(json.dumps(as_dict(found, arguments), indent=2) + "\n", encoding="utf-8")


def write_picture(found: RunPlan, path: Path) -> None:
    """Stacked bars of the memory of each optimizer, against what there is."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    sides = figure.subplots(1, 2)
    plans = found.of_optimizers
    chosen = found.chosen
    names = list(plans)
    bars = (
        ((*CLASSES, *OF_ENGINE), [x.device for x in plans.values()], chosen.device_bytes_there),
        (OF_HOST, [x.host for x in plans.values()], chosen.host_bytes_there - HOST_RESERVE),
    )
    titles = (f"{chosen.gpu.name}, by {_by(chosen)}", "host")
    for axes, title, (classes, of_plans, there) in zip(sides, titles, bars, strict=True):
        bottom = [0.0] * len(names)
        for kind in classes:
            heights = [x.get(kind, 0) / 1e9 for x in of_plans]
            if any(heights):
                axes.bar(names, heights, bottom=bottom, label=kind)
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.axhline(there / 1e9, color="black", linestyle="--", label="there is")
        axes.set_title(title)
        axes.set_ylabel("GB")
        axes.set_ylim(0, 1.5 * max(there / 1e9, max(sum(x.values()) for x in of_plans) / 1e9))
        axes.legend(fontsize="small", ncols=2, loc="upper left")
    figure.savefig(path)


def _of_one(x: Plan) -> dict[str, Any]:
    return {
        "fits": x.fits,
        "device_bytes": dict(x.device),
        "device_bytes_total": x.device_bytes,
        "device_bytes_there": x.device_bytes_there,
        "host_bytes": dict(x.host),
        "host_bytes_total": x.host_bytes,
        "host_bytes_pinned": x.host_pinned,
        "host_bytes_there": x.host_bytes_there,
        "pinned": list(PINNED),
        "checkpoint_bytes": x.checkpoint,
        "to_host_bytes_per_step": x.to_host,
        "to_device_bytes_per_step": x.to_device,
        "flops_per_step": x.flops,
        "step_s": x.step_s,
        "host_s": x.host_s,
        "host_busy": x.busy,
        "hidden": x.hidden,
        "update_interval": x.interval,
        "host_busy_by_update_interval": {str(s): busy for s, busy in x.of_intervals.items()},
        "smallest_update_interval": x.smallest_interval,
        "advice": x.advice,
    }


def _by(plan: Plan) -> str:
    return "the compiler" if plan.by == "compiler" else "shapes: no gradients, no activations"


def _smallest(plan: Plan) -> str:
    if not plan.of_intervals:
        return ""
    return "none" if plan.smallest_interval is None else str(plan.smallest_interval)


def _row(
    table: Table,
    name: str,
    amounts: Sequence[int | None],
    style: str | None = None,
    *,
    end: bool = False,
) -> None:
    if any(amounts) or end:
        cells = ["" if x is None else _in_gb(x) for x in amounts]
        table.add_row(name, *cells, style=style, end_section=end)


def _in_gb(nbytes: int) -> str:
    amount = nbytes / 1e9
    return (
        f"{amount:,.1f}" if amount >= 10 else f"{amount:.3f}" if amount < 0.1 else f"{amount:.2f}"
    )


def _text(
    table: Table, name: str, cells: Sequence[str], *, style: str | None = None, end: bool = False
) -> None:
    table.add_row(name, *cells, style=style, end_section=end)
