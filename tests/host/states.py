"""Makes a leaf's states on the host in the middle of a run, and takes steps on them."""

import copy
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import HostArray, new_moments
from zenflow_jax._host.numpy_kernel import Sums
from zenflow_jax._spec.scalars import AdamScalars, WindowStep, window_step

BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float32, BFLOAT16]
KERNELS = ["numba", "numpy"]
RATE, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1
# The engine's arguments: Python floats with float32 values.
SCALARS = AdamScalars(*(float(np.float32(x)) for x in (RATE, B1, B2, 1 - B1, 1 - B2, EPS, DECAY)))
STEP = window_step(SCALARS, 1, False)


class State(NamedTuple):
    masters: HostArray
    mu: HostArray
    nu: HostArray
    steps: np.ndarray

    @property
    def arrays(self) -> list[np.ndarray]:
        """Returns the large arrays."""
        return [*self.masters.arrays, *self.mu.arrays, *self.nu.arrays]

    @property
    def wide(self) -> list[np.ndarray]:
        """Returns float32 copies of masters and moments."""
        return [np.array(x.as_float32()) for x in (self.masters, self.mu, self.nu)]

    def copy(self) -> "State":
        return copy.deepcopy(self)


def new_masters(values: np.ndarray, dtype: Any = np.float32) -> HostArray:
    masters = HostArray.zeros(values.shape, np.dtype(dtype))
    masters.write(values)
    return masters


def new_state(
    shape: tuple[int, ...], seed: int = 0, dtype: Any = np.float32, *, compact: bool = False
) -> State:
    """Returns a state in the middle of a run, with a different step count for every channel."""
    rng = np.random.default_rng(seed)
    master, mu, nu = rng.standard_normal((3, *shape)).astype(np.float32)
    # From 158 steps on, the first moment's bias correction is 1, but the second's is far from 1.
    steps = 20 * rng.permutation(shape[0] * shape[1]).astype(np.int32)
    # Second moments are far from zero, so directions are near 1, as in training.
    nu = np.square(nu) + 0.1
    moments = new_moments(shape, compact=compact)
    for x, values in zip(moments, (mu, nu), strict=True):
        x.write(values)
    return State(new_masters(master, dtype), *moments, steps.reshape(shape[:2]))


def new_gradient(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 1) -> np.ndarray:
    gradient = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    gradient.flags.writeable = False  # like a view of a jax array
    return gradient


def some_channels(state: State, seed: int = 2, share: float = 0.7) -> np.ndarray:
    return np.random.default_rng(seed).random(state.steps.shape) < share


def step(
    adam: HostAdam,
    state: State,
    total: Any,
    active: np.ndarray,
    *,
    scale: float = 1.0,
    of_window: WindowStep = STEP,
    sums: Sums | None = None,
) -> int:
    """Takes a step with a gradient, or with (gradient, factor) pairs; returns the chunk count."""
    gradients = total if isinstance(total, list) else [(total, 1.0)]
    return sum(1 for _ in adam.adamw(*state, gradients, scale, active, of_window, sums))


def empty_sums(shape: tuple[int, ...]) -> Sums:
    return Sums(*np.full((2, *shape), np.nan, np.float32))


def bits(*arrays: np.ndarray | HostArray) -> list[bytes]:
    parts = ([x] if isinstance(x, np.ndarray) else x.arrays for x in arrays)
    return [x.tobytes() for part in parts for x in part]
