"""Prepares a run before its folder exists: data, model, optimizer and compiled functions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from train.cli.command_line import to_toml
from train.cli.settings import Settings, SettingsError, steps_of
from train.distributed import processes
from train.distributed.sharding import batch_sharding, committed, make_mesh
from train.huggingface.chat_template import TEMPLATE, read_template_text
from train.huggingface.loading import Pretrained, read_folder
from train.log.meter import causes_of_infinity, check_finite
from train.model.decoder import DecoderConfig
from train.model.encoder import EncoderConfig
from train.run import models, optimizers
from train.run.by_layer import LayeredModel
from train.run.step import DETERMINISTIC, PER_EXAMPLE, make_judge, make_train_step, make_validate
from train.tasks import Task
from train.tasks.batches import Batches, Sample
from train.tasks.chosen import make_task
from zenflow_jax import layerwise, streaming


class Sources(NamedTuple):
    settings: Settings
    mesh: Mesh | None
    origin: Pretrained | None  # the model's folder
    config: DecoderConfig | EncoderConfig
    texts: Mapping[str, str]  # files for the trained model's folder, read when the run begins
    task: Task
    sample: Sample  # the batches for validation


class Job(NamedTuple):
    settings: Settings  # final
    mesh: Mesh | None
    task: Task
    texts: Mapping[str, str]
    batches: Batches
    model: models.Model
    layered: LayeredModel | None  # if weights stream
    train_step: Callable | None  # for all other models
    validate: Callable[[Any], dict[str, float]]  # from `make_validate`


def read(settings: Settings) -> Sources:
    """Reads and checks everything except weights, with the arguments and errors of `train`."""
    settings.check_task()
    mesh = make_mesh(settings.mesh)
    if settings.steps == 0 and (run := settings.run) is not None:
        # A run's settings contain both run and model, so the choice would be ambiguous.
        trained, model = Path(settings.output_dir, run, models.FOLDER), settings.model
        if model is None or Path(model).resolve() != trained.resolve():
            raise SettingsError(
                f"`steps`: 0 with the run {run} would only show metrics of "
                f"{model or 'an untrained model'}. For the model that the run has trained, pass "
                f"--model {trained}; otherwise pass --run None."
            )
    origin = None if settings.model is None else read_folder(settings.model)
    config = models.config_of(origin, settings)
    path = settings.chat_template
    texts = {} if path is None else {TEMPLATE: read_template_text(Path(path))}
    task = make_task(settings, origin)
    # Validations also use micro-batches, because these fit on the device.
    parts, most = settings.micro_batches, settings.eval_batches
    sample = Sample(
        task.validation,
        batches=None if most is None else most * parts,
        batch_size=settings.batch_size // parts,
        seed=settings.seed,
        mesh=mesh,
        buckets=settings.length_buckets,
    )
    return Sources(settings, mesh, origin, config, texts, task, sample)


def prepare(sources: Sources) -> tuple[Job, Any]:
    """Creates model, compiled functions and optimizer state."""
    settings, mesh, task = sources.settings, sources.mesh, sources.task
    batches = Batches(
        task.train,
        batch_size=settings.batch_size,
        seed=settings.seed,
        mesh=mesh,
        buckets=settings.length_buckets,
    )
    if settings.steps is None:
        steps = steps_of(settings.epochs, batches.per_epoch)
        settings = dataclasses.replace(settings, steps=steps)
    # A resumed run with more steps must have the same number of rounds.
    rounds = settings.warm_up_rounds
    settings = dataclasses.replace(settings, full_warm_up_share=None, full_warm_up_rounds=rounds)
    processes.check_same(to_toml(vars(settings)), task.checksum)
    model, layered, judge = make_model(sources)
    opt_state = train_step = None
    if layered is None:
        tx = optimizers.make_optimizer(settings)
        opt_state = committed(tx.init(model.params), mesh)
        if settings.stream == "gradients" and jax.default_backend() != "cpu":
            try:
                streaming.check_device()
            except NotImplementedError as error:  # this version of jax is too old
                raise SettingsError(str(error)) from error
        train_step = make_train_step(
            model.graphdef,
            tx,
            PER_EXAMPLE[task.kind],
            micro_batches=settings.micro_batches,
            stream=settings.stream == "gradients",
            placement=mesh and jax.tree.map(lambda x: x.sharding, (model.params, opt_state)),
        )

    job = Job(
        settings=settings,
        mesh=mesh,
        task=task,
        texts=sources.texts,
        batches=batches,
        model=model,
        layered=layered,
        train_step=train_step,
        validate=make_validate(judge, task, sources.sample),
    )
    return job, opt_state


def make_model(sources: Sources) -> tuple[models.Model, LayeredModel | None, Callable]:
    """Creates the model, its functions if weights stream, and the `judge` for `make_validate`."""
    settings, mesh, labels = sources.settings, sources.mesh, sources.task.labels
    sharding = mesh and batch_sharding(mesh, settings.batch_size, settings.micro_batches)
    build = models.builder(sources.config, settings, sharding=sharding, labels=len(labels))
    options: dict[str, Any] = {"labels": labels, "seed": settings.seed}
    if settings.stream != "weights":
        model = models.make(build, mesh, sources.origin, **options)
        return model, None, make_judge(model.graphdef, PER_EXAMPLE[sources.task.kind])
    model, layered = models.make_layered(build, mesh, sources.origin, **options)
    return model, layered, lambda trainer, batch: trainer.evaluate(batch, layered.judge)


def make_trainer(job: Job, state: Any = None) -> layerwise.Trainer:
    """Creates the trainer for a run whose weights stream; `state` resumes it."""
    settings, layered = job.settings, job.layered
    assert layered is not None
    trainer = layerwise.Trainer(
        job.model.params if state is None else layered.shapes,
        **layered.functions,
        optimizer=optimizers.leafwise_optimizer(settings),
        max_grad_norm=settings.max_grad_norm,
        updates=settings.layer_updates,
        inputs=settings.layer_inputs,
        compiler_options=DETERMINISTIC,
        state=state,
    )
    job.model.params.clear()  # otherwise the outer weights would stay on the device twice
    return trainer


def evaluate(sources: Sources, say: Callable[[str], None]) -> None:
    """Shows a validation's metrics, which must be finite. All processes must call it."""
    settings, task, sample = sources.settings, sources.task, sources.sample
    processes.check_same(to_toml(vars(settings)), task.checksum)
    for line in (*task.notes, *task.overview):
        say(line)
    model, layered, judge = make_model(sources)
    if drawn := models.describe_new_weights(model, task.labels):
        say(f"{drawn}. So these figures are at chance level.")
    with contextlib.ExitStack() as stack:
        weights = model.params
        if layered is not None:
            trainer = layerwise.Trainer(weights, **layered.functions, optimizer=None)
            weights = stack.enter_context(trainer)
            model.params.clear()  # as `make_trainer` does
        figures = make_validate(judge, task, sample)(weights)
    say(f"{settings.model or 'an untrained model'} on {sample.examples} validation examples:")
    for name, value in figures.items():
        per = f" nats per {task.target}" if name == "loss" else ""
        say(f"{name} {value:.4f}{per}")
    check_finite(figures, causes_of_infinity(settings))
    processes.leave()
