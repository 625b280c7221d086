"""Known pitfalls of jax, XLA and threads, each with the damage that its guard prevents.

A test here fails if the guard that it tests is removed. A CPU cannot show what happens to
registered memory, or XLA's schedule and temporaries on a GPU.
"""

import dataclasses
import gc
import os
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zenflow_jax
from tests import comparisons, processes, runs
from tests.compilations import compilations
from tests.runs import BUSY, FEW, FIRST, KERNEL, ONE, Leaf, Settings, Training
from zenflow_jax import HostEngine, layerwise
from zenflow_jax._device import gpu_faults, memory
from zenflow_jax._exchange import updates, worker
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.arrays import aligned_zeros

OPTIONS = Settings(topk_ratio=0.3, update_interval=2, select_interval=4)


# The same matrix with 0, 1 and 2 unit axes, so that one leaf's mail could be mistaken for another
# leaf.
NESTED = tuple(Leaf(f"w{i}", (1,) * i + (6, 4), -2, "float32") for i in range(3))


def test_every_donated_array_is_deleted():
    # An array with a NumPy view is copied instead, silently on a CPU; here, no array may be copied.
    with Training(FEW, OPTIONS, donate=True) as training:
        for t in range(1, 9):
            # Mail and norm are not inputs of the program, so they are dropped rather than donated.
            donated = training.state._replace(step_scalars=None, mail=None, grad_norm=None)
            paths = jax.tree_util.tree_leaves_with_path((training.params, donated))
            training.step()
            kept = [jax.tree_util.keystr(path) for path, x in paths if not x.is_deleted()]
            assert kept == [], f"at step {t}"
            training.exchange()
            training.settle()


def train(params, tx, step, steps=5):
    """Trains with an engine; returns the final parameters. The step may donate anything."""
    params = jax.tree.map(jnp.copy, params)
    state = tx.init(params)
    with HostEngine(params, state, **KERNEL) as engine:
        for t in range(1, steps + 1):
            g = jax.tree.map(jnp.asarray, runs.gradients(NESTED, t))
            g = {name: g.get(name, 0.01 * p) for name, p in params.items()}
            params, state = engine.exchange(*step(params, state, g))
        params, state = engine.flush(params, state)
    return jax.device_get(params)


def beside_another_optimizer():
    """Returns leaves that `zenflow` never gets, with shapes that its mail might have."""
    ours = NESTED[:1]
    params = runs.initial(ours)
    names = dict.fromkeys(params, "ours")
    for i in range(1, 5):
        params[f"x{i}"] = jnp.ones((1,) * i + (6, 4))
        params[f"y{i}"] = jnp.ones((1,) * i + (8,))
    params = jax.device_put(params, jax.devices()[0])
    tx = runs.transformation(ours, OPTIONS, send_gradients="after_step")
    tx = optax.partition(
        {"ours": tx, "theirs": optax.adam(1e-2)},
        {name: names.get(name, "theirs") for name in params},
    )
    return params, tx


def donate_whatever_can_be_donated() -> None:
    """Checks that runs are bit-identical if their steps donate."""
    warnings.simplefilter("ignore")  # not every donated buffer can be used
    alone = runs.initial(NESTED), runs.transformation(NESTED, OPTIONS)
    for name, (params, tx) in {"alone": alone, "partition": beside_another_optimizer()}.items():
        os.write(2, f"{name}\n".encode())  # if a run aborts, this is the last output
        plain = runs.jitted(tx)
        expected = train(params, tx, plain)
        step = jax.jit(plain.__wrapped__, donate_argnums=(0, 1, 2))
        comparisons.assert_same_bits(train(params, tx, step), expected)


#: The programs of engine, step and `master_params` that the runs below need, after the first
#: engine's `channel_rows`.
PROGRAMS = "step, merge, choose, enter, _note, _compare"


def compute_only_by_programs_of_their_own() -> None:
    """Checks that engines compile only the programs above; an eager operation would add one."""
    expected = {f"jit({name})" for name in (*PROGRAMS.split(", "), "_master")}
    compiled = set()
    for sending in ("during_step", "after_step"):
        with Training(FEW, BUSY, send_gradients=sending) as training:
            gradients = [jax.device_put(runs.gradients(FEW, t)) for t in range(1, 11)]
            with compilations() as names:
                training.renew()
                for g in gradients:
                    state = training.program(training.params, training.state, g)
                    training.params, training.state = training.engine.exchange(*state)
                training.engine.state()
                training.flush()
                zenflow_jax.master_params(training.params, training.state, training.engine)
            compiled |= set(names)
    assert compiled == expected, compiled ^ expected


def use_a_new_process() -> None:
    compute_only_by_programs_of_their_own()  # first, because programs are compiled once per process
    donate_whatever_can_be_donated()


@pytest.mark.slow
def test_donation_does_not_abort_the_process_and_nothing_is_computed_eagerly():
    # In a separate process: the failure would be SIGABRT, not an exception.
    process = processes.start_process("exchange.test_traps", "use_a_new_process", devices=1)
    processes.assert_ends(process)


def new_engine(params):
    return HostEngine(params, runs.transformation(ONE, OPTIONS).init(params))


def new_trainer(params):
    functions = dict.fromkeys(("first", "layer", "last"), lambda *_: None)
    return layerwise.Trainer(
        {"outer": {}, "layers": [params]}, **functions, optimizer=optax.sgd(1e-2)
    )


@pytest.mark.parametrize("start", [new_engine, new_trainer])
def test_a_gpu_that_computes_single_operations_incorrectly_is_rejected(monkeypatch, start):
    monkeypatch.setattr(gpu_faults, "_GPU", "cpu")
    with start(runs.initial(ONE)):  # this machine is correct
        pass
    ones = jnp.ones
    monkeypatch.setattr(jnp, "ones", lambda *x, **y: 512 * ones(*x, **y))  # as in the thread
    with pytest.raises(RuntimeError, match=r"1 \+ 1 = 513\.0 on cpu.*jax/issues/40633"):
        start(runs.initial(ONE))


@pytest.mark.parametrize("sending", ["during_step", "after_step"])
def test_a_closed_engine_keeps_neither_host_memory_nor_views_that_would_block_donation(
    monkeypatch, sending
):
    views = []

    def view(x, view=worker.view):
        views.append(weakref.ref(array := view(x)))
        return array

    monkeypatch.setattr(worker, "view", view)
    with Training(FEW, OPTIONS, send_gradients=sending) as training:
        training.go(5)
        assert training.engine.stats.reselections == 4
        assert len(views) > 5 * 2
        # Until it is closed, only the engine has open windows' mail, and the masters.
        views += [weakref.ref(x) for leaf in training.host.leaves for x in leaf.arrays]
        training.engine.close()
        gc.collect()
        assert [v for v in views if v() is not None] == []


def test_the_first_state_shares_no_buffer_with_the_parameters_or_itself():
    # A step that donates both would donate the same buffer twice, which XLA rejects.
    params = runs.initial(FIRST)
    state = runs.transformation(FIRST, OPTIONS).init(params)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(set(pointers)) == len(pointers)


def test_an_upload_does_not_share_memory_with_its_source_array():
    x = aligned_zeros((1024,))  # the CPU backend would share memory of this size
    on_device = memory.upload(x, jax.devices()[0])
    x += 1
    np.testing.assert_array_equal(on_device, 0)


def test_memory_that_an_upload_may_still_read_is_not_overwritten(monkeypatch):
    # On a GPU, an upload reads host memory after the call that started it has returned. This test
    # assumes that an upload reads until a thread has waited for it. Both the worker's thread and
    # the caller upload.
    reading, clashes, lock = {}, [], threading.Lock()
    seen, waited_for = set(), jax.block_until_ready

    def upload(tree, *args):
        uploaded = memory.upload(tree, *args)
        with lock:
            for x, new in zip(jax.tree.leaves(tree), jax.tree.leaves(uploaded), strict=True):
                reading[id(new)] = (x, new)
                seen.add((x.dtype.name, x.shape))
        return uploaded

    def block_until_ready(tree):
        waited = waited_for(tree)
        with lock:
            for x in jax.tree.leaves(tree):
                reading.pop(id(x), None)
        return waited

    def writes(arrays):
        arrays = [y for x in arrays for y in x.arrays]
        with lock:
            for x, _ in reading.values():
                clashes.extend(x.shape for y in arrays if np.may_share_memory(x, y))

    class Watched(HostAdam):
        def adamw(self, masters, mu, nu, *args):
            writes([masters, mu, nu])
            yield from super().adamw(masters, mu, nu, *args)

        def put(self, arrays, channels, rows):
            writes(arrays)
            super().put(arrays, channels, rows)

    for module in (updates, worker):
        monkeypatch.setattr(module, "upload", upload)
    monkeypatch.setattr(jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(worker, "HostAdam", Watched)
    with Training(FEW, OPTIONS) as training:
        for t in range(12):
            training.go(1)
            if t == 7:  # the pending update is uploaded again
                training.renew(engine_state=training.engine.state())
        training.flush()
    # Channels come first on the host.
    assert seen >= {("bfloat16", (10, 4)), ("float32", (12, 5))}
    assert clashes == []


def test_no_empty_array_goes_to_host_memory():
    options = dataclasses.replace(OPTIONS, topk_ratio=0.0, send_gradients="after_step")
    with Training(FEW, options) as training:
        training.go(8)
        assert training.engine.stats.reselections > 1
        assert all(x.size for x in jax.tree.leaves(training.engine.state()["leaves"]))
        training.flush()
