"""Counts a step's matrix products, and asks XLA for the step's device memory."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import Var, jaxprs_in_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax.planning._gpus import GPUS

#: Installs the compiler for GPUs on any x86 machine.
INSTALL = 'pip install "jax[cuda12]"'


def described_mesh(gpu: str, sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of GPUs in one node, to compile a step for; the GPUs need not exist.

    `gpu` is a key of `GPUS`, and `sizes` has each axis' size. Raises a `RuntimeError` without jax's
    CUDA plugin.

    Examples:
        >>> mesh = described_mesh("h100", {"data": 8})  # doctest: +SKIP
        >>> shapes = placed((params, opt_state, batch), mesh)  # doctest: +SKIP
        >>> peak = peak_bytes(step.lower(*shapes).compile())  # doctest: +SKIP
    """
    options = {
        "target_config": GPUS[gpu].description,
        "topology": f"1x1x{math.prod(sizes.values())}",
    }
    try:
        topology = topologies.get_topology_desc(gpu, "cuda", **options)
    # The exception depends on the missing part: the plugin, its libraries, or a wrong version.
    except Exception as error:  # noqa: BLE001
        raise RuntimeError(
            "Compiling for a GPU needs jax's CUDA plugin: "
            f"{str(error).splitlines()[0][:200]}. Install it: {INSTALL}."
        ) from error
    return Mesh(np.array(topology.devices).reshape(*sizes.values()), tuple(sizes))


@functools.cache
def has_compiler() -> bool:
    """Returns whether steps can be compiled for GPUs that this machine does not have."""
    try:
        described_mesh("h100", {"data": 1})
    except RuntimeError:
        return False
    return True


def placed(tree: Any, mesh: Mesh) -> Any:
    """Returns shapes on the mesh, with their own sharding or replicated.

    A described device has no host memory for mail, but jit drops this argument: no step reads it.
    """

    def place(x: Any) -> jax.ShapeDtypeStruct:
        known = getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def peak_bytes(compiled: Any) -> int:
    """Returns a device's peak memory in a compiled step, including its arguments.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> peak_bytes(jax.jit(jnp.sin).lower(jnp.ones(8)).compile())
        64
    """
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def products(jaxpr: Any) -> tuple[float, float]:
    """Counts operations, and bytes read and written, of matrix products and convolutions.

    A loop with an unknown number of iterations counts once; unused results are not counted.
    """
    flops = moved = 0.0
    needed = {x for x in jaxpr.outvars if isinstance(x, Var)}
    for equation in reversed(jaxpr.eqns):
        if needed.isdisjoint(equation.outvars) and not equation.effects:
            continue
        needed |= {x for x in equation.invars if isinstance(x, Var)}
        name = equation.primitive.name
        if name in _TERMS:
            # TF32, for float32 arrays, has half of bfloat16's rate on all GPUs of the table.
            slower = 2 if equation.invars[0].aval.dtype == np.float32 else 1
            size = math.prod(equation.outvars[0].aval.shape)
            flops += 2.0 * slower * size * _TERMS[name](equation)
            moved += sum(nbytes(x.aval) for x in (*equation.invars, *equation.outvars))
        rounds = equation.params["length"] if name == "scan" else 1
        for inner in map(products, jaxprs_in_params(equation.params)):
            flops, moved = flops + rounds * inner[0], moved + rounds * inner[1]
    return flops, moved


def nbytes(x: Any) -> int:
    """Returns the bytes of an array or a shape."""
    return math.prod(x.shape) * x.dtype.itemsize


def _dot_terms(equation: Any) -> int:
    contracted = equation.params["dimension_numbers"][0][0]
    return math.prod(equation.invars[0].aval.shape[i] for i in contracted)


def _convolution_terms(equation: Any) -> int:
    shape = equation.invars[1].aval.shape
    return math.prod(shape) // shape[equation.params["dimension_numbers"].rhs_spec[0]]


def _ragged_dot_terms(equation: Any) -> int:
    # XLA computes products of all rows with all groups on GPUs (jax 0.10.2 to 0.11.2).
    numbers, shape = equation.params["ragged_dot_dimension_numbers"], equation.invars[0].aval.shape
    contracted = numbers.dot_dimension_numbers[0][0]
    # The weights' gradient contracts all rows, and its result has an axis of groups.
    has_groups = set(numbers.lhs_ragged_dimensions) <= set(contracted)
    groups = 1 if has_groups else equation.invars[2].aval.shape[-1]
    return groups * math.prod(shape[i] for i in contracted)


# The number of terms in each element of a result.
_TERMS = {
    "dot_general": _dot_terms,
    "conv_general_dilated": _convolution_terms,
    "ragged_dot": _ragged_dot_terms,
    "ragged_dot_general": _ragged_dot_terms,
}
