"""Runs the batch script under a real SLURM with two nodes on this machine: `make test-slurm`.

Needs Debian's packages `slurm-wlm` and `munge`. The daemons run as the current user, on free ports,
and write only to a folder of the tests.
"""

import contextlib
import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import kill_test
from tests.processes import environment
from tests.train.scripts import TINY_MESH, write_config

DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = os.pathsep.join((os.environ["PATH"], "/usr/sbin"))
MISSING = [name for name in DAEMONS if shutil.which(name, path=SBIN) is None]

pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs SLURM: {', '.join(MISSING)} is not installed"
)

# Nodes are named by address because jax connects to process 0 by the name of the first node. A
# requeued job waits for `cred_expire`, two minutes by default.
SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
FirstJobId={first_job}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Runs SLURM's daemons; yields the environment for its commands."""
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    with contextlib.ExitStack() as holders:
        sockets = [holders.enter_context(socket.create_server(("", 0))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in sockets]
    conf = SLURM_CONF.format(
        folder=folder,
        host=socket.gethostname(),
        user=getpass.getuser(),
        ports=ports,
        first_job=secrets.randbelow(10**6) + 1,  # determines the port of process 0
    )
    (folder / "slurm.conf").write_text(conf)
    for gpu in range(8):
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    # Only SLURM sees these GPUs; jax has one CPU device in each process.
    env = environment(1) | {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "PATH": SBIN,
        "PYTHON": sys.executable,
    }
    munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file")]
    commands = [
        ["munged", "-F", "--force", f"--key-file={key}", f"--seed-file={folder}/seed", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "127.0.0.1"],
        ["slurmd", "-D", "-N", "127.0.0.2"],
    ]
    with (folder / "daemons.log").open("wb") as log, contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)
        stack.callback(lambda: wait_for(lambda: not output_of(env, "squeue", "-h"), 60))
        stack.callback(lambda: output_of(env, "scancel", "-u", getpass.getuser()))
        idle = ("sinfo", "-h", "-o", "%D %t")
        wait_for(lambda: output_of(env, *idle, fails=True) == "2 idle", 15)
        yield env


def output_of(env: dict[str, str], *command: str, fails: bool = False) -> str:
    """Returns the output of one of SLURM's commands."""
    done = subprocess.run(
        command, env=env, cwd=kill_test.ROOT, capture_output=True, text=True, check=False
    )
    assert fails or done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(condition, seconds: float):
    """Returns the first true result of `condition`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return result


class Job:
    """A run by `examples/finetune.sbatch`."""

    def __init__(self, env: dict[str, str], folder: Path, *options: str, steps: int):
        self._env = env
        self._folder = folder
        config = self.write_config(steps)
        smaller = ("--cpus-per-task=1", f"--output={folder}/%j.txt", "--parsable")
        script = ("examples/finetune.sbatch", config)
        self.id = output_of(env, "sbatch", *smaller, *options, *script)
        self.run = folder / "runs" / f"job-{self.id}"

    def write_config(self, steps: int) -> str:
        # A constant rate: by default it would depend on the number of steps.
        options = {"mesh": "data=2", "update_interval": 4, "log_every": 10}
        options |= {"steps": steps, "schedule": "constant"}
        return write_config(self._folder, **TINY_MESH | options)

    def output(self) -> str:
        path = self._folder / f"{self.id}.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def wait_for_line(self, expected: str) -> re.Match:
        try:
            return wait_for(lambda: re.search(expected, self.output()), 240)
        except AssertionError:
            raise AssertionError(f"no {expected!r} in:\n{self.output()}") from None

    def is_in(self, state: str, restarts: int = 0) -> bool:
        shown = output_of(self._env, "scontrol", "show", "job", self.id)
        return f"JobState={state} " in shown and f" Restarts={restarts} " in shown


def test_a_job_that_reaches_its_time_limit_resumes_and_is_bit_identical(slurm, tmp_path):
    # SLURM checks twice a minute, so it sends the signal 30 to 60 seconds after the start.
    job = Job(slurm, tmp_path, "--time=2", "--signal=TERM@60", steps=10**6)
    step = int(
        job.wait_for_line(
            r"stopped by SIGTERM after step (\d+); checkpoint saved. Resume with the"
        )[1]
    )
    job.write_config(step + 5)  # the job waits for at least ten seconds
    job.wait_for_line(f"resuming from checkpoint {step} in .*/job-{job.id}\n")
    wait_for(lambda: job.is_in("COMPLETED", restarts=1), 240)

    straight = Job(slurm, tmp_path, "--time=10", steps=step + 5)
    wait_for(lambda: straight.is_in("COMPLETED"), 240)
    assert "stopped" not in straight.output()
    assert kill_test.differences(straight.run, job.run) == []
