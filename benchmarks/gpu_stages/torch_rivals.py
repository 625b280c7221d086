"""The model of `step_time` in torch, trained by torch's AdamW and by DeepSpeed.

Only what the comparison needs: the same sizes, bf16 weights, rematerialized blocks, gradients
clipped by global norm.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportMissingImports]

from benchmarks.gpu_stages import plan
from benchmarks.gpu_stages.machine import NotHere
from benchmarks.gpu_stages.plan import RIVAL_STEPS, RIVAL_WARM_UP, Machine
from train.decoder import DecoderConfig

# As the peers of `step_time_peers.py`.
_RATE, _DECAY, _CLIP = 1e-4, 0.01, 1.0


class _Norm(nn.Module):
    """As the jax model's: a float32 scale."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.float(), x.shape[-1:], self.scale.float(), self.eps)


class _Block(nn.Module):
    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.c = c
        self.attention_norm, self.ffn_norm = (_Norm(c.width, c.norm_eps) for _ in range(2))
        d = c.head_width

        def matrix(n_in: int, n_out: int) -> nn.Linear:
            return nn.Linear(n_in, n_out, bias=False, dtype=torch.bfloat16)

        self.query, self.out = matrix(c.width, c.heads * d), matrix(c.heads * d, c.width)
        self.key, self.value = (matrix(c.width, c.kv_heads * d) for _ in range(2))
        self.gate, self.up = (matrix(c.width, c.ffn) for _ in range(2))
        self.down = matrix(c.ffn, c.width)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.attention_norm(x).to(x.dtype)
        q, k, v = (
            m(h).view(b, t, -1, self.c.head_width).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        shared = self.c.heads // self.c.kv_heads
        k, v = (y.repeat_interleave(shared, dim=1) for y in (_turned(k, cos, sin), v))
        mixed = nn.functional.scaled_dot_product_attention(
            _turned(q, cos, sin), k, v, is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x).to(x.dtype)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class _Decoder(nn.Module):
    def __init__(self, c: DecoderConfig):
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocabulary, c.width, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(_Block(c) for _ in range(c.layers))
        self.norm = _Norm(c.width, c.norm_eps)
        self.head = nn.Linear(c.width, c.vocabulary, bias=False, dtype=torch.bfloat16)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of tokens `(b, t + 1)`."""
        x = self.embed(tokens[:, :-1])
        pairs = self.c.head_width // 2
        speed = self.c.rope_base ** (-torch.arange(pairs, device=x.device) / pairs)
        angle = torch.outer(torch.arange(x.shape[1], device=x.device).float(), speed)
        for block in self.blocks:
            x = checkpoint(block, x, angle.cos(), angle.sin(), use_reentrant=False)
        logits = self.head(self.norm(x).to(x.dtype)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def measure(way: str, *, rehearse: bool) -> tuple[float, int | None, int, float]:
    """Median seconds of a step, device peak in bytes, parameters, the last loss.

    Args:
        way: "adamw", "offload" or "zenflow"; the last two by DeepSpeed.
        rehearse: Whether on the CPU, with the tiny model.

    Raises:
        NotHere: If torch has no CUDA.
    """
    if not rehearse and not torch.cuda.is_available():
        raise NotHere(f"torch {torch.__version__} is there, and finds no GPU")
    device = torch.device("cpu" if rehearse else "cuda")
    part = plan.step_time(Machine(0, 0), rehearse=rehearse)[0]
    torch.manual_seed(0)
    with device:
        model = _Decoder(part.config)
        shape = (RIVAL_WARM_UP + RIVAL_STEPS, part.batch, part.length + 1)
        tokens = torch.randint(part.config.vocabulary, shape)
    count = sum(p.numel() for p in model.parameters())
    assert count == plan.parameters(part.config), (count, part.config)
    step = _adamw(model) if way == "adamw" else _deepspeed(model, way, part.batch)
    times = []
    loss = float("nan")
    for batch in tokens:
        start = time.perf_counter()
        loss = float(step(batch))  # waits for the forward pass
        if not rehearse:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = None if rehearse else torch.cuda.max_memory_allocated()
    return statistics.median(times[RIVAL_WARM_UP:]), peak, count, loss


def _adamw(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """bf16 weights made from float32 masters, which torch's fused kernel steps."""
    weights = list(model.parameters())
    masters = [nn.Parameter(w.detach().float().clone()) for w in weights]
    optimizer = torch.optim.AdamW(masters, lr=_RATE, weight_decay=_DECAY, fused=True)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(masters, _CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss.detach()

    return step


def _deepspeed(model: nn.Module, way: str, batch: int) -> Callable[[torch.Tensor], Any]:
    """One process, ZeRO stage 2, AdamW's state and step on the host."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    if way == "zenflow":
        zero["zenflow"] = {
            "topk_ratio": 0.05,
            "select_strategy": "step",
            "select_interval": 64,
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        }
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": True},
        "gradient_clipping": _CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": _RATE, "weight_decay": _DECAY}},
        "zero_optimization": zero,
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= alone | {"MASTER_PORT": "29531"}
    deepspeed.init_distributed()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def step(tokens: torch.Tensor) -> Any:
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
