"""Adam for JAX when its state does not fit beside the model: ZenFlow as an optax transformation.

`zenflow()` is the optimizer, `HostEngine` the one object that works between its steps.
"""

import importlib
from typing import TYPE_CHECKING, Any

from zenflow_jax._attach import AttachedStep, attach
from zenflow_jax._checkpoint.tree import abstract_engine_state
from zenflow_jax._device.in_graph import flush
from zenflow_jax._device.state import ZenFlowState, find_state
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._diagnostics.timeline import Span, Timeline
from zenflow_jax._diagnostics.timeline_output import plot_timeline, save_trace
from zenflow_jax._engine import HostEngine
from zenflow_jax._master import iter_master_params, master_params
from zenflow_jax._plan.arguments import STATIC_ARGS
from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect
from zenflow_jax._transform import zenflow
from zenflow_jax._version import __version__ as __version__

if TYPE_CHECKING:
    from zenflow_jax._checkpoint.handler import EngineCheckpointHandler, EngineRestore, EngineSave
    from zenflow_jax.planning import GPUS, Gpu, Hiding, Plan, hiding, host_bandwidth, plan

__all__ = [
    "GPUS",
    "STATIC_ARGS",
    "AttachedStep",
    "AutoSelect",
    "AutoWindow",
    "EngineCheckpointHandler",
    "EngineRestore",
    "EngineSave",
    "EngineStats",
    "EpochSelect",
    "Gpu",
    "Hiding",
    "HostEngine",
    "Plan",
    "Span",
    "Timeline",
    "ZenFlowState",
    "abstract_engine_state",
    "attach",
    "find_state",
    "flush",
    "hiding",
    "host_bandwidth",
    "iter_master_params",
    "master_params",
    "plan",
    "plot_timeline",
    "save_trace",
    "zenflow",
]

# What not everybody needs, and takes long to import: orbax, or what compiles.
_WHERE = {
    "EngineCheckpointHandler": "_checkpoint.handler",
    "EngineRestore": "_checkpoint.handler",
    "EngineSave": "_checkpoint.handler",
    "GPUS": "planning",
    "Gpu": "planning",
    "Hiding": "planning",
    "Plan": "planning",
    "hiding": "planning",
    "host_bandwidth": "planning",
    "plan": "planning",
}

_MODULES = ("deepspeed",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"zenflow_jax.{name}")
    if name in _WHERE:
        return getattr(importlib.import_module(f"zenflow_jax.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'zenflow_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What is imported late is here, too; what this file imports for itself is not.
    return [*__all__, "__version__"]
