"""Writes the stages' report: report.md for reading, report.json with all figures."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.notes import Notes, notes_path, table

#: Number of a stage's output lines that the report shows if the stage failed.
_LAST_LINES = 25


@dataclasses.dataclass
class Outcome:
    """A stage's outcome."""

    stage: str
    question: str
    ended: str = "not run yet"
    seconds: float = 0.0
    well: bool = False  # whether the stage completed
    last_lines: str = ""  # the end of the output, if the stage did not complete


def write(out: Path, work: Path, machine: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Writes report.md and report.json, which replace earlier ones atomically.

    Args:
        out: Folder for the report.
        work: Folder with the stages' notes.
        machine: Facts for the top of the report.
        outcomes: Outcomes of all requested stages, in order.
    """
    notes = {o.stage: Notes(notes_path(work, o.stage)) for o in outcomes}
    # The device name comes from jax, because nvidia-smi may be missing.
    device = next((n.data["device"] for n in notes.values() if "device" in n.data), machine["GPU"])
    lines = [f"# Results on {device}, {machine['date']}", ""]
    if machine["rehearsal"]:
        lines += ["**A rehearsal on a CPU, with tiny models: the figures mean nothing.**", ""]
    lines += [f"* {name}: {value}" for name, value in machine.items() if name != "rehearsal"]
    lines += ["", table(["stage", "outcome", "s"], map(_row, outcomes))]
    for number, outcome in enumerate(outcomes, start=1):
        stage_notes = notes[outcome.stage]
        lines += ["", f"## {number}. {outcome.stage}: {outcome.question}", ""]
        if not outcome.well:
            lines += [f"**{outcome.ended}**", ""]
        for title, text in stage_notes.sections.items():
            lines += [f"### {title}", "", text, ""]
        if outcome.last_lines:
            lines += ["The last lines of its output:", "", "```", outcome.last_lines, "```"]
    data = {
        "machine": machine,
        "stages": [dataclasses.asdict(o) | notes[o.stage].data for o in outcomes],
    }
    _replace(out / "report.md", "\n".join(lines).rstrip() + "\n")
    _replace(out / "report.json", json.dumps(data, indent=1) + "\n")


def _row(outcome: Outcome) -> tuple[str, str, str]:
    # The first line of an error; the stage's section has the rest.
    return outcome.stage, outcome.ended.splitlines()[0][:200], f"{outcome.seconds:.0f}"


def last_lines(log: Path) -> str:
    """Returns the end of a stage's output."""
    text = log.read_text(encoding="utf-8", errors="replace")
    # The output must not close the fences around it.
    return "\n".join(x[:300] for x in text.splitlines()[-_LAST_LINES:]).replace("```", "'''")


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
