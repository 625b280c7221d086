"""Captures an engine's state at one moment, for a tree in memory or for files.

Each process writes one file, from the host's own memory, while the run continues. The file contains
the parts that this process saves, each named after its position in the leaf (see `stored.py`).
"""

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.resume import checksum, gather
from zenflow_jax._checkpoint.stored import write_state
from zenflow_jax._checkpoint.tree import (
    SUMS,
    arrays_of_leaves,
    encoded,
    place_of,
)
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves, Part
from zenflow_jax._exchange.progress import RunState
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import aligned_zeros
from zenflow_jax._host.numpy_kernel import Sums
from zenflow_jax._host.state import HostLeaf
from zenflow_jax._version import LAYOUT_NAME

# The number of elements to assemble at once, if the formats in memory and in the file differ.
_CHUNK = 1024 * 1024
# The interval at which a waiting thread checks whether it should end.
_POLL_S = 0.1


class Snapshot:
    """The host's leaves at one moment, in the order in which they are saved.

    Each has `nbytes` and `alias()`; `copy` copies one.

    A leaf that is overwritten before it is saved is copied, if there is room for copies; otherwise
    its writer waits for the saver, which saves that leaf next.
    """

    def __init__(
        self,
        leaves: Mapping[int, Any],
        copy_bytes: int,
        copy: Callable[[Any], Any] = operator.methodcaller("copy"),
    ):
        self._condition = threading.Condition()
        self._unsaved = {i: leaf.alias() for i, leaf in leaves.items()}
        self._copied: set[int] = set()
        self._room, self._copy = copy_bytes, copy
        self._in_use: int | None = None  # the leaf whose memory the saver reads
        self._wanted: int | None = None

    @property
    def done(self) -> bool:
        """Returns whether writers no longer have to wait for the saver."""
        with self._condition:
            return self._in_use is None and self._unsaved.keys() <= self._copied

    def before_write(self, i: int, ended: Callable[[], bool]) -> bool:
        """Waits until leaf `i` may be written; returns False if `ended` returns True first."""
        with self._condition:
            leaf = self._unsaved.get(i)
            if leaf is not None and i not in self._copied and leaf.nbytes <= self._room:
                # Without memory for a copy, the writer waits.
                with contextlib.suppress(MemoryError):
                    self._unsaved[i] = self._copy(leaf)
                    self._copied.add(i)
                    self._room -= leaf.nbytes
            self._wanted = i
            while self._reads(i):
                if ended():
                    return False
                self._condition.wait(_POLL_S)
            self._wanted = None
            return True

    def leaves(self) -> Iterator[tuple[int, Any]]:
        """Yields each leaf as it was; requesting the next leaf releases the previous one."""
        while True:
            with self._condition:
                if not self._unsaved:
                    return
                i = self._wanted
                if i is None or not self._reads(i):
                    i = next(iter(self._unsaved))
                leaf = self._unsaved.pop(i)
                self._in_use = None if i in self._copied else i
            yield i, leaf
            with self._condition:
                self._in_use = None
                if i in self._copied:
                    self._copied.remove(i)
                    self._room += leaf.nbytes
                self._condition.notify_all()
            del leaf

    def close(self) -> None:
        """Releases all leaves; unsaved leaves stay unsaved. Safe to call twice."""
        with self._condition:
            self._unsaved.clear()
            self._in_use = None
            self._condition.notify_all()

    def _reads(self, i: int) -> bool:
        """Returns whether the saver is reading leaf `i`'s memory, or will read it."""
        return self._in_use == i or (i in self._unsaved and i not in self._copied)


@dataclass(frozen=True, eq=False)
class EngineSnapshot:
    """An engine's state at one moment, to be copied or written once, by any thread."""

    parts: Sequence[Part]
    arrays: Sequence[Mapping[str, jax.ShapeDtypeStruct]]  # for each offloaded leaf
    run: np.ndarray  # the encoded run state, which is equal in all processes
    moment: str  # equal in all processes, and only there
    adam: HostAdam  # sums mail, on the calling thread
    # For each saved part, the places of its arrays in the leaf's arrays; empty sums are left out.
    places: Mapping[int, Mapping[str, tuple[slice, ...]]]
    unsaved: Snapshot  # the host's arrays of these parts
    processes: Sequence[int]  # ascending; each writes a file
    written: Future = field(default_factory=Future)  # cancelled if the state was not saved

    @classmethod
    def take(
        cls,
        state: ZenFlowState,
        run: RunState,
        weights: Sequence[jax.Array] | None,
        offloaded: OffloadedLeaves,
        worker: Worker,
        devices: Collection[Any],
        copy_bytes: int | None,
    ) -> "EngineSnapshot":
        """Takes an idle worker's arrays without a copy, to be written while the run continues.

        `state` may be abstract. `run` lacks the worker's counts and the checksum of `weights`; None
        means that some of these were freed.
        """
        run = dataclasses.replace(run, counted=list(worker.host.counted), params=0)
        # Before the first step, other parameters may be loaded. Other processes may have freed
        # more, but all must run the same programs.
        known = run.step > 0 and weights is not None
        if all(each for (each,) in gather([known], devices).values()) and weights is not None:
            run.params = checksum(weights)
        leaves, arrays, parts = worker.leaves(), arrays_of_leaves(state), offloaded.parts
        if copy_bytes is None:
            copy_bytes = sum(leaf.master.size for leaf in leaves)
        saved = [i for i, part in enumerate(parts) if part.saved]
        # Parts whose windows close next are written first.
        saved.sort(key=lambda i: (-run.open_steps[parts[i].spec.group], parts[i].spec.group))
        places = {}
        for i in saved:
            leaf, counted = parts[i].leaf, run.counted[parts[i].spec.group]
            names = [name for name in arrays[leaf] if counted or name not in SUMS]
            places[i] = {name: place_of(name, parts[i], offloaded.specs[leaf]) for name in names}
        adam = HostAdam(worker.kernel, 1)
        copy = partial(HostLeaf.copy, adam=adam)
        unsaved = Snapshot({i: leaves[i] for i in saved}, copy_bytes, copy)
        worker.unsaved = [*(x for x in worker.unsaved if not x.done), unsaved]
        return cls(
            parts=parts,
            arrays=arrays,
            run=encoded(run, state),
            moment=f"step {run.step}, token {run.token}",
            adam=adam,
            places=places,
            unsaved=unsaved,
            processes=sorted({device.process_index for device in devices}),
        )

    def close(self) -> None:
        """Lets the run overwrite all leaves, saved or not. Safe to call twice."""
        self.written.cancel()
        self.unsaved.close()
        self.adam.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays, and closes the snapshot."""
        with contextlib.closing(self):
            if len(self.processes) > 1:
                raise ValueError("Other processes have parts of the state. Save with `EngineSave`.")
            leaves = [
                {name: aligned_zeros(x.shape, x.dtype) for name, x in arrays.items()}
                for arrays in self.arrays
            ]
            for i, leaf in self.unsaved.leaves():
                for name, place in self.places[i].items():
                    chunks = [x.reshape(-1) for _, x in self._elements(i, leaf, name)]
                    piece = np.concatenate(chunks).reshape(_size(place))
                    leaves[self.parts[i].leaf][name][place] = piece
            self.written.set_result(None)
            return {"leaves": leaves, LAYOUT_NAME: self.run}

    def write(self, folder: Path) -> None:
        """Writes this process's file to an existing folder, and closes the snapshot."""
        pieces = {
            self._piece(i, name): (self._array(i, name).dtype, _size(place))
            for i, places in self.places.items()
            for name, place in places.items()
        }
        chunks = (
            (self._piece(i, name), *chunk)
            for i, leaf in self.unsaved.leaves()
            for name in self.places[i]
            for chunk in self._elements(i, leaf, name)
        )
        same = self.processes, self.moment, {LAYOUT_NAME: self.run}, self.arrays
        with contextlib.closing(self):
            write_state(folder, *same, pieces, chunks)
            self.written.set_result(None)

    def _array(self, i: int, name: str) -> jax.ShapeDtypeStruct:
        return self.arrays[self.parts[i].leaf][name]

    def _piece(self, i: int, name: str) -> str:
        start = ",".join(str(s.start) for s in self.places[i][name])
        return f"leaves/{self.parts[i].leaf}/{name}@{start}"

    def _elements(self, i: int, leaf: HostLeaf, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the elements of part `i`'s array in chunks, each with its first index."""
        if name == "steps":
            yield 0, leaf.steps
        elif name == "before":
            yield 0, leaf.before + self.parts[i].first
        elif name in SUMS:
            for begin in range(0, leaf.master.size, _CHUNK):
                sums = self._sums(leaf, begin, min(begin + _CHUNK, leaf.master.size))
                yield begin, sums[SUMS.index(name)]
        else:
            yield from getattr(leaf, name).chunks(_CHUNK)

    def _sums(self, leaf: HostLeaf, begin: int, end: int) -> Sums:
        """Returns elements of the open window's sums, bit-identical for any chunk size."""
        sums, window = Sums(*(np.empty(end - begin, np.float32) for _ in SUMS)), leaf.open
        if window.sums is not None:
            for x, whole in zip(sums, window.sums.flat, strict=True):
                np.copyto(x, whole[begin:end])
        kept = [(mail.reshape(-1)[begin:end], factor) for mail, factor in window.kept]
        self.adam.accumulate(sums, kept, first=window.sums is None)
        return sums


def _size(place: Sequence[slice]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in place)
