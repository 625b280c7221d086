"""Where does the time of a step go?

The engine's own record of 12 steps, as a picture and as a trace for Perfetto: of the default, and
of the peer that the stage `step_time` found farthest behind `adamw`, at the size where it was so.
"""

from typing import Any, NamedTuple

import numpy as np

import zenflow_jax
from benchmarks.gpu_stages import machine, plan
from benchmarks.gpu_stages.device import require_gpu, usable_bytes
from benchmarks.gpu_stages.notes import Stage
from benchmarks.gpu_stages.plan import Machine, Part
from benchmarks.step_time import BATCHES
from benchmarks.step_time_model import make_model
from benchmarks.step_time_peers import PEERS, Runner

_DEFAULT = "zenflow-s4-r0.05"
_STEPS = 12
#: What a second picture takes at least, if its program is compiled.
_LEAST_S = 12.0


class _Worst(NamedTuple):
    part: Part
    peer: str
    idle: float


def run(stage: Stage) -> None:
    device = require_gpu(stage)
    here = Machine(usable_bytes(device) or 0, machine.host_bytes())
    parts = plan.step_time(here, rehearse=stage.rehearse)
    _record(stage, parts[0], _DEFAULT, "The default", "timeline.png", "trace.json")
    worst = _find_worst(stage.of("step_time").get("parts", {}), parts)
    if worst is None:
        title, why = "The worst pair", "Not run: `step_time` has found no peer behind `adamw`."
        stage.notes.put(title, why)
    elif stage.left < _LEAST_S and not stage.rehearse:
        stage.notes.put("The worst pair", f"Not run: {stage.left:.0f} s were left.")
    else:
        title = f"The worst pair: `{worst.peer}` beside `adamw`, {worst.idle:.1%} idle"
        _record(stage, worst.part, worst.peer, title, "timeline_worst.png", "trace_worst.json")


def _find_worst(figures: dict[str, Any], parts: list[Part]) -> _Worst | None:
    """The engine's peer that needs most more than `adamw` does at the same size."""
    by_title = {part.title: part for part in parts}
    found = [
        _Worst(by_title[title], peer, f["idle"])
        for title, peers in figures.items()
        for peer, f in peers.items()
        if f["idle"] is not None and PEERS[peer].offloads and title in by_title
    ]
    return max(found, key=lambda worst: worst.idle, default=None)


def _record(stage: Stage, part: Part, peer: str, title: str, picture: str, trace: str) -> None:
    model = make_model(part.config, scan_layers=part.scan, remat=True)
    rng = np.random.default_rng(0)
    shape = (BATCHES, part.batch, part.length + 1)
    runner = Runner(PEERS[peer], model, rng.integers(part.config.vocabulary, size=shape, dtype="i"))
    try:
        runner.set_up()
        # All is compiled, and an update is on its way at any time, as in the midst of a run.
        window = runner.peer.window
        runner.advance(max(3 * window, _whole(_STEPS, window)) + _whole(_STEPS, window))
        runner.wait()
        engine = runner.engine
        assert engine is not None
        timeline, stats = engine.timeline, engine.stats
        runner.settle()
    finally:
        runner.take_down()
    steps = timeline.steps[-_STEPS:]
    zenflow_jax.plot_timeline(timeline, stage.folder / picture, steps=steps)
    zenflow_jax.save_trace(timeline.during(steps), stage.folder / trace)
    start, end = timeline.bounds(steps)
    stage.notes.put(
        title,
        f"`{peer}`, {part.title}: {len(steps)} steps in {1e3 * (end - start):,.1f} ms. Of all "
        f"{stats.steps} steps the loop waited {stats.wait_s:.3f} s for the host, which worked "
        f"{stats.work_s:.3f} s (mail taken in {stats.sum_s:.3f}, updates {stats.update_s:.3f}, "
        f"hand-overs {stats.hand_over_s:.3f}); uploads were under way for {stats.upload_s:.3f} s, "
        f"mail after its step for {stats.mail_s:.3f}. How to read the picture: docs/timeline.md; "
        f"{trace} opens in ui.perfetto.dev.\n\n![{peer}]({picture})",
    )
    stage.notes.keep(**{picture.removesuffix(".png"): {"peer": peer, "part": part.title}})


def _whole(steps: int, window: int) -> int:
    """At least so many steps, in whole windows."""
    return -(-steps // window) * window
