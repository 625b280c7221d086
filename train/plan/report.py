"""Prints a plan: a table of the run's needs, advice, and commands that fit."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from train.cli.command_line import PROGRAM, Planning
from train.cli.settings import option_words
from train.log.run_log import show as show_line
from train.plan.planning import RunPlan, Way
from zenflow_jax import planning


def show(run_plan: RunPlan, arguments: Sequence[str], console: Console) -> None:
    """Prints the plan; `arguments` are the command's arguments."""
    plan, settings = run_plan.plan, run_plan.settings
    devices = "" if plan.devices == 1 else f" on {plan.devices} devices"
    by = "the compiler" if plan.by == "compiler" else "shapes: no gradients, no activations"
    table = Table(
        "GB",
        settings.optimizer,
        title=(
            f"{plan.parameters:,} parameters, {settings.batch_size} x "
            f"{settings.sequence_length} tokens{devices}, {plan.gpu.name}, by {by}"
        ),
        title_justify="left",
    )
    table.columns[1].justify = "right"

    def row(name: str, amount: int, style: str | None = None) -> None:
        if amount:
            digits = 1 if amount >= 1e10 else 3 if amount < 1e8 else 2
            table.add_row(name, f"{amount / 1e9:,.{digits}f}", style=style)

    for name, amount in plan.device.items():
        row(f"device: {name}", amount)
    row("device, total", plan.device_bytes, "bold")
    row("  available", plan.device_capacity_bytes)
    table.add_section()
    for name, amount in plan.host.items():
        row(f"host: {name}{' (pinned)' if name == 'mail' else ''}", amount)
    row("host, total", plan.host_bytes, "bold")
    row("  available", plan.host_capacity_bytes - planning.HOST_RESERVE)
    table.add_section()
    row("a checkpoint on disk", plan.checkpoint)
    row("a step, device to host", plan.to_host)
    row("a step, host to device", plan.to_device)
    table.add_section()
    table.add_row("shortest step, s", f"{plan.step_s:.3g}")
    if plan.host:
        table.add_row("host work per step, s", f"{plan.host_s:.3g}")
        table.add_row("hidden", f"{plan.hidden:.0%}")
    table.add_section()
    table.add_row("short", ", ".join(plan.short) or "nothing", style="bold")
    console.print(table)
    for line in advice(run_plan, arguments):
        show_line(console, line)


def advice(run_plan: RunPlan, arguments: Sequence[str]) -> list[str]:
    """Returns sentences about the run, and at most three commands that fit."""
    plan = run_plan.plan
    lines = [plan.advice]
    if run_plan.ways:
        limits = ", without gradients and activations" if plan.by == "shapes" else ""
        lines.append(f"These commands fit{limits}:")
        for way in run_plan.ways:
            sizes = map(planning.gb, (way.plan.device_bytes, way.plan.host_bytes))
            needs = "device {}, host {}".format(*sizes)
            lines.append(f"  {command_line(run_plan, way, arguments)}  # {needs}")
    elif not plan.fits:
        lines.append(
            "No plan with a smaller batch, --remat, --host-state compact or --stream weights fits. "
            "Use a smaller model, or more devices (--mesh)."
        )
    lines.append(
        f"Assumptions: {planning.EFFICIENCY:.0%} of {plan.gpu.flops / 1e12:.0f} TFLOP/s, "
        f"{plan.gpu.bus / 1e9:.0f} GB/s of bus each way, {plan.host_bandwidth / 1e9:.0f} GB/s "
        "of host memory."
    )
    return lines


def command_line(run_plan: RunPlan, way: Way, arguments: Sequence[str]) -> str:
    """Returns the command for these settings, based on the planned command."""
    dropped = {field.name for field in dataclasses.fields(Planning)} | way.changes.keys()
    words, keep = PROGRAM.split(), True
    if way.plan.device_bytes > planning.DEFAULT_FRACTION * run_plan.plan.gpu.memory:
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={planning.MAX_FRACTION}")
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name.removeprefix("no_") not in dropped
        if keep:
            words.append(word)
    for name, value in way.changes.items():
        words += option_words(name, value)
    return shlex.join(words)
