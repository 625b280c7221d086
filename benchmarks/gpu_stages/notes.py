"""Passes a stage its input, and keeps its results, which are complete on disk at any moment."""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Notes:
    """A stage's results so far, in a JSON file that is replaced on every change.

    Args:
        path: Path of the file. Existing contents are kept.
    """

    def __init__(self, path: Path):
        self.path = path
        self.sections: dict[str, str] = {}
        self.data: dict[str, Any] = {}
        if path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            self.sections, self.data = written["sections"], written["data"]

    def put(self, title: str, text: str) -> None:
        """Sets the report's text under a title, in Markdown; later texts replace it."""
        self.sections[title] = text
        self._save()

    def keep(self, **figures: Any) -> None:
        """Sets figures for report.json."""
        self.data |= figures
        self._save()

    def _save(self) -> None:
        # Atomic, because the process may be killed at any time.
        new = self.path.with_suffix(".new")
        text = json.dumps({"sections": self.sections, "data": self.data}, indent=1)
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path)


@dataclasses.dataclass(frozen=True)
class Stage:
    """The argument of a stage's `run`.

    Attributes:
        name: Name of the stage.
        folder: Folder for all stages' notes and pictures.
        rehearse: Whether to run tiny sizes on a CPU.
        until: The stage's time limit, in seconds of `time.monotonic`; it is killed soon after.
        notes: The stage's notes.
    """

    name: str
    folder: Path
    rehearse: bool
    until: float
    notes: Notes

    @property
    def left(self) -> float:
        """Returns the seconds until the time limit."""
        return self.until - time.monotonic()


def notes_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.notes.json"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
