"""ZenFlow's arithmetic in plain NumPy: slow, obvious, one channel at a time.

This file decides when windows close and channels are selected; `arithmetic.py` computes a channel's
step. The tests compare the engine with these two files, which therefore import only names of
options from the library: no test would find a shared mistake.

Letters: `t` the step, counted from 1; `g` a gradient; `n` channels in a stack entry, `k` of them
selected; `*stack` the axes whose entries select separately.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tests import arithmetic
from tests.arithmetic import Channel, Leaf, Settings
from zenflow_jax import AutoSelect, AutoWindow


@dataclasses.dataclass
class Turn:
    """Channels that close their windows together, and the state of these windows."""

    number: int
    groups: list[tuple[Leaf, list[list[Channel]]]]  # leaves, each with its groups in this turn
    arrives_at: int | None = None  # the step before the pending update's arrival, if known
    open_steps: int = 0  # in the open window, including skipped steps
    open_steps_taken: int = 0  # excluding skipped steps
    boundaries: list[int] = dataclasses.field(default_factory=list)
    kept_share: list[float] = dataclasses.field(default_factory=list)
    selected_at: int = 0  # the number of boundaries at the last selection

    @property
    def last_boundary(self) -> int:
        return self.boundaries[-1] if self.boundaries else 0

    @property
    def channels(self) -> Iterator[tuple[Leaf, Channel]]:
        return ((leaf, c) for leaf, groups in self.groups for group in groups for c in group)

    def merge(self, *, keep_move: bool = False) -> None:
        for leaf, channel in self.channels:
            if channel.waiting:
                leaf.publish(channel)
                if keep_move:
                    leaf.move(channel)

    def best_share(self) -> float:
        """Returns the selected channels' share of the best score, weighted by leaf size."""
        total = size = 0.0
        for leaf, groups in self.groups:
            if not leaf.offloaded:
                continue
            held = sum(float(c.score) for group in groups for c in group if c.selected)
            best = sum(
                float(score)
                for group in groups
                for score in sorted((c.score for c in group), reverse=True)[: leaf.k]
            )
            closing = leaf.param.size * len(groups) / len(leaf.groups)
            total += closing * (held / best if best > 0 else 1.0)
            size += closing
        return total / size if size else 1.0


class Reference:
    """Training with ZenFlow on one thread, for small arrays.

    Args:
        params: Leaves with any shape and real floating dtype, which are copied.
        learning_rate: A number, or a schedule by the number of earlier steps that were not skipped,
            as in optax; or a list with a rate for each leaf.
        settings: The options.
        channel_axes: Each leaf's channel axis; None makes a leaf resident.
        decay: Whether each leaf has weight decay; None means that all leaves do.
        shards: Number of equal pieces of each leaf's channel axis, which select separately; None
            means one piece for every leaf.
        host_state: "compact" rounds moments of deferred channels to 8 bits.

    Attributes:
        step_count: Number of steps, including skipped steps.
        skipped: Number of steps whose gradient was not finite.
        windows: Number of closed windows, including warm-up steps.
        reselections: Number of selections, including the first.
        turns: The sets of leaves that take turns to close their windows; a single turn contains all
            leaves. Each turn has `boundaries`, the steps after which a window closed, and
            `kept_share`, the selected share of the best score at each boundary.
    """

    def __init__(
        self,
        params: Sequence[Any],
        learning_rate: float | Callable[[int], Any] | list[Any],
        settings: Settings,
        *,
        channel_axes: Sequence[int | None],
        decay: Sequence[bool] | None = None,
        shards: Sequence[int] | None = None,
        host_state: str = "float32",
    ):
        self._settings = settings
        self._compact = host_state == "compact"
        several = isinstance(learning_rate, list)
        self._learning_rates = learning_rate if several else [learning_rate] * len(params)
        decay = [True] * len(params) if decay is None else decay
        shards = [1] * len(params) if shards is None else shards
        self._leaves = [
            arithmetic.make_leaf(
                np.array(param), axis, settings, settings.weight_decay if decays else 0.0, pieces
            )
            for param, axis, decays, pieces in zip(params, channel_axes, decay, shards, strict=True)
        ]
        self.step_count = 0
        self.skipped = 0
        self.windows = 0
        self.reselections = 0
        count = 1
        if settings.rolling and isinstance(settings.update_interval, int):
            waiting = [leaf for leaf in self._leaves if leaf.offloaded]
            count = _take_turns(waiting, settings.update_interval)
        self.turns = [Turn(i, _in_turn(self._leaves, i)) for i in range(count)]
        # For each step since the last boundary that was not skipped: for each leaf, the root mean
        # squares of the gradient in deferred and selected channels.
        self.weights: list[list[tuple[float, float]]] = []

    def step(self, gradients: Sequence[Any]) -> list[np.ndarray]:
        """Takes a training step and exchanges; returns a copy of the parameters."""
        gradients = [np.asarray(g).astype(np.float32) for g in gradients]
        for leaf, g in zip(self._leaves, gradients, strict=True):
            assert g.shape == leaf.param.shape, (g.shape, leaf.param.shape)

        self.step_count += 1
        for channel in itertools.chain.from_iterable(leaf.channels for leaf in self._leaves):
            channel.last_move = np.float32(0)
        for turn in self.turns:
            turn.open_steps += 1
        for leaf, schedule in zip(self._leaves, self._learning_rates, strict=True):
            lr = schedule(self.step_count - 1 - self.skipped) if callable(schedule) else schedule
            leaf.lr = np.float32(lr)

        squares = arithmetic.sums_of_squares(gradients)
        weights = []
        if np.isfinite(squares).all():
            for turn in self.turns:
                turn.open_steps_taken += 1
            factor = arithmetic.clipping_factor(squares, self._settings.max_grad_norm)
            if isinstance(self._settings.update_interval, AutoWindow):
                pairs = zip(self._leaves, gradients, strict=True)
                weights = [arithmetic.weigh(x, factor * g) for x, g in pairs if x.offloaded]
            for leaf, g in zip(self._leaves, gradients, strict=True):
                for channel in leaf.channels:
                    self._take_gradient(leaf, channel, g[channel.where], factor)
        else:
            self.skipped += 1

        # This step's weights are not known yet when its boundary is decided.
        if self._exchange(self.step_count):
            self.weights = []
        elif weights:
            self.weights.append(weights)
        return self.params

    def flush(self) -> list[np.ndarray]:
        """Merges updates that do not replace provisional steps; returns a copy of the parameters.

        Open windows stay open.
        """
        for turn in self.turns:
            if not self._settings.provisional_share or not turn.open_steps:
                turn.merge()
        return self.params

    @property
    def params(self) -> list[np.ndarray]:
        return [leaf.param.copy() for leaf in self._leaves]

    @property
    def selected(self) -> list[np.ndarray | None]:
        """Returns each leaf's selected channels: int32 `[*stack, k]`, ascending, or None."""
        return [leaf.selected for leaf in self._leaves]

    def moments(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns master, moments (float32) and AdamW steps (int32) of leaf `i`, in its shape."""
        leaf = self._leaves[i]
        master, mu, nu = (np.zeros(leaf.param.shape, np.float32) for _ in range(3))
        steps = np.zeros(leaf.param.shape, np.int32)
        for channel in leaf.channels:
            master[channel.where] = channel.master
            mu[channel.where] = channel.mu
            nu[channel.where] = channel.nu
            steps[channel.where] = channel.steps
        return master, mu, nu, steps

    def _take_gradient(self, leaf: Leaf, channel: Channel, g: Any, factor: np.float32) -> None:
        clipped = factor * g
        channel.score += np.sum(clipped * clipped, dtype=np.float32)
        if channel.selected:
            arithmetic.adamw(channel, clipped, clipped * clipped, leaf.lr, self._settings)
            leaf.publish(channel)
            return
        self._move_provisionally(leaf, channel, g)
        # Rounded to the mail's dtype before clipping and summing.
        mail = factor * g.astype(leaf.mail_dtype).astype(np.float32)
        channel.window_sum = channel.window_sum + mail
        channel.window_squares = channel.window_squares + mail * mail

    def _move_provisionally(self, leaf: Leaf, channel: Channel, g: Any) -> None:
        s = self._settings
        waits_for_nothing = s.update_interval == 1 and self._staleness == 0
        if not s.provisional_share or waits_for_nothing:
            return
        if self.step_count <= max(s.full_warm_up_rounds, 1):
            return
        channel.last_move = np.float32(s.provisional_share) * leaf.lr * np.sign(g)
        leaf.move(channel)

    def _exchange(self, t: int) -> bool:
        """Makes the exchange after step `t`; returns whether any window closes."""
        for turn in self.turns:
            if turn.arrives_at == t:
                turn.merge(keep_move=self._keeps_last_move)
        # Not a generator, because `any` would stop at the first True.
        return any([self._exchange_in_turn(t, turn) for turn in self.turns])

    def _exchange_in_turn(self, t: int, turn: Turn) -> bool:
        s = self._settings
        warm = t <= s.full_warm_up_rounds
        if not warm and not self._window_ends(t, turn):
            return False
        # A warm-up step is a whole window, and leaves no update pending.
        staleness = 0 if warm else self._staleness
        self._close_window(turn, overlap=staleness != 0)
        turn.arrives_at = None if staleness is None else t + staleness

        # The first boundary is the end of the warm-up or, without a warm-up, of the first window.
        no_boundary = not turn.boundaries
        first = t == s.full_warm_up_rounds if s.full_warm_up_rounds else no_boundary
        selects = first or (not warm and self._selection_is_due(t, turn))
        turn.boundaries.append(t)
        if selects:
            self._reselect(turn)
            turn.selected_at = len(turn.boundaries)
        turn.kept_share.append(turn.best_share())
        return True

    @property
    def _keeps_last_move(self) -> bool:
        length = self._settings.update_interval
        return isinstance(length, int) and length < 4 and self._staleness == 1

    @property
    def _staleness(self) -> int | None:
        """Returns the steps from a window's end to its update's arrival; None: the next end."""
        s = self._settings
        if s.staleness is not None or isinstance(s.update_interval, AutoWindow):
            return s.staleness
        return 1 if s.rolling else s.update_interval

    def _window_ends(self, t: int, turn: Turn) -> bool:
        rule, since = self._settings.update_interval, t - self._settings.full_warm_up_rounds
        if not isinstance(rule, AutoWindow):
            return (since + turn.number) % rule == 0
        if t - turn.last_boundary == rule.max_interval:
            return True
        if not self.weights:
            return False
        # A leaf is ripe when its deferred sum weighs as much as one selected step.
        ripe = [
            bool(sum(d for d, _ in steps) >= np.mean([selected for _, selected in steps]))
            for steps in zip(*self.weights, strict=True)
        ]
        return ripe.count(True) >= math.ceil(round(rule.share * len(ripe), 6))

    def _selection_is_due(self, t: int, turn: Turn) -> bool:
        s, rule = self._settings, self._settings.select_interval
        window = range(turn.last_boundary + 1, t + 1)
        if isinstance(rule, AutoSelect):
            windows = len(turn.boundaries) + 1 - turn.selected_at
            return windows == rule.max_windows or turn.kept_share[-1] < rule.keep
        if rule is None:
            longest = s.update_interval
            rule = 16 * (longest.max_interval if isinstance(longest, AutoWindow) else longest)
        # A turn whose windows close earlier also selects earlier.
        return any((u - s.full_warm_up_rounds + turn.number) % rule == 0 for u in window)

    def _close_window(self, turn: Turn, *, overlap: bool) -> None:
        # Merge the earlier update first: the next lines advance the masters by a window.
        turn.merge()
        taken = turn.open_steps_taken
        for leaf, channel in turn.channels:
            # Selections change only between windows, so a channel that is deferred now was deferred
            # during the whole window.
            if not channel.selected and taken:
                arithmetic.close_window(channel, taken, leaf.lr, self._settings)
                self._keep_on_host(channel)
                channel.waiting = True
            channel.window_sum = np.zeros_like(channel.window_sum)
            channel.window_squares = np.zeros_like(channel.window_sum)
        if not overlap:
            turn.merge()
        self.windows += 1
        turn.open_steps = turn.open_steps_taken = 0

    def _keep_on_host(self, channel: Channel) -> None:
        if self._compact:
            channel.mu = arithmetic.compact_one(channel.mu, first=True)
            channel.nu = arithmetic.compact_one(channel.nu, first=False)

    def _reselect(self, turn: Turn) -> None:
        for leaf, groups in turn.groups:
            for group in groups:
                ranking = sorted(range(len(group)), key=lambda j, g=group: (-g[j].score, j))
                for j, channel in enumerate(group):
                    was, channel.selected = channel.selected, j in ranking[: leaf.k]
                    if was and not channel.selected:
                        self._keep_on_host(channel)
                    channel.score = np.float32(0)
                    # The device starts from the parameter, so an entering channel cannot wait.
                    if channel.selected and channel.waiting:
                        leaf.publish(channel)
        self.reselections += 1


def _in_turn(leaves: Sequence[Leaf], number: int) -> list[tuple[Leaf, list[list[Channel]]]]:
    """Returns the leaves that close windows in this turn, with these groups."""
    pairs = [
        (leaf, [g for g, its in zip(leaf.groups, leaf.turns, strict=True) if its == number])
        for leaf in leaves
    ]
    return [(leaf, groups) for leaf, groups in pairs if groups]


def _take_turns(leaves: Sequence[Leaf], most: int) -> int:
    """Assigns turns to each leaf with deferred channels; returns the number of turns.

    Stacks of layers are cut into ranges if the turns' bytes would differ too much.
    """
    everything = sum(leaf.param.nbytes for leaf in leaves)
    best = None
    for share in (None, 1, 2, 4):
        ranges = []
        for leaf in leaves:
            layers, count = _layers(leaf), 1
            if share is not None:
                pieces = math.ceil(leaf.param.nbytes * most * share / everything)
                count = max(1, min(pieces, layers, most))
            ends = [layers * i // count for i in range(count + 1)]
            ranges += [(leaf, range(*pair)) for pair in itertools.pairwise(ends)]
        loads, dealt = _deal(ranges, min(most, max(len(ranges), 1)))
        if best is None or max(loads) < max(best[0]):
            best = loads, dealt
        if len(loads) == most and max(loads) <= 1.5 * min(loads):
            break
    assert best is not None
    loads, dealt = best
    for leaf, layers, turn in dealt:
        entries = len(leaf.groups) // _layers(leaf)
        for layer in layers:
            leaf.turns[layer * entries : (layer + 1) * entries] = [turn] * entries
    return len(loads)


def _deal(
    ranges: Sequence[tuple[Leaf, range]], turns: int
) -> tuple[list[int], list[tuple[Leaf, range, int]]]:
    """Deals the largest range first, to the turn with the fewest bytes and without its leaf."""
    loads, dealt = [0] * turns, []

    def size(leaf_and_layers: tuple[Leaf, range]) -> int:
        leaf, layers = leaf_and_layers
        return leaf.param.nbytes * len(layers) // _layers(leaf)

    for leaf, layers in sorted(ranges, key=size, reverse=True):  # the first among equals
        taken = [turn for other, _, turn in dealt if other is leaf]
        turn = min((load, turn) for turn, load in enumerate(loads) if turn not in taken)[1]
        loads[turn] += size((leaf, layers))
        dealt.append((leaf, layers, turn))
    return loads, dealt


def _layers(leaf: Leaf) -> int:
    return leaf.param.shape[0] if leaf.stack else 1
