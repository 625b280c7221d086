"""What would the deferred half of Llama-2-7B cost on 8 GPUs, and that of 70B on 64? On paper.

    python -m benchmarks.projection

Counts come from the placements that `zenflow` gives its state, seconds from the assumptions below.
Answers: `benchmarks/LOG.md`.
"""

import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zenflow_jax
from zenflow_jax._exchange.pinned import buffers
from zenflow_jax.planning._gpus import GPUS
from zenflow_jax.planning._memory import host_memory
from zenflow_jax.planning._plans import EFFICIENCY

INTERVAL = 4
RATIO = 0.05

# Assumed.
NODE = 8  # GPUs
GPU = GPUS["h100"]
FLOPS, UTILIZATION = GPU.flops, EFFICIENCY
TO_HOST = GPU.bus  # bytes a second over PCIe into pinned memory
TO_DEVICE_STAGED, TO_DEVICE = 13e9, 53e9  # from NumPy memory as it is, and from registered memory
HOST_MEMORY = GPU.host_beside(NODE)[0]  # bytes a second of a node


class Llama(NamedTuple):
    name: str
    layers: int
    width: int
    ffn: int
    keys: int  # width of keys and of values
    vocabulary: int = 32000

    def leaves(self) -> list[tuple[int, tuple[int, ...]]]:
        """How many there are of each shape."""
        d, f, kv, layers = self.width, self.ffn, self.keys, self.layers
        return [
            (2 * layers, (d, d)),
            (2 * layers, (d, kv)),
            (2 * layers, (d, f)),
            (layers, (f, d)),
            (1, (self.vocabulary, d)),
            (1, (d, self.vocabulary)),
            (2 * layers + 1, (d,)),
        ]

    @property
    def parameters(self) -> int:
        return sum(count * math.prod(shape) for count, shape in self.leaves())


SMALL = Llama("Llama-2-7B", 32, 4096, 11008, 4096)
LARGE = Llama("Llama-2-70B", 80, 8192, 28672, 1024)


class Costs(NamedTuple):
    """Bytes, of leaves that travel."""

    mail: int  # of one device and step
    upload: int  # to one device, a window
    gathered: int  # by one device from others, a window
    elements: int  # whose state one node keeps
    pinned: int  # mail in one node, at most


def costs(model: Llama, mesh: Mesh, partition: bool) -> Costs:
    """From the placements that `zenflow` gives to its state."""
    spec = PartitionSpec(None, "fsdp") if "fsdp" in mesh.shape else PartitionSpec()
    matrices = [(count, shape) for count, shape in model.leaves() if len(shape) == 2]
    params = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for _, shape in matrices
    ]
    tx = zenflow_jax.zenflow(1e-4, topk_ratio=RATIO, partition_replicated=partition)
    state = zenflow_jax.find_state(tx.init(params))
    mails = buffers(in_full(model))
    node = set(mesh.devices.flat[:NODE])
    total = Costs(0, 0, 0, 0, 0)
    for (count, shape), p, mail in zip(matrices, params, state.mail, strict=True):
        size = p.dtype.itemsize
        part = math.prod(mail.sharding.shard_shape(mail.shape))
        block = math.prod(p.sharding.shard_shape(shape))
        there = mail.sharding.devices_indices_map(mail.shape)
        kept = part * len({str(index) for device, index in there.items() if device in node})
        pinned = part * size * NODE * mails
        one = (part * size, part * size, (block - part) * size, kept, pinned)
        total = Costs(*(a + count * b for a, b in zip(total, one, strict=True)))
    return total


def in_full(model: Llama) -> zenflow_jax.ZenFlowState:
    """The state of all leaves, without devices."""
    shapes = [shape for count, shape in model.leaves() for _ in range(count)]
    params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    tx = zenflow_jax.zenflow(1e-4, topk_ratio=RATIO, update_interval=INTERVAL)
    return zenflow_jax.find_state(tx.init(params))


def largest_group(model: Llama) -> float:
    """The share of the offloaded parameters that are in the largest group."""
    sizes = dict.fromkeys(range(INTERVAL), 0)
    for leaf in in_full(model).leaves:
        if not leaf.spec.resident:
            sizes[leaf.spec.group] += math.prod(leaf.spec.shape)
    return max(sizes.values()) / sum(sizes.values())


def main() -> None:
    print(
        f"S = {INTERVAL}, ratio {RATIO}, bfloat16 leaves, nodes of {NODE} GPUs. Assumed:"
        f" {FLOPS / 1e12:.0f} TFLOP/s of which {UTILIZATION:.0%} are used, 6 FLOP a parameter and"
        f" token;\n{TO_HOST / 1e9:.0f} GB/s to the host, {TO_DEVICE_STAGED / 1e9:.0f} staged and"
        f" {TO_DEVICE / 1e9:.0f} registered to the device, {HOST_MEMORY / 1e9:.0f} of host memory"
    )
    print(
        "model, mesh, parts | a device, GB: mail a step, update a window, gathered a window |"
        " a node: host arrays, GB, and pinned mail, GB, at most"
    )
    # Where `fsdp` does not span all devices, `data` is the axis that crosses nodes.
    for model, sizes, partition in (
        (SMALL, {"data": 8}, True),
        (SMALL, {"data": 8}, False),
        (SMALL, {"fsdp": 8}, True),
        (LARGE, {"fsdp": 64}, True),
        (LARGE, {"data": 8, "fsdp": 8}, True),
        (LARGE, {"data": 8, "fsdp": 8}, False),
    ):
        count = math.prod(sizes.values())
        mesh = Mesh(np.array(jax.devices()[:count]).reshape(tuple(sizes.values())), tuple(sizes))
        c = costs(model, mesh, partition)
        need = host_memory(in_full(model))
        offloaded = sum(count * math.prod(shape) for count, shape in model.leaves() if shape[1:])
        host = c.elements * need.state / offloaded
        name = f"{model.name}, " + " ".join(f"{k}={v}" for k, v in sizes.items())
        print(
            f"{name:28} {'parts' if partition else 'whole'}",
            f"{c.mail / 1e9:6.3f} {c.upload / 1e9:6.3f} {c.gathered / 1e9:6.2f}",
            f"{host / 1e9:7.1f} {c.pinned / 1e9:6.1f}",
            sep="  ",
        )
        _print_seconds(model, c)


def _print_seconds(model: Llama, c: Costs) -> None:
    # Of a parameter and window: mail is written by the device (2) and read by Adam (2), which reads
    # and writes masters and moments (24), half of the masters is read again and uploaded (2).
    adam = (INTERVAL * 2 + 24) * c.elements / HOST_MEMORY
    host = (INTERVAL * (2 + 2) + 24 + 2) * c.elements / HOST_MEMORY
    share = largest_group(model)
    for tokens in (4096, 8192):
        step = 6 * model.parameters * tokens / (FLOPS * UTILIZATION)
        window = INTERVAL * step
        print(
            f"    {tokens} tokens a device: step {step:.3f} s, mail {c.mail / TO_HOST:.3f} s;"
            f" window {window:.2f} s, update staged {c.upload / TO_DEVICE_STAGED:.3f} s or"
            f" registered {c.upload / TO_DEVICE:.3f} s, host {host:.2f} s (Adam {adam:.2f} s);"
            f" host memory must do {host * HOST_MEMORY / window / 1e9:.0f} GB/s;"
            f" the host must hide {host:.2f} s behind {window:.2f} s where windows close at once,"
            f" at most {share * host:.3f} s behind {step:.3f} s where leaves take turns"
        )


if __name__ == "__main__":
    # Shapes are put on so many devices; nothing is computed.
    jax.config.update("jax_platforms", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=64"
    main()
