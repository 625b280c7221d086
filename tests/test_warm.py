"""A process that has imported already is like one that is started: what it is told, how it ends."""

import signal
import subprocess
import sys

import pytest

from tests import warm
from tests.processes import environment

pytestmark = pytest.mark.slow


def start(*arguments: str, cold: bool = False, **more) -> subprocess.Popen:
    settings = environment(3) | {"ASIDE": "ä"}
    return subprocess.Popen(
        [*([sys.executable] if cold else warm.interpreter(settings)), *arguments],
        env=settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


# The parts of a program's world, one after the other.
TOLD = """
import os, sys
print(__name__, sys.argv, os.getcwd(), ascii(os.environ["ASIDE"]))
print(sys.stdin.read(), file=sys.stderr)
import jax
print(jax.devices(), jax.config.jax_platforms)
"""
# The interpreter's own end: threads first, then what is registered.
ENDS = """
import atexit, sys, threading
import jax
go = threading.Event()
def late():
    go.wait()
    print("the thread")
threading.Thread(target=late).start()
atexit.register(print, "the end")
go.set()
"""


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (TOLD, 0),
        (ENDS, 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError('expected luck')", 1),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_it_is_told_and_ends_as_one_that_is_started(tmp_path, code, ending):
    ends = []
    for cold in (True, False):
        process = start("-c", code, "an argument", cold=cold, cwd=tmp_path)
        output, errors = process.communicate("some input\n", timeout=60)
        ends.append((process.returncode, output, errors.splitlines()[-1:]))
    assert ends[0] == ends[1]
    assert ends[0][0] == ending


def test_a_module_runs_as_the_main_program():
    process = start("-m", "train.finetune", cwd=warm.ROOT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (2, "")
    assert errors.startswith("error: expected the path of a config file")


# What it starts in turn, as the stages of `on_gpu.py` do, has imported, too.
STARTS = """
import os, subprocess, sys
import jax
code = "import sys; print('jax' in sys.modules, sys.argv[1])"
words = subprocess.run([sys.executable, "-c", code, "an argument"], capture_output=True, text=True)
print(words.stdout.strip(), jax.config.jax_compilation_cache_dir)
print("ZENFLOW_JAX_TESTS_PYTHON" in os.environ)
"""


def test_a_file_stands_for_it_where_code_starts_its_own_interpreter(tmp_path):
    settings = environment(3) | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [warm.executable(settings), "-c", STARTS]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"True an argument {tmp_path}", "False"]


WAITS = "import signal, threading\nheard = threading.Event()\n{}\nprint('here', flush=True)\n"
WAITS += "heard.wait()\nprint('goes on')"


@pytest.fixture
def waits():
    """Starts processes that wait for something to be heard."""
    started = []

    def wait(more: str = "") -> subprocess.Popen:
        started.append(start("-c", WAITS.format(more)))
        assert started[-1].stdout.readline() == "here\n"
        return started[-1]

    yield wait
    for process in started:
        process.kill()
        process.communicate()


def test_it_hears_signals_and_dies_of_those_that_it_does_not_catch(waits):
    catches = "signal.signal(signal.SIGTERM, lambda *_: heard.set())"
    for more, ending, said in (("", -signal.SIGTERM, ""), (catches, 0, "goes on\n")):
        process = waits(more)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=60)[0] == said
        assert process.returncode == ending


def test_it_is_gone_when_what_stands_for_it_is_killed(waits):
    process = waits()
    process.kill()
    # The end of its output comes when it is gone, for it holds the other end.
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGKILL
