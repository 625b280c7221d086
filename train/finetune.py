"""Fine-tunes a small built-in model, or a model in a Hugging Face folder.

    python -m train.finetune configs/quickstart.toml
    python -m train.finetune configs/quickstart.toml --run first    # run again to resume
    python -m train.finetune configs/quickstart.toml --run first --export 400 DIR
    python -m train.finetune configs/quickstart.toml --plan
    python -m train.finetune configs/glue_sst2.toml --model DIR --data DIR --mesh data=2,fsdp=4

Read `train` first, which is the whole job, then `run/setup.py` (the parts of a run) and
`run/loop.py` (how it resumes, loops and finishes).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from train import Failure
from train.checkpoints.compatibility import MODEL_SETTINGS, description_of_model
from train.checkpoints.reading import SavedCheckpoints, check_path
from train.cli.command_line import PROGRAM, Command, Planning, read_command_line
from train.cli.settings import Settings, SettingsError, StepSettings, task_name
from train.distributed import processes
from train.distributed.stopping import Stopped, StopRequest
from train.huggingface.chat_template import TEMPLATE
from train.huggingface.loading import read_folder
from train.log.run_log import show
from train.run import models
from train.run.folder import make_run_folder, run_lock
from train.run.loop import Run
from train.run.setup import evaluate, prepare, read
from zenflow_jax.planning import LIMIT_NAME


def train(command: Command, console: Console, stop: StopRequest) -> None:
    """Trains a run, or finishes a stopped run, and leaves the results in the run's folder.

    With `steps` 0, it shows a validation's metrics and writes nothing. A `run` is resumed from its
    newest intact checkpoint. Raises `Stopped` if a signal ends the run.
    """
    begun_s = time.perf_counter()
    say = partial(show, console)
    settings = command.settings
    if settings.steps != 0:
        check_path(Path(settings.output_dir, settings.run or ""))
    sources = read(settings)
    if settings.steps == 0:
        evaluate(sources, say)
        return
    job, opt_state = prepare(sources, stop.check)
    folder = make_run_folder(job.settings)
    for line in job.notes:
        say(line)
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_lock(folder, say))
        run = Run(job, opt_state, folder, console, stop, stack)
        del opt_state  # the run donates it
        ended = None
        if run.resume():
            run.loop()
            ended = run.finish()
    if ended is not None:
        run.report(ended, begun_s)
    processes.leave()


def export(settings: Settings, name: str, target: Path, say: Callable[[str], None]) -> None:
    """Writes the weights of a checkpoint to a new or empty folder; its `name` is its step.

    These are the validated weights, without the updates that were pending at that step.
    """
    if settings.run is None:
        raise SettingsError("`--export`: needs the name of a run. Pass --run.")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"`--export`: {target} is neither new nor empty. Pass another folder.")
    target = target.absolute()  # because "." has no name
    folder = Path(settings.output_dir) / settings.run
    origin = None if settings.model is None else read_folder(settings.model)
    checkpoints = SavedCheckpoints(
        folder / "checkpoints",
        describe=description_of_model(settings.subset(MODEL_SETTINGS), origin and origin.config),
    )
    step, labels = checkpoints.find(name)
    config = models.config_of(origin, settings)
    build = models.builder(config, settings, labels=len(labels))
    layered = models.abstract_layered(build)[1] if settings.stream == "weights" else None
    shapes = layered.shapes if layered else jax.eval_shape(lambda: models.split(build()))[1]
    weights = checkpoints.weights(step, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes))
    weights, values = layered.whole(weights) if layered else (weights, None)
    # The run's own template, even if the settings have changed.
    copy = folder / TEMPLATE
    texts = models.template_files(str(copy) if copy.is_file() else settings.chat_template)
    task = task_name(settings)
    models.write(target, origin, weights, values, labels=labels, texts=texts, task=task)
    pending = settings.has_engine
    line = f"{target} contains the weights of checkpoint {step} in {folder}"
    say(line + ", without pending updates" * pending)


def show_plan(
    settings: Settings, planning: Planning, arguments: Sequence[str], console: Console
) -> None:
    """Shows what the run would need, or all ways to run it unless `arguments` choose one."""
    from train.plan import report
    from train.plan.planning import has_compiler, plan_run

    if has_compiler():
        console.print(
            "Compiling a large model takes minutes. XLA's messages about memory are not errors."
        )
    words = {word.partition("=")[0] for word in arguments}
    chosen = not words.isdisjoint(("--optimizer", "--stream"))
    plan = plan_run(settings, planning, chosen=chosen, say=partial(show, console))
    report.show(plan, arguments, console)


def describe_oom(error: BaseException, run: StepSettings) -> str | None:
    """Describes an out-of-memory error among the causes of `error`; None if there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MemoryError):
        # "Out of memory" in XLA's words, too.
        text = str(cause).lower().replace("resource_exhausted", "out of memory")
        if isinstance(cause, jax.errors.JaxRuntimeError) and "out of memory" in text:
            break
        cause = cause.__cause__
    if cause is None:
        return None
    reason = str(cause).partition("\n")[0]
    return (
        f"out of memory with batches of {run.batch_size} x {run.sequence_length} tokens in "
        f"{run.micro_batches} micro-batches, using {run.optimizer}: {reason} "
        "Use a smaller --batch-size, more --micro-batches, --remat, or a way that --plan shows."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 2 after a failure, or 128 + N after the signal N."""
    arguments = sys.argv[1:] if argv is None else argv
    command = None
    script = Path(sys.argv[0]).name
    try:
        program = script if script == "zenflow-plan" else PROGRAM
        command = read_command_line(arguments, program=program)
        return _execute(command, arguments)
    except Stopped as stopped:
        if processes.is_first():
            sys.stderr.write(f"{stopped}\n")
        processes.leave()
        return 128 + stopped.signal_number
    except KeyboardInterrupt:  # while there is nothing to save
        sys.stderr.write("stopped by SIGINT\n")
        return 128 + signal.SIGINT
    except Failure as error:
        message = str(error)
    except (MemoryError, RuntimeError) as error:  # jax's errors are subclasses
        message = command and describe_oom(error, command.settings)
        if message is None:
            raise
    sys.stderr.write(f"error: {message}\n")
    return 2


def _execute(command: Command, arguments: Sequence[str]) -> int:
    if command.planning.plan:
        show_plan(command.settings, command.planning, arguments, Console())
        return 0
    if command.settings.stream == "weights" and LIMIT_NAME not in os.environ:
        from train.plan.planning import pinned_limit

        os.environ[LIMIT_NAME] = str(pinned_limit(command.settings))
    processes.join(command.launch)
    console = Console(quiet=not processes.is_first())
    say = partial(show, console)
    if command.exporting.export is not None:
        if processes.is_first():
            name, target = command.exporting.export
            export(command.settings, name, Path(target), say)
        processes.leave()
        return 0
    with StopRequest() as stop:
        train(command, console, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
