"""What ends a run of the script early: signals, at any time; memory that does not suffice."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import kill_test
from tests.processes import environment, reserved_port
from train import finetune, models
from train.data import check_batch
from train.memory import check_memory, is_lack_of_memory, lack_of_memory
from train.settings import Settings, SettingsError
from train.stopping import Interrupted, StopRequest, how_to_go_on

# --- signals --------------------------------------------------------------------------------

# The main thread is where no handler of Python's can run, and signals do not wake it: it waits for
# a lock of the C library that it has taken itself.
STUCK = """
import ctypes, sys
from train.stopping import StopRequest
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("phase", "expected"),
    [("start", "no step of this start was done"), ("end", "all is saved")],
)
def test_a_signal_ends_at_once_what_has_nothing_to_save(number, phase, expected):
    with stuck(phase) as process:
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert text == f"stopped by {number.name}: {expected}\n"


@pytest.mark.parametrize(
    ("number", "counts_as"), [(signal.SIGINT, signal.SIGINT), (signal.SIGUSR1, signal.SIGTERM)]
)
def test_a_signal_is_answered_at_once_and_the_next_one_aborts(number, counts_as):
    with stuck("step") as process:
        process.send_signal(number)
        said = f"{number.name}: stopping after this step, saving; again to abort\n"
        assert process.stdout.readline() == said
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + counts_as
    assert text == f"aborted by {number.name}; the last whole checkpoint is as it was\n"


def stuck(phase):
    settings = environment(1)
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, phase],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=kill_test.ROOT,
    )
    assert process.stdout.readline() == "here\n"
    return process


def test_a_signal_interrupts_what_is_between_two_steps_and_handlers_come_back():
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
    assert signal.getsignal(signal.SIGTERM) == before


# As the first of two processes, of which jax's service looks for signals once a second.
ONE_OF_TWO = """
import itertools, os, signal, sys, threading
import jax
from train.stopping import StopRequest
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 1, 0)
jax.process_count = lambda: 2
heard = threading.Event()
with StopRequest(lambda line: (print(line, flush=True), heard.set())) as stop:
    stop.begin()
    assert stop.after(1) is None
    os.kill(os.getpid(), signal.SIGTERM)
    heard.wait()
    print(next(number for step in itertools.count(2) if (number := stop.after(step))))
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
"""


def test_in_several_processes_sigterm_is_answered_at_once_and_reaches_the_others():
    settings = environment(1)
    with reserved_port() as port:
        done = subprocess.run(
            [sys.executable, "-c", ONE_OF_TWO, str(port)],
            env=settings,
            capture_output=True,
            text=True,
            cwd=kill_test.ROOT,
            timeout=60,
            check=False,
        )
    said = "SIGTERM: stopping after this step, saving; again to abort"
    assert done.stdout == f"{said}\n{signal.SIGTERM}\n"
    assert done.stderr.endswith("aborted by SIGTERM; the last whole checkpoint is as it was\n")
    assert done.returncode == 128 + signal.SIGTERM


def test_under_slurm_the_last_line_names_the_run_and_no_command(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    said = "stopped by SIGTERM after step 7, which is saved. Go on with the same sbatch or srun and"
    assert how_to_go_on(signal.SIGTERM, 7, Path("runs/job-17")) == f"{said} --run job-17"


# --- memory ---------------------------------------------------------------------------------


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(SettingsError, match="`batch_size`: expected at most 70, .*got 71"):
        check_batch(71, 70)
    check_batch(70, 70)


def test_a_batch_whose_logits_do_not_fit_is_refused():
    # 4 bytes x 32,000 x 512 x 10**8 sequences / 2.
    settings = Settings(batch_size=10**8, sequence_length=512, micro_batches=2)
    with pytest.raises(SettingsError, match="in 2 micro-batches, .*alone take 3276800 GB"):
        check_memory(settings, 0, 32_000, None)
    check_memory(settings, 0, 0, None)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("adamw", r"takes 32000 GB .*--optimizer zenflow"), ("zenflow", "a smaller one")],
)
def test_a_model_that_does_not_fit_is_refused_before_it_is_made(optimizer, expected):
    settings = Settings(optimizer=optimizer)
    with pytest.raises(SettingsError, match=f"2,000,000,000,000 parameters .*{expected}"):
        check_memory(settings, 2 * 10**12, 0, None)
    check_memory(settings, 100, 0, None)
    # 42 TB, of which not one array is made.
    settings = Settings(optimizer=optimizer, width=2**20, heads=2**10, ffn=2**20, layers=1)
    with pytest.raises(SettingsError, match="expected one that fits"):
        check_memory(settings, models.parameters(settings, None), 0, None)


@pytest.mark.parametrize(
    ("provoke", "expected"),
    [
        (
            lambda: np.ones((10**7, 10**7)),
            r"the host for .* 8 x 128 tokens .* none for \S+ TiB .*--batch-size below 8",
        ),
        (
            lambda: jax.jit(lambda: jnp.zeros((10**7, 10**7)))(),
            r"on the device for .* none for 400000000000\d+ bytes.*more --micro-batches",
        ),
    ],
    ids=["host", "device"],
)
def test_lack_of_memory_is_one_message_with_what_was_asked_for(provoke, expected):
    with pytest.raises((MemoryError, jax.errors.JaxRuntimeError)) as raised:
        provoke()
    assert is_lack_of_memory(raised.value)
    assert re.search(expected, lack_of_memory(raised.value, Settings()))
    assert not is_lack_of_memory(RuntimeError("RESOURCE_EXHAUSTED"))


def test_lack_of_memory_on_a_thread_of_the_engine_is_that_message_too(
    tmp_path, capsys, monkeypatch
):
    def train(*_, **__):
        try:
            np.ones((10**7, 10**7))
        except MemoryError as error:
            raise RuntimeError("the host update of window 3 failed") from error

    monkeypatch.setattr(finetune, "train", train)
    config = tmp_path / "job.toml"
    config.write_text("batch_size = 4\n")
    assert finetune.main([str(config)]) == 2
    expected = r"error: expected memory enough on the host for .* none for \S+ TiB .*below 4.*\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
