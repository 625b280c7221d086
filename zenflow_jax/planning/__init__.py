"""Whether a run fits, and whether its host work hides, before there is a device to try it on.

`plan` needs the shapes of a step's arguments. For the step's gradients and activations
`described_mesh` and `peak_bytes` ask XLA's compiler, for a GPU that need not be there.
"""

from zenflow_jax._spec.rules import UnfitRunError
from zenflow_jax.planning._gpus import GPUS, Gpu, gpu_here, gpu_of_kind
from zenflow_jax.planning._host_work import Hiding, hiding, host_bandwidth
from zenflow_jax.planning._plans import (
    EFFICIENCY,
    HOST_RESERVE,
    TEMPORARIES,
    UNASKED,
    USABLE,
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
    "UNASKED",
    "USABLE",
    "Gpu",
    "Hiding",
    "Plan",
    "UnfitRunError",
    "described_mesh",
    "gb",
    "gpu_here",
    "gpu_of_kind",
    "has_compiler",
    "hiding",
    "host_bandwidth",
    "peak_bytes",
    "placed",
    "plan",
]
