"""The arrays of one leaf on the host."""

import dataclasses

import numpy as np

from zenflow_jax._host.arrays import blank, copied
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment, new_moments
from zenflow_jax._spec.leaf import LeafSpec


@dataclasses.dataclass
class WindowGradients:
    """One leaf's gradients of a window, until they are used."""

    # The float32 sum of the first of them, if they were added up; the leaf owns its memory.
    total: np.ndarray | None = None
    # The others in order, each with its factor: views of host memory that is freed with them.
    mails: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)

    @property
    def sources(self) -> list[tuple[np.ndarray, float]]:
        return [*([] if self.total is None else [(self.total, 1.0)]), *self.mails]

    def clear(self) -> None:
        self.total, self.mails = None, []


@dataclasses.dataclass
class HostLeaf:
    """One leaf's arrays, all `(entries, rows, n, tail)` unless said otherwise."""

    spec: LeafSpec
    master: Masters
    mu: Moment
    nu: Moment
    steps: np.ndarray  # int32 (entries, n): Adam steps of each channel
    channels: np.ndarray  # int32 (entries, k), ascending: the selected ones
    open: WindowGradients = dataclasses.field(default_factory=WindowGradients)
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
        total = [] if self.open.total is None else [self.open.total]
        return [*self.master.arrays, *self.mu.arrays, *self.nu.arrays, self.steps, *total]

    @property
    def arrays(self) -> list[np.ndarray]:
        """All that are the leaf's own, spare ones included; mails are not."""
        return [*self.written, self.channels, *self.spare]

    @property
    def to_upload(self) -> np.ndarray:
        """The masters in the leaf's dtype and shape, for an upload. Not a copy."""
        return self.master.to_upload.reshape(self.spec.shape)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.written)

    def keep(self, gradient: np.ndarray, factor: float) -> None:
        self.open.mails.append((gradient.reshape(self.master.shape), factor))

    def alias(self) -> "HostLeaf":
        """The leaf in the same memory; mails that are added later are not in it."""
        window = dataclasses.replace(self.open, mails=list(self.open.mails))
        return dataclasses.replace(self, open=window, spare=[])

    def copy(self) -> "HostLeaf":
        """The leaf in memory of its own, but for mails and channels, which nobody writes."""
        total, leaf = self.open.total, self.alias()
        window = dataclasses.replace(leaf.open, total=None if total is None else copied(total))
        return dataclasses.replace(
            leaf,
            master=self.master.copy(),
            mu=self.mu.copy(),
            nu=self.nu.copy(),
            steps=copied(self.steps),
            open=window,
        )
