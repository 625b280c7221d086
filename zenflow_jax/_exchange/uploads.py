"""Uploads for the worker: updates, and channels that change hands."""

import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.memory import copy_to_host, upload, view
from zenflow_jax._diagnostics.timeline import Recorder
from zenflow_jax._exchange.hosted import new_parameter
from zenflow_jax._exchange.messages import Close
from zenflow_jax._exchange.parts import OffloadedLeaves, host_channels, put_piece
from zenflow_jax._host.leaf import HostLeaf
from zenflow_jax._host.state import ClosedWindow, HostState, SelectedRows
from zenflow_jax._spec.leaf import LeafSpec


def hand_over(
    host: HostState, offloaded: OffloadedLeaves, close: Close, window: ClosedWindow
) -> tuple[tuple[list[Any], list[Any]], int]:
    """Hands channels over; returns what `Close.entered` gives, and how many bytes were read."""
    parts = offloaded.groups[close.group].parts
    # Nothing of a leaf without selected channels: GPUs have no empty arrays in host memory.
    leaving = [
        [] if old is None else [part.of(x) for x in (close.chosen[part.leaf], *old)]
        for part in parts
        for old in [close.leaving[part.leaf]]
    ]
    in_host_memory = copy_to_host(leaving)
    entering: list[list[Any]] = [[None] * len(part.devices) for part in parts]
    # Some leaves cross while others are worked on.
    for i, (moved, part) in enumerate(zip(in_host_memory, parts, strict=True)):
        if not moved:
            continue
        chosen, *rows = moved
        new = host.hand_over(
            window, window.leaves[i], _as_rows(rows, part.spec), host_channels(chosen, part)
        )
        arrays = _as_on_device(new, part.spec)
        entering[i] = [upload(arrays, device) for device in part.devices]
    # The next step reads channels that leave from these.
    by_update = close.at_once and window.gradients
    hosted = [
        new_parameter(host.leaves, offloaded, i)
        if offloaded.specs[i].hosted and not by_update
        else None
        for i in offloaded.groups[close.group].leaves
    ]
    # The update writes to the arrays that they come from.
    jax.block_until_ready(hosted)
    return (entering, hosted), nbytes(in_host_memory)


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
    first = 0.0  # when the first upload began

    def finished(i: int, leaf: HostLeaf) -> None:
        nonlocal first
        if not offloaded.prefetched[i]:
            uploads.append([])
            return
        first = first or time.perf_counter()
        numbers = offloaded.crossing_with(i)
        uploads.append(put_piece(offloaded, numbers, lambda j: host.leaves[j].to_upload))

    for name in host.update(window, finished):
        yield f"the update of leaf {name}, window {window.number}"
    if first:
        recorder.works_at("wait for uploads", window.number)
        # The next update writes to the arrays that they come from.
        with jax.profiler.TraceAnnotation("zenflow: wait for uploads"):
            jax.block_until_ready(uploads)
        recorder.add("upload", "upload", first, window.number)
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
