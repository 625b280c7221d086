"""Stages of `benchmarks/on_gpu.py` that go wrong, each in another way, after they found something.

They run in processes of their own, which `test_on_gpu.py` starts, and import no jax.
"""

import os
import threading
import time
from pathlib import Path

from benchmarks.gpu_stages.notes import Stage
from benchmarks.on_gpu import StagePlan


def failing(
    *names: str, seconds: float = 20.0, least: float = 0.0, pictures: tuple[str, ...] = ()
) -> list[StagePlan]:
    """The stages of these names below."""
    return [
        StagePlan(name, "how?", f"{__name__}:{name}", seconds, least, pictures) for name in names
    ]


def _finds(stage: Stage) -> None:
    stage.notes.put("Found", f"what {stage.name} found")
    stage.notes.keep(found=stage.name, seconds_had=stage.left)


def ends_well(stage: Stage) -> None:
    _finds(stage)


def raises(stage: Stage) -> None:
    _finds(stage)
    raise ValueError("expected luck, got none")


def has_no_memory(stage: Stage) -> None:
    _finds(stage)
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte")


def aborts(stage: Stage) -> None:
    _finds(stage)
    os.abort()


def hangs(stage: Stage) -> None:
    _finds(stage)
    (stage.folder / "pid").write_text(str(os.getpid()), encoding="ascii")
    threading.Event().wait()


def waits_for_the_report(stage: Stage) -> None:
    """Ends when what it has found is in the report, which is written while it runs."""
    _finds(stage)
    report = Path(os.environ["REPORT"])
    while f"what {stage.name} found" not in report.read_text(encoding="utf-8"):
        assert stage.left > 0
        time.sleep(0.05)


def leaves_pictures(stage: Stage) -> None:
    _finds(stage)
    (stage.folder / "small.png").write_bytes(b"x")
    (stage.folder / "large.png").write_bytes(b"x" * 1001)


def asks_for_a_gpu(stage: Stage) -> None:
    from benchmarks.gpu_stages.device import require_gpu

    require_gpu(stage)
