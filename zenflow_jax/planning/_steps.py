"""Counts a step's matrix products, and asks XLA for the step's device memory."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from zenflow_jax._spec.mesh import HasShape
from zenflow_jax.planning._gpus import GPUS

#: Installs the compiler for GPUs on any x86 machine.
INSTALL = 'pip install "jax[cuda12]"'


def described_mesh(gpu: str, sizes: Mapping[str, int]) -> Mesh:
    """Returns a mesh of GPUs in one node, to compile a step for; the GPUs need not exist.

    `gpu` is a key of `GPUS`, and `sizes` has each axis' size. Raises a `RuntimeError` without jax's
    CUDA plugin.
    """
    options, target = {"topology": f"1x1x{math.prod(sizes.values())}"}, GPUS[gpu].description
    try:
        topology = topologies.get_topology_desc(gpu, "cuda", target_config=target, **options)
    # The exception depends on the missing part: the plugin, its libraries, or a wrong version.
    except Exception as error:  # noqa: BLE001
        text = str(error).splitlines()[0][:200]
        raise RuntimeError(
            f"Compiling for a GPU failed: {text}. Install jax's CUDA plugin: {INSTALL}."
        ) from error
    return Mesh(np.array(topology.devices).reshape(*sizes.values()), tuple(sizes))


def placed(tree: PyTree, mesh: Mesh) -> PyTree:
    """Returns shapes on the mesh, with their own sharding or replicated.

    A described device has no host memory for mail, but jit drops this argument: no step reads it.
    """

    def place(x: HasShape) -> jax.ShapeDtypeStruct:
        known = getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)


def peak_bytes(compiled: Any) -> int:
    """Returns a device's peak memory in a compiled step, including its arguments."""
    sizes = compiled.memory_analysis()
    ends = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return ends + sizes.temp_size_in_bytes


def products(jaxpr: Any) -> float:
    """Counts the operations of matrix products and convolutions, at the bfloat16 rate.

    A loop with an unknown number of iterations counts once; unused results are not counted.
    """
    live: Any = dce_jaxpr(jaxpr, True)[0]
    flops = 0.0
    for equation in live.eqns:
        name = equation.primitive.name
        if name in _TERMS:
            # TF32, for float32 arrays, has half of bfloat16's rate on all GPUs of the table.
            slower = 2 if equation.invars[0].aval.dtype == np.float32 else 1
            size = math.prod(equation.outvars[0].aval.shape)
            flops += 2.0 * slower * size * _TERMS[name](equation)
        rounds = equation.params["length"] if name == "scan" else 1
        flops += rounds * sum(map(products, jaxprs_in_params(equation.params)))
    return flops


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
