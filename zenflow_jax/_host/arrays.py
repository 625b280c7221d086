"""A leaf's float32 numbers on the host, whole or in fewer bytes.

They are at addresses that jax on CPUs takes over without a copy.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

#: Such an address is a multiple of this many bytes (jax 0.10.0 to 0.11.2), NumPy's own only of 16.
ALIGNMENT = 64
#: Elements that are converted at once: the scratch stays in the cache.
PIECE = 128 * 1024

_Array = TypeVar("_Array", bound="HostArray")


def blank(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Zeros; they take memory only when they are written."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + ALIGNMENT - 1, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)


def copied(x: np.ndarray, dtype: Any = None) -> np.ndarray:
    copy = blank(x.shape, x.dtype if dtype is None else dtype)
    np.copyto(copy, x, casting="unsafe")
    return copy


@dataclasses.dataclass(frozen=True, eq=False)
class HostArray(abc.ABC):
    """Numbers of one leaf, C-contiguous. Fields of subclasses are more arrays, or None."""

    values: np.ndarray  # the numbers, if float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def size(self) -> int:
        return self.values.size

    @property
    def arrays(self) -> list[np.ndarray]:
        return [x for x in vars(self).values() if x is not None]

    def copy(self: _Array) -> _Array:
        arrays = {name: copied(x) for name, x in vars(self).items() if x is not None}
        return dataclasses.replace(self, **arrays)

    def as_float32(self) -> np.ndarray:
        """All of the numbers: `values`, which updates write, where they are float32."""
        return self.range(0, self.size).reshape(self.shape)

    def range(self, begin: int, end: int) -> np.ndarray:
        """Some of the numbers in C order: a view where they are float32."""
        if self.values.dtype == np.float32:
            return self.values.reshape(-1)[begin:end]
        return self._decoded(begin, end)

    @abc.abstractmethod
    def write(self, x: np.ndarray) -> None:
        """Sets all of the numbers; `x` is float32, of the same size."""

    @abc.abstractmethod
    def _decoded(self, begin: int, end: int) -> np.ndarray: ...
