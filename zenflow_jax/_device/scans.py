"""Evaluates a traced loss, replacing scans over stacked layers with another function.

The scans of jax, flax, haliax, haiku and Equinox leave the same primitive in a jaxpr. So a model
needs no rewriting: its loss is traced with plain arrays, and its jaxpr is evaluated with a `Stack`
in place of each stack. Any read except by a scan is an error. `evaluate` is for layers that stream;
`layerwise` has its own evaluations.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import jax
from jax.core import ShapedArray, eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    primitives,
)
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import PyTree

from zenflow_jax._device.streamed import Streamed
from zenflow_jax._spec.mesh import mesh_axes


@dataclasses.dataclass(frozen=True)
class Stack:
    """Stands for stacked layers."""

    index: int
    name: str
    change: Callable[[Any], Any] = lambda layer: layer  # such as casts, which move into the body

    def then(self, change: Callable[..., jax.Array], **options: object) -> "Stack":
        return dataclasses.replace(self, change=lambda x: change(self.change(x), **options))


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """A scan over stacks; its other inputs are values."""

    body: Any  # a jaxpr
    consts: Sequence[Any]
    carry: Sequence[Any]
    layers: Sequence[Any]
    reverse: bool
    unroll: int
    line: str

    def run_body(
        self, consts: Sequence[object], carry: PyTree, layer: Sequence[object]
    ) -> tuple[Any, Any]:
        """Returns the carry and the outputs of one layer."""
        pairs = zip(self.layers, layer, strict=True)
        layer = [x.change(value) if is_stack(x) else value for x, value in pairs]
        results = jaxpr_as_fun(self.body)(*consts, *carry, *layer)
        return results[: len(carry)], results[len(carry) :]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluates jaxprs, whose inputs may be a `Stack`."""

    chooser: str  # the function whose `where` chooses the stacks
    lines: dict[int, list[str]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    caller: str = ""  # the line of the call that the jaxpr belongs to
    checks = True  # whether a scan may read stacks only layer by layer

    def scan(self, scan: Scan) -> Sequence[Any]:
        """Returns the last carry and the stacked outputs of a scan over stacks."""
        raise NotImplementedError

    def other(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        """Returns the results of any other equation, which must not read a stack."""
        for x in filter(is_stack, inputs):
            raise ValueError(
                f"`{equation.primitive}` reads {x.name} at {self._line(equation)}, but only a scan "
                "along the first axis can read stacked layers. Stack layers in `params`, move "
                "operations on them into the scan's body, and do not put the scan inside a loop; "
                f"leave this leaf out with `{self.chooser}(where=...)`."
            )
        pairs = zip(equation.invars, inputs, strict=True)
        values = {variable: x for variable, x in pairs if not isinstance(variable, Literal)}
        names = ("",) * len(values), ("",) * len(equation.outvars)
        info = DebugInfo("equation", str(equation.primitive), *names)
        single = Jaxpr((), list(values), equation.outvars, [equation], equation.effects, info)
        return eval_jaxpr(single, (), *values.values())

    def rematerialized(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        """Returns the results of a function inside `jax.checkpoint`, without rematerialization."""
        return self.inside(equation).run(equation.params["jaxpr"], inputs)

    def inside(self, equation: JaxprEqn) -> "Evaluation":
        return dataclasses.replace(self, caller=self._line(equation))

    def run_whole(self, jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[object]) -> list[Any]:
        """Returns the results of a loss; rejects it unless it scans each stack exactly once."""
        results = self.run(jaxpr, inputs)
        for x in filter(is_stack, inputs):
            if not self.lines[x.index]:
                raise self._miscounted(x)
        for x in filter(is_stack, results):
            raise ValueError(f"The loss returns the stack {x.name}. Do not return stacked layers.")
        return results

    def run(self, jaxpr: Jaxpr | ClosedJaxpr, inputs: Sequence[object]) -> list[Any]:
        """Returns the results of a jaxpr."""
        # jax 0.10 keeps constants in a ClosedJaxpr, 0.11 in the jaxpr itself.
        consts: Sequence[object] = getattr(jaxpr, "consts", ())
        bare: Any = getattr(jaxpr, "jaxpr", jaxpr)
        variables = [*bare.constvars, *bare.invars]
        values = dict(zip(variables, [*consts, *inputs], strict=True))

        def read(x: Literal | Var) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for equation in _live(bare):
            inputs = [read(x) for x in equation.invars]
            run = self._with_stacks if any(map(is_stack, inputs)) else self.other
            values.update(zip(equation.outvars, run(equation, inputs), strict=True))
        return [read(x) for x in bare.outvars]

    def _with_stacks(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        params, stack = equation.params, next(filter(is_stack, inputs))
        match equation.primitive:
            case primitives.scan_p:
                return self._scanned(equation, inputs)
            case primitives.jit_p:  # drops the shardings and donations of its arguments
                return self.inside(equation).run(params["jaxpr"], inputs)
            case primitives.remat_p:
                return self.rematerialized(equation, inputs)
            case primitives.copy_p:
                return [stack]
            case primitives.convert_element_type_p if params["sharding"] is None:
                dtype = params["new_dtype"]
                return [stack.then(jax.lax.convert_element_type, new_dtype=dtype)]
            case primitives.sharding_constraint_p:
                if sharding := layer_sharding(params["sharding"]):
                    return [stack.then(jax.lax.with_sharding_constraint, shardings=sharding)]
        return self.other(equation, inputs)

    def _scanned(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        params, body = equation.params, equation.params["jaxpr"]
        # jax 0.10 and 0.11 count inputs differently, but only scanned arrays lose an axis.
        last = len(inputs) - _count_scanned(equation.invars, body.in_avals)
        carried = len(body.out_avals) - _count_scanned(equation.outvars, body.out_avals)
        first = last - carried
        if self.checks and any(map(is_stack, inputs[:last])):
            return self.other(equation, inputs)
        line, layers = self._line(equation), inputs[last:]
        for x in filter(is_stack, layers):
            self.lines[x.index].append(line)
            if len(self.lines[x.index]) > 1:
                raise self._miscounted(x)
        options = params["reverse"], params["unroll"], line
        return self.scan(Scan(body, inputs[:first], inputs[first:last], layers, *options))

    def _line(self, equation: JaxprEqn) -> str:
        """Returns the innermost line of the user's code that led to an equation."""
        # An equation inside a jitted function knows only the lines inside that function.
        lines = source_info_util.summarize(equation.source_info, num_frames=100).splitlines()
        lines = [x for x in lines if not x.startswith(str(Path(__file__).parents[1]))]
        users = [x for x in lines if "site-packages" not in x]
        return users[-1] if users else self.caller or "".join(lines[-1:]) or "an unknown line"

    def _miscounted(self, stack: Stack) -> ValueError:
        lines = self.lines[stack.index]
        places = f"scanned {len(lines)} times, at {' and '.join(dict.fromkeys(lines))}"
        return ValueError(
            f"{stack.name} is {places if lines else 'not read'}, but its layers must be scanned "
            "exactly once. Scan them once for all inputs, as one batch, or leave this leaf out "
            f"with `{self.chooser}(where=...)`."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Streaming(Evaluation):
    """Runs each scan with `scan_layers`."""

    scan_layers: Callable[..., tuple[Any, Any]]
    stacks: Mapping[int, Any]

    def scan(self, scan: Scan) -> Sequence[Any]:
        body, layers = partial(scan.run_body, scan.consts), self._values(scan.layers)
        options = {"reverse": scan.reverse, "unroll": scan.unroll}
        carry, outputs = self.scan_layers(body, scan.carry, layers, **options)
        return [*carry, *outputs]

    def rematerialized(self, equation: JaxprEqn, inputs: Sequence[object]) -> Sequence[Any]:
        results: Sequence[Any] = ()

        def run(*values: PyTree) -> Sequence[Any]:
            nonlocal results
            pairs = list(zip(inputs, values, strict=True))
            stacks = {x.index: value for x, value in pairs if is_stack(x)}
            arguments = [x if is_stack(x) else value for x, value in pairs]
            evaluation = dataclasses.replace(self.inside(equation), stacks=stacks)
            results = evaluation.run(equation.params["jaxpr"], arguments)
            return [x for x in results if not is_stack(x)]

        # If `prevent_cse` is a tuple, it has one entry per input, as `jax.checkpoint` needs.
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        arrays = iter(jax.checkpoint(run, **options)(*self._values(inputs)))
        return [x if is_stack(x) else next(arrays) for x in results]

    def _values(self, inputs: Sequence[object]) -> Sequence[Any]:
        return [self.stacks[x.index] if is_stack(x) else x for x in inputs]


def evaluate(
    function: Callable[[dict[int, jax.Array]], PyTree],
    stacks: Mapping[int, Streamed],
    names: Mapping[int, str],
    scan_layers: Callable[..., tuple[PyTree, PyTree]],
) -> Any:
    """Evaluates `function(stacks)`, using `scan_layers` for the scans over stacks.

    The function may capture other arrays.
    """
    weights = {i: x.weights for i, x in stacks.items()}
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(weights)
    evaluation = _Streaming("streaming.stream", scan_layers=scan_layers, stacks=stacks)
    results = evaluation.run_whole(traced, [Stack(i, names[i]) for i in sorted(stacks)])
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def is_stack(x: object) -> TypeGuard[Stack]:
    return isinstance(x, Stack)


def _live(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Returns the equations that have needed results or effects.

    Some libraries read the first layer only for its shape (haliax 1.3).
    """
    live: list[JaxprEqn] = []
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
            live.append(equation)
    return live[::-1]


def _count_scanned(outside: Sequence[Any], inside: Sequence[ShapedArray]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) > len(layer.shape) for x, layer in pairs)


def layer_sharding(sharding: object) -> NamedSharding | SingleDeviceSharding | None:
    """Returns the sharding of one layer, or None if a mesh divides the layers."""
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    if not isinstance(sharding, NamedSharding):
        return None
    divided, *spec = sharding.spec or (None,)
    (names,) = mesh_axes(PartitionSpec(divided), 1)
    if any(sharding.mesh.shape[name] > 1 for name in names):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
