"""Reads a DeepSpeed config by one table, which has the kind of value of each key that is read."""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """The values that a key may have, besides "auto"."""

    expected: str
    fits: Callable[[Any], bool]
    make: Callable[[Any], Any]


def number(low: int = 0, high: int | None = None, *, whole: bool = False) -> Kind:
    """A number from `low` to `high`; 4.0 is a whole one, as it is to DeepSpeed."""

    def fits(x: Any) -> bool:
        is_one = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
        bounded = is_one and low <= x and (high is None or x <= high)
        return bounded and (not whole or x == int(x))

    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Kind(f"a {'whole ' * whole}number {bounds}", fits, int if whole else float)


def pair(kind: Kind) -> Kind:
    def fits(x: Any) -> bool:
        return isinstance(x, list | tuple) and len(x) == 2 and all(map(kind.fits, x))

    return Kind(f"a list of two, each {kind.expected}", fits, lambda x: tuple(map(kind.make, x)))


def one_of(*values: str | bool) -> Kind:
    expected = " or ".join(map(json.dumps, values))
    return Kind(expected, lambda x: isinstance(x, str | bool) and x in values, lambda x: x)


#: Of each key its kind, or the table of its block. "*" has the other keys that DeepSpeed has; in a
#: block without it these may be any.
Table = Mapping[str, Any]


class Config:
    """A config as it is written; `listed` names the keys that are not read or not followed."""

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any]):
        self.source = ""
        if not isinstance(config, Mapping):
            if not isinstance(config, str | os.PathLike):
                raise TypeError(f"`config` must be a path or a mapping, got {config!r}.")
            self.source = os.fspath(config)
            config = _load(self.source)
        self.written, self.listed = config, []

    def read(self, table: Table, path: str = "") -> dict[str, Any]:
        """The values of the block at `path`, such as "optimizer.params"; of all by default.

        None is "auto"; a key that is left out, or null, is missing. An error names its key.
        """
        block, values = self._at(path), {}
        for key, x in block.items():
            name, kind = f"{path}.{key}".lstrip("."), table.get(key)
            if x is None:
                continue
            if isinstance(kind, Mapping):
                if not isinstance(x, Mapping):
                    raise self.error(name, "an object ({...})")
                values[key] = self.read(kind, name)
            elif kind is None:
                if "*" in table and key not in table["*"]:
                    raise self.error(name, "a key that DeepSpeed has")
                self.listed.append(name)
            elif x == "auto" and key != "type":
                values[key] = None
            elif not kind.fits(x):
                raise self.error(name, kind.expected)
            else:
                values[key] = kind.make(x)
        return values

    def error(self, name: str, expected: str, remedy: str = "") -> ValueError:
        x = self._at(name)
        got = "nothing" if x == {} else json.dumps(x, default=repr)
        file = f"{self.source}: " if self.source else ""
        return ValueError(f"{file}`{name}`: expected {expected}, got {got}. {remedy}".rstrip())

    def _at(self, path: str) -> Any:
        value: Any = self.written
        for key in filter(None, path.split(".")):
            value = value.get(key, {})
        return value


def get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value that was read; the default where it is left out or "auto"."""
    value = values.get(key)
    return default if value is None else value


def _load(path: str) -> Mapping[str, Any]:
    with open(path, encoding="utf-8-sig") as file:
        try:
            values = json.load(file, object_pairs_hook=_unique)
        except ValueError as error:
            raise ValueError(f"{path}: expected plain JSON, without comments: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object ({{...}}), got {type(values).__name__}.")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key is there twice among {', '.join(key for key, _ in pairs)}")
    return values
