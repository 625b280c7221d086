"""The state of every deferred channel: masters, moments, counts, and the open window.

`_exchange/worker.py` decides when these methods run, and `adam.py` does the arithmetic. Arrays have
the leaf's full shape, viewed as `(entries, n, width)`. Rows of selected channels are stale.

Letters: `entries` of the stack axes, `n` channels in each, `k` of them selected.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import HostArray, aligned_zeros, copied, new_moments
from zenflow_jax._host.numpy_kernel import GRADIENTS_PER_PASS, Sums
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import AdamScalars, window_step
from zenflow_jax._spec.schedule import Schedule

#: The maximum number of steps whose mail is kept. An update frees the closed window's mail leaf by
#: leaf while the next window's arrives, so windows of four steps need no sums if it keeps up.
MAILS_KEPT = 5


@dataclasses.dataclass
class WindowGradients:
    """One leaf's gradients in a window, until they are used."""

    # Sums over the earliest gradients, if any were summed; the leaf owns their memory.
    sums: Sums | None = None
    # The later gradients in order, each with its factor: views that keep their host memory alive.
    kept: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)

    def clear(self) -> None:
        self.sums, self.kept = None, []


@dataclasses.dataclass
class HostLeaf:
    """One leaf's arrays, all `(entries, n, width)` unless noted."""

    spec: LeafSpec
    master: HostArray
    mu: HostArray
    nu: HostArray
    steps: np.ndarray  # int32 (entries, n): Adam steps of each channel
    channels: np.ndarray  # int32 (entries, k), ascending: the selected channels
    before: np.ndarray  # the channels that were selected in the last closed window
    open: WindowGradients = dataclasses.field(default_factory=WindowGradients)
    spare: Sums | None = None  # sums of an earlier window, to be overwritten

    @classmethod
    def new(
        cls, spec: LeafSpec, weight: np.ndarray, channels: np.ndarray, *, compact: bool
    ) -> "HostLeaf":
        """Makes a leaf with a copy of its parameter and zero moments."""
        shape = spec.view3(spec.n)
        mu, nu = new_moments(shape, compact=compact)
        channels = np.array(channels, np.int32).reshape(shape[0], spec.k)
        leaf = cls(
            spec=spec,
            master=HostArray.zeros(shape, spec.dtype),
            mu=mu,
            nu=nu,
            steps=aligned_zeros(shape[:2], np.int32),
            channels=channels,
            before=channels,
        )
        leaf.master.write(weight)
        return leaf

    @property
    def written(self) -> list[np.ndarray]:
        """Returns the arrays that updates write and `copy` copies."""
        sums = self.open.sums or ()
        return [*self.master.arrays, *self.mu.arrays, *self.nu.arrays, self.steps, *sums]

    @property
    def arrays(self) -> list[np.ndarray]:
        """Returns all of the leaf's own arrays, including spare sums but not mail."""
        return [*self.written, self.channels, *(self.spare or ())]

    @property
    def to_upload(self) -> np.ndarray:
        """Returns the masters in the leaf's dtype and shape, for an upload, without a copy."""
        return self.master.values.reshape(self.spec.shape)

    @property
    def nbytes(self) -> int:
        """Returns a copy's bytes without step counts: at most 20 per parameter."""
        sums = 8 * self.master.size if self.open.kept and self.open.sums is None else 0
        return sum(x.nbytes for x in self.written) - self.steps.nbytes + sums

    def new_sums(self) -> Sums:
        return Sums(*(aligned_zeros(self.master.shape) for _ in Sums._fields))

    def alias(self) -> "HostLeaf":
        """Returns the leaf in the same memory; mail added later is not included."""
        window = dataclasses.replace(self.open, kept=list(self.open.kept))
        return dataclasses.replace(self, open=window, spare=None)

    def copy(self, adam: HostAdam) -> "HostLeaf":
        """Copies an alias, except arrays of channels, which are never overwritten.

        `adam` sums the mail. Neither copy nor alias keeps it: pinned memory is scarce.
        """
        sums, first = self.open.sums, self.open.sums is None
        sums = self.new_sums() if sums is None else Sums(*map(copied, sums))
        if self.open.kept:
            adam.accumulate(sums, self.open.kept, first=first)
        self.open = window = WindowGradients(None if first and not self.open.kept else sums)
        return dataclasses.replace(
            self,
            spare=None,
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
    scalars: AdamScalars  # of its last step
    # By leaf number; empty if no step counted. A leaf's update drops its entry.
    gradients: dict[int, WindowGradients]
    # Bool (entries, n): channels to update, except those that enter before the update.
    active: dict[int, np.ndarray]


class HostState:
    """The deferred half of a run on the host. Must be used by one thread at a time.

    Each entry in `pieces` lists the numbers of leaves that share memory in a mail. `before_write`
    is called with a leaf's number before the leaf's arrays are written; it may wait.
    """

    def __init__(
        self,
        leaves: list[HostLeaf],
        adam: HostAdam,
        schedule: Schedule,
        pieces: Sequence[Sequence[int]],
    ):
        self.leaves = leaves
        self._pieces = pieces
        self._adam = adam
        self._scaled = schedule.window_scaling
        self.counted = [0] * schedule.groups  # steps in each open window that were not skipped
        self._mail_bytes = [x.master.size * x.spec.mail_dtype.itemsize for x in self.leaves]
        self.windows = 0  # closed so far
        self._closed: list[ClosedWindow] = []  # windows waiting for their updates
        self._overflowed = False  # whether gradients ever exceeded the limit, so sums are reused
        # A window uses its last step's hyperparameters, even if that step was skipped.
        self.scalars: AdamScalars | None = None
        self.before_write: Callable[[int], None] = lambda i: None

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all arrays, including spare sums; none is in pinned memory."""
        return sum(x.nbytes for leaf in self.leaves for x in leaf.arrays)

    @property
    def pinned_bytes(self) -> int:
        """Returns the bytes of kept mail, the only arrays in memory that jax has pinned."""
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

        For each leaf, `arrays` contains "master", "mu", "nu", "steps", "before" unless no channels
        are selected, and, if its open window has gradients, their sum "total" and the sum of their
        "squares". `counted` lists the number of steps in each group's open window.
        """
        self.windows, self.counted = closed, list(counted)
        for leaf, saved in zip(self.leaves, arrays, strict=True):
            for name in ("master", "mu", "nu"):
                getattr(leaf, name).write(saved[name])
            leaf.steps[...] = saved["steps"].reshape(leaf.steps.shape)
            if leaf.spec.k:
                leaf.before = saved["before"].reshape(leaf.before.shape)
            if counted[leaf.spec.group]:
                wide = (saved[name].reshape(leaf.master.shape) for name in ("total", "squares"))
                leaf.open.sums = Sums(*map(copied, wide))

    def close(self) -> None:
        # A caller that waits for a failed update may still hold these lists.
        for window in self._closed:
            for gradients in window.gradients.values():
                gradients.clear()
        self.leaves, self._closed = [], []
        self._adam.close()

    def load(self, i: int, weight: np.ndarray) -> None:
        """Overwrites leaf `i`'s masters."""
        self.before_write(i)
        self.leaves[i].master.write(weight)

    def add(self, gradients: Sequence[np.ndarray], factor: float) -> None:
        """Adds one step's gradients to the open windows, multiplied by `factor`.

        The host keeps them for their window's update, which sums them. If there are too many, the
        host sums some immediately, which does not affect the result.
        """
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.open.kept.append((gradient.reshape(leaf.master.shape), factor))
        self.counted = [steps + 1 for steps in self.counted]
        for least in (GRADIENTS_PER_PASS, 1):
            if self.pinned_bytes <= MAILS_KEPT * sum(self._mail_bytes):
                break
            self._overflowed = True
            for i, leaf in enumerate(self.leaves):
                if len(leaf.open.kept) >= least:
                    self._add_up(i, leaf.open)

    def _add_up(self, i: int, gradients: WindowGradients, end: int | None = None) -> Sums:
        """Adds a window's mail of leaf `i`, up to `end`, to its sums."""
        leaf, sums = self.leaves[i], gradients.sums
        self.before_write(i)  # a save must not keep mail that is freed here
        if sums is None:
            sums, leaf.spare = leaf.spare or leaf.new_sums(), None
        if gradients.kept:
            self._adam.accumulate(sums, gradients.kept[:end], first=gradients.sums is None)
        gradients.sums = sums
        del gradients.kept[:end]
        return sums

    def close_window(self, group: int) -> ClosedWindow:
        """Ends a group's open window."""
        assert self.scalars, "no mail has arrived"
        self.windows += 1
        counted, self.counted[group] = self.counted[group], 0
        leaves = {i: leaf for i, leaf in enumerate(self.leaves) if leaf.spec.group == group}
        closed = ClosedWindow(
            number=self.windows,
            counted=counted,
            scalars=self.scalars,
            gradients={i: x.open for i, x in leaves.items() if counted},
            active={i: ~_members(x.channels, x.spec.n) for i, x in leaves.items()},
        )
        for leaf in leaves.values():
            leaf.open, leaf.before = WindowGradients(), leaf.channels
        self._closed.append(closed)
        return closed

    def update(self, window: ClosedWindow) -> Iterator[tuple[int, bool]]:
        """Makes a window's update in chunks of a few milliseconds.

        Yields a leaf's number, and whether the leaf is finished, before each chunk and after each
        leaf. The group's hand-overs must not run in between.
        """
        for i, gradients in window.gradients.items():
            leaf = self.leaves[i]
            yield i, False
            self.before_write(i)
            for _ in self._step(window, i, window.active[i]):
                yield i, False
            if self._overflowed and leaf.open.sums is None:
                leaf.spare = gradients.sums or leaf.spare
            gradients.clear()
            yield i, True
        self._closed.remove(window)

    def hand_over(
        self, window: ClosedWindow, i: int, leaving: Sequence[np.ndarray], chosen: np.ndarray
    ) -> list[np.ndarray]:
        """Takes back leaf `i`'s selected channels; returns a copy of the `chosen` channels' state.

        A state is float32 masters and moments, and int32 counts, in any shape. The update of the
        window that just closed is still pending: this call updates the entering channels at once,
        and removes them from that update.
        """
        self.before_write(i)
        leaf, active = self.leaves[i], window.active[i]
        arrays, shape = (leaf.master, leaf.mu, leaf.nu), leaf.spec.view3(leaf.spec.k)
        *rows, steps = leaving
        rows = [x.reshape(shape) for x in rows]
        self._adam.put(arrays, leaf.channels, rows)
        np.put_along_axis(leaf.steps, leaf.channels, steps.reshape(shape[:2]), axis=-1)
        entering = active & _members(chosen, leaf.spec.n)
        if window.gradients and entering.any():
            for _ in self._step(window, i, entering):
                pass
        window.active[i] = active & ~entering
        before, leaf.channels = leaf.channels, chosen
        taken = self._adam.take(arrays, chosen)
        if leaf.mu.extra is not None:  # compact: only the host's stale copies are rounded
            for new, unrounded in zip(taken[1:], rows[1:], strict=True):
                _keep_staying(new, chosen, unrounded, before)
        return [*taken, np.take_along_axis(leaf.steps, chosen, axis=-1)]

    def _step(self, window: ClosedWindow, i: int, active: np.ndarray) -> Iterator[None]:
        leaf = self.leaves[i]
        scalars = window.scalars.scaled(leaf.spec.lr_scale)
        if not leaf.spec.decay:
            scalars = scalars._replace(weight_decay=0.0)
        step = window_step(scalars, window.counted, self._scaled)
        gradients, scale = window.gradients[i], 1 / window.counted  # for the means
        arrays = leaf.master, leaf.mu, leaf.nu, leaf.steps
        if not self._scaled and window.counted > 1:
            # As in the paper: a step whose only gradient is the mean.
            mean = [(self._add_up(i, gradients).gradients, scale)]
            return self._adam.adamw(*arrays, mean, 1.0, active, step)
        if len(gradients.kept) > GRADIENTS_PER_PASS:
            self._add_up(i, gradients, -GRADIENTS_PER_PASS)
        sums = gradients.sums
        return self._adam.adamw(*arrays, gradients.kept, scale, active, step, sums)


def _keep_staying(
    taken: np.ndarray, chosen: np.ndarray, unrounded: np.ndarray, before: np.ndarray
) -> None:
    """Restores the rows in `unrounded` for channels that stay selected."""
    for rows, new, old_rows, old in zip(taken, chosen, unrounded, before, strict=True):
        _, at, was_at = np.intersect1d(new, old, assume_unique=True, return_indices=True)
        rows[at] = old_rows[was_at]


def _members(channels: np.ndarray, n: int) -> np.ndarray:
    """Returns whether each channel is among `channels` (entries, k), as bool (entries, n)."""
    members = np.zeros((channels.shape[0], n), bool)
    np.put_along_axis(members, channels, True, axis=-1)
    return members
