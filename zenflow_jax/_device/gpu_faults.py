"""Rejects programs that XLA for GPUs miscompiles, and GPUs on which jax computes wrong results.

XLA annotates a slice of host memory in a loop with an offset and a step in bytes, which its runtime
uses for the copy. These numbers do not match the index in jax 0.10.2 and 0.11.0 (openxla/xla#46231,
fixed in 0.11.1), and wherever XLA pipelines copies to the host (openxla/xla#45393; checked with
0.11.2 and 0.12.0.1): layers are silently read and written in the wrong order. jax knows a program's
device when it lowers the program, so such slices go through an identity without a lowering for
GPUs.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

# XLA reads XLA_FLAGS once, so a value set after this import has no effect.
_FLAGS = os.environ.get("XLA_FLAGS", "")
#: XLA adds no annotation if XLA_FLAGS disables this pass.
_PASS = "dynamic-slice-annotator"
_DISABLED = any(
    _PASS in passes.split(",") for passes in re.findall(r"--xla_disable_hlo_passes=(\S*)", _FLAGS)
)
_PIPELINES = re.search(r"--xla_gpu_enable_pipelined_host_offloading(?!=(false|0)\b)", _FLAGS)
_FIXED_VERSION = (0, 11, 1)
_GPU = "gpu"

_sliced_p = Primitive("zenflow_jax_host_slices")
_sliced_p.def_abstract_eval(lambda x: x)


def check_gpus(devices: Iterable[Any]) -> None:
    """Rejects GPUs on which jax computes single operations incorrectly."""
    for device in devices:
        if device.platform == _GPU and device.process_index == jax.process_index():
            with jax.default_device(device), jax.transfer_guard("allow"):
                result = np.asarray(jnp.ones(4) + 1)
            if not (result == 2).all():
                raise RuntimeError(
                    f"jax {jax.__version__} computes 1 + 1 = {result[0]} on {device.device_kind}, "
                    "as in https://github.com/jax-ml/jax/issues/40633. Install jax 0.10.2, which "
                    "that thread found correct, or a version released since."
                )


def check_slices(x: jax.Array) -> jax.Array:
    """Returns `x`; a GPU program that reads it fails to lower if XLA would miscompile its slices.

    The function cannot be differentiated.
    """
    return _sliced_p.bind(x) if _fault() else x


def _fault() -> str:
    """Returns why XLA would miscompile slices, and a remedy; or an empty string."""
    wrong = f"jax {jax.__version__} reads and writes streamed layers in the wrong order on GPUs"
    if jax.__version_info__ < _FIXED_VERSION:
        return f"{wrong} (openxla/xla#46231). Install jax 0.11.1 or newer, which needs Python 3.12"
    config: Any = jax.config
    if config.jax_optimization_level in ("O1", "O2", "O3") or _PIPELINES:
        return (
            f"{wrong} if XLA pipelines copies to the host (openxla/xla#45393). Leave "
            "jax_optimization_level and xla_gpu_enable_pipelined_host_offloading unset"
        )
    return ""


def _refuse() -> None:
    if not _DISABLED and (fault := _fault()):
        raise NotImplementedError(
            f"{fault}, or set XLA_FLAGS=--xla_disable_hlo_passes={_PASS} before Python starts, "
            "which costs some speed."
        )


@_sliced_p.def_impl
def _without_jit(x: jax.Array) -> jax.Array:
    if any(device.platform == _GPU for device in x.devices()):
        _refuse()
    return x


def _for_gpus(context: object, x: object) -> Any:
    del context
    _refuse()
    return [x]


mlir.register_lowering(_sliced_p, lambda context, x: [x])
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_sliced_p, _for_gpus, platform=_platform)
