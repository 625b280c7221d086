"""Declares the settings of a training run; `command_line.py` reads them.

A function that needs many settings takes one of the groups, so that its signature shows which
settings it needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from train import Failure
from train.cli.arguments import check_bounds, option

# Tasks that read an option.
_OWN, _TEXTS = "standard_library", "language alpaca chat"
_ALL = f"{_OWN} {_TEXTS} classification"

# optax's optimizers, which run on the device; with --stream weights, next to each gradient.
ON_DEVICE = ("adamw", "lion", "muon", "adafactor", "sgd", "sign")
WITHOUT_MOMENTS = ("adafactor", "sgd", "sign")

# The task of a model that classifies pairs of texts from a user's own files.
PAIRS = "classification of pairs"

# A validation's metrics; the first decides which weights are best.
_LOSS = ("loss",)
_METRICS = {"classification": ("accuracy", "macro_f1", "matthews", "loss")}


class SettingsError(Failure):
    """A mistake in the settings."""


def task_name(settings: DataSettings) -> str:
    """Returns the task that the trained model's config records."""
    is_own = settings.task == "classification"
    return PAIRS if is_own and settings.second_text_column else settings.task


def steps_of(share: float, count: int) -> int:
    """Returns a share of a count, rounded up."""
    return math.ceil(round(share * count, 6))  # rounded, as 0.07 * 100 is 7.000000000000001


class _Group:
    def subset(self, names: Iterable[str]) -> dict[str, Any]:
        """Returns the settings with these names."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Group):
    """Model: a Hugging Face folder or, with --task standard_library, a small model."""

    model: str | None = option(None, "Hugging Face folder, or org/name on the Hub.")
    width: int = option(256, "Size of the residual stream.", above=0, tasks=_OWN)
    layers: int = option(4, "Number of transformer blocks.", above=0, tasks=_OWN)
    heads: int = option(4, "Attention heads; width / heads must be even.", above=0, tasks=_OWN)
    ffn: int = option(640, "Inner size of the SwiGLU layers.", above=0, tasks=_OWN)
    dtype: Literal["bfloat16", "float32"] = option(
        "bfloat16", "Dtype of matrix products and, where the host has masters, of matrices."
    )
    scan_layers: bool = option(False, "Loop over stacked layers, which compiles faster.")
    remat: bool = option(False, "Recompute activations in the backward pass, to save memory.")


@dataclass(frozen=True, kw_only=True)
class DataSettings(_Group):
    """Data, and how to make examples from it (docs/finetuning.md)."""

    task: Literal["standard_library", "language", "alpaca", "chat", "classification"] = option(
        "standard_library",
        "standard_library: bytes of Python's source files. language: text. alpaca: instructions. "
        "chat: conversations. classification: your own classes.",
    )
    data: str | None = option(None, "File or folder; none for standard_library.")
    length_buckets: int = option(4, "Number of lengths that batches are padded to.", above=0)
    text_column: str = option("text", "Column with the text.", tasks="language classification")
    second_text_column: str | None = option(None, "Pairs' second column.", tasks="classification")
    label_column: str = option("label", "Column with the label.", tasks="classification")
    chat_template: str | None = option(None, "Jinja template. Default: the model's.", tasks="chat")
    validation_share: float = option(
        0.1, "Share to validate on, without validation files (val*, dev*).", tasks=_ALL
    )
    corpus_megabytes: float = option(4.0, "Size of the text.", above=0, tasks=_OWN)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(_Group):
    """Training: batches, steps and devices."""

    seed: int = option(0, "Seed for split, initial weights and batch order.", least=0)
    steps: int | None = option(None, "Steps; 0: only evaluate. Default: --epochs.", least=0)
    epochs: float = option(1.0, "Passes over the training data, if --steps is not set.", above=0)
    batch_size: int = option(8, "Sequences per step, over all devices.", above=0)
    sequence_length: int = option(128, "Tokens per sequence (bytes for standard_library).", above=0)
    micro_batches: int = option(1, "Parts of a batch, computed one by one to save memory.", above=0)
    optimizer: Literal[
        "zenflow", "offload", "adamw", "lion", "muon", "adafactor", "sgd", "sign"
    ] = option(
        "zenflow",
        "offload: AdamW on the host; each step waits for it. The others: optax's, on the device.",
    )
    max_skipped: int = option(10, "Stop after this many non-finite gradients in a row.", above=0)
    mesh: str | None = option(None, "Mesh axes, such as data=2,fsdp=4 (docs/multi_host.md).")


@dataclass(frozen=True, kw_only=True)
class AdamSettings(_Group):
    """Adam and the other optimizers: learning rate, decay and clipping."""

    learning_rate: float = option(1e-3, "Peak of the learning rate, after the warm-up.", above=0)
    schedule: Literal["cosine", "linear", "constant"] = option(
        "cosine", "Learning rate after the peak; cosine ends at a tenth of it, linear at zero."
    )
    warmup_steps: int = option(0, "Number of steps in the linear warm-up.", least=0)
    warmup_share: float | None = option(None, "The same, as a share of all steps.")
    b1: float = option(0.9, "Adam's decay rate for the first moment, and Lion's b1.")
    b2: float | None = option(
        None, "Adam's decay rate for the second moment, and Lion's b2. Default: 0.999; lion: 0.99."
    )
    eps: float = option(1e-8, "Adam's epsilon.", above=0)
    weight_decay: float = option(0.01, "Weight decay, except for biases and norms.", least=0)
    max_grad_norm: float | None = option(None, "Limit for the global gradient norm.", above=0)


@dataclass(frozen=True, kw_only=True)
class ZenFlowSettings(_Group):
    """zenflow: the device's share of updates, and when the host updates the rest."""

    topk_ratio: float = option(0.1, "Share of channels that the device updates at each step.")
    update_interval: int | Literal["auto"] = option(
        4, "Steps per window; at its end the host updates the deferred channels. auto: adaptive."
    )
    select_interval: int | Literal["auto"] | None = option(
        None, "Steps between selections of channels. auto: adaptive. Default: 16 windows."
    )
    full_warm_up_rounds: int = option(0, "Initial steps that update all channels.")
    full_warm_up_share: float | None = option(None, "The same, as a share of all steps.")
    staleness: int | None = option(None, "Steps from a window's end to its update. Default: 1.")


@dataclass(frozen=True, kw_only=True)
class HostSettings(_Group):
    """Host, with zenflow and offload: how gradients reach it, and how it updates weights."""

    send_gradients: Literal["during_step", "after_step"] = option(
        "during_step", "When gradients leave the device."
    )
    stream: Literal["none", "gradients", "weights"] = option(
        "none", "gradients: scanned layers send them one by one. weights: all state is on the host."
    )
    layer_updates: Literal["after_backward", "during_backward"] = option(
        "after_backward", "With --stream weights: when layers are updated; during hides this work."
    )
    layer_inputs: Literal["device", "host"] = option(
        "device", "With --stream weights, where the layers' inputs wait for the backward pass."
    )
    host_kernel: Literal["numba", "numpy"] = option("numba", "Implementation of the host update.")
    host_state: Literal["float32", "compact"] = option(
        "float32", "Adam's moments: 8 bytes per parameter, or 2.2 (compact); also with adamw."
    )


@dataclass(frozen=True, kw_only=True)
class OutputSettings(_Group):
    """Output: metrics, validations and checkpoints."""

    output_dir: str = option("runs", "Folder for all runs.")
    run: str | None = option(None, "Name of a new run, or of a run to resume. Default: a new run.")
    log_every: int = option(10, "Steps between rows of metrics.csv.", above=0)
    evaluate_every: int = option(
        0, "Steps between validations; 0: only before and after training.", least=0
    )
    eval_batches: int | None = option(None, "Batches per validation. Default: all.", above=0)
    save_every: int = option(100, "Steps between checkpoints; 0: only at the end.", least=0)
    keep: int = option(2, "Number of newest checkpoints to keep.", above=0)
    keep_best: bool = option(False, "Keep the checkpoint with the best metric; write its weights.")
    best: str | None = option(None, "Metric to compare, such as macro_f1. Default: the task's.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(HostSettings, ZenFlowSettings, AdamSettings, TrainingSettings):
    """All settings that the optimizer depends on."""

    @property
    def has_engine(self) -> bool:
        """Returns whether a `HostEngine` updates weights."""
        return self.optimizer not in ON_DEVICE

    @property
    def warm_up_rounds(self) -> int:
        """Returns the steps of the full warm-up; `steps` must be known."""
        share = self.full_warm_up_share
        return self.full_warm_up_rounds if share is None else steps_of(share, self.steps)


@dataclass(frozen=True, kw_only=True)
class StepSettings(OptimizerSettings, ModelSettings):
    """All settings that a training step depends on."""


@dataclass(frozen=True, kw_only=True)
class Settings(OutputSettings, StepSettings, DataSettings):
    """All settings of `train.finetune`; each can be a key of the TOML file."""

    @property
    def metric(self) -> str:
        """Returns the metric that decides which weights are best."""
        return self.best or _METRICS.get(self.task, _LOSS)[0]

    def __post_init__(self):
        # zenflow checks its own arguments, which have the same names.
        check_bounds(self)
        metrics = _METRICS.get(self.task, _LOSS)
        known = f"a metric of {self.task}: {', '.join(metrics)}"
        self._check("best", self.metric in metrics, known)
        is_share = 0 < self.validation_share < 1 or (self.validation_share, self.steps) == (1, 0)
        wanted = "a share above 0 and below 1, such as 0.001, since every run validates (or 1 with "
        self._check("validation_share", is_share, wanted + "--steps 0)")
        for name in ("b1", "b2", "full_warm_up_share", "warmup_share"):
            self._check(name, 0 <= (getattr(self, name) or 0) < 1, "a share from 0 to below 1")
        for share, count in _SHARES.items():
            both = getattr(self, share) is not None and getattr(self, count)
            self._check(share, not both, f"left out, because {count} is set")
        is_name = self.run is None or (self.run.strip(".") and re.fullmatch(r"[\w.-]+", self.run))
        folder = "the name of a folder in output_dir (letters, digits, . _ -)"
        self._check("run", bool(is_name), folder)
        divisor = f"a number that divides batch_size, {self.batch_size}"
        self._check("micro_batches", self.batch_size % self.micro_batches == 0, divisor)
        for name, values in _STREAM_SETTINGS[self.stream].items():
            allowed = f"{' or '.join(map(repr, values))}, because stream is {self.stream!r}"
            self._check(name, getattr(self, name) in values, allowed)
        has_moments = self.host_state == "float32" or self.optimizer not in WITHOUT_MOMENTS
        self._check("host_state", has_moments, f"float32, because {self.optimizer} has no moments")
        # Each head rotates pairs of channels.
        multiple = f"a multiple of {2 * self.heads}, twice the number of heads"
        self._check("width", self.width % (2 * self.heads) == 0, multiple)

    def _check(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            value = getattr(self, name)
            raise SettingsError(
                f"`{name}`: must be {expected}, but is {value if value != '' else repr(value)}. "
                f"Change it in the config or pass {flag_of(name)}."
            )

    def check_task(self, paths: Iterable[str] = ("model", "data")) -> None:
        """Checks that the task has the paths that it needs, and no options that it does not read.

        A config file alone may lack the paths.
        """
        own = self.task == "standard_library"
        for name in paths:
            wanted = f"left out for {self.task}" if own else f"a path for {self.task}"
            self._check(name, own == (getattr(self, name) is None), wanted)
        for setting in fields(self):
            tasks = setting.metadata["tasks"]
            if tasks and self.task not in tasks.split():
                wanted = f"{setting.default}, since {self.task} does not read it (read by: {tasks})"
                self._check(setting.name, getattr(self, setting.name) == setting.default, wanted)


# Shares of all steps, each with the number of steps that it replaces.
_SHARES = {"full_warm_up_share": "full_warm_up_rounds", "warmup_share": "warmup_steps"}
_DURING_STEP = {"send_gradients": ["during_step"]}
_NOT_BY_LAYER = {"layer_updates": ["after_backward"], "layer_inputs": ["device"]}
_IN_SCANS = {"optimizer": ["zenflow"], "scan_layers": [True], "micro_batches": [1]}
_BY_LAYER = {"optimizer": ON_DEVICE, "scan_layers": [False]}
# Allowed values for each kind of stream.
_STREAM_SETTINGS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "none": _NOT_BY_LAYER,
    "gradients": _NOT_BY_LAYER | _IN_SCANS | _DURING_STEP,
    "weights": _BY_LAYER | _DURING_STEP,
}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_words(name: str, value: object) -> list[str]:
    """Returns the command-line words that set this value."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), str(value)]
