"""An engine's mail memory is pinned before the first step, because pinning is slow."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from tests.runs import CALM, FEW, Training
from zenflow_jax._device.memory import HOST, copy_to_host
from zenflow_jax._device.state import find_state
from zenflow_jax._exchange import pinned


@pytest.fixture
def taken(monkeypatch):
    """Returns the sizes of pinned arrays, with a CPU in place of a GPU."""
    sizes = []

    def take(pieces):
        arrays = copy_to_host(pieces)
        assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
        assert {x.sharding.memory_kind for x in arrays} <= {HOST}
        sizes.append(sum(x.nbytes for x in arrays))
        return arrays

    monkeypatch.setattr(pinned, "_GPUS", ("cpu",))
    monkeypatch.setattr(pinned, "copy_to_host", take)
    return sizes


def bytes_in_host_memory():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == HOST)


@pytest.mark.parametrize("sending", ["during_step", "after_step"])
def test_a_new_engine_allocates_mail_memory_once_and_frees_it(sending, taken):
    settings = dataclasses.replace(CALM, send_gradients=sending)
    with Training(FEW, settings) as training:
        state = find_state(training.state)
        mail = sum(
            np.prod(leaf.spec.shape) * leaf.spec.mail_dtype.itemsize
            for leaf in state.leaves
            if not leaf.spec.resident
        )
        blank = mail if sending == "during_step" else 0  # the state already has this one
        assert 0 <= pinned.buffers(state) * mail - sum(taken) - blank < mail
        before = bytes_in_host_memory()
        training.renew()
        assert bytes_in_host_memory() <= before  # memory from other tests may have been freed
