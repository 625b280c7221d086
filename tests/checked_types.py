"""Whether calls are held to the annotations of the library, from one test to the next; and by what.

jaxtyping gives each annotated function to a checker when it is defined, and a function inside of
another one is defined whenever that is called: most of what a short call did was to write checks
that were there before. What jaxtyping gives is a function without a body, so that its checks follow
from its signature alone.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jaxtyping
from beartype import beartype

_checked: dict[Any, Callable] = {}


def check_types(wanted: bool) -> None:
    """Has the annotations of the library checked from now on, or not."""
    if wanted and jaxtyping.config.jaxtyping_disable:
        jax.clear_caches()  # else what was traced unchecked would not be traced again
    jaxtyping.config.update("jaxtyping_disable", not wanted)


def checked(function: Callable) -> Callable:
    """`beartype`, once for all functions of one name and signature. For jaxtyping alone."""
    key = (function.__module__, function.__qualname__, _signature(function))
    try:
        if key not in _checked:
            _checked[key] = beartype(function)
        return _checked[key]
    except TypeError:  # an annotation that cannot be hashed
        return beartype(function)


def _signature(function: Callable) -> tuple[Any, ...]:
    """Without the values of defaults, which nobody checks."""
    signature = inspect.signature(function)
    names = [
        (p.name, p.kind, p.annotation, p.default is p.empty) for p in signature.parameters.values()
    ]
    return (*names, signature.return_annotation)
