"""Reads the sections of a DeepSpeed config, and checks each value when it is read."""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

AS_ABSENT = object()  # "auto" means the same as a key that is left out
NO_AUTO = object()  # "auto" is a value like others


class Section:
    """One JSON object of the config, with its place in it and the keys that were not read.

    Its readers raise a ValueError that names the key of a value that does not fit. `path` is such
    as "zero_optimization.zenflow", and empty for the whole config; `source` is the file, if any.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", source: str = ""):
        self._values, self._path, self.source = values, path, source
        self._unread = set(values)
        self._sections: dict[str, Section] = {}

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def error(self, key: str, expected: str, remedy: str = "") -> ValueError:
        """The error for the value of a key, to be raised."""
        got = json.dumps(self._values[key], default=repr) if key in self._values else "nothing"
        file = f"{self.source}: " if self.source else ""
        text = f"{file}`{self.name(key)}`: expected {expected}, got {got}. {remedy}"
        return ValueError(text.rstrip())

    def unread(self) -> tuple[str, ...]:
        """The names of all keys that were not read or not followed, in the order of the config."""
        names: list[str] = []
        for key in self._values:
            inner = self._sections[key].unread() if key in self._sections else ()
            names += [self.name(key)] if key in self._unread else inner
        return tuple(names)

    def not_followed(self, key: str) -> None:
        """Lists a key among the unread, although its value was read."""
        self._unread.add(key)

    def refuse_unread(self, *but: str) -> None:
        """Raises an error for a key that DeepSpeed does not have."""
        for key in self._values:
            if key in self._unread and key not in but:
                raise self.error(key, "a key that DeepSpeed has")

    def get(self, key: str) -> Any:
        """The value as it is, still unread; None if the key is absent."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.get(key) is not None

    def read(
        self,
        key: str,
        default: Any,
        expected: str,
        fits: Callable[[Any], bool],
        *,
        auto: Any = AS_ABSENT,
        remedy: str = "",
    ) -> Any:
        """The value of a key, `default` if it is absent, `auto` if it is "auto".

        `expected` says in the message for what `fits` asks, `remedy` ends it.
        """
        self._unread.discard(key)
        value = self._values.get(key, default)
        if isinstance(value, str) and value == "auto" and auto is not NO_AUTO:
            return default if auto is AS_ABSENT else auto
        if value is not default and not fits(value):
            raise self.error(key, expected, remedy)
        return value

    def section(self, key: str) -> "Section":
        """The section at a key; an empty one if the key is absent or null."""
        is_object = "an object ({...})", lambda x: isinstance(x, Mapping)
        values = self.read(key, None, *is_object, auto=NO_AUTO)
        self._sections[key] = Section(values or {}, self.name(key), self.source)
        return self._sections[key]

    def number(
        self, key: str, default: Any, *, auto: Any = AS_ABSENT, high: float = math.inf
    ) -> Any:
        """A float from 0 to `high`."""
        expected = "a number of at least 0" if high == math.inf else f"a number in [0, {high:g}]"
        value = self.read(key, default, expected, lambda x: is_number(x, 0, high), auto=auto)
        return float(value) if is_number(value) else value

    def integer(self, key: str, default: Any, *, low: int = 0, high: float | int = math.inf) -> Any:
        """An int from `low` to `high`; 4.0 is one, as it is to DeepSpeed."""
        bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
        expected = f"a whole number of {bounds}"
        value = self.read(key, default, expected, lambda x: is_number(x, low, high) and x == int(x))
        return int(value) if is_number(value) else value

    def flag(self, key: str, default: Any, *, auto: Any = AS_ABSENT) -> Any:
        return self.read(key, default, "true or false", lambda x: isinstance(x, bool), auto=auto)

    def word(self, key: str, words: list[str], default: Any, **options: Any) -> Any:
        """One of some words; `options` are those of `read`."""
        expected = " or ".join(f'"{word}"' for word in words)
        return self.read(key, default, expected, lambda x: x in words, **options)


def is_number(value: Any, low: float | int = -math.inf, high: float | int = math.inf) -> bool:
    """Whether a value is a finite number in [low, high]."""
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value) and low <= value <= high


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> Section:
    """The whole config, given as the path of a JSON file or as its content."""
    if isinstance(config, Mapping):
        return Section(config)
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"`config` must be a path or a mapping, got {config!r}.")
    source = os.fspath(config)
    with open(source, encoding="utf-8-sig") as file:
        try:
            values = json.load(file, object_pairs_hook=_unique, parse_constant=_refuse)
        except ValueError as error:
            raise ValueError(f"{source}: expected plain JSON, without comments: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{source}: expected an object ({{...}}), got {type(values).__name__}.")
    return Section(values, source=source)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"`{key}` is there twice")
        values[key] = value
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")
