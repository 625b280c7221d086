"""How the processes of a run agree on it, or all fail."""

import contextlib
import secrets
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zenflow_jax._device.memory import read


@contextlib.contextmanager
def failing_together(devices: Collection[Any]) -> Iterator[None]:
    """After an error in the block, also raises one in the other processes, in their `agree`."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(ValueError):
            agree(str(error), 0, 0, devices)
        raise


def agree(problem: str | None, step: int, token: int, devices: Collection[Any]) -> int:
    """Draws the run's number at random, and returns the same number in every process.

    Waits for the other processes. Raises an error if any process has a `problem` or another state.
    """
    own = [secrets.randbits(31), int(problem is not None), step, token]
    by_process = gather(own, devices)
    if problem is not None:
        raise ValueError(problem)
    leader, first = min(by_process.items())
    for process, (_, rejected, *moment) in by_process.items():
        if rejected:
            raise ValueError(f"Process {process} rejected the run. See its error message.")
        if moment != first[2:]:
            raise ValueError(
                f"Process {process} restored a state from step {moment[0]}, but process {leader} "
                f"restored a state from step {first[2]} or from another run. Restore the same "
                "checkpoint in every process."
            )
    return first[0]


def gather(values: Sequence[int], devices: Collection[Any]) -> dict[int, list[int]]:
    """Gathers each process's values through the devices: jax has no other public way."""
    if len({device.process_index for device in devices}) == 1:
        return {jax.process_index(): list(values)}
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(ordered), ("device",))
    row = np.array([values], np.int32)
    local = [device for device in ordered if device.process_index == jax.process_index()]
    pieces = [jax.device_put(row, device) for device in local]
    x = jax.make_array_from_single_device_arrays(
        (len(ordered), len(values)), NamedSharding(mesh, PartitionSpec("device")), pieces
    )
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))
    rows = read(everywhere(x)).tolist()
    return {device.process_index: row for device, row in zip(ordered, rows, strict=True)}
