"""The `optimizer` and `scheduler` blocks: AdamW's numbers, and the learning rate."""

from numbers import Real
from typing import NamedTuple

import optax

from zenflow_jax._deepspeed import keys, schedules
from zenflow_jax._deepspeed.blocks import Block, Report

# DeepSpeed's own defaults that are not those of `from_deepspeed`'s arguments.
_LEARNING_RATE = 1e-3
_WARMUP_STEPS = 1000
_WARMUP_DECAY_MAX = 1e-3


class Adam(NamedTuple):
    """What there is of AdamW in the config and the arguments."""

    rate: optax.ScalarOrSchedule | None
    b1: float
    b2: float
    eps: float
    weight_decay: float


def read_adam(
    root: Block,
    report: Report,
    rate: optax.ScalarOrSchedule | None,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> Adam:
    """The `optimizer` block, with the arguments where it has none."""
    optimizer = root.block("optimizer")
    name = optimizer and optimizer.take("type", None)
    if optimizer is None or name is None:
        if optimizer is not None:
            report.rest(optimizer, {"params": "DeepSpeed ignores it where there is no `type`"})
        return Adam(rate, b1, b2, eps, weight_decay)
    if str(name).lower() not in ("adam", "adamw"):
        raise optimizer.error(
            "type",
            '"Adam" or "AdamW"',
            'ZenFlow is AdamW: write "AdamW", or use another optax optimizer without this config.',
        )
    params = optimizer.block("params") or Block({}, optimizer.name("params"), root.source)
    report.rest(optimizer, {"legacy_fusion": "it says how PyTorch computes the same step"})

    found = params.number("lr", _LEARNING_RATE if rate is None else rate, auto=rate)
    if found is None:
        raise _unfilled(params, "lr", "learning_rate")
    b1, b2 = params.pair("betas", (b1, b2), auto=(b1, b2), remedy="Adam's default is [0.9, 0.999].")
    eps = params.number("eps", eps, auto=eps)
    weight_decay = params.number("weight_decay", weight_decay, auto=weight_decay)

    l2 = not params.flag("adam_w_mode", True, auto=True) and str(name).lower() == "adam"
    if l2 and weight_decay > 0:
        raise params.error(
            "adam_w_mode",
            "true where weight_decay is above 0",
            "Weight decay is only ever decoupled here (AdamW), not added to the gradient: leave "
            "the key out, or set weight_decay to 0.",
        )
    for key, wanted, meaning in (
        ("bias_correction", True, "Moments are always corrected for their bias."),
        ("amsgrad", False, "There is no AMSGrad."),
        ("maximize", False, "Losses are minimized: change the sign of the loss."),
    ):
        if params.flag(key, wanted, auto=wanted) is not wanted:
            expected = "true" if wanted else "false"
            raise params.error(key, expected, f"{meaning} Leave the key out.")
    if "max_grad_norm" in params.left():
        raise params.error(
            "max_grad_norm", "no such key", "Use `gradient_clipping`, as DeepSpeed demands too."
        )
    params.only(keys.ADAM)
    report.rest(params, keys.ADAM)
    return Adam(found, b1, b2, eps, weight_decay)


def read_learning_rate(
    root: Block,
    report: Report,
    rate: optax.ScalarOrSchedule | None,
    given: optax.ScalarOrSchedule | None,
    total_steps: int | None,
    warmup_steps: int | None,
) -> optax.ScalarOrSchedule | None:
    """The `scheduler` block over the optimizer's rate."""
    scheduler = root.block("scheduler")
    name = scheduler and scheduler.take("type", None)
    if scheduler is None or name is None:
        if scheduler is not None:
            report.rest(scheduler, {"params": "DeepSpeed ignores it where there is no `type`"})
        return rate
    params = scheduler.block("params") or Block({}, scheduler.name("params"), root.source)
    report.rest(scheduler, {})
    if name not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        if callable(given):
            report.add(scheduler, "type", "the schedule that was passed is used instead")
            return given
        raise scheduler.error(
            "type",
            '"WarmupLR", "WarmupDecayLR" or "WarmupCosineLR"',
            "Others are not translated: pass `from_deepspeed(config, learning_rate=...)` an optax "
            "schedule instead of it.",
        )

    def count(key: str, argument: str, value: int | None, default: int | None) -> int:
        found = params.integer(key, default if value is None else value, auto=value, low=1)
        if found is None:
            raise _unfilled(params, key, argument)
        return found

    warmup = None if warmup_steps is None else max(1, warmup_steps)
    common = {
        "warmup": count("warmup_num_steps", "warmup_steps", warmup, _WARMUP_STEPS),
        "shape": params.word("warmup_type", ["log", "linear"], "log", auto="log"),
    }
    if name != "WarmupLR":
        common["total"] = count("total_num_steps", "total_steps", total_steps, None)
    remedy = "A schedule that goes on from another step is resumed from a checkpoint: leave it out."
    params.integer("last_batch_iteration", -1, low=-1, high=-1, remedy=remedy)

    if name == "WarmupCosineLR":
        highest = _number(root, rate)
        shares = {
            "lowest_share": params.number("warmup_min_ratio", 0.0, auto=0.0),
            "last_share": params.number("cos_min_ratio", 1e-4, auto=1e-4),
        }
        params.only([])
        return schedules.warmup_cosine_lr(highest=highest, **shares, **common)

    highest = params.number(
        "warmup_max_lr", rate if name == "WarmupLR" else _WARMUP_DECAY_MAX, auto=rate
    )
    highest = _number(root, highest)
    common |= {"lowest": params.number("warmup_min_lr", 0.0, auto=0.0), "highest": highest}
    params.only([])
    make = schedules.warmup_lr if name == "WarmupLR" else schedules.warmup_decay_lr
    return make(**common)


def _number(root: Block, rate: optax.ScalarOrSchedule | None) -> float:
    """The rate that a schedule is made of."""
    if isinstance(rate, Real) or getattr(rate, "shape", None) == ():
        return float(rate)  # pyright: ignore[reportArgumentType]
    what = "none" if rate is None else "a schedule"
    raise ValueError(
        f"expected a learning rate for the `scheduler` of {root.source or 'the config'} to end its "
        f"warm-up with, got {what}. Pass `from_deepspeed(config, learning_rate=...)` a number, or "
        "take the block out to use a schedule of your own."
    )


def _unfilled(block: Block, key: str, argument: str) -> ValueError:
    return block.error(
        key, "a value", f'Write one, or pass `from_deepspeed(config, {argument}=...)` for "auto".'
    )
