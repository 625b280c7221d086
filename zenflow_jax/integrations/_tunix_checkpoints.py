"""Saves the engine's state in Tunix's checkpoints.

This relies on two private details of Tunix 0.1.7, which `tests/in_tunix/test_checkpoints.py` tests:
`_checkpoint_manager` is orbax's manager or None, and the items that it has handlers for.
"""

import dataclasses
import functools
from typing import Any

import jax
import orbax.checkpoint as ocp
from tunix.sft import checkpoint_manager as tunix_checkpoints  # pyright: ignore[reportMissingImports]

from zenflow_jax._checkpoint.handler import EngineCheckpointHandler, EngineRestore, EngineSave
from zenflow_jax._device.memory import zeros_like

#: The engine's item in a checkpoint, next to Tunix's `model_params` and `optimizer_state`.
ITEM = "zenflow_engine"


class CheckpointManager(tunix_checkpoints.CheckpointManager):
    """Replaces a trainer's manager to save the engine's state as well.

    A checkpoint is one folder that appears atomically, so a killed process cannot separate the two
    states.
    """

    def __init__(self, trainer: Any, hooks: Any):
        self._trainer, self._hooks = trainer, hooks
        self._checkpoint_manager: ocp.CheckpointManager | None = None
        trainer.checkpoint_manager.close()
        if trainer.config.checkpoint_root_directory is not None:
            self._checkpoint_manager = _WithEngine(
                trainer.config.checkpoint_root_directory,
                # As in `CheckpointManager.__init__`, plus the engine's item.
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
        """Exchanges the step's mail, and saves if a save is due.

        The trainer calls this after every update. The last call flushes, so that the last
        checkpoint contains the flushed parameters.
        """
        self._hooks.exchange()
        if step == self._trainer.config.max_steps and not self._trainer.is_managed_externally:
            self._hooks.flush()
        return super().save(step, *args, **kwargs)

    def restored(self, step: int) -> Any:
        """Returns the engine's state from the restored checkpoint, or None for step 0."""
        if not step:
            return None
        manager = self._checkpoint_manager
        assert manager is not None  # a restored step has a manager
        if ITEM not in (manager.metadata(step).item_metadata or ()):
            raise ValueError(
                f"The checkpoint of step {step} in {manager.directory} lacks `{ITEM}`, because its "
                "trainer had no `ZenFlowHooks`. Start from its `model_params`, with another "
                "`checkpoint_root_directory`."
            )
        return manager.restore(step, args=ocp.args.Composite(**{ITEM: EngineRestore()}))[ITEM]

    def close(self) -> None:
        """Closes the manager and the engine, after the trainer's last use."""
        super().close()
        self._hooks.close()


class _WithEngine(ocp.CheckpointManager):
    def __init__(self, *args: Any, hooks: Any, **kwargs: Any):
        self._hooks = hooks
        super().__init__(*args, **kwargs)

    def save(self, step: int, *args: Any, **kwargs: Any) -> bool:
        items = dict(kwargs.pop("args").items())
        engine, mail = self._hooks.to_save()
        # Steps that read mail, as under `optax.MultiSteps`, overwrite it in place while orbax is
        # still writing it from host memory; jax then aborts (0.10.2, on a mesh of CPUs). So a
        # separate placeholder mail is saved.
        own = functools.partial(jax.tree.map, lambda x: zeros_like(x) if id(x) in mail else x)
        if "optimizer_state" in items:
            saved = items["optimizer_state"]
            items["optimizer_state"] = dataclasses.replace(saved, item=own(saved.item))
        items[ITEM] = EngineSave(engine)
        return super().save(step, *args, args=ocp.args.Composite(**items), **kwargs)
