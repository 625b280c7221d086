"""Captures an engine's state at one moment, for a tree in memory or for files.

Each process writes one file, from the host's own memory, while the run continues. The file contains
the parts that this process saves, each named after its position in the leaf (see `files.py`).
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.agreement import gather
from zenflow_jax._checkpoint.files import write_state
from zenflow_jax._checkpoint.tree import SUMS, arrays_of_leaves, encoded, place_of
from zenflow_jax._device.checksums import checksum
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import OffloadedLeaves
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

    Each has `nbytes`, and `copy` returns one in other memory.

    A leaf that is overwritten before it is saved is copied, if there is room for copies; otherwise
    its writer waits for the saver, which saves that leaf next.
    """

    def __init__(self, leaves: Mapping[int, Any], copy_bytes: int, copy: Callable[[Any], Any]):
        self._condition = threading.Condition()
        self._unsaved = dict(leaves)
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


class EngineSnapshot:
    """An engine's state at one moment, to be copied or written once, by any thread.

    Takes an idle worker's arrays without a copy, while the run continues. `state` may be abstract.
    `run` lacks the worker's counts and the checksum of `weights`, which is None if some of these
    were freed.
    """

    def __init__(
        self,
        state: ZenFlowState,
        run: RunState,
        weights: Sequence[jax.Array] | None,
        offloaded: OffloadedLeaves,
        worker: Worker,
        devices: Collection[Any],
        copy_bytes: int | None,
    ):
        run = dataclasses.replace(run, counted=list(worker.host.counted), params=0)
        # Before the first step, other parameters may be loaded. Other processes may have freed
        # more, but all must run the same programs.
        known = run.step > 0 and weights is not None
        if all(each for (each,) in gather([known], devices).values()) and weights is not None:
            run.params = checksum(weights)
        self._run = encoded(run, state)  # equal in all processes
        self._moment = f"step {run.step}, token {run.token}"  # equal there, and only there
        self.processes = sorted({device.process_index for device in devices})  # each writes a file
        self.written = Future()  # cancelled if the state was not saved
        self._parts, self._arrays = offloaded.parts, arrays_of_leaves(state)
        leaves = worker.leaves()
        saved = [i for i, part in enumerate(self._parts) if part.saved]
        groups = {i: self._parts[i].spec.group for i in saved}
        # Parts whose windows close next are written first.
        saved.sort(key=lambda i: (-run.open_steps[groups[i]], groups[i]))
        # For each saved part, the places of its arrays in the leaf's arrays, without empty sums.
        self._places = {
            i: {
                name: place_of(name, self._parts[i], offloaded.specs[self._parts[i].leaf])
                for name in self._arrays[self._parts[i].leaf]
                if run.counted[groups[i]] or name not in SUMS
            }
            for i in saved
        }
        self._adam = HostAdam(worker.kernel, 1)  # sums mail, on the calling thread
        if copy_bytes is None:
            copy_bytes = sum(leaf.master.size for leaf in leaves)
        copy = partial(HostLeaf.copy, adam=self._adam)
        self.unsaved = Snapshot({i: leaves[i].alias() for i in saved}, copy_bytes, copy)
        worker.unsaved = [*(x for x in worker.unsaved if not x.done), self.unsaved]

    def close(self) -> None:
        """Lets the run overwrite all leaves, saved or not. Safe to call twice."""
        self.written.cancel()
        self.unsaved.close()
        self._adam.close()

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of NumPy arrays, and closes the snapshot."""
        with contextlib.closing(self):
            if len(self.processes) > 1:
                raise ValueError("Other processes have parts of the state. Save with `EngineSave`.")
            leaves = [
                {name: aligned_zeros(x.shape, x.dtype) for name, x in arrays.items()}
                for arrays in self._arrays
            ]
            for i, leaf in self.unsaved.leaves():
                for name, place in self._places[i].items():
                    chunks = [x.reshape(-1) for _, x in self._elements(i, leaf, name)]
                    piece = np.concatenate(chunks).reshape(_size(place))
                    leaves[self._parts[i].leaf][name][place] = piece
            self.written.set_result(None)
            return {"leaves": leaves, LAYOUT_NAME: self._run}

    def write(self, folder: Path) -> None:
        """Writes this process's file to an existing folder, and closes the snapshot."""
        pieces = {
            self._piece(i, name): (self._arrays[self._parts[i].leaf][name].dtype, _size(place))
            for i, places in self._places.items()
            for name, place in places.items()
        }
        chunks = (
            (self._piece(i, name), *chunk)
            for i, leaf in self.unsaved.leaves()
            for name in self._places[i]
            for chunk in self._elements(i, leaf, name)
        )
        same = self.processes, self._moment, {LAYOUT_NAME: self._run}, self._arrays
        with contextlib.closing(self):
            write_state(folder, *same, pieces, chunks)
            self.written.set_result(None)

    def _piece(self, i: int, name: str) -> str:
        start = ",".join(str(s.start) for s in self._places[i][name])
        return f"leaves/{self._parts[i].leaf}/{name}@{start}"

    def _elements(self, i: int, leaf: HostLeaf, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the elements of part `i`'s array in chunks, each with its first index."""
        if name == "steps":
            yield 0, leaf.steps
        elif name == "before":
            yield 0, leaf.before + self._parts[i].first
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
        self._adam.accumulate(sums, kept, first=window.sums is None)
        return sums


def _size(place: Sequence[slice]) -> tuple[int, ...]:
    return tuple(s.stop - s.start for s in place)
