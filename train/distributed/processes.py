"""Handles a run's processes: how they connect, agree and end.

A jitted step on a mesh is one program that all processes must call, so each decision about the next
call must be the same in all processes. Only process 0 prints and writes.
"""

from __future__ import annotations

import dataclasses
import os
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from train.cli.command_line import PROGRAM, Launch
from train.cli.settings import SettingsError

# How long a process may be silent before jax ends the others, and how long an ending process waits
# for the others, which may hang in a step that it has left.
TIMEOUTS = {"heartbeat_timeout_seconds": 60, "shutdown_timeout_seconds": 30}


def join(launch: Launch) -> None:
    """Connects this process to the others in `launch` or in SLURM's step, before jax starts."""
    options = dataclasses.astuple(launch)
    if options.count(None) < len(options):  # jax rejects some without the others
        jax.distributed.initialize(
            *options,
            cluster_detection_method="deactivate",  # the flags also apply inside a SLURM job
            **TIMEOUTS,
        )
        return
    _refuse_mpirun()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        jax.distributed.initialize(
            local_device_ids=_slurm_devices(), cluster_detection_method="slurm", **TIMEOUTS
        )


def leave() -> None:
    """Waits for the other processes, so that all end together."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the end of the run")


def is_first() -> bool:
    """Returns whether this process prints and writes."""
    return jax.process_index() == 0


def check_same(settings: str, data: int) -> None:
    """Raises `SettingsError` in every process if settings (text) or data (checksum) differ."""
    if jax.process_count() == 1:
        return
    checksum = zlib.crc32(f"{data} {settings}".encode())
    checksums = multihost_utils.process_allgather(np.uint32(checksum))
    unequal = np.flatnonzero(checksums != checksums[0])
    if len(unequal):
        raise SettingsError(
            f"the settings or data of process {', '.join(map(str, unequal))} differ from those of "
            "process 0. Start all processes with the same command and files."
        )


def from_first(text: str) -> str:
    """Sends process 0's `text`, at most 4 KiB of UTF-8, to every process."""
    if jax.process_count() == 1:
        return text
    padded = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    padded[: len(encoded)] = encoded
    return multihost_utils.broadcast_one_to_all(padded).tobytes().rstrip(b"\0").decode()


def gather(x: jax.Array | np.ndarray) -> np.ndarray:
    """Gathers an array in each process, even if its shards are in several processes."""
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def _refuse_mpirun() -> None:
    """Rejects mpirun without options: each process would train alone or misread its number."""
    open_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
    size, rank = (f"{'OMPI_COMM_WORLD' if open_mpi else 'PMI'}_{name}" for name in ("SIZE", "RANK"))
    # `srun --mpi=pmi2` also sets PMI's variables, to SLURM's values.
    variables = {size: "SLURM_STEP_NUM_TASKS", rank: "SLURM_PROCID"}
    is_srun = all(os.environ.get(name) == os.environ.get(x) for name, x in variables.items())
    if int(os.environ.get(size, 1)) > 1 and (open_mpi or not is_srun):
        raise SettingsError(
            "mpirun needs --coordinator, --processes and --process. Run: "
            f"mpirun ... sh -c 'exec {PROGRAM} ... --coordinator HOST:PORT "
            f"--processes ${size} --process ${rank}', with the machine of rank 0 as HOST."
        )


def _slurm_devices() -> list[int] | None:
    """Returns all GPUs of the node if it runs one process; None for one GPU per process."""
    gpus = os.environ.get("SLURM_GPUS_ON_NODE")
    one_per_node = os.environ.get("SLURM_STEP_NUM_NODES") == os.environ["SLURM_STEP_NUM_TASKS"]
    return list(range(int(gpus))) if gpus and one_per_node else None
