"""Stages of `benchmarks/on_gpu.py` that fail in different ways, after a first result.

The stages run in separate processes, which `test_on_gpu.py` starts, and do not import jax.
"""

import os
import threading
from pathlib import Path

from benchmarks.gpu_stages.notes import Stage
from benchmarks.on_gpu import StageLimits


def failing(*names: str, seconds: float = 20.0, least: float = 0.0) -> list[StageLimits]:
    """Returns the stages below with these names."""
    return [StageLimits(name, "how?", f"{__name__}:{name}", seconds, least) for name in names]


def _finds(stage: Stage) -> None:
    stage.notes.put("Found", f"the result of {stage.name}")
    stage.notes.keep(found=stage.name, seconds_had=stage.left)


def ends_well(stage: Stage) -> None:
    _finds(stage)


def raises(stage: Stage) -> None:
    _finds(stage)
    raise ValueError("expected luck, got none")


def aborts(stage: Stage) -> None:
    _finds(stage)
    os.abort()


def hangs(stage: Stage) -> None:
    """Hangs as soon as its result is in the report, which is written while the stage runs."""
    _finds(stage)
    report = Path(os.environ["REPORT"])
    while not report.exists() or f"the result of {stage.name}" not in report.read_text("utf-8"):
        assert stage.left > 0
    (report.parent / "pid").write_text(str(os.getpid()), encoding="ascii")
    threading.Event().wait()


def asks_for_a_gpu(stage: Stage) -> None:
    from benchmarks.gpu_stages.device import require_gpu

    require_gpu(stage)
