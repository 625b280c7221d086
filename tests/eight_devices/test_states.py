"""The placement of sharded parameters' state, and rejected placements."""

import math
from functools import partial

import jax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zenflow_jax
from tests import comparisons, meshes, runs
from tests.meshes import LEAVES, MORE_LEAVES, STALE

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def states_of(placement, **options):
    """Returns the shapes and placements of each leaf's state and mail."""
    shardings = meshes.shardings(meshes.make_mesh("three"), placement, MORE_LEAVES)
    params = {
        leaf.name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[leaf.name])
        for leaf in MORE_LEAVES
    }
    state = runs.transformation(MORE_LEAVES, STALE, **options).init(params)
    both = zip(state.leaves, state.mail, strict=True)
    return {leaf.name: both for leaf, both in zip(MORE_LEAVES, both, strict=True)}


@pytest.mark.parametrize("partition", [True, False, lambda path, _: "rows" in str(path)])
def test_replicated_leaves_are_partitioned_as_far_as_requested_and_possible(partition):
    states = states_of("replicated", partition_replicated=partition)
    for name, (state, mail) in states.items():
        asked = partition is True or (partition is not False and name == "rows")
        if mail is None:
            assert state.mu.sharding.shard_shape(state.mu.shape) == state.mu.shape
            continue
        for x in (mail, state.mu):
            piece = math.prod(x.sharding.shard_shape(x.shape))
            assert piece * (8 if asked else 1) == x.size


def test_parameters_and_states_with_other_placements_are_rejected():
    three, others = (meshes.shardings(meshes.make_mesh("three"), x) for x in ("both", "others"))
    alone, spread, turned = (
        runs.place(runs.initial_values(LEAVES), x) for x in (None, three, others)
    )
    engine, tx = zenflow_jax.HostEngine, runs.transformation(LEAVES, STALE)
    for call, words in (
        (lambda: engine(spread, tx.init(alone)), r"\['bias'\] .* on one device.*outside jit"),
        (lambda: engine(alone, tx.init(spread)), r"\['bias'\] .* divided by .*out_shardings"),
        (lambda: engine(turned, tx.init(spread)), r"\['bias'\] .* divided by .*out_shardings"),
        # Created under jit, without the parameters' placement.
        (lambda: engine(spread, jax.jit(tx.init)(spread)), "param_shardings"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize(
    ("kind", "again", "name"),
    # In the second case, each device keeps as many numbers as before, but for different channels.
    [(AUTO, P(), "mail"), (EXPLICIT, P("fsdp"), "mu")],
    ids=["replicated", "along another axis"],
)
def test_a_moved_state_is_rejected_until_it_is_placed(kind, again, name):
    mesh = meshes.make_mesh("fsdp", kind)
    shardings, place = {"w": NamedSharding(mesh, P(None, "fsdp"))}, NamedSharding(mesh, again)
    run = partial(
        runs.Training,
        (runs.Leaf("w", (16, 16), -2, "float32"),),
        runs.Settings(topk_ratio=0.5, update_interval=1),
        shardings=shardings,
    )

    def placed_anew(state):
        if name == "mail":
            return jax.device_put(state, place)
        (leaf,) = state.leaves
        moved = leaf.replace(mu=jax.device_put(leaf.mu, place))
        return state._replace(leaves=state.leaves.replace([moved]))

    with run() as ours, run() as expected:
        ours.step()
        ours.state = placed_anew(ours.state)
        with pytest.raises(ValueError, match=r"of \['w'\] is not where `tx.init"):
            ours.exchange()
        ours.state = zenflow_jax.place(ours.params, ours.state)
        ours.exchange()  # as if the state had not moved
        expected.go(1)
        for each in ours, expected:
            each.flush()
        comparisons.assert_same_bits(ours.moments(), expected.moments())
        comparisons.assert_same_bits(ours.values(), expected.values())


@pytest.mark.parametrize("sending", ["during_step", "after_step"])
def test_a_run_without_selected_channels_has_the_same_bits_on_a_mesh(sending):
    # Both leaves are in one group, whose updates keep the last provisional move.
    leaves = runs.Leaf("a", (2, 16, 8), -2, "float32"), runs.Leaf("b", (16, 8), -2, "float32")
    settings = runs.Settings(topk_ratio=0.0, update_interval=2, rolling=False, staleness=1)
    values = []
    for kind in None, AUTO, EXPLICIT:
        shardings = None
        if kind is not None:
            mesh = meshes.make_mesh("fsdp", kind)
            shardings = {
                "a": NamedSharding(mesh, P(None, "fsdp")),
                "b": NamedSharding(mesh, P("fsdp")),
            }
        more = {"shardings": shardings, "send_gradients": sending}
        with runs.Training(leaves, settings, **more) as training:
            training.go(6)
            values.append(training.values())
    comparisons.assert_same_bits(*values[:2])
    comparisons.assert_same_bits(*values[1:])


@pytest.mark.parametrize(("kind", "told"), [(AUTO, True), (EXPLICIT, False)], ids=str)
def test_init_under_jit_places_its_state_like_init_outside_jit(kind, told):
    mesh = meshes.make_mesh("three", kind)
    shardings = meshes.shardings(mesh, "both")
    params = runs.place(runs.initial_values(LEAVES), shardings)
    tx = runs.transformation(LEAVES, STALE, param_shardings=shardings if told else None)
    outside, inside = tx.init(params), jax.jit(tx.init)(params)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    for x, y in zip(*map(jax.tree.leaves, (inside, outside)), strict=True):
        assert x.sharding == y.sharding
    zenflow_jax.HostEngine(params, inside, host_kernel="numpy").close()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_a_misplaced_or_restored_state_is_placed_as_by_init_outside_jit(kind):
    mesh = meshes.make_mesh("three", kind)
    shardings = meshes.shardings(mesh, "both")
    params = runs.place(runs.initial_values(LEAVES), shardings)
    tx = runs.transformation(LEAVES, STALE, param_shardings=shardings)
    expected = tx.init(params)
    # Abstract parameters give the shardings, for another program's `out_shardings`.
    shapes = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), params, shardings
    )
    places = jax.tree.map(lambda x: x.sharding, tx.init(shapes))
    made = jax.jit(tx.init, out_shardings=places)(params)
    misplaced = jax.jit(tx.init, out_shardings=NamedSharding(mesh, P()))(params)
    placed = zenflow_jax.place(params, misplaced)
    restored = zenflow_jax.place(params, jax.device_get(expected))
    for x, *others in zip(*map(jax.tree.leaves, (expected, made, placed, restored)), strict=True):
        for y in others:
            assert y.sharding.is_equivalent_to(x.sharding, x.ndim)
            assert y.sharding.memory_kind == x.sharding.memory_kind
    comparisons.assert_same_bits(jax.device_get(placed), jax.device_get(expected))


class Model(nnx.Module):
    def __init__(self, params):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


def update(model, optimizer, gradients):
    """Takes a step under jit, with gradients that are pure arrays."""
    state = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(state, gradients)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes dtypes
        optimizer.update(model, state)


def test_an_nnx_module_trains_like_the_functional_form_and_stays_in_place():
    shardings = meshes.shardings(meshes.make_mesh("three", EXPLICIT), "both")
    with (
        runs.Training(LEAVES, STALE, shardings=shardings, donate=True) as expected,
        jax.set_mesh(shardings["rows"].mesh),
    ):
        model = Model(runs.place(runs.initial_values(LEAVES), shardings))
        optimizer = nnx.Optimizer(model, expected.tx, wrt=nnx.Param)
        state, step = optimizer.opt_state, nnx.jit(update)
        with zenflow_jax.HostEngine(nnx.state(model), state, host_kernel="numpy") as engine:
            for t in range(1, 14):
                expected.go(1)
                step(model, optimizer, runs.place(runs.gradients(LEAVES, t), shardings))
                engine.exchange_nnx(model, optimizer)
                comparisons.assert_same_bits(nnx.to_pure_dict(nnx.state(model)), expected.params)
            expected.flush()
            engine.flush_nnx(model, optimizer)
        trained = nnx.to_pure_dict(nnx.state(model))
        comparisons.assert_same_bits(trained, expected.params)
        for name, x in trained.items():
            assert x.sharding.is_equivalent_to(shardings[name], x.ndim)
