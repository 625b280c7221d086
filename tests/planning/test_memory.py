"""The formulas for memory, compared with engines."""

import weakref

import jax
import jax.numpy as jnp
import pytest

import zenflow_jax
from tests.runs import FEW, Leaf, Settings, Training
from zenflow_jax._device import memory
from zenflow_jax._exchange import updates, worker
from zenflow_jax.planning._host_work import needs_of

SETTINGS = Settings(topk_ratio=0.3, update_interval=3, select_interval=3)


@pytest.mark.parametrize(("sending", "rolling"), [("during_step", False), ("after_step", True)])
def test_the_formula_covers_all_arrays_of_an_engine_and_its_mail(sending, rolling):
    settings = Settings(**{**vars(SETTINGS), "rolling": rolling})
    with Training(FEW, settings, send_gradients=sending, host_state="compact") as training:
        need = needs_of(training.state, host_state="compact")["host"]
        rest, sums = need["masters, moments"], need["sums"]
        assert training.engine.stats.host_bytes == rest
        for _ in range(10):
            training.go(1)
            stats = training.engine.stats
            assert rest <= stats.host_bytes <= rest + sums
            assert stats.pinned_bytes <= need["mail, pinned"]


@pytest.mark.parametrize("changes", [{"staleness": 2}, {"rolling": False}], ids=str)
def test_the_formula_limits_the_updates_that_wait_on_the_device(changes, monkeypatch):
    uploaded, most = [], 0

    def upload(*args):
        nonlocal most
        arrays = memory.upload(*args)
        uploaded.extend(map(weakref.ref, jax.tree.leaves(arrays)))
        alive = [x for x in (ref() for ref in uploaded) if x is not None]
        most = max(most, sum(x.nbytes for x in alive if not x.is_deleted()))
        return arrays

    # No channels are selected, because hand-overs are uploads, too.
    settings = Settings(**{**vars(SETTINGS), "topk_ratio": 0.0, **changes})
    leaves = tuple(Leaf(f"w{i}", (8, 8 + i), -2, "bfloat16") for i in range(6))
    with Training(leaves, settings) as training:
        for module in (updates, worker):
            monkeypatch.setattr(module, "upload", upload)
        for _ in range(12):
            training.go(1)
            training.settle()
            jax.block_until_ready(training.params)
        assert most == needs_of(training.state)["device"]["uploads"]


def test_a_leafs_bytes_equal_the_result_worked_out_by_hand():
    def need(ratio=0.0, window=4, host_state="float32", leaves=1, n=512, staleness=None):
        params = [jax.ShapeDtypeStruct((n, n), jnp.bfloat16)] * leaves
        options = {"topk_ratio": ratio, "update_interval": window, "staleness": staleness}
        tx = zenflow_jax.zenflow(1e-3, **options)
        state = zenflow_jax.find_state(tx.init(params))
        return needs_of(state, host_state=host_state)["host"]

    with_counts = 6.1875 * 512**2 + 4 * 512
    assert need(host_state="compact")["masters, moments"] == with_counts
    # A hand-over needs masters and moments of selected channels.
    assert need(ratio=0.25)["hand-over"] == 12 * 128 * 512
    # There is a mail that is read, a mail that is written, and a placeholder.
    assert need(window=1)["mail, pinned"] == 3 * 2 * 512**2
    assert need(window=3)["mail, pinned"] == 5 * 2 * 512**2
    # One leaf's update waits, with its two gradients. The leaves share a placeholder.
    kept = (1 + 2 + 2) / 2
    assert need(window=2, leaves=2, staleness=2)["mail, pinned"] == (kept + 3 + 0.5) * 4 * 512**2
    # Only long windows in rolling groups need sums.
    assert need(leaves=32, n=64)["sums"] == 0
    assert need(leaves=32, n=64, window=16)["sums"] == 2 * 4 * (32 + 2) * 64**2
