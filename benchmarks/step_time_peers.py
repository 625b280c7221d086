"""The training methods that `step_time.py` compares.

Every peer computes the same forward and backward passes in bf16 and clips by global norm. They
differ in where AdamW's float32 masters and moments are, and when they are updated.

A *step* is one forward and backward pass of one batch. A *call* of a peer's program is one step, or
`m` steps for a peer that sums the gradients of `m` steps on the device.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import zenflow_jax
from benchmarks.step_time_model import Model, committed
from zenflow_jax import streaming

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-4, 0.01, 1.0


# --- optimizers -----------------------------------------------------------------------------


class Optimizer(NamedTuple):
    init: Callable[[Any], Any]  # from parameters to the placed state
    apply: Callable[[Any, Any, Any], tuple[Any, Any]]  # from gradients, state and parameters
    abstract: Callable[[Any], Any]  # the shapes of `init`'s result
    # From parameters and state to the loss function's argument.
    weights: Callable[[Any, Any], Any] = lambda params, state: params


class Mixed(NamedTuple):
    """AdamW's state for low-precision parameters, which are rounded masters."""

    master: Any  # float32, like the parameters
    moments: Any  # optax's state for the masters


_ADAMW = optax.chain(
    optax.clip_by_global_norm(MAX_GRAD_NORM),
    optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY),
)


def adamw(tx: optax.GradientTransformation = _ADAMW) -> Optimizer:
    """Returns `optax.adamw`, or another optimizer, on float32 masters, all on the device."""
    first = partial(_first_mixed, tx=tx)
    return Optimizer(
        lambda params: committed(first(params)),
        partial(_apply_mixed, tx=tx),
        partial(jax.eval_shape, first),
    )


def _first_mixed(params: Any, tx: optax.GradientTransformation = _ADAMW) -> Mixed:
    # Also copies float32 parameters, because parameters and masters are both donated.
    master = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
    return Mixed(master, tx.init(master))


def _apply_mixed(
    gradients: Any, state: Mixed, params: Any, tx: optax.GradientTransformation = _ADAMW
) -> tuple[Any, Mixed]:
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    updates, moments = tx.update(gradients, state.moments, state.master)
    master = optax.apply_updates(state.master, updates)
    params = jax.tree.map(lambda m, p: m.astype(p.dtype), master, params)
    return params, Mixed(master, moments)


def parked() -> Optimizer:
    """Returns the same optimizer, with the matrices' state in pinned host memory between steps.

    The step copies it to the device and back. Vectors stay on the device, because copies of a few
    KB would only slow this peer down.
    """

    def init(params: Any) -> Mixed:
        # Leaf by leaf, because the whole state may not fit on the device.
        device = jax.tree.leaves(params)[0].device
        shapes = jax.eval_shape(_first_mixed, params)
        master = jax.tree.map(lambda p: _park(jnp.array(p, jnp.float32), device), params)
        # Adam's first moments are zeros.
        moments = jax.tree.map(lambda x: _park(np.zeros(x.shape, x.dtype), device), shapes.moments)
        return Mixed(master, moments)

    def apply(gradients: Any, state: Mixed, params: Any) -> tuple[Any, Mixed]:
        state = jax.tree.map(partial(_move, jax.memory.Space.Device), state)
        params, state = _apply_mixed(gradients, state, params)
        return params, jax.tree.map(partial(_move, jax.memory.Space.Host), state)

    return Optimizer(init, apply, partial(jax.eval_shape, _first_mixed))


def is_parked(x: Any) -> bool:
    return x.ndim > 1


def _park(x: Any, device: jax.Device) -> jax.Array:
    kind = "pinned_host" if is_parked(x) else None
    return jax.device_put(x, jax.sharding.SingleDeviceSharding(device, memory_kind=kind))


def _move(space: jax.memory.Space, x: jax.Array) -> jax.Array:
    return jax.device_put(x, space) if is_parked(x) else x


def zenflow(*, stream: bool = False, **options: Any) -> Optimizer:
    """Returns zenflow; with `stream`, scanned layers send gradients in the backward scan."""
    tx = zenflow_jax.zenflow(
        LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        # Selects by name, because the scales of stacked blocks have two axes.
        resident=lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) == "scale",
        **options,
    )

    def apply(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    optimizer = Optimizer(tx.init, apply, partial(jax.eval_shape, tx.init))
    return optimizer._replace(weights=streaming.stream) if stream else optimizer


# --- peers ----------------------------------------------------------------------------------


class Peer(NamedTuple):
    name: str
    make: Callable[[], Optimizer]
    offloads: bool = False  # needs a `HostEngine`
    micro_batches: int = 1  # steps in a call
    interval: int = 1  # calls in a window

    @property
    def window(self) -> int:
        """Returns the number of steps between boundaries."""
        return self.micro_batches * self.interval


def zenflow_peer(interval: int, ratio: float, suffix: str = "", **options: Any) -> Peer:
    make = partial(zenflow, topk_ratio=ratio, update_interval=interval, **options)
    name = f"zenflow-s{interval}-r{ratio}{suffix}"
    return Peer(name, make, offloads=True, interval=interval)


_OFFLOAD = partial(
    zenflow,
    topk_ratio=0.0,
    update_interval=1,
    staleness=0,
    select_interval=2**30,  # no channels to select
)

#: Peers in ascending order of device memory; `step_time.py` explains the order.
PEERS = {
    peer.name: peer
    for peer in (
        Peer("offload", _OFFLOAD, offloads=True),
        *(zenflow_peer(interval, 0.05) for interval in (1, 2, 4, 8, 16)),
        zenflow_peer(4, 0.1),
        zenflow_peer(4, 0.05, "-streamed", stream=True),
        zenflow_peer(4, 0.05, "-exchange", send_gradients="after_step"),
        Peer("offload-x4", _OFFLOAD, offloads=True, micro_batches=4),
        Peer("parked", parked),
        Peer("adamw", adamw),
    )
}


def make_step(
    graphdef: nnx.GraphDef, optimizer: Optimizer, micro_batches: int, placement: Any = None
) -> jax.stages.Wrapped:
    """Returns the jitted call: (params, state, tokens) to (params, state, loss), donated.

    Args:
        graphdef: The model's definition.
        optimizer: An optimizer from above.
        micro_batches: `m`. Gradients are summed in float32, 4 bytes per parameter. A loop runs all
            micro-batches but the last, so that mail can leave during the last backward pass.
        placement: Shardings of parameters and state. If left to the compiler, a donated array in
            host memory may become an output on the device, and the process aborts (jax 0.10).

    Returns:
        A function whose `tokens` are int32 `(m, b, t + 1)`.
    """

    @jax.value_and_grad
    def gradient(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).losses(tokens[:, :-1], tokens[:, 1:]).mean()

    def add(total: Any, more: Any) -> Any:
        return jax.tree.map(lambda s, g: s + g.astype(jnp.float32), total, more)

    def mean(params: Any, tokens: jax.Array) -> Any:
        last = tokens[-1]
        if micro_batches == 1:
            return gradient(params, last)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
        total, _ = jax.lax.scan(
            lambda total, part: (add(total, gradient(params, part)), None),
            (jnp.float32(0), zeros),
            tokens[:-1],
        )
        # The last micro-batch's activations must not exist at the same time as the loop's.
        last, total = jax.lax.optimization_barrier((last, total))
        loss, grads = gradient(params, last)
        loss, total = jax.tree.map(lambda s: s / micro_batches, add(total, (loss, grads)))
        return loss, jax.tree.map(lambda s, p: s.astype(p.dtype), total, params)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = mean(optimizer.weights(params, state), tokens)
        params, state = optimizer.apply(grads, state, params)
        return params, state, loss

    out_shardings = placement and (*placement, None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out_shardings)


def abstract_call(
    peer: Peer,
    model: Model,
    batch: int,
    length: int,
    put: Callable[[Any], jax.ShapeDtypeStruct],
    park: Callable[[Any], jax.ShapeDtypeStruct],
) -> tuple[Any, Any]:
    """Returns a peer's jitted step, and the shapes of its arguments: parameters, state, tokens.

    Args:
        peer: The peer.
        model: Its model.
        batch: Sequences in a step.
        length: Tokens in each sequence.
        put: Places a shape on the device.
        park: Places a shape in host memory.
    """
    optimizer = peer.make()
    params = jax.tree.map(put, model.shapes)
    # The step does not read the mail in `zenflow`'s state, so its memory does not matter.
    state = jax.tree.map(put, optimizer.abstract(params))
    if peer.name == "parked":
        state = jax.tree.map(lambda x: park(x) if is_parked(x) else x, state)
    placement = None if peer.offloads else jax.tree.map(lambda x: x.sharding, (params, state))
    tokens = put(jax.ShapeDtypeStruct((peer.micro_batches, batch, length + 1), jnp.int32))
    step = make_step(model.graphdef, optimizer, peer.micro_batches, placement)
    return step, (params, state, tokens)


class Runner:
    """Runs one peer, which can be taken down and set up again, and keeps its compiled programs.

    Args:
        peer: The peer.
        model: Its model.
        tokens: int32 `(n, b, t + 1)`: batches for `n` steps, which are then repeated.
    """

    def __init__(
        self,
        peer: Peer,
        model: Model,
        tokens: np.ndarray,
    ):
        self.peer = peer
        self._model = model
        self._optimizer = peer.make()
        self._step: Any = None
        self._batches: Sequence[jax.Array] = [
            jax.device_put(part, jax.devices()[0])
            for part in tokens.reshape(-1, peer.micro_batches, *tokens.shape[1:])
        ]
        self.take_down()

    def take_down(self) -> None:
        """Frees device and host memory. Safe to call twice."""
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.close()
        self.params: Any = None
        self.state: Any = None
        self.engine: zenflow_jax.HostEngine | None = None
        self.loss: Any = None
        self._calls = 0
        gc.collect()

    def set_up(self) -> None:
        """Makes the state before the first step, which is the same every time."""
        self.params = self._model.draw()
        self.state = self._optimizer.init(self.params)
        if self.peer.offloads:
            self.engine = zenflow_jax.HostEngine(self.params, self.state)
        if self._step is None:
            # `zenflow` places its own arrays in host memory.
            placement = jax.tree.map(lambda x: x.sharding, (self.params, self.state))
            self._step = make_step(
                self._model.graphdef,
                self._optimizer,
                self.peer.micro_batches,
                None if self.peer.offloads else placement,
            )

    def advance(self, steps: int) -> None:
        """Takes `steps` steps, a multiple of a call's steps, without further waits."""
        assert steps % self.peer.micro_batches == 0
        for _ in range(steps // self.peer.micro_batches):
            batch = self._batches[self._calls % len(self._batches)]
            self.params, self.state, self.loss = self._step(self.params, self.state, batch)
            if self.engine is not None:
                self.params, self.state = self.engine.exchange(self.params, self.state)
            self._calls += 1

    def wait(self) -> None:
        """Waits for the device; the host may still work on the last window's update."""
        jax.block_until_ready((self.params, self.state, self.loss))

    def settle(self) -> None:
        """Also waits for the host, so that the next window starts with no update in flight."""
        if self.engine is not None:
            self.params, self.state = self.engine.flush(self.params, self.state)
        self.wait()
        if not np.isfinite(self.loss):
            raise FloatingPointError(f"the loss of {self.peer.name} is {self.loss}")

    @property
    def parked_bytes(self) -> int:
        """Returns the bytes in host memory that each step copies, without an engine."""
        if self.peer.offloads:
            return 0
        leaves = jax.tree.leaves(self.state)
        return sum(x.nbytes for x in leaves if x.sharding.memory_kind == "pinned_host")
