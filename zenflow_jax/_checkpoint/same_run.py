"""Checks that resumed parameters, optimizer state and engine state are all of one run.

Each engine draws a number, the same in every process of the run. From it come the tokens that the
engine gives to the optimizer state, and the one in its own state. Where step and token are equal,
both states are of the same engine and the same moment. The number is in no arithmetic. Parameters
cannot carry it, so the engine's state has a checksum of each.
"""

import secrets
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax._device.leaves import some
from zenflow_jax._device.memory import read
from zenflow_jax._device.samples import fingerprints
from zenflow_jax._plan.leaf import LeafSpec


class LastParameters:
    """The parameters that the caller had last, as far as the engine knows.

    References are weak, as the engine would otherwise keep them alive through the next step.
    """

    def __init__(self, devices: Collection[Any]):
        self._devices = devices
        self._weights: list[weakref.ref[jax.Array]] = []

    def note(self, weights: Sequence[jax.Array]) -> None:
        """Remembers the parameters of all leaves."""
        self._weights = [weakref.ref(x) for x in weights]

    def fingerprints(self, specs: Sequence[LeafSpec]) -> np.ndarray:
        """Their fingerprints, uint32 and never 0; 0 for a parameter that is no more.

        With several processes all must call this: it waits for the others.
        """
        weights = [of_leaf() for of_leaf in self._weights]
        alive = [x is not None and not x.is_deleted() for x in weights]
        if len({device.process_index for device in self._devices}) > 1:
            # Other processes may have freed more, and all must run the same programs.
            alive = np.all(list(gather(alive, self._devices).values()), axis=0)
        known = {i: x for i, x in enumerate(weights) if alive[i] and x is not None}
        sums = np.zeros(len(specs), np.uint32)
        sums[list(known)] = as_saved(fingerprints([*known.values()], [specs[i] for i in known]))
        return sums


def as_saved(sums: Sequence[jax.Array]) -> np.ndarray:
    """Fingerprints as they are saved, 1 in place of 0; waits for them."""
    return np.maximum(np.array(jax.device_get(sums), np.uint32), 1)


def what_differs(
    sums: Sequence[jax.Array], saved: np.ndarray, specs: Sequence[LeafSpec]
) -> str | None:
    """Says why the parameters are not those of a saved engine; None if they are.

    Args:
        sums: The fingerprints of the parameters of all leaves.
        saved: As `LastParameters.fingerprints`; what is 0 is compared with nothing.
        specs: Of all leaves.
    """
    same = (saved == 0) | (saved == as_saved(sums))
    others = [spec.name for spec, equal in zip(specs, same, strict=True) if not equal]
    if not others:
        return None
    return (
        "expected `params` to be those of the step at which `opt_state` and `engine_state` were "
        f"saved, got other values of {some(others)}. "
        "Save and restore parameters, optimizer state and engine state together, and change none "
        "of them in between."
    )


def agree(refusal: str | None, step: int, token: int, devices: Collection[Any]) -> int:
    """Draws the run's number, and returns the same one in every process with these devices.

    It is random, and so another one for each engine that is ever made. With several processes all
    must call this: it waits for the others. `refusal` is why this one cannot go on with what it has
    read.

    Raises:
        ValueError: If this process or another one refuses, or if the processes have states of
            different moments.
    """
    own = [secrets.randbits(31), int(refusal is not None), step, token]
    several = len({device.process_index for device in devices}) > 1
    of_processes = gather(own, devices) if several else {0: own}
    if refusal is not None:
        raise ValueError(refusal)
    leader, first = min(of_processes.items())
    for process, (_, refused, *moment) in of_processes.items():
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
    """Gathers values of each process through the devices: jax has no other public way."""
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(ordered), ("device",))
    row = np.array([values], np.int32)
    pieces: list[Any] = [
        jax.device_put(row, device)
        for device in ordered
        if device.process_index == jax.process_index()
    ]
    x = jax.make_array_from_single_device_arrays(
        (len(ordered), len(values)), NamedSharding(mesh, PartitionSpec("device")), pieces
    )
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    rows = read(everywhere(x)).tolist()
    return {device.process_index: row for device, row in zip(ordered, rows, strict=True)}
