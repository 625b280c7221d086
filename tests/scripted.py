"""Gradients whose channels weigh what a script says, so that it is known what a rule must do."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.runs import Leaf, Leaves


class Weight(NamedTuple):
    """Of one step's gradient."""

    rest: float  # root mean square of all other channels; that of the important ones is 1
    first: int = 0  # the first important channel


def gradients(script: Callable[[int], Weight], topk_ratio: float) -> Callable[..., dict]:
    """As `runs.gradients`; as many channels are important as `topk_ratio` selects."""

    def make(leaves: Leaves, step: int, seed: int = 0, bad: bool = False) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((seed, step, 1))
        weight = script(step)
        return {leaf.name: _one(leaf, rng, weight, topk_ratio, bad) for leaf in leaves}

    return make


def _one(leaf: Leaf, rng, weight: Weight, topk_ratio: float, bad: bool) -> np.ndarray:
    # Any values but for their root mean squares: sums that cancel would leave nothing but rounding,
    # of which Adam makes a full step.
    values = rng.normal(size=leaf.shape)
    if leaf.axis is not None:
        n = leaf.shape[leaf.axis]
        k = int(np.ceil(round(topk_ratio * n, 6)))
        channels = np.moveaxis(values, leaf.axis, 0)  # a view
        important = np.isin(np.arange(n), (weight.first + np.arange(k)) % n)
        for chosen, size in ((important, 1.0), (~important, weight.rest)):
            # Each channel by itself, so that the important ones have the highest scores.
            squares = np.square(channels[chosen])
            rms = np.sqrt(squares.mean(axis=tuple(range(1, squares.ndim)), keepdims=True))
            channels[chosen] *= size / rms
    if bad and values.size:
        values.flat[0] = np.nan
    return np.asarray(values, np.dtype(leaf.dtype))


def ripe_after(steps: int) -> float:
    """`Weight.rest` with which windows of that weight are ripe after so many steps."""
    return 1.05 / steps
