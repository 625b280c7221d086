"""Prints a plan: a table of the run's needs, or of the ways that fit, and the command to use."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from train.cli.command_line import PROGRAM, Planning
from train.cli.settings import StepSettings
from train.log.results import show as show_line
from train.plan.planning import RunPlan, Way
from zenflow_jax import planning


def show(run_plan: RunPlan, arguments: Sequence[str], console: Console) -> None:
    """Prints the plan; `arguments` are the command's arguments."""
    settings, ways = run_plan.settings, run_plan.ways
    plan = run_plan.plan or ways[0].plan
    devices = "" if plan.devices == 1 else f"{plan.devices} x "
    tokens = f"{settings.batch_size} x {settings.sequence_length} tokens"
    show_line(console, f"{plan.parameters:,} parameters, {tokens}, {devices}{plan.gpu.name}")
    if run_plan.plan:
        console.print(_table_of_plan(plan, settings))
        show_line(console, verdict(plan))
    if ways:
        console.print(_table_of_ways(ways))
        show_line(console, "docs/gradients.md explains the ways.")
    for line in advice(run_plan, arguments):
        show_line(console, line)
    gpu = plan.gpu
    rates = f"{gpu.flops / 1e12:.0f} TFLOP/s at peak, {gpu.bus / 1e9:.0f} GB/s of bus each way"
    memory = f"{plan.host_bandwidth / 1e9:.0f} GB/s of host memory"
    show_line(console, f"Assumptions: {rates}, {memory}.")


def _table_of_plan(plan: planning.Plan, settings: StepSettings) -> Table:
    table = Table("GB", settings.optimizer)
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
    if plan.host_work:
        table.add_row("host work per step, s", f"{plan.seconds['host']:.3g}")
    if plan.exposed_s:
        table.add_row("copies and host work never hidden, s", f"{plan.exposed_s:.3g}")
    for each in at_both_rates(plan):
        table.add_row(f"a step at {each.efficiency:.0%} of peak, s", f"{each.step_s:.3g}")
        share = each.seconds["compute"] / each.step_s
        table.add_row("  share that computes", f"{share:.0%}")
    table.add_section()
    table.add_row("short", ", ".join(plan.short) or "nothing", style="bold")
    return table


def _table_of_ways(ways: Sequence[Way]) -> Table:
    table = Table("", "way", "updates", "GPU, GB", "RAM, GB", "s per step", "short")
    for i, way in enumerate(ways):
        plan, takes = way.plan, i == 0 and not way.plan.short
        table.add_row(
            "->" if takes else "",
            way.name,
            updates_of(way.settings),
            f"{plan.device_bytes / 1e9:.1f}",
            f"{plan.host_bytes / 1e9:.1f}",
            " to ".join(dict.fromkeys(f"{x.step_s:.2g}" for x in at_both_rates(plan)[::-1])),
            " ".join(f"{place} {gb(lack)}" for place, lack in plan.short.items()),
            style="bold" if takes else "dim" if plan.short else None,
        )
    table.columns[1].no_wrap = True
    for column in table.columns[3:6]:
        column.justify = "right"
    return table


def updates_of(run: StepSettings) -> str:
    """Returns how the updates differ from those of AdamW in float32."""
    differences = {
        "late": run.optimizer == "zenflow",
        "8-bit moments": run.host_state == "compact",
        "clipping estimated": run.layer_updates == "during_backward" and run.max_grad_norm,
    }
    return ", ".join(text for text, differs in differences.items() if differs) or "exact"


def at_both_rates(plan: planning.Plan) -> list[planning.Plan]:
    """Returns the plan at a usual rate of compute, and at the best that is known."""
    rates = planning.EFFICIENCY, planning.BEST_EFFICIENCY
    return [dataclasses.replace(plan, efficiency=x) for x in rates]


def advice(run_plan: RunPlan, arguments: Sequence[str]) -> list[str]:
    """Returns the command to use, or what is missing."""
    lines: list[str] = []
    plan, run = run_plan.plan, run_plan.settings
    if run_plan.ways:
        way = run_plan.ways[0]
        plan, run = way.plan, way.settings
        if plan.short:
            lines.append(missing(run_plan.ways))
        else:
            lines.append(verdict(plan))
            lines.append(f"Run: {command_line(way, arguments)}")
    limit = planning.limit_for(plan.pinned)
    if run.stream == "weights" and limit > planning.limit_for(0):
        lines.append(f"The script sets {planning.LIMIT_NAME}={limit}, if you do not.")
    return lines


def missing(ways: Sequence[Way]) -> str:
    """Returns a sentence about the way that lacks the fewest bytes."""
    way = min(ways, key=lambda way: sum(way.plan.short.values()))
    remedies = {"device": "fewer tokens (--batch-size, --sequence-length)", "host": "more RAM"}
    short = way.plan.short
    needs = " and ".join(f"{gb(x)} of the {place}: {remedies[place]}" for place, x in short.items())
    return f"Nothing fits. {way.name} comes closest and lacks {needs}."


def verdict(plan: planning.Plan) -> str:
    """Returns whether the run fits, and what it lacks."""
    without = "" if planning.TEMPORARIES in plan.device else " without gradients and activations"
    if plan.short:
        short = [f"the {place} is {gb(lack)} short" for place, lack in plan.short.items()]
        return f"Does not fit: {' and '.join(short)}."
    text = f"Fits with {gb(plan.device_capacity_bytes - plan.device_bytes)} of the device to spare"
    if needs_fraction(plan):
        text += f", if XLA_PYTHON_CLIENT_MEM_FRACTION={planning.MAX_FRACTION} is set"
    if without:
        text += f"{without}, which the plan includes after {planning.INSTALL}"
    return f"{text}."


def needs_fraction(plan: planning.Plan) -> bool:
    """Returns whether the run needs more of the device than jax uses by default."""
    return plan.device_bytes > planning.DEFAULT_FRACTION * plan.gpu.memory


def gb(number: float) -> str:
    """Formats bytes in units of 10**9."""
    amount = number / 1e9
    return f"{amount:.0f} GB" if amount >= 100 else f"{amount:.1f} GB"


def command_line(way: Way, arguments: Sequence[str]) -> str:
    """Returns the command for a way, based on the planned command."""
    dropped = {field.name for field in dataclasses.fields(Planning)} | way.changes.keys()
    words, keep = PROGRAM.split(), True
    if needs_fraction(way.plan):
        words.insert(0, f"XLA_PYTHON_CLIENT_MEM_FRACTION={planning.MAX_FRACTION}")
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            keep = name.removeprefix("no_") not in dropped
        if keep:
            words.append(word)
    return f"{shlex.join(words)} {way.options}"
