"""Sends gradients of scanned layers to the host inside the backward scan.

`jax.lax.scan` stacks the gradients of all layers, so the device holds all of them when the scan
ends. With `scan_layers` the scan's body reads each layer's gradient and sends it to the host, and
`jax.grad` returns only the values that the step needs. `stream_scans` does this for a model's own
scans. Windows, selections and arithmetic do not change.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from zenflow_jax._device.leaves import check_outside_of_shard_map, match_leaves
from zenflow_jax._device.memory import mail_rank
from zenflow_jax._device.scans import evaluate
from zenflow_jax._device.state import find_state
from zenflow_jax._device.streamed import (
    Streamed,
    check_layers_whole,
    is_streamed,
    layer_weights,
    streamed,
)
from zenflow_jax._spec.leaf import as_pure, plain_name
from zenflow_jax._transform import zenflow


def stream(
    params: PyTree,
    opt_state: PyTree,
    *,
    where: Callable[[KeyPath, jax.Array], bool] | None = None,
) -> Any:
    """Returns the parameters, with scanned layers wrapped for `scan_layers`.

    Differentiate with respect to the result, and pass the gradients to `tx.update` unchanged.

    Args:
        params: Parameters, under jit.
        opt_state: The optimizer's state, from a `zenflow` with `send_gradients="during_step"`.
        where: Function of (key path, leaf) that returns whether a leaf contains layers for
            `scan_layers`; by default, this is true of all offloaded leaves that are stacked along
            their first axis.

    Returns:
        A tree like `params`, with a `Streamed` in place of each such leaf; only `scan_layers` and
        losses of `stream_scans` can read it.

    Raises:
        ValueError: If the state has a different `send_gradients`; if no leaf is stacked, or `where`
            picks a leaf that is not stacked; if a mesh divides the layer axis or has Explicit axes;
            or if the program differentiates through this call.

    Examples:
        >>> import jax, jax.numpy as jnp, optax, zenflow_jax
        >>> from zenflow_jax import streaming
        >>> params = {"layers": jnp.ones((3, 8, 8)) / 8}
        >>> tx = zenflow_jax.zenflow(1e-2)
        >>> def loss(params, x):
        ...     x, _ = streaming.scan_layers(lambda x, w: (x @ w, None), x, params["layers"])
        ...     return jnp.sum(x**2)
        >>> @jax.jit
        ... def step(params, opt_state, x):
        ...     gradients = jax.grad(loss)(streaming.stream(params, opt_state), x)
        ...     updates, opt_state = tx.update(gradients, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> params, opt_state = step(params, tx.init(params), jnp.ones((2, 8)))
    """
    state = find_state(opt_state)
    if not state.send_gradients.in_step:
        raise ValueError(
            f"The state has send_gradients={state.send_gradients.value!r}. Streamed layers need "
            "'during_step'."
        )
    specs = [leaf.spec for leaf in state.leaves]
    tree = match_leaves(params, specs)
    weights = list(tree.leaves)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(as_pure(params))]
    signs = state.schedule.provisional_share is not None
    rank = mail_rank(specs)
    for place, leaf in zip(tree.places, state.leaves, strict=True):
        streams = stacked = not leaf.spec.resident and len(leaf.spec.stack) > 0
        if where is not None:
            streams = bool(where(paths[place], weights[place]))
        if streams and not stacked:
            raise ValueError(f"`where` picks {leaf!r}. Pick offloaded leaves of stacked layers.")
        if streams:
            check_layers_whole(leaf.spec, weights[place])
            weights[place] = streamed(weights[place], leaf, rank, signs=signs)
    if not any(map(is_streamed, weights)):
        raise ValueError("No leaf can stream. Stack the layers along the first axis.")
    return jax.tree.unflatten(tree.treedef, weights)


def stream_scans(loss_fn: Callable[..., PyTree]) -> Callable[..., Any]:
    """Makes a model's own scans stream, without a change to the model.

    The loss is traced, and `scan_layers` replaces each scan over arrays of `stream`. A scan may be
    inside `jax.jit`, `jax.checkpoint` or `jax.vmap`; casts of the layers move into its body.

    Args:
        loss_fn: Function of any arguments. Its model may use scans of jax, flax, haliax, haiku or
            Equinox.

    Returns:
        A function like `loss_fn`, which also accepts arrays of `stream` in its arguments. Without
        such arrays it only calls `loss_fn`.

    Raises:
        ValueError: When called, if a stack is not scanned exactly once, or if any other operation
            reads it. The message names the leaf and the line in the model's code.

    Examples:
        >>> import jax, jax.numpy as jnp, zenflow_jax
        >>> from zenflow_jax import streaming
        >>> def loss_fn(params, x):
        ...     x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])
        ...     return jnp.sum(x**2)
        >>> params = {"layers": jnp.ones((3, 8, 8)) / 8}
        >>> weights = streaming.stream(params, zenflow_jax.zenflow(1e-2).init(params))
        >>> gradients = jax.grad(streaming.stream_scans(loss_fn))(weights, jnp.ones((2, 8)))
    """

    @wraps(loss_fn)
    def streaming_loss(*args: PyTree, **kwargs: PyTree) -> Any:
        leaves, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_streamed)
        stacks = {i: x for i, (_, x) in enumerate(leaves) if is_streamed(x)}
        if not stacks:
            return loss_fn(*args, **kwargs)

        def plain_loss(weights: dict[int, jax.Array]) -> Any:
            arrays = [weights.get(i, x) for i, (_, x) in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(treedef, arrays)
            return loss_fn(*args, **kwargs)

        names = {i: plain_name(leaves[i][0][2:]) for i in stacks}  # without the argument's position
        return evaluate(plain_loss, stacks, names, scan_layers)

    return streaming_loss


def scan_layers(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    carry: PyTree,
    layers: PyTree,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    length: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Runs `jax.lax.scan` over layers that stream gradients.

    Args:
        body: Function of (carry, layer) that returns the new carry and an output, as for
            `jax.lax.scan`. It may be wrapped in `jax.checkpoint`.
        carry: The first layer's input.
        layers: A tree of arrays stacked along axis 0, which may come from `stream`.
        reverse: As for `jax.lax.scan`.
        unroll: As for `jax.lax.scan`.
        length: As for `jax.lax.scan`.

    Returns:
        The carry after the last layer, and the stacked outputs.

    Raises:
        ValueError: If the arrays of `stream` were cast or reshaped (cast them in the body instead),
            or are streamed inside `jax.shard_map`.
        TypeError: If something other than `scan_layers` reads the arrays of `stream`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from zenflow_jax import streaming
        >>> layers = jnp.ones((3, 2, 2))  # not from `stream`: like `jax.lax.scan`
        >>> streaming.scan_layers(lambda x, w: (x @ w, None), jnp.ones(2), layers)[0]
        Array([8., 8.], dtype=float32)
    """

    if any(map(is_streamed, jax.tree.leaves(layers, is_leaf=is_streamed))):
        check_outside_of_shard_map("streaming.scan_layers")

    def streaming_body(carry: PyTree, layer: PyTree) -> tuple[Any, Any]:
        return body(carry, _map_streamed(layer_weights, layer))

    def constant(layer: Streamed) -> Streamed:
        # `jax.grad` would stack the weights' derivative.
        return dataclasses.replace(layer, weights=jax.lax.stop_gradient(layer.weights))

    layers, options = _map_streamed(constant, layers), {"reverse": reverse, "unroll": unroll}
    return jax.lax.scan(streaming_body, carry, layers, length, **options)


def _map_streamed(function: Callable[[Streamed], PyTree], layers: PyTree) -> Any:
    """Applies `function` to the leaves that stream."""
    return jax.tree.map(lambda x: function(x) if is_streamed(x) else x, layers, is_leaf=is_streamed)


def check_device() -> None:
    """Compares a small streamed scan with a plain scan, on the default device.

    This takes a few seconds, mostly for compilation. XLA has had bugs with arrays in host memory
    inside loops (openxla/xla#46231), and this has not run on a GPU yet.

    Raises:
        RuntimeError: If the results differ by more than rounding errors.

    Examples:
        >>> from zenflow_jax import streaming
        >>> streaming.check_device()
    """
    step, *arguments = trial()
    results = (step(*arguments, streams) for streams in (True, False))
    pairs = (map(jax.device_get, jax.tree.leaves(arrays)) for arrays in results)
    for got, want in zip(*pairs, strict=True):
        wrong = np.mean(np.abs(got - want)) / np.mean(np.abs(want))
        if not wrong < 1e-2:
            raise RuntimeError(
                f"Streamed gradients differ by {wrong:.1%} from a plain scan's with jax "
                f'{jax.__version__} here. Use send_gradients="after_step" (`--stream none`).'
            )


def trial() -> tuple[Any, Any, Any, jax.Array]:
    """Returns the step that `check_device` runs, and its arguments except `streams`."""
    # Float32 leaves have no separate masters, so their updates show all changes.
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (8, 64, 96), "down": (8, 96, 64)}
    params = {
        name: jax.random.normal(key, shape) / 8
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    tx = zenflow(1e-2, max_grad_norm=1.0)
    # The first step of a run makes no provisional steps.
    opt_state = find_state(tx.init(params))._replace(step=jnp.int32(1))

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(scan_layers(layer, x, params)[0] ** 2)

    @partial(jax.jit, static_argnames="streams")
    def step(params: PyTree, opt_state: PyTree, x: jax.Array, streams: bool) -> Any:
        weights = stream(params, opt_state) if streams else params
        updates, new = tx.update(jax.grad(loss)(weights, x), opt_state, params)
        new = find_state(new)
        return updates, new.mail, [(leaf.mu, leaf.nu, leaf.scores) for leaf in new.leaves]

    return step, params, opt_state, jax.random.normal(keys[2], (16, 64))
