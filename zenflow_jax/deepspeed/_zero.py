"""Reads the `zero_optimization` section: offloading, and ZenFlow's windows and selections."""

import math
from typing import Any, Literal, NamedTuple

from zenflow_jax._host.adam import available_cores
from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect
from zenflow_jax.deepspeed._section import Section, is_number

_NEVER = 2**31 - 1  # steps, the most that an int32 holds


class Selection(NamedTuple):
    """When channels are selected, which may be known only with the length of an epoch."""

    strategy: str  # "step", "epoch", or "auto": by epochs, `AutoSelect` if they are unknown
    interval: int  # steps or epochs between two selections; 0 for one selection only
    window: int | AutoWindow
    warm_up: int
    steps_per_epoch: int | None  # the config's

    def rule(self, steps_per_epoch: int | None) -> int | AutoSelect | EpochSelect:
        """`zenflow`'s `select_interval`; the argument goes before the config's own."""
        epoch = steps_per_epoch or self.steps_per_epoch
        if self.strategy == "auto" and epoch is None:
            return AutoSelect()
        if self.interval == 0:
            return EpochSelect(_NEVER)
        if self.strategy == "step":
            rule = EpochSelect(self.interval)
        elif epoch is not None:
            rule = EpochSelect(epoch, self.interval)
        else:
            raise ValueError(
                "`zero_optimization.zenflow.select_strategy`: expected the steps of an epoch for "
                '"epoch", got none. Pass `from_deepspeed(config, steps_per_epoch=len(loader))`.'
            )
        window = 1 if isinstance(self.window, AutoWindow) else self.window
        if rule.steps < window:
            raise ValueError(
                "`zero_optimization.zenflow.select_interval`: expected at least "
                f"update_interval={window} steps between two selections, got {rule.steps}."
            )
        # DeepSpeed counts its steps from the first, as `EpochSelect` does; an int counts from the
        # end of the warm-up, and whole windows only.
        as_int = self.strategy == "step" and rule.steps % window == 0 and not self.warm_up
        return rule.steps if as_int else rule


class Zero(NamedTuple):
    kind: Literal["zenflow", "offload", "adamw"]
    arguments: dict[str, Any]  # of `zenflow`, but for `select_interval`
    selection: Selection | None = None
    threads: int | None = None


def read_zero(zero: Section) -> Zero:
    stage = zero.integer("stage", 0, high=3)
    has_rules = zero.has("zenflow")
    offloads = _offloads(zero)
    if stage == 0 and (offloads or has_rules):
        raise zero.error("stage", "1, 2 or 3 where the optimizer is offloaded")
    # Parameters lie where their shardings say, and so does optax.adamw's state.
    if stage == 3 or (stage and not (offloads or has_rules)):
        zero.not_followed("stage")
    if has_rules and not offloads:
        raise zero.error("offload_optimizer", 'an object whose device is "cpu", beside `zenflow`')
    if has_rules:
        return _rules(zero.section("zenflow"))
    if offloads:
        return Zero("offload", {"topk_ratio": 0.0, "update_interval": 1, "staleness": 0})
    return Zero("adamw", {})


def _offloads(zero: Section) -> bool:
    old = zero.flag("cpu_offload", False)
    if not zero.has("offload_optimizer"):
        return old
    if old:
        raise zero.error("cpu_offload", "either this or `offload_optimizer`")
    offload = zero.section("offload_optimizer")
    device = offload.word("device", ["none", "cpu", "nvme"], "none")
    if device == "nvme":  # host memory stands in for it
        offload.not_followed("device")
    if not offload.flag("pin_memory", True):
        offload.not_followed("pin_memory")
    return device != "none"


def _rules(section: Section) -> Zero:
    """The `zenflow` section. DeepSpeed takes "auto" in it for a default."""
    ratio = section.read(
        "topk_ratio", 0.1, "a number in (0, 1)", lambda x: is_number(x, 0, 1) and 0 < x < 1
    )
    warm_up = section.integer("full_warm_up_rounds", 0)
    window = section.integer("update_interval", "auto", low=1)
    share = section.number("auto_ratio", 0.99, high=1.0)
    if window == "auto":
        # Without a share no leaf need be ripe: windows close as early as adaptive ones can.
        window = AutoWindow(share=share) if share else 2
    arguments = {"topk_ratio": ratio, "full_warm_up_rounds": warm_up, "update_interval": window}
    if isinstance(window, AutoWindow):
        arguments["window_scaling"] = None  # as DeepSpeed, and best for windows that adapt
    if not section.flag("overlap_step", False):
        arguments["staleness"] = 0
    strategy = section.word("select_strategy", ["auto", "step", "epoch"], "auto")
    interval = section.integer("select_interval", "auto")
    if (strategy == "auto") != (interval == "auto"):
        expected = '"auto"' if strategy == "auto" else "a whole number"
        raise section.error("select_interval", f'{expected} with select_strategy "{strategy}"')
    interval = 1 if interval == "auto" else interval
    epoch = section.integer("steps_per_epoch", None, low=1)
    selection = Selection(strategy, interval, window, warm_up, epoch)
    if strategy == "step":
        selection.rule(None)  # so that what is wrong without an epoch is an error at once
    threads = _threads(section.number("pt_reserved_cores_perc", None, high=1.0))
    offloads_selected = section.flag("offload", False)
    section.refuse_unread()
    if offloads_selected:  # their state stays on the device
        section.not_followed("offload")
    return Zero("zenflow", arguments, selection, threads)


def _threads(reserved_share: float | None) -> int | None:
    """What `pt_reserved_cores_perc` leaves of this process's cores."""
    if reserved_share is None:
        return None
    cores = available_cores()
    reserved = math.ceil(reserved_share * cores)
    return cores - reserved if 0 < reserved < cores else cores
