"""Every optax optimizer that updates leaves one by one equals itself on the whole model."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.layerwise.small_model import BATCHES, MODEL, loss_of, new_params, reference
from zenflow_jax import layerwise

pytestmark = [
    pytest.mark.usefixtures("as_scripts_run"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]

# float32: XLA fuses the same operations differently. Most differ by less than 1e-6; acprop, whose
# loss grows here, by 3e-6 of a weight with jax 0.12.
ATOL, RTOL = 2e-6, 5e-6
#: Aliases that are refused: a part of the message, and arguments.
REFUSED = {
    "dadapt_adamw": ("also depends on leaves like it", {}),
    "dog": ("also depends on leaves like it", {}),
    "dowg": ("also depends on leaves like it", {}),
    "dpsgd": (
        "expects `grads` to have a batch dimension",
        {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "seed": 0},
    ),
    "galore": ("has no attribute", {}),
    "lbfgs": ("required keyword-only argument", {}),
    "momo": ("required keyword-only argument", {}),
    "momo_adam": ("required keyword-only argument", {}),
    "noisy_sgd": ("draws random numbers", {"key": 0}),
    "polyak_sgd": ("required keyword-only argument", {}),
    "prodigy": ("also depends on leaves like it", {}),
    "sophia": ("obj_fn must be provided", {}),
}


def aliases():
    """Returns optax's functions that make an optimizer from a learning rate, by name."""
    functions = {**vars(optax), **vars(optax.contrib)}
    return {
        name: function
        for name, function in functions.items()
        if inspect.isfunction(function)
        and {"learning_rate", "max_learning_rate"} & inspect.signature(function).parameters.keys()
        and not name.startswith(("_", "scale_by"))
        and name != "schedule_free"  # needs an optimizer; its two uses are aliases of their own
    }


def made(name):
    options = REFUSED.get(name, ("", {}))[1]
    first = next(iter(inspect.signature(aliases()[name]).parameters))
    return aliases()[name](1e-2, **options) if "learning_rate" in first else aliases()[name]()


def small(params):
    return {"outer": params["outer"], "layers": params["layers"][:2]}


def trained(optimizer, **options):
    with layerwise.Trainer(small(new_params()), **MODEL, optimizer=optimizer, **options) as trainer:
        losses = [float(trainer.step(batch)) for batch in BATCHES[:4]]
        return jax.tree.map(np.asarray, trainer.params()), losses


@pytest.mark.parametrize("name", sorted(aliases().keys() - REFUSED.keys()))
def test_a_run_equals_the_optimizer_on_the_whole_model(name):
    optimizer = made(name)
    expected, losses = reference(optimizer, small(new_params()), BATCHES[:4])
    got, values = trained(optimizer, updates="during_backward")
    close = functools.partial(np.testing.assert_allclose, atol=ATOL, rtol=RTOL)
    close(values, losses)
    jax.tree.map(close, got, expected)
    assert losses[-1] != losses[0]


def test_optimizer_states_give_the_averaged_weights_of_a_schedule_free_run():
    optimizer, params = optax.contrib.schedule_free_sgd(0.5), small(new_params())
    masters, state = params, optimizer.init(params)
    for batch in BATCHES[:3]:
        updates, state = optimizer.update(jax.grad(loss_of)(masters, batch), state, masters)
        masters = optax.apply_updates(masters, updates)
    expected = optax.contrib.schedule_free_eval_params(state, masters)["layers"][1]
    with layerwise.Trainer(params, **MODEL, optimizer=optimizer) as trainer:
        for batch in BATCHES[:3]:
            trainer.step(batch)
        weights = jax.tree.map(np.asarray, trainer.master_params(1))
        states = jax.device_get(trainer.optimizer_states(1))
    for name, state in zip(sorted(weights), states, strict=True):
        alone = dict.fromkeys(weights) | {name: weights[name]}
        got = optax.contrib.schedule_free_eval_params(state, alone)[name]
        np.testing.assert_allclose(got, expected[name], atol=ATOL)
        assert np.abs(got - weights[name]).max() > 1e-3


def labels(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", tree)


PARTED = {
    # Each block has one leaf that the norm is of, or two.
    "label": lambda tx: optax.partition({"matrix": tx, "vector": optax.adam(1e-2)}, labels),
    "mask": lambda tx: optax.masked(
        tx, lambda tree: jax.tree_util.tree_map_with_path(lambda p, _: p[-1].key == "up", tree)
    ),
}


@pytest.mark.parametrize("part", PARTED.values(), ids=PARTED)
def test_masks_and_labels_get_a_layers_tree_and_do_not_hide_a_norm(part):
    expected, _ = reference(part(optax.lion(1e-2)), small(new_params()), BATCHES[:4])
    got, _ = trained(part(optax.lion(1e-2)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=ATOL), got, expected)
    clips = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2))
    with pytest.raises(ValueError, match=r"outer\.head|layers\.0\.up.*max_grad_norm"):
        trained(part(clips))


def next_norm():
    """Makes an optimizer that scales by the last step's norm, so that only its state mixes."""

    def update(g, norm, params=None):
        return jax.tree.map(lambda x: -x / (1 + norm), g), optax.tree.norm(g)

    return optax.GradientTransformation(lambda _: jnp.float32(0), update)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        *((functools.partial(made, name), text) for name, (text, _) in sorted(REFUSED.items())),
        (next_norm, "also depends on"),
        (lambda: optax.masked(optax.sgd(0.1), {"up": True}), "must be functions of one layer"),
        (optax.contrib.reduce_on_plateau, "required keyword-only argument.*value"),
        (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), "also depends on"),
    ],
)
def test_an_optimizer_that_cannot_update_leaves_one_by_one_is_refused(make, text):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        trained(make())
    notes = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(text, notes), notes
