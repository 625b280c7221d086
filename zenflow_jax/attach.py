"""`attach`: a train step that calls `exchange` itself, for loops that only accept a function."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jaxtyping import PyTree

from zenflow_jax._device.memory import read
from zenflow_jax._device.state import has_state
from zenflow_jax._engine import HostEngine


class attach:  # lower case, because it is called like a function
    """A train step that calls `step`, and then `exchange` with its results.

    Use this for loops that you do not control and that accept a step function. Jit `step`, not the
    result. Two kinds of steps work as they are, also with other arguments (a key) in front:

    * `step(params, opt_state, ...)` returns a tuple that contains both, in this order.
    * `step(train_state, ...)` returns the train state, or a tuple that contains it. A train state
      has `params` and `opt_state`: a flax `TrainState`, another dataclass, or a named tuple.

    For all others, `get` finds parameters and optimizer state, and `put` replaces them. For a loop
    with flax nnx objects, call `HostEngine.exchange_nnx` instead.

    With `optax.MultiSteps`, `exchange` is called only after an update, which takes a wait for each
    micro-batch. Like an engine, an attached step is a context manager.

    Args:
        step: The train step. Pass parameters and state by position.
        get: `get(*values)` returns (params, opt_state), where `values` are the step's positional
            arguments, or its results (one value, if it does not return a tuple or list).
        put: `put(params, opt_state, *values)` returns the step's results with these two in place.
        engine_options: Arguments of the `HostEngine` that the first call creates. The call's state
            must be fresh, or belong to `engine_options["engine_state"]`.

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

        A step `step(key, state)` that returns (metrics, state), where `state` is a dict:

        >>> attached = attach(
        ...     lambda key, state: ({}, state),
        ...     get=lambda _, state: (state["params"], state["opt"]),
        ...     put=lambda params, opt, _, state: (_, {**state, "params": params, "opt": opt}),
        ... )
    """

    def __init__(
        self,
        step: Callable[..., PyTree],
        *,
        get: Callable[..., tuple[PyTree, PyTree]] | None = None,
        put: Callable[..., PyTree] | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ):
        self._get, self._put = get or _get, put or _put
        self._step, self._engine_options = step, engine_options or {}
        #: The engine; if it is None, the next call creates it.
        self.engine: Any = None
        functools.update_wrapper(self, step, updated=())  # without the step's attributes

    def __call__(self, *args: PyTree, **more: PyTree) -> Any:
        """Takes the step, then calls `exchange`; returns the results for the next step."""
        before = _updates(self._arguments(args)[1])
        out = self._step(*args, **more)
        is_sequence = type(out) in (tuple, list)
        values = tuple(out) if is_sequence else (out,)
        params, opt_state = self._get(*values)
        if before is not None and _updates(opt_state) == before:
            return out  # `optax.MultiSteps` has only added to its sum
        new = self._put(*self.engine.exchange(params, opt_state), *values)
        if not is_sequence:
            return new
        return type(out)(new if type(new) is tuple else (new,))

    def flush(self, *carried: PyTree) -> Any:
        """Merges pending updates into the parameters, as `HostEngine.flush` does.

        Args:
            *carried: Parameters and optimizer state, or the train state, from the last step; with
                `get` and `put`, the values that they take.

        Returns:
            The same objects with these updates, to continue from.
        """
        params, opt_state = self._arguments(carried)
        return self._put(*self.engine.flush(params, opt_state), *carried)

    def close(self) -> None:
        """Closes the engine, like `HostEngine.close`. Safe to call twice."""
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> "attach":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.engine is not None:
            self.engine.__exit__(kind, error, trace)

    def _arguments(self, values: tuple[PyTree, ...]) -> tuple[PyTree, PyTree]:
        """Returns parameters and optimizer state; makes the engine before the first step."""
        params, opt_state = self._get(*values)
        if self.engine is None:
            self.engine = HostEngine(params, opt_state, **self._engine_options)
        return params, opt_state


def _updates(opt_state: PyTree) -> int | None:
    """Returns how many updates `optax.MultiSteps`, if present, has passed to zenflow."""

    def is_around(x: object) -> bool:
        return isinstance(x, optax.MultiStepsState) and has_state(x)

    around = [x for x in jax.tree.leaves(opt_state, is_leaf=is_around) if is_around(x)]
    return int(read(around[0].gradient_step)) if around else None


def _find(values: tuple[PyTree, ...]) -> tuple[int, bool]:
    """Returns the index of the parameters, with the optimizer state behind, or of a train state."""
    for i, x in enumerate(values):
        if hasattr(x, "params") and hasattr(x, "opt_state"):
            return i, True
        if i and has_state(x):
            return i - 1, False
    raise TypeError(
        f"({', '.join(type(x).__name__ for x in values)}) has neither (params, opt_state, ...) nor "
        "a train state with both. Tell `attach` where they are, with `get` and `put`."
    )


def _get(*values: PyTree) -> tuple[Any, Any]:
    i, in_one = _find(values)
    return (values[i].params, values[i].opt_state) if in_one else values[i : i + 2]


def _put(params: PyTree, opt_state: PyTree, *values: PyTree) -> Any:
    i, in_one = _find(values)
    if not in_one:
        return (*values[:i], params, opt_state, *values[i + 2 :])
    replace = getattr(values[i], "_replace", functools.partial(dataclasses.replace, values[i]))
    state = replace(params=params, opt_state=opt_state)
    return (*values[:i], state, *values[i + 1 :]) if len(values) > 1 else state
