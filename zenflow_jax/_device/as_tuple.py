"""Makes a dataclass behave as the named tuples do that optax's states are.

Users of optax unpack states, index them, and find what is in them by `optax.tree.get(state, name)`,
which looks into tuples with `_fields` and nowhere else. Trainers do so with whatever state they
have. A named tuple itself is no choice: all its fields are leaves, and here some are static.
"""

import dataclasses
import inspect
from typing import Any, ClassVar, TypeVar

_T = TypeVar("_T", bound="AsTuple")
_new = tuple.__new__


class AsTuple(tuple[Any, ...]):
    """A base class for frozen dataclasses whose static fields come last.

    As a tuple an instance has the other fields, in their order; static ones are attributes alone.
    Register the class with jax as a dataclass: jax looks for that before it looks for tuples.
    """

    #: The names of what is in the tuple; optax reads them.
    _fields: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        cls._fields = tuple(
            name
            for name in inspect.get_annotations(cls)
            if not getattr(vars(cls).get(name), "metadata", {}).get("static")
        )

    def __new__(cls: type[_T], *args: Any, **kwargs: Any) -> _T:
        if args:
            found = args[: len(cls._fields)]
            # What is missing, or too much, the dataclass's own `__init__` says.
            return _new(cls, (*found, *map(kwargs.get, cls._fields[len(found) :])))
        return _new(cls, map(kwargs.get, cls._fields))

    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # For `copy`, which would pass all that is in a tuple as one argument.
        return tuple(self), {}

    def _replace(self: _T, **changes: Any) -> _T:
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))
