"""The optimizer state as `flax.serialization` reads and writes it (`to_bytes`, `TrainState`).

Flax makes a tuple anew of what it has read, which is not all that a state is. It reads arrays back
as NumPy, which does not know where they were. This file puts them where the target has its arrays,
because mail must be in host memory.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from flax import serialization
from jax.core import Tracer

from zenflow_jax._device.state import DeferredState, LeafState, ZenFlowState

_STATES = (ZenFlowState, LeafState, DeferredState)


@functools.cache
def register_states() -> None:
    """Tells flax of the classes of a state. Safe twice.

    They are tuples with `_fields`, which flax looks for before it looks for classes. So the two
    functions that it has for all such tuples are the ones that must know them. They have no public
    name (flax 0.12.8 and 0.12.12; `tests/test_resume.py` reads states through flax).
    """
    kind = serialization._NamedTuple
    to_dict, from_dict = serialization._STATE_DICT_REGISTRY[kind]

    def to_dict_too(x: Any) -> dict[str, Any]:
        return _to_dict(x) if isinstance(x, _STATES) else to_dict(x)

    def from_dict_too(target: Any, found: dict[str, Any]) -> Any:
        return (_from_dict if isinstance(target, _STATES) else from_dict)(target, found)

    serialization.register_serialization_state(kind, to_dict_too, from_dict_too, override=True)


def _to_dict(state: Any) -> dict[str, Any]:
    return {name: serialization.to_state_dict(getattr(state, name)) for name in _arrays(state)}


def _from_dict(target: Any, found: dict[str, Any]) -> Any:
    names = _arrays(target)
    _check_names(found, names, _place())
    return dataclasses.replace(target, **{n: _read(getattr(target, n), found[n], n) for n in names})


def _check_names(found: Any, names: Collection[str], place: str) -> None:
    if not isinstance(found, dict) or set(found) != set(names):
        got = ", ".join(sorted(found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"expected {', '.join(names)} at {place}, got {got}. {_REMEDY}")


def _read(target: Any, found: Any, name: str) -> Any:
    if isinstance(target, dict):  # the layout, whose name says the version
        _check_names(found, target, f"{_place()}/{name}")
    value = serialization.from_state_dict(target, found, name)
    old, new = (jax.tree_util.tree_flatten_with_path(x) for x in (target, value))
    if old[1] != new[1]:
        raise ValueError(
            f"expected {_kind(target)} at {_place()}/{name}, got {_kind(value)}. {_REMEDY}"
        )
    pairs = zip(old[0], new[0], strict=True)
    return jax.tree.unflatten(
        old[1],
        [_put(x, like, f"{name}{jax.tree_util.keystr(path)}") for (path, like), (_, x) in pairs],
    )


def _put(x: Any, like: Any, name: str) -> Any:
    if np.shape(x) != np.shape(like) or x.dtype != like.dtype:
        raise ValueError(
            f"expected {like.dtype} {np.shape(like)} at {_place()}/{name}, got {x.dtype} "
            f"{np.shape(x)}. {_REMEDY}"
        )
    if not isinstance(like, jax.Array) or isinstance(like, Tracer):
        return x
    # Copied: the CPU backend would share memory with what was read.
    return jax.device_put(x if isinstance(x, jax.Array) else np.array(x), like.sharding)


def _kind(tree: Any) -> str:
    if tree is None:
        return "nothing"
    structure = jax.tree.structure(tree)
    return "an array" if structure == jax.tree.structure(0) else str(structure)


def _place() -> str:
    return serialization.current_path()


def _arrays(state: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(state) if not f.metadata.get("static")]


_REMEDY = (
    "Pass as the target what `tx.init(params)` returns for the parameters and the options of the "
    "run that was saved."
)
