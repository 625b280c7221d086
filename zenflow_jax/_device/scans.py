"""Evaluates a traced loss, in which scans over streamed layers run as another function.

The scans of jax, flax, haliax, haiku and Equinox leave the same primitive in a jaxpr. So a model
needs no rewriting: its loss is traced with plain arrays, and its jaxpr is evaluated with a `_Stack`
in the place of each stack. Any read except by a scan is an error.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import DebugInfo, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, primitives
from jax.sharding import NamedSharding, PartitionSpec

from zenflow_jax._device.streamed import Streamed


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Stands for streamed layers."""

    index: int
    name: str
    change: Callable[[Any], Any] = lambda layer: layer  # such as casts, which move into the body

    def then(self, change: Callable[..., Any], **options: Any) -> "_Stack":
        return dataclasses.replace(self, change=lambda x: change(self.change(x), **options))


def evaluate(
    function: Callable[[dict[int, Any]], Any],
    stacks: Mapping[int, Streamed],
    names: Mapping[int, str],
    scan: Callable[..., tuple[Any, Any]],
) -> Any:
    """Returns `function(stacks)`, in which `scan` runs the scans over stacks.

    The function may capture other arrays. `scan` takes the arguments of `scan_layers`.
    """
    weights = {i: x.weights for i, x in stacks.items()}
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(weights)
    evaluation = _Evaluation(scan, stacks, {i: [] for i in stacks})
    results = evaluation.run(traced, [_Stack(i, names[i]) for i in sorted(stacks)])
    for i, lines in evaluation.lines.items():
        if len(lines) != 1:
            places = f"scanned {len(lines)} times, at {' and '.join(dict.fromkeys(lines))}"
            raise ValueError(
                f"{names[i]} is {places if lines else 'not read'}, but a step must scan layers "
                "that stream exactly once. Scan them once for all inputs, as one batch, or leave "
                "this leaf out with `streaming.stream(where=...)`."
            )
    for x in filter(_is_stack, results):
        raise ValueError(f"The loss returns {x.name}, which streams. Return no streamed weights.")
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs, whose inputs may be a `_Stack`."""

    scan: Callable[..., tuple[Any, Any]]
    stacks: Mapping[int, Any]
    lines: Mapping[int, list[str]]  # of the scans over each stack
    caller: str = ""  # line of the call that the jaxpr belongs to

    def run(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr."""
        # jax 0.10 keeps constants in a ClosedJaxpr, 0.11 in the jaxpr itself.
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, [*consts, *inputs], strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for equation in _live(jaxpr):
            inputs = [read(x) for x in equation.invars]
            run = self._with_stacks if any(map(_is_stack, inputs)) else _without_stacks
            values.update(zip(equation.outvars, run(equation, inputs), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _with_stacks(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        params, stack = equation.params, inputs[0]
        match equation.primitive:
            case primitives.scan_p:
                return self._scanned(equation, inputs)
            case primitives.jit_p:  # drops the shardings and donations of its arguments
                return self._inside(equation).run(params["jaxpr"], inputs)
            case primitives.remat_p:
                return self._rematerialized(equation, inputs)
            case primitives.copy_p:
                return [stack]
            case primitives.convert_element_type_p if params["sharding"] is None:
                dtype = params["new_dtype"]
                return [stack.then(jax.lax.convert_element_type, new_dtype=dtype)]
            case primitives.sharding_constraint_p:
                if sharding := _layer_sharding(params["sharding"]):
                    return [stack.then(jax.lax.with_sharding_constraint, shardings=sharding)]
        raise self._misread(equation, inputs)

    def _scanned(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        body = equation.params["jaxpr"]
        # jax 0.10 and 0.11 count inputs differently, but only scanned arrays lose an axis.
        last = len(inputs) - _count_scanned(equation.invars, body.in_avals)
        carried = len(body.out_avals) - _count_scanned(equation.outvars, body.out_avals)
        consts, carry, layers = (
            inputs[: last - carried],
            inputs[last - carried : last],
            inputs[last:],
        )
        if any(map(_is_stack, inputs[:last])):
            raise self._misread(equation, inputs)
        for x in filter(_is_stack, layers):
            self.lines[x.index].append(self._line(equation))

        def run_body(carry: Any, layer: Any) -> tuple[Any, Any]:
            pairs = zip(layers, layer, strict=True)
            layer = [x.change(value) if _is_stack(x) else value for x, value in pairs]
            results = jaxpr_as_fun(body)(*consts, *carry, *layer)
            return results[:carried], results[carried:]

        options = {name: equation.params[name] for name in ("reverse", "unroll")}
        carry, outputs = self.scan(run_body, carry, self._values(layers), **options)
        return [*carry, *outputs]

    def _rematerialized(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        results: Sequence[Any] = ()

        def run(*values: Any) -> Sequence[Any]:
            nonlocal results
            pairs = list(zip(inputs, values, strict=True))
            stacks = {x.index: value for x, value in pairs if _is_stack(x)}
            arguments = [x if _is_stack(x) else value for x, value in pairs]
            evaluation = dataclasses.replace(self._inside(equation), stacks=stacks)
            results = evaluation.run(equation.params["jaxpr"], arguments)
            return [x for x in results if not _is_stack(x)]

        # If `prevent_cse` is a tuple, it has one entry per input, as `jax.checkpoint` needs.
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        arrays = iter(jax.checkpoint(run, **options)(*self._values(inputs)))
        return [x if _is_stack(x) else next(arrays) for x in results]

    def _values(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [self.stacks[x.index] if _is_stack(x) else x for x in inputs]

    def _inside(self, equation: JaxprEqn) -> "_Evaluation":
        return dataclasses.replace(self, caller=self._line(equation))

    def _line(self, equation: JaxprEqn) -> str:
        """Returns the innermost line of the user's code that led to an equation."""
        # An equation inside a jitted function knows only the lines inside that function.
        lines = source_info_util.summarize(equation.source_info, num_frames=100).splitlines()
        lines = [x for x in lines if not x.startswith(str(Path(__file__).parents[1]))]
        users = [x for x in lines if "site-packages" not in x]
        return users[-1] if users else self.caller or "".join(lines[-1:]) or "an unknown line"

    def _misread(self, equation: JaxprEqn, inputs: Sequence[Any]) -> ValueError:
        name = next(x.name for x in inputs if _is_stack(x))
        return ValueError(
            f"`{equation.primitive}` reads {name} at {self._line(equation)}, but only a scan along "
            "the first axis can read layers that stream. Stack layers along the first axis, move "
            "operations on them into the scan's body, and loops around the scan out of the loss; "
            "or leave this leaf out with `streaming.stream(where=...)`."
        )


def _is_stack(x: Any) -> bool:
    return isinstance(x, _Stack)


def _live(jaxpr: Any) -> list[JaxprEqn]:
    """Returns the equations with results that are needed, or with effects.

    Some libraries read the first layer only for its shape (haliax 1.3).
    """
    live: list[JaxprEqn] = []
    needed = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            needed.update(x for x in equation.invars if not isinstance(x, Literal))
            live.append(equation)
    return live[::-1]


def _without_stacks(equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    pairs = zip(equation.invars, inputs, strict=True)
    values = {variable: x for variable, x in pairs if not isinstance(variable, Literal)}
    names = ("",) * len(values), ("",) * len(equation.outvars)
    info = DebugInfo("equation", str(equation.primitive), *names)
    single = Jaxpr((), list(values), equation.outvars, [equation], equation.effects, info)
    return eval_jaxpr(single, (), *values.values())


def _count_scanned(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    pairs = zip(outside, inside, strict=True)
    return sum(len(x.aval.shape) > len(layer.shape) for x, layer in pairs)


def _layer_sharding(sharding: Any) -> NamedSharding | None:
    """Returns the sharding of one layer, or None if a mesh divides the layers."""
    if not isinstance(sharding, NamedSharding):
        return None
    divided, *spec = sharding.spec or (None,)
    if divided not in (None, PartitionSpec.UNCONSTRAINED):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
