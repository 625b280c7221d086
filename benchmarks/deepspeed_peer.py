"""Trains once with torch's AdamW, DeepSpeed's ZeRO-Offload or ZenFlow, beside zenflow_jax.

Needs torch, transformers and DeepSpeed, but nothing from this project. `deepspeed_glue.py` says how
to install them, prepares a folder with weights and batches, and starts this file with the other
environment's Python; its last line is the result as JSON.

In the folder, `train` and `validation` are batches of token ids, with 0 as padding. They also have
`_labels`, with -100 for rows that only fill a batch, and `_lengths`, to which a batch is cut.

DeepSpeed 0.19.8 runs as released, or with the repair `layout`, which exists only in this process:
ZenFlow flattens each matrix transposed (`zenflow/zenflow_utils.py`), but the parameters become
views that are not transposed (`_update_model_bit16_weights` in `zero/stage_1_and_2.py`), so
`initialize` changes the model. The repaired views are transposed.
"""

# pyright: reportMissingImports=false
import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import transformers
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from torch.nn.functional import cross_entropy


def repair_layout() -> None:
    released = ZenFlowZeroOptimizer._update_model_bit16_weights

    def update(self, group: int) -> None:
        released(self, group)
        for param in self.bit16_groups[group]:
            if param.dim() == 2:
                rows, columns = param.shape
                param.data = param.data.view(columns, rows).t()

    ZenFlowZeroOptimizer._update_model_bit16_weights = update


REPAIRS = {"layout": repair_layout}


def loss_of(model: torch.nn.Module, batches: Any, split: str, i: int) -> Any:
    """Returns a classifier's mean loss, and its predictions for rows with a label."""
    length = batches[f"{split}_lengths"][i]
    tokens = torch.from_numpy(batches[split][i, :, :length].astype(np.int64))
    labels = torch.from_numpy(batches[f"{split}_labels"][i].astype(np.int64))
    logits = model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
    return cross_entropy(logits, labels), logits.argmax(1)[labels >= 0].tolist()


def validate(model: torch.nn.Module, batches: Any) -> tuple[float, list[int]]:
    """Returns the mean loss of the validation batches, and all predictions."""
    losses, rows, predictions = [], [], []
    with torch.no_grad():
        for i in range(len(batches["validation"])):
            loss, predicted = loss_of(model, batches, "validation", i)
            losses.append(float(loss))
            rows.append(len(predicted))
            predictions += predicted
    return float(np.average(losses, weights=rows)), predictions


class AdamW:
    """Clips and steps as DeepSpeed's engine does, but with torch's AdamW."""

    def __init__(self, model: torch.nn.Module, params: list, job: dict):
        self.module, self.clip = model, job["clip"]
        self.optimizer = torch.optim.AdamW(params, **job["adamw"])

    def __call__(self, **batch):
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_engine(model: torch.nn.Module, job: dict) -> Any:
    params: list[Any] = list(model.parameters())
    vectors = {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}
    params = [{"params": [p for p in params if p.dim() > 1]}, vectors]
    if job["zenflow"] is None:
        return AdamW(model, params, job)
    for name in job["repairs"]:
        REPAIRS[name]()
    # No options for ZenFlow: ZeRO-Offload.
    zenflow = {"zenflow": job["zenflow"]} if job["zenflow"] else {}
    offload = {"offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "gradient_clipping": job["clip"],
        "optimizer": {"type": "AdamW", "params": job["adamw"]},
        "zero_optimization": {"stage": 2} | zenflow | offload,
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed.initialize(model=model, config=config, model_parameters=params)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with batches.npz and model")
    parser.add_argument("job", help="the run's settings as JSON")
    parser.add_argument("checkpoint", help="folder for checkpoints")
    args = parser.parse_args()
    job = json.loads(args.job)
    batches = dict(np.load(args.data / "batches.npz").items())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # In evaluation mode, as loaded: without dropout.
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(args.data / "model", dtype=torch.float32)
    engine = make_engine(model, job)
    if job["resume"]:
        engine.load_checkpoint(args.checkpoint, tag=str(job["resume"]))
    losses = []
    for step in range(job["resume"], job["steps"]):
        for group in engine.optimizer.param_groups:
            group["lr"] = job["rates"][step]
        loss, _ = loss_of(engine, batches, "train", step)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if step + 1 in job["saves"]:
            engine.save_checkpoint(args.checkpoint, tag=str(step + 1))
    loss, predictions = validate(engine.module, batches)
    print(json.dumps({"losses": losses, "loss": loss, "predictions": predictions}))


if __name__ == "__main__":
    main()
