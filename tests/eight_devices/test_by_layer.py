"""A run with streamed weights on a mesh has the same losses as on one device, and resumes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from tests.comparisons import assert_same_bits
from tests.layerwise.small_model import BATCHES, MODEL, new_params
from tests.train.scripts import TINY_MESH, read
from train.model import cross_entropy
from train.run import setup
from zenflow_jax import layerwise
from zenflow_jax.layerwise import _transfers

# In nats, float32; the summation order over devices differs.
ATOL = 1e-5


@pytest.mark.usefixtures("as_scripts_run")
def test_a_layerwise_run_on_a_mesh_has_the_same_losses_as_on_one_device_and_resumes(monkeypatch):
    monkeypatch.setattr(cross_entropy, "PART", 100)  # embedding and head are split
    options = TINY_MESH | {"dtype": "float32", "eps": 1e-3}
    options |= {"optimizer": "adamw", "stream": "weights"}
    losses = []
    for mesh in (None, "data=2,fsdp=4"):
        job, _ = setup.prepare(read(**options, mesh=mesh))
        batches = [job.batches[i] for i in range(3)]
        with setup.make_trainer(job) as trainer:
            taken = [trainer.step(batches[0])]
            state = trainer.state()
            losses.append(np.array(taken + [trainer.step(batch) for batch in batches[1:]]))
            trained = trainer.params()
    assert job.layered
    assert job.layered.parts > 1
    np.testing.assert_allclose(losses[1], losses[0], atol=ATOL)
    with setup.make_trainer(job, state) as resumed:
        for batch in batches[1:]:
            resumed.step(batch)
        assert_same_bits(resumed.params(), trained)


def auto_mesh(*shape):
    return jax.make_mesh(shape, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def placed(params, mesh):
    """Places a small model's weights on a mesh, with their columns divided over "fsdp"."""
    columns = jax.tree.map(lambda x: NamedSharding(mesh, P(*[None] * (x.ndim - 1), "fsdp")), params)
    return jax.device_put(params, columns)


@pytest.mark.usefixtures("as_scripts_run")
@pytest.mark.parametrize(
    ("alias", "updates"),
    [("adafactor", "after_backward"), ("muon", "during_backward")],
)
def test_any_optimizer_trains_on_a_mesh_and_resumes_on_another(
    tmp_path, monkeypatch, alias, updates
):
    monkeypatch.setattr(_transfers, "SMALL_BYTES", 0)
    optimizer = getattr(optax, alias, None) or getattr(optax.contrib, alias)
    options = {**MODEL, "optimizer": optimizer(1e-2), "updates": updates, "max_grad_norm": 0.5}
    with layerwise.Trainer(new_params(), **options) as trainer:
        expected = [float(trainer.step(batch)) for batch in BATCHES[:4]]
    meshes = [auto_mesh(2, 4), auto_mesh(4, 2)]
    batches = [jax.device_put(x, NamedSharding(meshes[0], P("data"))) for x in BATCHES[:4]]
    with layerwise.Trainer(placed(new_params(), meshes[0]), **options) as trainer:
        losses = [float(trainer.step(batch)) for batch in batches[:2]]
        trainer.snapshot().write(tmp_path)
        state = trainer.state()
        losses += [float(trainer.step(batch)) for batch in batches[2:]]
    np.testing.assert_allclose(losses, expected, atol=ATOL)
    saved = zenflow_jax.EngineCheckpointHandler().restore(tmp_path)
    for params in (placed(new_params(), meshes[1]), new_params()):
        with layerwise.Trainer(params, **options, state=saved) as resumed:
            assert_same_bits(resumed.state()["leaves"], state["leaves"])
            losses[2:] = [float(resumed.step(batch)) for batch in BATCHES[2:4]]
            np.testing.assert_allclose(losses, expected, atol=ATOL)


def losses_of(mesh, *, scanned):
    """Returns the losses of a small model whose weights are sharded over a mesh."""
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(3, 8, 8)).astype(np.float32) / 4
    params = {
        "head": jax.device_put(weights[0], NamedSharding(mesh, P(None, "fsdp"))),
        "layers": jax.device_put(weights[1:], NamedSharding(mesh, P(None, None, "fsdp"))),
    }
    x = jax.device_put(rng.normal(size=(8, 8)).astype(np.float32), rows)

    def times(x, w):
        explicit = AxisType.Explicit in mesh.axis_types
        return x @ (jax.sharding.reshard(w, whole) if explicit else w)

    def layer(x, w):
        return x + jnp.tanh(times(x, w)), None

    def last(params, x, _):
        return jnp.mean(times(x, params["head"]) ** 2)

    def loss_fn(params, x):
        return last(params, jax.lax.scan(layer, x, params["layers"])[0], None)

    model = layerwise.ScannedModel(loss_fn, params, x)
    functions = {
        "first": lambda outer, x: (x, None),
        "layer": lambda w, x, _: layer(x, w["layers"])[0],
        "last": last,
    }
    functions = model.functions if scanned else functions
    with layerwise.Trainer(
        model.split(params), **functions, optimizer=optax.adamw(1e-2)
    ) as trainer:
        return [float(trainer.step(x)) for _ in range(3)]


@pytest.mark.usefixtures("as_scripts_run")
def test_weights_on_explicit_axes_or_in_scans_train_as_they_do_on_auto_axes():
    losses = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            losses += [losses_of(mesh, scanned=scanned) for scanned in (False, True)]
    # The summation order differs.
    np.testing.assert_allclose(losses[1:], [losses[0]] * 3, rtol=1e-5)
    assert losses[0][2] < losses[0][0]


def test_layers_that_a_mesh_divides_are_rejected_by_name():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    params = jax.device_put(jnp.zeros((4, 8, 8)), NamedSharding(mesh, P("fsdp")))

    def loss_fn(params, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, params)[0].sum()

    model = layerwise.ScannedModel(loss_fn, params, jnp.zeros((2, 8)))
    with pytest.raises(ValueError, match="The layers of .* are divided over devices"):
        model.split(params)
