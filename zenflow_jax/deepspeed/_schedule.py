"""DeepSpeed's schedules, of the learning rate and of selections.

DeepSpeed calls its scheduler after a step, and its scheduler counts from -1. So step `count` (from
0, as optax counts) runs with the rate that DeepSpeed computes for iteration `count - 1`, and the
first two steps both run with the lowest one. Between two roundings of float32 the numbers are those
of `deepspeed.runtime.lr_schedules` 0.19.8.
"""

import math
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zenflow_jax._spec.rules import AutoSelect, AutoWindow
from zenflow_jax.deepspeed._config import Table, get, number, one_of

_NEVER = 2**31 - 1  # steps, the most that an int32 holds
# DeepSpeed's own defaults that are not those of `from_deepspeed`'s arguments.
_WARMUP_STEPS = 1000
_WARMUP_DECAY_MAX = 1e-3

_STEPS = number(1, whole=True)
_OF_ALL = {
    "warmup_num_steps": _STEPS,
    "warmup_type": one_of("log", "linear"),
    "last_batch_iteration": number(-1, -1, whole=True),  # to resume take a checkpoint
    "*": (),
}
_RATES = _OF_ALL | {"warmup_min_lr": number(), "warmup_max_lr": number()}
_SHARES = {"warmup_min_ratio": number(), "cos_min_ratio": number()}
#: The parameters of each type of scheduler.
SCHEDULES: dict[str, Table] = {
    "WarmupLR": _RATES,
    "WarmupDecayLR": _RATES | {"total_num_steps": _STEPS},
    "WarmupCosineLR": _OF_ALL | {"total_num_steps": _STEPS} | _SHARES,
}


class Scheduler(NamedTuple):
    """A schedule whose lengths may be known later than the config."""

    kind: str  # one of `SCHEDULES`
    warmup: int | None  # the config's steps of warm-up; None if it leaves that open
    warmup_default: int | None  # if nobody names any; None if that is an error
    total: int | None  # the config's steps of the run; None if it leaves that open
    shape: str  # of the warm-up: "log" or "linear"
    highest: float  # the rate at its end
    lowest: float  # at its begin; of "WarmupCosineLR" as a share of the highest
    last_share: float  # where "WarmupCosineLR" ends

    def schedule(self, warmup_steps: int | None, total_steps: int | None) -> optax.Schedule:
        """The schedule, with the arguments where the config leaves a length open."""
        default = self.warmup_default if warmup_steps is None else warmup_steps
        warmup = _known(self.warmup, default, "warmup_num_steps", "warmup_steps")
        warmup = max(2, warmup)  # as DeepSpeed does, which divides by its logarithm
        total = 0
        if self.kind != "WarmupLR":
            total = _known(self.total, total_steps, "total_num_steps", "total_steps")
        return lambda count: self._rate(jnp.asarray(count, jnp.int32) - 1, warmup, total)

    def _rate(self, i: jax.Array, warmup: int, total: int) -> jax.Array:
        """The rate of DeepSpeed's iteration `i`, an int32 from -1."""
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
            # The first step has a rate of 0 whatever the lowest is, as in DeepSpeed.
            return self.highest * jnp.where(i < 0, 0.0, part)
        left: Any = 1.0
        if self.kind == "WarmupDecayLR":
            left = jnp.maximum((total - i).astype(jnp.float32) / falling, 0.0)
        return self.lowest + (self.highest - self.lowest) * jnp.where(i < warmup, risen, left)

    @classmethod
    def of(cls, kind: str, params: dict[str, Any], rate: Any) -> "Scheduler":
        """That of a config with these parameters; `rate` is the optimizer's, or None."""
        highest, lowest = rate, get(params, "warmup_min_lr", 0.0)
        if kind == "WarmupCosineLR":
            lowest = get(params, "warmup_min_ratio", 0.0)
        else:
            if kind == "WarmupDecayLR" and "warmup_max_lr" not in params:
                rate = _WARMUP_DECAY_MAX
            highest = get(params, "warmup_max_lr", rate)
        if not isinstance(highest, Real) and getattr(highest, "shape", None) != ():
            raise ValueError(
                "`learning_rate`: expected a number for the config's `scheduler`, got "
                f"{'none' if highest is None else 'a schedule'}. Pass one, or take it out."
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
            f"`scheduler.params.{key}`: expected a number of steps, here or as "
            f"`from_deepspeed(config, {argument}=...)`, got none."
        )
    return otherwise if value is None else value  # pyright: ignore[reportReturnType]


class Selection(NamedTuple):
    """When channels are selected, which may be known only with the length of an epoch."""

    strategy: str  # "step", "epoch", or "auto": by epochs, `AutoSelect` if they are unknown
    interval: int  # steps or epochs between two selections; 0 for one selection only
    window: int | AutoWindow
    steps_per_epoch: int | None  # the config's

    def rule(self, steps_per_epoch: int | None) -> AutoSelect | int:
        """Returns `zenflow`'s `select_interval`; the argument goes before the config's own."""
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
                "`zero_optimization.zenflow.select_strategy`: expected the steps of an epoch for "
                '"epoch", got none. Pass `from_deepspeed(config, steps_per_epoch=len(loader))`.'
            )
        window = 1 if isinstance(self.window, AutoWindow) else self.window
        if steps < window:
            raise ValueError(
                "`zero_optimization.zenflow.select_interval`: expected at least "
                f"update_interval={window} steps between two selections, got {steps}."
            )
        return steps
