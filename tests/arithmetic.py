"""The slow reference's step on a leaf and on each of its channels, in plain NumPy.

A channel is an object with its whole state, so that "selected", "deferred" and "waiting" describe
an object, not an array's place. `reference.py` decides when windows close and channels are
selected, and explains the letters.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from zenflow_jax import AutoSelect, AutoWindow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `zenflow`, with the same names and defaults."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-4
    topk_ratio: float = 0.1
    update_interval: int | AutoWindow = 4
    select_interval: int | AutoSelect | None = None  # None means every 16 windows
    full_warm_up_rounds: int = 0  # steps
    rolling: bool = True
    staleness: int | None = None
    window_scaling: bool | None = True
    provisional_share: float | None = 0.5
    max_grad_norm: float | None = None
    send_gradients: str = "during_step"
    transfer_dtype: Any = None


@dataclasses.dataclass
class Channel:
    """A channel in a stack entry, on either side. All arrays are float32."""

    where: tuple[Any, ...]  # the index of its elements in the leaf
    weight_decay: float
    selected: bool
    master: Any  # runs ahead of the parameter while `waiting`
    mu: Any
    nu: Any
    window_sum: Any  # gradients since the window opened, without skipped steps
    window_squares: Any  # their squares
    steps: int = 0  # AdamW steps taken by this channel
    score: Any = np.float32(0)
    waiting: bool = False  # the parameter has not received the latest update yet
    last_move: Any = np.float32(0)  # the last step's provisional move


@dataclasses.dataclass
class Leaf:
    """A parameter in its own dtype, and its channels, a list for each group.

    Channels are selected within a group: a stack entry, or a shard of an entry.
    """

    param: np.ndarray
    axis: int | None  # None for a resident leaf, which is a single channel, always selected
    stack: tuple[int, ...]
    k: int  # number of selected channels in each group
    mail_dtype: np.dtype  # of gradients sent to the host
    groups: list[list[Channel]]
    turns: list[int]  # each group's turn to close windows
    lr: np.float32 = np.float32(0)  # the last step's learning rate

    @property
    def channels(self) -> Iterator[Channel]:
        return (channel for group in self.groups for channel in group)

    @property
    def offloaded(self) -> bool:
        """Returns whether any channel is deferred."""
        return any(len(group) > self.k for group in self.groups)

    @property
    def selected(self) -> np.ndarray | None:
        """Returns the selected channels `[*stack, k]`, ascending, int32; None if resident."""
        if self.axis is None:
            return None
        # A stack entry's groups are consecutive, and so are their channels' numbers.
        flags = np.array([channel.selected for channel in self.channels])
        chosen = [np.flatnonzero(entry) for entry in flags.reshape(-1, self.param.shape[self.axis])]
        return np.array(chosen, np.int32).reshape(*self.stack, -1 if self.k else 0)

    def publish(self, channel: Channel) -> None:
        """Sets the parameter to the master's cast."""
        self.param[channel.where] = channel.master.astype(self.param.dtype)
        channel.waiting = False

    def move(self, channel: Channel) -> None:
        """Subtracts the last step's provisional move, and rounds."""
        new = self.param[channel.where].astype(np.float32) - channel.last_move
        self.param[channel.where] = new.astype(self.param.dtype)


def make_leaf(
    param: np.ndarray, axis: int | None, settings: Settings, weight_decay: float, shards: int
) -> Leaf:
    def channel(where: tuple[Any, ...], selected: bool) -> Channel:
        master = param[where].astype(np.float32)
        zeros = np.zeros_like(master)
        return Channel(where, weight_decay, selected, master, zeros, zeros, zeros, zeros)

    if axis is None:
        return Leaf(param, None, (), 1, param.dtype, [[channel((...,), True)]], [0])

    assert -param.ndim <= axis < param.ndim, (axis, param.shape)
    axis %= param.ndim
    # Neither axis of a matrix is a stack axis, whichever is the channel axis.
    stack = param.shape[: min(axis, max(param.ndim - 2, 0))]
    n, rest = divmod(param.shape[axis], shards)
    assert rest == 0, (param.shape, axis, shards)
    # Rounded first: 0.07 * 100 is 7.000000000000001 in binary, but 8 of 100 are not 7%.
    k = math.ceil(round(settings.topk_ratio * n, 6))
    between = (slice(None),) * (axis - len(stack))
    groups = [
        [channel((*entry, *between, shard * n + j, ...), j < k) for j in range(n)]
        for entry in np.ndindex(*stack)
        for shard in range(shards)
    ]
    mail_dtype = settings.transfer_dtype or param.dtype
    return Leaf(param, axis, stack, k, np.dtype(mail_dtype), groups, [0] * len(groups))


def weigh(leaf: Leaf, g: np.ndarray) -> tuple[float, float]:
    """Returns root mean squares of the gradient in deferred and selected channels."""
    both = []
    for selected in (False, True):
        side = [g[c.where].ravel() for c in leaf.channels if c.selected == selected]
        both.append(math.sqrt(np.mean(np.square(np.concatenate(side)), dtype=np.float64)))
    deferred, chosen = both
    return deferred, chosen


def close_window(channel: Channel, taken: int, lr: np.float32, s: Settings) -> None:
    """Makes the update of a window in which `taken` steps counted."""
    mean, squares = (x / np.float32(taken) for x in (channel.window_sum, channel.window_squares))
    if s.window_scaling:
        adamw(channel, mean, squares, lr, s, taken)
    else:  # as in the paper: one step with the mean
        adamw(channel, mean, mean * mean, lr, s)


def adamw(
    channel: Channel, g: Any, squares: Any, lr: np.float32, s: Settings, steps: int = 1
) -> None:
    """Moves master and moments by `steps` AdamW steps, all with the same gradient and squares.

    The parameter does not change.
    """
    b1, b2 = s.b1**steps, s.b2**steps
    lr = lr * np.float32(steps)
    channel.steps += steps
    n = np.float32(channel.steps)
    one = np.float32(1)
    # As in optax: `1 - b` at Python's precision, `1 - b**n` in float32. They differ in the fifth
    # digit for b2 = 0.999 and n = 1.
    channel.mu = np.float32(1 - b1) * g + np.float32(b1) * channel.mu
    channel.nu = np.float32(1 - b2) * squares + np.float32(b2) * channel.nu
    mu_hat = channel.mu / (one - np.float32(s.b1) ** n)
    nu_hat = channel.nu / (one - np.float32(s.b2) ** n)
    direction = mu_hat / (np.sqrt(nu_hat) + np.float32(s.eps))
    direction = direction + np.float32(channel.weight_decay) * channel.master
    channel.master = channel.master - lr * direction


def sums_of_squares(gradients: Sequence[np.ndarray]) -> np.ndarray:
    # If it overflows, the step is skipped.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([np.sum(g * g, dtype=np.float32) for g in gradients], np.float32)


def clipping_factor(squares: np.ndarray, max_grad_norm: float | None) -> np.float32:
    if max_grad_norm is None:
        return np.float32(1)
    # Finite leaves can have an infinite sum. As in optax, the factor is then zero.
    with np.errstate(over="ignore"):
        norm = np.sqrt(np.sum(squares, dtype=np.float32))
    limit = np.float32(max_grad_norm)
    return np.float32(1) if norm < limit else limit / norm


def compact_one(moment: Any, *, first: bool) -> np.ndarray:
    """Rounds a channel's moment to 8 bits, with a scale for each 32 neighbours."""
    round_block = _round_first if first else _round_second
    flat = np.array(moment, np.float32).reshape(-1)
    for i in range(0, flat.size, 32):
        flat[i : i + 32] = round_block(flat[i : i + 32])
    return flat.reshape(np.shape(moment))


def _round_first(m: np.ndarray) -> np.ndarray:
    # Codes c from -127 to 127 stand for c (|c| + 60) / 23749 times the scale.
    top, largest = np.float32(127 * 187), np.max(abs(m))
    if largest < 2.0**-60:
        return np.zeros_like(m)
    scale = largest.astype(ml_dtypes.bfloat16).astype(np.float32)
    c = np.rint(np.sqrt(abs(m) * (top / scale) + np.float32(900)) - np.float32(30))
    return np.copysign(c * (c + 60) * (1 / top) * scale, m) + 0


def _round_second(v: np.ndarray) -> np.ndarray:
    # Codes c from 0 to 255 stand for roots c / 255 times the scale; only zero has the code 0.
    root, top = np.sqrt(v), np.float32(255)
    scale = np.max(root)
    if scale < 2.0**-60:
        return np.zeros_like(v)
    c = np.maximum(np.rint(root * (top / scale)), (root > 0).astype(np.float32))
    return (c * (1 / top) * scale) ** 2
