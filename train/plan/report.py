"""Prints a plan: a table of what a run needs, the advice, and commands that fit."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from train.cli.command_line import PROGRAM, Planning
from train.cli.settings import option_words
from train.plan.planning import RunPlan, Way
from zenflow_jax import planning


def show(run_plan: RunPlan, arguments: Sequence[str], console: Console) -> None:
    """Prints the plan; `arguments` are the command's arguments."""
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

    for name in dict.fromkeys(name for plan in plans for name in plan.device):
        row(f"device: {name}", [x.device.get(name) for x in plans])
    row("device, total", [x.device_bytes for x in plans], "bold")
    row("  available", [x.device_capacity_bytes for x in plans])
    table.add_section()
    for name in dict.fromkeys(name for plan in plans for name in plan.host):
        pinned = " (pinned)" if name == "mail" else ""
        row(f"host: {name}{pinned}", [x.host.get(name) for x in plans])
    row("host, total", [x.host_bytes or None for x in plans], "bold")
    row("  available", [x.host_capacity_bytes - planning.HOST_RESERVE for x in plans])
    table.add_section()
    row("a checkpoint on disk", [x.checkpoint for x in plans])
    row("a step, device to host", [x.to_host or None for x in plans])
    row("a step, host to device", [x.to_device or None for x in plans])
    table.add_section()
    by_resource = {i: x.seconds for i, x in enumerate(plans) if isinstance(x, planning.LayerPlan)}
    for name in ("compute", "to device", "to host") if by_resource else ():
        seconds = (by_resource.get(i, {}).get(name) for i in range(len(plans)))
        table.add_row(f"{name}, s", *("" if x is None else f"{x:.3g}" for x in seconds))
    table.add_row("shortest step, s", *(f"{x.step_s:.3g}" for x in plans))
    table.add_row("host work per step, s", *(f"{x.host_s:.3g}" if x.host_s else "" for x in plans))
    table.add_row("hidden", *(f"{x.hidden:.0%}" if x.host else "" for x in plans))
    table.add_section()
    table.add_row("short", *(", ".join(x.short) or "nothing" for x in plans), style="bold")
    console.print(table)
    for line in advice(run_plan, arguments):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def advice(run_plan: RunPlan, arguments: Sequence[str]) -> list[str]:
    """Returns sentences about the run, and at most three commands that fit."""
    chosen, settings = run_plan.chosen, run_plan.settings
    by_shapes = chosen.by == "shapes"
    lines = [f"{settings.optimizer}: {chosen.advice}"]
    if run_plan.ways:
        alone = ", without gradients and activations" if by_shapes else ""
        lines.append(f"These commands fit{alone}:")
        for way in run_plan.ways:
            sizes = map(planning.gb, (way.plan.device_bytes, way.plan.host_bytes))
            needs = "device {}, host {}".format(*sizes)
            lines.append(f"  {command_line(run_plan, way, arguments)}  # {needs}")
    elif not chosen.fits:
        lines.append(
            "No smaller batch and no other --host-state, --update-interval, --remat, "
            "--scan-layers or --prefetch-bytes was found to fit. Use a smaller --topk-ratio, a "
            "smaller model, or more devices (--mesh)."
        )
    rate = "measured here" if run_plan.measured else "assumed"
    lines.append(
        f"Assumptions: {planning.EFFICIENCY:.0%} of {chosen.gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{chosen.gpu.bus / 1e9:.0f} GB/s of bus each way, {chosen.host_bandwidth / 1e9:.0f} GB/s "
        f"of host memory ({rate})."
    )
    return lines


def command_line(run_plan: RunPlan, way: Way, arguments: Sequence[str]) -> str:
    """Returns the command for these settings, based on the planned command."""
    changes = dict(way.changes)
    if way.batch_size != run_plan.settings.batch_size:
        changes = {"batch_size": way.batch_size} | changes
    dropped = {field.name for field in dataclasses.fields(Planning)} | changes.keys()
    words, keep = PROGRAM.split(), True
    if way.plan.device_bytes > planning.DEFAULT_FRACTION * run_plan.chosen.gpu.memory:
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={planning.MAX_FRACTION}")
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name.removeprefix("no_") not in dropped
        if keep:
            words.append(word)
    for name, value in changes.items():
        words += option_words(name, value)
    return shlex.join(words)


def _in_gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.{1 if nbytes >= 1e10 else 3 if nbytes < 1e8 else 2}f}"
