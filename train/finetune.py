"""Fine-tunes a small built-in model, or a model in a Hugging Face folder.

    python -m train.finetune configs/quickstart.toml
    python -m train.finetune configs/quickstart.toml --run first    # run again to resume
    python -m train.finetune configs/quickstart.toml --plan
    python -m train.finetune configs/glue_sst2.toml --model DIR --data DIR --mesh data=2,fsdp=4

Read `train` first, which is the whole job, then `run/setup.py` (the parts of a run) and
`run/loop.py` (how it resumes, loops and finishes).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from train import Failure
from train.checkpoints.checkpoints import check_path
from train.cli.command_line import PROGRAM, Command, Planning, read_command_line
from train.cli.settings import Settings, StepSettings
from train.distributed import processes
from train.distributed.stopping import Stopped, StopRequest
from train.log.results import show
from train.run.folder import make_run_folder, run_lock
from train.run.loop import Run
from train.run.setup import evaluate, prepare, read
from zenflow_jax.planning import LIMIT_NAME, UnfitRunError


def train(command: Command, console: Console, stop: StopRequest) -> None:
    """Trains a run, or finishes a stopped run, and leaves the results in the run's folder.

    With `steps` 0, it shows a validation's metrics and writes nothing. A `run` is resumed from its
    newest checkpoint. Raises `Stopped` if a signal ends the run.
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
    job, opt_state = prepare(sources)
    folder = make_run_folder(job.settings)
    for line in (*job.task.notes, *job.task.overview):
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
    # "Out of memory" in XLA's words, too.
    text = str(error).lower().replace("resource_exhausted", "out of memory")
    of_device = isinstance(error, jax.errors.JaxRuntimeError) and "out of memory" in text
    if not of_device and not isinstance(error, MemoryError):
        return error.__cause__ and describe_oom(error.__cause__, run)
    reason = str(error).partition("\n")[0]
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
    except (Failure, UnfitRunError) as error:
        message = str(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"{error}. Free disk space (also in TMPDIR), and start again with --run."
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
    with StopRequest() as stop:
        train(command, console, stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
