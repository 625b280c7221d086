"""The scalars that a step sends to the host beside its mail."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import AdamScalars
from zenflow_jax._plan.schedule import Schedule

#: The token of a step whose mail no engine has taken yet.
USED = -1


class Unpacked(NamedTuple):
    """The values in `StepScalars`: scalars of NumPy or of jax, as its arrays are."""

    adam: AdamScalars
    factor: Any  # clips the gradient
    step: Any
    token: Any
    finite: Any  # whether the step counts: 1 or 0


class StepScalars(NamedTuple):
    """A step's scalars in few arrays, because each array costs a copy to host memory.

    Arrays that the step itself copies have leading unit axes, as its mail has.
    """

    floats: Any  # float32 (8,): the fields of AdamScalars, then the clipping factor
    ints: Any  # int32 (3,): step, token, whether the gradient was finite
    statistics: Any = None  # float32 (1 + 2 leaves,), for `ScheduleState.add`; None if not needed

    @staticmethod
    def sizes(specs: Sequence[LeafSpec], schedule: Schedule) -> list[tuple[int, np.dtype]]:
        """Length and dtype of each array."""
        sizes = [(len(AdamScalars._fields) + 1, np.dtype(np.float32)), (3, np.dtype(np.int32))]
        if schedule.needs_statistics:
            offloaded = sum(not spec.resident for spec in specs)
            sizes.append((1 + 2 * offloaded, np.dtype(np.float32)))
        return sizes

    @classmethod
    def pack(
        cls,
        adam: AdamScalars,
        factor: jax.Array,
        step: jax.Array,
        token: jax.Array,
        finite: jax.Array,
        statistics: jax.Array | None,
    ) -> "StepScalars":
        """The arrays, from what a step says; on the device."""
        floats = jnp.stack([jnp.asarray(x, jnp.float32) for x in (*adam, factor)])
        ints = jnp.stack([step, token, finite.astype(jnp.int32)])
        return cls(floats, ints, statistics)

    def unpack(self) -> Unpacked:
        """The inverse of `pack`, without the statistics."""
        floats, ints = self.floats.ravel(), self.ints.ravel()
        return Unpacked(AdamScalars(*floats[:-1]), floats[-1], *ints)
