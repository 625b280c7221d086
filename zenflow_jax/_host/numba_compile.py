"""How Numba compiles the loops of `numba_loops.py`.

Each decorated function is kept on disk by the file that it stands in, and compiled again when that
file changes. A change of this one does not show: delete `__pycache__` after it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numba
from numba.extending import overload

# C code calls none of these functions, and Python none of those inside of others. Numba would write
# ways in for both, which was a third of the time to compile. Both are options of `numba.njit` that
# its manual leaves out; it refuses those that it does not know.
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_INNER: Any = {**_OPTIONS, "no_cpython_wrapper": True}


def compiled(function: Callable, options: dict[str, Any] = _OPTIONS) -> Any:
    """Serial machine code that releases the GIL, kept on disk where Numba finds a place for it."""
    function = inspect.unwrap(function)  # jaxtyping's import hook wraps it, in tests
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def inner(function: Callable) -> Any:
    """The same for compiled code to call; a call from Python ends the process."""
    return compiled(function, _INNER)


def by_type(place: int, wanted: Any, if_wanted: Callable, otherwise: Callable) -> Callable:
    """A function for compiled code that is one of two, by the type of its argument at a place."""

    def chosen(*args: Any) -> Any:
        raise NotImplementedError("compiled code only")

    pair = inspect.unwrap(if_wanted), inspect.unwrap(otherwise)
    # Not strict: the arguments' names need not be those of `args`.
    overload(chosen, jit_options=_INNER, strict=False)(
        lambda *args: pair[0] if args[place] == wanted else pair[1]
    )
    return chosen
