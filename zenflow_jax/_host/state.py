"""The state of every deferred channel: masters, moments, counts, and the open window.

`_exchange/worker.py` decides when these methods run, and `adam.py` does the arithmetic. Arrays have
the leaf's full shape, viewed as `(entries, rows, n, tail)`. Rows of selected channels are stale.

Letters: `entries` of the stack axes, `n` channels in each, `k` of them selected.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import aligned_zeros, copied
from zenflow_jax._host.masters import Masters
from zenflow_jax._host.moments import Moment, new_moments
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import AdamScalars, WindowStep, window_step
from zenflow_jax._spec.schedule import Schedule

#: The maximum number of mails to keep. An update frees the closed window's mails leaf by leaf while
#: the next window's mails arrive, so windows of four steps need no sums if the update keeps up.
MAILS_KEPT = 5


@dataclasses.dataclass
class WindowGradients:
    """One leaf's gradients in a window, until they are used."""

    # The float32 sum of the earliest gradients, if any were summed; the leaf owns its memory.
    total: np.ndarray | None = None
    # The later gradients in order, each with its factor: views that keep their host memory alive.
    kept: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)

    @property
    def weighted(self) -> list[tuple[np.ndarray, float]]:
        return [*([] if self.total is None else [(self.total, 1.0)]), *self.kept]

    def clear(self) -> None:
        self.total, self.kept = None, []


@dataclasses.dataclass
class HostLeaf:
    """One leaf's arrays, all `(entries, rows, n, tail)` unless noted."""

    spec: LeafSpec
    master: Masters
    mu: Moment
    nu: Moment
    steps: np.ndarray  # int32 (entries, n): Adam steps of each channel
    channels: np.ndarray  # int32 (entries, k), ascending: the selected channels
    open: WindowGradients = dataclasses.field(default_factory=WindowGradients)
    # Unused sums. During an update, two sums may be in use: its window's and the next window's.
    spare: list[np.ndarray] = dataclasses.field(default_factory=list)

    @classmethod
    def new(
        cls, spec: LeafSpec, weight: np.ndarray, channels: np.ndarray, *, compact: bool
    ) -> "HostLeaf":
        """Makes a leaf with a copy of its parameter and zero moments."""
        shape = spec.view4(spec.n)
        mu, nu = new_moments(shape, compact=compact)
        leaf = cls(
            spec=spec,
            master=Masters.zeros(shape, spec.dtype),
            mu=mu,
            nu=nu,
            steps=aligned_zeros((shape[0], spec.n), np.int32),
            channels=np.array(channels, np.int32).reshape(shape[0], spec.k),
        )
        leaf.master.write(weight)
        return leaf

    @property
    def written(self) -> list[np.ndarray]:
        """Returns the arrays that updates write and `copy` copies."""
        total = [] if self.open.total is None else [self.open.total]
        return [*self.master.arrays, *self.mu.arrays, *self.nu.arrays, self.steps, *total]

    @property
    def arrays(self) -> list[np.ndarray]:
        """Returns all of the leaf's own arrays, including spare sums but not mails."""
        return [*self.written, self.channels, *self.spare]

    @property
    def to_upload(self) -> np.ndarray:
        """Returns the masters in the leaf's dtype and shape, for an upload, without a copy."""
        return self.master.to_upload.reshape(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Returns a copy's bytes without step counts: at most 16 per parameter."""
        total = 4 * self.master.size if self.open.kept and self.open.total is None else 0
        return sum(x.nbytes for x in self.written) - self.steps.nbytes + total

    def keep(self, gradient: np.ndarray, factor: float) -> None:
        self.open.kept.append((gradient.reshape(self.master.shape), factor))

    def alias(self) -> "HostLeaf":
        """Returns the leaf in the same memory; mails added later are not included."""
        window = dataclasses.replace(self.open, kept=list(self.open.kept))
        return dataclasses.replace(self, open=window, spare=[])

    def copy(self, adam: HostAdam) -> "HostLeaf":
        """Copies an alias, except channels, which are never overwritten.

        `adam` sums the mails. Neither copy nor alias keeps them: pinned memory is scarce.
        """
        window = WindowGradients(None if self.open.total is None else copied(self.open.total))
        if self.open.kept:
            first = window.total is None
            total = aligned_zeros(self.master.shape) if window.total is None else window.total
            adam.accumulate(total, self.open.kept, first=first)
            window.total = total
        self.open = window
        return dataclasses.replace(
            self,
            spare=[],
            master=self.master.copy(),
            mu=self.mu.copy(),
            nu=self.nu.copy(),
            steps=copied(self.steps),
            open=window,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ClosedWindow:
    """A group's closed window, with everything that its update needs."""

    number: int
    counted: int  # steps that were not skipped
    steps: list[WindowStep]  # from its last step's hyperparameters, for each learning rate
    leaves: list[int]  # the numbers of the group's leaves
    # By leaf number; empty if no step counted. A leaf's update drops its entry.
    gradients: dict[int, WindowGradients]
    # Bool (entries, n): channels to update, except those that enter before the update.
    active: dict[int, np.ndarray]


@dataclasses.dataclass
class OpenWindow:
    """A group's open window."""

    leaves: list[int]  # the numbers of the group's leaves
    counted: int = 0  # steps in the open window that were not skipped


@dataclasses.dataclass(frozen=True)
class SelectedRows:
    """A leaf's selected channels in a hand-over, in the host's shapes."""

    master: np.ndarray  # float32 (entries, rows, k, tail)
    mu: np.ndarray
    nu: np.ndarray
    steps: np.ndarray  # int32 (entries, k)

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray], spec: LeafSpec) -> "SelectedRows":
        """Makes rows from a part's arrays in the device's shapes."""
        shape = spec.view4(spec.k)
        master, mu, nu = (x.reshape(shape) for x in arrays[:3])
        return cls(master, mu, nu, arrays[3].reshape(shape[::2]))

    def on_device(self, spec: LeafSpec) -> tuple[np.ndarray, ...]:
        """Returns the arrays in the device's shapes; inverts `of`."""
        wide = (x.reshape(spec.selected_shape) for x in (self.master, self.mu, self.nu))
        return (*wide, self.steps.reshape(*spec.stack, spec.k))


class HostState:
    """The deferred half of a run on the host. Must be used by one thread at a time.

    Each entry in `pieces` lists the numbers of leaves that share memory in a mail. `before_write`
    is called with a leaf's number before the leaf's arrays are written; it may wait.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        weights: Iterable[np.ndarray],
        channels: Iterable[np.ndarray],
        adam: HostAdam,
        schedule: Schedule,
        pieces: Sequence[Sequence[int]],
        *,
        compact: bool = False,
    ):
        self.leaves = [
            HostLeaf.new(*args, compact=compact)
            for args in zip(specs, weights, channels, strict=True)
        ]
        self.compact = compact
        self._pieces = pieces
        self._adam = adam
        self._scaling = schedule.window_scaling
        self.open = [
            OpenWindow([i for i, leaf in enumerate(self.leaves) if leaf.spec.group == group])
            for group in range(schedule.groups)
        ]
        self._mail_bytes = [x.master.size * x.spec.mail_dtype.itemsize for x in self.leaves]
        self.windows = 0  # closed so far
        self._closed: list[ClosedWindow] = []  # windows waiting for their updates
        self._overflowed = False  # whether gradients ever exceeded the limit, so sums are reused
        # A window uses its last step's hyperparameters, even if that step was skipped.
        self.scalars: Sequence[AdamScalars] = ()  # for each learning rate
        self.before_write: Callable[[int], None] = lambda i: None

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all arrays, including spare sums; none is in pinned memory."""
        return sum(x.nbytes for leaf in self.leaves for x in leaf.arrays)

    @property
    def pinned_bytes(self) -> int:
        """Returns the bytes of kept mails, the only arrays in memory that jax has pinned."""
        kept = [len(leaf.open.kept) for leaf in self.leaves]
        for window in self._closed:
            for i, gradients in window.gradients.items():
                kept[i] += len(gradients.kept)
        # The last leaf that uses a mail frees it.
        return sum(
            sum(self._mail_bytes[i] for i in piece) * max(kept[i] for i in piece)
            for piece in self._pieces
        )

    def resume(
        self,
        arrays: Iterable[Mapping[str, np.ndarray]],
        counted: Sequence[int],
        *,
        closed: int,
    ) -> None:
        """Resumes a saved run's state; the selected channels are already in place.

        For each leaf, `arrays` contains "master", "mu", "nu", "steps" and, if the host sums its
        open window, "total". `counted` lists the number of steps in each group's open window.
        """
        self.windows = closed
        for window, steps in zip(self.open, counted, strict=True):
            window.counted = steps
        for leaf, saved in zip(self.leaves, arrays, strict=True):
            for name in ("master", "mu", "nu"):
                getattr(leaf, name).write(saved[name])
            leaf.steps[...] = saved["steps"].reshape(leaf.steps.shape)
            if self.open[leaf.spec.group].counted and "total" in saved:
                leaf.open.total = copied(saved["total"].reshape(leaf.master.shape))

    def close(self) -> None:
        # A caller that waits for a failed update may still hold these lists.
        for window in self._closed:
            for gradients in window.gradients.values():
                gradients.clear()
        self.leaves, self._closed = [], []
        self._adam.close()

    def take_master(self, i: int, weight: np.ndarray) -> None:
        self.before_write(i)
        self.leaves[i].master.write(weight)

    def add(self, gradients: Sequence[np.ndarray], factor: float) -> None:
        """Adds one step's gradients to the open windows, multiplied by `factor`.

        The host keeps them for their window's update, which sums them. If there are too many, the
        host sums some immediately, which does not affect the result.
        """
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.keep(gradient, factor)
        self.count()
        for least in (GRADIENTS_PER_PASS, 1):
            if self.pinned_bytes <= MAILS_KEPT * sum(self._mail_bytes):
                break
            self._overflowed = True
            for i, leaf in enumerate(self.leaves):
                if len(leaf.open.kept) >= least:
                    self._add_up(i, leaf.open)

    def count(self) -> None:
        """Counts one step in the open windows; its gradients may be in the device's sums."""
        for window in self.open:
            window.counted += 1

    def take_sums(self, sums: Sequence[np.ndarray], group: int) -> None:
        """Takes in the device's sums of a group's open window, which closes next."""
        window = self.open[group]
        if window.counted:
            for i, gradient in zip(window.leaves, sums, strict=True):
                self.leaves[i].keep(gradient, 1.0)

    def _add_up(self, i: int, gradients: WindowGradients, end: int | None = None) -> None:
        """Adds a window's mails of leaf `i`, up to `end`, to its sum."""
        leaf, first = self.leaves[i], gradients.total is None
        self.before_write(i)  # a save must not keep mails that are freed here
        if gradients.total is None:
            gradients.total = leaf.spare.pop() if leaf.spare else aligned_zeros(leaf.master.shape)
        self._adam.accumulate(gradients.total, gradients.kept[:end], first=first)
        del gradients.kept[:end]

    def close_window(self, group: int) -> ClosedWindow:
        """Ends a group's open window."""
        assert self.scalars, "no mail has arrived"
        self.windows += 1
        window = self.open[group]
        counted = window.counted
        leaves = {i: self.leaves[i] for i in window.leaves}
        closed = ClosedWindow(
            number=self.windows,
            counted=counted,
            steps=[window_step(x, max(counted, 1), self._scaling) for x in self.scalars],
            leaves=window.leaves,
            gradients={i: x.open for i, x in leaves.items() if counted},
            active={i: ~_members(x.channels, x.spec.n) for i, x in leaves.items()},
        )
        for leaf in leaves.values():
            leaf.open = WindowGradients()
        window.counted = 0
        self._closed.append(closed)
        return closed

    def update(
        self, window: ClosedWindow, finished: Callable[[int, HostLeaf], None]
    ) -> Iterator[str]:
        """Makes a window's update in pieces of a few milliseconds; yields before each piece.

        Yields the leaf's name, and calls `finished` for each finished leaf. The group's
        hand-overs must not run in between.
        """
        for i, gradients in window.gradients.items():
            leaf = self.leaves[i]
            yield leaf.spec.name
            self.before_write(i)
            for _ in self._step(window, i, window.active[i]):
                yield leaf.spec.name
            if self._overflowed and gradients.total is not None:
                leaf.spare.append(gradients.total)
            gradients.clear()
            finished(i, leaf)
        self._closed.remove(window)

    def hand_over(
        self, window: ClosedWindow, i: int, leaving: SelectedRows, chosen: np.ndarray
    ) -> SelectedRows:
        """Takes back leaf `i`'s selected channels; returns a copy of the `chosen` channels' state.

        The update of the window that just closed is still pending: this call updates the entering
        channels at once, and removes them from that update.
        """
        self.before_write(i)
        leaf, active = self.leaves[i], window.active[i]
        wide = (leaf.master, leaf.mu, leaf.nu)
        self._adam.put(wide, leaf.channels, (leaving.master, leaving.mu, leaving.nu))
        np.put_along_axis(leaf.steps, leaf.channels, leaving.steps, axis=-1)
        entering = active & _members(chosen, leaf.spec.n)
        if window.gradients and entering.any():
            for _ in self._step(window, i, entering):
                pass
        window.active[i] = active & ~entering
        before, leaf.channels = leaf.channels, chosen
        master, mu, nu = self._adam.take(wide, chosen)
        if self.compact:  # only the host's stale copies are rounded
            for taken, unrounded in ((mu, leaving.mu), (nu, leaving.nu)):
                _keep_staying(taken, chosen, unrounded, before)
        steps = np.take_along_axis(leaf.steps, chosen, axis=-1)
        return SelectedRows(master, mu, nu, steps)

    def _step(self, window: ClosedWindow, i: int, active: np.ndarray) -> Iterator[None]:
        leaf, step = self.leaves[i], window.steps[self.leaves[i].spec.rate]
        if not leaf.spec.decay:
            step = step._replace(scalars=step.scalars._replace(weight_decay=0.0))
        gradients = window.gradients[i]
        if len(gradients.weighted) > GRADIENTS_PER_PASS:
            self._add_up(i, gradients, 1 - GRADIENTS_PER_PASS)
        arrays = leaf.master, leaf.mu, leaf.nu, leaf.steps
        scale = 1 / max(window.counted, 1)  # for the mean
        return self._adam.adamw(*arrays, gradients.weighted, scale, active, step)


def _keep_staying(
    taken: np.ndarray, chosen: np.ndarray, unrounded: np.ndarray, before: np.ndarray
) -> None:
    """Restores the rows in `unrounded` for channels that stay selected."""
    for rows, new, old_rows, old in zip(taken, chosen, unrounded, before, strict=True):
        _, at, was_at = np.intersect1d(new, old, assume_unique=True, return_indices=True)
        rows[:, at] = old_rows[:, was_at]


def _members(channels: np.ndarray, n: int) -> np.ndarray:
    """Returns whether each channel is among `channels` (entries, k), as bool (entries, n)."""
    members = np.zeros((channels.shape[0], n), bool)
    np.put_along_axis(members, channels, True, axis=-1)
    return members
