"""Reads a DeepSpeed config using a table of allowed values for each key."""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A key's allowed values, besides "auto"."""

    expected: str
    fits: Callable[[Any], bool]
    make: Callable[[Any], Any]


def number(low: int = 0, high: int | None = None, *, whole: bool = False) -> Kind:
    """Returns the kind for numbers from `low` to `high`; 4.0 is whole, as in DeepSpeed."""

    def fits(x: Any) -> bool:
        is_number = isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)
        bounded = is_number and low <= x and (high is None or x <= high)
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


#: Each key's kind, or its block's table. "*" lists DeepSpeed's other keys; a block without "*" may
#: contain any other keys.
Table = Mapping[str, Any]


class Config:
    """A config as written; `listed` contains the keys that are not read or not applied."""

    def __init__(self, config: str | os.PathLike[str] | Mapping[str, Any]):
        self.source = ""
        if not isinstance(config, Mapping):
            if not isinstance(config, str | os.PathLike):
                raise TypeError(f"`config` must be a path or a mapping, got {config!r}.")
            self.source = os.fspath(config)
            config = _load(self.source)
        self.written, self.listed = config, []

    def read(self, table: Table, path: str = "") -> dict[str, Any]:
        """Returns the values in the block at `path`, such as "optimizer.params", or in all blocks.

        None stands for "auto"; a key that is left out or null is missing. Errors name their key.
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
                    raise ValueError(f"{self._prefix}`{name}` is not a DeepSpeed key. Remove it.")
                self.listed.append(name)
            elif x == "auto" and key != "type":
                values[key] = None
            elif not kind.fits(x):
                raise self.error(name, kind.expected)
            else:
                values[key] = kind.make(x)
        return values

    def error(self, name: str, expected: str, remedy: str = "") -> ValueError:
        value = self._at(name)
        text = "missing" if value == {} else json.dumps(value, default=repr)
        return ValueError(f"{self._prefix}`{name}` is {text}. Use {expected}. {remedy}".rstrip())

    @property
    def _prefix(self) -> str:
        return f"{self.source}: " if self.source else ""

    def _at(self, path: str) -> Any:
        value: Any = self.written
        for key in filter(None, path.split(".")):
            value = value.get(key, {})
        return value


def get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """Returns a value that was read, or the default if it is left out or "auto"."""
    value = values.get(key)
    return default if value is None else value


def _load(path: str) -> Mapping[str, Any]:
    with open(path, encoding="utf-8-sig") as file:
        try:
            values = json.load(file, object_pairs_hook=_unique)
        except ValueError as error:
            raise ValueError(f"{path}: The file is not plain JSON (comments?): {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: The file is a {type(values).__name__}, not an object.")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a key is repeated among {', '.join(key for key, _ in pairs)}")
    return values
