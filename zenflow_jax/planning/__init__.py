"""Predicts, without a device, whether a run fits and whether its host work is hidden.

`plan` needs the shapes of a step's arguments, `plan_layerwise` the shapes of a trainer's weights
and batch. `described_mesh` and `peak_bytes` add gradients and activations: XLA compiles the step
for a GPU that this machine need not have.
"""

from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.planning._gpus import EFFICIENCY, GPUS, Gpu, gpu_here, gpu_of_kind
from zenflow_jax.planning._layers import LayerPlan, plan_layerwise
from zenflow_jax.planning._plans import (
    DEFAULT_FRACTION,
    HOST_RESERVE,
    MAX_FRACTION,
    TEMPORARIES,
    Plan,
    gb,
    plan,
)
from zenflow_jax.planning._steps import INSTALL, described_mesh, has_compiler, peak_bytes, placed

__all__ = [
    "EFFICIENCY",
    "GPUS",
    "HOST_RESERVE",
    "INSTALL",
    "TEMPORARIES",
    "DEFAULT_FRACTION",
    "MAX_FRACTION",
    "Gpu",
    "LayerPlan",
    "Plan",
    "UnfitRunError",
    "described_mesh",
    "gb",
    "gpu_here",
    "gpu_of_kind",
    "has_compiler",
    "peak_bytes",
    "placed",
    "plan",
    "plan_layerwise",
]
