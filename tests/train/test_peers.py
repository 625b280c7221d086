"""When one of several processes ends, the others report it and end; without jax's own service."""

import re

import pytest

from tests.processes import start

# Three processes each.
pytestmark = pytest.mark.slow

PEER = """
import sys
import jax
from train.distributed import peers, processes
from train.distributed.peers import Peers

peers.GRACE_S = 2.0  # three tests wait for its end
me = int(sys.argv[1])
jax.process_count, jax.process_index = lambda: 3, lambda: me

def from_first(text):
    if me:
        return sys.stdin.readline().strip()
    print(text, flush=True)
    return text

processes.from_first = from_first

def no_more():
    raise AssertionError("jax is asked when it may have been taken down")

with Peers("127.0.0.1", restart="Go on.", say=print):
    print("ready", flush=True)
    jax.process_count = jax.process_index = no_more
    word = sys.stdin.readline()
    if word == "fail\\n":
        raise SystemExit(2)
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def peers():
    started = [start("-c", PEER, str(me)) for me in range(3)]
    try:
        said = started[0].stdout.readline().strip()
        for process in started[1:]:
            tell(process, said)
        for process in started:
            assert process.stdout.readline() == "ready\n"
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def ended(process):
    process.wait(timeout=60)
    return process.returncode, process.stdout.read()


@pytest.mark.parametrize("victim", [0, 2])
def test_when_one_process_is_killed_the_others_name_it_and_end(peers, victim):
    peers[victim].kill()
    gone = f"error: process {victim} is gone: it was killed, or its machine failed."
    for me in {0, 1, 2} - {victim}:
        assert ended(peers[me]) == (1, f"{gone} This process ends as well. Go on.\n")


def test_when_one_process_fails_the_others_can_report_their_own_errors_and_end(peers):
    for me in (1, 2):  # a process that ends by itself is not killed
        tell(peers[me], "fail")
    assert [ended(peers[me])[0] for me in (1, 2)] == [2, 2]
    code, text = ended(peers[0])
    assert code == 1
    assert re.match(
        "error: process [12] has failed; its own output contains the error. This process", text
    )


def tell(process, word):
    process.stdin.write(f"{word}\n")
    process.stdin.flush()
