"""How large a model, too large for AdamW, can be trained here?

`sizes.py` picks the largest Llama shape for device and host memory. The stage trains this model on
real text for 8 steps, from random weights; the stage `step_time` shows that `adamw` does not fit.
"""

import sysconfig
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks import machine
from benchmarks.gpu_stages import sizes
from benchmarks.gpu_stages.device import (
    host_peak_bytes,
    out_of_memory,
    peak_bytes,
    require_gpu,
    usable_bytes,
)
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.gpu_stages.sizes import Headline, Machine
from benchmarks.step_time_model import Model, make_model
from benchmarks.step_time_peers import PEERS, Runner

_STEPS = 8
#: Shares of the machine to try, in case the estimate is too large.
_SHARES = (1.0, 0.85)
#: Time for a second try.
_AGAIN_S = 50.0


def run(stage: Stage) -> None:
    device = require_gpu(stage)
    limits = Machine(usable_bytes(device) or 0, machine.host_bytes())
    for share in _SHARES:
        smaller = Machine(int(share * limits.device_bytes), int(share * limits.host_bytes))
        chosen = sizes.headline(smaller, rehearse=stage.rehearse)
        if chosen is None:
            raise RuntimeError(
                f"The smallest shape in sizes.py does not fit on {smaller}. Use a machine with "
                "more host memory."
            )
        _report_choice(stage, chosen, limits)
        model = make_model(chosen.config, scan_layers=True, remat=True)
        assert model.parameters == chosen.parameters
        try:
            _train(stage, device, chosen, model)
        except RuntimeError as error:
            if not out_of_memory(error) or share == _SHARES[-1] or stage.left < _AGAIN_S:
                raise
            reason = str(error).splitlines()[0][:300]
            stage.notes.put(f"{_size(chosen.parameters)} did not fit", reason)
            continue
        return


def _report_choice(stage: Stage, chosen: Headline, limits: Machine) -> None:
    n = chosen.parameters
    rows = [
        ("the shape", f"{chosen.shape}, {_size(n)}"),
        ("device memory for jax", f"{limits.device_bytes / 1e9:.1f} GB"),
        (
            "host memory",
            f"{limits.host_bytes / 1e9:.1f} GB, {sizes.HOST_RESERVE / 1e9:.0f} reserved",
        ),
        ("method", f"`{chosen.peer}`, `prefetch_bytes=0`, layers scanned and rematerialized"),
        (
            "estimated need",
            f"{n * sizes.device_need(chosen.peer, scan=True, prefetch=False) / 1e9:.1f} GB on the "
            f"device, at most {n * sizes.host_need(chosen.peer) / 1e9:.1f} GB on the host",
        ),
        ("largest model with AdamW, estimated", _size(chosen.adamw)),
    ]
    text = table(["", ""], rows)
    if not chosen.beats_adamw:
        text += (
            "\n\n**On this machine AdamW can train a model of this size: host memory, not device"
            " memory, limits zenflow.**"
        )
    stage.notes.put("The choice, and its reasons", text)
    stage.notes.keep(chosen=chosen._asdict() | {"config": chosen.config._asdict()})


def _train(stage: Stage, device: jax.Device, chosen: Headline, model: Model) -> None:
    tokens = batches(_STEPS, chosen.batch, chosen.length)
    runner = Runner(PEERS[chosen.peer], model, tokens, prefetch_bytes=0)
    losses: list[float] = []
    times: list[float] = []
    start = time.perf_counter()
    ready = 0.0
    try:
        runner.set_up()
        runner.wait()
        ready = time.perf_counter() - start
        for _ in range(_STEPS):
            began = time.perf_counter()
            runner.advance(1)
            runner.wait()
            losses.append(float(runner.loss))
            times.append(time.perf_counter() - began)
            _put(stage, device, chosen, runner, ready, losses, times)
        runner.settle()
        _put(stage, device, chosen, runner, ready, losses, times)
    finally:
        runner.take_down()


def _put(
    stage: Stage,
    device: jax.Device,
    chosen: Headline,
    runner: Runner,
    ready: float,
    losses: list[float],
    times: list[float],
) -> None:
    n, peak, host = chosen.parameters, peak_bytes(device), host_peak_bytes()
    engine = runner.engine
    assert engine is not None
    stats = engine.stats
    later = sorted(times[1:]) or times
    rows = [
        ("steps", f"{len(times)} of {_STEPS}, {chosen.batch} x {chosen.length} tokens each"),
        ("set up", f"{ready:.1f} s"),
        (
            "step with its wait, s",
            ", ".join(f"{s:.2f}" for s in times) + " (the first compiles)",
        ),
        (
            "tokens/s, from the median step",
            f"{chosen.batch * chosen.length / later[len(later) // 2]:,.0f}",
        ),
        ("loss", ", ".join(f"{loss:.3f}" for loss in losses)),
        (
            "device peak, from the allocator",
            "unknown on a CPU"
            if peak is None
            else f"{peak / 1e9:.2f} GB, {peak / n:.2f} per parameter",
        ),
        ("host peak (VmHWM, with pinned)", f"{host / 1e9:.2f} GB, {host / n:.2f} per parameter"),
        ("the engine's arrays, without mail", f"{stats.host_bytes / 1e9:.2f} GB"),
        ("windows, selections", f"{stats.windows}, {stats.reselections}"),
        (
            "the loop waited for the host",
            f"{stats.wait_s:.2f} s; the host worked for {stats.work_s:.2f} s",
        ),
    ]
    stage.notes.put(f"{_size(n)}, trained", table(["", ""], rows))
    stage.notes.keep(
        losses=losses, step_s=times, set_up_s=ready, device_peak_bytes=peak, host_peak_bytes=host
    )


def _size(n: int) -> str:
    return f"{n / 1e9:.2f} B parameters" if n >= 1e8 else f"{n:,} parameters"


def batches(count: int, batch: int, length: int) -> np.ndarray:
    """Returns batches of text from Python's standard library, which every machine has.

    Returns:
        int32 `(count, batch, length + 1)`; a token is a byte.
    """
    needed = count * batch * (length + 1)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if len(text) >= needed:
            break
        text += path.read_bytes()
    tokens = np.frombuffer(bytes(text[:needed]), np.uint8).astype(np.int32)
    return tokens.reshape(count, batch, length + 1)
