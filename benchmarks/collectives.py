"""Which transfers between devices does a compiled program make, according to XLA's text?

    python -m benchmarks.collectives

Prints the transfers that `zenflow` adds to a step with one matrix, for the usual placements.
"""

import math
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zenflow_jax

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_LINE = re.compile(rf" = (?P<result>.*?) (?P<kind>{KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")


class Collective(NamedTuple):
    """One operation in a program."""

    kind: str
    nbytes: int  # of its result on one device
    group: int  # number of participating devices

    @property
    def sent(self) -> int:
        """Returns the bytes that each device sends, if a group's devices form a ring."""
        peers = self.group - 1
        shares = {
            "all-reduce": 2 * peers / self.group,  # a reduce-scatter, then an all-gather
            "reduce-scatter": peers,  # each result is one part in `group`
            "collective-permute": 1,
            "collective-broadcast": 1,
        }
        return round(self.nbytes * shares.get(self.kind, peers / self.group))


def collectives(program: str) -> list[Collective]:
    """Returns the operations between devices in a compiled program's text.

    An operation inside a loop is counted once.
    """
    partitions = _PARTITIONS.search(program)
    devices = int(partitions[1]) if partitions else 1
    operations = []
    for line in program.splitlines():
        if match := _LINE.search(line):
            kind, arrays = match["kind"], array_bytes(match["result"])
            # A start also returns its arguments, before the results, except for an all-reduce,
            # whose results look the same.
            if match["start"] and kind != "all-reduce":
                if kind == "collective-permute":
                    arrays = arrays[:2]  # drops two counters at the end
                arrays = arrays[len(arrays) // 2 :]
            operations.append(Collective(kind, sum(arrays), _group(line, devices)))
    return operations


def array_bytes(text: str) -> list[int]:
    """Returns the bytes of each array in XLA's text, such as `bf16[2,3]`."""
    sizes = []
    for name, bits, shape in _ARRAY.findall(text):
        width = 1 if name == "pred" else int(bits) // 8
        sizes.append(width * math.prod(int(n) for n in shape.split(",") if n))
    return sizes


def _group(line: str, devices: int) -> int:
    """Returns the number of devices in a line's groups, in any of XLA's notations."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):  # {{0,1},{2,3}}
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):  # [groups,size]<=[devices]
        return int(match[1])
    ids = r"(?:, device_ids=\([^{]*\))?"
    if match := re.search(rf"replica_groups=mesh\[(.*?)\]{ids} ?\{{(.*?)\}}", line):
        # mesh['axis_0'=4,'axis_1'=2] {'axis_0'}; part of an axis is 'axis_1':(1)2; a different
        # device order is inserted as device_ids=([4,2]T(1,0)).
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[name]) for name, part in named)
    if re.search(r"replica_groups=(?!\{\})", line):
        raise ValueError(f"The device groups cannot be read in {line.strip()[:300]}")
    return devices


def compiled_step(
    tx: optax.GradientTransformation, sharding: NamedSharding, n: int = 4096
) -> jax.stages.Compiled:
    """Compiles a training step with one `n` x `n` bfloat16 matrix and 64 examples per device."""
    mesh = sharding.mesh
    params = {"w": jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=sharding)}
    batch = jax.ShapeDtypeStruct(
        (64 * mesh.size, n),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])),
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(jnp.tanh(batch @ params["w"]).astype(jnp.float32) ** 2)

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step).lower(params, tx.init(params), batch).compile()


def placements(devices: list[Any]) -> dict[str, NamedSharding]:
    """Returns placements of the matrix, whose channels are along its first axis."""

    def on(shape: dict[str, int], *entries: Any) -> NamedSharding:
        mesh = jax.make_mesh(
            tuple(shape.values()),
            tuple(shape),
            axis_types=(AxisType.Auto,) * len(shape),
            devices=devices,
        )
        return NamedSharding(mesh, PartitionSpec(*entries))

    eight = len(devices)
    return {
        "channels over fsdp": on({"fsdp": eight}, "fsdp"),
        "the other axis over fsdp": on({"fsdp": eight}, None, "fsdp"),
        "channels over tensor, the other over fsdp": on(
            {"fsdp": eight // 4, "tensor": 4}, "tensor", "fsdp"
        ),
        "replicated over data": on({"data": eight}),
        "the other axis over fsdp, replicated over data": on(
            {"data": 2, "fsdp": eight // 2}, None, "fsdp"
        ),
        "channels over fsdp, the other over tensor, replicated over data": on(
            {"data": 2, "fsdp": eight // 4, "tensor": 2}, "fsdp", "tensor"
        ),
    }


def main() -> None:
    for name, sharding in placements(jax.devices()).items():
        sgd = compiled_step(optax.sgd(1e-3), sharding)
        zenflow = compiled_step(zenflow_jax.zenflow(1e-3, topk_ratio=0.05), sharding)
        print(name)
        for label, program in (("sgd", sgd), ("zenflow", zenflow)):
            traffic = collectives(program.as_text())
            print(f"  {label:8}", sum(c.nbytes for c in traffic), "bytes:", *map(tuple, traffic))


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
