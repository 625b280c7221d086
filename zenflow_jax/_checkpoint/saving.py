"""Takes an engine's state as of one moment, for a tree in memory or for files.

Files are written from the host's own memory, while the run goes on. Each process writes one. It has
the parts of leaves that are this process's to save, each under its place in the leaf, so that other
numbers of processes and devices can read them (`stored.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from zenflow_jax._checkpoint.counts import Counts
from zenflow_jax._checkpoint.same_run import LastParameters
from zenflow_jax._checkpoint.tensor_file import FORMAT, TensorWriter, file_name
from zenflow_jax._checkpoint.tree import Content
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.mailbox import Mailbox
from zenflow_jax._exchange.parts import OffloadedLeaves, devices_of
from zenflow_jax._exchange.progress import Progress
from zenflow_jax._exchange.snapshot import Snapshot
from zenflow_jax._exchange.updates import Updates
from zenflow_jax._exchange.worker import Worker
from zenflow_jax._host.adam import HostAdam


class Saver:
    """Saves one engine. For its calling thread, while the worker has nothing to do."""

    def __init__(
        self,
        state: ZenFlowState,
        weights: Sequence[jax.Array],
        offloaded: OffloadedLeaves,
        host_kernel: str,
        worker: Worker,
        mailbox: Mailbox,
        progress: Progress,
        updates: Updates,
    ):
        devices = devices_of(weights)
        self._last = LastParameters(devices)
        self.note(weights)
        self._abstract = jax.tree.map(_shape, state)
        self._offloaded, self._host_kernel = offloaded, host_kernel
        self._processes = sorted({device.process_index for device in devices})
        self._worker, self._mailbox = worker, mailbox
        self._progress, self._updates = progress, updates

    def note(self, weights: Sequence[jax.Array]) -> None:
        """Remembers the parameters that the caller has now, without keeping them alive."""
        self._last.note(weights)

    def tree(self) -> dict[str, Any]:
        """Copies the state into a tree of arrays."""
        content = self._content()
        try:
            return content.tree(self._worker.leaves())
        finally:
            content.adam.close()

    def stream(self, copy_bytes: int | None) -> "EngineStream":
        """Takes the state without a copy, to be written while the run goes on.

        The run waits for whoever has it: it must be written or closed.

        Args:
            copy_bytes: Memory for copies; None for a byte for each parameter.
        """
        content, leaves = self._content(), self._worker.leaves()
        order, parts = self._progress.next_to_close(), self._offloaded.parts
        saved = [i for i, part in enumerate(parts) if part.saved]
        saved.sort(key=lambda i: order.index(parts[i].spec.group))
        if copy_bytes is None:
            copy_bytes = sum(leaf.master.size for leaf in leaves)
        snapshot = Snapshot({i: leaves[i] for i in saved}, copy_bytes)
        self._worker.hold(snapshot)
        return EngineStream(content, snapshot, saved, self._processes)

    def _content(self) -> Content:
        pending, progress = self._updates.wait(), self._progress
        specs = [leaf.spec for leaf in self._abstract.leaves]
        counts = Counts(
            step=progress.step,
            open_steps=progress.open_steps,
            pending=pending,
            token=self._mailbox.token,
            reselections=progress.reselections,
            window_lengths=progress.window_lengths,
            schedule_state=progress.schedule_state,
            shares=progress.shares,
            # Before the first step others may be loaded.
            fingerprints=self._last.fingerprints(specs)
            if progress.step
            else np.zeros(len(specs), np.uint32),
            **self._worker.counts(),
        )
        adam = HostAdam(self._host_kernel, 1)
        return Content.of(self._abstract, self._offloaded, counts, self._updates.before, adam)


@dataclass(frozen=True, eq=False)
class EngineStream:
    """An engine's state as of one moment, to be written once, by any thread.

    Attributes:
        content: What is saved.
        snapshot: The host's arrays.
        parts: The numbers of the parts that this process saves, which the snapshot has.
        processes: Those that the engine is in, ascending; each writes a file.
    """

    content: Content
    snapshot: Snapshot
    parts: Sequence[int]
    processes: Sequence[int]

    def close(self) -> None:
        """Lets the run write where it likes; what is not saved then never will be. Safe twice."""
        self.snapshot.close()
        self.content.adam.close()

    def write(self, folder: Path) -> None:
        """Writes this process's file into a folder that is there; then it is closed."""
        try:
            self._write(folder)
        finally:
            self.close()

    def _write(self, folder: Path) -> None:
        small = dict(_flat(self.content.small, ""))
        large = {i: self._tensors(i) for i in self.parts}
        tensors = {name: (x.dtype, x.shape) for name, x in small.items()}
        for of_part in large.values():
            tensors |= {tensor: (dtype, shape) for tensor, dtype, shape in of_part.values()}
        shapes = [
            {name: (np.dtype(dtype).name, shape) for name, (shape, dtype, _) in leaf.items()}
            for leaf in self.content.arrays
        ]
        # Others may be in jax's run, each with an engine and checkpoints of its own.
        number, count = self.processes.index(jax.process_index()), len(self.processes)
        metadata = {
            "format": FORMAT,
            "processes": str(count),
            "leaves": json.dumps(shapes),
        }
        missing = set(large)
        with TensorWriter(folder / file_name(number, count), tensors, metadata) as file:
            for name, x in small.items():
                file.write(name, np.ascontiguousarray(x))
            for i, leaf in self.snapshot.leaves():
                for name, (tensor, *_) in large[i].items():
                    for begin, elements in self.content.blocks(i, leaf, name):
                        file.write(tensor, elements, begin)
                missing.remove(i)
            if missing:
                raise RuntimeError(
                    f"expected to write {len(large)} parts of an engine's state, got all but "
                    f"{len(missing)} when it was closed. Save again, and let orbax finish: "
                    "`wait_until_finished`."
                )

    def _tensors(self, i: int) -> dict[str, tuple[str, Any, tuple[int, ...]]]:
        """Name in the file, dtype and shape of each array of part `i`."""
        leaf, tensors = self.content.offloaded.parts[i].leaf, {}
        for name, place in self.content.places(i).items():
            start = ",".join(str(s.start) for s in place)
            shape = tuple(s.stop - s.start for s in place)
            dtype = self.content.arrays[leaf][name][1]
            tensors[name] = (f"leaves/{leaf}/{name}@{start}", dtype, shape)
        return tensors


def _flat(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    for name, x in tree.items():
        if isinstance(x, Mapping):
            yield from _flat(x, f"{prefix}{name}/")
        else:
            yield prefix + name, x


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
