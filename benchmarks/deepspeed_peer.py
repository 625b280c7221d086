"""Trains once with torch's AdamW or with DeepSpeed's ZenFlow, for `deepspeed_zenflow.py`.

Needs torch, transformers and DeepSpeed, but nothing from this project; `deepspeed_zenflow.py` says
how to install them, and starts this file with that environment's Python. It reads the folder that
`deepspeed_zenflow.py` prepared; its last line is the result as JSON.

DeepSpeed 0.19.8 runs as released, or with these repairs, which exist only in this process:

* `layout`: ZenFlow flattens each matrix transposed (`zenflow/zenflow_utils.py`), but the parameters
  become views that are not transposed (`_update_model_bit16_weights` in `zero/stage_1_and_2.py`),
  so `initialize` changes the model. The repaired views are transposed.
* `selection`: `update_selected_channels` in `zenflow/zenflow_stage_1_and_2.py` skips vectors
  without counting their elements, so it reads the gradients after a vector at the wrong place. The
  repaired call gets the gradients without vectors.
"""

# pyright: reportMissingImports=false
import argparse
import json
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM


def repair_layout() -> None:
    released = ZenFlowZeroOptimizer._update_model_bit16_weights

    def update(self, group: int) -> None:
        released(self, group)
        for param in self.bit16_groups[group]:
            if param.dim() == 2:
                rows, columns = param.shape
                param.data = param.data.view(columns, rows).t()

    ZenFlowZeroOptimizer._update_model_bit16_weights = update


def repair_selection() -> None:
    released = ZenFlowZeroOptimizer.update_selected_channels

    def update(self, gradients: torch.Tensor, size: int, dtype: torch.dtype) -> None:
        matrices, begin = [gradients[:0]], 0
        for group, index, _ in self.ipg_buckets[dtype].params:
            param = self.bit16_groups[group][index]
            if param.dim() != 1:
                matrices.append(gradients.narrow(0, begin, param.numel()))
            begin += param.numel()
        released(self, torch.cat(matrices), size, dtype)

    ZenFlowZeroOptimizer.update_selected_channels = update


REPAIRS = {"layout": repair_layout, "selection": repair_selection}


def mean_loss(model: torch.nn.Module, tokens: np.ndarray) -> torch.Tensor:
    batch = torch.from_numpy(tokens.astype(np.int64))
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def validate(model: torch.nn.Module, batches: np.ndarray) -> float:
    with torch.no_grad():
        return float(np.mean([mean_loss(model, tokens) for tokens in batches]))


class AdamW:
    """Clips and steps as DeepSpeed's engine does, but with torch's AdamW."""

    def __init__(self, model: torch.nn.Module, params: dict, clip: float):
        self.module, self.clip = model, clip
        self.optimizer = torch.optim.AdamW(model.parameters(), **params)

    def __call__(self, **batch):
        return self.module(**batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_engine(model: torch.nn.Module, job: dict) -> Any:
    if job["zenflow"] is None:
        return AdamW(model, job["adamw"], job["clip"])
    for name in job["repairs"]:
        REPAIRS[name]()
    offload = {"offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": job["batch"],
        "gradient_clipping": job["clip"],
        "optimizer": {"type": "AdamW", "params": job["adamw"]},
        "zero_optimization": {"stage": 2, "zenflow": job["zenflow"]} | offload,
    }
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    params = list(model.parameters())
    return deepspeed.initialize(model=model, config=config, model_parameters=params)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder with batches.npz and model")
    parser.add_argument("job", help="the run's settings as JSON")
    parser.add_argument("checkpoint", help="folder for checkpoints")
    args = parser.parse_args()
    job, tokens = json.loads(args.job), np.load(args.data / "batches.npz")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(args.data / "model", dtype=torch.float32)
    engine = make_engine(model, job)
    if job["resume"]:
        engine.load_checkpoint(args.checkpoint, tag=str(job["resume"]))
    before, losses = validate(engine.module, tokens["validation"]), []
    for step in range(job["resume"], job["steps"]):
        for group in engine.optimizer.param_groups:
            group["lr"] = job["adamw"]["lr"] * min(1, (step + 1) / job["warm_up"])
        loss = mean_loss(engine, tokens["train"][step])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
        if step + 1 in job["saves"]:
            engine.save_checkpoint(args.checkpoint, tag=str(step + 1))
    after = validate(engine.module, tokens["validation"])
    print(json.dumps({"losses": losses, "before": before, "after": after}))


if __name__ == "__main__":
    main()
