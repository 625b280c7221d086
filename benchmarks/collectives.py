"""What moves between devices in a compiled program, by what XLA's text of it says.

    python -m benchmarks.collectives

prints what `zenflow` adds to a step of a model with one matrix, for the usual placements.
"""

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import zenflow_jax

KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_LINE = re.compile(rf" = (?P<result>.*?) (?P<kind>{KINDS})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One operation of a program."""

    kind: str
    nbytes: int  # of its result on one device


def collectives(program: str) -> list[Collective]:
    """The operations between devices in the text of a compiled program."""
    found = []
    for line in program.splitlines():
        if match := _LINE.search(line):
            arrays = [_nbytes(*array) for array in _ARRAY.findall(match["result"])]
            # What starts one gives its arguments back too, before the result.
            size = arrays[-1] if match["start"] else sum(arrays)
            found.append(Collective(match["kind"], size))
    return found


def _nbytes(name: str, bits: str, shape: str) -> int:
    width = 1 if name == "pred" else int(bits) // 8
    return width * math.prod(int(n) for n in shape.split(",") if n)


def compiled_step(
    tx: optax.GradientTransformation, sharding: NamedSharding, n: int = 4096
) -> Callable[..., Any]:
    """A training step of one `n` x `n` bfloat16 matrix, with 64 examples a device."""
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
    """Where the matrix is: its channels are along its first axis."""

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
    }


def main() -> None:
    for name, sharding in placements(jax.devices()).items():
        sgd = compiled_step(optax.sgd(1e-3), sharding)
        ours = compiled_step(zenflow_jax.zenflow(1e-3, topk_ratio=0.05), sharding)
        print(name)
        for what, program in (("sgd", sgd), ("zenflow", ours)):
            found = collectives(program.as_text())
            print(f"  {what:8}", sum(c.nbytes for c in found), "bytes:", *map(tuple, found))


if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
