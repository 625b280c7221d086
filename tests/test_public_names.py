"""The public API is small and documented, and takes the leading arguments of `optax.adamw`."""

import dataclasses
import inspect
import re

import optax
import pytest

import zenflow_jax
from zenflow_jax import attach, streaming


def test_the_leading_arguments_and_defaults_are_those_of_adamw():
    arguments = inspect.signature(zenflow_jax.zenflow).parameters
    adamw = inspect.signature(optax.adamw).parameters
    positional = [p.name for p in arguments.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    # adamw's next argument is `eps_root`, which must not receive a number meant for `weight_decay`.
    assert positional == list(adamw)[:4] == ["learning_rate", "b1", "b2", "eps"]
    shared = [name for name in adamw if name in arguments]
    assert shared == [*positional, "weight_decay", "mask"]
    assert all(arguments[name].default == adamw[name].default for name in shared)


PUBLIC = {name: getattr(zenflow_jax, name) for name in zenflow_jax.__all__}
PUBLIC |= {"attach": attach.attach}
PUBLIC |= {"stream": streaming.stream, "scan_layers": streaming.scan_layers}
PUBLIC |= {"check_device": streaming.check_device, "stream_scans": streaming.stream_scans}
CALLS = [name for name, x in PUBLIC.items() if inspect.isroutine(x)]
CLASSES = [name for name, x in PUBLIC.items() if inspect.isclass(x)]


def test_public_names_are_few_and_match_dir():
    modules = {"attach", "deepspeed", "layerwise", "planning", "streaming"}
    assert {n for n in dir(zenflow_jax) if n[0] != "_"} == {*zenflow_jax.__all__, *modules}
    assert len(zenflow_jax.__all__) <= 20
    assert all(inspect.ismodule(getattr(zenflow_jax, name)) for name in modules)
    with pytest.raises(AttributeError, match="no attribute 'plan'"):
        _ = zenflow_jax.plan


def section(doc, title):
    """Returns the names that a Google section of a docstring explains."""
    match = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return re.findall(r"^    (\w+):", match[1], re.MULTILINE) if match else []


@pytest.mark.parametrize("name", [*CALLS, *CLASSES])
def test_every_public_name_has_an_example_and_explains_its_arguments_or_attributes(name):
    public = PUBLIC[name]
    doc = inspect.getdoc(public) or ""
    assert ">>> " in doc
    if dataclasses.is_dataclass(public):
        assert section(doc, "Attributes") == [f.name for f in dataclasses.fields(public)]
    elif inspect.isclass(public) and issubclass(public, tuple):
        assert section(doc, "Attributes") == list(public._fields)
    else:
        signature = inspect.signature(public)
        assert section(doc, "Args") == list(signature.parameters)
        if inspect.isroutine(public) and signature.return_annotation is not None:
            assert re.search(r"^Returns:\n    \S", doc, re.MULTILINE)
