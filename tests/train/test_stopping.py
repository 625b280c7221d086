"""Runs that end early: by signals, at any time, and when memory is full."""

import contextlib
import os
import re
import signal
import sys
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.processes import output, start
from train.cli.settings import Settings
from train.distributed.stopping import Interrupted, StopRequest, how_to_resume
from train.finetune import describe_oom, find_oom
from zenflow_jax import _commands

# The main thread is where Python's handlers cannot run, and signals do not wake it: it waits for
# a lock of the C library that it holds itself.
STUCK = """
import ctypes, sys
from train.distributed.stopping import StopRequest
with StopRequest(lambda line: print(line, flush=True)) as stop:
    if "step" in sys.argv:
        stop.begin()
    if "end" in sys.argv:
        stop.end("all is saved")
    print("here", flush=True)
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def test_a_signal_ends_a_command_at_once_if_nothing_needs_saving():
    with stuck("end") as process:
        process.send_signal(signal.SIGTERM)
        assert output(process) == (128 + signal.SIGTERM, "stopped by SIGTERM: all is saved\n")


def test_a_signal_is_confirmed_at_once_and_the_next_one_aborts():
    with stuck("step") as process:
        process.send_signal(signal.SIGUSR1)
        confirmed = "SIGUSR1: stopping after this step and saving; send another signal to abort\n"
        assert process.stdout.readline() == confirmed
        process.send_signal(signal.SIGUSR1)  # counts like SIGTERM
        aborted = "aborted by SIGUSR1; the last checkpoint is unchanged\n"
        assert output(process) == (128 + signal.SIGTERM, aborted)


@contextlib.contextmanager
def stuck(phase):
    process = start("-c", STUCK, phase)
    with process:
        assert process.stdout.readline() == "here\n"
        yield process


def test_a_signal_interrupts_work_between_two_steps_and_handlers_are_restored():
    heard = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(lambda _: heard.set()) as stop:
        stop.begin()
        stop.check()
        assert stop.after(1) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.wait(60)
        assert stop.after(1) == signal.SIGTERM
        with pytest.raises(Interrupted):
            stop.check()
        assert stop.end("all is saved") == signal.SIGTERM
        stop.check()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_an_interrupt_before_a_command_has_begun_gives_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_commands, "importlib", types.SimpleNamespace(import_module=interrupted))
    monkeypatch.setattr("sys.path", [*sys.path])
    assert _commands.finetune() == 128 + signal.SIGINT
    assert capsys.readouterr().err == "stopped by SIGINT\n"


def test_the_last_line_has_the_command_and_under_slurm_names_the_run(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    line = how_to_resume(signal.SIGTERM, 7, Path("runs/my first"))
    assert line.endswith(" 'runs/my first/settings.toml' --run 'my first'")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    line = how_to_resume(signal.SIGTERM, 7, Path("runs/job-17"))
    assert line.endswith(" is saved. Resume with the same sbatch or srun command and --run job-17")


@pytest.mark.parametrize(
    ("provoke", "expected"),
    [
        (lambda: np.ones((10**7, 10**7)), r"8 x 128 tokens .* TiB .*--batch-size below 8"),
        (
            lambda: jax.jit(lambda: jnp.zeros((10**7, 10**7)))(),
            r"zenflow: .* 400000000000\d+ bytes.*more --micro-batches",
        ),
    ],
    ids=["host", "device"],
)
def test_full_memory_gives_one_message_with_the_requested_size(provoke, expected):
    with pytest.raises((MemoryError, jax.errors.JaxRuntimeError)) as raised:
        provoke()
    assert find_oom(raised.value) is raised.value
    assert re.search(expected, describe_oom(raised.value, Settings()))
    assert find_oom(RuntimeError("RESOURCE_EXHAUSTED")) is None
