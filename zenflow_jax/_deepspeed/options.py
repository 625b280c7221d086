"""`from_deepspeed()`, what it gives, and what is but a few keys: batch, precision, reduction."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax

from zenflow_jax._deepspeed import keys
from zenflow_jax._deepspeed.blocks import Block, Report, read
from zenflow_jax._deepspeed.optimizer import read_adam, read_learning_rate
from zenflow_jax._deepspeed.zero import read_zero
from zenflow_jax._plan.arguments import check_numbers
from zenflow_jax._transform import zenflow

_ACCUMULATION = "gradient_accumulation_steps"


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptions:
    """What a DeepSpeed config becomes. Made by `from_deepspeed`.

    Attributes:
        kind: "zenflow"; "offload" for a config that offloads the optimizer without a `zenflow`
            block, which is `zenflow` with no channel selected and a window of one step (what
            ZeRO-Offload does); "adamw" for one that does neither.
        learning_rate: A number, or a schedule of the step count (from 0). None if neither the
            config nor the caller gave one.
        arguments: Keyword arguments, all but the learning rate, of `zenflow`, or of `optax.adamw`
            if that is the kind.
        max_grad_norm: Gradients are clipped to this global norm; None for no clipping. It is also
            among the arguments of `zenflow`.
        batch_size: Examples in one step on all devices together, its micro-batches too. None where
            the config leaves it open.
        micro_batches: In how many parts a step works through its batch, taking their mean gradient.
            None where the config leaves it open.
        compute_dtype: What the model is to compute in. None where the config leaves it open.
        threads: For `HostEngine(..., threads=...)`, from `pt_reserved_cores_perc` and the cores of
            this process. None, for the engine's default, where the config has no such key.
        not_translated: For each key that has no counterpart, the reason.
    """

    kind: Literal["zenflow", "offload", "adamw"]
    learning_rate: optax.ScalarOrSchedule | None
    arguments: dict[str, Any]
    max_grad_norm: float | None
    batch_size: int | None
    micro_batches: int | None
    compute_dtype: np.dtype | None
    threads: int | None
    not_translated: dict[str, str]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The transformation, made anew at each access.

        `zenflow(learning_rate, **arguments)`, to be used with a `HostEngine`; or, of the kind
        "adamw", `optax.adamw` behind `optax.clip_by_global_norm`, for float32 parameters: optax
        keeps no master weights.

        Raises:
            ValueError: If there is no learning rate.
        """
        if self.learning_rate is None:
            raise ValueError(
                "expected a learning rate in the config or as an argument, got none. Pass "
                "`from_deepspeed(config, learning_rate=...)`, a number or an optax schedule."
            )
        if self.kind != "adamw":
            return zenflow(self.learning_rate, **self.arguments)
        adamw = optax.adamw(self.learning_rate, **self.arguments)
        if self.max_grad_norm is None:
            return adamw
        return optax.chain(optax.clip_by_global_norm(self.max_grad_norm), adamw)


def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
    devices: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    warmup_steps: int | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
    mask: Any | Callable[[Any], Any] | None = None,
) -> DeepSpeedOptions:
    """The optimizer, schedule, batch and precision that a DeepSpeed config asks for.

    The config's own values win. The arguments fill in what it leaves "auto" or leaves out, as the
    Hugging Face Trainer's do; their defaults are those of DeepSpeed and of that Trainer alike, and
    None where the two differ: such an "auto" is an error unless its argument is given. "auto" in
    the `zenflow` block is no gap but a rule.

    Keys without a counterpart are named in one warning, with reasons, and in the result. Keys that
    are switched off (`false`, `null`, `{"enabled": false}`) ask for nothing. docs/deepspeed.md has
    every key.

    Args:
        config: Path of a JSON file, or what `json.load` makes of one.
        total_steps: Of the run; for a schedule's `total_num_steps`.
        steps_per_epoch: Steps in an epoch, which DeepSpeed asks its data loader for: for the
            `select_strategy` "epoch", and for "auto", which is selection once per epoch if they are
            known and else `AutoSelect`.
        devices: Among which a batch is divided, DeepSpeed's world size. By default what the batch
            sizes in the config say, or 1 where they do not.
        learning_rate: For `lr` and `warmup_max_lr`; a schedule where the config has none.
        warmup_steps: For `warmup_num_steps`; at least 1 is used.
        b1: With `b2`, for `betas`.
        b2: With `b1`, for `betas`.
        eps: For `eps`.
        weight_decay: For `weight_decay`.
        max_grad_norm: For `gradient_clipping`; None for no clipping.
        mask: What weight decay applies to, as in `zenflow` and `optax.adamw`. DeepSpeed's configs
            cannot say it, as there it is in the program's parameter groups.

    Returns:
        A `DeepSpeedOptions`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no JSON, repeats a key, has a value of a wrong type or out of range, an
            unknown key where DeepSpeed refuses them, values that do not fit each other, an "auto"
            that no argument fills in, or asks for an optimizer or arithmetic that cannot be had.
        TypeError: For arguments of a wrong type.

    Warns:
        UserWarning: If there is something in `not_translated`.

    Examples:
        >>> options = from_deepspeed({
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        ...     "zero_optimization": {
        ...         "stage": 2,
        ...         "offload_optimizer": {"device": "cpu"},
        ...         "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
        ...     },
        ... })
        >>> options.kind, options.learning_rate, options.arguments["select_interval"]
        ('zenflow', 2e-05, AutoSelect(keep=0.9, max_windows=64))
        >>> tx = options.optimizer
    """
    check_numbers(b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    if learning_rate is not None:
        check_numbers(learning_rate=learning_rate)
    counts = {"total_steps": (total_steps, 1), "steps_per_epoch": (steps_per_epoch, 1)}
    counts |= {"devices": (devices, 1), "warmup_steps": (warmup_steps, 0)}
    for name, (value, least) in counts.items():
        _check_count(name, value, least)

    root = read(config)
    _refuse_removed(root)
    report = Report()

    adam = read_adam(root, report, learning_rate, b1, b2, eps, weight_decay)
    arguments: dict[str, Any] = {"b1": adam.b1, "b2": adam.b2, "eps": adam.eps}
    arguments |= {"weight_decay": adam.weight_decay}
    if mask is not None:
        arguments["mask"] = mask

    gradient_clipping = root.number(
        "gradient_clipping",
        max_grad_norm,
        auto=max_grad_norm,
        remedy="It is the largest global norm of a gradient; 0 for no clipping.",
    )
    clip = float(gradient_clipping) if gradient_clipping else None

    zero = read_zero(root, report, steps_per_epoch)
    if zero.kind != "adamw":
        arguments |= zero.arguments | {"max_grad_norm": clip}

    rate = read_learning_rate(root, report, adam.rate, learning_rate, total_steps, warmup_steps)
    batch_size, micro_batches = _batch(root, report, devices, zero.kind == "zenflow")
    compute_dtype = _precision(root, report, zero.kind)
    _check_reduction(root)
    report.rest(root, keys.ROOT)

    if report.reasons:
        lines = "".join(f"\n  `{key}`: {reason}" for key, reason in report.reasons.items())
        warnings.warn(
            f"{root.source or 'the DeepSpeed config'} asks for what has no counterpart in "
            f"zenflow_jax:{lines}",
            stacklevel=2,
        )
    return DeepSpeedOptions(
        kind=zero.kind,
        learning_rate=rate,
        arguments=arguments,
        max_grad_norm=clip,
        batch_size=batch_size,
        micro_batches=micro_batches,
        compute_dtype=compute_dtype,
        threads=zero.threads,
        not_translated=report.reasons,
    )


def _batch(
    root: Block, report: Report, devices: int | None, zenflow: bool
) -> tuple[int | None, int | None]:
    """The batch of one step, and in how many parts it is worked through."""
    total, micro, parts = (
        root.integer(key, None, auto=None, low=1, remedy="It counts examples or batches.")
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", _ACCUMULATION)
    )
    known = f"the {devices} devices" if devices else "the number of devices"
    if total and micro and parts and devices is None:
        devices = max(1, total // (micro * parts))
    divisor = (micro or 1) * (parts or 1) * (devices or 1)
    whole = total == divisor if micro and parts else total is None or total % divisor == 0
    if total and not whole:
        raise root.error(
            "train_batch_size",
            f"it to be train_micro_batch_size_per_gpu ({micro or 'open'}) times {_ACCUMULATION} "
            f"({parts or 'open'}) times {known}",
            "Leave one of the three out, or pass `from_deepspeed(config, devices=...)`.",
        )
    if total and micro and not parts:
        parts = total // divisor
    elif micro and not total:
        parts = parts or 1
        total = micro * parts * (devices or 1)
    if zenflow and parts and parts > 1:
        # DeepSpeed puts `update_interval` in its place, so that every micro-batch is a step.
        report.add(
            root,
            _ACCUMULATION,
            "with ZenFlow DeepSpeed accumulates over `update_interval` instead, and every "
            "micro-batch is a step: so it is here",
        )
        return (total // parts if total else None), 1
    return total, parts


def _precision(root: Block, report: Report, kind: str) -> np.dtype | None:
    """The `bf16` (formerly `bfloat16`) and `fp16` blocks."""
    bf16 = root.block("bf16")
    if bf16 is None:
        bf16 = root.block("bfloat16")
    elif root.peek("bfloat16") is not None:
        root.take("bfloat16")
        report.add(root, "bfloat16", "DeepSpeed ignores it beside `bf16`")
    fp16 = root.block("fp16")
    # A block that does not say so is not enabled, as in DeepSpeed; "auto" is left open.
    states = [
        block.flag("enabled", False, auto=None) for block in (bf16, fp16) if block is not None
    ]
    if states == [True, True]:
        assert fp16 is not None
        raise fp16.error("enabled", "one of `bf16` and `fp16`", "Switch the other off.")

    if bf16 is not None:
        checks = bf16.flag("check_grad_overflow", None, auto=None)
        bf16.only(keys.BF16)
        if states[0]:
            if checks is False and kind != "adamw":
                always = "steps whose gradient is not finite are always skipped"
                report.add(bf16, "check_grad_overflow", always)
            if checks is True and kind == "adamw":
                never = "optax.adamw skips no step; optax.apply_if_finite around it does"
                report.add(bf16, "check_grad_overflow", never)
            report.rest(bf16, keys.BF16)
    if fp16 is not None:
        fp16.only(keys.FP16)
        if states[-1]:
            report.add(fp16, "enabled", "bfloat16 stands in for it, as losses are not scaled")
            report.rest(fp16, keys.FP16)

    if any(states):
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.float32) if states and None not in states else None


def _check_reduction(root: Block) -> None:
    reduction = root.take("gradient_allreduce_op", "mean", "mean")
    if str(reduction).lower() != "mean":
        raise root.error(
            "gradient_allreduce_op",
            '"mean"',
            "The loss that is differentiated decides; multiply it by the number of devices.",
        )


def _refuse_removed(root: Block) -> None:
    for key in keys.REMOVED:
        if key in root.left():
            raise root.error(key, "no such key", "DeepSpeed has removed it: take it out.")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an int or None, got {value!r}. It is a count.")
    if value < least:
        raise ValueError(
            f"`{name}` must be at least {least}, got {value}. Leave it out if it is not known."
        )
