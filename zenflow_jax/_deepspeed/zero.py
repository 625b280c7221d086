"""The `zero_optimization` block: what is offloaded, and ZenFlow's windows and selections."""

import math
from typing import Any, Literal, NamedTuple

from zenflow_jax._deepspeed import keys
from zenflow_jax._deepspeed.blocks import Block, Report
from zenflow_jax._host.adam import available_cores
from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect

_NEVER = 2**31 - 1  # steps, the most that an int32 holds


class Zero(NamedTuple):
    """What becomes of the block."""

    kind: Literal["zenflow", "offload", "adamw"]
    arguments: dict[str, Any]  # of `zenflow`
    threads: int | None = None


def read_zero(root: Block, report: Report, steps_per_epoch: int | None) -> Zero:
    """The `zero_optimization` block."""
    key = "zero_optimization"
    value = root.peek(key)
    if isinstance(value, bool):  # an older form: on is stage 1
        root.take(key)
        zero = Block({"stage": int(value)}, key, root.source)
    else:
        zero = root.block(key) or Block({}, key, root.source)
    stage = zero.integer("stage", 0, auto=0, high=3, remedy="ZeRO has the stages 0 to 3.")
    offloads = _offloads(zero, report, stage)
    rules = zero.block("zenflow")
    param = zero.block("offload_param")
    if param is not None:
        device = param.word("device", ["none", "cpu", "nvme"], "none", auto="none")
        param.only(keys.OFFLOAD_PARAM)
        if device != "none":
            report.add(zero, "offload_param", keys.STAY)
    if zero.flag("cpu_offload_param", False, auto=False):
        report.add(zero, "cpu_offload_param", keys.STAY)
    if stage == 0 and (offloads or rules is not None):
        raise zero.error(
            "stage", "1, 2 or 3 where the optimizer is offloaded", "Without ZeRO nothing is: add 2."
        )

    kind = "zenflow" if rules is not None else "offload" if offloads else "adamw"
    if stage == 3:
        report.add(
            zero, "stage", f"3 divides parameters; here {keys.STAGE_3}: shard them over a mesh"
        )
    elif stage and kind == "adamw":
        report.add(
            zero, "stage", "optax.adamw's state lies as the parameters do; shard them over a mesh"
        )
    communicates = zero.peek("overlap_comm")
    zero.only(keys.ZERO)
    report.rest(zero, keys.ZERO)

    if rules is None:
        synchronous = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False}
        return Zero(kind, synchronous if offloads else {})
    if not offloads:
        raise zero.error(
            "offload_optimizer",
            'an object whose device is "cpu", beside `zenflow`',
            'Add {"device": "cpu"}: without it there is nothing for ZenFlow to defer.',
        )
    if rules.flag("offload", False, auto=False):
        if not (communicates is True or (stage == 3 and communicates in (None, "auto"))):
            raise rules.error(
                "offload",
                "it only with `zero_optimization.overlap_comm` true",
                "Leave both out: the selected channels' state stays on the device here.",
            )
        report.add(rules, "offload", "the selected channels' state stays on the device")
    return Zero(kind, _rules(rules, steps_per_epoch), _threads(rules))


def _offloads(zero: Block, report: Report, stage: int) -> bool:
    """Whether the optimizer is offloaded."""
    block = zero.block("offload_optimizer")
    old = zero.flag("cpu_offload", False, auto=False)
    if block is None:
        return old
    if old:
        raise zero.error(
            "cpu_offload",
            "it or `offload_optimizer`, not both",
            "Leave it out; it is DeepSpeed's older form of the other.",
        )
    device = block.word("device", ["none", "cpu", "nvme"], "none", auto="none")
    share = block.number("ratio", 1.0, auto=1.0, high=1.0)
    if share < 1 and stage != 3:
        raise block.error(
            "ratio", "1 unless the ZeRO stage is 3", "It is a share that only stage 3 can offload."
        )
    pinned = block.flag("pin_memory", True, auto=True)
    block.only(keys.OFFLOAD)
    if device == "none":
        return False  # and its other keys ask for nothing
    if device == "nvme":
        report.add(block, "device", keys.OFFLOAD["nvme_path"])
    if share < 1:
        report.add(block, "ratio", "what is offloaded is all but the selected channels")
    if not pinned:
        report.add(block, "pin_memory", "the mail is always pinned")
    report.rest(block, keys.OFFLOAD)
    return True


def _rules(block: Block, steps_per_epoch: int | None) -> dict[str, Any]:
    """The `zenflow` block as arguments of `zenflow`. DeepSpeed takes "auto" there for a default."""
    ratio = block.number(
        "topk_ratio",
        0.1,
        auto=0.1,
        high=1.0,
        open_ends=True,
        remedy="It is a share of the channels: 0.05 for one in twenty.",
    )
    warm_up = block.integer(
        "full_warm_up_rounds", 0, auto=0, remedy="It counts the first steps that update everything."
    )
    window = block.integer(
        "update_interval",
        "auto",
        auto="auto",
        low=1,
        remedy='It counts the steps in a window; "auto" for windows that adapt.',
    )
    share = block.number("auto_ratio", 0.99, auto=0.99, high=1.0, remedy="It is a share.")
    if window == "auto":
        # With a share of 0 no leaf need be ripe: windows close as early as adaptive ones can.
        window = AutoWindow(share=share) if share else 2
    own = block.integer("steps_per_epoch", None, auto=None, low=1)
    arguments = {
        "topk_ratio": ratio,
        "update_interval": window,
        "select_interval": _selection(block, window, warm_up, steps_per_epoch or own),
        "full_warm_up_rounds": warm_up,
        "overlap_step": block.flag("overlap_step", False, auto=False),
    }
    block.only(["offload", "pt_reserved_cores_perc"])
    return arguments


def _selection(
    block: Block, window: int | AutoWindow, warm_up: int, steps_per_epoch: int | None
) -> int | AutoSelect | EpochSelect:
    """`select_strategy` and `select_interval`."""
    strategy = block.word("select_strategy", ["auto", "step", "epoch"], "auto")
    interval = block.integer(
        "select_interval",
        "auto",
        auto="auto",
        remedy="It counts steps or epochs between two selections; 0 for one selection only.",
    )
    if strategy == "auto":
        if interval != "auto":
            raise block.error(
                "select_interval",
                '"auto" where select_strategy is "auto"',
                'Set select_strategy to "step" or "epoch", or leave this out.',
            )
        if steps_per_epoch is None:
            return AutoSelect()
        interval = 1
    elif interval == "auto":
        raise block.error(
            "select_interval",
            f'a whole number where select_strategy is "{strategy}"',
            'Set it, or set select_strategy to "auto".',
        )
    if interval == 0:
        return EpochSelect(_NEVER)
    if strategy == "step":
        steps = interval
    elif steps_per_epoch is not None:
        steps = interval * steps_per_epoch
    else:
        raise block.error(
            "select_strategy",
            "the number of steps in an epoch to be known",
            "Pass `from_deepspeed(config, steps_per_epoch=len(loader))`.",
        )
    if not isinstance(window, AutoWindow) and steps < window:
        raise block.error(
            "select_interval",
            f"at least update_interval={window} steps between two selections, not {steps}",
            "Channels change hands where a window closes: raise it, or lower update_interval.",
        )
    if strategy != "step":
        assert steps_per_epoch is not None
        return EpochSelect(steps_per_epoch, interval)
    divides = isinstance(window, AutoWindow) or steps % window == 0
    # DeepSpeed counts these steps from the first, as `EpochSelect` does; an int from the warm-up's
    # end, and only whole windows of them.
    return steps if divides and not warm_up else EpochSelect(steps)


def _threads(block: Block) -> int | None:
    """`pt_reserved_cores_perc`: what is left of this process's cores."""
    share = block.number("pt_reserved_cores_perc", None, auto=None, high=1.0, remedy="A share.")
    if share is None:
        return None
    cores = available_cores()
    reserved = math.ceil(share * cores)
    return cores - reserved if 0 < reserved < cores else cores
