"""DeepSpeed's schedules for the learning rate and for selections.

DeepSpeed calls its scheduler after a step, and its scheduler counts from -1. So step `count` (from
0, as in optax) has the rate that DeepSpeed computes for iteration `count - 1`, and the first two
steps both have the lowest rate. The numbers match `deepspeed.runtime.lr_schedules` 0.19.8 up to two
float32 roundings.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenflow_jax._spec.rules import AutoSelect, AutoWindow
from zenflow_jax.deepspeed._config import Table, get, number, one_of

_NEVER = 2**31 - 1  # steps; the largest int32
# DeepSpeed's own defaults, where `from_deepspeed` has different defaults.
_WARMUP_STEPS = 1000
_WARMUP_DECAY_MAX = 1e-3

_STEPS = number(1, whole=True)
_COMMON_KEYS = {
    "warmup_num_steps": _STEPS,
    "warmup_type": one_of("log", "linear"),
    "last_batch_iteration": number(-1, -1, whole=True),  # resume from a checkpoint instead
    "*": (),
}
_RATES = _COMMON_KEYS | {"warmup_min_lr": number(), "warmup_max_lr": number()}
_SHARES = {"warmup_min_ratio": number(), "cos_min_ratio": number()}
#: Each scheduler type's parameters.
SCHEDULES: dict[str, Table] = {
    "WarmupLR": _RATES,
    "WarmupDecayLR": _RATES | {"total_num_steps": _STEPS},
    "WarmupCosineLR": _COMMON_KEYS | {"total_num_steps": _STEPS} | _SHARES,
}


class Scheduler(NamedTuple):
    """A schedule whose lengths may become known after the config is read."""

    kind: str  # a key of `SCHEDULES`
    warmup: int | None  # the config's warm-up steps; None if not set
    warmup_default: int | None  # used if the warm-up is not set; None makes that an error
    total: int | None  # the config's number of steps; None if not set
    shape: str  # the warm-up's shape: "log" or "linear"
    highest: float  # the rate after the warm-up
    lowest: float  # the rate before the warm-up; for "WarmupCosineLR" a share of the highest rate
    last_share: float  # the share of the highest rate at the end of "WarmupCosineLR"

    def schedule(self, warmup_steps: int | None, total_steps: int | None) -> optax.Schedule:
        """Returns the schedule; the arguments are for lengths that the config does not set."""
        default = self.warmup_default if warmup_steps is None else warmup_steps
        warmup = _known(self.warmup, default, "warmup_num_steps", "warmup_steps")
        warmup = max(2, warmup)  # as in DeepSpeed, which divides by the logarithm
        total = 0
        if self.kind != "WarmupLR":
            total = _known(self.total, total_steps, "total_num_steps", "total_steps")
        return lambda count: self._rate(jnp.asarray(count, jnp.int32) - 1, warmup, total)

    def _rate(self, i: jax.Array, warmup: int, total: int) -> jax.Array:
        """Returns the rate for DeepSpeed's iteration `i`, an int32 from -1."""
        steps = jnp.maximum(i, 0).astype(jnp.float32)
        if self.shape == "log":
            risen = jnp.log(steps + 1) / math.log(warmup)
        else:
            risen = steps / warmup
        falling = max(1, total - warmup)
        if self.kind == "WarmupCosineLR":
            progress = (i - warmup + 1).astype(jnp.float32) / falling
            cosine = (1 + jnp.cos(math.pi * jnp.minimum(progress, 1.0))) / 2
            fall = jnp.maximum(self.last_share + (1 - self.last_share) * cosine, 0.0)
            part = jnp.where(i < warmup, self.lowest + (1 - self.lowest) * risen, fall)
            # The first step's rate is 0, whatever the lowest rate is, as in DeepSpeed.
            return self.highest * jnp.where(i < 0, 0.0, part)
        left: Any = 1.0
        if self.kind == "WarmupDecayLR":
            left = jnp.maximum((total - i).astype(jnp.float32) / falling, 0.0)
        return self.lowest + (self.highest - self.lowest) * jnp.where(i < warmup, risen, left)

    @classmethod
    def of(cls, kind: str, params: dict[str, Any], rate: Any) -> "Scheduler":
        """Returns the schedule with a config's parameters; `rate` is the optimizer's, or None."""
        highest, lowest = rate, get(params, "warmup_min_lr", 0.0)
        if kind == "WarmupCosineLR":
            lowest = get(params, "warmup_min_ratio", 0.0)
        else:
            if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
                rate = _WARMUP_DECAY_MAX
            highest = get(params, "warmup_max_lr", rate)
        if not isinstance(highest, Real) and getattr(highest, "shape", None) != ():
            raise ValueError(
                f"`learning_rate` is {'missing' if highest is None else 'a schedule'}, but the "
                "config's `scheduler` needs a number. Pass a number, or remove the scheduler."
            )
        return cls(
            kind=kind,
            warmup=params.get("warmup_num_steps"),
            warmup_default=None if "warmup_num_steps" in params else _WARMUP_STEPS,
            total=params.get("total_num_steps"),
            shape=get(params, "warmup_type", "log"),
            highest=float(highest),  # pyright: ignore[reportArgumentType]
            lowest=lowest,
            last_share=get(params, "cos_min_ratio", 1e-4),
        )


def _known(value: int | None, otherwise: int | None, key: str, argument: str) -> int:
    if value is None and otherwise is None:
        raise ValueError(
            f"`scheduler.params.{key}` is missing. Set it to a number of steps, or pass "
            f"`from_deepspeed(config, {argument}=...)`."
        )
    return otherwise if value is None else value  # pyright: ignore[reportReturnType]


class Selection(NamedTuple):
    """The times of selections, which may depend on an epoch's length."""

    strategy: str  # "step", "epoch", or "auto": by epochs, or `AutoSelect` if unknown
    interval: int  # steps or epochs between two selections; 0 for a single selection
    window: int | AutoWindow
    steps_per_epoch: int | None  # the config's number

    def rule(self, steps_per_epoch: int | None) -> AutoSelect | int:
        """Returns `zenflow`'s `select_interval`; the argument takes precedence over the config."""
        epoch = steps_per_epoch or self.steps_per_epoch
        if self.strategy == "auto" and epoch is None:
            return AutoSelect()
        if self.interval == 0:
            return _NEVER
        if self.strategy == "step":
            steps = self.interval
        elif epoch is not None:
            steps = epoch * self.interval
        else:
            raise ValueError(
                '`zero_optimization.zenflow.select_strategy` is "epoch", but an epoch has no '
                "known length. Pass `from_deepspeed(config, steps_per_epoch=len(loader))`."
            )
        window = 1 if isinstance(self.window, AutoWindow) else self.window
        if steps < window:
            raise ValueError(
                f"`zero_optimization.zenflow.select_interval` means {steps} steps between two "
                f"selections. Use at least update_interval={window} steps."
            )
        return steps
