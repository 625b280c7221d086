"""Reads the `optimizer` and `scheduler` sections: AdamW's numbers and the learning rate."""

from numbers import Real
from typing import Any, NamedTuple

import optax

from zenflow_jax.deepspeed import _schedules
from zenflow_jax.deepspeed._section import NO_AUTO, Section, is_number

# DeepSpeed's own defaults that are not those of `from_deepspeed`'s arguments.
_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 1000
_WARMUP_DECAY_MAX = 1e-3

_SCHEDULES = {
    "WarmupLR": _schedules.warmup_lr,
    "WarmupDecayLR": _schedules.warmup_decay_lr,
    "WarmupCosineLR": _schedules.warmup_cosine_lr,
}


class Scheduler(NamedTuple):
    """A schedule whose lengths may be known later than the config.

    Attributes:
        kind: One of `_SCHEDULES`.
        warmup: The config's `warmup_num_steps`; None if it leaves that open.
        warmup_default: Steps of warm-up if nobody names any; None if that is an error.
        total: The config's `total_num_steps`, likewise.
        numbers: All other arguments of the schedule.
    """

    kind: str
    warmup: int | None
    warmup_default: int | None
    total: int | None
    numbers: dict[str, Any]

    def schedule(self, warmup_steps: int | None, total_steps: int | None) -> optax.Schedule:
        """The schedule, with the arguments where the config leaves a length open."""
        warmup = self.warmup
        if warmup is None:
            warmup = self.warmup_default if warmup_steps is None else warmup_steps
        lengths = {"warmup": _known(warmup, "warmup_num_steps", "warmup_steps")}
        if self.kind != "WarmupLR":
            total = total_steps if self.total is None else self.total
            lengths["total"] = _known(total, "total_num_steps", "total_steps")
        return _SCHEDULES[self.kind](**lengths, **self.numbers)


def read_adam(
    root: Section,
    rate: optax.ScalarOrSchedule | None,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> tuple[optax.ScalarOrSchedule | None, dict[str, float]]:
    """The learning rate and AdamW's numbers, from the arguments where the config has none."""
    optimizer = root.section("optimizer")
    numbers = {"b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
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
    betas = params.read("betas", (b1, b2), "a list of two numbers in [0, 1)", _are_betas)
    numbers["b1"], numbers["b2"] = map(float, betas)
    numbers["eps"] = params.number("eps", eps)
    decay = numbers["weight_decay"] = params.number("weight_decay", weight_decay)

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
    return rate, numbers


def read_scheduler(
    root: Section,
    rate: optax.ScalarOrSchedule | None,
    argument: optax.ScalarOrSchedule | None,
) -> tuple[optax.ScalarOrSchedule | None, Scheduler | None]:
    """The learning rate, and the `scheduler` section on top of it if there is one.

    Args:
        root: The whole config.
        rate: The optimizer's rate.
        argument: The caller's, which replaces a scheduler of another kind if it is a schedule.
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

    numbers: dict[str, Any] = {"shape": params.word("warmup_type", ["log", "linear"], "log")}
    if kind == "WarmupCosineLR":
        highest = rate
        numbers["lowest_share"] = params.number("warmup_min_ratio", 0.0)
        numbers["last_share"] = params.number("cos_min_ratio", 1e-4)
    else:
        absent = rate if kind == "WarmupLR" else _WARMUP_DECAY_MAX
        highest = params.number("warmup_max_lr", absent, auto=rate)
        numbers["lowest"] = params.number("warmup_min_lr", 0.0)
    params.refuse_unread()
    if not isinstance(highest, Real) and getattr(highest, "shape", None) != ():
        raise ValueError(
            "`learning_rate`: expected a number for the config's `scheduler`, got "
            f"{'none' if highest is None else 'a schedule'}. Pass one, or take the scheduler out."
        )
    numbers["highest"] = float(highest)  # pyright: ignore[reportArgumentType]
    return rate, Scheduler(kind, warmup, default, total, numbers)


def _are_betas(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(is_number(x, 0, 1) and x < 1 for x in value)


def _known(value: int | None, key: str, argument: str) -> int:
    if value is None:
        raise ValueError(
            f"`scheduler.params.{key}`: expected a number of steps, here or as "
            f"`from_deepspeed(config, {argument}=...)`, got none."
        )
    return value
