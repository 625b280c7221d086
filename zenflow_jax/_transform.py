"""`zenflow()`: the optax transformation, the part of the algorithm that runs on the device.

`update` reads like the arithmetic in docs/design.md: read every gradient once, decide whether the
step counts, update the selected channels, and send the gradients to the host.
"""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from zenflow_jax._device.first_state import first_state
from zenflow_jax._device.leaves import check_outside_of_shard_map, check_update
from zenflow_jax._device.memory import mail_rank, to_host
from zenflow_jax._device.state import Static, ZenFlowState
from zenflow_jax._device.statistics import window_statistics
from zenflow_jax._device.step import judge, split_gradient, step_selected
from zenflow_jax._device.streamed import gradient_parts, is_streamed, misused
from zenflow_jax._spec.adaptive import Select, Window
from zenflow_jax._spec.arguments import (
    NUMBERS,
    check_numbers,
    check_schedule,
    check_transfer_dtype,
)
from zenflow_jax._spec.checks import SendGradients, check_one_of
from zenflow_jax._spec.groups import assign_groups
from zenflow_jax._spec.resolve import LeafRules, resolve_specs, warn_of_leaves
from zenflow_jax._spec.scalars import MISUSED, USED, AdamScalars, StepFacts, StepScalars


def zenflow(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    lr_scale: PyTree | Callable[[KeyPath, jax.Array], float] | None = None,
    topk_ratio: float = 0.1,
    update_interval: Window = 4,
    select_interval: Select = None,
    full_warm_up_rounds: int = 0,
    rolling: bool = True,
    staleness: int | None = None,
    window_scaling: bool | None = True,
    provisional_share: float | None = 0.5,
    max_grad_norm: jax.typing.ArrayLike | None = None,
    channel_axis: int | Callable[[KeyPath, jax.Array], int] = -2,
    resident: Callable[[KeyPath, jax.Array], bool] | None = None,
    partition_replicated: bool | Callable[[KeyPath, jax.Array], bool] = True,
    param_shardings: PyTree | Callable[[PyTree], PyTree] | None = None,
    send_gradients: str = "during_step",
    transfer_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns AdamW that keeps optimizer state on the device only for large-gradient channels.

    Selected channels take an AdamW step at every step. The gradients of all other channels go to
    pinned host memory, where a `HostEngine` takes the AdamW steps of `update_interval` gradients at
    once, from their mean and their mean square. Leaves take turns: at every step some windows
    close, and their updates reach the parameters one step later.

    With `update_interval=1, staleness=0`, or with `topk_ratio=1`, it is equivalent to `optax.adamw`
    with float32 master weights. Steps whose gradient is not finite are skipped; do not let
    `optax.apply_if_finite` withhold an update. The arguments up to `eps` match `optax.adamw`, in
    the same order; `eps_root`, `mu_dtype` and `nesterov` are missing.

    Args:
        learning_rate: A number, a float32 array, or a schedule over the step count (from 0, without
            skipped steps).
        b1: Decay of the first moment.
        b2: Decay of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay, multiplied by the learning rate; a number, a schedule
            or an array.
        mask: Tree of bools like the parameters (or a prefix of it), or a function of the parameters
            that returns such a tree: True where weight decay applies. Default: everywhere.
        lr_scale: Tree of numbers like the parameters (or a prefix of it), or a function of (key
            path, leaf): each leaf's factor for the learning rate. Default: 1 everywhere.
        topk_ratio: Fraction of a leaf's channels to select, in [0, 1], rounded up.
        update_interval: Steps in a window, at least 1; or an `AutoWindow`.
        select_interval: Steps between selections, by default 16 (longest) windows; or an
            `AutoSelect`. A selection waits for the end of its window; the first selection is at the
            first boundary.
        full_warm_up_rounds: Number of initial steps, each of which updates all channels.
        rolling: With True, the offloaded leaves are split into `update_interval` groups of nearly
            equal size, and at each step one group closes its window. A gradient then takes effect 1
            to `update_interval` steps later. With False, as in the paper, all windows close
            together, and a gradient takes effect up to `2 * update_interval - 1` steps later.
            Adaptive windows always close together.
        staleness: Steps from the end of a window until its update reaches the parameters, while the
            host works in parallel; from 0 (the loop waits) to `update_interval`. None means 1 if
            `rolling`, else `update_interval`.
        window_scaling: With True, a window's update is as long as c steps of AdamW, where c is the
            number of its steps that count: the moments take in c times the window's mean gradient
            and its mean squared gradient. None, as in the paper, takes a single step with the mean
            gradient. Use None if windows close together, because longer steps with staler updates
            overshoot.
        provisional_share: At each step except the first and the warm-up's steps, the device moves
            every deferred weight by this fraction of the learning rate, against the sign of its
            gradient, until the next update replaces this move. This costs 0.25 bytes per offloaded
            parameter on the device during the step. With None, as in the paper, deferred weights do
            not move between updates.
        max_grad_norm: Clips like `optax.clip_by_global_norm`, by the norm of the leaves that this
            transformation receives (only some, in `optax.partition`). Clipping before `zenflow`
            would keep the mail from leaving during the backward pass.
        channel_axis: Axis of the channels: an int, or a function of (key path, leaf). The default
            is the input axis of an `(in, out)` kernel and the row axis of an embedding.
        resident: Function of (key path, leaf) that returns whether a leaf stays wholly on the
            device. Leaves with fewer than two axes always stay there.
        partition_replicated: Whether mesh axes that replicate a leaf divide its optimizer state and
            update, as far as its shape allows (ZeRO). A bool, or a function of (key path, leaf).
        param_shardings: Tree of `NamedSharding`s like the parameters, or a function of the
            parameters that returns such a tree. `init` needs it only under jit on a mesh with Auto
            axes, because traced parameters do not show their placement.
        send_gradients: When offloaded gradients leave the device. "during_step": as soon as the
            backward pass has computed each gradient; best for layers that are not under `lax.scan`.
            "after_step": while the next step runs, bit-identically; for layers under `lax.scan`,
            whose gradients exist only at the scan's end. This keeps one more gradient per parameter
            on the device.
        transfer_dtype: The dtype in which gradients are sent to the host; the device uses them
            unrounded. None means bfloat16 for bfloat16 leaves, else float32. `jnp.bfloat16` rounds
            all gradients; `jnp.float32` does not round any, which helps if bfloat16 leaves have
            float32 gradients (sums of micro-batches).

    Returns:
        A transformation whose `update` needs `params`. Given its float32 update,
        `optax.apply_updates` sets selected channels to their masters, cast to the leaf's dtype, and
        moves deferred channels by a provisional step or not at all. If no leaf is offloaded
        (`topk_ratio=1`), it needs no engine.

        Put zenflow last in its chain, and do not change the parameters in any other way: the host's
        updates bypass later transformations (`optax.scale`, `optax.ema`), and undo other changes to
        deferred channels (`optax.lookahead`, clipping weights). An engine rejects such runs. Put
        gradient transformations first, freeze leaves with `optax.partition`, and keep averages
        outside. Load weights before the first step; later, flush and make a new state and engine.

    Raises:
        ValueError: For values that are out of range, not finite, or incompatible.
        TypeError: If an argument that determines the state's structure is an array.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
        >>> tx = zenflow(1e-2, topk_ratio=0.25, update_interval=2)
        >>> state = tx.init(params)
        >>> updates, state = tx.update(params, state, params)
        >>> [leaf.channels is None for leaf in state.leaves]  # a bias is resident
        [True, False]
        >>> state.leaves[1].mu.shape
        (2, 4)

    References:
        Lan et al., ZenFlow, https://arxiv.org/abs/2505.12242, 2025.
    """
    schedule = check_schedule(
        topk_ratio=topk_ratio,
        update_interval=update_interval,
        select_interval=select_interval,
        full_warm_up_rounds=full_warm_up_rounds,
        rolling=rolling,
        staleness=staleness,
        window_scaling=window_scaling,
        provisional_share=provisional_share,
    )
    check_one_of("send_gradients", send_gradients, [str(x) for x in SendGradients])
    sending, mail_dtype = SendGradients(send_gradients), check_transfer_dtype(transfer_dtype)
    numbers = learning_rate, b1, b2, eps, weight_decay, max_grad_norm
    check_numbers(**dict(zip(NUMBERS, numbers, strict=True)))
    selectors = channel_axis, resident, partition_replicated
    rules = LeafRules(topk_ratio, *selectors, mail_dtype, mask, lr_scale, param_shardings)

    def init(params: PyTree) -> Any:  # a ZenFlowState
        check_outside_of_shard_map("tx.init")
        specs = resolve_specs(params, rules)
        warn_of_leaves(params, specs, offloads=topk_ratio < 1, clips=max_grad_norm is not None)
        specs, in_turn = assign_groups(specs, schedule)
        when = sending
        if sending.in_step and all(spec.resident for spec in specs):
            when = SendGradients.AFTER_STEP  # keeps nothing in host memory
        return first_state(params, specs, Static(in_turn, when))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: object
    ) -> tuple[Any, Any]:
        del extra  # not used by Adam; a chain passes them to every transformation
        check_outside_of_shard_map("tx.update")
        weights = check_update(updates, params, state)
        count = state.step - state.skipped  # as `optax.adamw` under `optax.apply_if_finite`
        values = (x(count) if callable(x) else x for x in numbers[:-1])
        # A Python float adopts the other operand's dtype.
        rate, b1, b2, eps, decay = (
            float(x) if isinstance(x, Real) else jnp.asarray(x, jnp.float32) for x in values
        )
        scalars = AdamScalars(rate, b1, b2, 1 - b1, 1 - b2, eps, decay)
        return _update(updates, state, weights, scalars, max_grad_norm)

    return optax.GradientTransformationExtraArgs(init, update)


#: Arguments that determine the state's structure, or that are functions but not schedules. Without
#: this list, `optax.inject_hyperparams` would turn them into arrays:
#: `optax.inject_hyperparams(zenflow, static_args=zenflow_jax.STATIC_ARGS)(...)`.
STATIC_ARGS = tuple(name for name in inspect.signature(zenflow).parameters if name not in NUMBERS)


def _update(
    updates: PyTree,
    state: ZenFlowState,
    weights: list[jax.Array],
    scalars: AdamScalars,
    max_grad_norm: jax.typing.ArrayLike | None,
) -> tuple[Any, ZenFlowState]:
    schedule, step = state.schedule, state.step + 1
    gradients, treedef = jax.tree.flatten(updates, is_leaf=is_streamed)
    rank = mail_rank([leaf.spec for leaf in state.leaves])

    # This is the only read of whole gradients, leaf by leaf as the backward pass computes them.
    moves = schedule.provisional_share is not None
    seen = [
        gradient_parts(g)
        if is_streamed(g)
        else split_gradient(
            g,
            leaf.channels,
            spec=leaf.spec.anonymous,
            sending=state.send_gradients,
            rank=rank,
            signs=moves,
        )
        for g, leaf in zip(gradients, state.leaves, strict=True)
    ]
    verdict, norm = judge([s.squares for s in seen], max_grad_norm)
    scales = [leaf.spec.lr_scale for leaf in state.leaves]
    scaled = {x: scalars.scaled(x) for x in set(scales)}
    lengths = {
        x: schedule.provisional_step(step, s.learning_rate, verdict.finite) if moves else None
        for x, s in scaled.items()
    }

    stepped = [
        step_selected(p, s, leaf, scaled[scale], verdict, lengths[scale])
        for p, s, leaf, scale in zip(weights, seen, state.leaves, scales, strict=True)
    ]
    new = state._replace(
        step=step,
        skipped=state.skipped + jnp.where(verdict.finite, 0, 1).astype(jnp.int32),
        skipped_in_a_row=jnp.where(verdict.finite, 0, state.skipped_in_a_row + 1).astype(jnp.int32),
        grad_norm=norm,
        leaves=state.leaves.replace(leaf for _, leaf in stepped),
    )
    # Without `exchange` in between, the last step's mail is lost, and deferred channels would
    # silently stop learning. A jitted update cannot raise errors: it returns NaN, and `exchange`
    # raises an error.
    lost = (state.token == USED) & state.offloads
    wrong = misused(gradients, state.leaves)
    changes = [jnp.where(lost | wrong, jnp.nan, change) for change, _ in stepped]
    token = jnp.where(wrong & ~lost, MISUSED, state.token)
    if not state.offloads:  # a plain transformation, which needs no engine
        return jax.tree.unflatten(treedef, changes), new
    facts = StepFacts(scalars, verdict.factor, step, token, verdict.finite)
    if schedule.auto_window is not None:
        statistics = window_statistics([s.squares for s in seen], state.leaves, verdict)
        facts = facts._replace(statistics=statistics)
    packed = StepScalars.pack(facts)
    if state.send_gradients.in_step:
        packed = StepScalars(*(to_host(x, rank) for x in packed))
    new = new._replace(
        mail=tuple(s.mail for s in seen),
        token=jnp.full_like(state.token, USED),
        step_scalars=packed,
    )
    return jax.tree.unflatten(treedef, changes), new
