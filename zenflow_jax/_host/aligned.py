"""NumPy arrays at addresses that jax on CPUs takes over without a copy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Such an address is a multiple of this many bytes (jax 0.10.0 to 0.11.2), NumPy's own only of 16.
ALIGNMENT = 64


def blank(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Zeros; they take memory only when they are written."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def copied(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    """A copy, cast if another dtype is asked for."""
    copy = blank(x.shape, x.dtype if dtype is None else dtype)
    np.copyto(copy, x, casting="unsafe")
    return copy
