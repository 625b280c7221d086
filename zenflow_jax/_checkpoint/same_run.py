"""Whether parameters, optimizer state and engine state that are resumed are all of one run.

Each engine draws a number, which every process of the run has alike. The tokens that it gives to
the optimizer state are made from it, and so is the one in its own state: where step and token are
the same, both are of the same engine and the same moment. The number is in no arithmetic. Nor can
parameters carry it, so a few hundred values of each leaf are compared with what host and device
have as their masters.
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
from zenflow_jax._plan.scalars import AdamScalars

#: Values of each part that are compared, about; spread over it.
COMPARED = 512

# Between a master that was undone from its update and the one that there was, relative to the
# update and to the master: a few roundings of float32, of which the bias corrections' are largest.
_OF_UPDATE, _OF_MASTER = 2.0**-10, 2.0**-21
# What a step makes of a selected parameter is the cast of its master, but a compiler for devices
# may round it once less, and the float32 difference of numbers that are 2**16 apart is not exact.
_OF_LARGEST = 2.0**-20


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some values of a part of a parameter, before its host arrays are those of a checkpoint."""

    values: np.ndarray  # float32
    at: tuple[np.ndarray, ...]  # their places in the part, as `(groups, rows, n, tail)`


@dataclasses.dataclass
class _Found:
    """How values of one leaf compare."""

    compared: int = 0
    different: int = 0
    example: str = ""

    def add(self, values: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Takes in values that should lie between two bounds."""
        same = ((low <= values) & (values <= high)) | (np.isnan(values) & np.isnan(low + high))
        self.compared += values.size
        self.different += int(np.count_nonzero(~same))
        for i in np.flatnonzero(~same)[:1]:
            self.example = self.example or f"{values[i]:.9g} in place of {(low + high)[i] / 2:.9g}"


def sample(leaves: Sequence[HostLeaf]) -> list[Sample]:
    """What is compared, of host arrays whose masters are still the parameters'."""
    samples = []
    for leaf in leaves:
        flat = _spread(leaf.master.size)
        at = np.unravel_index(flat, leaf.master.shape)
        samples.append(Sample(leaf.master[at], at))
    return samples


def what_differs(
    weights: Sequence[jax.Array],
    states: Sequence[LeafState],
    samples: Sequence[Sample],
    leaves: Sequence[HostLeaf],
    parts: Sequence[Part],
    before: Sequence[np.ndarray],
    update: AdamScalars | None,
) -> str | None:
    """What says that the parameters of this process are not those of the states; None if nothing.

    A deferred channel's parameter is the cast of the host's master; where an update is pending, of
    the master before that, which its moments tell. That of a selected or resident one is the cast
    of the device's master, if the leaf has one; a float32 leaf has none, and is not compared there.

    Args:
        weights: The parameters of all leaves.
        states: Their states.
        samples: As `sample` gave them.
        leaves: The host's arrays since, of the checkpoint.
        parts: Of what they are.
        before: Of each part the channels, `(*stack, k)`, that were selected while the pending
            update's window was open.
        update: The hyperparameters of the pending update; None if none is pending.
    """
    offloaded = [state for state in states if state.offloaded]
    on_host, on_device = [{state.spec.name: _Found() for state in states} for _ in range(2)]
    for taken, leaf, part, then in zip(samples, leaves, parts, before, strict=True):
        state = offloaded[part.leaf]
        group, _, channel, _ = taken.at
        now = _places(leaf.channels, leaf.spec.n)[group, channel] >= 0
        then = np.asarray(then).reshape(leaf.channels.shape) - part.first
        was = _places(then, leaf.spec.n)[group, channel] >= 0
        ahead = ~now & ~was & (update is not None)
        name = state.spec.name
        for which, scalars in ((~now & ~ahead, None), (ahead, update)):
            master, slack = _masters(leaf, tuple(i[which] for i in taken.at), scalars)
            low, high = (_cast(x, leaf.spec) for x in (master - slack, master + slack))
            on_host[name].add(taken.values[which], low, high)
        if state.master is not None and now.any():
            rows = read(part.of(state.master)).reshape(leaf.spec.view4(leaf.spec.k))
            steps = read(part.of(state.steps)).reshape(leaf.channels.shape)
            group, row, channel, column = (i[now] for i in taken.at)
            place = _places(leaf.channels, leaf.spec.n)[group, channel]
            # Until a channel has taken a step, its master is what the parameter says.
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


def _masters(
    leaf: HostLeaf, at: tuple[np.ndarray, ...], update: AdamScalars | None
) -> tuple[np.ndarray, np.ndarray]:
    """Masters at these places and how far off they may be; before that update, if one is given."""
    master = leaf.master[at].astype(np.float64)
    if update is None:
        return master, np.zeros_like(master)
    steps = leaf.steps[at[0], at[2]].astype(np.float64)
    mu, nu = (x[at].astype(np.float64) for x in (leaf.mu, leaf.nu))
    with np.errstate(all="ignore"):  # what is not finite compares with what is not
        mu, nu = mu / (1 - update.b1**steps), nu / (1 - update.b2**steps)
        change = update.learning_rate * mu / (np.sqrt(nu) + update.eps)
        shrunk = 1 - update.learning_rate * (update.weight_decay if leaf.spec.decay else 0.0)
        old = (master + change) / shrunk
        slack = (_OF_UPDATE * abs(change) + _OF_MASTER * (abs(master) + abs(old))) / abs(shrunk)
    return old, slack


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
    """Takes in values that a step on the device has made of these masters."""
    wide = master.astype(np.float64)
    with np.errstate(all="ignore"):
        largest = np.max(abs(wide), initial=0.0, where=np.isfinite(wide))
        slack = _unit(spec) * abs(wide) + _OF_LARGEST * largest
    found.add(values, _cast(wide - slack, spec), _cast(wide + slack, spec))


def _unit(spec: LeafSpec) -> float:
    return float(jax.numpy.finfo(spec.dtype).eps)


def _cast(x: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """To float32 and the leaf's dtype, as the host casts; float32 again."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(spec.dtype).astype(np.float32)


def _spread(size: int) -> np.ndarray:
    """Some places in a flat array, ascending: all of them if they are few.

    Multiples of the golden ratio, which are spread evenly but fall in step with no axis.
    """
    if size <= COMPARED:
        return np.arange(size)
    places = np.arange(1, COMPARED + 1) * (0.5 * (5**0.5 - 1)) % 1
    return np.unique((places * size).astype(np.int64))


def _places(channels: np.ndarray, n: int) -> np.ndarray:
    """Int (groups, n): the place of a channel among `channels` (groups, k), -1 if it has none."""
    places = np.full((channels.shape[0], n), -1)
    np.put_along_axis(places, channels, np.arange(channels.shape[1])[None], axis=-1)
    return places


def agree(refusal: str | None, step: int, token: int, devices: Collection[Any]) -> int:
    """The run's number, the same in every process that has some of these devices.

    Random, and so another one for each engine that is ever made. In a run of several processes
    all must call it: it waits for the others.

    Args:
        refusal: Why this process cannot go on with what it has read; None if it can.
        step: Of the state.
        token: Of the state.
        devices: Of the parameters.

    Raises:
        ValueError: With the refusal; if another process has one; or if the processes have states of
            different moments.
    """
    mine = [secrets.randbits(31), int(refusal is not None), step, token]
    several = len({device.process_index for device in devices}) > 1
    found = _gather(mine, devices) if several else {0: mine}
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


def _gather(values: Sequence[int], devices: Collection[Any]) -> dict[int, list[int]]:
    """What each process has given, through the devices: jax has no other public way."""
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
