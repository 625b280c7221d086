"""Whether calls are held to the annotations of the library, and how many of each function's are.

jaxtyping's import hook puts `jaxtyping.jaxtyped` around each function that is defined, functions
inside of others included: those are defined anew whenever the outer one is called. To write and to
make these checks was a fifth of what short tests did, and most of them were made before, with
arguments of the same types: by a loop over steps, leaves or examples. So a test checks the first
calls of each function, and what is not called is not given checks.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jaxtyping
from beartype import beartype

#: Calls of one function that one test checks.
CHECKED_CALLS = 8

_jaxtyped = jaxtyping.jaxtyped
_calls: Counter[tuple[str, str]] = Counter()
_checked: dict[Any, Callable] = {}


def check_types(wanted: bool) -> None:
    """Has the annotations of the library checked from now on, or not; called before each test."""
    _calls.clear()
    if wanted and jaxtyping.config.jaxtyping_disable:
        jax.clear_caches()  # else what was traced unchecked would not be traced again
    jaxtyping.config.update("jaxtyping_disable", not wanted)


def limit_checks() -> None:
    """Puts `jaxtyped` in the place of jaxtyping's; before anything of the library is imported."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(decorated: Any = None, *, typechecker: Any) -> Any:
    """`jaxtyping.jaxtyped` for the first calls of a function in each test."""
    if decorated is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if not inspect.isfunction(decorated):
        return _jaxtyped(decorated, typechecker=typechecker)
    name = decorated.__module__, decorated.__qualname__
    made = None

    @functools.wraps(decorated)
    def limited(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        if jaxtyping.config.jaxtyping_disable or _calls[name] >= CHECKED_CALLS:
            return decorated(*args, **kwargs)
        _calls[name] += 1
        if made is None:
            made = _jaxtyped(decorated, typechecker=typechecker)
        return made(*args, **kwargs)

    return limited


def checked(function: Callable) -> Callable:
    """`beartype`, once for all functions of one name and signature. For jaxtyping alone.

    What jaxtyping gives is a function without a body, so that its checks follow from its signature.
    """
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
