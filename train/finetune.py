"""Trains a small transformer on the text of Python's standard library.

    python -m train.finetune configs/quickstart.toml
    python -m train.finetune configs/quickstart.toml --optimizer adamw --steps 100
    python -m train.finetune configs/quickstart.toml --mesh data=2,fsdp=4
    python -m train.finetune configs/quickstart.toml --run first    # again: it goes on

Read from top to bottom: optimizer, weights, one step, validation, then `train`, which is the whole
job, and the command. The text is in `data.py`, the model in `model.py`, the settings in
`settings.py`, what is measured in `meter.py`, zenflow's windows and selections in `schedule.py`,
what is shown and written in `report.py`, what a run goes on from in `checkpoints.py`, what stops it
in `stopping.py`. Several devices: what lies where in `sharding.py`, several processes in
`processes.py`, the commands in docs/multi_host.md.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

import zenflow_jax
from train import data, processes
from train.checkpoints import CheckpointError, Checkpoints, description, write_model
from train.meter import Meter, Row
from train.model import Transformer, next_byte_loss
from train.report import (
    NoLog,
    RunLog,
    Summary,
    new_run_folder,
    read_rows,
    read_summary,
    summary_table,
    write_picture,
    write_summary,
)
from train.schedule import (
    ScheduleRecord,
    ScheduleRow,
    mean_window_length,
    selection_rule,
    window_rule,
)
from train.settings import Settings, SettingsError, read_command_line, to_toml
from train.sharding import batch_sharding, committed, make_mesh, own_rows, weight_shardings
from train.stopping import Stopped, StopRequest

PROGRAM = "python -m train.finetune"
MODEL = "model.safetensors"

# Errors of the file system that say all that there is to say.
NO_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}

# Both optimizers run the same forward and backward pass on bfloat16 matrices; what differs is
# where the float32 master weights are. zenflow keeps them (of the selected channels on the device,
# of the others on the host), so its parameters are the bfloat16 matrices themselves. optax.adamw
# keeps none, and on bfloat16 parameters it would lose every update smaller than half a unit of
# their last place; so its parameters are the float32 masters, and each step rounds a working copy
# of them (the model does, in `compute_dtype`).
WEIGHT_DTYPES = {"zenflow": jnp.bfloat16, "adamw": jnp.float32}


def make_optimizer(
    settings: Settings, *, steps_per_epoch: int | None = None
) -> optax.GradientTransformation:
    """The optimizer that the settings ask for.

    Args:
        settings: Of the run.
        steps_per_epoch: Needed where zenflow is to select channels once per epoch.

    Raises:
        SettingsError: If zenflow rejects its options.
    """
    peak, warm_up = settings.learning_rate, settings.warmup_steps
    learning_rate = optax.join_schedules(
        [
            optax.linear_schedule(peak / (warm_up + 1), peak, max(warm_up, 1)),
            optax.cosine_decay_schedule(peak, max(settings.steps - warm_up, 1), alpha=0.1),
        ],
        [warm_up],
    )
    if settings.optimizer == "adamw":
        adamw = optax.adamw(learning_rate, weight_decay=settings.weight_decay, mask=decayed)
        norm = settings.max_grad_norm
        # A chain either way, so that a run may go on with the other.
        clip = optax.identity() if norm is None else optax.clip_by_global_norm(norm)
        return optax.chain(clip, adamw)
    try:
        return zenflow_jax.zenflow(
            learning_rate,
            weight_decay=settings.weight_decay,
            mask=decayed,
            topk_ratio=settings.topk_ratio,
            update_interval=window_rule(settings),
            select_interval=selection_rule(settings, steps_per_epoch),
            full_warm_up_rounds=settings.warm_up_rounds,
            overlap_step=settings.overlap_step,
            max_grad_norm=settings.max_grad_norm,
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error


def decayed(params):
    """Weight decay pulls on the matrices; the scales of the norms are left alone."""
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def make_model(settings: Settings, mesh: Mesh | None) -> Transformer:
    """A fresh model, of the same weights with any mesh and with none."""
    return Transformer(
        width=settings.width,
        layers=settings.layers,
        heads=settings.heads,
        ffn=settings.ffn,
        vocabulary=data.VOCABULARY,
        weight_dtype=WEIGHT_DTYPES[settings.optimizer],
        compute_dtype=jnp.bfloat16,
        rngs=nnx.Rngs(settings.seed),
        stream_sharding=mesh and batch_sharding(mesh, settings.batch_size),
    )


def split_model(settings: Settings, mesh: Mesh | None) -> tuple[nnx.GraphDef, Any]:
    """A fresh model's definition, and its weights where they belong.

    Raises:
        SettingsError: If the model or the batch does not divide by the mesh.
    """

    def split():
        graphdef, params = nnx.split(make_model(settings, mesh))
        return graphdef, nnx.as_pure(params)

    if mesh is None:
        graphdef, params = split()
        return graphdef, committed(params)
    # Each device draws its own part, so the model need not fit on any of them.
    graphdef, shapes = jax.eval_shape(split)
    shardings = weight_shardings(mesh, shapes)
    return graphdef, jax.jit(lambda: split()[1], out_shardings=shardings)()


def make_train_step(
    graphdef: nnx.GraphDef, tx: optax.GradientTransformation, *, placement: Any = None
) -> Callable:
    """The jitted step; nothing in it knows which optimizer it is, or how many devices there are.

    Args:
        graphdef: The model's definition.
        tx: The optimizer.
        placement: On a mesh, shardings of the parameters and of the optimizer's state, which the
            compiler would otherwise be free to change.
    """

    def train_step(params, opt_state, windows):
        def loss_of(params):
            return next_byte_loss(nnx.merge(graphdef, params), windows)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # Donated: the new parameters and state take the memory of the old ones.
    out_shardings = placement and (*placement, None)
    return jax.jit(train_step, donate_argnums=(0, 1), out_shardings=out_shardings)


def make_validate(graphdef: nnx.GraphDef, batches, count: int) -> Callable:
    """A function from parameters to their mean loss over the first `count` of `batches`."""

    @jax.jit
    def loss_of(params, windows):
        return next_byte_loss(nnx.merge(graphdef, params), windows)

    def validate(params) -> float:
        losses = [loss_of(params, batches[i]) for i in range(count)]
        return float(sum(jax.device_get(losses))) / count  # blocks

    return validate


def train(settings: Settings, console: Console, *, fresh: bool = False) -> Summary:
    """Trains once, or the rest of a run; leaves all that it has to show in the run's folder.

    Args:
        settings: Of the run. With `run`, the folder of an earlier start, training goes on from the
            newest whole checkpoint in there.
        console: Where to show it.
        fresh: Refuse to go on with anything.

    Raises:
        SettingsError: If zenflow rejects its options, the mesh does not fit the devices, the batch
            or the model, the processes differ in settings or text, the folder cannot be made, or
            its checkpoints are those of another run or all damaged.
        DataError: If there is too little text.
        CheckpointError: If the last checkpoint or the model could not be written.
        Stopped: If a signal has asked for it.
    """
    begin = time.perf_counter()
    mesh = make_mesh(settings.mesh)

    root = data.standard_library()
    split = data.split_files(
        root,
        data.source_files(root),
        seed=settings.seed,
        max_bytes=int(settings.corpus_megabytes * 1e6),
        validation_share=settings.validation_share,
    )
    train_windows, validation_windows = (
        data.windows(root, files, settings.sequence_length)
        for files in (split.train, split.validation)
    )
    processes.check_same(to_toml(settings), train_windows, validation_windows)
    train_batches = make_batches(settings, mesh, train_windows)
    validation_batches = make_batches(settings, mesh, validation_windows)

    graphdef, params = split_model(settings, mesh)
    parameters = sum(p.size for p in jax.tree.leaves(params))

    steps_per_epoch = data.batches_per_epoch(train_windows, batch_size=settings.batch_size)
    tx = make_optimizer(settings, steps_per_epoch=steps_per_epoch)
    opt_state = committed(tx.init(params), mesh)
    placement = mesh and jax.tree.map(lambda x: x.sharding, (params, opt_state))
    train_step = make_train_step(graphdef, tx, placement=placement)
    validate = make_validate(graphdef, validation_batches, settings.eval_batches)

    folder = make_run_folder(settings, fresh=fresh)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    rows: list[tuple[Row, ScheduleRow]] = []
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=settings.keep,
                keep_best=settings.keep_best,
                describe=description(settings, train_windows, validation_windows),
                say=say,
            )
        )
        # The steps that are done already; with them the last start's losses and counts that are in
        # no row of the metrics yet.
        done, losses, schedule, engine_state = 0, [], None, None
        found = checkpoints.newest()
        if found is not None:
            params, opt_state, engine_state, progress = checkpoints.restore(
                found, params, opt_state
            )
            done, losses, schedule = found, progress["losses"], progress["schedule"]
            summary = read_summary(folder)
            if done == settings.steps and summary and summary.steps == done:
                say(
                    f"{folder} has done all its {done} steps. Pass a larger --steps to go on with "
                    "it, or name another --run to begin a new one."
                )
                processes.leave()
                return summary
            say(f"going on from checkpoint {done} in {folder}")
            if done > settings.steps:
                raise SettingsError(
                    f"`steps`: expected at least {done}, which the run in {folder} has done, got "
                    f"{settings.steps}. Pass a larger --steps, or name another --run."
                )
            rows += read_rows(folder, until=done - len(losses))

        engine = None
        if settings.optimizer == "zenflow":
            engine = zenflow_jax.HostEngine(
                params,
                opt_state,
                host_kernel=settings.host_kernel,
                threads=settings.threads,
                engine_state=engine_state,
            )
            stack.enter_context(engine)
            engine_state = None  # the engine has its own copy
        log = NoLog()
        if processes.is_first():
            write_settings(folder, settings)
            log = RunLog(
                folder,
                steps=settings.steps,
                console=console,
                progress=settings.progress,
                rows=rows,
            )
        stack.enter_context(log)
        meter = Meter(
            log_every=settings.log_every,
            tokens_per_step=settings.batch_size * settings.sequence_length,
            waited_s=lambda: engine.stats.wait_s if engine else 0.0,
            steps_done=done,
            losses=losses,
        )
        record = ScheduleRecord(
            log_every=settings.log_every,
            steps=settings.steps,
            stats=(lambda: engine.stats) if engine else None,
            state=schedule,
        )

        def report(row: Row) -> None:
            rows.append((row, record.take(row.step)))
            log.add(*rows[-1])

        if done:
            loss_before = progress["validation_loss_before"]
        else:
            loss_before = validate(params)
            log.validation(0, loss_before)

        def save(step: int) -> None:
            loss = None
            if settings.keep_best:
                loss = validate(params)
                log.validation(step, loss)
            for row in meter.catch_up():
                report(row)
            now = {
                "validation_loss_before": loss_before,
                "losses": meter.losses(),
                "schedule": record.state(),
            }
            state = engine.state() if engine else None
            checkpoints.save(step, params, opt_state, state, now, validation_loss=loss)

        # What blocks in this loop: the first step, until it is compiled and done; a row, until the
        # device is within `log_every` steps of the loop; and `exchange`, when the loop is two steps
        # ahead of the device (one, where windows or selections adapt), or when a window closes
        # before the host has finished the update of the one before (the share of time waiting is of
        # this). `save` blocks until the step is done, on device and host, and copied, and until the
        # save before is written. The rest is dispatched only.
        saved = done
        for step in range(done + 1, settings.steps + 1):
            params, opt_state, loss = train_step(params, opt_state, train_batches[step - 1])
            if engine:
                params, opt_state = engine.exchange(params, opt_state)
            record.step(step)
            if step == done + 1:
                jax.block_until_ready(params)
                meter.start(steps_done=step)
            if row := meter.step(loss):
                report(row)
            checkpoints.poll()
            asked = stop.after(step)
            if asked or (settings.save_every and step % settings.save_every == 0):
                save(saved := step)
            if asked:
                checkpoints.finish()
                raise Stopped(how_to_go_on(asked, step, folder), signal_number=asked)
        if saved < settings.steps:
            # Before the last window is closed early, so that the run can go on with more steps as
            # if it had had them from the start.
            save(settings.steps)
        if done == settings.steps:
            meter.start(steps_done=done)
        for row in meter.drain():
            report(row)
        if engine:
            params, opt_state = engine.flush(params, opt_state)
        jax.block_until_ready(params)  # the last update belongs to the measured time
        totals = meter.since_start()

        loss_after = validate(params)
        log.validation(settings.steps, loss_after)
        masters = zenflow_jax.master_params(params, opt_state, engine) if engine else params
        write_model(folder / MODEL, masters)
        checkpoints.finish()
        best = checkpoints.best()

    stats = engine.stats if engine else None
    moved = stats.bytes_to_host + stats.bytes_to_device if stats else 0
    steps_here = max(settings.steps - done, 1)
    summary = Summary(
        optimizer=settings.optimizer,
        device=jax.devices()[0].device_kind,
        devices=mesh.size if mesh else 1,
        processes=jax.process_count(),
        parameters=parameters,
        steps=settings.steps,
        resumed_at=done,
        tokens_per_s=totals.tokens_per_s,
        bytes_per_parameter_and_step=processes.sum_over(moved / (parameters * steps_here)),
        wait_share=totals.wait_share,
        host_s=stats.work_s if stats else 0.0,
        train_s=totals.seconds,
        total_s=time.perf_counter() - begin,
        validation_loss_before=loss_before,
        validation_loss_after=loss_after,
        windows=stats.windows if stats else None,
        mean_window_length=mean_window_length(stats) if stats else None,
        reselections=stats.reselections if stats else None,
        kept_share=stats.kept_share if stats else None,
    )
    if processes.is_first():
        write_picture(folder, rows, summary)
        write_summary(folder, summary)
        console.print(summary_table(summary))
        if best is not None:
            say(f"checkpoint with the smallest validation loss: {folder / 'checkpoints'}/{best}")
        say(f"metrics, loss curve, settings and {MODEL}: {folder}")
    processes.leave()
    return summary


def make_batches(settings: Settings, mesh: Mesh | None, windows: np.ndarray):
    """The batches of `windows`: NumPy arrays, or with a mesh arrays over its devices.

    Raises:
        SettingsError: If the batch does not divide by the mesh.
    """
    size, seed = settings.batch_size, settings.seed
    if mesh is None:
        return data.batches(windows, batch_size=size, seed=seed)
    sharding = batch_sharding(mesh, size)
    rows = own_rows(sharding, size)
    return data.ShardedBatches(windows, batch_size=size, seed=seed, sharding=sharding, rows=rows)


def make_run_folder(settings: Settings, *, fresh: bool) -> Path:
    """The folder of the run below `output_dir`, the same for every process.

    A new one with the next number, or the one named by `run`, which may hold an earlier start.

    Raises:
        SettingsError: If it cannot be made, if it holds a run and `fresh` is asked for, or if it
            holds one that has ended and whose checkpoints are gone.
    """
    if not processes.is_first():
        return Path(processes.from_first(""))
    parent = Path(settings.output_dir)
    try:
        if settings.run is None:
            folder, names = new_run_folder(parent, settings.optimizer), set()
        else:
            folder = parent / settings.run
            folder.mkdir(parents=True, exist_ok=True)
            names = {p.name for p in folder.iterdir()}
    except OSError as error:
        raise SettingsError(
            f"`output_dir`: expected a folder that can be made and written, got "
            f"{settings.output_dir} ({error.strerror}). Name another one with --output-dir."
        ) from error
    if fresh and names:
        raise SettingsError(
            f"`--fresh`: expected {folder} to be new or empty, got a folder with "
            f"{', '.join(sorted(names)[:4])}. Remove it, name another --run, or leave --fresh out "
            "to go on with what is in there."
        )
    if MODEL in names and "checkpoints" not in names:
        raise SettingsError(
            f"`run`: expected a folder with checkpoints to go on from, or a new one, got {folder} "
            f"with a {MODEL} and no checkpoints. Name another --run, or remove the folder."
        )
    processes.from_first(str(folder))
    return folder


def write_settings(folder: Path, settings: Settings) -> None:
    """Writes `settings.toml`; of a run that goes on, over those of its last start."""
    part = folder / "settings.toml.part"
    part.write_text(to_toml(settings), encoding="utf-8")
    part.replace(folder / "settings.toml")


def how_to_go_on(signal_number: int, step: int, folder: Path) -> str:
    """What is shown when a signal has stopped the run."""
    command = f"{PROGRAM} {shlex.quote(str(folder / 'settings.toml'))} --run {folder.name}"
    also = " (and --coordinator, --processes, --process)" if jax.process_count() > 1 else ""
    name = signal.Signals(signal_number).name
    return f"stopped by {name} after step {step}, which is saved. Go on with:\n{command}{also}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code.

    0; 2 after a mistake or a failure that the message explains; 128 and the signal's number if one
    has stopped the run.
    """
    try:
        command = read_command_line(sys.argv[1:] if argv is None else argv, program=PROGRAM)
        processes.join(command.launch)
        console = Console(quiet=not processes.is_first())
        train(command.settings, console, fresh=command.start.fresh)
    except Stopped as stopped:
        if processes.is_first():
            sys.stderr.write(f"{stopped}\n")
        processes.leave()
        return 128 + stopped.signal_number
    except (SettingsError, data.DataError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except OSError as error:
        if error.errno not in NO_WRITING:
            raise
        sys.stderr.write(
            f"error: expected to write the files of the run, got: {error}. Make room or see to the "
            "permissions, and start it again with --run: it goes on from its last checkpoint.\n"
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
