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
        row(f"host: {name}", amount)
    row("host, total", plan.host_bytes, "bold")
    row("  available", plan.host_capacity_bytes - planning.HOST_RESERVE)
    table.add_section()
    row("a checkpoint on disk", plan.checkpoint)
    row("a step, device to host", plan.to_host)
    row("a step, host to device", plan.to_device)
    table.add_section()
    if plan.host_s:
        table.add_row("host work per step, s", f"{plan.host_s:.3g}")
    for each in at_both_rates(plan):
        table.add_row(f"a step at {each.efficiency:.0%} of peak, s", f"{each.step_s:.3g}")
        table.add_row("  share that computes", f"{each.hidden:.0%}")
    table.add_section()
    table.add_row("short", ", ".join(plan.short) or "nothing", style="bold")
    console.print(table)
    for line in advice(run_plan, arguments):
        show_line(console, line)


def at_both_rates(plan: planning.Plan) -> list[planning.Plan]:
    """Returns the plan at a usual rate of compute, and at the best that is known."""
    rates = planning.EFFICIENCY, planning.BEST_EFFICIENCY
    return [dataclasses.replace(plan, efficiency=x) for x in rates]


def advice(run_plan: RunPlan, arguments: Sequence[str]) -> list[str]:
    """Returns sentences about the run, and at most three commands that fit."""
    plan = run_plan.plan
    lines = [verdict(plan)]
    if run_plan.ways:
        limits = ", without gradients and activations" if plan.by == "shapes" else ""
        lines.append(f"These commands fit{limits}:")
        for way in run_plan.ways:
            sizes = map(gb, (way.plan.device_bytes, way.plan.host_bytes))
            needs = "device {}, host {}".format(*sizes)
            lines.append(f"  {command_line(run_plan, way, arguments)}  # {needs}")
    elif plan.short:
        lines.append(
            "No plan with a smaller batch, --remat, --host-state compact or --stream weights fits. "
            "Use a smaller model, or more devices (--mesh)."
        )
    limit = planning.limit_for(plan.pinned)
    if run_plan.settings.stream == "weights" and limit > planning.limit_for(0):
        lines.append(f"The script sets {planning.LIMIT_NAME}={limit}, if you do not.")
    lines.append(
        f"Assumptions: {plan.gpu.flops / 1e12:.0f} TFLOP/s at peak, "
        f"{plan.gpu.bus / 1e9:.0f} GB/s of bus each way, {plan.host_bandwidth / 1e9:.0f} GB/s "
        "of host memory."
    )
    return lines


def verdict(plan: planning.Plan) -> str:
    """Returns whether the run fits and, if it does, how the work of a step is hidden."""
    without = "" if plan.by == "compiler" else " without gradients and activations"
    lacks, rest = plan.short, gb(planning.HOST_RESERVE)
    device = f"{gb(plan.device_bytes)}{without}, jax has {gb(plan.device_capacity_bytes)}"
    host = f"{gb(plan.host_bytes)} plus {rest} for everything else, has "
    needs = {"device": device, "host": host + gb(plan.host_capacity_bytes)}
    if lacks:
        short = [f"the {x} is {gb(lack)} short (needs {needs[x]})" for x, lack in lacks.items()]
        return f"Does not fit: {' and '.join(short)}."
    text = f"Fits with {gb(plan.device_capacity_bytes - plan.device_bytes)} of the device to spare"
    if plan.device_bytes > planning.DEFAULT_FRACTION * plan.gpu.memory:
        text += f", if XLA_PYTHON_CLIENT_MEM_FRACTION={planning.MAX_FRACTION} is set"
    if without:
        text += f"{without}, which the plan includes after {planning.INSTALL}"
    slow, fast = at_both_rates(plan)
    work = ", ".join(f"{name} {x:.2g} s" for name, x in list(slow.seconds.items())[1:] if x)
    if not work:
        return f"{text}."
    least, most = slow.compute_from, fast.compute_from
    if least is None or most is None:
        hidden = "No batch hides the copies, which grow with it."
    elif most <= 1:
        hidden = "Compute hides the rest at either rate."
    else:
        hidden = f"A batch {least:.2g} to {most:.2g} times as large would hide the rest."
    exposed = f"; {slow.exposed_s:.2g} s are never hidden" if slow.exposed_s else ""
    return (
        f"{text}. A step takes {fast.step_s:.2g} to {slow.step_s:.2g} s ({work}{exposed}). {hidden}"
    )


def gb(number: float) -> str:
    """Formats bytes in units of 10**9."""
    amount = number / 1e9
    return f"{amount:.0f} GB" if amount >= 100 else f"{amount:.1f} GB"


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
