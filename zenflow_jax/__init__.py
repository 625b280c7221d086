"""AdamW for JAX when its state does not fit on the device: ZenFlow as an optax transformation.

`zenflow()` is the optimizer; a `HostEngine` does the work between its steps. Submodules: `attach`,
`streaming`, `layerwise`, `planning` and `deepspeed`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._compact import compact
from zenflow_jax._device.placing import place
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import plot_timeline
from zenflow_jax._engine import HostEngine
from zenflow_jax._master import iter_master_params, master_params
from zenflow_jax._spec.adaptive import AutoSelect, AutoWindow
from zenflow_jax._transform import STATIC_ARGS, zenflow
from zenflow_jax._version import __version__ as __version__

if TYPE_CHECKING:
    from zenflow_jax._checkpoint.handler import EngineCheckpointHandler, EngineRestore, EngineSave

__all__ = [
    "STATIC_ARGS",
    "AutoSelect",
    "AutoWindow",
    "EngineCheckpointHandler",
    "EngineRestore",
    "EngineSave",
    "EngineStats",
    "HostEngine",
    "ZenFlowState",
    "abstract_engine_state",
    "compact",
    "find_state",
    "iter_master_params",
    "master_params",
    "place",
    "plot_timeline",
    "zenflow",
]

# Imported on first use, because the handler imports orbax, which is slow.
_HANDLER_NAMES = ("EngineCheckpointHandler", "EngineRestore", "EngineSave")
_MODULES = ("attach", "deepspeed", "layerwise", "planning", "streaming")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zenflow_jax.{name}")
    if name in _HANDLER_NAMES:
        return getattr(importlib.import_module("zenflow_jax._checkpoint.handler"), name)
    raise AttributeError(f"module 'zenflow_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Includes names that are imported late, but not this file's own imports.
    return [*__all__, *_MODULES, "__version__"]
