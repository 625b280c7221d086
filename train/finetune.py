"""Fine-tunes a model: its own small one, or one in a folder as Hugging Face has it.

    python -m train.finetune configs/quickstart.toml
    python -m train.finetune configs/quickstart.toml --optimizer adamw --steps 100
    python -m train.finetune configs/quickstart.toml --mesh data=2,fsdp=4
    python -m train.finetune configs/quickstart.toml --run first    # again: it goes on
    python -m train.finetune configs/quickstart.toml --timeline timeline.png
    python -m train.finetune configs/quickstart.toml --run first --export best DIR
    python -m train.finetune configs/quickstart.toml --plan
    python -m train.finetune configs/glue_sst2.toml --model DIR --data DIR
    python -m train.finetune configs/glue_sst2.toml --model DIR --data DIR --steps 0

Read from top to bottom: `train`, which is the whole job, and the command. The settings are in
`settings.py`, what is learned in `tasks/`, the batches in `data.py`, the model in `models.py`, the
optimizers in `optimizers.py`, one step and one validation in `step.py`, a validation alone in
`evaluation.py`, what is measured in `meter.py`, zenflow's windows and selections in `schedule.py`,
what is shown and written in `run_log.py` and `report.py`, what a run goes on from in
`checkpoints.py`, which run that may be in `run_description.py`, what stops it in `stopping.py`.
Several devices: what lies where in `sharding.py`, several processes in `processes.py`, the commands
in docs/multi_host.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import zenflow_jax
from train import models, processes
from train.checkpoints import Checkpoints
from train.command_line import read_command_line, to_toml
from train.data import Batches, DataError, Sample, check_batch
from train.evaluation import check_alone, evaluate
from train.export import export
from train.memory import check_memory, lack_behind, lack_of_memory
from train.meter import Meter, Row
from train.optimizers import in_force, make_optimizer, skipped_steps, with_deepspeed
from train.peers import Peers
from train.pretrained import ModelError, read_folder
from train.report import (
    Summary,
    read_summary,
    summary_table,
    write_picture,
    write_summary,
    write_timeline,
)
from train.run_description import description, with_saved_rounds
from train.run_folder import make_run_folder, naming, write_settings
from train.run_lock import run_lock
from train.run_log import NoLog, RunLog, read_rows
from train.saved_checkpoints import CheckpointError
from train.sayings import PROGRAM, causes_of_infinity, how_to_go_on, said_of_deepspeed
from train.schedule import ScheduleRecord, ScheduleRow, mean_window_length
from train.settings import Planning, Settings, SettingsError
from train.sharding import BATCH_AXES, batch_parts, committed, make_mesh, mesh_axes
from train.skipping import NotFiniteError, SkippedSteps, check_finite
from train.step import PER_EXAMPLE, make_train_step, make_validate
from train.stopping import Interrupted, Stopped, StopRequest
from train.tasks.chosen import make_task
from train.tokenizer import TokenizerError

# Those whose message is all that is to be shown.
FAILURES = (
    SettingsError,
    DataError,
    ModelError,
    TokenizerError,
    CheckpointError,
    NotFiniteError,
)

# Steps that a start must have made for its timings to be worth advice.
LEAST_STEPS = 100

# Errors of the file system that say all that there is to say.
NO_WRITING = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def train(
    settings: Settings,
    console: Console,
    stop: StopRequest,
    peers: Peers,
    *,
    fresh: bool = False,
    timeline: Path | None = None,
    force: bool = False,
) -> Summary | None:
    """Trains once, or the rest of a run; leaves all that it has to show in the run's folder.

    With no `steps` it shows the figures of the validation, writes nothing and returns None.

    Args:
        settings: Of the run. With `run`, the folder of an earlier start, training goes on from the
            newest whole checkpoint in there.
        console: Where to show it.
        stop: Hears the signals that ask for the end.
        peers: Hears of the end of other processes.
        fresh: Refuse to go on with anything.
        timeline: Where to write what the last steps were made of; the ending says how.
        force: Start although the run cannot have room on this machine.

    Raises:
        SettingsError: If zenflow rejects its options, the mesh does not fit the devices, the batch
            or the model, the processes differ in settings or data, the folder cannot be made, or
            its checkpoints are those of another run or all damaged.
        DataError: If there is too little data, or it cannot be understood.
        ModelError, TokenizerError: If the folder of the model cannot be read.
        CheckpointError: If the last checkpoint or the model could not be written, or the best one
            cannot be read.
        NotFiniteError: If the loss is not finite before the first step, or too many steps have been
            skipped in a row.
        Stopped: If a signal has asked for it.
    """
    begin = time.perf_counter()

    def say(line: str) -> None:
        # Examples may have characters that the terminal has not, and brackets that are no markup.
        line = line.encode(console.encoding, "backslashreplace").decode(console.encoding)
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    settings.check_paths()
    mesh = make_mesh(settings.mesh)
    settings, deepspeed = with_deepspeed(asked := settings, batch_parts(mesh))
    if timeline and settings.optimizer == "adamw":
        raise SettingsError(
            "`--timeline`: expected an optimizer with work on the host (zenflow or offload), got "
            "adamw, of which there is nothing to show. Leave it out, or name another --optimizer."
        )
    if settings.steps == 0:
        check_alone(settings, timeline)
    origin = None if settings.model is None else read_folder(Path(settings.model))
    texts = models.texts_of(settings)  # as they are now, which is how they are learned from
    if not force:
        classifies = origin is not None and origin.architecture == "encoder"
        vocabulary = 0 if classifies else models.vocabulary(origin)
        check_memory(settings, models.parameters(settings, origin), vocabulary, mesh)
    task = make_task(settings, origin)
    where = {"seed": settings.seed, "mesh": mesh, "buckets": settings.length_buckets}
    if settings.steps != 0:
        check_batch(settings.batch_size, len(task.train))
    # In micro-batches as well: what the device has room for.
    parts, most = settings.micro_batches, settings.eval_batches
    samples = {
        name: Sample(
            source,
            batch_size=settings.batch_size // parts,
            batches=None if most is None else most * parts,
            **where,
        )
        for name, source in task.validation.items()
    }
    if settings.steps == 0:
        evaluate(settings, task, mesh, origin, samples, say)
        return None
    batches = Batches(task.train, batch_size=settings.batch_size, **where)
    if settings.steps is None:
        steps = math.ceil(round(settings.epochs * batches.per_epoch, 6))
        settings = dataclasses.replace(settings, steps=steps)
    settings, deepspeed = in_force(settings, deepspeed, batches.per_epoch)
    settings, of_warm_up = with_saved_rounds(settings)
    processes.check_same(to_toml(settings), task.checksum)

    model = models.make(settings, task, mesh, origin)
    params = model.params
    parameters = sum(p.size for p in jax.tree.leaves(params))
    tx = make_optimizer(settings, deepspeed, steps_per_epoch=batches.per_epoch)
    opt_state = committed(tx.init(params), mesh)
    placement = mesh and jax.tree.map(lambda x: x.sharding, (params, opt_state))
    per_example = PER_EXAMPLE[task.kind]
    train_step = make_train_step(
        model.graphdef,
        tx,
        per_example,
        micro_batches=settings.micro_batches,
        placement=placement,
    )
    validate = make_validate(model.graphdef, per_example, task, samples, stop.check)

    folder = make_run_folder(settings, fresh=fresh)
    peers.go_on = (
        f"Start all of them again with --run {folder.name}: the run goes on from its last "
        "checkpoint, if it has one."
    )

    for line in said_of_deepspeed(asked, settings, deepspeed):
        say(line)
    for line in (*task.notes, *task.overview):
        say(line)
    if of_warm_up is not None:
        say(of_warm_up)
    rows: list[tuple[Row, ScheduleRow]] = []
    tokens_per_step = settings.batch_size * settings.sequence_length
    with contextlib.ExitStack() as stack:
        stack.enter_context(naming(folder))
        stack.enter_context(run_lock(folder, say))
        checkpoints = stack.enter_context(
            Checkpoints(
                folder / "checkpoints",
                keep=settings.keep,
                keep_best=settings.keep_best,
                larger_is_better=task.best != "loss",
                describe=description(
                    settings, task.checksum, origin and origin.config, task.labels
                ),
                say=say,
            )
        )
        # The steps that are done already; with them the last start's validations, and its losses
        # and counts that are in no row of the metrics yet.
        done, metered, schedule, engine_state = 0, None, None, None
        validations: list[tuple[int, dict[str, float]]] = []
        found = checkpoints.newest()
        if found is not None:
            params, opt_state, engine_state, progress = checkpoints.restore(
                found, params, opt_state
            )
            done, metered, schedule = found, progress["meter"], progress["schedule"]
            validations = [(step, figures) for step, figures in progress["validations"]]
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
            rows += read_rows(folder, until=done - len(metered["losses"]), say=say)
        else:
            if (folder / "settings.toml").is_file():  # of a start that was ended before it saved
                say(f"no checkpoint to go on from in {folder}: the run begins anew")
            if model.drawn:
                say(f"not in {settings.model}, so drawn at random: {', '.join(model.drawn)}")

        engine = None
        if settings.optimizer != "adamw":
            try:
                engine = zenflow_jax.HostEngine(
                    params,
                    opt_state,
                    host_kernel=settings.host_kernel,
                    host_state=settings.host_state,
                    prefetch_bytes=settings.prefetch_bytes,
                    threads=settings.threads,
                    engine_state=engine_state,
                    # This process has nothing to do beside the job, which can be started again.
                    exit_if_stuck=True,
                )
            except ValueError as error:  # too little pinned memory, or other options than before
                raise SettingsError(str(error)) from error
            stack.enter_context(engine)
            if timeline and processes.is_first():
                # However the run ends.
                stack.callback(lambda: write_timeline(timeline, engine.timeline, console))
        checkpoints.set_aside()  # this start is a valid one
        log = NoLog()
        if processes.is_first():
            write_settings(folder, settings)
            log = RunLog(
                folder,
                steps=settings.steps,
                console=console,
                progress=settings.progress,
                rows=rows,
                validations=validations,
            )
        stack.enter_context(log)
        meter = Meter(
            log_every=settings.log_every,
            waited_s=lambda: engine.stats.wait_s if engine else 0.0,
            steps_done=done,
            state=metered,
        )
        skips = SkippedSteps(
            most=settings.max_skipped,
            first=done + 1,
            skipped=int(jax.device_get(skipped_steps(opt_state))),
            remedy=f"{causes_of_infinity(settings)} With --run {folder.name}, and a lower "
            "--learning-rate, a start goes on from the last checkpoint, if there is one; another "
            "--run begins anew.",
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

        def validated(step: int) -> dict[str, float]:
            """The figures after that step, which is the last one taken."""
            if not validations or validations[-1][0] != step:
                jax.block_until_ready(params)
                with meter.paused():
                    validations.append((step, validate(params)))
                log.validation(*validations[-1])
            return validations[-1][1]

        def is_validated(step: int) -> bool:
            """Whether that is due there. After the last step it is always, and then all windows
            have been closed."""
            is_saved = settings.keep_best and is_due(settings.save_every, step)
            return step < settings.steps and (is_saved or is_due(settings.evaluate_every, step))

        if not done:
            check_finite(validated(0), causes_of_infinity(settings))
        elif is_validated(done):
            # The last start was stopped before it came to it, or that step was its last one.
            checkpoints.rate(done, validated(done)[task.best])

        def save(step: int) -> None:
            for row in meter.catch_up():
                report(row)
            now = {
                "validations": validations,
                "meter": meter.state(),
                "schedule": record.state(),
            }
            at, figures = validations[-1] if validations else (0, {})
            figure = figures[task.best] if at == step else None
            checkpoints.save(step, params, opt_state, engine, now, figure=figure)

        # What blocks in this loop: the first step, until it is compiled and done; a row, until the
        # device is within `log_every` steps of the loop; and `exchange`, when the loop is two steps
        # ahead of the device (one, where windows or selections adapt), or when a window closes
        # before the host has finished the update of the one before (the share of time waiting is of
        # this). `save` blocks until the step is done, on device and host, and copied, and until the
        # save before is written. The rest is dispatched only.
        saved = done
        compiled: set[int | None] = set()  # lengths of batches
        if done < settings.steps:
            log.say("compiling the training step")
        for step in range(done + 1, settings.steps + 1):
            length, tokens = batches.length(step - 1), batches.tokens(step - 1)
            tokens = tokens_per_step if tokens is None else tokens
            with contextlib.ExitStack() as compiling:
                if is_new := length not in compiled:
                    compiled.add(length)
                    jax.block_until_ready(params)
                    compiling.enter_context(meter.paused())
                params, opt_state, loss, skipped = train_step(params, opt_state, batches[step - 1])
                if is_new:
                    # What compiles is in no rate.
                    jax.block_until_ready(params)
                    tokens = 0
            if engine:
                params, opt_state = engine.exchange(params, opt_state)
            record.step(step)
            if step == done + 1:
                jax.block_until_ready(params)
                meter.start()
                stop.begin()
                log.begin(step)
            if row := meter.step(loss, skipped=skipped, tokens=tokens):
                report(row)
            skips.step(skipped)
            checkpoints.poll()
            asked = stop.after(step)
            try:
                if not asked and is_validated(step):
                    validated(step)
            except Interrupted:
                asked = stop.after(step)
            if asked:
                # Who asks may not wait long.
                save(step)
                checkpoints.finish()
                raise Stopped(how_to_go_on(asked, step, folder), signal_number=asked)
            if is_due(settings.save_every, step):
                if skips.was_last():
                    # It may be the weights that are no good any more, and the older checkpoints
                    # what there is to go on from.
                    say(f"step {step} was skipped: no checkpoint of it")
                else:
                    save(saved := step)
        if saved < settings.steps:
            # Before the last window is closed early, so that the run can go on with more steps as
            # if it had had them from the start.
            save(settings.steps)
        checkpoints.wait()
        if asked := stop.end(f"all {settings.steps} steps are done and saved"):
            raise Stopped(how_to_go_on(asked, settings.steps, folder), signal_number=asked)
        if done == settings.steps:
            meter.start()
        for row in meter.drain():
            report(row)
        skips.finish()
        if engine:
            params, opt_state = engine.flush(params, opt_state)
        jax.block_until_ready(params)  # the last update belongs to the measured time
        totals = meter.since_start()

        figures_after = validated(settings.steps)
        checkpoints.rate(settings.steps, figures_after[task.best])
        best = checkpoints.best(or_step=settings.steps)
        if best < settings.steps:
            # As they were validated: without the updates that were on their way then.
            params = checkpoints.weights(best, params)
        values = iter(jax.tree.leaves(params))
        if engine and best == settings.steps:
            values = (x for _, x in zenflow_jax.iter_master_params(params, opt_state, engine))
        of_folder = {"labels": task.labels, "texts": texts}
        saved_model = models.write(folder, model, params, values, **of_folder)
        checkpoints.finish()

    stats = engine.stats if engine else None
    moved = stats.bytes_to_host + stats.bytes_to_device if stats else 0
    steps_here = max(settings.steps - done, 1)
    summary = Summary(
        optimizer=settings.optimizer,
        device=jax.devices()[0].device_kind,
        devices=mesh.size if mesh else 1,
        processes=jax.process_count(),
        parameters=parameters,
        target=task.target,
        steps=settings.steps,
        skipped=skips.total,
        best_step=best if settings.keep_best else None,
        resumed_at=done,
        tokens_per_s=totals.tokens_per_s,
        bytes_per_parameter_and_step=processes.sum_over(moved / (parameters * steps_here)),
        wait_share=totals.wait_share,
        host_s=stats.work_s if stats else 0.0,
        train_s=totals.seconds,
        total_s=time.perf_counter() - begin,
        validation_before=validations[0][1],
        validation_after=figures_after,
        windows=stats.windows if stats else None,
        mean_window_length=mean_window_length(stats) if stats else None,
        reselections=stats.reselections if stats else None,
        kept_share=stats.kept_share if stats else None,
    )
    if processes.is_first():
        with naming(folder):
            write_picture(folder, rows, validations, summary)
            write_summary(folder, summary)
        console.print(summary_table(summary))
        if engine and (found := _hiding(opt_state, stats, totals.seconds, settings)):
            say(found.advice)
        if settings.keep_best:
            say(f"{saved_model} is that of step {best}, which did best in the validation")
        say(f"metrics, loss curve, settings and {saved_model}: {folder}")
    processes.leave()
    return summary


def _hiding(
    opt_state: Any, stats: zenflow_jax.EngineStats, seconds: float, settings: Settings
) -> zenflow_jax.Hiding | None:
    """How busy the host was; of the steps that were timed, so of all but the first.

    None where that says nothing of a longer run, or of one on a GPU: after few steps, and on a CPU,
    whose cores the host's work shares with the step.
    """
    if stats.steps < LEAST_STEPS or jax.devices()[0].platform == "cpu":
        return None
    of_all = seconds * stats.steps / (stats.steps - 1)
    return zenflow_jax.hiding(opt_state, stats, of_all, host_state=settings.host_state)


def show_plan(
    settings: Settings, planning: Planning, arguments: Sequence[str], console: Console
) -> None:
    """Says what the run of these arguments would take, and trains nothing."""
    from train import plan_report  # with all that it imports, which no training needs
    from train.planning import plan_run

    axes = mesh_axes(settings.mesh) if settings.mesh else {}
    with contextlib.suppress(RuntimeError):  # where devices have been asked for before
        # To lay the model out on; nothing is computed on them.
        jax.config.update("jax_num_cpu_devices", max(math.prod(axes.values()), 1))
    parts = math.prod(axes.get(name, 1) for name in BATCH_AXES)
    settings, _ = with_deepspeed(settings, parts)
    found = plan_run(settings, planning)
    plan_report.show(found, arguments, console)
    if planning.plan_json:
        plan_report.write_json(found, arguments, Path(planning.plan_json))
    if planning.plan_picture:
        plan_report.write_picture(found, Path(planning.plan_picture))


def is_due(every: int, step: int) -> bool:
    """Whether what is done every so many steps, 0 for never, is done after this one."""
    return every > 0 and step % every == 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code.

    0; 2 after a mistake or a failure that the message explains; 128 and the signal's number if one
    has stopped the run.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        command = read_command_line(arguments, program=PROGRAM)
    except FAILURES as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    try:
        if command.planning.plan:
            try:
                show_plan(command.settings, command.planning, arguments, Console())
            except KeyboardInterrupt:
                sys.stderr.write("stopped by SIGINT\n")
                return 128 + signal.SIGINT
            return 0
        processes.join(command.launch)
        console = Console(quiet=not processes.is_first())
        say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        start = command.start
        if start.export is not None:
            if processes.is_first():
                which, target = start.export
                export(command.settings, which, Path(target), say)
            processes.leave()
            return 0
        timeline = Path(start.timeline) if start.timeline else None
        host = (command.launch.coordinator or "").rpartition(":")[0] or None
        # Before anything is read, which may take minutes.
        again = Peers(host, go_on="Start all of them again.", say=say)
        with StopRequest(say) as stop, again as peers:
            train(
                command.settings,
                console,
                stop,
                peers,
                fresh=start.fresh,
                timeline=timeline,
                force=command.planning.force,
            )
    except Stopped as stopped:
        if processes.is_first():
            sys.stderr.write(f"{stopped}\n")
        processes.leave()
        return 128 + stopped.signal_number
    except FAILURES as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (MemoryError, RuntimeError) as error:  # of which jax's are some
        lack = lack_behind(error)
        if lack is None:
            raise
        sys.stderr.write(f"error: {lack_of_memory(lack, command.settings)}\n")
        return 2
    except OSError as error:
        if error.errno not in NO_WRITING:
            raise
        sys.stderr.write(
            f"error: expected to write the files of the run, got: {error}. Make room or see to the "
            "permissions, and start it again with --run: it goes on from its last checkpoint, if "
            "it has one.\n"
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
