"""Decides each leaf's learning rate.

A rate is a number, a scalar array, or a schedule of the step count. `learning_rate` is a rate for
all leaves, a function of (key path, leaf) that returns a rate, or a tree of rates. Leaves with the
same rate have the same number in their specs, and the step scalars contain each rate once.
"""

import dataclasses
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax

from zenflow_jax._spec.arguments import check_number, takes_leaf
from zenflow_jax._spec.leaf import LeafSpec, as_pure, plain_name
from zenflow_jax._spec.resolve import spread


def with_rate_numbers(
    specs: Sequence[LeafSpec], params: Any, learning_rate: Any
) -> tuple[LeafSpec, ...]:
    """Returns the specs with their rates numbered in the order of first use."""
    if not specs:  # `params` may be any placeholder
        return ()
    rates = _rates(params, learning_rate)
    numbers: dict[Any, int] = {}
    return tuple(
        dataclasses.replace(spec, rate=numbers.setdefault(_key(rate), len(numbers)))
        for spec, rate in zip(specs, rates, strict=True)
    )


def rates_by_number(specs: Sequence[LeafSpec], params: Any, learning_rate: Any) -> list[Any]:
    """Returns the rates in number order; leaves that share a number must share a rate."""
    if not specs:
        return [0.0]
    first: dict[int, tuple[str, Any]] = {}
    for spec, rate in zip(specs, _rates(params, learning_rate), strict=True):
        name, expected = first.setdefault(spec.rate, (spec.name, rate))
        if _key(rate) != _key(expected):
            raise ValueError(
                f"`learning_rate` is {expected} for {name} but {rate} for {spec.name}, which had "
                "the same rate in `tx.init`. Use the same rate for these leaves, or make a new "
                "state."
            )
    return [first[number][1] for number in sorted(first)]


def _rates(params: Any, learning_rate: Any) -> list[Any]:
    """Returns each leaf's rate."""
    if takes_leaf(learning_rate):
        paths = jax.tree_util.tree_leaves_with_path(as_pure(params))
        rates = [learning_rate(path, leaf) for path, leaf in paths]
        for (path, _), rate in zip(paths, rates, strict=True):
            check_number("learning_rate", rate, f" for {plain_name(path)}")
        return rates
    if jax.tree_util.all_leaves([learning_rate]):  # a rate for all leaves
        return [learning_rate] * len(jax.tree.leaves(params))
    return spread("learning_rate", learning_rate, params, "rates")


def _key(rate: Any) -> Any:
    """Returns a key that is equal for equal rates; arrays have no values under jit."""
    return float(rate) if isinstance(rate, Real) else (id(rate),)
