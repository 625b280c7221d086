"""Does a compiled program read the right slices of host memory, and does the copy engine read them?

XLA for GPUs annotates a slice inside a loop with its place in bytes, offset + iteration * stride.
Its runtime follows the annotation and ignores the index. In jax 0.10.2 and 0.11.0, some annotations
differ from the index (openxla/xla#46231), and in later versions those of pipelined copies do
(openxla/xla#45393). `traffic` evaluates the index of each host memory slice for each iteration, and
compares. A slice without an annotation belongs to a kernel: then multiprocessors, not a copy
engine, read host memory word by word.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.program_text import (
    HOST,
    Instruction,
    Program,
    dimensions,
    elements,
    nbytes,
    parse,
    strides,
)


class Traffic(NamedTuple):
    """How a program uses host memory."""

    right: int  # number of slices in loops whose walk matches their index
    wrong: list[str]  # slices with a different walk
    kernels: list[str]  # other operations on host memory: kernels, host compute
    to_host: int  # number of whole-array copies
    to_device: int


class _Loop(NamedTuple):
    """The values of a loop's counter, and its position in the loop's tuple."""

    element: int
    values: range


def traffic(text: str) -> Traffic:
    """Returns a compiled program's use of host memory, from its text.

    Raises:
        ValueError: If the text is not XLA's text for a scheduled module.
    """
    program = parse(text)
    # The entry runs once.
    loops: dict[str, _Loop | None] = {program.entry: _Loop(0, range(1))}
    loops |= {
        body: _loop(x)
        for _, computation in program.executed()
        for x in computation.values()
        if x.opcode == "while"
        for body in re.findall(r"body=%([\w.\-]+)", x.attributes)
    }
    right, wrong, kernels = 0, [], []
    copies = {True: 0, False: 0}
    for name, computation in program.executed():
        for x in computation.values():
            if x.opcode in _MOVES_NOTHING or not _touches_host(program, name, x):
                continue
            label = f"{name}: {x.opcode} {x.name} {x.shape[:80]}"
            if x.opcode == "copy-start":
                copies[HOST in elements(x.shape)[0]] += 1
                continue
            sliced = _copied_slice(program, x)
            if sliced is None:
                kernels.append(label)
                continue
            difference = _difference(program, name, x, sliced, loops.get(name))
            right += difference is None
            if difference is not None:
                wrong.append(f"{label}: {difference}")
    return Traffic(right, wrong, kernels, copies[True], copies[False])


#: Instructions that pass arrays on, or end another instruction. `AllocateBuffer` is handled below.
_MOVES_NOTHING = (
    *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional"),
    *("opt-barrier", "optimization-barrier", "after-all", "copy-done", "fusion-done"),
    *("async-done", "dynamic-slice-done", "dynamic-update-slice-done"),
)
_SLICES = ("dynamic-slice", "dynamic-update-slice")


def _touches_host(program: Program, computation: str, x: Instruction) -> bool:
    if 'custom_call_target="AllocateBuffer"' in x.attributes:
        return False
    return HOST in x.shape or any(HOST in program.shape_of(computation, o) for o in x.operands)


_Walk = tuple[int, int]  # offset and stride


def _copied_slice(program: Program, x: Instruction) -> tuple[str, Instruction, _Walk] | None:
    """Returns an operation's slice: its computation, the instruction and its walk."""
    for name in x.called:
        for inner in program.computations[name].values():
            if inner.opcode in _SLICES and (walk := _annotated_walk(inner.attributes)):
                return name, inner, walk
    return None


def _annotated_walk(attributes: str) -> _Walk | None:
    """Returns the walk in a slice's annotation.

    Raises:
        ValueError: If the annotation has an unknown form, whose numbers could mean anything.
    """
    _, key, text = attributes.partition('"dynamic_slice_config":')
    if not key:
        return None
    config, _ = json.JSONDecoder().raw_decode(text)
    fields, zeros = dict(config), [config.get("loop_index", "0")]  # the innermost loop
    fields.pop("loop_index", None)
    if "linear" in fields:  # since jax 0.12; the outer offset and stride are then unused
        fields, zeros = fields.pop("linear"), [*zeros, *fields.values()]
    known = {"byte_offset"} <= fields.keys() <= {"byte_offset", "byte_stride"}
    if not known or any(x != "0" for x in zeros):
        raise ValueError(f"The annotation {config} has an unknown form. Extend this reader.")
    return int(fields["byte_offset"]), int(fields.get("byte_stride", 0))


def _difference(
    program: Program,
    computation: str,
    caller: Instruction,
    sliced: tuple[str, Instruction, _Walk],
    loop: _Loop | None,
) -> str | None:
    """Describes how a walk differs from its slice's index; None if they agree."""
    where, x, (offset, stride) = sliced
    if loop is None:
        return "the trip count of its loop is unknown"
    first = 1 if x.opcode == "dynamic-slice" else 2
    whole = program.shape_of(where, x.operands[0])
    part = x.shape if first == 1 else program.shape_of(where, x.operands[1])
    walk = [offset + i * stride for i in range(len(loop.values))]
    places = []
    for counter in loop.values:
        state = {} if computation == program.entry else {0: {loop.element: counter}}
        outside = _Frame(program, computation, state)
        inside = outside.called(caller, where)
        index = [inside.value(operand) for operand in x.operands[first:]]
        if not all(isinstance(i, int) for i in index):
            return "its index is unknown"
        room = zip(index, dimensions(whole), dimensions(part), strides(whole), strict=True)
        places.append(sum(min(max(i, 0), n - k) * step for i, n, k, step in room))
    if places == walk:
        return None
    step = strides(whole)[0]
    return f"the index is {[n // step for n in places]}, the walk {[n // step for n in walk]}"


def _loop(x: Instruction) -> _Loop | None:
    """Returns a loop's counter, if XLA states its range."""

    def numbers(key: str, *fields: str) -> list[int] | None:
        text = re.search(rf'"{key}":(\{{[^}}]*\}})', x.attributes)
        return [int(json.loads(text[1])[field]) for field in fields] if text else None

    trips = numbers("known_trip_count", "n")
    element = numbers("known_induction_variable", "tuple_index")
    steps = numbers("known_init_step", "init", "step")
    if trips is None or element is None or steps is None:
        return None
    begin, step = steps
    return _Loop(element[0], range(begin, begin + trips[0] * step, step))


class _Frame:
    """The values of a computation's integers, for given parameter values.

    An integer is an int, a tuple is a dict of its known elements, a constant vector is a list, and
    an unknown value is None.
    """

    def __init__(self, program: Program, computation: str, parameters: dict[int, Any]):
        self._program, self._name, self._parameters = program, computation, parameters
        self._known: dict[str, Any] = {}

    def value(self, operand: str) -> Any:
        name, _, element = operand.partition("#")
        if name not in self._known:
            self._known[name] = None  # a cycle is unknown
            self._known[name] = self._evaluated(self._program.computations[self._name][name])
        value = self._known[name]
        return (value or {}).get(int(element)) if element else value

    def called(self, caller: Instruction, computation: str) -> "_Frame":
        arguments = dict(enumerate(map(self.value, caller.operands)))
        return _Frame(self._program, computation, arguments)

    def _evaluated(self, x: Instruction) -> Any:
        if x.opcode == "parameter":
            return self._parameters.get(int(x.argument))
        if x.opcode == "constant":
            return _constant(x.argument)
        if x.opcode == "tuple":
            return dict(enumerate(map(self.value, x.operands)))
        if x.opcode in ("fusion", "call"):
            (callee,) = x.called
            inside = self.called(x, callee)
            return inside.value(_root(self._program, callee))
        if x.opcode == "get-tuple-element":
            index = re.search(r"index=(\d+)", x.attributes)
            assert index is not None
            return (self.value(x.operands[0]) or {}).get(int(index[1]))
        values = list(map(self.value, x.operands))
        if any(value is None for value in values):
            return None
        if x.opcode == "compare":
            return int(_COMPARED[_direction(x)](*values))
        if x.opcode == "dynamic-slice":
            return _entry(x, *values)
        return _ARITHMETIC[x.opcode](*values) if x.opcode in _ARITHMETIC else None


_ARITHMETIC = {
    **dict.fromkeys(("copy", "bitcast", "convert", "reshape", "copy-done"), lambda a: a),
    "opt-barrier": lambda a: a,
    "negate": lambda a: -a,
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
    "clamp": lambda low, a, high: min(max(a, low), high),
    "select": lambda condition, a, b: a if condition else b,
}
_COMPARED = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}


def _direction(x: Instruction) -> str:
    match = re.search(r"direction=(\w+)", x.attributes)
    assert match is not None
    return match[1]


def _constant(text: str) -> Any:
    """Returns an integer, or a vector's list of integers."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"\{[-\d, ]+\}", text):
        return [int(n) for n in text[1:-1].split(",")]
    return {"true": 1, "false": 0}.get(text)


def _entry(x: Instruction, *values: Any) -> Any:
    """Returns the entry that a slice takes from a constant vector."""
    vector, *index = values
    single = isinstance(vector, list) and len(index) == 1 and dimensions(x.shape) == [1]
    return vector[min(max(index[0], 0), len(vector) - 1)] if single else None


def _root(program: Program, computation: str) -> str:
    return next(x.name for x in program.computations[computation].values() if x.root)


def large_copies(text: str, least_bytes: int) -> Iterator[str]:
    """Yields the copies on the device of at least `least_bytes`."""
    program = parse(text)
    for name, computation in program.executed():
        for x in computation.values():
            if x.opcode == "copy" and HOST not in x.shape and nbytes(x.shape) >= least_bytes:
                yield f"{name}: {x.name} {x.shape}"
