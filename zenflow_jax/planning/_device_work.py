"""What a device has to do in a step: its matrix products, by the step's trace."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


class DeviceWork(NamedTuple):
    flops: float
    moved_bytes: float  # operands that are read, and results that are written

    def of_each(self, devices: int) -> "DeviceWork":
        """The share of each device."""
        return DeviceWork(self.flops / devices, self.moved_bytes / devices)


def products(jaxpr: Jaxpr) -> DeviceWork:
    """All matrix products and convolutions of a step.

    Of a loop whose number of rounds is not known, one is counted.
    """
    flops = moved = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in _FLOPS:
            flops += _FLOPS[name](equation)
            moved += sum(_nbytes(x.aval) for x in (*equation.invars, *equation.outvars))
        rounds = equation.params["length"] if name == "scan" else 1
        for inner in _inner(equation.params):
            work = products(inner)
            flops += rounds * work.flops
            moved += rounds * work.moved_bytes
    return DeviceWork(flops, moved)


def _inner(params: dict[str, Any]) -> Iterator[Jaxpr]:
    for x in jax.tree.leaves(list(params.values())):
        if isinstance(x, ClosedJaxpr):
            yield x.jaxpr
        elif isinstance(x, Jaxpr):
            yield x


def _nbytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def _of_dot(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _of_convolution(equation: Any) -> float:
    right = equation.invars[1].aval.shape
    features = right[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(right) / features


def _of_ragged(equation: Any) -> float:
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * equation.invars[0].aval.shape[-1]


_FLOPS = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
    "ragged_dot": _of_ragged,
    "ragged_dot_general": _of_ragged,
}
