"""What a step takes of a device, by its trace alone: work, and the memory of its temporaries.

No compiler is asked. The trace is gone through as a GPU's compiler would: chains of elementwise
operations become part of whatever reads them and are kept nowhere, matrix products read and write
memory, and what only makes memory free runs as soon as it can. How far that is from what XLA makes
of a step is in `benchmarks/LOG.md`.

A *buffer* is an array that is in the device's memory, an *operation* a kernel that reads buffers
and writes others.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var


class Traced(NamedTuple):
    """What one device does and needs in a step."""

    argument_bytes: int  # of all that the step reads
    result_bytes: int  # of results that cannot take the place of an argument that is given away
    temporary_bytes: int  # at the peak, beside both
    gradient_bytes: int  # of these, what has the shape of a parameter
    moved_bytes: float  # between the device's memory and its cores
    flops: float  # of matrix products and convolutions

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.result_bytes + self.temporary_bytes


def of_step(
    step: ClosedJaxpr, given_away: Sequence[bool], parameters: Collection[tuple[int, ...]] = ()
) -> Traced:
    """What a step takes.

    Args:
        step: As `jax.jit(step).trace(...).jaxpr` has it. Of a loop whose number of rounds is not
            known, one is counted.
        given_away: Whether each of its arguments is donated.
        parameters: The shapes of what is trained.
    """
    program = _Program()
    arguments = step.jaxpr.invars
    given = [program.argument(x.aval) for x in arguments]
    results = program.read(step.jaxpr, given)
    for x in results:
        # They have a place of their own, or that of an argument.
        program.materialized(x).nbytes = 0
    free = Counter(
        (x.aval.shape, x.aval.dtype) for x, away in zip(arguments, given_away, strict=True) if away
    )
    more = 0
    for x, value in zip(step.jaxpr.outvars, results, strict=True):
        kind = (getattr(x.aval, "shape", ()), getattr(x.aval, "dtype", None))
        if free[kind]:
            free[kind] -= 1
        elif not value.away:
            more += _nbytes(x.aval)
    read = _read_in(step.jaxpr)
    intervals = program.intervals()
    temporaries, moment = highest(intervals)
    matrices = {shape for shape in parameters if len(shape) > 1}
    there = (x for x in intervals if x.first <= moment <= x.last and x.shape in matrices)
    return Traced(
        argument_bytes=sum(_nbytes(x.aval) for x in arguments if x in read),
        result_bytes=more,
        temporary_bytes=temporaries,
        gradient_bytes=sum(x.nbytes for x in there),
        moved_bytes=program.moved,
        flops=program.flops,
    )


def highest(intervals: Sequence["Interval"]) -> tuple[int, int]:
    """The most bytes that are in use at once, and when they are."""
    changes: Counter[int] = Counter()
    for one in intervals:
        changes[one.first] += one.nbytes
        changes[one.last + 1] -= one.nbytes
    moments = sorted(changes)
    in_use = itertools.accumulate(changes[moment] for moment in moments)
    return max(zip(in_use, moments, strict=True), default=(0, 0))


@dataclasses.dataclass(eq=False)
class Interval:
    """When a piece of memory is in use."""

    nbytes: int
    first: int
    last: int
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class _Buffer:
    """An array in memory."""

    nbytes: int
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class _Value:
    """What a variable of the trace stands for: a buffer, or what is computed where it is read."""

    nbytes: int
    roots: frozenset[_Buffer]  # that have to be there to compute it
    buffer: _Buffer | None  # the one that has it, however its axes lie; None if none does
    away: bool = False  # whether it is in the host's memory
    shape: tuple[int, ...] = ()


@dataclasses.dataclass(eq=False)
class _Operation:
    reads: frozenset[_Buffer]
    writes: tuple[_Buffer, ...]
    product: bool = False
    in_place: int = 0  # so many of what it writes may take the place of what it reads
    inside: tuple["_Program", ...] = ()  # the body of a loop, the branches of a condition


class _Program:
    """The operations of a trace."""

    def __init__(self):
        self.flops = self.moved = 0.0
        self.operations: list[_Operation] = []

    def buffer(self, nbytes: int, away: bool = False) -> _Value:
        made = _Buffer(0 if away else nbytes)
        return _Value(nbytes, frozenset((made,)), made, away)

    def argument(self, aval: Any) -> _Value:
        """What is there from the beginning, and counted elsewhere."""
        return dataclasses.replace(self.buffer(0), nbytes=_nbytes(aval), shape=aval.shape)

    def read(self, jaxpr: Jaxpr, arguments: Sequence[_Value]) -> list[_Value]:
        """Adds the operations of a trace; its results."""
        values: dict[Var, _Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        values |= {var: self.buffer(0) for var in jaxpr.constvars}  # small, and always there
        for equation in jaxpr.eqns:
            inputs = [_nothing() if isinstance(x, Literal) else values[x] for x in equation.invars]
            results = self._equation(equation, inputs)
            for var, value in zip(equation.outvars, results, strict=True):
                values[var] = value
                value.shape = getattr(var.aval, "shape", ())
                if value.buffer is not None and not value.buffer.shape:
                    value.buffer.shape = value.shape
        return [_nothing() if isinstance(x, Literal) else values[x] for x in jaxpr.outvars]

    def materialized(self, value: _Value) -> _Buffer:
        """The buffer that has a value."""
        if value.buffer is None:
            made = _Buffer(value.nbytes, value.shape)
            self.moved += 2 * value.nbytes  # written, and read again
            self.operations.append(_Operation(value.roots, (made,)))
            value.buffer, value.roots = made, frozenset((made,))
        return value.buffer

    def _equation(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        name = equation.primitive.name
        sizes = [_nbytes(x.aval) for x in equation.outvars]
        if name == "scan":
            return self._scan(equation, inputs, sizes)
        if name == "while":
            start = equation.params["cond_nconsts"]
            body = self._inner(equation.params["body_jaxpr"], inputs[start:])
            return self._operation(inputs, sizes, len(sizes), (body,))
        if name == "cond":
            branches = [self._inner(b, inputs[1:]) for b in equation.params["branches"]]
            return self._operation(inputs, sizes, 0, tuple(branches))
        inner = next((equation.params[k] for k in _INNER if k in equation.params), None)
        if inner is not None:
            jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            return self.read(jaxpr, inputs)
        if name in _PRODUCTS:
            self.flops += _flops(equation)
            self.moved += sum(sizes) + sum(x.nbytes for x in inputs)
            results = self._operation(self._in_memory(inputs), sizes)
            self.operations[-1].product = True
            return results
        if name == "device_put":
            targets = equation.params["devices"]
            return [
                self._operation(self._in_memory([x]), [size], away=_is_host(target))[0]
                for x, size, target in zip(inputs, sizes, targets, strict=True)
            ]
        if name == "optimization_barrier" or name in _SAME:
            return [
                _Value(size, x.roots, x.buffer, x.away)
                for x, size in zip(inputs, sizes, strict=False)
            ]
        # What is added into zeros is added into whatever they are added to afterwards.
        if name in _OPAQUE and not (name in _SCATTERS and not inputs[0].roots):
            return self._operation(self._in_memory(inputs), sizes, 1)
        if name in _REDUCTIONS:
            return self._operation(inputs, sizes)
        roots = frozenset().union(*(x.roots for x in inputs))
        return [_Value(size, roots, None) for size in sizes]

    def _operation(
        self,
        inputs: Sequence[_Value],
        sizes: Sequence[int],
        in_place: int = 0,
        inside: "tuple[_Program, ...]" = (),
        away: bool = False,
    ) -> list[_Value]:
        reads = frozenset().union(*(x.roots for x in inputs))
        results = [self.buffer(size, away) for size in sizes]
        written = tuple(x.buffer for x in results if x.buffer)
        self.operations.append(_Operation(reads, written, in_place=in_place, inside=inside))
        return results

    def _in_memory(self, values: Sequence[_Value]) -> Sequence[_Value]:
        """The values, for one who reads memory alone."""
        for value in values:
            self.materialized(value)
        return values

    def _scan(self, equation: Any, inputs: list[_Value], sizes: list[int]) -> list[_Value]:
        self._in_memory(inputs)
        inner, before = equation.params["jaxpr"], (self.flops, self.moved)
        # What is carried comes first, and has no axis of rounds. (jax 0.10 says how many these are,
        # and 0.11 does not.)
        pairs = zip(equation.outvars, inner.jaxpr.outvars, strict=True)
        carried = sum(len(x.aval.shape) == len(y.aval.shape) for x, y in pairs)
        body = self._inner(inner, inputs, carried)
        rounds = equation.params["length"]
        self.flops, self.moved = before[0] + rounds * body.flops, before[1] + rounds * body.moved
        return self._operation(inputs, sizes, carried, (body,))

    def _inner(
        self, inner: ClosedJaxpr, arguments: Sequence[_Value], carried: int | None = None
    ) -> "_Program":
        """A body, whose arguments and results are those of the loop around it."""
        body = _Program()
        given = [
            dataclasses.replace(body.buffer(0), nbytes=_nbytes(x.aval)) for x in inner.jaxpr.invars
        ]
        results = body.read(inner.jaxpr, given)
        for i, value in enumerate(results):
            # A round's part of what is stacked is written where it belongs; so is what is carried
            # on, unless others read the old one when it is there.
            if value.buffer is None or carried is None or i >= carried:
                body.materialized(value).nbytes = 0
        self.flops += body.flops
        self.moved += body.moved
        return body

    def _around_loops(
        self, readers: Mapping[_Buffer, list[_Operation]]
    ) -> tuple[set[_Operation], set[_Operation]]:
        """What leads to loops; and products that do not, with all that needs them."""
        loops: set[_Operation] = set()
        for op in reversed(self.operations):
            if op.inside or any(x in loops for b in op.writes for x in readers.get(b, ())):
                loops.add(op)
        late: set[_Operation] = set()
        made: set[_Buffer] = set()
        for op in self.operations:
            if loops and ((op.product and op not in loops) or not made.isdisjoint(op.reads)):
                late.add(op)
                made.update(op.writes)
        return loops, late

    def intervals(self, now: int = 0, length: list[int] | None = None) -> list[Interval]:
        """When each buffer is in use, in an order in which the operations may run.

        Each runs when its turn comes in the trace, unless it is ready and makes memory free: then
        it runs before.
        """
        readers: dict[_Buffer, list[_Operation]] = {}
        for operation in self.operations:
            for buffer in operation.reads:
                readers.setdefault(buffer, []).append(operation)
        left = {buffer: len(found) for buffer, found in readers.items()}
        written = {buffer for op in self.operations for buffer in op.writes}
        waits = {op: sum(b in written for b in op.reads) for op in self.operations}
        done: set[_Operation] = set()
        there: dict[_Buffer, Interval] = {}
        found: list[Interval] = []

        # XLA puts products that no loop waits for off until the loops are done.
        loops, late = self._around_loops(readers)

        def run(op: _Operation) -> None:
            nonlocal now
            done.add(op)
            start = now = now + 1
            for inner in op.inside:
                took: list[int] = []
                inside = inner.intervals(now, took)
                found.extend(inside)
                now = took[0]
            dying = [b for b in op.reads if left[b] == 1 and b in there]
            for i, buffer in enumerate(op.writes):
                heir = None
                if i < op.in_place:
                    heir = next((b for b in dying if b.nbytes == buffer.nbytes), None)
                if heir is not None and buffer.nbytes:
                    dying.remove(heir)
                    there[buffer] = there[heir]
                    there[buffer].last = now
                else:
                    # What a loop writes is there from its beginning.
                    there[buffer] = Interval(buffer.nbytes, start, now, buffer.shape)
                    if buffer.nbytes:
                        found.append(there[buffer])
            for buffer in op.reads:
                left[buffer] -= 1
                if buffer in there:
                    there[buffer].last = max(there[buffer].last, now)
            for buffer in op.writes:
                for reader in readers.get(buffer, ()):
                    waits[reader] -= 1

        def pays(buffer: _Buffer) -> list[_Operation]:
            """The operations that read it and may run now, if they free more than they take."""
            mine = readers.get(buffer, ())
            if len(mine) > _FEW:  # what many read stays for long
                return []
            ready = [x for x in mine if x not in done]
            if not ready or any(waits[x] or (loops and x in late) for x in ready):
                return []
            frees = sum(
                b.nbytes
                for b in {b for x in ready for b in x.reads}
                if b in written and left[b] == sum(b in x.reads for x in ready)
            )
            takes = sum(b.nbytes for x in ready for b in x.writes if left.get(b))
            return ready if takes <= frees else []

        for operation in sorted(self.operations, key=late.__contains__):
            waiting = [operation]
            while waiting:
                op = waiting.pop()
                if op in done:
                    continue
                run(op)
                loops.discard(op)
                for buffer in (*op.writes, *op.reads):
                    waiting += pays(buffer)[::-1]
        if length is not None:
            length.append(now)
        return found


def _nothing() -> _Value:
    return _Value(0, frozenset(), None)


def _is_host(target: Any) -> bool:
    return "host" in str(getattr(target, "memory_kind", None) or target).lower()


def _read_in(jaxpr: Jaxpr) -> set[Var]:
    """What anything in the trace reads: jit drops the others."""
    found = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, Var)}
    return found | {x for x in jaxpr.outvars if isinstance(x, Var)}


#: Readers of a gradient: its square, its selected channels, its mail, and some more.
_FEW = 16
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_PRODUCTS = frozenset(("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"))
#: The same bytes, however they are read.
_SAME = frozenset(
    "reshape squeeze expand_dims transpose copy copy_p "
    "sharding_constraint stop_gradient layout_constraint".split()
)
#: What reads and writes memory, and does not become part of other operations.
_SCATTERS = frozenset(("scatter-add", "scatter_add"))
_OPAQUE = _SCATTERS | frozenset(
    "sort top_k approx_top_k scatter scatter-mul scatter_mul cumsum cumprod cummax "
    " cumlogsumexp custom_call ffi_call triton_kernel_call pallas_call fft cholesky "
    "triangular_solve all_gather psum psum_scatter reduce_scatter all_to_all ppermute "
    "dynamic_update_slice".split()
)
#: What reads whatever it is made of, and writes its result.
_REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin gather "
    "reduce".split()
)


def _nbytes(aval: Any) -> int:
    shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    try:
        return math.prod(shape) * np.dtype(dtype).itemsize
    except TypeError:  # of keys
        return math.prod(shape) * 8


def _flops(equation: Any) -> float:
    left, right = (x.aval.shape for x in equation.invars[:2])
    out = math.prod(equation.outvars[0].aval.shape)
    if equation.primitive.name == "conv_general_dilated":
        spec = equation.params["dimension_numbers"].rhs_spec
        return 2.0 * out * math.prod(right) / right[spec[0]]
    dims = equation.params["dimension_numbers"]
    if equation.primitive.name != "dot_general":
        return 2.0 * out * left[-1]
    (contracted, _), _ = dims
    return 2.0 * out * math.prod(left[i] for i in contracted)
