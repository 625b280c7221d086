"""The state of every deferred channel: masters, moments, counts, and the open window.

NumPy arrays go in and come out; there is no thread and no jax array. `_exchange/worker.py` decides
when these methods run, and `adam.py` does the arithmetic. Arrays have the leaf's full shape, viewed
as `(groups, rows, n, tail)`. Rows of selected channels are not current: those are on the device.

Letters: `n` channels in a group, `k` of them selected.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.aligned import blank, copied
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import AdamScalars

#: The most mails that are kept. An update frees the closed window's mails leaf by leaf while those
#: of the next one come in. So windows of four steps need no sums as long as the update keeps up.
MAILS_KEPT = 5


@dataclasses.dataclass
class HostLeaf:
    """One leaf's arrays, all `(groups, rows, n, tail)` unless said otherwise."""

    spec: LeafSpec
    master: np.ndarray  # float32
    mu: np.ndarray  # float32
    nu: np.ndarray  # float32
    steps: np.ndarray  # int32 (groups, n): Adam steps of each channel
    channels: np.ndarray  # int32 (groups, k), ascending: selected now
    out: np.ndarray | None  # what is uploaded, in the leaf's dtype; None if that is the master
    # The open window: the float32 sum of its first mails, if any were added up; then the other
    # mails in order, each with its factor. Mails are views of host memory that is freed with them.
    total: np.ndarray | None = None
    mails: list[tuple[np.ndarray, float]] = dataclasses.field(default_factory=list)
    # Sums not in use. While an update runs two may be in use: its window's, and the next one's.
    spare: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def to_upload(self) -> np.ndarray:
        """What an update uploads of the leaf, in its shape. Not a copy."""
        return (self.master if self.out is None else self.out).reshape(self.spec.shape)

    def take_master(self, weight: np.ndarray) -> None:
        """Sets the masters to these parameters."""
        np.copyto(self.master, weight.reshape(self.master.shape), casting="unsafe")


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


@dataclasses.dataclass(frozen=True)
class ClosedWindow:
    """What a window's update needs, frozen where the window closed."""

    number: int
    scale: float  # one over the steps that counted
    scalars: AdamScalars  # of its last step
    # One for each leaf; none if no step counted. The update of a leaf drops them.
    gradients: list[WindowGradients]
    # Bool (groups, n): channels to update. Those that enter before the update are taken out.
    active: list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class SelectedRows:
    """A leaf's selected channels as they cross in a hand-over; shapes as on the device."""

    master: np.ndarray  # float32 (groups, rows, k, tail)
    mu: np.ndarray
    nu: np.ndarray
    steps: np.ndarray  # int32 (groups, k)


class HostState:
    """The deferred half of a run on the host. For one thread at a time.

    Args:
        specs: The offloaded leaves.
        weights: Their parameters, in the order of `specs`.
        channels: Their selected channels, `(*stack, k)`.
        adam: The kernels.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        weights: Iterable[np.ndarray],
        channels: Iterable[np.ndarray],
        adam: HostAdam,
    ):
        self.leaves = [_new_leaf(*args) for args in zip(specs, weights, channels, strict=True)]
        self._adam = adam
        self.counted = 0  # steps summed in the open window
        self.windows = 0
        self._closed: list[WindowGradients] = []  # of the last window that closed
        self._overflowed = False  # mails were too many once: sums are worth keeping
        self.scalars: AdamScalars | None = None  # of the last step, skipped or not
        self.update_scalars: AdamScalars | None = None  # of the last window that closed

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, spare ones included."""
        return sum(
            x.nbytes
            for leaf in self.leaves
            for x in (*vars(leaf).values(), *leaf.spare)
            if isinstance(x, np.ndarray)
        )

    @property
    def mails_kept(self) -> float:
        """Number of mails kept, for the open window and for the one whose update is in progress."""
        sizes = [leaf.master.size * leaf.spec.mail_dtype.itemsize for leaf in self.leaves]
        opened = sum(n * len(leaf.mails) for n, leaf in zip(sizes, self.leaves, strict=True))
        # None before the first window closes, nor for a window of which no step counted.
        closed = sum(n * len(x.sources) for n, x in zip(sizes, self._closed, strict=False))
        return (opened + closed) / max(sum(sizes), 1)

    def resume(
        self,
        arrays: Iterable[Mapping[str, np.ndarray]],
        *,
        counted: int,
        windows: int,
        scalars: AdamScalars | None,
        update_scalars: AdamScalars | None,
    ) -> None:
        """Continues another run's state; the selected channels are there already.

        Args:
            arrays: "master", "mu", "nu" and "steps" of each leaf, and "total" if any step is in it,
                unless the device adds up.
            counted: Steps summed in the open window.
            windows: Windows closed.
            scalars: Scalars of the last step.
            update_scalars: Scalars of the last window that closed.
        """
        self.counted, self.windows = counted, windows
        self.scalars, self.update_scalars = scalars, update_scalars
        for leaf, of_leaf in zip(self.leaves, arrays, strict=True):
            for name in ("master", "mu", "nu", "steps"):
                array = getattr(leaf, name)
                array[...] = of_leaf[name].reshape(array.shape)
            if counted and "total" in of_leaf:
                leaf.total = copied(of_leaf["total"].reshape(leaf.master.shape))

    def casts(self) -> Iterator[np.ndarray]:
        """What each leaf uploads: all its masters, in its dtype."""
        for leaf in self.leaves:
            if leaf.out is not None:
                np.copyto(leaf.out, leaf.master, casting="unsafe")
            yield leaf.to_upload

    def close(self) -> None:
        """Frees the arrays and ends the kernels' threads."""
        # A caller that waits for a failed update may still hold these lists.
        for gradients in self._closed:
            gradients.clear()
        self.leaves, self._closed = [], []
        self._adam.close()

    def note(self, scalars: AdamScalars) -> None:
        """Keeps the scalars of a step; the last ones before a window closes are the window's."""
        self.scalars = scalars

    def add(self, gradients: Sequence[np.ndarray], factor: float) -> None:
        """Adds one step's gradients to the open window, `factor` times.

        They are kept until the window's update, which adds them up on its way through memory; if
        there are too many, they are added up now. That changes no bit.
        """
        self._keep(gradients, factor)
        self.counted += 1
        if self.mails_kept > MAILS_KEPT:
            self._overflowed = True
            self.add_up()

    def count(self) -> None:
        """Counts one step into the open window, whose gradients the device adds up."""
        self.counted += 1

    def take_sums(self, sums: Sequence[np.ndarray]) -> None:
        """Takes in the device's sums of the open window, which closes now."""
        if self.counted:
            self._keep(sums, 1.0)

    def add_up(self) -> None:
        """Adds up the open window's kept gradients, and drops them."""
        for leaf in self.leaves:
            if not leaf.mails:
                continue
            first = leaf.total is None
            if leaf.total is None:
                leaf.total = leaf.spare.pop() if leaf.spare else blank(leaf.master.shape)
            self._adam.accumulate(leaf.total, leaf.mails, first=first)
            leaf.mails.clear()

    def _keep(self, gradients: Sequence[np.ndarray], factor: float) -> None:
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.mails.append((gradient.reshape(leaf.master.shape), factor))

    def close_window(self) -> ClosedWindow:
        """Ends the open window; the next mail begins another."""
        assert self.scalars is not None
        self.windows += 1
        counted, self.counted = self.counted, 0
        closed = ClosedWindow(
            number=self.windows,
            scale=1 / max(counted, 1),
            scalars=self.scalars,
            gradients=[WindowGradients(leaf.total, leaf.mails) for leaf in self.leaves if counted],
            active=[~_members(leaf.channels, leaf.spec.n) for leaf in self.leaves],
        )
        for leaf in self.leaves:
            leaf.total, leaf.mails = None, []
        self._closed, self.update_scalars = closed.gradients, self.scalars
        return closed

    def update(
        self,
        window: ClosedWindow,
        finished: Callable[[int, HostLeaf], None],
    ) -> Iterator[str]:
        """Makes a window's update, a bounded piece at a time.

        Args:
            window: The window to update with.
            finished: Called with the number and arrays of each leaf that is done.

        Yields:
            The leaf's name before each piece. Other methods may run in between, but no hand-over.
        """
        if not window.gradients:
            return
        for i, (leaf, gradients, active) in enumerate(
            zip(self.leaves, window.gradients, window.active, strict=True)
        ):
            scalars = _for_leaf(window.scalars, leaf.spec)
            yield leaf.spec.name
            for _ in self._adam.adamw(
                leaf.master,
                leaf.mu,
                leaf.nu,
                leaf.steps,
                gradients.sources,
                window.scale,
                active,
                scalars,
                leaf.out,
            ):
                yield leaf.spec.name
            if self._overflowed and gradients.total is not None:
                leaf.spare.append(gradients.total)
            gradients.clear()
            finished(i, leaf)

    def hand_over(
        self, window: ClosedWindow, i: int, leaving: SelectedRows, chosen: np.ndarray
    ) -> SelectedRows:
        """Takes one leaf's selected channels back and returns the newly chosen ones' state.

        The update of the window that just closed is still to come: entering channels get theirs
        here, on their own, and are taken out of it.

        Args:
            window: The window that just closed.
            i: The leaf's number.
            leaving: The state that the device holds.
            chosen: The channels that are selected from now on, int32 (groups, k).

        Returns:
            The state that the device holds from now on; copies.
        """
        leaf, active = self.leaves[i], window.active[i]
        wide = (leaf.master, leaf.mu, leaf.nu)
        self._adam.put(wide, leaf.channels, (leaving.master, leaving.mu, leaving.nu))
        np.put_along_axis(leaf.steps, leaf.channels, leaving.steps, axis=-1)
        entering = active & _members(chosen, leaf.spec.n)
        if window.gradients and entering.any():
            scalars = _for_leaf(window.scalars, leaf.spec)
            for _ in self._adam.adamw(
                *wide,
                leaf.steps,
                window.gradients[i].sources,
                window.scale,
                entering,
                scalars,
                None,
            ):
                pass
        window.active[i] = active & ~entering
        leaf.channels = chosen
        master, mu, nu = self._adam.take(wide, chosen)
        steps = np.take_along_axis(leaf.steps, chosen, axis=-1)
        return SelectedRows(master, mu, nu, steps)


def _new_leaf(spec: LeafSpec, weight: np.ndarray, channels: np.ndarray) -> HostLeaf:
    shape = spec.view4(spec.n)
    groups = shape[0]
    return HostLeaf(
        spec=spec,
        # Copied: the parameter's memory belongs to the device.
        master=copied(weight.reshape(shape), np.float32),
        mu=blank(shape),
        nu=blank(shape),
        steps=blank((groups, spec.n), np.int32),
        channels=np.array(channels, np.int32).reshape(groups, spec.k),
        out=np.zeros(shape, spec.dtype) if spec.keeps_master else None,
    )


def _for_leaf(scalars: AdamScalars, spec: LeafSpec) -> AdamScalars:
    return scalars if spec.decay else scalars._replace(weight_decay=0.0)


def _members(channels: np.ndarray, n: int) -> np.ndarray:
    """Bool (groups, n): whether a channel is among `channels` (groups, k)."""
    members = np.zeros((channels.shape[0], n), bool)
    np.put_along_axis(members, channels, True, axis=-1)
    return members
