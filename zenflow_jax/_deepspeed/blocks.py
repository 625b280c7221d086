"""A DeepSpeed config as blocks whose values are checked when they are taken.

Here is how the file is read, what a value may be, and what is said of the keys that nobody took.
"""

import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from zenflow_jax._deepspeed.keys import ON_BY_DEFAULT

ABSENT = object()  # null is a value


class Block:
    """One object of the config; it knows its place in it and which of its keys were taken.

    Every method that takes a value does so once, and raises a ValueError that names the key.

    Args:
        values: The object.
        path: Of its keys, such as "zero_optimization.zenflow"; empty for the whole config.
        source: The file, for messages; empty if it was none.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", source: str = ""):
        self._values = values
        self._path = path
        self.source = source
        self._left = dict.fromkeys(values)  # keys in order
        self._asked: dict[str, None] = {}

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def error(self, key: str, expected: str, remedy: str) -> ValueError:
        """What is wrong with the value of a key, to be raised."""
        got = json.dumps(self._values[key], default=repr) if key in self._values else "nothing"
        source = f"{self.source}: " if self.source else ""
        return ValueError(f"{source}`{self.name(key)}`: expected {expected}, got {got}. {remedy}")

    def left(self) -> list[str]:
        """The keys that nobody has taken."""
        return list(self._left)

    def taken(self) -> list[str]:
        """The keys that somebody has taken or asked for."""
        return list(self._asked)

    def peek(self, key: str) -> Any:
        """The value at a key, which is not taken by that; None if it is absent."""
        return self._values.get(key)

    def only(self, known: Iterable[str]) -> None:
        """Refuses keys that are neither taken nor known, where DeepSpeed does."""
        known = list(known)
        for key in self._left:
            if key not in known:
                near = meant(key, [*known, *self._asked])
                raise self.error(key, "only keys that DeepSpeed documents", near)

    def take(self, key: str, default: Any = ABSENT, auto: Any = ABSENT) -> Any:
        """The value of any kind.

        Args:
            key: Its key.
            default: What it is if the key is absent.
            auto: What it is if it says "auto"; otherwise that is a value like others.
        """
        self._left.pop(key, None)
        self._asked[key] = None
        value = self._values.get(key, default)
        return auto if auto is not ABSENT and _is_auto(value) else value

    def block(self, key: str) -> "Block | None":
        """The object at a key; None if the key is absent or null."""
        value = self.take(key, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object ({...})", "Write its keys in braces.")
        return Block(value, self.name(key), self.source)

    def number(
        self,
        key: str,
        default: Any = ABSENT,
        *,
        auto: Any = ABSENT,
        high: float = math.inf,
        open_ends: bool = False,
        remedy: str = "Correct the value.",
    ) -> Any:
        """A float from 0 to `high`; `open_ends` leaves both out."""
        value = self.take(key, default, auto)
        if value is default or value is auto:
            return value
        if not _is_number(value):
            raise self.error(key, "a number", _plain(value) or remedy)
        inside = 0 < value < high if open_ends else 0 <= value <= high
        if not (inside and math.isfinite(value)):
            bounds = f"(0, {high:g})" if open_ends else f"[0, {high:g}]"
            least = "a finite number of at least 0"
            raise self.error(key, least if high == math.inf else f"a number in {bounds}", remedy)
        return float(value)

    def pair(self, key: str, default: Any, *, auto: Any, remedy: str) -> Any:
        """Two floats, each in [0, 1)."""
        value = self.take(key, default, auto)
        if value is default or value is auto:
            return value
        fits = isinstance(value, list | tuple) and len(value) == 2
        if not fits or not all(_is_number(x) and 0 <= x < 1 for x in value):
            raise self.error(key, "a list of two numbers in [0, 1)", remedy)
        return tuple(map(float, value))

    def integer(
        self,
        key: str,
        default: Any = ABSENT,
        *,
        auto: Any = ABSENT,
        low: int = 0,
        high: int | None = None,
        remedy: str = "Correct the value.",
    ) -> Any:
        """An int between two bounds, both included; 4.0 is one, as it is to DeepSpeed."""
        value = self.take(key, default, auto)
        if value is default or value is auto:
            return value
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self.error(key, "a whole number", _plain(value) or remedy)
        if value < low or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"{low} to {high}"
            raise self.error(key, f"a whole number of {bounds}", remedy)
        return int(value)

    def flag(self, key: str, default: Any, *, auto: Any = ABSENT) -> Any:
        """A bool."""
        value = self.take(key, default, auto)
        if value is default or value is auto or isinstance(value, bool):
            return value
        raise self.error(key, "true or false", _plain(value) or "Correct the value.")

    def word(self, key: str, words: Iterable[str], default: Any, *, auto: Any = ABSENT) -> Any:
        """One of some words."""
        value = self.take(key, default, auto)
        if value is default or value is auto or value in (words := list(words)):
            return value
        raise self.error(key, " or ".join(f'"{word}"' for word in words), meant(value, words))


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> Block:
    """The whole config.

    Args:
        config: Path of a JSON file, or what is in one.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is no JSON, has a key twice, or is no object.
        TypeError: If `config` is something else.
    """
    if isinstance(config, Mapping):
        return Block(config)
    if not isinstance(config, str | os.PathLike):
        raise TypeError(
            "`config` must be the path of a DeepSpeed config file or a mapping like its content, "
            f"got {type(config).__name__}. Pass the file's path."
        )
    source = os.fspath(config)
    if source.lstrip().startswith("{"):
        raise ValueError(
            "`config` must be the path of a file or a mapping, got text of JSON. Pass "
            "`json.loads(text)`."
        )
    values = _parse(_text(source), source)
    if not isinstance(values, dict):
        raise ValueError(
            f"{source}: expected an object ({{...}}), got {type(values).__name__}. A DeepSpeed "
            "config is keys and values in braces: check that this is the file."
        )
    return Block(values, source=source)


def _text(source: str) -> str:
    try:
        with open(source, encoding="utf-8-sig") as file:
            return file.read()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{source}: expected a DeepSpeed config file, got no such file. Check the path (looked "
            f"from {os.getcwd()})."
        ) from None
    except IsADirectoryError:
        raise IsADirectoryError(
            f"{source}: expected a DeepSpeed config file, got a folder. Name the file in it, which "
            "is often called ds_config.json."
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source}: expected text in UTF-8, got other bytes: {error}. Check that this is the "
            "config file."
        ) from None


def _parse(text: str, source: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(
                f"{source}: expected every key once in an object, got `{twice[0]}` "
                f"{sum(key == twice[0] for key, _ in pairs)} times. Keep the one that you mean."
            )
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(
            f"{source}: expected finite numbers, got {constant}. JSON has none that is not: write "
            "one out."
        )

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source}: expected JSON, got what cannot be read at line {error.lineno}, column "
            f"{error.colno}: {error.msg}. Correct that place; comments, commas after the last "
            "value and keys without quotes, which DeepSpeed allows, are to be taken out."
        ) from None


class Report:
    """Collects what has no counterpart."""

    def __init__(self):
        self.reasons: dict[str, str] = {}

    def add(self, block: Block, key: str, reason: str) -> None:
        self.reasons[block.name(key)] = reason

    def rest(self, block: Block, reasons: Mapping[str, str]) -> None:
        """All keys of a block that were not taken; those without a reason are not known."""
        known = [*reasons, *block.taken()]
        for key in block.left():
            value = block.take(key)
            if key not in reasons:
                near = meant(key, known)
                near = f" {near}" if near.startswith("Did") else ""
                self.add(block, key, f"DeepSpeed documents no such key.{near}")
            elif not _is_off(value) or (value is False and key in ON_BY_DEFAULT):
                self.add(block, key, reasons[key])


def meant(word: Any, known: Iterable[str]) -> str:
    """What to do about a word that is not known."""
    known = list(known)
    near = difflib.get_close_matches(str(word), known, n=1)
    return f"Did you mean `{near[0]}`?" if near else f"Known are {', '.join(sorted(set(known)))}."


def _is_off(value: Any) -> bool:
    """Whether a feature's value asks for nothing."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value is None or value is False


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> str:
    """The remedy for a value of another type, if there is a better one than that of its range."""
    if _is_auto(value):
        return "Write a value: nothing here could fill it in."
    if isinstance(value, str):
        return "Take the quotes off."
    if isinstance(value, list | tuple):
        return "Write one value, which is for all parameters."
    return ""
