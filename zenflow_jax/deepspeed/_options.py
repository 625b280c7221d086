"""`from_deepspeed()`, its result, and its table of keys."""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from zenflow_jax._host.adam import available_cores
from zenflow_jax._spec.arguments import check_numbers
from zenflow_jax._spec.rules import AutoWindow, check_int_or_none
from zenflow_jax._transform import zenflow
from zenflow_jax.deepspeed._config import Config, Kind, get, number, one_of, pair
from zenflow_jax.deepspeed._schedule import SCHEDULES, Scheduler, Selection

_LEARNING_RATE = 1e-3  # DeepSpeed's default
_ACCUMULATION = "gradient_accumulation_steps"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", _ACCUMULATION)
_RULES = "zero_optimization.zenflow"
_IGNORED_BF16_KEYS = (
    "immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)

_FLAG, _SHARE = one_of(True, False), number(0, 1)
_BELOW_1 = Kind("a number in [0, 1)", lambda x: _SHARE.fits(x) and x < 1, float)
_TABLE = {
    **dict.fromkeys(_BATCH, number(1, whole=True)),
    "gradient_clipping": number(),
    "optimizer": {
        "type": Kind('"Adam" or "AdamW"', lambda x: str(x).lower() in ("adam", "adamw"), str),
        "params": {
            **dict.fromkeys(("lr", "eps", "weight_decay"), number()),
            "betas": pair(_BELOW_1),
            **dict.fromkeys(("adam_w_mode", "bias_correction"), one_of(True)),
            **dict.fromkeys(("amsgrad", "maximize"), one_of(False)),
            "*": ("torch_adam", "fused"),
        },
    },
    "bf16": {"enabled": _FLAG, "*": _IGNORED_BF16_KEYS.split()},
    "zero_optimization": {
        "stage": number(0, 3, whole=True),
        "offload_optimizer": {"device": one_of("none", "cpu", "nvme"), "pin_memory": _FLAG},
        "zenflow": {
            "topk_ratio": Kind("a number in (0, 1)", lambda x: _BELOW_1.fits(x) and x > 0, float),
            "update_interval": number(1, whole=True),
            "auto_ratio": _SHARE,
            "select_strategy": one_of("step", "epoch"),
            "select_interval": number(whole=True),
            "steps_per_epoch": number(1, whole=True),
            "full_warm_up_rounds": number(whole=True),
            "overlap_step": _FLAG,
            "offload": _FLAG,
            "pt_reserved_cores_perc": _SHARE,
            "*": (),
        },
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedOptions:
    """The meaning of a DeepSpeed config. Created by `from_deepspeed`.

    Values that the config does not set are None. If step counts become known later, set them with
    `dataclasses.replace`. A property that lacks a count raises a ValueError that names it.

    Attributes:
        kind: "zenflow"; "offload" for an offloaded optimizer without a `zenflow` section, which
            becomes `zenflow` with no channel selected and windows of one step; otherwise "adamw".
        fixed_arguments: The `arguments` that do not depend on an epoch's length.
        max_grad_norm: The global norm to which gradients are clipped; also in `arguments`.
        batch_size: Number of examples in a step, on all devices together.
        micro_batches: Number of micro-batches in a batch.
        compute_dtype: The dtype in which the model computes.
        threads: For `HostEngine(threads=...)`, from `pt_reserved_cores_perc`.
        not_translated: Names of keys that are not read or not applied.
        scheduler: The config's schedule.
        selection: The rule for `zenflow`'s selections.
        peak: The learning rate without the scheduler.
        total_steps, steps_per_epoch, warmup_steps: The arguments of `from_deepspeed`.
    """

    kind: str
    fixed_arguments: dict[str, Any]
    max_grad_norm: float | None
    batch_size: int | None
    micro_batches: int | None
    compute_dtype: np.dtype | None
    threads: int | None
    not_translated: tuple[str, ...]
    scheduler: Scheduler | None
    selection: Selection | None
    peak: optax.ScalarOrSchedule | None
    total_steps: int | None
    steps_per_epoch: int | None
    warmup_steps: int | None

    @property
    def learning_rate(self) -> optax.ScalarOrSchedule | None:
        """Returns a number, a schedule of the step count (from 0), or None if it is not set."""
        if self.scheduler is None:
            return self.peak
        return self.scheduler.schedule(self.warmup_steps, self.total_steps)

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns keyword arguments for `zenflow` or `optax.adamw`, except the learning rate."""
        if self.selection is None:
            return self.fixed_arguments
        return self.fixed_arguments | {"select_interval": self.selection.rule(self.steps_per_epoch)}

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns a new transformation: `zenflow(learning_rate, **arguments)`, for a `HostEngine`.

        For the kind "adamw", it is `optax.adamw` after `optax.clip_by_global_norm`.
        """
        rate = self.learning_rate
        if rate is None:
            raise ValueError(
                "`learning_rate` is missing. Set it in the config, or pass it to `from_deepspeed`."
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
    """Returns the optimizer, schedule, batch and precision in a DeepSpeed config.

    The config's own values take precedence. The arguments replace values that are "auto" or
    missing, as in the Hugging Face Trainer. If DeepSpeed and that Trainer have different defaults,
    "auto" without its argument is an error. docs/deepspeed.md lists the keys that are applied.

    Args:
        config: Path of a JSON file, or the result of `json.load`.
        total_steps: For a schedule's `total_num_steps`.
        steps_per_epoch: For the `select_strategy` "epoch", and for "auto", which selects once per
            epoch if this number is known, and otherwise by `AutoSelect`.
        devices: DeepSpeed's world size. By default it is computed from the batch sizes, or is 1.
        learning_rate: For `lr` and `warmup_max_lr`; a schedule if the config has none.
        warmup_steps: For `warmup_num_steps`; values below 2 count as 2.
        b1, b2: For `betas`.
        eps, weight_decay: For the keys with these names.
        max_grad_norm: For `gradient_clipping`; None for no clipping.
        mask: The leaves with weight decay, as in `zenflow` and `optax.adamw`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not plain JSON; if a value is invalid or missing; or if
            `zenflow`, `bf16`, optimizer or scheduler parameters contain a key that DeepSpeed does
            not recognize.
        TypeError: If an argument has the wrong type.

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
    lengths = dict(
        total_steps=total_steps, steps_per_epoch=steps_per_epoch, warmup_steps=warmup_steps
    )
    for name, value in (lengths | {"devices": devices}).items():
        check_int_or_none(name, value, 0 if name == "warmup_steps" else 1)

    read = Config(config)
    values = read.read(_table(read.written, learning_rate))
    adam = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
    peak, adam = _adam(read, values.get("optimizer", {}), learning_rate, adam)
    scheduler = None
    if kind := values.get("scheduler", {}).get("type"):
        scheduler = Scheduler.of(kind, values["scheduler"].get("params", {}), peak)
    elif "scheduler.type" in read.listed:
        peak = learning_rate
    clip = get(values, "gradient_clipping", max_grad_norm) or None
    zero = values.get("zero_optimization", {})
    kind = _kind(read, zero)
    arguments: dict[str, Any] = dict(adam)
    if mask is not None:
        arguments["mask"] = mask
    selection = None
    if kind == "zenflow":
        zenflow_arguments, selection = _rules(read, zero["zenflow"])
        arguments |= zenflow_arguments
    elif kind == "offload":
        arguments |= {"topk_ratio": 0.0, "update_interval": 1, "staleness": 0}
    if kind != "adamw":
        # Deferred weights do not move between two updates, as in DeepSpeed.
        arguments |= {"max_grad_norm": clip, "provisional_share": None}
    batch_size, micro_batches = _batch(read, values, devices, kind == "zenflow")
    in_bf16 = values.get("bf16", {"enabled": None}).get("enabled", False)  # None: not set
    dtype = None if in_bf16 is None else np.dtype(jnp.bfloat16 if in_bf16 else np.float32)

    if read.listed:
        listed = ", ".join(f"`{name}`" for name in read.listed)
        warnings.warn(
            f"{read.source or 'DeepSpeed config'}: These keys have no effect: {listed}. "
            "docs/deepspeed.md lists the keys that do.",
            stacklevel=2,
        )
    return DeepSpeedOptions(
        kind=kind,
        fixed_arguments=arguments,
        max_grad_norm=clip,
        batch_size=batch_size,
        micro_batches=micro_batches,
        compute_dtype=dtype,
        threads=_threads(zero.get("zenflow", {}).get("pt_reserved_cores_perc")),
        not_translated=tuple(read.listed),
        scheduler=scheduler,
        selection=selection,
        peak=peak,
        **lengths,
    )


def _adam(
    config: Config, optimizer: dict[str, Any], rate: Any, numbers: dict[str, float]
) -> tuple[Any, dict[str, float]]:
    if not optimizer:
        return rate, numbers
    params = optimizer.get("params", {})
    if "lr" not in params and rate is None:
        rate = _LEARNING_RATE
    if (rate := get(params, "lr", rate)) is None:
        expected = "a number, here or as `from_deepspeed(config, learning_rate=...)`"
        raise config.error("optimizer.params.lr", expected)
    b1, b2 = get(params, "betas", (numbers["b1"], numbers["b2"]))
    rest = {key: get(params, key, numbers[key]) for key in ("eps", "weight_decay")}
    return rate, {"b1": b1, "b2": b2, **rest}


def _table(config: Mapping[str, Any], learning_rate: Any) -> dict[str, Any]:
    """Returns the table for this config.

    An unknown scheduler is not read if the argument is a schedule. An optimizer or scheduler
    without a type is never read, because DeepSpeed ignores it.
    """
    named = config.get("scheduler")
    kind = str(named.get("type")) if isinstance(named, Mapping) else ""
    expected = f"{one_of(*SCHEDULES).expected}, or pass an optax schedule as `learning_rate`"
    kinds = one_of(*SCHEDULES)._replace(expected=expected)
    table = _TABLE | {"scheduler": {"type": kinds, "params": SCHEDULES.get(kind, {})}}
    if kind not in SCHEDULES and callable(learning_rate):
        table["scheduler"] = {}
    for key in ("optimizer", "scheduler"):
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("type") is None:
            table[key] = {}
    return table


def _kind(config: Config, zero: dict[str, Any]) -> str:
    """Returns the kind of optimizer; lists ineffective keys for ZeRO and offloading."""
    offload, name = zero.get("offload_optimizer", {}), "zero_optimization"
    stage, has_rules = get(zero, "stage", 0), "zenflow" in zero
    device = get(offload, "device", "none")
    offloads = device != "none"
    if stage == 0 and (offloads or has_rules):
        raise config.error(f"{name}.stage", "1, 2 or 3 with an offloaded optimizer")
    if has_rules and not offloads:
        expected = 'an object with the device "cpu", which `zenflow` requires'
        raise config.error(f"{name}.offload_optimizer", expected)
    kind = "zenflow" if has_rules else "offload" if offloads else "adamw"
    not_applied = {
        # Shardings place parameters, and optax.adamw's state.
        f"{name}.stage": stage == 3 or (stage and kind == "adamw"),
        f"{name}.offload_optimizer.device": device == "nvme",  # replaced by host memory
        f"{name}.offload_optimizer.pin_memory": not get(offload, "pin_memory", True),
        # The state of selected channels stays on the device.
        f"{_RULES}.offload": get(zero.get("zenflow", {}), "offload", False),
    }
    config.listed += [key for key, ignored in not_applied.items() if ignored]
    return kind


def _rules(config: Config, rules: dict[str, Any]) -> tuple[dict[str, Any], Selection]:
    """Returns `zenflow`'s arguments from its section, where "auto" is DeepSpeed's default."""
    window = rules.get("update_interval")
    if window is None:
        # With a share of 0, no leaf delays the close, so windows have the minimum length.
        share = get(rules, "auto_ratio", 0.99)
        window = AutoWindow(share=share) if share else 2
    arguments = {
        "topk_ratio": get(rules, "topk_ratio", 0.1),
        "full_warm_up_rounds": get(rules, "full_warm_up_rounds", 0),
        "update_interval": window,
    }
    if isinstance(window, AutoWindow):
        arguments["window_scaling"] = None  # as in DeepSpeed, and best for adaptive windows
    if not get(rules, "overlap_step", False):
        arguments["staleness"] = 0
    strategy, interval = get(rules, "select_strategy", "auto"), rules.get("select_interval")
    if (strategy == "auto") != (interval is None):
        expected = '"auto"' if strategy == "auto" else "a whole number"
        expected += f' with select_strategy "{strategy}"'
        raise config.error(f"{_RULES}.select_interval", expected)
    interval = 1 if interval is None else interval
    selection = Selection(strategy, interval, window, rules.get("steps_per_epoch"))
    if strategy == "step":
        selection.rule(None)  # raises errors that do not depend on the epoch's length
    return arguments, selection


def _threads(reserved_share: float | None) -> int | None:
    """Returns the number of cores that `pt_reserved_cores_perc` leaves to this process."""
    cores = available_cores()
    return None if reserved_share is None else cores - math.ceil(reserved_share * cores) or cores


def _batch(
    config: Config, values: dict[str, Any], devices: int | None, zenflow: bool
) -> tuple[int | None, int | None]:
    """Returns the size of a step's batch, and the number of micro-batches."""
    total, micro, parts = map(values.get, _BATCH)
    known = (micro or 1) * (parts or 1)
    if total and micro and parts and devices is None:
        devices = max(1, total // known)
    known *= devices or 1
    if total and (total % known or (micro and parts and total != known)):
        raise config.error(
            "train_batch_size",
            f"train_micro_batch_size_per_gpu ({micro or 'not set'}) times {_ACCUMULATION} "
            f"({parts or 'not set'}) times the number of devices ({devices or 'not set'})",
            "Leave out one of the three, or pass `from_deepspeed(config, devices=...)`.",
        )
    if total and micro and not parts:
        parts = total // known
    elif micro and not total:
        total, parts = known, parts or 1
    if zenflow and parts and parts > 1:
        # DeepSpeed overrides this key with `update_interval`, so that every micro-batch is a step.
        config.listed.append(_ACCUMULATION)
        return (total // parts if total else None), 1
    return total, parts
