"""Do all ways of sending gradients give the same results, at full size?

A model is trained in each way for some steps, with donated parameters and state, from the same
weights on the same text. Losses and weights are compared with those of `after_step`, whose step
makes no copies. `during_step` must be bit-identical. With streamed layers, the compiler makes a
different program from the same arithmetic, so losses and final leaves need only be close. The table
also contains the time of a step including its wait, in windows of one step.
"""

import hashlib
import statistics
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.gpu_stages.device import require_gpu
from benchmarks.gpu_stages.headline import batches
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.gpu_stages.sizes import preset_of
from benchmarks.step_time_model import Model, make_model
from benchmarks.step_time_peers import Runner, zenflow_peer

_STEPS = 8
_WAYS: dict[str, dict[str, Any]] = {
    "after_step": {"send_gradients": "after_step"},
    "during_step": {},
    "gradients stream": {"stream": True},
}
#: The ways of sending gradients; all others are compared with the first.
_WRITTEN = ("after_step", "during_step")
_SCANNED = ("after_step", "gradients stream")
#: Relative tolerances for losses and for a leaf's change, because bf16 matmuls are computed in
#: another order. Assumed, not measured on a GPU; lost or doubled updates differ by more.
_OF_LOSS, _OF_MOVES = 1e-2, 0.2


class End(NamedTuple):
    losses: list[float]
    step_s: float  # the median after the second step
    digest: str  # a hash of all weights' bits
    samples: list[np.ndarray]  # some values of each leaf


def run(stage: Stage) -> None:
    require_gpu(stage)
    rows: list[tuple[str, ...]] = []
    parts = ((_WRITTEN, False), (_SCANNED, True))
    for ways, scan in parts[1:] if stage.rehearse else parts:
        preset = preset_of(stage.rehearse)
        model = make_model(preset.config, scan_layers=scan, remat=True)
        tokens = batches(_STEPS, preset.batch, preset.length) % preset.config.vocabulary
        start = _samples(model.draw())
        first: End | None = None
        for way in ways:
            size = f"{model.parameters:,}, {'scanned' if scan else 'written out'}"
            try:
                end = _train(model, way, tokens)
                verdict = compared(end, first or end, start, must_be_same=not scan)
                first = first or end
            except Exception as error:  # noqa: BLE001 - a failing way must not stop the next
                end, verdict = None, f"FAILED, {type(error).__name__}: {str(error)[:300]}"
            losses = ", ".join(f"{loss:.4f}" for loss in end.losses) if end else "-"
            rows.append((size, way, losses, f"{end.step_s:.3f}" if end else "-", verdict))
            header = ["parameters", "way", "losses", "a step, s", "compared with the first"]
            stage.notes.put("Losses, and weights at the end", table(header, rows))
            stage.notes.keep(ways=rows)
            if first is None:
                break  # without this run, the rest have nothing to compare with
    failed = [f"{way}: {verdict}" for _, way, *_, verdict in rows if verdict.startswith("FAILED")]
    if failed:
        raise AssertionError(f"{len(failed)} of {len(rows)} failed; the first was {failed[0]}")


def _train(model: Model, way: str, tokens: np.ndarray) -> End:
    runner = Runner(zenflow_peer(1, 0.05, **_WAYS[way]), model, tokens)
    try:
        runner.set_up()
        losses, times = [], []
        for _ in tokens:
            begin = time.perf_counter()
            runner.advance(1)
            losses.append(float(runner.loss))
            times.append(time.perf_counter() - begin)
        runner.settle()
        return end_of(losses, statistics.median(times[2:]), runner.params)
    finally:
        runner.take_down()


def end_of(losses: list[float], step_s: float, params: Any) -> End:
    """Returns the end of a run, from its losses and its last weights."""
    digest = hashlib.sha256()
    for x in jax.tree.leaves(params):
        digest.update(np.asarray(x).ravel().view(np.uint8))
    return End(losses, step_s, digest.hexdigest(), _samples(params))


def _samples(params: Any) -> list[np.ndarray]:
    return [np.asarray(x).ravel()[::61].astype(np.float32) for x in jax.tree.leaves(params)]


def compared(end: End, first: End, start: list[np.ndarray], *, must_be_same: bool) -> str:
    if not np.isfinite(end.losses).all():
        return "FAILED: a loss is not finite"
    if end.digest == first.digest and end.losses == first.losses:
        return "bit-identical"
    pairs = zip(end.losses, first.losses, strict=True)
    of_loss = max(abs(loss - expected) / expected for loss, expected in pairs)
    moves = (np.linalg.norm(x - y) for x, y in zip(first.samples, start, strict=True))
    apart = (np.linalg.norm(x - y) for x, y in zip(end.samples, first.samples, strict=True))
    of_moves = np.max([x / max(move, 1e-30) for x, move in zip(apart, moves, strict=True)])
    verdict = f"losses differ by {of_loss:.1e}, the worst leaf by {of_moves:.1e} of its change"
    near = of_loss <= _OF_LOSS and of_moves <= _OF_MOVES
    return verdict if near and not must_be_same else f"FAILED: {verdict}"
