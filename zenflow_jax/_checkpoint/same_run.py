"""Checks that resumed parameters, optimizer state and engine state are all of one run.

Each engine draws a number, the same in every process of the run. From it come the tokens in the
optimizer's and in the engine's state: where step and token are equal, both are of one moment.
Parameters cannot carry it, so the engine's state has a checksum of each, its fingerprint.
"""

import secrets
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax._device.leaves import first_names
from zenflow_jax._device.memory import read
from zenflow_jax._device.samples import fingerprints
from zenflow_jax._exchange.progress import Counts
from zenflow_jax._plan.leaf import LeafSpec


def fingerprints_alive(
    weights: Sequence[weakref.ref[jax.Array]], specs: Sequence[LeafSpec], devices: Collection[Any]
) -> np.ndarray:
    """Fingerprints of all leaves' parameters, uint32; 0 for one that is no more in a process."""
    arrays = [of_leaf() for of_leaf in weights]
    alive = [x is not None and not x.is_deleted() for x in arrays]
    if len({device.process_index for device in devices}) > 1:
        # Other processes may have freed more, and all must run the same programs.
        alive = np.all(list(gather(alive, devices).values()), axis=0)
    known = {i: x for i, x in enumerate(arrays) if alive[i] and x is not None}
    sums = np.zeros(len(specs), np.uint32)
    sums[list(known)] = _as_saved(fingerprints([*known.values()], [specs[i] for i in known]))
    return sums


def _as_saved(sums: Sequence[jax.Array]) -> np.ndarray:
    """Fingerprints as they are saved, 1 in place of 0; waits for them."""
    return np.maximum(np.array(jax.device_get(sums), np.uint32), 1)


def what_differs(
    counts: Counts, step: int, token: int, sums: Sequence[jax.Array], specs: Sequence[LeafSpec]
) -> str | None:
    """Says why state or parameters are not those of a saved engine; None if they are.

    `step` and `token` are those of the optimizer's state, `sums` the parameters' fingerprints. A
    fingerprint of 0 in `counts` is compared with nothing.
    """
    same = (counts.fingerprints == 0) | (counts.fingerprints == _as_saved(sums))
    others = [spec.name for spec, equal in zip(specs, same, strict=True) if not equal]
    if (counts.step, counts.token) != (step, token):
        problem = (
            "expected the `opt_state` that `exchange` or `flush` returned when the engine's state "
            f"was taken, after step {counts.step}, got one after step {step}"
            f"{' of another run' if counts.step == step else ''}"
        )
    elif others:
        problem = (
            "expected `params` to be those of the step at which `opt_state` and `engine_state` "
            f"were saved, got other values of {first_names(others)}"
        )
    else:
        return None
    return (
        f"{problem}. Save and restore parameters, optimizer state and engine state together, and "
        "change none of them in between."
    )


def agree(refusal: str | None, step: int, token: int, devices: Collection[Any]) -> int:
    """Draws the run's number, at random, and returns the same one in every process.

    It waits for the others, and raises if one of them has a `refusal` of what it has read, or a
    state of another moment.
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
