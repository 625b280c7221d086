"""Checks that resumed parameters, optimizer state and engine state are all of one run.

Each engine draws a number, the same in every process of the run. From it come the tokens that the
engine gives to the optimizer state, and the one in its own state. Where step and token are equal,
both states are of the same engine and the same moment. The number is in no arithmetic. Parameters
cannot carry it, so a few hundred values of each leaf are compared with the masters on host and
device.
"""

import dataclasses
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import LeafState
from zenflow_jax._exchange.parts import Part, piece_of
from zenflow_jax._host.state import HostLeaf
from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.scalars import WindowStep

#: About how many values of each part are compared; they are spread over it.
COMPARED = 512

# How far a master with its update undone may be from the one before the update, relative to update
# and master: a few roundings of float32, of which the bias corrections' are largest.
_OF_UPDATE, _OF_MASTER = 2.0**-10, 2.0**-21
# A step makes a selected parameter the cast of its master. But a compiler for devices may round
# once less, and the float32 difference of numbers that are 2**16 apart is not exact.
_OF_LARGEST = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some values of a part of a parameter, taken before a checkpoint is read into the host."""

    values: np.ndarray  # float32
    at: tuple[np.ndarray, ...]  # their places in the part, as `(entries, rows, n, tail)`


@dataclasses.dataclass
class _Found:
    """How values of one leaf compare."""

    compared: int = 0
    different: int = 0
    example: str = ""

    def add(self, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Compares values with two bounds between which they should lie."""
        same = ((low <= values) & (values <= high)) | (np.isnan(values) & np.isnan(low + high))
        self.compared += values.size
        self.different += int(np.count_nonzero(~same))
        for i in np.flatnonzero(~same)[:1]:
            self.example = self.example or f"{values[i]:.9g} in place of {(low + high)[i] / 2:.9g}"


def sample(leaves: Sequence[HostLeaf]) -> list[Sample]:
    """The values to compare, from host arrays whose masters are still the parameters."""
    samples = []
    for leaf in leaves:
        flat = _spread(leaf.master.size)
        at = np.unravel_index(flat, leaf.master.shape)
        samples.append(Sample(leaf.master.at(at), at))
    return samples


def what_differs(
    weights: Sequence[jax.Array],
    states: Sequence[LeafState],
    samples: Sequence[Sample],
    leaves: Sequence[HostLeaf],
    parts: Sequence[Part],
    before: Sequence[np.ndarray],
    updates: Sequence[WindowStep | None],
    roundings: Sequence[tuple[int, int]],
    reach: float,
) -> str | None:
    """Why this process's parameters are not those of the states; None if they are.

    A deferred channel's parameter is the cast of the host's master; with an update pending, of the
    master before that update, which the moments tell. A selected or resident parameter is the cast
    of the device's master, if the leaf has one. A float32 leaf has none, and is not compared there.

    Args:
        weights: The parameters of all leaves.
        states: Their states.
        samples: As `sample` gave them.
        leaves: The host's arrays, which are now those of the checkpoint.
        parts: The parts that these arrays are of.
        before: Each part's channels, `(*stack, k)`, that were selected while the pending update's
            window was open.
        updates: The step of each group's pending update; None if none is pending.
        roundings: How often each group's moments were rounded to 8 bits since that update, until
            they were saved, and until now. A mesh may have had other groups of codes.
        reach: How far provisional steps may have moved a deferred channel's parameter.
    """
    offloaded = [state for state in states if state.offloaded]
    on_host, on_device = [{state.spec.name: _Found() for state in states} for _ in range(2)]
    for taken, leaf, part, then in zip(samples, leaves, parts, before, strict=True):
        state = offloaded[part.leaf]
        update = updates[part.spec.group]
        saved, until_now = roundings[part.spec.group]
        group, _, channel, _ = taken.at
        now = _places(leaf.channels, leaf.spec.n)[group, channel] >= 0
        then = np.asarray(then).reshape(leaf.channels.shape) - part.first
        was = _places(then, leaf.spec.n)[group, channel] >= 0
        ahead = ~now & ~was & (update is not None)
        name = state.spec.name
        later = ahead
        if saved and not _has_whole_channels(part, state.spec):
            # Another process may have the largest of what were groups of codes.
            later = np.zeros_like(ahead)
        for which, scalars in ((~now & ~ahead, None), (later, update)):
            bounds = _masters(leaf, tuple(i[which] for i in taken.at), scalars, until_now)
            low, high = (_cast(x, leaf.spec) for x in bounds)
            low, high = low - reach, high + reach
            on_host[name].add(taken.values[which], low, high)
        if state.master is not None and now.any():
            rows = part.cut(read(part.of(state.master))).reshape(leaf.spec.view4(leaf.spec.k))
            steps = part.cut(read(part.of(state.steps))).reshape(leaf.channels.shape)
            group, row, channel, column = (i[now] for i in taken.at)
            place = _places(leaf.channels, leaf.spec.n)[group, channel]
            # Before its first step a channel's master follows the parameter.
            known = steps[group, place] > 0
            master = rows[group, row, place, column][known]
            _add_casts(on_device[name], taken.values[now][known], master, leaf.spec)
    for weight, state in zip(weights, states, strict=True):
        if state.spec.resident and state.master is not None and read(state.steps) > 0:
            _compare_resident(on_device[state.spec.name], weight, state)
    for where, found in (("engine_state", on_host), ("opt_state", on_device)):
        for name, of_leaf in found.items():
            if of_leaf.different:
                return (
                    "expected `params` to be those of the step at which `opt_state` and "
                    f"`engine_state` were saved, got others: of {of_leaf.compared} values of "
                    f"{name} that were compared with the masters in `{where}`, "
                    f"{of_leaf.different} differ, such as {of_leaf.example}. Save and restore "
                    "parameters, optimizer state and engine state together, and change none of "
                    "them in between."
                )
    return None


def _has_whole_channels(part: Part, spec: LeafSpec) -> bool:
    """Whether a part of a leaf has all elements of the channels that it has."""
    inner = [i for i in range(len(spec.stack), len(spec.shape)) if i != spec.axis]
    return all(part.index[i].stop - part.index[i].start == spec.shape[i] for i in inner)


def _masters(
    leaf: HostLeaf, at: tuple[np.ndarray, ...], update: WindowStep | None, roundings: int
) -> tuple[np.ndarray, np.ndarray]:
    """Two bounds of the masters at these places, before `update` if there is one."""
    master = leaf.master.at(at).astype(np.float64)
    if update is None:
        return master, master
    steps = leaf.steps[at[0], at[2]].astype(np.float64)
    first = leaf.mu.bounds(at, roundings, root=False)
    root = leaf.nu.bounds(at, roundings, root=True)
    with np.errstate(all="ignore"):  # numbers that are not finite are compared as such
        scalars = update.scalars
        rate = scalars.learning_rate / (1 - update.b1**steps)
        small, large = (w / np.sqrt(1 - update.b2**steps) + scalars.eps for w in root)
        # A change is largest where the first moment is, and the second smallest if it is positive.
        low, high = (rate * m for m in first)
        changes = (low / np.where(low > 0, large, small), high / np.where(high > 0, small, large))
        shrunk = 1 - scalars.learning_rate * (scalars.weight_decay if leaf.spec.decay else 0.0)
        ends = []
        for change, sign in zip(changes, (-1, 1), strict=True):
            old = (master + change) / shrunk
            slack = _OF_UPDATE * abs(change) + _OF_MASTER * (abs(master) + abs(old))
            ends.append(old + sign * np.sign(shrunk) * slack / abs(shrunk))
    return np.minimum(*ends), np.maximum(*ends)


def _compare_resident(found: _Found, weight: jax.Array, state: LeafState) -> None:
    seen = set()
    for shard in state.master.addressable_shards:
        index = tuple(
            slice(*s.indices(n)[:2]) for s, n in zip(shard.index, weight.shape, strict=True)
        )
        key = tuple((s.start, s.stop) for s in index)
        if key in seen:
            continue
        seen.add(key)
        values = piece_of(weight, index)
        assert values is not None, "a device has of a master what it has of the parameter, or less"
        at = _spread(values.size)
        master = read(shard.data).reshape(-1)[at]
        _add_casts(found, values.reshape(-1)[at].astype(np.float32), master, state.spec)


def _add_casts(found: _Found, values: np.ndarray, master: np.ndarray, spec: LeafSpec) -> None:
    """Compares values that a step on the device has made from these masters."""
    wide = master.astype(np.float64)
    with np.errstate(all="ignore"):
        largest = np.max(abs(wide), initial=0.0, where=np.isfinite(wide))
        slack = _unit(spec) * abs(wide) + _OF_LARGEST * largest
    found.add(values, _cast(wide - slack, spec), _cast(wide + slack, spec))


def _unit(spec: LeafSpec) -> float:
    return float(jax.numpy.finfo(spec.dtype).eps)


def _cast(x: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """`x` cast to float32 and then to the leaf's dtype, as the host casts; in float32 again."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(spec.dtype).astype(np.float32)


def _spread(size: int) -> np.ndarray:
    """Some places in a flat array, ascending; in a small array all of them.

    Multiples of the golden ratio are spread evenly and fall in step with no axis.
    """
    if size <= COMPARED:
        return np.arange(size)
    places = np.arange(1, COMPARED + 1) * (0.5 * (5**0.5 - 1)) % 1
    return np.unique((places * size).astype(np.int64))


def _places(channels: np.ndarray, n: int) -> np.ndarray:
    """Int (entries, n): each channel's place among `channels` (entries, k); -1 if it has none."""
    places = np.full((channels.shape[0], n), -1)
    np.put_along_axis(places, channels, np.arange(channels.shape[1])[None], axis=-1)
    return places


def agree(refusal: str | None, step: int, token: int, devices: Collection[Any]) -> int:
    """The run's number, the same in every process that has some of these devices.

    It is random, and so another one for each engine that is ever made. With several processes all
    must call this: it waits for the others.

    Args:
        refusal: Why this process cannot go on with what it has read; None if it can.
        step: The state's step.
        token: The state's token.
        devices: The parameters' devices.

    Raises:
        ValueError: If this process or another one refuses, or if the processes have states of
            different moments.
    """
    mine = [secrets.randbits(31), int(refusal is not None), step, token]
    several = len({device.process_index for device in devices}) > 1
    found = gather(mine, devices) if several else {0: mine}
    if refusal is not None:
        raise ValueError(refusal)
    leader, first = min(found.items())
    for process, (_, refused, *moment) in found.items():
        if refused:
            raise ValueError(
                f"expected a checkpoint of one run in every process, but process {process} has "
                "refused what it has read. Its own message says why."
            )
        if moment != first[2:]:
            raise ValueError(
                f"expected the same state in every process, got one of step {moment[0]} in "
                f"process {process} and one of step {first[2]} in process {leader}, or of "
                "different runs. Restore the same checkpoint in all of them."
            )
    return first[0]


def gather(values: Sequence[int], devices: Collection[Any]) -> dict[int, list[int]]:
    """The values of each process, sent through the devices: jax has no other public way."""
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(ordered), ("device",))
    mine = np.array([values], np.int32)
    pieces: list[Any] = [
        jax.device_put(mine, device)
        for device in ordered
        if device.process_index == jax.process_index()
    ]
    x = jax.make_array_from_single_device_arrays(
        (len(ordered), len(values)), NamedSharding(mesh, PartitionSpec("device")), pieces
    )
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    rows = read(everywhere(x)).tolist()
    return {device.process_index: row for device, row in zip(ordered, rows, strict=True)}
