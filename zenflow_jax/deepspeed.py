"""`from_deepspeed`: the optimizer and its schedule in a DeepSpeed config.

Follows DeepSpeed 0.19.8 without importing it; docs/deepspeed.md is the guide for users. The config
is flattened to names such as "optimizer.params.lr"; `_KEYS` has each name's valid values.
"""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax

from zenflow_jax._spec.adaptive import AutoSelect, AutoWindow
from zenflow_jax._transform import zenflow

__all__ = ["DeepSpeedOptions", "from_deepspeed"]

_ADAM, _SCHEDULE, _ZERO = "optimizer.params.", "scheduler.params.", "zero_optimization."
_OFFLOAD, _ZENFLOW = f"{_ZERO}offload_optimizer.", f"{_ZERO}zenflow."
_NEVER = 2**31 - 1  # steps; the largest int32

#: The valid values in words, and whether a value is valid.
_Kind = tuple[str, Callable[[Any], bool]]


def _one_of(*values: str | int | None) -> _Kind:
    # In Python, 1 and True are equal.
    return " or ".join(map(json.dumps, values)), lambda x: any(
        type(x) is type(y) and x == y for y in values
    )


_FLAG = _one_of(True, False)
_NUMBER: _Kind = ("a number of at least 0", lambda x: type(x) in (int, float) and 0 <= x < math.inf)
_SHARE: _Kind = ("a number from 0 to 1", lambda x: _NUMBER[1](x) and x <= 1)
_WHOLE: _Kind = ("a whole number", lambda x: _NUMBER[1](x) and x == int(x))
_COUNT: _Kind = ("a whole number of at least 1", lambda x: _WHOLE[1](x) and x > 0)
_BETAS: _Kind = (
    "a list of two numbers in [0, 1)",
    lambda x: isinstance(x, list | tuple) and [_SHARE[1](b) and b < 1 for b in x] == [True] * 2,
)
_RATIO: _Kind = ("a number in (0, 1)", lambda x: _SHARE[1](x) and 0 < x < 1)
_TABLE: Sequence[tuple[str, str, _Kind]] = (
    ("", "gradient_clipping", _NUMBER),
    ("optimizer.", "type", _one_of("Adam", "AdamW", "adam", "adamw")),
    (_ADAM, "lr eps weight_decay", _NUMBER),
    (_ADAM, "betas", _BETAS),
    (_ADAM, "adam_w_mode bias_correction", _one_of(True)),
    (_ADAM, "amsgrad maximize", _one_of(False)),
    ("scheduler.", "type", _one_of("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")),
    (_SCHEDULE, "warmup_num_steps total_num_steps", _COUNT),
    (_SCHEDULE, "warmup_type", _one_of("log", "linear")),
    (_SCHEDULE, "last_batch_iteration", _one_of(-1)),
    (_SCHEDULE, "warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio", _NUMBER),
    (_ZERO, "stage", _one_of(0, 1, 2, 3)),
    (_OFFLOAD, "device", _one_of("none", "cpu", "nvme")),
    (_OFFLOAD, "pin_memory", _FLAG),
    (_ZENFLOW, "topk_ratio", _RATIO),
    (_ZENFLOW, "update_interval steps_per_epoch", _COUNT),
    (_ZENFLOW, "auto_ratio", _SHARE),
    (_ZENFLOW, "select_strategy", _one_of("step", "epoch")),
    (_ZENFLOW, "select_interval full_warm_up_rounds", _WHOLE),
    (_ZENFLOW, "overlap_step offload", _FLAG),
)
_KEYS = {block + key: kind for block, keys, kind in _TABLE for key in keys.split()}
_BLOCKS = {name[:i] for name in _KEYS for i, x in enumerate(name) if x == "."}
_KEYS |= dict.fromkeys(_BLOCKS, ("an object ({...})", lambda x: isinstance(x, Mapping)))
# Blocks in which an unknown key is an error.
_CLOSED = (_ADAM, _SCHEDULE, _ZENFLOW)
_LISTED = (f"{_ADAM}torch_adam", f"{_ADAM}fused", f"{_ZENFLOW}pt_reserved_cores_perc")


@dataclasses.dataclass(frozen=True)
class DeepSpeedOptions:
    """The meaning of a DeepSpeed config. Created by `from_deepspeed`.

    Attributes:
        learning_rate: A number, a schedule of the step count (from 0), or None if it is not set.
        arguments: Keyword arguments for `zenflow`, except the learning rate. Without a `zenflow`
            section, an offloaded optimizer has no selected channel and windows of one step; any
            other optimizer has only selected channels, and needs no engine.
        not_translated: Names of keys that are not read or not applied; a warning lists them.
    """

    learning_rate: optax.ScalarOrSchedule | None
    arguments: dict[str, Any]
    not_translated: tuple[str, ...]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Returns a new transformation: `zenflow(learning_rate, **arguments)`."""
        rate: Any = self.learning_rate  # `zenflow` rejects None
        return zenflow(rate, **self.arguments)


def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    total_steps: int | None = None,
    steps_per_epoch: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    warmup_steps: int | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> DeepSpeedOptions:
    """Returns the optimizer and its schedule in a DeepSpeed config.

    The config's own values take precedence. The arguments replace values that are "auto" or
    missing, as in the Hugging Face Trainer. If DeepSpeed and that Trainer have different defaults,
    "auto" without its argument is an error. docs/deepspeed.md lists the keys that are applied.

    Args:
        config: Path of a JSON file, or the result of `json.load`.
        total_steps: For a schedule's `total_num_steps`.
        steps_per_epoch: For the `select_strategy` "epoch", and for "auto", which selects once per
            epoch if this number is known, and otherwise by `AutoSelect`.
        learning_rate: For `lr` and `warmup_max_lr`; a schedule if the config has none.
        warmup_steps: For `warmup_num_steps`; values below 2 count as 2.
        b1, b2, eps, weight_decay: For `betas`, and the keys with these names.
        max_grad_norm: For `gradient_clipping`; None for no clipping.

    Raises:
        ValueError: If the file is not plain JSON, a value is invalid or missing, or a block whose
            keys are all known (`zenflow`, optimizer or scheduler parameters) has another.

    Examples:
        >>> options = from_deepspeed({
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        ...     "zero_optimization": {
        ...         "zenflow": {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True},
        ...     },
        ... })
        >>> options.learning_rate, options.arguments["select_interval"]
        (2e-05, AutoSelect(keep=0.9, max_windows=64))
        >>> tx = options.optimizer
    """
    read, rate = _Config(config), learning_rate
    if "optimizer" in read.values:
        rate = read.need(f"{_ADAM}lr", rate, missing=1e-3)
    b1, b2 = map(float, read.get(f"{_ADAM}betas", (b1, b2)))
    arguments: dict[str, Any] = {"b1": b1, "b2": b2, "eps": read.get(f"{_ADAM}eps", eps)}
    arguments["weight_decay"] = read.get(f"{_ADAM}weight_decay", weight_decay)
    if kind := read.get("scheduler.type"):
        rate = _schedule(read, kind, rate, warmup_steps, total_steps)
    arguments["max_grad_norm"] = read.get("gradient_clipping", max_grad_norm) or None
    arguments |= _rules(read, steps_per_epoch)
    if read.listed:
        listed = ", ".join(f"`{name}`" for name in read.listed)
        warnings.warn(
            f"These keys have no effect: {listed}. docs/deepspeed.md lists the keys that do.",
            stacklevel=2,
        )
    return DeepSpeedOptions(rate, arguments, tuple(read.listed))


class _Config:
    """A config's values by name; `listed` contains the names that are not read or not applied."""

    def __init__(self, config: Any):
        if isinstance(config, str | os.PathLike):
            config = json.loads(Path(config).read_text("utf-8-sig"))
        self.listed: list[str] = []
        self.values: dict[str, Any] = {}  # None for "auto"
        self._read(config, "")

    def _read(self, block: Any, prefix: str) -> None:
        for name, x in ((prefix + key, x) for key, x in block.items() if x is not None):
            if name in _KEYS:
                expected, is_valid = _KEYS[name]
                is_auto = x == "auto" and name not in _BLOCKS and not name.endswith(".type")
                self.values[name] = None if is_auto else x
                if not is_auto and not is_valid(x):
                    raise self.error(name, expected)
            elif name.startswith(_CLOSED) and name not in _LISTED:
                raise ValueError(f"`{name}` is not a DeepSpeed key. Remove it.")
            else:
                self.listed.append(name)
            if name in _BLOCKS:
                self._read(x, f"{name}.")
                if (kind := f"{name}.type") in _KEYS and kind not in self.values:
                    raise self.error(kind, _KEYS[kind][0])

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or the default if it is left out, null or "auto"."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str, default: Any, missing: Any = None) -> Any:
        """Returns a value as `get` does, or else `missing` if it is left out; rejects None."""
        value = self.get(name, default if name in self.values or default is not None else missing)
        if value is None:
            raise self.error(name, "a number, here or as an argument")
        return value

    def error(self, name: str, expected: str) -> ValueError:
        value = self.get(name, "auto")
        text = json.dumps(value, default=repr) if name in self.values else "missing"
        return ValueError(f"`{name}` is {text}. Use {expected}.")


def _schedule(
    config: _Config, kind: str, rate: Any, warmup_steps: int | None, total_steps: int | None
) -> optax.Schedule:
    """Returns the config's schedule, a function of the step count.

    DeepSpeed calls its scheduler after a step, and its scheduler counts from -1. So step `count`
    (from 0, as in optax) has the rate that DeepSpeed computes for iteration `count - 1`, and the
    first two steps both have the lowest rate.
    """

    def get(key: str, default: Any, missing: Any = None) -> Any:
        return config.need(_SCHEDULE + key, default, missing)

    cosine, falls = kind == "WarmupCosineLR", kind == "WarmupDecayLR"
    name = f"{_ADAM}lr" if cosine else f"{_SCHEDULE}warmup_max_lr"
    if falls and name not in config.values:
        rate = 1e-3  # DeepSpeed's default, whatever the optimizer's rate is
    rate = config.need(name, None if callable(rate) else rate)
    # Before the warm-up: a rate, or a share of the highest rate.
    lowest = get("warmup_min_ratio" if cosine else "warmup_min_lr", 0.0)
    last, log = get("cos_min_ratio", 1e-4), get("warmup_type", "log") == "log"
    # DeepSpeed's default is 1000, and it divides by the logarithm.
    warmup = max(2, get("warmup_num_steps", warmup_steps, 1000))
    total = get("total_num_steps", total_steps) if cosine or falls else 0
    falling = max(1, total - warmup)
    scale, top = (rate, 1.0) if cosine else (1.0, rate)

    def schedule(count: Any) -> Any:
        i = jnp.asarray(count, jnp.int32) - 1
        steps = jnp.maximum(i, 0).astype(jnp.float32)
        risen = jnp.log(steps + 1) / math.log(warmup) if log else steps / warmup
        rise, fall = lowest + (top - lowest) * risen, top
        if cosine:
            progress = (i - warmup + 1).astype(jnp.float32) / falling
            wave = (1 + jnp.cos(math.pi * jnp.minimum(progress, 1.0))) / 2
            fall = jnp.maximum(last + (1 - last) * wave, 0.0)
            # The first step's rate is 0, whatever the lowest rate is, as in DeepSpeed.
            rise = jnp.where(i < 0, 0.0, rise)
        elif falls:
            left = jnp.maximum((total - i).astype(jnp.float32) / falling, 0.0)
            fall = lowest + (top - lowest) * left
        return scale * jnp.where(i < warmup, rise, fall)

    return schedule


def _rules(config: _Config, steps_per_epoch: int | None) -> dict[str, Any]:
    """Returns `zenflow`'s arguments for the config's ZeRO section; lists its ineffective keys."""

    def get(key: str, default: Any = None) -> Any:
        return config.get(_ZENFLOW + key, default)

    stage, device = config.get(f"{_ZERO}stage", 0), config.get(f"{_OFFLOAD}device", "none")
    selects = _ZENFLOW[:-1] in config.values
    offloads = selects or device != "none"
    not_applied = {
        # Shardings place parameters, and the state of selected channels.
        f"{_ZERO}stage": stage == 3 or (stage and not offloads),
        f"{_OFFLOAD}device": device == "nvme",  # replaced by host memory
        f"{_OFFLOAD}pin_memory": not config.get(f"{_OFFLOAD}pin_memory", True),
        # The state of selected channels stays on the device.
        f"{_ZENFLOW}offload": get("offload", False),
    }
    config.listed += [key for key, ignored in not_applied.items() if ignored]
    # Deferred weights do not move between two updates, as in DeepSpeed.
    arguments: dict[str, Any] = {"provisional_share": None}
    if not selects:
        return arguments | {"topk_ratio": float(not offloads), "update_interval": 1, "staleness": 0}
    # "auto" is DeepSpeed's default. With a share of 0, windows have the minimum length.
    share = get("auto_ratio", 0.99)
    window = int(get("update_interval", 0)) or (AutoWindow(share=share) if share else 2)
    arguments |= {
        "topk_ratio": get("topk_ratio", 0.1),
        "full_warm_up_rounds": int(get("full_warm_up_rounds", 0)),
        "update_interval": window,
    }
    if isinstance(window, AutoWindow):
        arguments["window_scaling"] = None  # as in DeepSpeed, and best for adaptive windows
    if not get("overlap_step", False):
        arguments["staleness"] = 0
    strategy, interval = get("select_strategy", "auto"), get("select_interval")
    epoch = steps_per_epoch or get("steps_per_epoch")
    if (strategy == "auto") != (interval is None):
        expected = '"auto"' if strategy == "auto" else "a whole number"
        expected += f' with select_strategy "{strategy}"'
        raise config.error(f"{_ZENFLOW}select_interval", expected)
    if strategy == "auto":
        return arguments | {"select_interval": epoch or AutoSelect()}
    if strategy == "epoch" and interval:
        interval *= epoch or config.need(f"{_ZENFLOW}steps_per_epoch", None)
    return arguments | {"select_interval": int(interval) or _NEVER}
