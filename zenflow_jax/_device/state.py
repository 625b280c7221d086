"""The state that `zenflow()` keeps between steps: a named tuple, with metadata in its treedef.

The engine needs nothing else. Trees of shapes, shardings and partition specs also use these
classes. Checkpoint libraries and trainers that traverse the state find only arrays.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import SequenceKey
from jaxtyping import Array, Float, Float32, Int32, PyTree

from zenflow_jax._device.shards import CHANNELS, PART, REPLICATED
from zenflow_jax._spec.checks import SendGradients
from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.scalars import StepScalars
from zenflow_jax._spec.schedule import Schedule


# Not a named tuple: other libraries rebuild named tuples from their fields, without the spec.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LeafState:
    """Adam state of one leaf on the device.

    Selected arrays have the leaf's shape with `k` channels instead of `n`; if the channel axis is a
    matrix's last axis, rows precede it and there is no tail. A resident leaf is wholly selected:
    its arrays have the leaf's shape, and it has one step count, no channels and no scores.
    """

    # Any, because trees of shapes and shardings have leaves of other types.
    channels: Int32[Array, "*stack k"] | Any  # ascending; None if resident
    steps: Int32[Array, "*stack k"] | Any  # () if resident
    master: Float32[Array, "*stack k tail"] | Any  # None: a float32 leaf is its own master
    mu: Float32[Array, "*stack k tail"] | Any
    nu: Float32[Array, "*stack k tail"] | Any
    # Sums of squares since the last selection; None if resident.
    scores: Float32[Array, "*stack n"] | Any
    spec: LeafSpec = dataclasses.field(metadata={"static": True})

    def replace(self, **changes: object) -> "LeafState":
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        spec = self.spec
        shape = ",".join(map(str, spec.shape))
        kind = "resident: wholly on the device"
        if not spec.resident:
            share = f"{spec.k / spec.n:.0%}, {spec.k} of {spec.n} channels of axis {spec.axis}"
            kind = f"offloaded: the device keeps {share}"
        return f"{spec.name} {spec.dtype}[{shape}], {kind}"


@dataclasses.dataclass(frozen=True)
class Static:
    """The settings, which do not change during a run."""

    schedule: Schedule  # when windows close and channels are selected
    send_gradients: SendGradients  # when gradients leave the device


# Not a sequence: other libraries (orbax) rebuild sequences from their elements alone.
@dataclasses.dataclass(frozen=True)
class LeafStates:
    """The states of all leaves, in order, with the settings in the treedef."""

    leaves: tuple[LeafState, ...]
    static: Static

    def __iter__(self) -> Iterator[LeafState]:
        return iter(self.leaves)

    def __getitem__(self, i: int | slice) -> Any:
        return self.leaves[i]

    def __len__(self) -> int:
        return len(self.leaves)

    def replace(self, leaves: Iterable[LeafState]) -> "LeafStates":
        return LeafStates(tuple(leaves), self.static)


Leaves = LeafStates | Sequence[LeafState]


jax.tree_util.register_pytree_with_keys(
    LeafStates,
    lambda x: ([(SequenceKey(i), leaf) for i, leaf in enumerate(x.leaves)], x.static),
    lambda static, leaves: LeafStates(tuple(leaves), static),
    lambda x: (x.leaves, x.static),
)


class ZenFlowState(NamedTuple):
    """State of `zenflow()`: a pytree of arrays, with static settings in its treedef.

    Attributes:
        step: int32 (). Steps taken, including skipped steps.
        skipped: int32 (). Steps skipped because a gradient was not finite.
        skipped_in_a_row: int32 (). Steps skipped since the last step that counted.
        grad_norm: float32 (). The global norm of the last step's gradients, before clipping.
        leaves: A sequence with each parameter leaf's state, in order, and with the settings in its
            treedef. It is not a tree like the parameters, because flax nnx passes different trees
            to init and update.
        mail: A tuple with each leaf's gradient; None for a resident leaf. If channels are a leaf's
            last axis, the last two axes are exchanged, as everywhere on the host. `exchange`
            replaces mail after every step.
        token: int32 (). The step token, which `exchange` sets; -1 after a step.
        step_scalars: The scalars in the mail.
        layout: int32 (). The state's layout number (`_version.py`), in a dict under a name that
            includes the number.

    With `send_gradients="during_step"`, mail is in pinned host memory, with unit axes. With
    "after_step", it stays on the device, where `exchange` replaces it with one element per device,
    and no part of the state is in host memory: copies of a few scalars would make XLA:GPU keep all
    activations (benchmarks/LOG.md).

    Examples:
        >>> import jax.numpy as jnp, zenflow_jax
        >>> state = zenflow_jax.zenflow(1e-2).init({"w": jnp.ones((8, 4))})
        >>> int(state.step), state.leaves[0].mu.shape
        (0, (1, 4))
    """

    step: Int32[Array, ""]
    skipped: Int32[Array, ""]
    skipped_in_a_row: Int32[Array, ""]
    grad_norm: Float32[Array, ""]
    leaves: LeafStates
    mail: tuple[Float[Array, "..."] | None, ...]
    token: Int32[Array, ""]
    step_scalars: StepScalars
    layout: dict[str, Int32[Array, ""]]

    @property
    def schedule(self) -> Schedule:
        return self.leaves.static.schedule

    @property
    def send_gradients(self) -> SendGradients:
        return self.leaves.static.send_gradients

    @property
    def offloads(self) -> bool:
        """Returns whether any leaf is offloaded; otherwise the run needs no engine."""
        return any(not leaf.spec.resident for leaf in self.leaves)

    def __repr__(self) -> str:
        # Code that traverses optimizer states may put a placeholder here.
        if not isinstance(self.leaves, LeafStates):
            return f"ZenFlowState({self.leaves})"
        lines = [f"{self.leaves.static},", *map(repr, self.leaves)]
        return "\n  ".join(["ZenFlowState(", *lines]) + "\n)"


def places_of(spec: LeafSpec) -> LeafState:
    """Returns the places of a leaf's state, for `on_each_device`."""
    each = None if spec.resident else CHANNELS
    return LeafState(
        channels=each,
        steps=each or REPLICATED,
        master=PART if spec.keeps_master else None,
        mu=PART,
        nu=PART,
        scores=each,
        spec=spec,
    )


# Ranges of a stacked leaf's first axis. Parameters and state hold whole leaves; when a window
# closes, each range acts as a separate leaf. No mesh divides the first axis of a leaf with ranges,
# so nothing moves between devices.


def cut(x: jax.Array, spec: LeafSpec) -> jax.Array:
    """Returns a leaf's array for the range of `spec`; unchanged if the leaf has no ranges."""
    if spec.start is None:
        return x
    return jax.lax.slice_in_dim(x, spec.start, spec.start + spec.shape[0], axis=0)


def put(whole: jax.Array, part: jax.Array, spec: LeafSpec) -> jax.Array:
    """Returns a leaf's array with `part` in the range of `spec`."""
    if spec.start is None:
        return part
    return jax.lax.dynamic_update_slice_in_dim(whole, part, spec.start, axis=0)


def cut_state(leaf: LeafState, spec: LeafSpec) -> LeafState:
    return jax.tree.map(lambda x: cut(x, spec), leaf).replace(spec=spec)


def put_state(whole: LeafState, part: LeafState) -> LeafState:
    """Returns a leaf's state with a range's state inserted."""
    same = part.replace(spec=whole.spec)
    return jax.tree.map(lambda x, y: put(x, y, part.spec), whole, same)


def find_state(opt_state: PyTree) -> ZenFlowState:
    """Finds the only `ZenFlowState` inside any optimizer state.

    Args:
        opt_state: The state of an optax transformation that contains `zenflow`.

    Returns:
        The state, whose `step`, `skipped`, `skipped_in_a_row`, `grad_norm` and `leaves` may be read
        at any time.

    Raises:
        ValueError: If `opt_state` does not contain exactly one `ZenFlowState`.

    Examples:
        >>> import jax.numpy as jnp, optax, zenflow_jax
        >>> tx = optax.chain(optax.identity(), zenflow_jax.zenflow(1e-2))
        >>> int(zenflow_jax.find_state(tx.init({"w": jnp.ones((8, 4))})).step)
        0
    """
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(x)]
    if len(states) != 1:
        raise ValueError(
            f"The optimizer state, a {type(opt_state).__name__}, contains {len(states)} "
            "ZenFlowStates, not one. Use one `zenflow` for all leaves; for flax nnx, pass an "
            "optimizer's `opt_state`, or call `exchange_nnx`."
        )
    return states[0]


def has_state(tree: PyTree) -> bool:
    return any(map(_is_state, jax.tree.leaves(tree, is_leaf=_is_state)))


def replace_state(opt_state: PyTree, new: ZenFlowState) -> Any:
    return jax.tree.map(lambda x: new if _is_state(x) else x, opt_state, is_leaf=_is_state)


def _is_state(x: object) -> bool:
    return isinstance(x, ZenFlowState)
