"""Steps compiled for GPUs that need not be there: what XLA itself says of their memory."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zenflow_jax.planning._gpus import GPUS

#: What brings the compiler for GPUs, on any x86 machine.
INSTALL = 'pip install "jax[cuda12]"'


def described_mesh(gpu: str, sizes: Mapping[str, int]) -> Mesh:
    """GPUs that need not be there, in one node.

    Args:
        gpu: A key of `GPUS`.
        sizes: Of the axes.

    Raises:
        RuntimeError: If jax's CUDA plugin is not installed.
    """
    count = math.prod(sizes.values())
    try:
        topology = topologies.get_topology_desc(
            gpu, "cuda", target_config=GPUS[gpu].description, topology=f"1x1x{count}"
        )
    # What is raised differs with what is missing: the plugin, its libraries, or another version.
    except Exception as error:  # noqa: BLE001
        raise RuntimeError(
            "expected jax's CUDA plugin, with which a step can be compiled for a GPU that is not "
            f"there, got: {str(error).splitlines()[0][:200]}. Install it: {INSTALL}."
        ) from error
    auto = (AxisType.Auto,) * len(sizes)
    devices = np.array(topology.devices).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=auto)


@functools.cache
def has_compiler() -> bool:
    """Whether steps can be compiled for GPUs that are not there."""
    try:
        described_mesh("h100", {"data": 1})
    except RuntimeError:
        return False
    return True


def placed(tree: Any, mesh: Mesh) -> Any:
    """Shapes that lie on the mesh as they say, or whole on each device.

    A described device has no host memory to put arguments in. A step reads no mail, so jit drops
    those, and their place does not matter.
    """

    def one(x: Any) -> jax.ShapeDtypeStruct:
        known = getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, tree)


def peak_bytes(compiled: Any) -> int:
    """The memory of one device that a compiled step takes at its peak, its arguments included."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
