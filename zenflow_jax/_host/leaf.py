"""The arrays of one leaf on the host."""

import dataclasses

import numpy as np

from zenflow_jax._host.arrays import blank, copied
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment, new_moments
from zenflow_jax._plan.leaf import LeafSpec


@dataclasses.dataclass
class HostLeaf:
    """One leaf's arrays, all `(entries, rows, n, tail)` unless said otherwise."""

    spec: LeafSpec
    master: Masters
    mu: Moment
    nu: Moment
    steps: np.ndarray  # int32 (entries, n): Adam steps of each channel
    channels: np.ndarray  # int32 (entries, k), ascending: selected now
    # The open window: the float32 sum of its first mails, if any were added up; then the other
    # mails in order, each with its factor. Mails are views of host memory that is freed with them.
    total: np.ndarray | None = None
    mails: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)
    # Sums not in use. While an update runs two may be in use: its window's, and the next one's.
    spare: list[np.ndarray] = dataclasses.field(default_factory=list)

    @classmethod
    def new(
        cls, spec: LeafSpec, weight: np.ndarray, channels: np.ndarray, *, compact: bool
    ) -> "HostLeaf":
        """A leaf with this parameter, which is copied, and zero moments."""
        shape = spec.view4(spec.n)
        mu, nu = new_moments(shape, compact=compact)
        leaf = cls(
            spec=spec,
            master=Masters.zeros(shape, spec.dtype),
            mu=mu,
            nu=nu,
            steps=blank((shape[0], spec.n), np.int32),
            channels=np.array(channels, np.int32).reshape(shape[0], spec.k),
        )
        leaf.master.write(weight)
        return leaf

    @property
    def written(self) -> list[np.ndarray]:
        """The arrays that updates write, which `copy` copies."""
        total = [] if self.total is None else [self.total]
        return [*self.master.arrays, *self.mu.arrays, *self.nu.arrays, self.steps, *total]

    @property
    def arrays(self) -> list[np.ndarray]:
        """All that are the leaf's own, spare ones included; mails are not."""
        return [*self.written, self.channels, *self.spare]

    @property
    def to_upload(self) -> np.ndarray:
        """What an update uploads of the leaf, in its shape. Not a copy."""
        return self.master.to_upload.reshape(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of what `copy` copies."""
        return sum(x.nbytes for x in self.written)

    def keep(self, gradient: np.ndarray, factor: float) -> None:
        """Takes one mail into the open window."""
        self.mails.append((gradient.reshape(self.master.shape), factor))

    def now(self) -> "HostLeaf":
        """The leaf as it is now, in the same memory until somebody writes there."""
        return dataclasses.replace(self, mails=list(self.mails), spare=[])

    def copy(self) -> "HostLeaf":
        """The leaf in memory of its own, but for mails and channels, which nobody writes."""
        return dataclasses.replace(
            self.now(),
            master=self.master.copy(),
            mu=self.mu.copy(),
            nu=self.nu.copy(),
            steps=copied(self.steps),
            total=None if self.total is None else copied(self.total),
        )


@dataclasses.dataclass
class WindowGradients:
    """One leaf's gradients of a closed window, until they are used."""

    total: np.ndarray | None  # the float32 sum of the first of them; the leaf owns its memory
    mails: list[tuple[np.ndarray, float]]  # the others, each with its factor; in the mail's memory

    @property
    def sources(self) -> list[tuple[np.ndarray, float]]:
        """Everything that is to be added up, each with its factor."""
        return [*([] if self.total is None else [(self.total, 1.0)]), *self.mails]

    def clear(self) -> None:
        self.total, self.mails = None, []
