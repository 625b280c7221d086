"""Saves and restores an engine's state as one item in an orbax checkpoint."""

import contextlib
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future

from zenflow_jax._checkpoint.files import read_engine_state


class EngineCheckpointHandler(ocp.AsyncCheckpointHandler):
    """Writes an engine's state from the engine's own memory, while the run continues.

    orbax chooses this handler for the arguments `EngineSave` and `EngineRestore`.

    Examples:
        >>> import orbax.checkpoint as ocp, zenflow_jax
        >>> ocp.Checkpointer(zenflow_jax.EngineCheckpointHandler()).close()
    """

    async def async_save(
        self, directory: epath.PathLike, args: "EngineSave"
    ) -> list[future.Future] | None:
        """Starts writing the state of the engine in `args` to `directory`; called by orbax."""
        folder = _folder(directory)
        snapshot = args.engine.snapshot(args.copy_bytes)

        async def write() -> None:
            snapshot.write(folder)

        writing, name = write(), "zenflow_jax engine"
        try:
            written = future.CommitFutureAwaitingContractedSignals(writing, name=name)
        except BaseException:
            snapshot.close()
            raise

        def close_after() -> None:
            # If orbax cannot create the folder, it never writes, and raises only at the next save.
            # Until then the run would wait for the save, a deadlock (orbax 0.12.8).
            with contextlib.suppress(Exception):  # raised by orbax
                written.result()
            snapshot.close()
            writing.close()  # otherwise Python warns that it was never awaited

        threading.Thread(target=close_after, name=f"{name}: close", daemon=True).start()
        return [written]

    def save(self, directory: epath.PathLike, args: "EngineSave") -> None:
        """Writes the state of the engine in `args` to `directory` before returning."""
        folder = _folder(directory)
        args.engine.snapshot(args.copy_bytes).write(folder)

    def restore(
        self, directory: epath.PathLike, args: "EngineRestore | None" = None
    ) -> dict[str, Any]:
        """Restores the state that `EngineSave` wrote to `directory`; `args` may be None."""
        del args
        return read_engine_state(_folder(directory))


def _folder(directory: epath.PathLike) -> Path:
    if "://" in os.fspath(directory):
        raise ValueError(
            f"{directory} is not on a file system. Save to a folder, or save `engine.state()` with "
            '`ocp.args.StandardSave` (docs/checkpoints.md, "Other ways to save").'
        )
    return Path(directory)


@ocp.args.register_with_handler(EngineCheckpointHandler, for_save=True)
@dataclasses.dataclass
class EngineSave(ocp.args.CheckpointArgs):
    """Saves a `HostEngine`'s state without copying it, for `orbax.checkpoint`.

    It saves the same state as `engine.state()`, as of the last `exchange`; save parameters and
    optimizer state with it. Training may continue while orbax writes. An update that would
    overwrite unsaved arrays copies them first, if `copy_bytes` allows it, and otherwise waits, so a
    save delays training only if the disk takes longer than a window's steps. A checkpoint takes
    up to 20 bytes per offloaded parameter. All processes must save to the same folder,
    on a file system.

    Attributes:
        engine: The engine, or a `layerwise.Trainer`.
        copy_bytes: Maximum number of bytes for copies. None means one byte for each of this
            process's offloaded parameters. With 20 bytes each, training never waits.

    Examples:
        >>> import jax, jax.numpy as jnp, orbax.checkpoint as ocp, tempfile, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> opt_state = zenflow_jax.zenflow(1e-2).init(params)
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...         trees = {"params": params, "opt_state": opt_state}
        ...         args = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        ...         args["engine"] = zenflow_jax.EngineSave(engine)
        ...         saved = manager.save(0, args=ocp.args.Composite(**args))
    """

    engine: Any
    copy_bytes: int | None = None


@ocp.args.register_with_handler(EngineCheckpointHandler, for_restore=True)
@dataclasses.dataclass
class EngineRestore(ocp.args.CheckpointArgs):
    """Restores the state that `EngineSave` saved, for `HostEngine(engine_state=...)` or a trainer.

    The result is a tree like `engine.state()`, but large arrays stay in their files until the new
    engine reads them, on any number of devices and processes. Keep the files until then.

    Attributes:
        item: Ignored: orbax's older `CheckpointManager.restore(step, items)` passes a value.

    Raises:
        FileNotFoundError: In `restore`, if files are missing.
        ValueError: If files are incomplete.

    Examples:
        >>> import jax, jax.numpy as jnp, orbax.checkpoint as ocp, tempfile, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> opt_state = zenflow_jax.zenflow(1e-2).init(params)
        >>> engine = zenflow_jax.HostEngine(params, opt_state)
        >>> with ocp.CheckpointManager(tempfile.mkdtemp()) as manager:
        ...     saved = manager.save(0, args=zenflow_jax.EngineSave(engine))
        ...     manager.wait_until_finished()
        ...     engine_state = manager.restore(0, args=zenflow_jax.EngineRestore())
        >>> resumed = zenflow_jax.HostEngine(params, opt_state, engine_state=engine_state)
    """

    item: Any = None
