"""A resumed run is bit-identical; damaged or unfit states are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import zenflow_jax
from tests.layerwise.small_model import BATCHES, LAYERS, MODEL, check_equal, masters_of, new_params
from zenflow_jax import layerwise
from zenflow_jax.planning import UnfitRunError

# Users' models promote dtypes by jax's default rules.
pytestmark = pytest.mark.usefixtures("as_scripts_run")

ADAMW = optax.adamw(optax.linear_schedule(1e-2, 0, 7))


@pytest.mark.parametrize(
    ("dtype", "updates", "by"),
    [(jnp.bfloat16, "during_backward", "orbax"), (jnp.float32, "after_backward", "state")],
)
def test_a_resumed_run_is_bit_identical(tmp_path, dtype, updates, by):
    options = {**MODEL, "optimizer": ADAMW, "updates": updates, "max_grad_norm": 0.5}
    manager = ocp.CheckpointManager(tmp_path)
    with layerwise.Trainer(new_params(dtype), **options) as trainer, manager:
        for batch in BATCHES[:3]:
            trainer.step(batch)
        if by == "state":
            saved = trainer.state()
        else:
            manager.save(3, args=zenflow_jax.EngineSave(trainer, copy_bytes=0))
        for batch in BATCHES[3:]:  # while orbax writes
            trainer.step(batch)
        expected = masters_of(trainer)
        manager.wait_until_finished()
        if by == "orbax":
            saved = manager.restore(3, args=zenflow_jax.EngineRestore())
        with layerwise.Trainer(new_params(dtype), **options, state=saved) as resumed:
            assert resumed.steps == 3
            for batch in BATCHES[3:]:
                resumed.step(batch)
            check_equal(masters_of(resumed), expected)


def test_a_save_has_the_arrays_of_its_moment_though_all_of_them_are_replaced(tmp_path):
    with layerwise.Trainer(new_params(), **MODEL, optimizer=ADAMW) as trainer:
        trainer.step(BATCHES[0])
        expected, snapshot = trainer.state(), trainer.snapshot(10**9)
        trainer.step(BATCHES[1])
        trainer.wait()
        snapshot.write(tmp_path)
    got = zenflow_jax.EngineCheckpointHandler().restore(tmp_path)
    check_equal(jax.tree.map(np.asarray, got["leaves"]), expected["leaves"])


def test_a_damaged_file_is_refused_by_the_name_of_the_leaf(tmp_path):
    with layerwise.Trainer(new_params(), **MODEL, optimizer=ADAMW) as trainer:
        trainer.step(BATCHES[0])
        trainer.snapshot().write(tmp_path)
        up = np.asarray(trainer.params()["layers"][2]["up"])
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[content.index(up.tobytes()) + 5] ^= 1
    path.write_bytes(content)
    state = zenflow_jax.EngineCheckpointHandler().restore(tmp_path)
    with pytest.raises(ValueError, match=r"weight of layers\.2\.up is damaged"):
        layerwise.Trainer(new_params(), **MODEL, optimizer=ADAMW, state=state)


def test_a_state_fits_only_the_same_weights_and_optimizer():
    with layerwise.Trainer(new_params(), **MODEL, optimizer=ADAMW) as trainer:
        state = trainer.state()
        for name in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"{name} is not in list"):
                trainer.master_params(name)

    def resumed(params=None, optimizer=ADAMW, state=state):
        params = params or new_params()
        layerwise.Trainer(params, **MODEL, optimizer=optimizer, state=state)

    resumed()
    params = new_params()
    params["layers"] = [{f"new_{name}": x for name, x in w.items()} for w in params["layers"]]
    with pytest.raises(UnfitRunError, match="different weights, by name"):
        resumed(params)
    for optimizer in (optax.sgd(0.1), optax.adamw(0.1, mu_dtype=jnp.bfloat16)):
        with pytest.raises(UnfitRunError, match="or its optimizer state has other shapes"):
            resumed(optimizer=optimizer)
    same_shapes = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -0.1))
    with pytest.raises(UnfitRunError, match="another optimizer"):
        resumed(optimizer=same_shapes)
    with pytest.raises(UnfitRunError, match="of this version"):
        resumed(state={name: x for name, x in state.items() if name != "layout"})
