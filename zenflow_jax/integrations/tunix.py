"""Hooks for Tunix's trainers (`google-tunix`), and checkpoints with the engine's state.

    trainer = peft_trainer.PeftTrainer(model, zenflow_jax.zenflow(1e-5), config)
    ZenFlowHooks(trainer)
    trainer.train(batches, evaluation_batches)

These hooks rely on three behaviours of Tunix 0.1.7, which `tests/in_tunix/` checks:

* `train` calls `checkpoint_manager.save` after each update, whether a save is due or not, and
  before the next step. So `save` exchanges. (The hook `on_train_step_end` comes one step later.)
* A trainer restores parameters and optimizer state in its constructor, and `train` re-places the
  optimizer state before it compiles, by partition specs that this state does not have.
* Only its checkpoint manager writes checkpoints (`_tunix_checkpoints.py`).
"""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
from flax import nnx
from jax.sharding import NamedSharding
from tunix.sft import checkpoint_manager as tunix_checkpoints  # pyright: ignore[reportMissingImports]
from tunix.sft import hooks as tunix_hooks  # pyright: ignore[reportMissingImports]
from tunix.sft import peft_trainer  # pyright: ignore[reportMissingImports]

from zenflow_jax._device.memory import HOST, read
from zenflow_jax._device.placing import place
from zenflow_jax._device.state import find_state
from zenflow_jax._diagnostics.stats import EngineStats
from zenflow_jax._engine import HostEngine
from zenflow_jax._exchange.checks import accumulations
from zenflow_jax._spec.rules import check_one_of
from zenflow_jax.integrations._tunix_checkpoints import CheckpointManager

#: The supported and tested version. The next version writes checkpoints with another orbax API, and
#: accumulates gradients in its step.
VERSION = "0.1.7"

_installed = importlib.metadata.version("google-tunix")
if _installed.split(".")[:3] != VERSION.split("."):
    raise ImportError(
        f"google-tunix is {_installed}, but these hooks need {VERSION}. Install "
        "`zenflow_jax[tunix]`, or call `HostEngine.exchange_nnx` in your own hooks."
    )

Evaluate = Literal["as_is", "flush"]


class ZenFlowHooks(tunix_hooks.TrainingHooks):
    """Trains with `zenflow` in a Tunix trainer. Create the hooks after the trainer, before `train`.

    The object adds itself to the trainer's hooks, and replaces the checkpoint manager with a
    manager that also saves the engine's state. It exchanges every update and flushes after the last
    one. It supports `PeftTrainer` and trainers that inherit its `train`. Accumulate gradients with
    `gradient_accumulation_steps` or your own `optax.MultiSteps`. If `train` is called repeatedly
    (`is_managed_externally`, as in Tunix's reinforcement learning), call `flush` and `close`
    yourself.

    Args:
        trainer: A trainer whose optimizer contains `zenflow`. If it has restored a checkpoint, the
            engine resumes from the same checkpoint, bit-identically.
        hooks: Your own hooks, called after these. None means the trainer's current hooks.
        evaluate: The parameters for evaluations: with "as_is", the training parameters without
            pending updates; with "flush", with pending updates.
        engine_options: Arguments of `HostEngine`: `host_kernel`, `threads`, `prefetch_bytes`, ...

    Raises:
        ValueError: If the optimizer does not have exactly one `zenflow`; if the trainer has
            restored a checkpoint without an engine's state.
    """

    def __init__(
        self,
        trainer: peft_trainer.PeftTrainer,
        *,
        hooks: tunix_hooks.TrainingHooks | Sequence[tunix_hooks.TrainingHooks] | None = None,
        evaluate: Evaluate = "as_is",
        engine_options: Mapping[str, Any] | None = None,
    ):
        _check_new(trainer)
        self._user_hooks = _as_list(trainer.training_hooks if hooks is None else hooks)
        check_one_of("evaluate", evaluate, get_args(Evaluate))
        self._trainer = trainer
        self._evaluate = evaluate
        self._engine_options = dict(engine_options or {})
        self._engine: HostEngine | None = None
        self._closed = False
        self._evaluating = False
        # Done now, not before the first step, because restored arrays are on every device.
        self._place()
        # If the trainer accumulates, one of these is its own. Only a user's own `MultiSteps` counts
        # updates.
        trainer_accumulates = trainer.config.gradient_accumulation_steps is not None
        self._asks_optimizer = len(accumulations(self._opt_state)) > trainer_accumulates
        self._exchanged = self._updates
        manager = CheckpointManager(trainer, self)
        self._engine_state = manager.restored(trainer.train_steps)
        trainer.checkpoint_manager = manager
        trainer.with_training_hooks(self)

    @property
    def engine(self) -> HostEngine:
        """Returns the engine, which training creates; raises before training starts."""
        if self._engine is None:
            raise RuntimeError(
                "The trainer has not started, so there is no engine yet. Call `train` first. If it "
                "is running, other hooks have replaced these hooks. Pass the others to "
                "`ZenFlowHooks(trainer, hooks=...)` instead of `with_training_hooks`."
            )
        return self._engine

    @property
    def stats(self) -> EngineStats:
        return self.engine.stats

    def exchange(self) -> None:
        """Exchanges the trainer's last update, unless it has already been exchanged."""
        made = self._updates
        if made != self._exchanged:
            self.engine.exchange_nnx(self._trainer.model, self._trainer.optimizer)
            self._exchanged = made

    def flush(self) -> None:
        """Merges pending updates into the trainer's model."""
        self.exchange()
        self.engine.flush_nnx(self._trainer.model, self._trainer.optimizer)

    def close(self) -> None:
        """Closes the engine, like the trainer's own `close`. Safe to call twice."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> "ZenFlowHooks":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def on_train_start(self, train_ctx: Any) -> None:
        """Makes the engine."""
        self._start(train_ctx)
        self._call_user_hooks("on_train_start", train_ctx)

    def on_train_step_start(self, train_ctx: Any) -> None:
        """Exchanges, in case a manager other than `CheckpointManager` saves."""
        self._check_trainer(train_ctx)
        self.exchange()
        self._call_user_hooks("on_train_step_start", train_ctx)

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        self._call_user_hooks("on_train_step_end", train_ctx, train_step, train_loss)

    def on_eval_step_start(self, train_ctx: Any) -> None:
        """Flushes before each evaluation's first step, if `evaluate` is "flush"."""
        if not self._evaluating:
            self._evaluating = True
            self._start(train_ctx)  # the first evaluation precedes `on_train_start`
            self.exchange()
            if self._evaluate == "flush":
                self.flush()
        self._call_user_hooks("on_eval_step_start", train_ctx)

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        self._call_user_hooks("on_eval_step_end", train_ctx, eval_loss)
        self._evaluating = False

    def on_train_end(self, train_ctx: Any) -> None:
        """Flushes, unless `train` is called repeatedly."""
        self.exchange()
        if not self._trainer.is_managed_externally:
            self.flush()
        self._call_user_hooks("on_train_end", train_ctx)

    def _call_user_hooks(self, event: str, *args: Any) -> None:
        for hook in self._user_hooks:
            getattr(hook, event)(*args)

    def _start(self, trainer: Any) -> None:
        """Creates the engine, once the trainer has placed the state for its compiled step."""
        self._check_trainer(trainer)
        if self._closed:
            raise RuntimeError(
                "`train` has closed the trainer. To call it several times, set "
                "`trainer.is_managed_externally = True`, and call `hooks.flush()` and "
                "`trainer.close()` at the end."
            )
        if self._engine is None:
            self._place()
            self._engine = HostEngine(
                nnx.as_pure(self._params),
                self._opt_state,
                engine_state=self._engine_state,
                **self._engine_options,
            )
            self._engine_state = None

    def to_save(self) -> tuple[HostEngine, set[int]]:
        """Returns the engine, and the ids of the state's placeholder mail in host memory."""
        self._start(self._trainer)  # a trainer may be closed before it trains
        state = find_state(self._opt_state)
        mail = jax.tree.leaves((state.mail, state.step_scalars))
        return self.engine, {id(x) for x in mail if x.sharding.memory_kind == HOST}

    @property
    def _params(self) -> Any:
        optimizer = self._trainer.optimizer
        # A copy of the variables, because `nnx.update` on the model would change the originals.
        return jax.tree.map(lambda x: x, nnx.state(self._trainer.model, optimizer.wrt))

    @property
    def _opt_state(self) -> Any:
        return nnx.as_pure(self._trainer.optimizer.opt_state)

    @property
    def _updates(self) -> int:
        """Returns how many updates the optimizer has made; a sum of micro-batches counts once."""
        if not self._asks_optimizer:
            return self._trainer.train_steps
        made: Any = accumulations(self._opt_state)[-1].gradient_step
        return int(read(made))

    def _place(self) -> None:
        """Puts back arrays that the trainer has misplaced, or has read from a checkpoint."""
        params, opt_state = nnx.as_pure(self._params), self._trainer.optimizer.opt_state
        placed = place(params, self._opt_state)
        nnx.update(opt_state, nnx.state(placed))
        _annotate_shardings(find_state(opt_state), find_state(placed))
        # With uncommitted parameters, the step would be compiled twice: mail is committed to a
        # device, and therefore so are all outputs of the step.
        if not any(isinstance(x.sharding, NamedSharding) for x in jax.tree.leaves(params)):
            for whole in (self._trainer.model, self._trainer.optimizer):
                nnx.update(whole, jax.tree.map(_bound, nnx.state(whole)))

    def _check_trainer(self, trainer: Any) -> None:
        if trainer is not self._trainer:
            raise ValueError(
                "These hooks were made for another trainer. Make new hooks for each trainer: "
                "`ZenFlowHooks(trainer)`."
            )


def channel_axis(path: tuple[Any, ...], leaf: Any) -> int:
    """Returns the channel axis of a leaf in Tunix's models, for `zenflow(channel_axis=...)`.

    The projections to queries, keys and values have the shape `(model, heads, width)`, and the
    first axis is the input. zenflow's default is the second-to-last axis.

    Examples:
        >>> from jax.tree_util import DictKey
        >>> import jax
        >>> path = (DictKey("attn"), DictKey("q_proj"), DictKey("w"))
        >>> channel_axis(path, jax.ShapeDtypeStruct((1024, 16, 128), "bfloat16"))
        0
        >>> channel_axis(path, jax.ShapeDtypeStruct((1024, 2048), "bfloat16"))
        -2
    """
    names = {getattr(key, "key", getattr(key, "name", None)) for key in path}
    return 0 if len(leaf.shape) == 3 and names & {"q_proj", "k_proj", "v_proj"} else -2


def _annotate_shardings(variables: Any, state: Any) -> None:
    """Writes each variable's sharding into its metadata, which Tunix uses to place the state.

    Without it, each device would hold all mail.
    """
    for variable, x in zip(
        jax.tree.leaves(variables, is_leaf=lambda x: isinstance(x, nnx.Variable)),
        jax.tree.leaves(state),
        strict=True,
    ):
        if isinstance(x.sharding, NamedSharding) and any(x.sharding.spec):
            variable.set_metadata(out_sharding=tuple(x.sharding.spec))


def _bound(x: Any) -> Any:
    """Commits an array to its device, without a copy."""
    return x if not isinstance(x, jax.Array) or x.committed else jax.device_put(x, x.sharding)


def _as_list(hooks: Any) -> list[tunix_hooks.TrainingHooks]:
    several = list(hooks) if isinstance(hooks, Sequence) else [] if hooks is None else [hooks]
    for hook in several:
        if not isinstance(hook, tunix_hooks.TrainingHooks):
            raise TypeError(f"`hooks` has a {type(hook).__name__}. Pass Tunix's `TrainingHooks`.")
    return several


def _check_new(trainer: Any) -> None:
    """Rejects an unsupported trainer."""
    if not isinstance(trainer, peft_trainer.PeftTrainer):
        raise TypeError(f"`trainer` is a {type(trainer).__name__}. Pass Tunix's `PeftTrainer`.")
    manager = trainer.checkpoint_manager
    if isinstance(manager, CheckpointManager):
        raise ValueError("The trainer already has `ZenFlowHooks`. Use the existing hooks.")
    if type(manager) is not tunix_checkpoints.CheckpointManager:
        raise ValueError(
            f"The trainer's checkpoint manager, a {type(manager).__name__}, would not save the "
            "engine's state. Use Tunix's `CheckpointManager`."
        )
