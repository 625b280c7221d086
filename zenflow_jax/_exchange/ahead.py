"""Compiles the large programs of boundaries while the first step compiles.

jax compiles a program where it is called first, and Numba a loop: where the first window closes, or
where the warm-up ends. Merge, choose and enter take some seconds for each group of a model with a
hundred leaves; all other programs are small. `ZENFLOW_JAX_COMPILE_AHEAD=0` in the environment
switches this off, for programs that make many engines and few steps with each.
"""

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from zenflow_jax._device.boundary import (
    SinceMerge,
    abstract_channel_rows,
    choose,
    enter,
    merge,
    uploads_in_two,
)
from zenflow_jax._device.samples import abstract_samples
from zenflow_jax._device.state import ZenFlowState
from zenflow_jax._exchange.parts import Group, OffloadedLeaves, part_sharding
from zenflow_jax._host.adam import compile_loops
from zenflow_jax._plan.leaf import LeafSpec


class Ahead:
    """One engine's programs, compiled on a thread of their own. For one calling thread."""

    def __init__(self) -> None:
        self._on = os.environ.get("ZENFLOW_JAX_COMPILE_AHEAD", "1") != "0"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="zenflow-compile")
        self._compiled: dict[Hashable, Future] = {}

    def prepare_run(
        self,
        offloaded: OffloadedLeaves,
        weights: Sequence[jax.Array],
        state: ZenFlowState,
        host_kernel: str,
        *,
        compact: bool,
    ) -> None:
        """Begins to compile what a run's boundaries need, in the order in which they come."""
        if not self._on:
            return
        # The last group's first window is the shortest.
        for number, group in reversed(list(enumerate(offloaded.groups))):
            if group.leaves:
                self._prepare_group(number, group, offloaded.pick(state.leaves), weights, state)
        specs, window = [part.spec for part in offloaded.parts], state.schedule.longest_window
        self._pool.submit(compile_loops, host_kernel, specs, window, compact=compact)

    def _prepare_group(
        self,
        number: int,
        group: Group,
        leaves: Sequence[Any],
        weights: Sequence[jax.Array],
        state: ZenFlowState,
    ) -> None:
        specs, states = group.specs, group.pick(leaves)
        params = [abstract(x) for x in group.pick(weights)]
        channels = [_abstract_cut(s.channels, x) for s, x in zip(states, specs, strict=True)]
        scores = [_abstract_cut(s.scores, x) for s, x in zip(states, specs, strict=True)]
        masters = [
            jax.ShapeDtypeStruct(spec.selected_shape, np.float32, sharding=s.mu.sharding)
            for spec, s in zip(specs, states, strict=True)
        ]
        kept = [None if s.master is None else m for s, m in zip(states, masters, strict=True)]
        self.prepare(("choose", number), choose, params, scores, channels, kept, specs=specs)
        entering = [i for i, spec in enumerate(specs) if spec.k]
        if entering:
            arrays = ([x[i] for i in entering] for x in (params, masters, channels))
            of_entering = tuple(specs[i] for i in entering)
            self.prepare(("enter", number), enter, *arrays, specs=of_entering)
        uploads = [
            jax.ShapeDtypeStruct(spec.shape, x.dtype, sharding=part_sharding(x, spec))
            for x, spec in zip(params, specs, strict=True)
        ]
        rows, reach = abstract_channel_rows(params, specs), jax.tree.map(abstract, state.reach)
        since = SinceMerge(rows, rows, abstract_samples(params, specs), reach)
        static = {"specs": specs, "window": state.schedule.longest_window}
        arrays = (params, *uploads_in_two(uploads, specs), since)
        self.prepare(("merge", number), merge, *arrays, **static)

    def prepare(self, key: Hashable, program: Any, *arrays: Any, **static: Any) -> None:
        """Begins to compile a jitted program for trees of abstract arrays."""
        self._compiled[key] = self._pool.submit(lambda: program.lower(*arrays, **static).compile())

    def call(self, key: Hashable, program: Any, *arrays: Any, **static: Any) -> Any:
        """What the program returns; of a prepared one, without compiling anything."""
        compiled = self._compiled.get(key)
        if compiled is not None and compiled.exception() is None:
            try:
                return compiled.result()(*arrays)
            except (TypeError, ValueError):
                # Other arrays than were expected: nothing has run, and `jit` takes any.
                del self._compiled[key]
        return program(*arrays, **static)

    def close(self) -> None:
        """Drops what is not compiled yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._compiled.clear()


def abstract(x: Any) -> jax.ShapeDtypeStruct:
    """An array's shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _abstract_cut(x: jax.Array, spec: LeafSpec) -> jax.ShapeDtypeStruct:
    """What `cut` gives of an array."""
    shape = x.shape if spec.start is None else (spec.shape[0], *x.shape[1:])
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
