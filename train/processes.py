"""The processes of one run: how they meet, agree, and end.

Every process runs the same program, on devices of its own, and jax makes them one: `jax.devices()`
are those of all processes, and a jitted step on a mesh of them is one program, which all must call.
So whatever decides what is called next must be the same in every process. What a process may do
alone is to show and to write; process 0 does that.
"""

from __future__ import annotations

import os
import socket
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.settings import Launch, SettingsError

# How long a process that ends waits for the others to do the same. If they do not, because it has
# failed alone and they wait for it in the middle of a step, jax ends them. Its default of 300 s is
# that of jobs whose processes end at very different times; see `leave`.
END_TIMEOUT_S = 30

# How long a process may be silent (its machine is gone, say) until jax ends the others.
SILENCE_TIMEOUT_S = 60


def join(launch: Launch) -> None:
    """Connects this process with the others of its run, if there are any, and waits for them.

    Who they are says `launch`, or else SLURM, where `srun` has started more than one process. Call
    it before anything asks jax for a device.

    Raises:
        SettingsError: If `mpirun` has started this process, and `launch` is of no use; or if there
            is another one with its number on this machine.
    """
    timeouts = {
        "heartbeat_timeout_seconds": SILENCE_TIMEOUT_S,
        "shutdown_timeout_seconds": END_TIMEOUT_S,
    }
    if launch.processes is not None:
        _claim(launch)
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            cluster_detection_method="deactivate",  # the flags hold inside of a SLURM job, too
            **timeouts,
        )
        return
    _refuse_mpirun()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        jax.distributed.initialize(
            local_device_ids=_slurm_devices(), cluster_detection_method="slurm", **timeouts
        )


def leave() -> None:
    """Waits for the other processes, so that all end at the same time."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the end of the run")


def is_first() -> bool:
    """Whether this is the process that shows and writes."""
    return jax.process_index() == 0


def check_same(settings: str, data: int) -> None:
    """Compares what the processes have read, before anything depends on it.

    Args:
        settings: As text.
        data: A checksum of it.

    Raises:
        SettingsError: In every process, if it is not the same in all of them.
    """
    if jax.process_count() == 1:
        return
    checksum = zlib.crc32(f"{data} {settings}".encode())
    all_of_them = multihost_utils.process_allgather(np.uint32(checksum))
    if np.any(all_of_them != all_of_them[0]):
        others = np.flatnonzero(all_of_them != all_of_them[0])
        raise SettingsError(
            "expected the same settings and the same data in every process, got others than those "
            f"of process 0 in: {', '.join(map(str, others))}. Give all of them the same command "
            "(but for --process) and the same files (for standard_library: the same Python)."
        )


def sum_over(value: float) -> float:
    """The sum of every process's `value`, to the precision of a float32."""
    if jax.process_count() == 1:
        return value
    return float(np.sum(multihost_utils.process_allgather(np.float32(value))))


def from_first(text: str) -> str:
    """In every process the `text` of process 0, at most 4 KiB of UTF-8."""
    if jax.process_count() == 1:
        return text
    padded = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    padded[: len(encoded)] = encoded
    return multihost_utils.broadcast_one_to_all(padded).tobytes().rstrip(b"\0").decode()


def whole(x: jax.Array | np.ndarray) -> np.ndarray:
    """All of an array, of whose parts each is on some process, in the memory of every process.

    What is there already, a NumPy array, is taken to be all of it.
    """
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def _claim(launch: Launch) -> None:
    """Keeps a second process with this number off: jax would wait for minutes, and then abort."""
    # A name that exists on this machine as long as this process does.
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0zenflow_jax {launch.coordinator} {launch.process}")
    except OSError as error:
        raise SettingsError(
            f"`--process`: expected a number of its own for each process, got {launch.process} for "
            f"two of those that meet at {launch.coordinator}."
        ) from error
    claim.detach()  # not closed with this object


def _refuse_mpirun() -> None:
    """Else each of its processes would train alone, or with the number of SLURM's daemon."""
    open_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    size, rank = (f"{'OMPI_COMM_WORLD' if open_mpi else 'PMI'}_{name}" for name in ("SIZE", "RANK"))
    # `srun --mpi=pmi2` sets those of PMI as well, to what SLURM says.
    slurms = {size: "SLURM_STEP_NUM_TASKS", rank: "SLURM_PROCID"}
    is_srun = all(os.environ.get(name) == os.environ.get(its) for name, its in slurms.items())
    if int(os.environ.get(size, 1)) > 1 and (open_mpi or not is_srun):
        raise SettingsError(
            "expected --coordinator, --processes and --process under mpirun, got none. Start: "
            "mpirun ... sh -c 'exec python -m train.finetune ... --coordinator HOST:PORT "
            f"--processes ${size} --process ${rank}', with the machine of rank 0 as HOST."
        )


def _slurm_devices() -> list[int] | None:
    """All GPUs of the node where it runs one process only; None for what jax does: one each."""
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")
    one_per_node = os.environ.get("SLURM_STEP_NUM_NODES") == os.environ["SLURM_STEP_NUM_TASKS"]
    return list(range(int(gpus))) if gpus and one_per_node else None
