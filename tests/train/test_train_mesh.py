"""The quickstart job on several devices and in several processes: mesh, rules, batches, launching.

Devices are simulated CPU devices, each set in its own process; processes communicate through
127.0.0.1.
"""

import itertools
import re
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.processes import output, reserved_port, start
from tests.train import scripts
from tests.train.scripts import TINY_MESH, rows, summary
from train import finetune
from train.checkpoints.checksums import find_damage
from train.cli.command_line import Launch
from train.cli.settings import SettingsError
from train.distributed import processes

# Losses in nats, on the same batches. Products and sums over devices are rounded to bfloat16 in a
# different order, and so are zenflow's and adamw's weights. Measured 4e-4; with a process that
# feeds another's rows, 0.1; with one stale step, 7e-2; with weights without a master, 5e-3.
SAME_TRAINING_ATOL = 2e-3


SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}


def set_launcher(monkeypatch, environment):
    """Sets these launcher variables, and removes all others."""
    for name in (*SLURM_STEP, *MPIRUN, *MPICH, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


ALONE = Launch()
TWO = Launch(coordinator="a:1", processes=2, process=1)
EIGHT_TASKS = SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "8"}
FLAGS = {"cluster_detection_method": "deactivate"}
LAUNCHES = (
    # A single process, also under SLURM and mpirun.
    (ALONE, {"SLURM_STEP_NUM_TASKS": "1"}, None, None),
    (ALONE, MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None, None),
    # One per node, one per GPU, and srun with MPICH's variables.
    (ALONE, SLURM_STEP, (), {"local_device_ids": [0, 1, 2, 3]}),
    (ALONE, EIGHT_TASKS, (), {"local_device_ids": None}),
    (ALONE, SLURM_STEP | MPICH | {"SLURM_PROCID": "1"}, (), {}),
    # Flags also apply under SLURM and mpirun.
    (TWO, SLURM_STEP, (TWO.coordinator, 2, 1), FLAGS),
    (TWO, MPIRUN, (TWO.coordinator, 2, 1), {}),
)


def test_processes_come_from_the_flags_or_else_from_slurm(monkeypatch):
    for launch, environment, arguments, options in LAUNCHES:
        calls = []
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda *a, c=calls, **o: c.append((a, o))
        )
        set_launcher(monkeypatch, environment)
        processes.join(launch)
        assert [a for a, _ in calls] == ([] if arguments is None else [arguments])
        assert all(o.items() >= options.items() for _, o in calls)


def test_mpirun_without_the_flags_is_rejected_with_a_command_that_works(monkeypatch):
    for mpi, prefix in ((MPIRUN, "OMPI_COMM_WORLD"), (MPICH, "PMI")):
        # Inside an allocation, the environment also has the variables of SLURM's daemons.
        set_launcher(monkeypatch, SLURM_STEP | {"SLURM_PROCID": "0"} | mpi)
        line = rf"mpirun .* --processes \${prefix}_SIZE --process \${prefix}_RANK'"
        with pytest.raises(SettingsError, match=line):
            processes.join(ALONE)


def losses(run: Path) -> list[float]:
    """Returns every step's loss, and the validations before and after."""
    steps = [float(row["loss"]) for row in rows(run / "metrics.csv")]
    assert len(steps) == TINY_MESH["steps"]
    figures = summary(run)
    return [*steps, *(figures[f"validation_{when}"]["loss"] for when in ("before", "after"))]


@pytest.fixture(scope="module")
def adamw(tmp_path_factory):
    """Returns the losses of AdamW's run on one device."""
    folder = tmp_path_factory.mktemp("adamw")
    config = scripts.write_config(folder, **TINY_MESH)
    # As for users: jax's own `dot_product_attention` promotes under strict rules.
    with jax.default_device(jax.devices("cpu")[0]), jax.numpy_dtype_promotion("standard"):
        assert finetune.main([config, "--run", "a", "--optimizer", "adamw"]) == 0
    return losses(folder / "runs" / "a")


# After a run, and a line of input in process 0, the run is resumed in the same processes.
TWICE = """
import sys
import jax
from train import finetune
from train.log import results
results.write_pictures = lambda *_, **__: None
print("code", finetune.main(sys.argv[1:]), flush=True)
jax.distributed.initialize = lambda *_, **__: None
jax.process_index() or sys.stdin.readline()
sys.exit(finetune.main([*sys.argv[1:], "--steps", "5000"]))
"""


@pytest.mark.slow
def test_two_processes_train_like_one_device_and_a_signal_to_one_of_them_saves_the_run(
    tmp_path, adamw
):
    mesh = {"mesh": "data=2,fsdp=2,tensor=2", "micro_batches": 2}
    config = scripts.write_config(tmp_path, run="two", **mesh, **TINY_MESH)
    run = tmp_path / "runs" / "two"
    with reserved_port() as port:
        command = "-c", TWICE, config, "--coordinator", f"127.0.0.1:{port}", "--processes", "2"
        first, second = (start(*command, "--process", str(i), devices=4) for i in range(2))
    trained = "".join(itertools.takewhile(lambda line: line != "code 0\n", first.stdout))
    assert summary(run)["processes"] == 2
    np.testing.assert_allclose(losses(run), adamw, rtol=0, atol=SAME_TRAINING_ATOL, err_msg=trained)

    first.stdin.write("\n")
    first.stdin.flush()
    assert any(line.startswith("step") for line in first.stdout)
    first.send_signal(signal.SIGUSR1)
    codes, shown = zip(output(first), output(second), strict=True)
    assert codes == (128 + signal.SIGTERM,) * 2, shown
    assert not re.search("loss|tokens|metrics", shown[1])
    message = "SIGUSR1: stopping after this step and saving"
    assert [text.count(message) for text in shown] == [1, 0]
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+); checkpoint saved", "".join(shown))
    assert int(step) > TINY_MESH["steps"]
    assert find_damage(run / "checkpoints" / step) is None
