"""Rejects slices of host memory inside loops if XLA for GPUs miscompiles them.

XLA annotates such a slice with an offset and a step in bytes, which its runtime uses for the copy.
In jax 0.10.2 and 0.11.0, these numbers do not match the index (openxla/xla#46231, fixed in 0.11.1):
layers are silently read and written in the wrong order. jax knows a program's device when it lowers
the program, so such slices go through an identity without a lowering for GPUs.
"""

import os
import re
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

#: XLA adds no annotation if XLA_FLAGS disables this pass. XLA reads the flags once, so a value set
#: after this import has no effect.
_PASS = "dynamic-slice-annotator"
_DISABLED = any(
    _PASS in passes.split(",")
    for passes in re.findall(r"--xla_disable_hlo_passes=(\S*)", os.environ.get("XLA_FLAGS", ""))
)
_FIXED_VERSION = (0, 11, 1)

_sliced_p = Primitive("zenflow_jax_host_slices")
_sliced_p.def_abstract_eval(lambda x: x)


def check_slices(x: jax.Array) -> jax.Array:
    """Returns `x`; a GPU program that reads it fails to lower if XLA would miscompile its slices.

    The function cannot be differentiated.
    """
    return x if jax.__version_info__ >= _FIXED_VERSION else _sliced_p.bind(x)


def _refuse() -> None:
    if _DISABLED:
        return
    raise NotImplementedError(
        f"jax {jax.__version__} reads and writes streamed layers in the wrong order on GPUs "
        "(openxla/xla#46231). Install jax 0.11.1 or newer, which needs Python 3.12, or set "
        f"XLA_FLAGS=--xla_disable_hlo_passes={_PASS} before Python starts, which costs some speed."
    )


@_sliced_p.def_impl
def _without_jit(x: jax.Array) -> jax.Array:
    if any(device.platform == "gpu" for device in x.devices()):
        _refuse()
    return x


def _for_gpus(context: Any, x: Any) -> Any:
    del context
    _refuse()
    return [x]


mlir.register_lowering(_sliced_p, lambda context, x: [x])
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_sliced_p, _for_gpus, platform=_platform)
