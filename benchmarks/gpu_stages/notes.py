"""What a stage is given, and what it finds: written to disk line by line, whole at any moment."""

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Notes:
    """What one stage has found so far, in a JSON file that is replaced at every change.

    Args:
        path: Of the file. What it holds already is kept.
    """

    def __init__(self, path: Path):
        self.path = path
        self.sections: dict[str, str] = {}
        self.data: dict[str, Any] = {}
        if path.exists():
            written = json.loads(path.read_text(encoding="utf-8"))
            self.sections, self.data = written["sections"], written["data"]

    def put(self, title: str, text: str) -> None:
        """Sets what the report says under a title, in Markdown; a later text takes its place."""
        self.sections[title] = text
        self._save()

    def keep(self, **figures: Any) -> None:
        """Sets figures for report.json, and for the stages that come later."""
        self.data |= figures
        self._save()

    def _save(self) -> None:
        # Never half a file, whenever the process is ended.
        new = self.path.with_suffix(".new")
        text = json.dumps({"sections": self.sections, "data": self.data}, indent=1)
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path)


@dataclasses.dataclass(frozen=True)
class Stage:
    """What `run` of a stage is given.

    Attributes:
        name: Of the stage.
        folder: Where notes of all stages and pictures are.
        rehearse: Whether this is a CPU, and sizes shall be tiny.
        until: When it should have ended, in seconds of `time.monotonic`; it is killed soon after.
        notes: Its own.
    """

    name: str
    folder: Path
    rehearse: bool
    until: float
    notes: Notes

    @property
    def left(self) -> float:
        """Seconds until it should have ended."""
        return self.until - time.monotonic()

    def of(self, other: str) -> dict[str, Any]:
        """The figures that another stage has kept, {} if it has not run."""
        return Notes(notes_path(self.folder, other)).data


def notes_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.notes.json"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
