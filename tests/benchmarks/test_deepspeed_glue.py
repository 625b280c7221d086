"""The comparison with DeepSpeed in fine-tuning: torch gets jax's batches and head."""

import argparse

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import deepspeed_glue
from benchmarks.deepspeed_glue import Job
from benchmarks.glue_parity import Job as Task
from benchmarks.glue_parity import options_of
from tests.hf_models import write_model
from train.run.setup import prepare, read

TASK = Task("sst2", "accuracy", length=12, steps=4, learning_rate=1e-3)


@pytest.fixture
def job(tmp_path):
    write_model(tmp_path / "bert", "bert")
    lines = [f"{'good ' * (i % 5 + 1)}film\t{i % 2}\n" for i in range(7)]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\n" + "".join(lines))
    options = {"model": tmp_path / "bert", "sst2": tmp_path, "batch_size": 2}
    words = options_of(TASK, "in turn, S = 4", 0, argparse.Namespace(**options))
    return Job(words, TASK.steps, str(tmp_path / "checkpoint"), 0)


def test_torch_reads_the_same_batches_and_the_same_new_head(tmp_path, job):
    deepspeed_glue.prepare_peer(tmp_path, job.settings)
    arrays = np.load(tmp_path / "batches.npz")
    expected, _ = prepare(read(job.settings), lambda: None)
    for i in range(TASK.steps):
        batch, length = expected.batches[i], arrays["train_lengths"][i]
        tokens = arrays["train"][i]
        np.testing.assert_array_equal(tokens[:, :length], batch["tokens"])
        np.testing.assert_array_equal(tokens[:, :length] != 0, batch["mask"])
        np.testing.assert_array_equal(tokens[:, length:], 0)
        np.testing.assert_array_equal(arrays["train_labels"][i], batch["label"])
    labels = arrays["validation_labels"]
    assert labels.shape == (4, 2)
    assert np.sum(labels == -100) == 1  # seven examples
    head = load_file(tmp_path / "model" / "model.safetensors")["classifier.weight"]
    np.testing.assert_array_equal(head.T, expected.model.params["classifier"]["kernel"])
