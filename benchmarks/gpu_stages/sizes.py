"""Chooses the models and peers of the stages `step_time` and `headline`.

The choice depends only on the sizes of device and host memory. Each peer in
`step_time_peers.py` needs a number of bytes per parameter; the constants are from
`benchmarks/LOG.md`.
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.step_time_model import MODELS, Preset, llama
from train.model.decoder import DecoderConfig

#: Bytes per parameter at a step's peak, with layers written out and scanned; infinite if there is
#: no such step. `benchmarks/LOG.md`, "What do a loss by parts of the vocabulary and cuDNN's
#: attention save?", 1.1 B parameters, 4 x 1024 tokens, compiled for an H200.
STEP_BYTES = {
    "adamw": (14.87, 16.60),
    "parked": (7.95, 6.68),
    "offload": (3.71, 4.67),
    "offload-x4": (6.96, 8.67),
    "zenflow-s4-r0.05": (4.63, 5.21),
    "zenflow-s4-r0.05-streamed": (math.inf, 3.95),
    "zenflow-s4-r0.05-exchange": (4.96, 5.35),
}
#: A gradient in flight while the next step runs (from the same entries).
_COPYING_BYTES = {"zenflow-s4-r0.05-exchange": 2.0}
#: A bf16 model's mail, or its update in flight.
_MAIL_BYTES = 2.0
#: Maximum number of mails at a time: `buffers` in `zenflow_jax/_exchange/pinned.py`, for one leaf
#: and windows of at least 4. Many leaves that take turns need fewer.
_MAILS = {
    "offload": 6,
    "offload-x4": 6,
    "zenflow-s4-r0.05": 9,
    "zenflow-s4-r0.05-streamed": 9,
    "zenflow-s4-r0.05-exchange": 6,
}
#: More than five mails are summed, and so are their squares, in float32 ("Can a window of four be
#: summed at the speed of memory?").
_SUM_BYTES = 8.0
#: Masters, which contain the uploads, and moments; the hand-over of a twentieth of the channels.
_STATE_BYTES, _HAND_OVER_BYTES = 12.0, 0.6
#: Pinned memory for uploads from pageable memory, a leaf or two at a time. Assumed.
_STAGING_BYTES = 1.0
#: Host memory for the system, Python, CUDA and XLA; a process that uses too much is killed, and its
#: stage is lost. Assumed.
HOST_RESERVE = 16e9
#: Weights, masters and moments with AdamW, which are on the device even between steps.
ADAMW_STATE_BYTES = 2.0 + 12.0


class Machine(NamedTuple):
    device_bytes: int  # the limit of jax's allocator
    host_bytes: int


class Part(NamedTuple):
    """Peers to compare at one size; `until` is the time limit, as a share of the stage's time."""

    title: str
    config: DecoderConfig
    scan: bool
    batch: int
    length: int
    peers: tuple[str, ...]  # the most important first
    until: float
    together: bool  # whether all peers fit at the same time


class Headline(NamedTuple):
    """The largest model that a machine trains, and its peer."""

    shape: str
    config: DecoderConfig
    peer: str
    batch: int
    length: int
    parameters: int
    adamw: int  # parameters of the largest model that AdamW trains

    @property
    def beats_adamw(self) -> bool:
        return self.parameters > self.adamw


class Shape(NamedTuple):
    """Sizes of a Llama-like model; some of its layers may be left out."""

    name: str
    sizes: dict[str, int]
    layers: int


SHAPES = (
    Shape("TinyLlama", {"width": 2048, "heads": 32, "kv_heads": 4, "ffn": 5632}, 22),
    Shape("Llama 3.2 3B", {"width": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192}, 28),
    Shape("Llama 2 7B", {"width": 4096, "heads": 32, "kv_heads": 32, "ffn": 11008}, 32),
    Shape("Llama 2 13B", {"width": 5120, "heads": 40, "kv_heads": 40, "ffn": 13824}, 40),
    Shape("Code Llama 34B", {"width": 8192, "heads": 64, "kv_heads": 8, "ffn": 22016}, 48),
    Shape("Llama 2 70B", {"width": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672}, 80),
)
_TINY = (Shape("tiny", {"width": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocabulary": 256}, 1),)
#: A rehearsal's machine; `_TINY` is chosen for it as other shapes are for real machines.
_REHEARSED = Machine(device_bytes=int(3.4e5), host_bytes=int(HOST_RESERVE + 11e5))


def parameters(config: DecoderConfig) -> int:
    """Returns the number of parameters of a decoder without biases, with a separate head."""
    c = config
    attention = c.width * c.head_width * (2 * c.heads + 2 * c.kv_heads)
    layer = attention + 3 * c.width * c.ffn + 2 * c.width
    return 2 * c.vocabulary * c.width + c.layers * layer + c.width


def program(peer: str) -> str:
    """Returns the peer with the same program, as device programs do not depend on windows."""
    return re.sub(r"^zenflow-s\d+-r[\d.]+?(?=-|$)", "zenflow-s4-r0.05", peer)


def device_need(peer: str, *, scan: bool, prefetch: bool) -> float:
    """Returns peak device memory in bytes per parameter, including an engine's memory."""
    peer = program(peer)
    uploads = _MAIL_BYTES if prefetch and peer in _MAILS else 0.0
    return STEP_BYTES[peer][scan] + _COPYING_BYTES.get(peer, 0.0) + uploads


def host_need(peer: str) -> float:
    """Returns peak host memory in bytes per parameter."""
    peer = program(peer)
    if peer not in _MAILS:
        return 12.0 if peer == "parked" else 0.0
    mail = _MAIL_BYTES * _MAILS[peer]
    return _STATE_BYTES + mail + _SUM_BYTES + _HAND_OVER_BYTES + _STAGING_BYTES


def most(peer: str, machine: Machine, *, scan: bool, prefetch: bool) -> float:
    """Returns the number of parameters of the largest model that fits."""
    device = machine.device_bytes / device_need(peer, scan=scan, prefetch=prefetch)
    host = host_need(peer)
    return min(device, (machine.host_bytes - HOST_RESERVE) / host) if host else device


def _half(shape: Shape) -> int:
    return (shape.layers + 1) // 2


def _shapes_upto(
    limit: float, length: int, shapes: Sequence[Shape]
) -> Iterator[tuple[str, DecoderConfig]]:
    """Yields each shape with the most layers (at least half) that fit within `limit`."""
    for shape in shapes:
        for layers in range(shape.layers, _half(shape) - 1, -1):
            config = llama(length, layers=layers, **shape.sizes)
            if parameters(config) <= limit:
                whole = layers == shape.layers
                yield shape.name if whole else f"{shape.name} with {layers} layers", config
                break


def headline(machine: Machine, *, rehearse: bool = False) -> Headline | None:
    """Returns the largest model for this machine; None if even the smallest does not fit.

    Layers are scanned, because written out they would take too long to compile.
    """
    machine = _REHEARSED if rehearse else machine
    length, batch = (32, 1) if rehearse else (1024, 4)
    peers = ("zenflow-s4-r0.05-streamed", "zenflow-s4-r0.05-exchange")
    limits = {p: most(p, machine, scan=True, prefetch=False) for p in peers}
    peer = max(peers, key=limits.__getitem__)  # the first among equals
    fitting = list(_shapes_upto(limits[peer], length, _TINY if rehearse else SHAPES))
    if not fitting:
        return None
    shape, config = max(fitting, key=lambda x: parameters(x[1]))
    # Without a scan, the model needs less.
    adamw = int(most("adamw", machine, scan=False, prefetch=False))
    return Headline(shape, config, peer, batch, length, parameters(config), adamw)


def beyond_adamw(machine: Machine, *, rehearse: bool = False) -> tuple[str, DecoderConfig] | None:
    """Returns the smallest model whose AdamW state alone does not fit on the device.

    Returns:
        The model's name and sizes, or None if it does not fit with any peer.
    """
    machine = _REHEARSED if rehearse else machine
    length = 32 if rehearse else 1024
    least = machine.device_bytes / ADAMW_STATE_BYTES
    rooms = (most(p, machine, scan=True, prefetch=True) for p in _MAILS)
    larger = [
        (shape.name, config)
        for shape in (_TINY if rehearse else SHAPES)
        for layers in range(_half(shape), shape.layers + 1)
        if parameters(config := llama(length, layers=layers, **shape.sizes)) > least
    ]
    if not larger:
        return None
    name, config = min(larger, key=lambda x: parameters(x[1]))
    if parameters(config) > max(rooms):
        return None
    return f"{name} with {config.layers} layers", config


#: Peers, the most important first.
_WRITTEN = (
    "adamw",
    "zenflow-s4-r0.05",
    "offload",
    "parked",
    "zenflow-s4-r0.05-exchange",
    "offload-x4",
    "zenflow-s16-r0.05",
    "zenflow-s8-r0.05",
    "zenflow-s1-r0.05",
)
#: With scanned layers, no work can hide gradients that leave after the scan.
_SCANNED = (
    "adamw",
    "zenflow-s4-r0.05-streamed",
    "zenflow-s4-r0.05-exchange",
    "offload",
    "zenflow-s4-r0.05",
    "parked",
    "offload-x4",
)


def preset_of(rehearse: bool) -> Preset:
    """Returns the model that several stages train."""
    return Preset(llama(32, layers=1, **_TINY[0].sizes), 1, 32) if rehearse else MODELS["1b"]


def step_time(machine: Machine, *, rehearse: bool = False) -> list[Part]:
    """Returns the comparisons of the stage `step_time`, the most important first."""
    limits = _REHEARSED if rehearse else machine
    preset = preset_of(rehearse)
    few, many = preset.batch, 16

    def part(
        peers: Sequence[str], until: float, *, scan: bool, batch: int, name: str = "",
        config: DecoderConfig = preset.config,
    ) -> Part:  # fmt: skip
        title = _title(name, config, scan=scan, tokens=batch * preset.length)
        together = beside_each_other(peers, parameters(config), limits, scan=scan)
        return Part(title, config, scan, batch, preset.length, tuple(peers), until, together)

    # As many peers as fit together, so that each is set up only once. A rehearsal needs only two,
    # because other tests check the peers' results.
    first = _WRITTEN[:2] if rehearse else _leading(_WRITTEN, preset.config, limits, scan=False)
    parts = [part(first, 0.6, scan=False, batch=few)]
    if not rehearse:
        second = _leading(_SCANNED, preset.config, limits, scan=True)
        parts.append(part(second, 0.85, scan=True, batch=many))
    beyond = beyond_adamw(machine, rehearse=rehearse)
    if beyond is not None:
        name, config = beyond
        n = parameters(config)
        rooms = {p: most(p, limits, scan=True, prefetch=True) for p in _SCANNED if p in _MAILS}
        peers = ["adamw", *(p for p, room in rooms.items() if room >= n)]
        peers = peers[:2] if rehearse else peers
        parts.append(part(peers, 1.0, scan=True, batch=few, config=config, name=name))
    return parts


def beside_each_other(peers: Sequence[str], n: int, machine: Machine, *, scan: bool) -> bool:
    """Returns whether peers with `n` parameters each fit in both memories at the same time."""
    device = sum(device_need(peer, scan=scan, prefetch=True) for peer in peers)
    host = sum(host_need(peer) for peer in peers)
    return n * device <= machine.device_bytes and n * host <= machine.host_bytes - HOST_RESERVE


def _leading(
    peers: Sequence[str], config: DecoderConfig, machine: Machine, *, scan: bool
) -> Sequence[str]:
    """Returns as many of the first peers as fit at the same time, but at least four."""
    n = parameters(config)
    count = 4
    while count < len(peers) and beside_each_other(peers[: count + 1], n, machine, scan=scan):
        count += 1
    return peers[:count]


def _title(name: str, config: DecoderConfig, *, scan: bool, tokens: int) -> str:
    how = "scanned" if scan else "written out"
    n = parameters(config)
    size = f"{n / 1e6:,.0f} M parameters" if n >= 1e6 else f"{n:,} parameters"
    return f"{name + ', ' if name else ''}{size}, layers {how}, {tokens:,} tokens per step"
