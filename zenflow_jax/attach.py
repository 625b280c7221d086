"""`attach`: a train step that calls `exchange` itself, for loops that only accept a function."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import find_state, has_state, is_nnx_state
from zenflow_jax._engine import HostEngine
from zenflow_jax._exchange.checks import accumulations
from zenflow_jax._exchange.flax_nnx import (
    is_graphdef,
    is_nnx_pair,
    merged_nnx,
    nnx_arrays,
    update_nnx,
)
from zenflow_jax._spec.rules import check_int_or_none

_FIELDS = ("params", "opt_state")


def attach(
    step: Callable[..., Any],
    engine: HostEngine | None = None,
    *,
    flush_every: int | None = None,
    fields: tuple[str, str] | None = None,
    graphdef: Any = None,
    engine_options: Mapping[str, Any] | None = None,
) -> "AttachedStep":
    """Returns a train step that calls `step`, and then `exchange` with its results.

    Use this for loops that you do not control and that accept a step function. Jit `step`, not the
    result. `attach` recognizes four kinds of steps by their arguments, in any position (a random
    key may come first):

    * `step(params, opt_state, ...)` returns a tuple that contains both, in this order.
    * `step(state, ...)` returns the state, or a tuple that contains it. A state is any object with
      both `fields`: a flax `TrainState`, a dataclass, a named tuple or a dict.
    * `step(model, optimizer, ...)`, with objects of flax nnx, updates both in place.
    * `step(graphdef, state, ...)`, or `step(state, ...)` with the argument `graphdef`, returns the
      `nnx.State`, or a tuple that contains it. Merged, they are a module or a tuple with one model
      and one `nnx.Optimizer`.

    With `optax.MultiSteps`, the result calls `exchange` only after an update, which it detects by
    waiting for each micro-batch.

    Args:
        step: The train step. Pass parameters and state by position.
        engine: The run's engine. With None, the first call creates the engine from the call's
            arguments, whose state must be fresh or belong to `engine_options["engine_state"]`.
        flush_every: Number of steps between flushes, counted from the start of the run. With None,
            only your calls to `flush` flush.
        fields: The names of parameters and optimizer state in a train state, by default
            `("params", "opt_state")`; or the names of model and optimizer in an nnx module with
            several models.
        graphdef: The graphdef for an `nnx.State`, if `step` does not take a graphdef, as in
            MaxText.
        engine_options: Arguments of the `HostEngine` that the first call creates.

    Returns:
        The step, with `flush`, `engine` and `close`. Like an engine, it is a context manager.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> from zenflow_jax.attach import attach
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> tx = zenflow_jax.zenflow(1e-2, topk_ratio=0.25)
        >>> opt_state = tx.init(params)
        >>> @jax.jit
        ... def train_step(params, opt_state):
        ...     loss, gradients = jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(params)
        ...     updates, opt_state = tx.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state, loss
        >>> with attach(train_step) as train_step:
        ...     for _ in range(5):
        ...         params, opt_state, loss = train_step(params, opt_state)
        ...     params, opt_state = train_step.flush(params, opt_state)
        >>> bool((params["w"] < 1).all())
        True
    """
    return AttachedStep(step, engine, flush_every, fields, graphdef, engine_options)


class AttachedStep:
    """A step that calls `exchange` itself. See `attach`, which creates it, for the arguments."""

    def __init__(
        self,
        step: Callable[..., Any],
        engine: HostEngine | None,
        flush_every: int | None,
        fields: tuple[str, str] | None,
        graphdef: Any,
        engine_options: Mapping[str, Any] | None,
    ):
        _check(step, engine, flush_every, fields, engine_options)
        self._fields, self._graphdef = fields, graphdef
        self._step, self._engine, self._flush_every = step, engine, flush_every
        self._engine_options = dict(engine_options or {})
        self._accumulated: int | None = None
        self._started = self._closed = False
        functools.update_wrapper(self, step, updated=())  # without the step's attributes

    @property
    def engine(self) -> HostEngine:
        """Returns the engine; raises an error if the first call has not created it yet."""
        if self._engine is None:
            raise RuntimeError(
                "The step has no engine before its first call. Call the step first, or pass "
                "`attach(step, HostEngine(params, opt_state))`."
            )
        return self._engine

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Takes the step, then calls `exchange`; returns the results for the next step."""
        take, _ = self._start(args)
        out = self._step(*args, **more)
        params, opt_state, put = take(out)
        if not self._made_update(opt_state):
            return out
        params, opt_state = self.engine.exchange(params, opt_state)
        # Uses the engine's count, because the run may have begun before this object was created.
        if self._flush_every and self.engine.stats.steps % self._flush_every == 0:
            params, opt_state = self.engine.flush(params, opt_state)
        return put(params, opt_state)

    def flush(self, *carried: Any) -> Any:
        """Merges pending updates into the parameters, as `HostEngine.flush` does.

        Args:
            *carried: Parameters and optimizer state, or the train state, from the last step; or the
                model and its optimizer.

        Returns:
            The same objects with these updates, to continue from; None for nnx, updated in place.
        """
        take, least = self._start(carried)
        params, opt_state, put = take(least)
        return put(*self.engine.flush(params, opt_state))

    def close(self) -> None:
        """Closes the engine, like `HostEngine.close`. Safe to call twice."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> "AttachedStep":
        return self

    def __exit__(self, *error: Any) -> None:
        self._closed = True
        if self._engine is not None:
            self._engine.__exit__(*error)

    __reduce_ex__ = HostEngine.__reduce_ex__

    def _start(self, args: tuple[Any, ...]) -> tuple[Callable[[Any], "_Taken"], Any]:
        """Returns an extractor and the minimal step output.

        The first call creates the engine.
        """
        if self._closed:
            raise RuntimeError(
                "The attached step is closed. Attach again from the run's last checkpoint: "
                '`attach(step, engine_options={"engine_state": ...})`.'
            )
        take, least = _taker(args, self._fields, self._graphdef)
        if not self._started:
            if take is _take_pair:
                _check_one_candidate(args)
            params, opt_state, _ = take(least)
            if self._engine is None:
                self._engine = HostEngine(params, opt_state, **self._engine_options)
            self._accumulated = _accumulated(opt_state)
            self._started = True
        return take, least

    def _made_update(self, opt_state: Any) -> bool:
        """Returns whether the call made an update, not only a sum in `optax.MultiSteps`."""
        if self._accumulated is None:
            return True
        before, self._accumulated = self._accumulated, _accumulated(opt_state)
        return self._accumulated != before


#: Parameters, optimizer state, and a function that replaces both in the step's results.
_Taken = tuple[Any, Any, Callable[[Any, Any], Any]]


def _taker(
    args: tuple[Any, ...], fields: tuple[str, str] | None, graphdef: Any
) -> tuple[Callable[[Any], _Taken], Any]:
    """Returns an extractor and the minimal step output."""
    # A caller with nnx objects has already imported flax.
    has_nnx = "flax.nnx" in sys.modules
    for i in range(len(args) if has_nnx and fields is None else 0):
        if is_nnx_pair(args[i:]):
            return functools.partial(_take_nnx, *args[i : i + 2]), None
    names = fields or _FIELDS
    states = [x for x in args if _has(x, names) and not is_nnx_state(x)]
    if len(states) == 1 or (states and states[0] is args[0]):
        return functools.partial(_take_train_state, names), states[0]
    if states:
        raise TypeError(
            f"{len(states)} of the arguments {_kinds(args)} have `{'` and `'.join(names)}`. Attach "
            "a function whose first argument is the train state."
        )
    if fields is None and (place := _place_of_state(args)):
        return _take_pair, args[place - 1 : place + 1]
    if has_nnx:
        graphdef = next(filter(is_graphdef, args), graphdef)
    nnx_states = [x for x in args if is_nnx_state(x)]
    if len(nnx_states) == 1 and graphdef is not None:
        return functools.partial(_take_split, graphdef, fields), nnx_states[0]
    for state in nnx_states:
        find_state(state)  # raises an error with a remedy
    if fields is not None:
        raise TypeError(
            f"No argument has `{'` and `'.join(fields)}`: {_kinds(args)}. Pass the train state by "
            "position."
        )
    raise TypeError(
        f"No zenflow state follows parameters in the arguments {_kinds(args)}. Pass (params, "
        "opt_state, ...), (train_state, ...) or an nnx (model, optimizer, ...) by position. If the "
        'train state has other fields, name them: `attach(step, fields=("model", "opt_state"))`.'
    )


def _place_of_state(values: Sequence[Any]) -> int:
    """Returns the index of the optimizer state, which comes after the parameters; 0 if none."""
    return next((i for i in range(1, len(values)) if has_state(values[i])), 0)


def _check_one_candidate(args: Sequence[Any]) -> None:
    """Rejects a second tree like the parameters, such as an average, before the optimizer state."""

    def shapes(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return structure, [getattr(x, "shape", None) for x in leaves]

    *others, params = args[: _place_of_state(args)]
    if any(shapes(x) == shapes(params) for x in others):
        raise TypeError(
            f"Two of the arguments {_kinds(args)} before the optimizer state look like its "
            "parameters. Pass (params, opt_state, ...) first, and all other arguments after them."
        )


def _take_nnx(model: Any, optimizer: Any, out: Any) -> _Taken:
    def put(params: Any, opt_state: Any) -> Any:
        update_nnx(model, optimizer, params, opt_state)
        return out

    return *nnx_arrays(model, optimizer), put


def _take_split(graphdef: Any, fields: tuple[str, str] | None, out: Any) -> _Taken:
    state, put_state = _only(out, is_nnx_state, "`nnx.State`s")
    model, optimizer, state_of_both = merged_nnx(graphdef, state, fields)
    params, opt_state, put = _take_nnx(model, optimizer, None)

    def put_both(*pair: Any) -> Any:
        put(*pair)
        return put_state(state_of_both())

    return params, opt_state, put_both


def _take_pair(out: Any) -> _Taken:
    place = _place_of_state(out) if isinstance(out, tuple | list) else 0
    if not place:
        raise TypeError(
            f"The step returns {_kinds(out)}. Attach a function that returns (params, opt_state, "
            "...), in the order of its arguments."
        )
    before, after = out[: place - 1], out[place + 1 :]
    return out[place - 1], out[place], lambda *pair: _like(out, [*before, *pair, *after])


def _take_train_state(fields: tuple[str, str], out: Any) -> _Taken:
    noun = f"train states with `{'` and `'.join(fields)}`"
    state, put_state = _only(out, functools.partial(_has, fields=fields), noun)
    is_dict = isinstance(state, Mapping)
    params, opt_state = (state[x] if is_dict else getattr(state, x) for x in fields)
    find_state(opt_state)  # raises an error with a remedy

    def put(*pair: Any) -> Any:
        return put_state(_replaced(state, dict(zip(fields, pair, strict=True))))

    return params, opt_state, put


def _only(out: Any, accepts: Callable[[Any], bool], noun: str) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the only accepted value in a step's results, and a function that replaces it."""
    if accepts(out):
        return out, lambda new: new
    values = list(out) if isinstance(out, tuple | list) else []
    places = [i for i, x in enumerate(values) if accepts(x)]
    if len(places) != 1:
        raise TypeError(
            f"The step returns {len(places)} {noun} in {_kinds(out)}. Attach a step that returns "
            "exactly one, alone or in a tuple."
        )

    def put(new: Any) -> Any:
        values[places[0]] = new
        return _like(out, values)

    return values[places[0]], put


def _replaced(state: Any, new: dict[str, Any]) -> Any:
    if isinstance(state, Mapping):
        return type(state)({**state, **new})  # pyright: ignore[reportCallIssue]
    for name in ("replace", "_replace"):
        if callable(replace := getattr(state, name, None)):
            return replace(**new)
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return dataclasses.replace(state, **new)
    raise TypeError(
        f"The train state is a {type(state).__name__}, not a dataclass, named tuple or dict, and "
        "has no `replace`. Call `params, opt_state = engine.exchange(...)` yourself every step."
    )


def _has(state: Any, fields: Sequence[str]) -> bool:
    if isinstance(state, Mapping):
        return all(name in state for name in fields)
    return all(hasattr(state, name) for name in fields)


def _like(out: Any, values: list[Any]) -> Any:
    return out._make(values) if hasattr(out, "_make") else type(out)(values)


def _accumulated(opt_state: Any) -> int | None:
    """Returns how many updates `optax.MultiSteps`, if present, has passed to zenflow."""
    around = accumulations(opt_state)
    return int(read(around[-1].gradient_step)) if around else None  # pyright: ignore[reportArgumentType]


def _kinds(values: Any) -> str:
    several = values if isinstance(values, tuple | list) else [values]
    return f"({', '.join(type(x).__name__ for x in several)})"


def _check(step: Any, engine: Any, flush_every: Any, fields: Any, options: Any) -> None:
    if isinstance(step, AttachedStep):
        raise TypeError("The step is already attached. Use it as it is.")
    check_int_or_none("flush_every", flush_every, 1)
    if fields is not None and not (isinstance(fields, tuple | list) and len(fields) == 2):
        raise ValueError(f"`fields` is {fields!r}. Pass two names, for parameters and state.")
    if engine is not None and options is not None:
        raise ValueError(
            "`engine` and `engine_options` are mutually exclusive. Pass the options to the engine."
        )
