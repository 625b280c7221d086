"""How long does a training step take, compared with all alternatives?

Runs `benchmarks/step_time.py` with the peers and sizes in `sizes.py`, the most valuable first,
as far as time permits. The report contains a new table after every round.
"""

import dataclasses
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, step_time
from benchmarks.gpu_stages import sizes
from benchmarks.gpu_stages.device import out_of_memory, require_gpu, usable_bytes
from benchmarks.gpu_stages.notes import Stage
from benchmarks.gpu_stages.sizes import Machine, Part
from benchmarks.step_time_memory import trace_step
from benchmarks.step_time_model import Model, make_model
from benchmarks.step_time_peers import PEERS, Peer
from benchmarks.step_time_report import Comparison, figures, table

#: A part does not start if less time than this is left per billion parameters, because it would not
#: produce results: making the host's masters and moments cannot be interrupted. Assumed.
_LEAST_S = 18.0
#: More rounds than needed: most parts run out of time first.
_ROUNDS = 7
_STEPS = 16  # timed steps in a turn: a whole number of windows for every peer


def run(stage: Stage) -> None:
    device = require_gpu(stage)
    limits = Machine(usable_bytes(device) or 0, machine.host_bytes())
    began, whole = time.monotonic(), stage.left
    done: dict[str, Comparison] = {}
    failed = []
    for part in sizes.step_time(limits, rehearse=stage.rehearse):
        until = min(began + part.until * whole, stage.until - 2)
        left, least = until - time.monotonic(), _LEAST_S * sizes.parameters(part.config) / 1e9
        if left < least and not stage.rehearse:
            why = f"Not run: it needs {least:.0f} s, but only {max(left, 0):.0f} s were left."
            stage.notes.put(part.title, f"{why} `--only step_time` leaves time for more.")
            continue
        try:
            _compare(stage, part, until, done)
        except Exception as error:  # noqa: BLE001 - the next part may succeed
            traceback.print_exc()
            reason = "the device is out of memory" if out_of_memory(error) else repr(error)[:500]
            stage.notes.put(f"{part.title}: failed", reason)
            failed.append(part.title)
    if not any(figures(c) for c in done.values()):
        raise RuntimeError("No peer completed a turn, so there are no step times.")
    if failed:
        raise RuntimeError(f"{len(failed)} parts failed; the first was {failed[0]}")


def _compare(stage: Stage, part: Part, until: float, done: dict[str, Comparison]) -> None:
    model = make_model(part.config, scan_layers=part.scan, remat=True)
    assert model.parameters == sizes.parameters(part.config)

    def save(comparison: Comparison) -> None:
        done[part.title] = comparison
        stage.notes.put(part.title, table(comparison) + "\n\n" + _words(part, comparison))
        stage.notes.keep(
            parts={title: figures(c) for title, c in done.items()},
            # Keeps all samples, not only medians.
            samples=[dataclasses.asdict(c) for c in done.values()],
        )

    print(f"== {part.title}", flush=True)
    peers = [PEERS[name] for name in part.peers]
    before = _compile_ahead(peers, model, part)
    step_time.compare(
        model,
        peers,
        batch=part.batch,
        length=part.length,
        vocabulary=part.config.vocabulary,
        rounds=1 if stage.rehearse else _ROUNDS,
        steps=_STEPS,
        resident="all" if part.together else "one",
        save=save,
        until=None if stage.rehearse else until,
    )
    late = stage.notes.data.get("compiled_late", 0) + _compiled() - before
    stage.notes.keep(compiled_late=late, compiled=_compiled())


def _compile_ahead(peers: Sequence[Peer], model: Model, part: Part) -> int:
    """Compiles all peers' steps into the cache, in parallel; returns the number of steps in the
    cache.

    Compiling takes most of a first turn, and one compilation uses few cores.
    """
    start = time.monotonic()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")

    def on(x: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    lowered = []
    for peer in {sizes.program(peer.name): peer for peer in peers}.values():
        traced, _ = trace_step(
            peer, model, part.batch, part.length, lambda x: on(x, device), lambda x: on(x, host)
        )
        lowered.append(traced.lower())
    with ThreadPoolExecutor(max(1, machine.cores() // 3)) as pool:
        for _ in pool.map(lambda x: x.compile(), lowered):
            pass
    seconds = time.monotonic() - start
    print(f"compiled ahead: {len(lowered)} programs in {seconds:.1f} s", flush=True)
    return _compiled()


def _compiled() -> int:
    """Returns the number of steps in the cache."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return len(list(Path(folder).glob("jit_step-*-cache"))) if folder else 0


def _words(part: Part, comparison: Comparison) -> str:
    measured = [len(r.step_s) for r in comparison.results if r.step_s]
    rounds = f"{min(measured)} to {max(measured)} turns" if measured else "no turn yet"
    where = "all peers in memory at once" if part.together else "one peer in memory at a time"
    return (
        f"{rounds} of {_STEPS} steps for each peer, in turns, {where}; {comparison.batch} x "
        f"{comparison.length} tokens, {jax.devices()[0].device_kind}. Bytes are per parameter."
    )
