"""What is this machine, and how fast are its parts?

These numbers put the library's own results into perspective. They give the speed of each kind of
transfer between host and device, and of each side's memory, and show whether a copy that starts
between two programs overlaps with the running program, as `send_gradients="after_step"` requires.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.gpu_stages.device import require_gpu
from benchmarks.gpu_stages.notes import Stage, table
from benchmarks.host_adam import stream

_REPEATS = 5


def run(stage: Stage) -> None:
    device = require_gpu(stage)
    small = stage.rehearse
    _name(stage, device)
    # jax first copies NumPy arrays below one GiB to pinned memory.
    for size in (2**20, 2**22) if small else (2**27, 2**30):
        _crossings(stage, device, size)
    _beside(stage, device, *((2**22, 256, 4) if small else (2**30, 8192, 150)))
    _arithmetic(stage, *((2**22, 256) if small else (2**32, 8192)))
    _host_memory(stage, 2**20 if small else 2**27)


def _name(stage: Stage, device: jax.Device) -> None:
    stats = device.memory_stats() or {}
    facts = {
        "device": device.device_kind,
        "compute capability": getattr(device, "compute_capability", "-"),
        "jax may use, GB": f"{stats.get('bytes_limit', 0) / 1e9:.2f}",
        "memory kinds": ", ".join(m.kind for m in device.addressable_memories()),
        **{f"nvidia-smi {name}": value for name, value in machine.gpu().items()},
    }
    stage.notes.put("The device", table(["", ""], facts.items()))
    stage.notes.keep(device=device.device_kind, device_bytes=stats.get("bytes_limit"))


def seconds(work: Callable[[], Any], repeats: int = _REPEATS) -> float:
    """Returns the median time until the results of `work` are ready, after a warm-up call."""
    jax.block_until_ready(work())
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _crossings(stage: Stage, device: jax.Device, size: int) -> None:
    """Measures transfers in GB/s: NumPy memory, and jax's pinned memory."""
    on_device = jax.sharding.SingleDeviceSharding(device)
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    pageable = np.ones(size // 4, np.float32)
    on_gpu = jax.block_until_ready(jax.device_put(pageable, on_device))
    in_pinned = jax.block_until_ready(jax.device_put(on_gpu, pinned))

    # A new array each time, because jax caches the copy of an array.
    new = jax.jit(lambda x: x + 1)

    def up() -> jax.Array:
        return jax.device_put(pageable, on_device, may_alias=False)

    def rate(copy: Callable[[], Any]) -> str:
        return f"{size / seconds(copy) / 1e9:.1f}"

    def nothing() -> str:
        return "-"

    rows = [
        ("NumPy, pageable", lambda: rate(up), nothing),
        ("NumPy, to pinned_host", lambda: rate(lambda: jax.device_put(pageable, pinned)), nothing),
        (
            "jax, pinned_host",
            lambda: rate(lambda: jax.device_put(in_pinned, on_device)),
            lambda: rate(lambda: jax.device_put(on_gpu, pinned)),
        ),
        (
            "`np.asarray` of a kernel's new result",
            nothing,
            lambda: rate(lambda: np.asarray(new(on_gpu))),
        ),
    ]
    known, rates_of = stage.notes.data.get("crossings", {}), {}
    mebibytes = f"{size / 2**20:,.0f} MiB"
    head = [mebibytes, "host to device, GB/s", "device to host, GB/s"]
    for name, inward, outward in rows:
        rates_of[name] = [inward(), outward()]
        cells = ((name, *rates) for name, rates in rates_of.items())
        stage.notes.put(f"Between host and device, {mebibytes}", table(head, cells))
        stage.notes.keep(crossings=known | {mebibytes: rates_of})


def _beside(stage: Stage, device: jax.Device, size: int, width: int, most: int) -> None:
    """Times a copy and a kernel together and one after the other, to see whether they overlap."""
    pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_device = jax.sharding.SingleDeviceSharding(device)
    x = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
    on_gpu = jnp.ones(size // 4, jnp.float32)
    on_host = jax.block_until_ready(jax.device_put(on_gpu, pinned))

    scale = jnp.bfloat16(width**-0.5)  # so that values neither grow nor vanish

    @jax.jit
    def kernel(x: jax.Array, times: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, y: (y @ x) * scale, x)

    copies = {
        "device to pinned_host": lambda: jax.device_put(on_gpu, pinned),
        "pinned_host to device": lambda: jax.device_put(on_host, on_device),
    }
    rows, data = [], {}
    once = seconds(lambda: kernel(x, jnp.int32(1)))
    for name, copy in copies.items():
        alone = seconds(copy)
        # The kernel takes slightly longer than the copy, so "together" is the kernel's time if they
        # overlap, and otherwise the sum.
        times = jnp.int32(min(most, max(1, round(1.5 * alone / once))))
        work = seconds(lambda times=times: kernel(x, times))
        after = seconds(
            lambda copy=copy, times=times: (kernel(x, times).block_until_ready(), copy())
        )
        together = seconds(lambda copy=copy, times=times: (kernel(x, times), copy()))
        hidden = (after - together) / min(alone, work)
        rows.append((name, *(f"{1e3 * s:.2f}" for s in (work, alone, after, together)), hidden))
        data[name] = {"kernel_s": work, "copy_s": alone, "after_s": after, "together_s": together}
    head = ["copy", "kernel, ms", "copy, ms", "one after the other", "together", "hidden"]
    stage.notes.put(
        "Does an eager `device_put` overlap with a kernel?",
        table(head, ([*cells, f"{hidden:.0%}"] for *cells, hidden in rows))
        + "\n\nHidden is the overlapping share of the shorter operation.",
    )
    stage.notes.keep(beside=data)


def _arithmetic(stage: Stage, size: int, width: int) -> None:
    """Measures the top speed of the device's memory and matrix units."""
    x = jnp.ones(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copied = 2 * size / seconds(lambda: copy(x))
    x.delete()
    keys = jax.random.split(jax.random.key(0))
    # Random values, because the units are faster on zeros than on real data.
    a, b = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    product = jax.jit(lambda a, b: a @ b)
    flops = 2 * width**3 / seconds(lambda: product(a, b), 10)
    rows = [
        ("memory, bytes read and written", f"{copied / 1e9:,.0f} GB/s"),
        (f"product of random {width} x {width} bf16 matrices", f"{flops / 1e12:,.1f} TFLOP/s"),
    ]
    stage.notes.put("The device's own speed", table(["", ""], rows))
    stage.notes.keep(device_copy_gb_s=copied / 1e9, matmul_tflop_s=flops / 1e12)


def _host_memory(stage: Stage, size: int) -> None:
    """Measures host memory as an update uses it: per element, 24 bytes read and written, 4 read."""
    arrays = [np.ones(size, np.float32) for _ in range(4)]
    rates: dict[int, float] = {}
    most = machine.cores()
    for threads in sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, 64) if n < most} | {most}):
        edges = np.linspace(0, size, threads + 1).astype(int)
        with ThreadPoolExecutor(threads) as pool:

            def update(pool=pool, edges=edges) -> None:
                list(pool.map(_piece, edges[:-1], edges[1:]))

            def _piece(begin: int, end: int) -> None:
                p, m, v, g = (x[begin:end] for x in arrays)
                stream(p, None, m, v, g, np.float32(0))

            rates[threads] = 28 * size / seconds(update, 3) / 1e9
        rows = [(n, f"{rate:.1f}") for n, rate in rates.items()]
        stage.notes.put("The host's memory", table(["threads", "GB/s"], rows))
        stage.notes.keep(host_gb_s={str(n): rate for n, rate in rates.items()})
