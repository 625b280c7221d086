"""`from_deepspeed()`, its result, and the sections of few keys: batch and precision."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import optax

from zenflow_jax._plan.arguments import check_numbers
from zenflow_jax._plan.rules import check_int
from zenflow_jax._transform import zenflow
from zenflow_jax.deepspeed._optimizer import Scheduler, read_adam, read_scheduler
from zenflow_jax.deepspeed._section import Section, read_config
from zenflow_jax.deepspeed._zero import Selection, read_zero

_ACCUMULATION = "gradient_accumulation_steps"
# All keys of the sections of precision, but for `enabled`.
_BF16 = (
    "immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
_FP16 = (
    "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads"
)
# What DeepSpeed has had once and refuses now. Most of it would train otherwise.
_REMOVED = (
    "amp quantize_training compression_training sparse_gradients sparse_attention eigenvalue "
    "elasticity curriculum_learning progressive_layer_drop graph_harvesting nebula"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """The meaning of a DeepSpeed config. Made by `from_deepspeed`.

    What the config leaves open is None. Numbers of steps may become known later: put them in with
    `dataclasses.replace`.

    Attributes:
        kind: "zenflow"; "offload" for an offloaded optimizer without a `zenflow` section, which is
            `zenflow` with no channel selected and windows of one step; "adamw" for neither.
        fixed_arguments: Those of `arguments` that do not depend on the length of an epoch.
        max_grad_norm: Gradients are clipped to this global norm; None for no clipping. It is also
            among the arguments of `zenflow`.
        batch_size: Examples in one step on all devices together.
        micro_batches: Into how many the batch is divided.
        compute_dtype: What the model is to compute in.
        threads: For `HostEngine(threads=...)`, from `pt_reserved_cores_perc`.
        not_translated: The names of the keys that are not read or not followed.
        has_zero: Whether the config has a `zero_optimization` section with any keys.
        scheduler: The config's schedule.
        selection: When `zenflow` selects channels.
        peak: The learning rate without the scheduler.
        total_steps, steps_per_epoch, warmup_steps: As given to `from_deepspeed`.
    """

    kind: Literal["zenflow", "offload", "adamw"]
    fixed_arguments: dict[str, Any]
    max_grad_norm: float | None
    batch_size: int | None
    micro_batches: int | None
    compute_dtype: np.dtype | None
    threads: int | None
    not_translated: tuple[str, ...]
    has_zero: bool
    scheduler: Scheduler | None
    selection: Selection | None
    peak: optax.ScalarOrSchedule | None
    total_steps: int | None
    steps_per_epoch: int | None
    warmup_steps: int | None

    @property
    def learning_rate(self) -> optax.ScalarOrSchedule | None:
        """A number, or a schedule of the step count (from 0); None if nobody gave one.

        Raises:
            ValueError: If the schedule needs a number of steps that is not known.
        """
        if self.scheduler is None:
            return self.peak
        return self.scheduler.schedule(self.warmup_steps, self.total_steps)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments, all but the learning rate, of `zenflow`, or of `optax.adamw`.

        Raises:
            ValueError: If channels are to be selected by epochs of unknown length, or more often
                than windows close.
        """
        if self.selection is None:
            return self.fixed_arguments
        return self.fixed_arguments | {"select_interval": self.selection.rule(self.steps_per_epoch)}

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The transformation, made anew at each access.

        It is `zenflow(learning_rate, **arguments)`, to be used with a `HostEngine`; for "adamw"
        `optax.adamw` behind `optax.clip_by_global_norm`, which keeps no master weights.

        Raises:
            ValueError: If there is no learning rate, or as `learning_rate` and `arguments` do.
        """
        rate = self.learning_rate
        if rate is None:
            raise ValueError(
                "`learning_rate`: expected one in the config or as an argument of "
                "`from_deepspeed`, got none."
            )
        if self.kind != "adamw":
            return zenflow(rate, **self.arguments)
        adamw = optax.adamw(rate, **self.arguments)
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
    Hugging Face Trainer's do. Where DeepSpeed and that Trainer have different defaults, "auto" is
    an error unless its argument is given. In the `zenflow` section "auto" is a rule of its own.
    docs/deepspeed.md has the keys that are followed.

    Args:
        config: Path of a JSON file, or the result of `json.load` on one.
        total_steps: Of the run; for a schedule's `total_num_steps`.
        steps_per_epoch: For the `select_strategy` "epoch", and for "auto", which is once per epoch
            if they are known and else `AutoSelect`.
        devices: DeepSpeed's world size. By default what the batch sizes in the config say, or 1.
        learning_rate: For `lr` and `warmup_max_lr`; a schedule where the config has none.
        warmup_steps: For `warmup_num_steps`; at least 2 is used.
        b1, b2: For `betas`.
        eps, weight_decay: For the keys of these names.
        max_grad_norm: For `gradient_clipping`; None for no clipping.
        mask: What weight decay applies to, as in `zenflow` and `optax.adamw`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not plain JSON, or a value is wrong or cannot be had; also if
            `zenflow`, `bf16`, `fp16` or the parameters of optimizer and scheduler have a key that
            DeepSpeed lacks, or the config one that DeepSpeed has removed, such as `amp`.
        TypeError: For arguments of a wrong type.

    Warns:
        UserWarning: Once, with all names in `not_translated`.

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
    lengths = {"total_steps": total_steps, "steps_per_epoch": steps_per_epoch}
    lengths |= {"warmup_steps": warmup_steps}
    for name, value in (lengths | {"devices": devices}).items():
        if value is not None:
            check_int(name, value, 0 if name == "warmup_steps" else 1, "an int or None")

    root = read_config(config)
    adam = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    peak, adam = read_adam(root, learning_rate, adam)
    peak, scheduler = read_scheduler(root, peak, learning_rate)
    clip = root.number("gradient_clipping", max_grad_norm) or None
    zero = read_zero(root.section("zero_optimization"))
    arguments: dict[str, Any] = dict(adam)
    if mask is not None:
        arguments["mask"] = mask
    if zero.kind != "adamw":
        # Deferred weights stay where they are between two updates, as in DeepSpeed.
        arguments |= zero.arguments | {"max_grad_norm": clip, "provisional_share": None}
    batch_size, micro_batches = _batch(root, devices, zero.kind == "zenflow")
    compute_dtype = _precision(root)
    root.read("gradient_allreduce_op", "mean", '"mean"', lambda x: str(x).lower() == "mean")
    for key in _REMOVED.split():
        if root.has(key):
            raise root.error(key, "no such key, which DeepSpeed has removed")

    if not_translated := root.unread():
        listed = ", ".join(f"`{name}`" for name in not_translated)
        warnings.warn(
            f"{root.source or 'DeepSpeed config'}: not followed: {listed}. docs/deepspeed.md has "
            "the keys that are.",
            stacklevel=2,
        )
    return DeepSpeedOptions(
        kind=zero.kind,
        fixed_arguments=arguments,
        max_grad_norm=clip,
        batch_size=batch_size,
        micro_batches=micro_batches,
        compute_dtype=compute_dtype,
        threads=zero.threads,
        not_translated=not_translated,
        has_zero=bool(root.get("zero_optimization")),
        scheduler=scheduler,
        selection=zero.selection,
        peak=peak,
        **lengths,
    )


def _batch(root: Section, devices: int | None, zenflow: bool) -> tuple[int | None, int | None]:
    """The batch of one step, and in how many parts it is worked through."""
    total, micro, parts = (
        root.integer(key, None, low=1)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", _ACCUMULATION)
    )
    known = (micro or 1) * (parts or 1)
    if total and micro and parts and devices is None:
        devices = max(1, total // known)
    known *= devices or 1
    if total and (total % known or (micro and parts and total != known)):
        raise root.error(
            "train_batch_size",
            f"train_micro_batch_size_per_gpu ({micro or 'open'}) times {_ACCUMULATION} "
            f"({parts or 'open'}) times the devices ({devices or 'open'})",
            "Leave one of the three out, or pass `from_deepspeed(config, devices=...)`.",
        )
    if total and micro and not parts:
        parts = total // known
    elif micro and not total:
        total, parts = known, parts or 1
    if zenflow and parts and parts > 1:
        # DeepSpeed puts `update_interval` in its place, so that every micro-batch is a step.
        root.not_followed(_ACCUMULATION)
        return (total // parts if total else None), 1
    return total, parts


def _precision(root: Section) -> np.dtype | None:
    """The `bf16` (formerly `bfloat16`) and `fp16` sections."""
    bf16, fp16 = "bf16" if root.has("bf16") else "bfloat16", "fp16"
    # A section that does not say so is not enabled, as in DeepSpeed; "auto" is left open.
    sections = {key: root.section(key) for key in (bf16, fp16) if root.has(key)}
    states = {key: section.flag("enabled", False, auto=None) for key, section in sections.items()}
    for key, section in sections.items():
        section.refuse_unread(*(_FP16 if key == fp16 else _BF16).split())
    if states.get(fp16):
        if states.get(bf16):
            raise sections[fp16].error("enabled", f"one of `{bf16}` and `fp16`")
        sections[fp16].not_followed("enabled")  # bfloat16 stands in for it
    if any(states.values()):
        return np.dtype(jnp.bfloat16)
    return np.dtype(np.float32) if states and None not in states.values() else None
