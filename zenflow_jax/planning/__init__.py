"""Predicts, without a device, whether a run fits, and the sums of its work.

`plan` needs only shapes. `described_mesh` and `peak_bytes` add gradients and activations: XLA
compiles the step for a GPU that this machine need not have. `plan_layerwise` plans a trainer.
"""

from zenflow_jax._exchange.pinned import LIMIT_NAME as LIMIT_NAME
from zenflow_jax._exchange.pinned import limit_for as limit_for
from zenflow_jax._spec.checks import UnfitRunError as UnfitRunError
from zenflow_jax.planning._gpus import BEST_EFFICIENCY as BEST_EFFICIENCY
from zenflow_jax.planning._gpus import EFFICIENCY as EFFICIENCY
from zenflow_jax.planning._gpus import GPUS as GPUS
from zenflow_jax.planning._gpus import Gpu as Gpu
from zenflow_jax.planning._gpus import gpu_here as gpu_here
from zenflow_jax.planning._layers import pinned_bytes as pinned_bytes
from zenflow_jax.planning._layers import plan_layerwise as plan_layerwise
from zenflow_jax.planning._plans import DEFAULT_FRACTION as DEFAULT_FRACTION
from zenflow_jax.planning._plans import HOST_RESERVE as HOST_RESERVE
from zenflow_jax.planning._plans import MAX_FRACTION as MAX_FRACTION
from zenflow_jax.planning._plans import TEMPORARIES as TEMPORARIES
from zenflow_jax.planning._plans import Plan as Plan
from zenflow_jax.planning._plans import plan as plan
from zenflow_jax.planning._steps import INSTALL as INSTALL
from zenflow_jax.planning._steps import described_mesh as described_mesh
from zenflow_jax.planning._steps import peak_bytes as peak_bytes
from zenflow_jax.planning._steps import placed as placed
