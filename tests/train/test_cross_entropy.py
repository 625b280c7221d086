"""A vocabulary that is processed in parts gives the same loss as the whole vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.model import cross_entropy, vocabulary

WIDTH = 16


@pytest.mark.parametrize(
    ("words", "axis", "dtype", "tolerance"),
    [
        (64, 0, "float32", 1e-5),  # whole parts of a table
        (50, 1, "float32", 1e-5),  # remainder of a head
        (50, 0, "bfloat16", 2**-7),
        (20, 1, "bfloat16", 2**-7),  # one part
        (64, None, "float32", 1e-5),  # a head in parts
        (50, None, "bfloat16", 2**-7),
    ],
)
def test_losses_and_gradients_equal_those_from_all_logits(
    monkeypatch, words, axis, dtype, tolerance
):
    monkeypatch.setattr(cross_entropy, "PART", 16)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 7, WIDTH)), dtype)
    head = jnp.asarray(rng.normal(size=(words, WIDTH)), dtype)
    head = head if axis == 0 else head.T
    targets = jnp.asarray(rng.integers(0, words, (2, 7)))
    weights = jnp.asarray(rng.uniform(size=(2, 7)), jnp.float32)

    def of_parts(x, head):
        if axis is None:
            parts = jnp.stack(jnp.split(head, 2, axis=1))
            losses = vocabulary.token_losses(x.astype(jnp.float32), parts, targets, dtype)
        else:
            losses = cross_entropy.token_losses(x, head, targets, axis=axis)
        return (losses * weights).sum(), losses

    def of_all(x, head):
        matrix = (head.T if axis == 0 else head).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            x.astype(jnp.float32) @ matrix, targets
        )
        return (losses * weights).sum(), losses

    gradients = (jax.jit(jax.grad(f, (0, 1), has_aux=True)) for f in (of_parts, of_all))
    results = (gradient(x, head) for gradient in gradients)
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=tolerance * np.abs(y).max())


@pytest.mark.parametrize(
    ("x", "target"), [(np.inf, 0), (1.0, cross_entropy.PART + 1), (1.0, -1)], ids=str
)
def test_non_finite_logits_and_targets_that_are_not_tokens_give_a_non_finite_loss(x, target):
    words = cross_entropy.PART + 1
    x, targets = jnp.full((1, 1, WIDTH), x), jnp.full((1, 1), target)
    losses = cross_entropy.token_losses(x, jnp.ones((WIDTH, words)), targets, axis=1)
    assert not np.isfinite(losses).any()
    losses = vocabulary.token_losses(x, jnp.ones((1, WIDTH, words)), targets, "float32")
    assert not np.isfinite(losses).any()
