"""Reads a compiled program's text: its computations, and their instructions.

XLA prints a scheduled module, so a computation's instructions are in the order of execution. The
text comes from `compiled.as_text()` with jax 0.10.2 to 0.12.0.1.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

#: XLA's mark for an array in host memory.
HOST = "S(5)"


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str  # as printed: "bf16[4,8]{1,0:S(5)}", or a tuple of shapes in parentheses
    opcode: str
    operands: tuple[str, ...]  # names; "name#1" is an element of a tuple (jax 0.11)
    argument: str  # the text in the parentheses: a parameter's number, a constant's value
    attributes: str  # the text after the parentheses
    root: bool

    @property
    def called(self) -> list[str]:
        """Returns the names of the computations that the instruction runs."""
        return [name for match in _CALLED.finditer(self.attributes) for name in _names(match[1])]


Computation = dict[str, Instruction]  # in order of execution


class Program(NamedTuple):
    """A module's computations by name."""

    computations: dict[str, Computation]
    entry: str

    def executed(self) -> Iterator[tuple[str, Computation]]:
        """Yields the entry, and the computations that run as part of it or its loops.

        A fusion is one operation, so its contents are not included.
        """
        waiting, known = [self.entry], {self.entry}
        while waiting:
            name = waiting.pop()
            yield name, self.computations[name]
            for x in self.computations[name].values():
                if x.opcode in _CONTROL:
                    new = {*x.called} - known
                    waiting += new
                    known |= new

    def shape_of(self, computation: str, operand: str) -> str:
        """Returns the shape of an operand, or of a tuple's element."""
        name, _, element = operand.partition("#")
        shape = self.computations[computation][name].shape
        return elements(shape)[int(element)] if element else shape


def parse(text: str) -> Program:
    """Returns the program that a module's text describes.

    Raises:
        ValueError: If the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = header["name"]
            computations[current] = {}
            entry = current if header["entry"] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            x = _instruction(match["name"], line[match.end() :], bool(match["root"]))
            computations[current][x.name] = x
    if entry is None:
        raise ValueError("The text has no ENTRY computation. Pass `compiled.as_text()`.")
    return Program(computations, entry)


def elements(shape: str) -> list[str]:
    """Returns the shapes in a tuple's shape."""
    parts, depth, start, inner = [], 0, 0, _COMMENT.sub("", shape[1:-1])
    for i, character in enumerate(inner):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(inner[start:i].strip())
            start = i + 1
    return [*parts, inner[start:].strip()]


def nbytes(shape: str) -> int:
    """Returns the bytes of an array with this shape."""
    return math.prod(dimensions(shape)) * _itemsize(shape)


def dimensions(shape: str) -> list[int]:
    match = _ARRAY.match(shape)
    if match is None:
        raise ValueError(f"{shape} is not an array. Pass an array's shape, such as f32[2,3].")
    return [int(n) for n in match["dims"].split(",") if n]


def strides(shape: str) -> list[int]:
    """Returns the bytes from one entry to the next along each axis, by the array's layout."""
    dims, match = dimensions(shape), _ARRAY.match(shape)
    assert match is not None
    minor = match["layout"]
    order = [int(n) for n in minor.split(",") if n] if minor else range(len(dims))[::-1]
    result, step = [0] * len(dims), _itemsize(shape)
    for axis in order:
        result[axis] = step
        step *= dims[axis]
    return result


def _names(text: str) -> list[str]:
    return _OPERAND.findall(text)


def _itemsize(shape: str) -> int:
    kind = shape.split("[")[0]
    bits = re.search(r"\d+", kind)
    return 1 if kind == "pred" or bits is None else max(int(bits[0]) // 8, 1)


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    close = _closing(rest, start)
    argument = _COMMENT.sub("", rest[start + 1 : close])
    operands = tuple(_names(argument))
    return Instruction(name, shape, rest[:start], operands, argument, rest[close + 1 :], root)


def _closing(text: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the parenthesis at `start`."""
    depth = 0
    for match in _BRACKET.finditer(text, start):
        depth += 1 if match[0] in "([{" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"A parenthesis is not closed in: {text[:200]}")


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \((?!.* = ).*\{$")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_CONTROL = ("while", "call", "conditional")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|(?:true|false|branch|called)_computations?)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)?)")
_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET = re.compile(r"[()\[\]{}]")
_ARRAY = re.compile(r"(?P<kind>\w+)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[\d,]*))?")
