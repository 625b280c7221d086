"""The arithmetic of ZenFlow in plain NumPy: slow, obvious, one channel after the other.

A channel is an object that carries everything known of it, so that "selected", "deferred" and
"waiting" are words about one object and not about where an array lives. The tests hold the engine
and the in-graph mode to this file, which is why it imports nothing of them but the names of
options: a mistake shared by two of them would be seen by nobody.

Letters: `t` the step, counted from 1; `g` a gradient; `n` channels in a stack entry, `k` of them
selected; `*stack` the axes whose entries select separately.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax._plan.rules import AutoSelect, AutoWindow, EpochSelect


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Plain values of the options of `zenflow`, under the same names and with the same defaults."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    topk_ratio: float = 0.1
    update_interval: int | AutoWindow = 4
    select_interval: int | AutoSelect | EpochSelect | None = None  # None is every 16 windows
    full_warm_up_rounds: int = 0  # steps
    rolling: bool = True
    staleness: int | None = None
    window_scaling: float | None = 0.5  # exponent of the rate
    provisional_share: float | None = 0.5
    max_grad_norm: float | None = None
    send_gradients: str = "during_step"
    transfer_dtype: Any = None


@dataclasses.dataclass
class _Channel:
    """One channel of one stack entry, whichever side it lives on. All arrays are float32."""

    where: tuple[Any, ...]  # index of its entries in the leaf
    weight_decay: float
    selected: bool
    master: Any  # runs ahead of the parameter while `waiting`
    mu: Any
    nu: Any
    window_sum: Any  # gradients since the window opened, steps that were skipped left out
    steps: int = 0  # AdamW steps taken by this channel
    score: Any = np.float32(0)
    waiting: bool = False  # an update was computed that the parameter has not received yet


@dataclasses.dataclass
class _Leaf:
    """A parameter in its own dtype, and its channels, one list for each group of them.

    Channels are selected within a group: a stack entry, or a shard of one.
    """

    param: np.ndarray
    axis: int | None  # None for a resident leaf, which is one channel that is always selected
    stack: tuple[int, ...]
    k: int  # selected in each group
    mail_dtype: np.dtype  # of gradients that go to the host
    groups: list[list[_Channel]]
    turns: list[int]  # for each group, with which others it closes its windows

    @property
    def channels(self) -> Iterator[_Channel]:
        return (channel for group in self.groups for channel in group)

    @property
    def offloaded(self) -> bool:
        """Whether anything of it is deferred."""
        return any(len(group) > self.k for group in self.groups)

    def publish(self, channel: _Channel) -> None:
        """Make the parameter what it always is in the end: the cast of the master."""
        self.param[channel.where] = channel.master.astype(self.param.dtype)
        channel.waiting = False


class Reference:
    """Training with ZenFlow on one thread, for small arrays.

    Args:
        params: Leaves of any shape and of any real floating dtype. They are copied.
        learning_rate: A number, or a schedule that step `t` asks for `t - 1`, as optax does.
        settings: The options.
        channel_axes: The channel axis of each leaf; None makes the leaf resident.
        decay: Whether each leaf takes part in weight decay; None is all of them.
        shards: Into how many equal pieces each leaf's channel axis is cut, each of which selects
            on its own; None is one for every leaf.
        host_state: "compact" rounds moments of deferred channels to 8 bits.

    Attributes:
        step_count: Steps so far, skipped ones included.
        skipped: Steps whose gradient was not finite.
        windows: Windows closed so far, also by a warm-up step or `flush`.
        reselections: Times that channels were chosen, the first choice included.
        turns: How many sets of leaves take turns to close their windows; one is all at once.
        boundaries: For each of them, the steps after which a window closed, `flush` apart.
        kept_share: For each, the share of the best score that was selected, at each of these steps.
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
            _make_leaf(
                np.array(param), axis, settings, settings.weight_decay if decays else 0.0, pieces
            )
            for param, axis, decays, pieces in zip(params, channel_axes, decay, shards, strict=True)
        ]

        self.step_count = 0
        self.skipped = 0
        self.windows = 0
        self.reselections = 0
        self.turns = 1
        if settings.rolling and isinstance(settings.update_interval, int):
            waiting = [leaf for leaf in self._leaves if leaf.axis is not None and leaf.offloaded]
            self.turns = _take_turns(waiting, settings.update_interval)
        self._arrives_at: list[int | None] = [None] * self.turns  # after which step, if known
        self._open_steps = [0] * self.turns  # of the open windows, skipped ones included
        self._open_steps_taken = [0] * self.turns  # the same without them
        self.boundaries: list[list[int]] = [[] for _ in range(self.turns)]
        self.kept_share: list[list[float]] = [[] for _ in range(self.turns)]
        self._selected_at = [0] * self.turns  # how many boundaries there were at the last selection
        # Of each step since the last boundary, unless it was skipped: per leaf the root mean square
        # of the gradient's deferred channels and of its selected ones.
        self._weights: list[list[tuple[float, float]]] = []
        self._last_lr = np.float32(0)

    def step(self, gradients: Sequence[Any]) -> list[np.ndarray]:
        """The parameters after one training step and the exchange behind it, copied."""
        gradients = [np.asarray(g).astype(np.float32) for g in gradients]
        for leaf, g in zip(self._leaves, gradients, strict=True):
            assert g.shape == leaf.param.shape, (g.shape, leaf.param.shape)

        self.step_count += 1
        self._open_steps = [steps + 1 for steps in self._open_steps]
        schedule = self._learning_rate
        lr = schedule(self.step_count - 1) if callable(schedule) else schedule
        self._last_lr = np.float32(lr)

        squares = _sums_of_squares(gradients)
        weights = []
        if np.isfinite(squares).all():
            self._open_steps_taken = [steps + 1 for steps in self._open_steps_taken]
            factor = _clipping_factor(squares, self._settings.max_grad_norm)
            if isinstance(self._settings.update_interval, AutoWindow):
                weights = [_weigh(leaf, factor * g) for leaf, g in self._not_resident(gradients)]
            for leaf, g in zip(self._leaves, gradients, strict=True):
                for channel in leaf.channels:
                    self._take_gradient(leaf, channel, g[channel.where], factor)
        else:
            self.skipped += 1

        # What this step weighs is not known yet when it is decided what follows it.
        if self._exchange(self.step_count):
            self._weights = []
        elif weights:
            self._weights.append(weights)
        return self.params

    def flush(self) -> list[np.ndarray]:
        """The parameters, copied, after all that is on its way to them; each is its master's cast.

        Open windows are closed early. Nothing is selected and the schedule stays where it was.
        """
        for turn in range(self.turns):
            if self._open_steps[turn]:
                self._close_window(turn, overlap=False)
            else:
                self._merge(turn)
        return self.params

    @property
    def params(self) -> list[np.ndarray]:
        return [leaf.param.copy() for leaf in self._leaves]

    @property
    def selected(self) -> list[np.ndarray | None]:
        """Per leaf the selected channels `[*stack, k]`, ascending, int32; None if resident."""
        return [None if leaf.axis is None else _selected_channels(leaf) for leaf in self._leaves]

    @property
    def scores(self) -> list[np.ndarray | None]:
        """Per leaf the scores `[*stack, n]` since the last selection, float32; None if resident."""
        return [None if leaf.axis is None else _scores(leaf) for leaf in self._leaves]

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

    def _take_gradient(self, leaf: _Leaf, channel: _Channel, g: Any, factor: np.float32) -> None:
        clipped = factor * g
        channel.score += np.sum(clipped * clipped, dtype=np.float32)
        if channel.selected:
            _adamw(channel, clipped, self._last_lr, self._settings)
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

    def _move_provisionally(self, leaf: _Leaf, channel: _Channel, g: Any) -> None:
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
        """What follows step `t`; whether any window closes there."""
        for turn in range(self.turns):
            if self._arrives_at[turn] == t:
                self._merge(turn)
        # Not a generator: `any` would stop at the first one.
        return any([self._exchange_in_turn(t, turn) for turn in range(self.turns)])

    def _exchange_in_turn(self, t: int, turn: int) -> bool:
        s = self._settings
        warm = t <= s.full_warm_up_rounds
        if not warm and not self._window_ends(t, turn):
            return False
        # A warm-up step is a window of its own, and never leaves anything waiting.
        staleness = 0 if warm else self._staleness
        self._close_window(turn, overlap=staleness != 0)
        self._arrives_at[turn] = None if staleness is None else t + staleness

        # The first boundary there is: the end of the warm-up, or else of the first window.
        no_boundary = not self.boundaries[turn]
        first = t == s.full_warm_up_rounds if s.full_warm_up_rounds else no_boundary
        selects = first or (not warm and self._selection_is_due(t, turn))
        self.boundaries[turn].append(t)
        if selects:
            self._reselect(turn)
            self._selected_at[turn] = len(self.boundaries[turn])
        self.kept_share[turn].append(self._kept_share(turn))
        return True

    @property
    def _staleness(self) -> int | None:
        """Steps from the end of a window to where its update arrives; None is its next end."""
        s = self._settings
        if s.staleness is not None or isinstance(s.update_interval, AutoWindow):
            return s.staleness
        return 1 if s.rolling else s.update_interval

    def _window_ends(self, t: int, turn: int) -> bool:
        rule, since = self._settings.update_interval, t - self._settings.full_warm_up_rounds
        if not isinstance(rule, AutoWindow):
            return (since + turn) % rule == 0
        if t - self._last_boundary(turn) == rule.max_interval:
            return True
        if not self._weights:
            return False
        # A leaf is ripe when what piled up weighs as much as one important step.
        ripe = [
            bool(sum(d for d, _ in steps) >= np.mean([selected for _, selected in steps]))
            for steps in zip(*self._weights, strict=True)
        ]
        return ripe.count(True) >= math.ceil(round(rule.share * len(ripe), 6))

    def _selection_is_due(self, t: int, turn: int) -> bool:
        s, rule = self._settings, self._settings.select_interval
        window = range(self._last_boundary(turn) + 1, t + 1)
        if isinstance(rule, AutoSelect):
            windows = len(self.boundaries[turn]) + 1 - self._selected_at[turn]
            return windows == rule.max_windows or self.kept_share[turn][-1] < rule.keep
        if isinstance(rule, EpochSelect):
            return any(u % (rule.epochs * rule.steps_per_epoch) == 0 for u in window)
        if rule is None:
            longest = s.update_interval
            rule = 16 * (longest.max_interval if isinstance(longest, AutoWindow) else longest)
        # Whose windows close earlier selects as much earlier.
        return any((u - s.full_warm_up_rounds + turn) % rule == 0 for u in window)

    def _last_boundary(self, turn: int) -> int:
        return self.boundaries[turn][-1] if self.boundaries[turn] else 0

    def _not_resident(self, gradients: Sequence[np.ndarray]) -> list[tuple[_Leaf, np.ndarray]]:
        pairs = zip(self._leaves, gradients, strict=True)
        return [(leaf, g) for leaf, g in pairs if leaf.axis is not None and leaf.offloaded]

    def _kept_share(self, turn: int) -> float:
        """How much of the best channels' score the selected ones have, by the leaves' sizes."""
        total = size = 0.0
        for leaf, groups in self._in_turn(turn):
            if leaf.axis is None or not leaf.offloaded:
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

    def _in_turn(self, turn: int) -> list[tuple[_Leaf, list[list[_Channel]]]]:
        """The leaves that close windows in this turn, with those of their groups that do."""
        pairs = [
            (leaf, [g for g, its in zip(leaf.groups, leaf.turns, strict=True) if its == turn])
            for leaf in self._leaves
        ]
        return [(leaf, groups) for leaf, groups in pairs if groups]

    def _close_window(self, turn: int, *, overlap: bool) -> None:
        # The update before this one first: after the next lines the masters are a window further.
        self._merge(turn)
        taken = self._open_steps_taken[turn]
        for _, groups in self._in_turn(turn):
            for channel in (channel for group in groups for channel in group):
                # Selection moves only between windows, so "deferred now" is "deferred all along".
                if not channel.selected and taken:
                    mean = channel.window_sum / np.float32(taken)
                    _adamw(channel, mean, self._last_lr, self._settings, taken)
                    self._keep_on_host(channel)
                    channel.waiting = True
                channel.window_sum = np.zeros_like(channel.window_sum)
        if not overlap:
            self._merge(turn)
        self.windows += 1
        self._open_steps[turn] = 0
        self._open_steps_taken[turn] = 0

    def _merge(self, turn: int) -> None:
        for leaf, groups in self._in_turn(turn):
            for channel in (channel for group in groups for channel in group):
                if channel.waiting:
                    leaf.publish(channel)

    def _keep_on_host(self, channel: _Channel) -> None:
        if self._compact:
            channel.mu = compact_one(channel.mu, first=True)
            channel.nu = compact_one(channel.nu, first=False)

    def _reselect(self, turn: int) -> None:
        for leaf, groups in self._in_turn(turn):
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


def _take_turns(leaves: Sequence[_Leaf], most: int) -> int:
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
                wanted = math.ceil(leaf.param.nbytes * most * share / everything)
                count = max(1, min(wanted, layers, most))
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
    ranges: Sequence[tuple[_Leaf, range]], turns: int
) -> tuple[list[int], list[tuple[_Leaf, range, int]]]:
    """The largest first, each to the turn with the fewest bytes that has nothing of its leaf."""
    loads, dealt = [0] * turns, []

    def size(leaf_and_layers: tuple[_Leaf, range]) -> int:
        leaf, layers = leaf_and_layers
        return leaf.param.nbytes * len(layers) // _layers(leaf)

    for leaf, layers in sorted(ranges, key=size, reverse=True):  # of equals the first
        taken = [turn for other, _, turn in dealt if other is leaf]
        turn = min((load, turn) for turn, load in enumerate(loads) if turn not in taken)[1]
        loads[turn] += size((leaf, layers))
        dealt.append((leaf, layers, turn))
    return loads, dealt


def _layers(leaf: _Leaf) -> int:
    return leaf.param.shape[0] if leaf.stack else 1


def _make_leaf(
    param: np.ndarray, axis: int | None, settings: Settings, weight_decay: float, shards: int
) -> _Leaf:
    def channel(where: tuple[Any, ...], selected: bool) -> _Channel:
        master = param[where].astype(np.float32)
        zeros = np.zeros_like(master)
        return _Channel(where, weight_decay, selected, master, zeros, zeros, zeros)

    if axis is None:
        return _Leaf(param, None, (), 1, param.dtype, [[channel((...,), True)]], [0])

    assert -param.ndim <= axis < param.ndim, (axis, param.shape)
    axis %= param.ndim
    # Both axes of a matrix belong to the matrix, whichever of them is the channel axis.
    stack = param.shape[: min(axis, max(param.ndim - 2, 0))]
    n, rest = divmod(param.shape[axis], shards)
    assert rest == 0, (param.shape, axis, shards)
    k = _count_selected(settings.topk_ratio, n)
    between = (slice(None),) * (axis - len(stack))
    groups = [
        [channel((*entry, *between, shard * n + j, ...), j < k) for j in range(n)]
        for entry in np.ndindex(*stack)
        for shard in range(shards)
    ]
    # float16 has no room for gradients that were divided by a loss scale.
    own: Any = np.float32 if param.dtype == np.float16 else param.dtype
    mail_dtype = settings.transfer_dtype or own
    return _Leaf(param, axis, stack, k, np.dtype(mail_dtype), groups, [0] * len(groups))


def _weigh(leaf: _Leaf, g: np.ndarray) -> tuple[float, float]:
    """Root mean squares of the deferred and of the selected channels' gradient."""
    both = []
    for selected in (False, True):
        side = [g[c.where].ravel() for c in leaf.channels if c.selected == selected]
        both.append(math.sqrt(np.mean(np.square(np.concatenate(side)), dtype=np.float64)))
    deferred, chosen = both
    return deferred, chosen


def _selected_channels(leaf: _Leaf) -> np.ndarray:
    assert leaf.axis is not None
    # Groups of one stack entry follow each other, so their channels' numbers go on.
    flags = np.array([channel.selected for channel in leaf.channels])
    flags = flags.reshape(-1, leaf.param.shape[leaf.axis])
    chosen = [np.flatnonzero(entry) for entry in flags]
    return np.array(chosen, np.int32).reshape(*leaf.stack, -1 if leaf.k else 0)


def _scores(leaf: _Leaf) -> np.ndarray:
    assert leaf.axis is not None
    scores = [channel.score for channel in leaf.channels]
    return np.array(scores, np.float32).reshape(*leaf.stack, leaf.param.shape[leaf.axis])


def _count_selected(ratio: float, n: int) -> int:
    # The ratio means what its decimals say: 0.07 * 100 is 7.000000000000001 in binary, and 8 of 100
    # are not 7 %.
    return math.ceil(round(ratio * n, 6))


def _adamw(channel: _Channel, g: Any, lr: np.float32, s: Settings, steps: int = 1) -> None:
    """Move master and moments by one AdamW step, with a mean gradient of so many steps.

    The parameter is left as it is.
    """
    b1, b2, eps, decay = s.b1, s.b2, s.eps, channel.weight_decay
    scaling = s.window_scaling
    c = 1
    if scaling is not None:
        c = steps
        b1, b2, eps = s.b1**c, s.b2**c, s.eps / math.sqrt(c)
        lr, decay = lr * np.float32(c**scaling), decay * c ** (1 - scaling)
    channel.steps += c
    n = np.float32(channel.steps)
    one = np.float32(1)
    # As optax: `1 - b` is taken in Python's precision, `1 - b**n` in float32. The two differ in
    # the fifth digit for b2 = 0.999 and n = 1.
    channel.mu = np.float32(1 - b1) * g + np.float32(b1) * channel.mu
    channel.nu = np.float32(1 - b2) * (g * g) + np.float32(b2) * channel.nu
    mu_hat = channel.mu / (one - np.float32(s.b1) ** n)
    nu_hat = channel.nu / (one - np.float32(s.b2) ** n)
    direction = mu_hat / (np.sqrt(nu_hat) + np.float32(eps))
    direction = direction + np.float32(decay) * channel.master
    channel.master = channel.master - lr * direction


def _sums_of_squares(gradients: Sequence[np.ndarray]) -> np.ndarray:
    # Where it overflows the step is skipped.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([np.sum(g * g, dtype=np.float32) for g in gradients], np.float32)


def _clipping_factor(squares: np.ndarray, max_grad_norm: float | None) -> np.float32:
    if max_grad_norm is None:
        return np.float32(1)
    # Leaves that are finite can have an infinite sum. As in optax, the factor is then zero.
    with np.errstate(over="ignore"):
        norm = np.sqrt(np.sum(squares, dtype=np.float32))
    limit = np.float32(max_grad_norm)
    return np.float32(1) if norm < limit else limit / norm


def compact_one(moment: Any, *, first: bool) -> np.ndarray:
    """A channel's moment after it was kept in 8 bits, with a scale for each 32 neighbours."""
    round_block = _round_first if first else _round_second
    flat = np.array(moment, np.float32).reshape(-1)
    for i in range(0, flat.size, 32):
        flat[i : i + 32] = round_block(flat[i : i + 32])
    return flat.reshape(np.shape(moment))


def _round_first(m: np.ndarray) -> np.ndarray:
    # Codes c from -127 to 127 stand for c (|c| + 60) / 23749 of the scale.
    top, largest = np.float32(127 * 187), np.max(abs(m))
    if largest < 2.0**-60:
        return np.zeros_like(m)
    scale = largest.astype(ml_dtypes.bfloat16).astype(np.float32)
    c = np.rint(np.sqrt(abs(m) * (top / scale) + np.float32(900)) - np.float32(30))
    return np.copysign(c * (c + 60) * (1 / top) * scale, m) + 0


def _round_second(v: np.ndarray) -> np.ndarray:
    # Codes c from 0 to 255 stand for roots of c / 255 of the scale; only zero's is 0.
    root, top = np.sqrt(v), np.float32(255)
    scale = np.max(root)
    if scale < 2.0**-60:
        return np.zeros_like(v)
    c = np.maximum(np.rint(root * (top / scale)), (root > 0).astype(np.float32))
    return (c * (1 / top) * scale) ** 2
