"""The quickstart job on several devices and in several processes: mesh, rules, batches, launching.

Devices are forced CPU devices, each set of them in a process of its own; processes meet on
127.0.0.1.
"""

import csv
import dataclasses
import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from tests.processes import environment, reserved_port
from train import finetune, models, processes, sharding
from train.data import Batches
from train.settings import Launch, Settings, SettingsError
from train.tasks.standard_library import Windows

ROOT = Path(__file__).parents[2]

TINY = {
    "corpus_megabytes": 0.3,
    "sequence_length": 16,
    "batch_size": 8,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "ffn": 24,
    "steps": 5,
    "log_every": 1,
    "eval_batches": 2,
    "learning_rate": 1e-2,
    # The settings in which zenflow is adamw, whatever it selects: it selects inside each shard.
    "update_interval": 1,
    "staleness": 0,
    "host_kernel": "numpy",  # in a fresh checkout each process would compile Numba's
}

# Losses in nats, of the same batches. Products and sums over devices are rounded to bfloat16 in
# another order. Measured 4e-4; with a process that feeds another's rows, 0.1.
SAME_TRAINING_ATOL = 2e-3


def tiny_settings(**changed) -> Settings:
    return Settings(**(TINY | {"optimizer": "adamw"} | changed))


def abstract_mesh(**axes: int) -> AbstractMesh:
    return AbstractMesh(tuple(axes.values()), tuple(axes))


def shapes_of(settings: Settings):
    return nnx.as_pure(nnx.state(nnx.eval_shape(models.builder(settings))))


# --- mesh and rules -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("data", "expected `axis=size` pairs.*got 'data'"),
        ("", "expected `axis=size` pairs.*got ''"),
        ("data=0", "expected `axis=size` pairs"),
        ("data=1.5", "expected `axis=size` pairs"),
        ("tensr=1", "expected axes of data, fsdp, tensor, got `tensr`"),
        ("data=1,data=1", "expected every axis once, got `data` twice"),
        ("data=64,fsdp=3", r"expected .* number of devices, here \d+ .*, which is 192"),
    ],
)
def test_a_mistake_in_the_mesh_is_named(mesh, expected):
    with pytest.raises(SettingsError, match=f"^`mesh`: {expected}"):
        sharding.make_mesh(mesh)


def test_every_weight_of_the_model_is_split_by_its_rule():
    mesh = abstract_mesh(data=3, fsdp=2, tensor=4)
    specs = jax.tree.map(
        lambda s: s.spec, sharding.weight_shardings(mesh, shapes_of(tiny_settings()))
    )
    columns, rows = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp")
    norm = {"scale": PartitionSpec(None)}
    assert specs == {
        "embed": {"embedding": columns},
        "blocks": {
            0: {
                "attention_norm": norm,
                "query": {"kernel": columns},
                "key": {"kernel": columns},
                "value": {"kernel": columns},
                "attention_out": {"kernel": rows},
                "ffn_norm": norm,
                "gate": {"kernel": columns},
                "up": {"kernel": columns},
                "down": {"kernel": rows},
            }
        },
        "norm": norm,
        "head": {"kernel": columns},
    }
    # An axis that the mesh does not have splits nothing.
    shardings = sharding.weight_shardings(abstract_mesh(tensor=2), shapes_of(tiny_settings()))
    assert shardings["head"]["kernel"].spec == PartitionSpec(None, "tensor")


def test_a_size_that_does_not_divide_is_an_error_that_names_leaf_and_axis():
    leaf = "the leaf `blocks/0/attention_out/kernel`, which is 16, got fsdp=3"
    with pytest.raises(SettingsError, match=f"a size of `fsdp` that divides dimension 1 of {leaf}"):
        sharding.weight_shardings(abstract_mesh(fsdp=3), shapes_of(tiny_settings()))


@pytest.mark.parametrize(("name", "shape"), [("bias", (4,)), ("norm_scale", (4, 4))])
def test_a_leaf_without_a_rule_that_fits_is_an_error(name, shape):
    leaf = {name.replace("_", "/"): jax.ShapeDtypeStruct(shape, np.float32)}
    with pytest.raises(SettingsError, match=r"a rule .* for the leaf .*, got (none|\(None,\))"):
        sharding.weight_shardings(abstract_mesh(fsdp=2), leaf)


# --- batches --------------------------------------------------------------------------------


def test_the_batch_is_split_over_data_and_fsdp():
    both = abstract_mesh(data=2, fsdp=2, tensor=2)
    assert sharding.batch_sharding(both, 4).spec == PartitionSpec(("data", "fsdp"))
    assert sharding.batch_sharding(abstract_mesh(tensor=8), 4).spec == PartitionSpec(())
    expected = "`batch_size`: expected a multiple of 6, .*data and fsdp .*got 8.*--batch-size 12"
    with pytest.raises(SettingsError, match=expected):
        sharding.batch_sharding(abstract_mesh(data=2, fsdp=3, tensor=2), 8)


class OneProcessOfMany:
    """Stands in for the sharding of a batch over three devices of this process, and others."""

    def addressable_devices_indices_map(self, shape):
        return {0: (slice(6, 8),), 1: (slice(2, 4),), 2: (slice(6, 8),)}


def test_a_process_takes_the_rows_of_its_own_devices_once_each():
    assert sharding.own_rows(OneProcessOfMany(), 8).tolist() == [2, 3, 6, 7]


def test_batches_on_a_mesh_hold_the_same_rows():
    windows = Windows(np.arange(60, dtype=np.uint8).reshape(20, 3))
    options = {"batch_size": 8, "seed": 5}
    whole = Batches(windows, **options)
    sharded = Batches(windows, **options, mesh=jax.make_mesh((1,), ("data",)))
    for i in (0, 1, 7):  # an epoch ends inside of batch 2
        assert isinstance(sharded[i]["tokens"], jax.Array)
        np.testing.assert_array_equal(sharded[i]["tokens"], whole[i]["tokens"])


# --- processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"processes": 2}, "together or none of them, got --processes alone"),
        ({"coordinator": "a:1", "process": 0}, "got --coordinator and --process alone"),
        ({"coordinator": "a", "processes": 2, "process": 0}, "expected HOST:PORT, got a"),
        ({"coordinator": "a:b", "processes": 2, "process": 0}, "expected HOST:PORT, got a:b"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "from 0 to .*got 2 with .* 2"),
    ],
    ids=str,
)
def test_a_mistake_in_the_launch_flags_is_named(flags, expected):
    with pytest.raises(SettingsError, match=expected):
        Launch(**flags)


SLURM_STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}


MPIRUN = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1"}


def set_launcher(monkeypatch, environment):
    """Leaves of all launchers' variables only these."""
    for name in (*SLURM_STEP, *MPIRUN, *MPICH, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


TWO = Launch(coordinator="a:1", processes=2, process=1)


@pytest.mark.parametrize(
    ("launch", "environment", "arguments", "options"),
    [
        pytest.param(Launch(), {}, None, None, id="alone"),
        pytest.param(Launch(), {"SLURM_STEP_NUM_TASKS": "1"}, None, None, id="alone under SLURM"),
        pytest.param(
            Launch(), SLURM_STEP, (), {"local_device_ids": [0, 1, 2, 3]}, id="one per node"
        ),
        pytest.param(
            Launch(),
            SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "8"},
            (),
            {"local_device_ids": None},
            id="one per GPU",
        ),
        pytest.param(
            TWO,
            SLURM_STEP,
            ("a:1", 2, 1),
            {"cluster_detection_method": "deactivate"},
            id="flags under SLURM",
        ),
        # At another place: this process keeps its number at the first.
        pytest.param(
            dataclasses.replace(TWO, coordinator="a:2"),
            MPIRUN,
            ("a:2", 2, 1),
            {},
            id="flags under mpirun",
        ),
        pytest.param(
            Launch(), SLURM_STEP | MPICH | {"SLURM_PROCID": "1"}, (), {}, id="srun with MPICH's"
        ),
        pytest.param(
            Launch(), MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, None, None, id="alone under mpirun"
        ),
    ],
)
def test_the_processes_are_those_of_the_flags_or_else_of_slurm(
    monkeypatch, launch, environment, arguments, options
):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **o: calls.append((a, o)))
    set_launcher(monkeypatch, environment)
    processes.join(launch)
    assert [a for a, _ in calls] == ([] if arguments is None else [arguments])
    assert all(o.items() >= options.items() for _, o in calls)


@pytest.mark.parametrize(
    ("environment", "prefix"),
    [
        (MPIRUN, "OMPI_COMM_WORLD"),
        (MPICH, "PMI"),
        # In an allocation, with the variables of SLURM's daemons, of which each starts many.
        (SLURM_STEP | MPIRUN | {"SLURM_PROCID": "0"}, "OMPI_COMM_WORLD"),
        (SLURM_STEP | MPIRUN | {"SLURM_PROCID": "1"}, "OMPI_COMM_WORLD"),
        (SLURM_STEP | MPICH | {"SLURM_PROCID": "0"}, "PMI"),
    ],
    ids=["Open MPI", "MPICH", "Open MPI in SLURM", "with the same numbers", "MPICH in SLURM"],
)
def test_mpirun_without_the_flags_is_refused_with_the_line_that_works(
    monkeypatch, environment, prefix
):
    set_launcher(monkeypatch, environment)
    line = f"mpirun .* --processes ${prefix}_SIZE --process ${prefix}_RANK'".replace("$", r"\$")
    with pytest.raises(SettingsError, match=line):
        processes.join(Launch())


SAME_NUMBER = """
import jax
from train import processes
from train.settings import Launch
jax.distributed.initialize = lambda *_, **__: None
for process in (0, 1, 0):
    print(process, flush=True)
    processes.join(Launch(coordinator="the-first-node:29500", processes=2, process=process))
"""


def test_a_second_process_with_the_same_number_is_refused():
    process = start("-c", SAME_NUMBER, devices=1)
    text, _ = process.communicate(timeout=60)
    assert text.startswith("0\n1\n0\nTraceback")
    assert "expected a number of its own for each process, got 0 for two of those that" in text


# --- the command ----------------------------------------------------------------------------

# The script, after a look at the weights that it starts from.
ON_A_MESH = """
import sys
import jax, numpy as np
from train import finetune, models, run, sharding
from train.command_line import read_command_line
from train.tasks.chosen import make_task

run.write_picture = lambda *_: None  # a quarter of a short run
settings = read_command_line(sys.argv[1:], program="test").settings
mesh = sharding.make_mesh(settings.mesh)
task = make_task(settings, None)
alone, placed = (models.make(settings, task, m, None).params for m in (None, mesh))
jax.tree.map(np.testing.assert_array_equal, alone, placed)
kernel = placed["blocks"][0]["gate"]["kernel"]
assert kernel.sharding.shard_shape(kernel.shape) == (8, 12), kernel.sharding
sys.exit(finetune.main(sys.argv[1:]))
"""


def config_file(folder: Path, **settings) -> str:
    values = TINY | {"output_dir": str(folder / "runs")} | settings
    path = folder / "job.toml"
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    path.write_text(text, encoding="utf-8")
    return str(path)


def start(*command: str, devices: int) -> subprocess.Popen:
    settings = environment(devices)
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(*started: subprocess.Popen) -> list[str]:
    """What the processes print until their end, which is to be without an error."""
    try:
        shown = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, text in zip(started, shown, strict=True):
        assert process.returncode == 0, text
    return shown


def losses(folder: Path) -> list[float]:
    """Of every step, and of the validation before and after them."""
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        steps = [float(row["loss"]) for row in csv.DictReader(file)]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert len(steps) == TINY["steps"]
    return [*steps, *(summary[f"validation_{when}"]["loss"] for when in ("before", "after"))]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    """A function from an optimizer to the losses of its run on one device."""

    @functools.cache
    def run(optimizer: str) -> list[float]:
        folder = tmp_path_factory.mktemp(optimizer)
        # As users have it: jax's own `dot_product_attention` is not clean under strict promotion.
        with jax.default_device(jax.devices("cpu")[0]), jax.numpy_dtype_promotion("standard"):
            assert finetune.main([config_file(folder, optimizer=optimizer)]) == 0
        (made,) = (folder / "runs").iterdir()
        return losses(made)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "zenflow"])
def test_eight_devices_train_as_one_does(tmp_path, on_one_device, optimizer):
    mesh = {"mesh": "data=2,fsdp=2,tensor=2", "micro_batches": 2 if optimizer == "zenflow" else 1}
    config = config_file(tmp_path, optimizer=optimizer, **mesh)
    output(start("-c", ON_A_MESH, config, devices=8))
    (made,) = (tmp_path / "runs").iterdir()
    np.testing.assert_allclose(
        losses(made), on_one_device(optimizer), rtol=0, atol=SAME_TRAINING_ATOL
    )


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_the_first_alone_reports(tmp_path, on_one_device):
    config = config_file(tmp_path, optimizer="zenflow", mesh="data=2")
    with reserved_port() as port:
        command = ("-m", "train.finetune", config, "--coordinator", f"127.0.0.1:{port}")
        first, second = output(
            *(
                start(*command, "--processes", "2", "--process", str(process), devices=1)
                for process in range(2)
            )
        )
    (made,) = (tmp_path / "runs").iterdir()
    np.testing.assert_allclose(
        losses(made), on_one_device("zenflow"), rtol=0, atol=SAME_TRAINING_ATOL
    )
    assert "2 processes" in first
    assert not re.search("loss|tokens|metrics", second)


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_saves_the_run_and_both_go_on(tmp_path):
    config = config_file(tmp_path, mesh="data=2", steps=5000, run="two", progress=False)

    def both(*options: str) -> list[subprocess.Popen]:
        command = ("-m", "train.finetune", config, *options)
        with reserved_port() as port:
            meeting = ("--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process")
            return [start(*command, *meeting, str(process), devices=1) for process in range(2)]

    first, second = both()
    try:
        assert any(line.startswith("step") for line in first.stdout)
        first.send_signal(signal.SIGUSR1)
        shown = [process.communicate(timeout=200)[0] for process in (first, second)]
    finally:
        first.kill()
        second.kill()
    codes = [process.returncode for process in (first, second)]
    assert codes == [128 + signal.SIGTERM] * 2, shown
    asked = "SIGUSR1: stopping after this step, saving; again to abort"
    assert [text.count(asked) for text in shown] == [1, 0]
    (said,) = re.findall(r"stopped by SIGTERM after step (\d+), which is saved", "".join(shown))

    ended = output(*both("--steps", str(int(said) + 1)))
    assert f"going on from checkpoint {said}" in ended[0]
    summary = json.loads((tmp_path / "runs" / "two" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["resumed_at"], summary["steps"]) == (int(said), int(said) + 1)
