"""Saves the engine's state in Tunix's checkpoints.

It relies on two private matters of Tunix 0.1.7, which `tests/in_tunix/test_contract.py` checks:
`_checkpoint_manager` is orbax's or None, and which items that one has handlers for.
"""

import dataclasses
import functools
from typing import Any

import jax
import orbax.checkpoint as ocp
from tunix.sft import checkpoint_manager as tunix_checkpoints  # pyright: ignore[reportMissingImports]

from zenflow_jax._checkpoint.handler import EngineCheckpointHandler, EngineRestore, EngineSave
from zenflow_jax._device.memory import zeros_like

#: The engine's item of a checkpoint, next to Tunix's `model_params` and `optimizer_state`.
ITEM = "zenflow_engine"


class CheckpointManager(tunix_checkpoints.CheckpointManager):
    """Takes the place of a trainer's manager. Its checkpoints have the engine's state as well.

    A checkpoint is one folder that appears at once, so no kill parts the two states.
    """

    def __init__(self, trainer: Any, hooks: Any):
        self._trainer, self._hooks = trainer, hooks
        self._checkpoint_manager: ocp.CheckpointManager | None = None
        trainer.checkpoint_manager.close()
        if trainer.config.checkpoint_root_directory is not None:
            self._checkpoint_manager = _WithEngine(
                trainer.config.checkpoint_root_directory,
                # As in `CheckpointManager.__init__`, and one more.
                item_handlers={
                    "model_params": ocp.PyTreeCheckpointHandler(),
                    "optimizer_state": ocp.PyTreeCheckpointHandler(),
                    "custom_metadata": ocp.JsonCheckpointHandler(),
                    ITEM: EngineCheckpointHandler(),
                },
                options=trainer.config.checkpointing_options
                or tunix_checkpoints._DEFAULT_CHECKPOINTING_OPTIONS,
                hooks=hooks,
            )

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        """Exchanges what the step has sent, and saves if it is time to.

        The trainer calls this after every update. The last one is flushed, as training ends there:
        its checkpoint has these parameters.
        """
        self._hooks.exchange()
        if step == self._trainer.config.max_steps and not self._trainer.is_managed_externally:
            self._hooks.flush()
        return super().save(step, *args, **kwargs)

    def restored(self, step: int) -> Any:
        """The engine's state in the checkpoint that the trainer restored; None for step 0."""
        if not step:
            return None
        manager = self._checkpoint_manager
        assert manager is not None  # else there was nothing to restore
        if ITEM not in (manager.metadata(step).item_metadata or ()):
            raise ValueError(
                f"expected `{ITEM}` in the checkpoint of step {step} in {manager.directory}, got "
                "one of a trainer without `ZenFlowHooks`. Start with its `model_params` in another "
                "`checkpoint_root_directory`."
            )
        return manager.restore(step, args=ocp.args.Composite(**{ITEM: EngineRestore()}))[ITEM]

    def close(self) -> None:
        """Ends the checkpoints and the engine, which the trainer needs no more."""
        super().close()
        self._hooks.close()


class _WithEngine(ocp.CheckpointManager):
    def __init__(self, *args: Any, hooks: Any, **kwargs: Any):
        self._hooks = hooks
        super().__init__(*args, **kwargs)

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        items = dict(kwargs.pop("args").items())
        engine, mail = self._hooks.to_save()
        # Steps that read mail, as those of `optax.MultiSteps` do, get it to write over, and orbax
        # writes what is in host memory from where it is: jax ends the process then (0.10.2, on a
        # mesh of CPUs). So blank mail of its own is saved.
        own = functools.partial(jax.tree.map, lambda x: zeros_like(x) if id(x) in mail else x)
        if "optimizer_state" in items:
            saved = items["optimizer_state"]
            items["optimizer_state"] = dataclasses.replace(saved, item=own(saved.item))
        items[ITEM] = EngineSave(engine)
        return super().save(step, *args, args=ocp.args.Composite(**items), **kwargs)
