"""What do others need for the same model?

The first comparison of `step_time` (1.1 B parameters, layers written out, 4 x 1024 tokens) by what
is not made of this library's parts. Each rival has a process of its own and is left out, with the
reason, where it is not installed. Sixteen steps are timed after three.

    python -m benchmarks.gpu_stages.rivals torch-adamw found.json
"""

import argparse
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_stages.machine import NotHere, missing
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.gpu_stages.plan import RIVAL_STEPS, RIVAL_WARM_UP

_ROOT = Path(__file__).resolve().parents[2]
#: A rival is not begun with less.
_LEAST_S = 15.0


class Found(NamedTuple):
    step_s: float  # median
    device_peak_bytes: int | None
    parameters: int
    loss: float  # after the last step


class Rival(NamedTuple):
    name: str
    what: str
    needs: tuple[str, ...]  # modules
    run: Callable[[bool], Found]  # of whether it is a rehearsal


def _flash(rehearse: bool) -> Found:
    """8-bit Adam, all on the device: bf16 weights with error bits, moments in 8 bits."""
    import flashoptim_jax  # pyright: ignore[reportMissingImports]
    import jax
    import numpy as np
    import optax

    from benchmarks.gpu_stages import plan
    from benchmarks.gpu_stages.plan import Machine
    from benchmarks.step_time import turn
    from benchmarks.step_time_model import committed, make_model
    from benchmarks.step_time_peers import (
        LEARNING_RATE,
        MAX_GRAD_NORM,
        WEIGHT_DECAY,
        Optimizer,
        Peer,
        Runner,
    )
    from benchmarks.step_time_report import Result

    # Its fused kernels are Triton's, which a CPU has not.
    tx = flashoptim_jax.flash_adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=not rehearse)
    clip = optax.clip_by_global_norm(MAX_GRAD_NORM)

    def apply(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        gradients, _ = clip.update(gradients, clip.init(params))
        return tx.step(params, state, gradients)

    def make() -> Optimizer:
        return Optimizer(lambda params: committed(tx.init(params)), apply, tx.init)

    part = plan.step_time(Machine(0, 0), rehearse=rehearse)[0]
    model = make_model(part.config, scan_layers=part.scan, remat=True)
    shape = (4, part.batch, part.length + 1)
    tokens = np.random.default_rng(0).integers(part.config.vocabulary, size=shape, dtype=np.int32)
    result = Result("flashoptim-jax")
    runner = Runner(Peer("flashoptim-jax", make), model, tokens)
    try:
        runner.set_up()
        runner.advance(RIVAL_WARM_UP)
        runner.wait()
        turn(runner, result, steps=RIVAL_STEPS, stretches=1)
        loss = float(runner.loss)
    finally:
        runner.take_down()
    stats = jax.devices()[0].memory_stats() or {}
    return Found(result.step_s[0], stats.get("peak_bytes_in_use"), model.parameters, loss)


def _torch(way: str) -> Callable[[bool], Found]:
    def run(rehearse: bool) -> Found:
        from benchmarks.gpu_stages import torch_rivals

        return Found(*torch_rivals.measure(way, rehearse=rehearse))

    return run


_DEEPSPEED = ("torch", "deepspeed")
#: Our nearest first.
RIVALS = (
    Rival("flashoptim-jax", "8-bit Adam on the device", ("flashoptim_jax",), _flash),
    Rival("torch-adamw", "fused AdamW on float32 masters", ("torch",), _torch("adamw")),
    Rival("deepspeed-offload", "ZeRO-2, AdamW on the host", _DEEPSPEED, _torch("offload")),
    Rival("deepspeed-zenflow", "DeepSpeed's own ZenFlow, S = 4", _DEEPSPEED, _torch("zenflow")),
)


def run(stage: Stage) -> None:
    rows, data, failed = [], {}, []
    for rival in RIVALS:
        absent = missing(rival.needs)
        if absent:
            said, found = f"not run: {', '.join(absent)} not installed", None
        elif stage.left < _LEAST_S:
            said, found = f"not run: {max(stage.left, 0):.0f} s were left", None
        else:
            said, found = _ask(stage, rival)
        if said.startswith("failed"):
            failed.append(rival.name)
        cells = ("-",) * 4 if found is None else _cells(Found(**found))
        rows.append((rival.name, rival.what, *cells, said))
        data[rival.name] = {"said": said} | (found or {})
        head = ["rival", "what", "step, ms", "device peak, GB", "a parameter", "loss", ""]
        reference = stage.of("step_time").get("parts", {})
        first = next(iter(reference.values()), {})
        more = [f"{name} {f['step_ms']:.1f} ms" for name, f in list(first.items())[:2]]
        stage.notes.put(
            "The same model, others' ways",
            table(head, rows)
            + (f"\n\nBeside them, from `step_time`: {', '.join(more)}." if more else "")
            + "\n\nThe code for rivals that did not run here has never run on a GPU.",
        )
        stage.notes.keep(rivals=data)
    if failed:
        raise RuntimeError(f"{', '.join(failed)} failed; the log says how")


def _ask(stage: Stage, rival: Rival) -> tuple[str, dict[str, Any] | None]:
    path = stage.folder / f"{rival.name}.found.json"
    command = [sys.executable, "-m", "benchmarks.gpu_stages.rivals", rival.name, str(path)]
    command += ["--rehearse"] if stage.rehearse else []
    try:
        status = subprocess.run(command, cwd=_ROOT, timeout=stage.left - 2, check=False).returncode
    except subprocess.TimeoutExpired:
        return "not run: time was over before it had", None
    if not path.exists():
        return f"failed: exit status {status}", None
    found = json.loads(path.read_text(encoding="utf-8"))
    if "not_run" in found:
        return f"not run: {found['not_run']}", None
    if "failed" in found:
        return f"failed: {found['failed']}", None
    return "ran", found


def _cells(found: Found) -> tuple[str, str, str, str]:
    peak = found.device_peak_bytes
    return (
        f"{1e3 * found.step_s:.1f}",
        "-" if peak is None else f"{peak / 1e9:.2f}",
        "-" if peak is None else f"{peak / found.parameters:.2f}",
        f"{found.loss:.3f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=[rival.name for rival in RIVALS])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    (rival,) = [rival for rival in RIVALS if rival.name == args.name]
    try:
        found: dict[str, Any] = rival.run(args.rehearse)._asdict()
    except Exception as error:  # noqa: BLE001 - another's code: whatever it is, the report says it
        traceback.print_exc()
        kind = "not_run" if type(error).__name__ == NotHere.__name__ else "failed"
        found = {kind: f"{type(error).__name__}: {error}"[:300].replace("\n", " ")}
    args.path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
