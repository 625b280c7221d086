"""The script's optimizers from optax: their updates and their state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.cli.settings import ON_DEVICE, Settings
from train.run import optimizers

pytestmark = pytest.mark.usefixtures("as_scripts_run")

RATE, DECAY = 1e-2, 0.1
OPTIONS = {"schedule": "constant", "learning_rate": RATE, "weight_decay": DECAY, "steps": 9}
PARAMS = {
    "embed": {"embedding": jnp.ones((8, 4))},
    "blocks": {"up": {"kernel": jnp.ones((2, 4, 6)), "bias": jnp.ones((2, 6))}},
    "head": {"kernel": jnp.ones((4, 8))},
}


def updates_of(name, gradients, **options):
    tx = optimizers.make_optimizer(Settings(**OPTIONS, optimizer=name, **options))
    return jax.jit(tx.update)(gradients, jax.jit(tx.init)(PARAMS), PARAMS)


def drawn():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), PARAMS)


#: Optimizers with optax's own names and defaults for everything that is not a setting.
ALIASES = {
    "adamw": optax.adamw(RATE, weight_decay=DECAY, mask=optimizers.decayed),
    "lion": optax.lion(RATE, weight_decay=DECAY, mask=optimizers.decayed),
    "sgd": optax.chain(optax.add_decayed_weights(DECAY, optimizers.decayed), optax.sgd(RATE)),
    "sign": optax.chain(
        optax.scale_by_sign(),
        optax.add_decayed_weights(DECAY, optimizers.decayed),
        optax.scale(-RATE),
    ),
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_optimizer_is_optaxs_with_the_settings(name):
    updates, _ = updates_of(name, drawn())
    expected, _ = ALIASES[name].update(drawn(), ALIASES[name].init(PARAMS), PARAMS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, expected)


def test_muon_orthogonalizes_each_blocks_matrices_and_nothing_else():
    updates, _ = updates_of("muon", drawn())
    kernel = (updates["blocks"]["up"]["kernel"] / -RATE) - DECAY
    # Singular values are near 1, times 0.2 and the root of the larger side.
    values = jnp.linalg.svd(kernel, compute_uv=False) / (0.2 * 6**0.5)
    assert ((values > 0.6) & (values < 1.3)).all()
    for x in (updates["embed"]["embedding"], updates["head"]["kernel"]):
        # Adam's first step moves all elements equally, with its momentum one step ahead.
        sizes = jnp.abs(x / -RATE - DECAY)
        np.testing.assert_allclose(sizes, sizes[0, 0], rtol=1e-4)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_skipped_step_changes_nothing(name):
    bad = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), drawn())
    updates, state = updates_of(name, bad)
    assert not any(x.any() for x in jax.tree.leaves(updates))
    _, counted = updates_of(name, drawn())
    assert (int(optimizers.skipped_steps(state)), int(optimizers.skipped_steps(counted))) == (1, 0)
    before = optimizers.make_optimizer(Settings(**OPTIONS, optimizer=name)).init(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state.inner, before.inner)
