"""Batches, a training step, and a validation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.hf_models import FIXTURES, TOLERANCE, load
from tests.train.scripts import small_model
from train.cli.settings import SettingsError
from train.run import models
from train.run.optimizers import skip_if_not_finite
from train.run.step import judged, make_train_step, make_validate, of_labels, of_tokens
from train.tasks import Task, language
from train.tasks.batches import ROWS, Batches, Sample

F32_RTOL = 1e-5  # float32 sums of a few dozen terms in two orders
F32_ATOL = 1e-6  # gradients below 1, whose terms may cancel


pytestmark = pytest.mark.usefixtures("as_scripts_run")


def numbers(count):
    """Returns examples with two tokens; the first is the example's number."""
    return language.Windows(language.as_one(np.arange(count + 1)), 1)


def test_a_batch_is_a_function_of_seed_and_number_and_an_epoch_contains_every_example():
    batches, again = (Batches(numbers(6), batch_size=2, seed=5) for _ in range(2))
    np.testing.assert_array_equal(batches[7]["tokens"], again[7]["tokens"])
    epoch = np.concatenate([batches[i]["tokens"] for i in range(3)])
    assert sorted(epoch[:, 0].tolist()) == list(range(6))
    with pytest.raises(SettingsError, match="`batch_size`: must be at most 9, .*but is 10"):
        Batches(numbers(9), batch_size=10, seed=0)


@pytest.mark.parametrize(("batches", "count"), [(None, 7), (1, 3), (2, 6), (9, 7)])
def test_a_sample_contains_each_example_once_and_is_padded_with_rows_of_weight_zero(batches, count):
    sample = Sample(numbers(7), batch_size=3, seed=1, batches=batches)
    seen = list(sample)
    assert {len(batch["tokens"]) for batch in seen} == {3}
    rows = np.concatenate([batch[ROWS] for batch in seen])
    tokens = np.concatenate([batch["tokens"] for batch in seen])[rows > 0]
    assert sample.examples == count == rows.sum() == len(set(tokens[:, 0].tolist()))
    for batch, again in zip(seen, sample, strict=True):  # in the same order every time
        np.testing.assert_array_equal(batch["tokens"], again["tokens"])


class Sentences:
    """Example i has i + 1 tokens, each equal to i, and is padded with zeros."""

    longest = 10

    def __init__(self, count):
        self.lengths = np.arange(1, count + 1)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        tokens = np.where(np.arange(self.longest + 1) <= i, i, 0)
        return {"tokens": tokens, "mask": (tokens > 0)[:-1], "label": np.int32(i)}


@pytest.mark.parametrize("buckets", [1, 3, 10])
def test_a_batch_is_only_as_long_as_its_longest_example_requires(buckets):
    words = {"batch_size": 3, "seed": 4}
    cut, full = (Batches(Sentences(10), **words, buckets=b) for b in (buckets, 1))
    allowed = {1: {10}, 3: {4, 8, 10}, 10: set(range(1, 11))}[buckets]
    lengths = set()
    for i in range(10):
        length, longest = cut.length(i), int(full[i]["label"].max()) + 1
        lengths.add(length)
        assert length == min(x for x in allowed if x >= longest)
        assert cut.tokens(i) == (full[i]["label"] + 1).sum()
        for name, x in full[i].items():
            size = {"tokens": length + 1, "mask": length, "label": None}[name]
            np.testing.assert_array_equal(cut[i][name], x[:, :size] if size else x)
    assert len(lengths) > (buckets > 1)
    assert Batches(numbers(9), **words, buckets=buckets).length(0) is None


@pytest.mark.slow
def test_a_step_with_micro_batches_equals_a_step_with_the_whole_batch():
    graphdef, params = models.split(small_model(dtype="float32"))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 9), dtype=np.uint8)
    # More targets in later rows, none in the first.
    weights = (np.arange(8) < np.arange(8)[:, None]).astype(np.uint8)
    batch = {"tokens": tokens, "weights": weights}
    tx = skip_if_not_finite(optax.sgd(1.0))

    def after_one_step(parts):
        train_step = make_train_step(graphdef, tx, of_tokens, micro_batches=parts)
        return train_step(jax.tree.map(jnp.copy, params), tx.init(params), batch)[::2]

    whole, in_parts = (after_one_step(parts) for parts in (1, 4))
    assert not np.allclose(whole[0]["head"]["kernel"], params["head"]["kernel"])
    for x, y in zip(*map(jax.tree.leaves, (whole, in_parts)), strict=True):
        np.testing.assert_allclose(x, y, rtol=F32_RTOL, atol=F32_ATOL)


T = 23
LENGTHS = (3, 9, 2, 7, 1, 12)  # the window cuts the last document


def packed(lengths):
    """Returns a batch of one sequence, with documents of these lengths."""
    tokens = np.random.default_rng(0).integers(0, 62, sum(lengths)).astype(np.uint8)
    documents = language.Documents(tokens, np.cumsum([0, *lengths[:-1]]), np.array(lengths))
    example = language.Windows(documents, T)[0]
    return {name: x[None] for name, x in example.items()}


def alone(batch, lengths):
    """Returns the same documents, one per row, padded at the end."""
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
def test_a_packed_sequence_has_the_loss_of_its_separate_texts():
    # With an attention window that is shorter than the texts.
    _, graphdef, params = load(FIXTURES / "mistral", scan_layers=True, remat=True)

    @jax.jit
    def loss(params, batch):
        result = of_tokens(nnx.merge(graphdef, params), batch)
        return result.losses.sum() / result.targets.sum()

    batch, with_gradients = packed(LENGTHS), jax.jit(jax.value_and_grad(loss))
    together, grads = with_gradients(params, batch)
    expected, expected_grads = with_gradients(params, alone(batch, LENGTHS))
    np.testing.assert_allclose(together, expected, rtol=TOLERANCE)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=F32_RTOL * np.abs(y).max())
    # Joined texts would attend to earlier texts.
    assert abs(loss(params, {"tokens": batch["tokens"]}) - expected) > 0.01
    without_positions = {name: batch[name] for name in ("tokens", "weights")}
    assert abs(loss(params, without_positions) - expected) > 0.01


class Labelled(list):
    """Examples with one token and a label."""

    def __getitem__(self, i):
        token, label = super().__getitem__(i)
        tokens = np.full(1, token, np.int8)
        return {"tokens": tokens, "types": tokens, "mask": tokens, "label": np.int32(label)}


def biased(tokens, types, mask):
    """Returns logits: the first token's number and its negative."""
    first = tokens[:, 0].astype(jnp.float32)
    return jnp.stack([first, -first], axis=-1)


def test_a_validation_scores_every_example_once():
    source = Labelled([(2, 0), (-1, 1), (3, 1)])
    task = Task(train=source, validation=source, labels=("a", "b"), checksum=0)
    sample = Sample(source, batch_size=2, seed=0)
    figures = make_validate(lambda model, x: judged(of_labels(model, x), x), task, sample)(biased)
    # The cross-entropy of two logits that differ by 2 x is log(1 + exp(-2 x)).
    loss = np.log1p(np.exp(-2 * np.array([2.0, 1.0, -3.0]))).mean()
    expected = {"loss": loss, "accuracy": 2 / 3, "macro_f1": 2 / 3, "matthews": 0.5}
    assert figures == pytest.approx(expected, rel=F32_RTOL)
