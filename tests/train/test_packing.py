"""Texts that share a sequence: the model makes of each what it makes of it alone."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.hf_models import FIXTURES, TOLERANCE, load
from train.step import of_tokens
from train.tasks.language import Documents, Windows

T = 23
LENGTHS = (3, 9, 2, 7, 1, 12)  # the last one is cut by the window


def packed(lengths):
    """Documents of such lengths in one sequence, as a batch of one."""
    tokens = np.random.default_rng(0).integers(0, 62, sum(lengths)).astype(np.uint8)
    example = Windows(Documents(tokens, np.array(lengths)), T)[0]
    return {name: x[None] for name, x in example.items()}


def alone(batch, lengths):
    """The same documents, a row for each, filled up behind."""
    tokens = np.zeros((len(lengths), T + 1), np.int32)
    weights = np.zeros((len(lengths), T), np.uint8)
    start = 0
    for row, length in enumerate(lengths):
        text = batch["tokens"][0, start : start + length]
        tokens[row, : len(text)] = text
        weights[row, : len(text) - 1] = 1
        start += length
    return {"tokens": tokens, "weights": weights}


@pytest.mark.slow
def test_the_loss_of_a_packed_sequence_is_that_of_its_texts_alone():
    # With a window of attention, which is shorter than the texts.
    _, graphdef, params = load(FIXTURES / "mistral", scan_layers=True, remat=True)

    @jax.jit
    @jax.value_and_grad
    def loss(params, batch):
        result = of_tokens(nnx.merge(graphdef, params), batch)
        return result.losses.sum() / result.targets.sum()

    batch = packed(LENGTHS)
    together, grads = loss(params, batch)
    expected, wanted = loss(params, alone(batch, LENGTHS))
    np.testing.assert_allclose(together, expected, rtol=TOLERANCE)
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    # Were they joined, each would see those before it.
    assert abs(loss(params, {"tokens": batch["tokens"]})[0] - expected) > 0.01
    only_weights = {name: batch[name] for name in ("tokens", "weights")}
    assert abs(loss(params, only_weights)[0] - expected) > 0.01
