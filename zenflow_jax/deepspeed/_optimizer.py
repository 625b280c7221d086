"""Reads the `optimizer` and `scheduler` sections: AdamW's numbers and the learning rate.

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

from zenflow_jax.deepspeed._section import NO_AUTO, Section, is_number

# DeepSpeed's own defaults that are not those of `from_deepspeed`'s arguments.
_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 1000
_WARMUP_DECAY_MAX = 1e-3

_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


class Scheduler(NamedTuple):
    """A schedule whose lengths may be known later than the config."""

    kind: str  # one of `_SCHEDULES`
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


def read_adam(
    root: Section, rate: optax.ScalarOrSchedule | None, numbers: dict[str, float]
) -> tuple[optax.ScalarOrSchedule | None, dict[str, float]]:
    """The learning rate and AdamW's numbers, from the arguments where the config has none."""
    optimizer = root.section("optimizer")
    kind = optimizer.read(
        "type",
        None,
        '"Adam" or "AdamW"',
        lambda x: str(x).lower() in ("adam", "adamw"),
        auto=NO_AUTO,
        remedy="ZenFlow is AdamW.",
    )
    if kind is None:  # and DeepSpeed ignores the rest
        return rate, numbers
    params = optimizer.section("params")
    rate = params.number("lr", _LEARNING_RATE if rate is None else rate, auto=rate)
    if rate is None:
        raise params.error("lr", "a number, here or as `from_deepspeed(config, learning_rate=...)`")
    betas = numbers["b1"], numbers["b2"]
    b1, b2 = params.read("betas", betas, "a list of two numbers in [0, 1)", _are_betas)
    eps, decay = (params.number(key, numbers[key]) for key in ("eps", "weight_decay"))
    if not params.flag("adam_w_mode", True) and kind.lower() == "adam" and decay > 0:
        raise params.error(
            "adam_w_mode",
            "true where weight_decay is above 0",
            "Weight decay is always decoupled from the gradient here.",
        )
    for key, wanted in (("bias_correction", True), ("amsgrad", False), ("maximize", False)):
        if params.flag(key, wanted) is not wanted:
            raise params.error(key, str(wanted).lower())
    params.refuse_unread("torch_adam", "fused")
    return rate, {"b1": float(b1), "b2": float(b2), "eps": eps, "weight_decay": decay}


def read_scheduler(
    root: Section,
    rate: optax.ScalarOrSchedule | None,
    argument: optax.ScalarOrSchedule | None,
) -> tuple[optax.ScalarOrSchedule | None, Scheduler | None]:
    """The optimizer's learning rate, and the `scheduler` section on top of it if there is one.

    The caller's `argument` replaces a scheduler of another kind if it is a schedule.
    """
    scheduler = root.section("scheduler")
    if callable(argument) and scheduler.get("type") not in (None, *_SCHEDULES):
        return argument, None
    remedy = "Pass `from_deepspeed(config, learning_rate=...)` an optax schedule instead."
    kind = scheduler.word("type", list(_SCHEDULES), None, auto=NO_AUTO, remedy=remedy)
    if kind is None:  # and DeepSpeed ignores the rest
        return rate, None
    params = scheduler.section("params")
    warmup = params.integer("warmup_num_steps", None, low=1)
    default = None if params.has("warmup_num_steps") else _WARMUP_STEPS
    total = None if kind == "WarmupLR" else params.integer("total_num_steps", None, low=1)
    if params.integer("last_batch_iteration", -1, low=-1) != -1:
        raise params.error("last_batch_iteration", "-1", "Resume from a checkpoint instead.")

    shape = params.word("warmup_type", ["log", "linear"], "log")
    highest, last_share = rate, 0.0
    if kind == "WarmupCosineLR":
        lowest = params.number("warmup_min_ratio", 0.0)
        last_share = params.number("cos_min_ratio", 1e-4)
    else:
        absent = rate if kind == "WarmupLR" else _WARMUP_DECAY_MAX
        highest = params.number("warmup_max_lr", absent, auto=rate)
        lowest = params.number("warmup_min_lr", 0.0)
    params.refuse_unread()
    if not isinstance(highest, Real) and getattr(highest, "shape", None) != ():
        raise ValueError(
            "`learning_rate`: expected a number for the config's `scheduler`, got "
            f"{'none' if highest is None else 'a schedule'}. Pass one, or take the scheduler out."
        )
    highest = float(highest)  # pyright: ignore[reportArgumentType]
    return rate, Scheduler(kind, warmup, default, total, shape, highest, lowest, last_share)


def _are_betas(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(is_number(x, 0, 1) and x < 1 for x in value)


def _known(value: int | None, otherwise: int | None, key: str, argument: str) -> int:
    if value is None and otherwise is None:
        raise ValueError(
            f"`scheduler.params.{key}`: expected a number of steps, here or as "
            f"`from_deepspeed(config, {argument}=...)`, got none."
        )
    return otherwise if value is None else value  # pyright: ignore[reportReturnType]
