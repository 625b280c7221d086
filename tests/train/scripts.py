"""Runs of the training script, in this process or a separate one, and their files."""

import csv
import json
import shutil
from pathlib import Path

from flax import nnx

from benchmarks.kill_test import steps_of
from train.cli.settings import Settings
from train.run import models, setup

# A decoder with one layer, on the text of Python's library.
TINY = {
    "corpus_megabytes": 0.3,
    "sequence_length": 16,
    "batch_size": 2,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "ffn": 24,
    "eval_batches": 2,
}

# The same for several devices or processes.
TINY_MESH = TINY | {
    "batch_size": 8,
    "steps": 5,
    "log_every": 1,
    "learning_rate": 1e-2,
    # With these settings zenflow equals adamw for any selection; each shard selects separately.
    "update_interval": 1,
    "staleness": 0,
    "host_kernel": "numpy",  # each process of a fresh checkout would compile Numba's
}


def write_config(folder: Path, **settings) -> str:
    """Writes settings for runs in `folder / "runs"`; returns the file."""
    path = folder / "job.toml"
    values = {"output_dir": str(folder / "runs")} | settings
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def small_model(**changed) -> nnx.Module:
    """Returns the model of `TINY`, with changed settings."""
    settings = Settings(**TINY | changed)
    return models.builder(models.config_of(None, settings), settings)()


def read(**settings) -> setup.Sources:
    """Reads everything that the script reads before it makes a model."""
    return setup.read(Settings(**settings))


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file of data, and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def records(*items: dict) -> str:
    """Returns lines of JSON."""
    return "".join(json.dumps(item) + "\n" for item in items)


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def rows(path: Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cut_short(whole: Path, target: Path, *, after: int) -> None:
    """Copies a run as it was after the checkpoint of a step.

    Its metrics continue, as in a run that is killed between two saves.
    """
    shutil.copytree(whole, target)
    saved = steps_of(target / "checkpoints")
    assert after in saved
    assert max(saved) > after
    for step in saved:
        if step > after:
            shutil.rmtree(target / "checkpoints" / str(step))
    (target / "summary.json").unlink()
    for model in target.glob("model*"):
        shutil.rmtree(model) if model.is_dir() else model.unlink()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def largest_file(folder: Path) -> Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
