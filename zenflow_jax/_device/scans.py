"""Evaluates a traced function that reads stacks of layers in scans alone.

The scans of jax, flax, haliax, haiku and Equinox leave the same primitive in a jaxpr. So a model
needs no rewriting: its function is traced with plain arrays, and the jaxpr is evaluated with a
`_Stack` in the place of each stack. A scan over it is run by another function; any other read is an
error, which names the leaf and the line of the model.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxpr_as_fun, primitives
from jax.sharding import NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class _Stack:
    """Stands for a stack of layers."""

    index: int
    name: str
    changes: tuple[Callable[[Any], Any], ...] = ()  # such as casts; the body makes them

    def with_change(self, change: Callable[..., Any], **options: Any) -> "_Stack":
        return dataclasses.replace(self, changes=(*self.changes, partial(change, **options)))

    def changed(self, layer: Any) -> Any:
        for change in self.changes:
            layer = change(layer)
        return layer


def evaluate(
    function: Callable[..., Any],
    weights: Sequence[Any],
    names: Sequence[str],
    stacks: Sequence[Any],
    scan: Callable[..., tuple[Any, Any]],
) -> Any:
    """Returns `function(*weights)`, in which `scan` runs the scans over `stacks`.

    Args:
        function: Function of arrays. It may capture arrays that are not stacks.
        weights: The stacks as arrays, of which only the types matter.
        names: The stacks' key paths, for errors.
        stacks: The stacks as `scan` takes them.
        scan: Function of (body, carry, layers, reverse=, unroll=), like `jax.lax.scan`.

    Raises:
        ValueError: If a stack is not read by exactly one scan, or read by other operations.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*weights)
    evaluation = _Evaluation(scan, dict(enumerate(stacks)), [[] for _ in stacks])
    results = evaluation.run(traced, [_Stack(i, name) for i, name in enumerate(names)])
    for name, lines in zip(names, evaluation.lines, strict=True):
        if len(lines) != 1:
            uses = f"is scanned {len(lines)} times ({'; '.join(lines)})" if lines else "is unread"
            raise ValueError(
                f"{name} {uses}, but layers that stream must be scanned exactly once in a step. "
                f"{'Scan them once, over all inputs as one batch, or leave' if lines else 'Leave'} "
                "them out with `streaming.stream(where=...)`."
            )
    for x in results:
        if isinstance(x, _Stack):
            raise ValueError(f"The loss returns {x.name}, which streams. Do not return weights.")
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs that take stacks."""

    scan: Callable[..., tuple[Any, Any]]
    stacks: Mapping[int, Any]  # by `_Stack.index`
    lines: Sequence[list[str]]  # of the scans over each stack

    def run(self, jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
        """Returns the results of a jaxpr, whose inputs may be a `_Stack`."""
        # jax 0.10 keeps constants in a ClosedJaxpr, 0.11 in the jaxpr itself.
        consts, jaxpr = getattr(jaxpr, "consts", ()), getattr(jaxpr, "jaxpr", jaxpr)
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, [*consts, *inputs], strict=True))

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            inputs = [read(x) for x in equation.invars]
            run = self._with_stacks if any(map(_is_stack, inputs)) else _without_stacks
            values.update(zip(equation.outvars, run(equation, inputs), strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _with_stacks(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        params, stack = equation.params, inputs[0]
        match equation.primitive:
            case primitives.scan_p:
                return self._scanned(equation, inputs)
            case primitives.jit_p:  # shardings of arguments are not kept
                return self.run(params["jaxpr"], inputs)
            case primitives.remat_p:
                return self._rematerialized(equation, inputs)
            case primitives.copy_p:
                return [stack]
            case primitives.convert_element_type_p if params["sharding"] is None:
                dtype = params["new_dtype"]
                return [stack.with_change(jax.lax.convert_element_type, new_dtype=dtype)]
            case primitives.sharding_constraint_p:
                if sharding := _of_layer(params["sharding"]):
                    constrain = jax.lax.with_sharding_constraint
                    return [stack.with_change(constrain, shardings=sharding)]
        raise _misread(equation, inputs)

    def _scanned(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        body = equation.params["jaxpr"]
        # jax 0.10 and 0.11 count differently, but only the scanned have an axis more outside.
        layers = sum(_has_axis_more(*x) for x in zip(equation.invars, body.in_avals, strict=True))
        outputs = zip(equation.outvars, body.out_avals, strict=True)
        carries = len(body.out_avals) - sum(_has_axis_more(*x) for x in outputs)
        first, last = len(inputs) - layers - carries, len(inputs) - layers
        consts, carry, layers = inputs[:first], inputs[first:last], inputs[last:]
        if any(map(_is_stack, inputs[:last])):
            raise _misread(equation, inputs[:last])
        for x in filter(_is_stack, layers):
            self.lines[x.index].append(_line(equation))

        def run_body(carry: Any, layer: Any) -> tuple[Any, Any]:
            pairs = zip(layers, layer, strict=True)
            layer = [x.changed(value) if _is_stack(x) else value for x, value in pairs]
            results = jaxpr_as_fun(body)(*consts, *carry, *layer)
            return results[:carries], results[carries:]

        options = {name: equation.params[name] for name in ("reverse", "unroll")}
        carry, results = self.scan(run_body, carry, self._values(layers), **options)
        return [*carry, *results]

    def _rematerialized(self, equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
        results: Sequence[Any] = ()

        def run(*values: Any) -> Sequence[Any]:
            nonlocal results
            pairs = list(zip(inputs, values, strict=True))
            stacks = {x.index: value for x, value in pairs if _is_stack(x)}
            arguments = [x if _is_stack(x) else value for x, value in pairs]
            evaluation = dataclasses.replace(self, stacks=stacks)
            results = evaluation.run(equation.params["jaxpr"], arguments)
            return [x for x in results if not _is_stack(x)]

        # If `prevent_cse` is a tuple, it has an entry for each input, as `jax.checkpoint` needs.
        options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
        arrays = iter(jax.checkpoint(run, **options)(*self._values(inputs)))
        return [x if _is_stack(x) else next(arrays) for x in results]

    def _values(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return [self.stacks[x.index] if _is_stack(x) else x for x in inputs]


def _is_stack(x: Any) -> bool:
    return isinstance(x, _Stack)


def _has_axis_more(outside: Any, inside: Any) -> bool:
    return len(outside.aval.shape) > len(inside.shape)


def _without_stacks(equation: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """Evaluates an equation as jax does: as a jaxpr with a single equation."""
    pairs = zip(equation.invars, inputs, strict=True)
    values = {variable: x for variable, x in pairs if not isinstance(variable, Literal)}
    single = Jaxpr((), list(values), equation.outvars, [equation], equation.effects)
    return jax.core.eval_jaxpr(single, (), *values.values())


def _of_layer(sharding: Any) -> NamedSharding | None:
    """Returns a layer's sharding, or None if a stack's sharding divides its layers."""
    if not isinstance(sharding, NamedSharding):
        return None
    divided, *spec = sharding.spec or (None,)
    if divided not in (None, PartitionSpec.UNCONSTRAINED):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _misread(equation: JaxprEqn, inputs: Sequence[Any]) -> ValueError:
    name = next(x.name for x in inputs if _is_stack(x))
    return ValueError(
        f"`{equation.primitive}` reads {name} at {_line(equation)}, but layers that stream can be "
        "read only by one scan along their first axis. Move this operation into the scan's body, "
        "or this loop out of the loss; or leave the leaf out with `streaming.stream(where=...)`."
    )


def _line(equation: JaxprEqn) -> str:
    """Returns the innermost line of the user's code that led to an equation."""
    frames = source_info_util.summarize(equation.source_info, num_frames=100).splitlines()
    package = str(Path(__file__).parents[1])
    users = [x for x in frames if "site-packages" not in x and not x.startswith(package)]
    return (users or frames or ["an unknown line"])[-1]
