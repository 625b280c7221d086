"""The comparison with DeepSpeed: drawn weights, and the rows about resumed runs."""

import numpy as np

from benchmarks import deepspeed_zenflow
from benchmarks.deepspeed_zenflow import BATCH, LENGTH, Run


def test_the_drawn_weights_load_as_a_complete_model(tmp_path):
    deepspeed_zenflow.prepare(tmp_path, steps=2, seed=0)
    assert np.load(tmp_path / "batches.npz")["train"].shape == (2, BATCH, LENGTH + 1)
    model = deepspeed_zenflow.read_model(tmp_path / "model")  # rejects missing and extra tensors
    assert model.drawn == ()


def test_a_resumed_run_is_compared_with_the_steps_after_its_checkpoint():
    whole, resumed = Run([5.0, 4.0, 3.0, 2.0, 1.0], 6.0, 1.0), Run([3.0, 2.5], 4.0, 2.5)
    row = deepspeed_zenflow.resumed_row("a", 2, whole, resumed)
    assert row == "| a | 2 | 0.0e+00 | 5.0e-01 | 2.5e-01 |"
