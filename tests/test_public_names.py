"""The public API is small, and takes the leading arguments of `optax.adamw`."""

import inspect

import optax
import pytest

import zenflow_jax


def test_the_leading_arguments_and_defaults_are_those_of_adamw():
    arguments = inspect.signature(zenflow_jax.zenflow).parameters
    adamw = inspect.signature(optax.adamw).parameters
    positional = [p.name for p in arguments.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # adamw's next argument is `eps_root`, which must not receive a number meant for `weight_decay`.
    assert positional == list(adamw)[:4] == ["learning_rate", "b1", "b2", "eps"]
    shared = [name for name in adamw if name in arguments]
    assert shared == [*positional, "weight_decay", "mask"]
    assert all(arguments[name].default == adamw[name].default for name in shared)


def test_public_names_are_few_and_match_dir():
    modules = {"attach", "deepspeed", "layerwise", "planning", "streaming"}
    assert {n for n in dir(zenflow_jax) if n[0] != "_"} == {*zenflow_jax.__all__, *modules}
    assert len(zenflow_jax.__all__) <= 20
    assert all(inspect.ismodule(getattr(zenflow_jax, name)) for name in modules)
    with pytest.raises(AttributeError, match="no attribute 'plan'"):
        _ = zenflow_jax.plan
