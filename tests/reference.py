"""The arithmetic of ZenFlow in plain NumPy: slow, obvious, one channel after the other.

Here is when windows close and channels are selected; what a step does to a channel is
`arithmetic.py`. The tests hold the engine to these two files, which is why
they import nothing of them but the names of options: a mistake shared by two of them would be seen
by nobody.

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
    """Channels that close their windows together, and how far these windows are."""

    number: int
    groups: list[tuple[Leaf, list[list[Channel]]]]  # leaves, with those of their groups in it
    arrives_at: int | None = None  # after which step, if known
    open_steps: int = 0  # of the open window, skipped ones included
    open_steps_taken: int = 0  # the same without them
    boundaries: list[int] = dataclasses.field(default_factory=list)
    kept_share: list[float] = dataclasses.field(default_factory=list)
    selected_at: int = 0  # how many boundaries there were at the last selection

    @property
    def last_boundary(self) -> int:
        return self.boundaries[-1] if self.boundaries else 0

    @property
    def channels(self) -> Iterator[tuple[Leaf, Channel]]:
        return ((leaf, c) for leaf, groups in self.groups for group in groups for c in group)

    def merge(self) -> None:
        for leaf, channel in self.channels:
            if channel.waiting:
                leaf.publish(channel)

    def best_share(self) -> float:
        """How much of the best channels' score the selected ones have, by the leaves' sizes."""
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
        params: Leaves of any shape and of any real floating dtype. They are copied.
        learning_rate: A number, or a schedule. Step `t` asks it for the number of steps before it
            that were not skipped, as optax does.
        settings: The options.
        channel_axes: The channel axis of each leaf; None makes the leaf resident.
        decay: Whether each leaf takes part in weight decay; None is all of them.
        shards: Into how many equal pieces each leaf's channel axis is cut, each of which selects
            on its own; None is one for every leaf.
        host_state: "compact" rounds moments of deferred channels to 8 bits.

    Attributes:
        step_count: Steps so far, skipped ones included.
        skipped: Steps whose gradient was not finite.
        windows: Windows closed so far, also by a warm-up step.
        reselections: Times that channels were chosen, the first choice included.
        turns: The sets of leaves that take turns to close their windows; one is all at once.
            `boundaries` of each are the steps after which a window closed, and `kept_share` the
            share of the best score that was selected, at each of these steps.
    """

    def __init__(
        self,
        params: Sequence[Any],
        learning_rate: float | Callable[[int], Any],
        settings: Settings,
        *,
        channel_axes: Sequence[int | None],
        decay: Sequence[bool] | None = None,
        shards: Sequence[int] | None = None,
        host_state: str = "float32",
    ):
        self._settings = settings
        self._compact = host_state == "compact"
        self._learning_rate = learning_rate
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
        # Of each step since the last boundary, unless it was skipped: per leaf the root mean square
        # of the gradient's deferred channels and of its selected ones.
        self.weights: list[list[tuple[float, float]]] = []
        self._last_lr = np.float32(0)

    def step(self, gradients: Sequence[Any]) -> list[np.ndarray]:
        """The parameters after one training step and the exchange behind it, copied."""
        gradients = [np.asarray(g).astype(np.float32) for g in gradients]
        for leaf, g in zip(self._leaves, gradients, strict=True):
            assert g.shape == leaf.param.shape, (g.shape, leaf.param.shape)

        self.step_count += 1
        for turn in self.turns:
            turn.open_steps += 1
        schedule = self._learning_rate
        lr = schedule(self.step_count - 1 - self.skipped) if callable(schedule) else schedule
        self._last_lr = np.float32(lr)

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

        # What this step weighs is not known yet when it is decided what follows it.
        if self._exchange(self.step_count):
            self.weights = []
        elif weights:
            self.weights.append(weights)
        return self.params

    def flush(self) -> list[np.ndarray]:
        """The parameters, copied, after what arrives without a loss of provisional steps.

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
        """Per leaf the selected channels `[*stack, k]`, ascending, int32; None if resident."""
        return [leaf.selected for leaf in self._leaves]

    def moments(self, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Master, moments (float32) and AdamW steps (int32) of leaf `i`, each of its shape."""
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
            arithmetic.adamw(channel, clipped, self._last_lr, self._settings)
            leaf.publish(channel)
            return
        self._move_provisionally(leaf, channel, g)
        # It is clipped where it is added up, and rounded before: to what travels.
        mail = g.astype(leaf.mail_dtype).astype(np.float32)
        total = channel.window_sum + factor * mail
        if self._settings.send_gradients == "per_window":
            # The sum is what travels.
            total = total.astype(leaf.mail_dtype).astype(np.float32)
        channel.window_sum = total

    def _move_provisionally(self, leaf: Leaf, channel: Channel, g: Any) -> None:
        s = self._settings
        waits_for_nothing = s.update_interval == 1 and self._staleness == 0
        if not s.provisional_share or waits_for_nothing:
            return
        if self.step_count <= max(s.full_warm_up_rounds, 1):
            return
        length = np.float32(s.provisional_share) * self._last_lr
        new = leaf.param[channel.where].astype(np.float32) - length * np.sign(g)
        leaf.param[channel.where] = new.astype(leaf.param.dtype)

    def _exchange(self, t: int) -> bool:
        """Does all that follows step `t`; whether any window closes there."""
        for turn in self.turns:
            if turn.arrives_at == t:
                turn.merge()
        # Not a generator: `any` would stop at the first one.
        return any([self._exchange_in_turn(t, turn) for turn in self.turns])

    def _exchange_in_turn(self, t: int, turn: Turn) -> bool:
        s = self._settings
        warm = t <= s.full_warm_up_rounds
        if not warm and not self._window_ends(t, turn):
            return False
        # A warm-up step is a window of its own, and never leaves anything waiting.
        staleness = 0 if warm else self._staleness
        self._close_window(turn, overlap=staleness != 0)
        turn.arrives_at = None if staleness is None else t + staleness

        # The first boundary there is: the end of the warm-up, or else of the first window.
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
    def _staleness(self) -> int | None:
        """Steps from the end of a window to where its update arrives; None is its next end."""
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
        # A leaf is ripe when what piled up weighs as much as one important step.
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
        # Whose windows close earlier selects as much earlier.
        return any((u - s.full_warm_up_rounds + turn.number) % rule == 0 for u in window)

    def _close_window(self, turn: Turn, *, overlap: bool) -> None:
        # The update before this one first: after the next lines the masters are a window further.
        turn.merge()
        taken = turn.open_steps_taken
        for _, channel in turn.channels:
            # Selection moves only between windows, so "deferred now" is "deferred all along".
            if not channel.selected and taken:
                mean = channel.window_sum / np.float32(taken)
                arithmetic.adamw(channel, mean, self._last_lr, self._settings, taken)
                self._keep_on_host(channel)
                channel.waiting = True
            channel.window_sum = np.zeros_like(channel.window_sum)
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
                    # The device starts from the parameter, so a channel that enters cannot wait.
                    if channel.selected and channel.waiting:
                        leaf.publish(channel)
        self.reselections += 1


def _in_turn(leaves: Sequence[Leaf], number: int) -> list[tuple[Leaf, list[list[Channel]]]]:
    """The leaves that close windows in this turn, with the groups that do."""
    pairs = [
        (leaf, [g for g, its in zip(leaf.groups, leaf.turns, strict=True) if its == number])
        for leaf in leaves
    ]
    return [(leaf, groups) for leaf, groups in pairs if groups]


def _take_turns(leaves: Sequence[Leaf], most: int) -> int:
    """Gives each leaf with deferred channels its turns; how many turns there are.

    Stacks of layers are cut into ranges if the turns would have too different numbers of bytes.
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
    """The largest first, each to the turn with the fewest bytes that has nothing of its leaf."""
    loads, dealt = [0] * turns, []

    def size(leaf_and_layers: tuple[Leaf, range]) -> int:
        leaf, layers = leaf_and_layers
        return leaf.param.nbytes * len(layers) // _layers(leaf)

    for leaf, layers in sorted(ranges, key=size, reverse=True):  # of equals the first
        taken = [turn for other, _, turn in dealt if other is leaf]
        turn = min((load, turn) for turn, load in enumerate(loads) if turn not in taken)[1]
        loads[turn] += size((leaf, layers))
        dealt.append((leaf, layers, turn))
    return loads, dealt


def _layers(leaf: Leaf) -> int:
    return leaf.param.shape[0] if leaf.stack else 1
