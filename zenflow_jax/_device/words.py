"""A state in words: a line for each leaf, and no array's content but the counts."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from zenflow_jax._device.memory import read


def named(fields: Mapping[str, Any]) -> str:
    """`field=..., ...` without the fields that are None; arrays by dtype and shape."""
    return ", ".join(f"{name}={short(x)}" for name, x in fields.items() if x is not None)


def short(x: Any) -> str:
    """An array as `float32[8,4]`, tuples and dicts by their entries, all else as it prints."""
    if isinstance(x, tuple):
        fields = getattr(x, "_fields", None)
        if fields is not None:
            return f"({named(dict(zip(fields, x, strict=True)))})"
        return f"({', '.join(map(short, x))})"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{name!r}: {short(y)}' for name, y in x.items())}}}"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return repr(x)


def count(x: Any) -> str:
    """The number that a scalar holds, where it can be read; waits for the step that makes it."""
    if isinstance(x, np.ndarray | np.generic) and not x.shape:
        return str(x.item())
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.shape or x.is_deleted():
        return short(x)
    return str(read(x).item())
