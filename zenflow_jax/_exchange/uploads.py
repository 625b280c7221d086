"""Uploads for the worker: updates, and channels that change hands."""

import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import copy_to_host, upload, view
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._exchange.messages import Close
from zenflow_jax._exchange.parts import OffloadedLeaves, Part, host_channels
from zenflow_jax._host.leaf import HostLeaf
from zenflow_jax._host.state import ClosedWindow, HostState, SelectedRows
from zenflow_jax._plan.leaf import LeafSpec

# About how many bytes one call uploads.
_BYTES_PER_UPLOAD = 8 * 2**20


class Uploads:
    """Uploads arrays of parts to their devices; small ones together, as a call costs megabytes."""

    def __init__(self, parts: Sequence[Part], arrived: list[list[Any]]):
        self._parts = parts
        self._arrived = arrived
        self._ready: dict[int, Any] = {}
        self._size = 0

    def add(self, i: int, arrays: Any) -> None:
        """Uploads a tree of NumPy arrays of part `i`, now or together with what follows."""
        self._ready[i] = arrays
        self._size += nbytes(arrays)
        if self._size > _BYTES_PER_UPLOAD:
            self.send()

    def send(self) -> None:
        devices = {device for i in self._ready for device in self._parts[i].devices}
        for device in sorted(devices, key=lambda device: device.id):
            trees = {i: x for i, x in self._ready.items() if device in self._parts[i].devices}
            for i, x in upload(trees, device).items():
                self._arrived[i][self._parts[i].devices.index(device)] = x
        self._ready, self._size = {}, 0


def hand_over(
    host: HostState, parts: Sequence[Part], close: Close, window: ClosedWindow
) -> tuple[list[Any], int]:
    """Hands channels over; returns what `Close.entered` gives, and how many bytes were read."""
    # Nothing of a leaf without selected channels: GPUs have no empty arrays in host memory.
    leaving = [
        [] if old is None else [part.of(x) for x in (close.chosen[part.leaf], *old)]
        for part in parts
        for old in [close.leaving[part.leaf]]
    ]
    in_host_memory = copy_to_host(leaving)
    entering: list[list[Any]] = [[None] * len(part.devices) for part in parts]
    ready = Uploads(parts, entering)
    # Some leaves cross while others are worked on.
    for i, (moved, part) in enumerate(zip(in_host_memory, parts, strict=True)):
        if not moved:
            continue
        chosen, *rows = moved
        new = host.hand_over(
            window, window.leaves[i], _as_rows(rows, part.spec), host_channels(chosen, part)
        )
        ready.add(i, _as_on_device(new, part.spec))
    ready.send()
    return entering, nbytes(in_host_memory)


def update(
    host: HostState,
    offloaded: OffloadedLeaves,
    group: int,
    window: ClosedWindow,
    recorder: Recorder,
) -> Generator[str, None, list[list[Any]]]:
    """Makes a window's update, and uploads what is prefetched; returns what `Close.done` gives.

    Yields where it is, before each bounded piece.
    """
    uploads: list[list[Any]] = []
    ready = Uploads(offloaded.groups[group].parts, uploads)
    first = 0.0  # when the first upload began

    def finished(i: int, leaf: HostLeaf) -> None:
        nonlocal first
        early = offloaded.prefetched[i]
        uploads.append([None] * len(offloaded.parts[i].devices) if early else [])
        if early:
            first = first or time.perf_counter()
            ready.add(len(uploads) - 1, leaf.to_upload)

    for name in host.update(window, finished):
        yield f"the update of leaf {name}, window {window.number}"
    ready.send()
    if first:
        recorder.works_at("wait for uploads", window.number)
        # The next update writes to the arrays that they come from.
        with jax.profiler.TraceAnnotation("zenflow: wait for uploads"):
            jax.block_until_ready(uploads)
        recorder.uploaded(window.number, first)
    return uploads


def _as_rows(arrays: Sequence[jax.Array], spec: LeafSpec) -> SelectedRows:
    shape = spec.view4(spec.k)
    master, mu, nu, steps = map(view, arrays)
    return SelectedRows(
        master.reshape(shape),
        mu.reshape(shape),
        nu.reshape(shape),
        steps.reshape(shape[::2]),
    )


def _as_on_device(rows: SelectedRows, spec: LeafSpec) -> tuple[np.ndarray, ...]:
    wide = (x.reshape(spec.selected_shape) for x in (rows.master, rows.mu, rows.nu))
    return (*wide, rows.steps.reshape(*spec.stack, spec.k))


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))
