"""The settings of a training run, with defaults and limits; `command_line.py` reads them.

A function that needs many takes one of the groups, which name what it may read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from train import Failure

OwnTask = Literal["standard_library", "language", "alpaca", "chat", "classification"]
GlueTask = Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte"]

Dir, File = Annotated[str, "DIR"], Annotated[str, "FILE"]


# The task of a model whose classes are those of pairs from one's own files.
PAIRS = "classification of pairs"


class SettingsError(Failure):
    """A mistake in the settings."""


def trained_on(settings: Mapping[str, Any]) -> str:
    """The task, for the config of the trained model; of one's own classes also if of pairs."""
    is_own = settings["task"] == "classification"
    return PAIRS if is_own and settings.get("second_text_column") else settings["task"]


class _Group:
    def subset(self, names: Iterable[str]) -> dict[str, Any]:
        """The settings of these names."""
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_Group):
    """Model: a Hugging Face folder, or with --task standard_library a small one of these sizes."""

    model: Dir | None = None
    """Model to fine-tune: a Hugging Face folder, or org/name on the Hub."""
    width: int = 256
    """standard_library: size of the residual stream."""
    layers: int = 4
    """standard_library: number of transformer blocks."""
    heads: int = 4
    """standard_library: attention heads; width / heads must be even."""
    ffn: int = 640
    """standard_library: inner size of the SwiGLU layers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of matrix products, and except with adamw also of the matrices on the device."""
    scan_layers: bool = False
    """Loop over stacked layers: compiles faster, but without --stream gradients leave the
    device only after the backward pass."""
    remat: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


@dataclass(frozen=True, kw_only=True)
class DataSettings(_Group):
    """Data, and how examples are made of it (docs/finetuning.md)."""

    task: OwnTask | GlueTask = "standard_library"
    """standard_library: bytes of Python's source files. language: text. alpaca: instructions.
    chat: conversations. classification: your own classes. Others: GLUE."""
    data: Annotated[str, "PATH"] | None = None
    """File or folder with the data; none for standard_library."""
    test_data: File | None = None
    """File to evaluate the trained weights on, once, after the training."""
    length_buckets: int = 4
    """Number of lengths that batches are padded to."""
    text_column: str = "text"
    """language, classification: column with the text."""
    second_text_column: str | None = None
    """classification: column with the second text of a pair."""
    label_column: str = "label"
    """classification: column with the label."""
    chat_template: File | None = None
    """chat: Jinja template. If not given: the one in the model's folder."""
    token_cache: Dir | None = None
    """language, alpaca, chat: folder that keeps the tokens of the data for later starts."""
    packing: Literal["separate", "joined"] = "separate"
    """language: whether texts in one sequence see each other (joined)."""
    validation_share: float = 0.1
    """Share of the data to validate on, if it is no folder with files val* or dev*."""
    corpus_megabytes: float = 4.0
    """standard_library: size of the text."""


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(_Group):
    """Training: batches, steps, devices."""

    seed: int = 0
    """Seed of split, initial weights and order of batches."""
    steps: int | None = None
    """Optimizer steps; 0 only evaluates. If not given: those of --epochs."""
    epochs: float = 1.0
    """Passes over the training data, without --steps."""
    batch_size: int = 8
    """Sequences in a step, on all devices together."""
    sequence_length: int = 128
    """Tokens in a sequence (bytes for standard_library)."""
    micro_batches: int = 1
    """Parts of a batch, computed in turn to save memory."""
    optimizer: Literal["zenflow", "adamw", "offload"] = "zenflow"
    """adamw: optax.adamw on the device. offload: Adam on the host, each step waits for it."""
    deepspeed: File | None = None
    """DeepSpeed config, which overrides settings (docs/deepspeed.md)."""
    max_skipped: int = 10
    """Stop after so many non-finite gradients in a row."""
    mesh: str | None = None
    """Several devices, such as data=2,fsdp=4 (docs/multi_host.md)."""


@dataclass(frozen=True, kw_only=True)
class AdamSettings(_Group):
    """Adam, of all three optimizers: learning rate, decay, clipping."""

    learning_rate: float = 1e-3
    """Peak of the learning rate, after the warm-up."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the peak; cosine ends at a tenth of it, linear at zero."""
    warmup_steps: int = 0
    """Steps of the linear warm-up."""
    warmup_share: float | None = None
    """The same as a share of all steps."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.999
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """Weight decay of matrices; biases and norms have none."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this."""


@dataclass(frozen=True, kw_only=True)
class ZenFlowSettings(_Group):
    """zenflow: what the device updates, and when the host updates the rest."""

    topk_ratio: float = 0.1
    """Share of channels that the device updates at each step."""
    update_interval: int | Literal["auto"] = 4
    """Steps in a window, after which the host updates the deferred channels. auto: adaptive."""
    select_interval: int | Literal["auto", "epoch"] | None = None
    """Steps between selections of channels. auto: adaptive. epoch: once per epoch. If not given: 16
    windows."""
    full_warm_up_rounds: int = 0
    """First steps, each of which updates all channels."""
    full_warm_up_share: float | None = None
    """The same as a share of all steps."""
    rolling: bool = True
    """Let leaves take turns, for an even load."""
    staleness: int | None = None
    """Steps from a window's end to its update. If not given: 1, or without rolling a window."""
    window_scaling: float | Literal["auto", "none"] = "auto"
    """Exponent of a window's steps in its learning rate. auto: 0.5 if rolling, otherwise none."""
    provisional_share: float = 0.5
    """Step of deferred weights until their update arrives, as a share of the learning rate."""


@dataclass(frozen=True, kw_only=True)
class HostSettings(_Group):
    """Host, with zenflow and offload: the way of gradients to it, and its update."""

    send_gradients: Literal["during_step", "after_step", "per_window"] = "during_step"
    """When gradients leave the device; per_window sums them on the device first."""
    stream: Literal["none", "gradients", "weights"] = "none"
    """gradients: those of scanned layers leave one layer at a time, in the backward pass. weights:
    so do their gradients, and their matrices lie in host memory; without provisional steps."""
    transfer_dtype: Literal["bfloat16"] | None = None
    """Round float32 gradients to this for their transfer. If not given: no rounding."""
    host_kernel: Literal["numba", "numpy"] = "numba"
    """Implementation of the host update."""
    host_state: Literal["float32", "compact"] = "float32"
    """Adam's moments on the host; compact: 8 bits, 2.2 bytes per parameter in place of 8."""
    threads: int | None = None
    """Threads of the host update. If not given: chosen by the library."""
    prefetch_bytes: int | None = None
    """Limit for updates that wait on the device."""


@dataclass(frozen=True, kw_only=True)
class OutputSettings(_Group):
    """Output: metrics, validations, checkpoints."""

    output_dir: Dir = "runs"
    """Folder of all runs."""
    run: str | None = None
    """Folder of this run; if it has checkpoints, the run is resumed. If not given: a new one."""
    log_every: int = 10
    """Steps between rows of metrics.csv."""
    evaluate_every: int = 0
    """Steps between validations; 0: only before and after."""
    eval_batches: int | None = None
    """Batches in a validation. If not given: all."""
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = "none"
    """Also send the metrics to this tool, whose package must be installed."""
    progress: bool = True
    """Show a progress bar on a terminal."""
    save_every: int = 100
    """Steps between checkpoints; 0: only at the end or when stopped."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: bool = False
    """Validate at each checkpoint; keep the best, and write its weights."""
    best: str | None = None
    """Metric that says what is best, such as macro_f1. If not given: the task's."""
    export_every: int = 0
    """Steps between exports of the weights, as model-STEP in the run's folder; 0: none."""
    early_stopping_patience: int | None = None
    """Stop after so many validations in a row without a better one; needs --keep-best."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings(HostSettings, ZenFlowSettings, AdamSettings, TrainingSettings):
    """Everything that an optimizer is made of."""

    @property
    def warm_up_rounds(self) -> int:
        """Steps of the full warm-up, however they were given; `steps` must be known."""
        return self._steps(self.full_warm_up_share, self.full_warm_up_rounds)

    @property
    def learning_rate_warm_up(self) -> int:
        """Steps of the learning rate's warm-up, likewise."""
        return self._steps(self.warmup_share, self.warmup_steps)

    def _steps(self, share: float | None, count: int) -> int:
        # Rounded first, as 0.07 * 100 is 7.000000000000001.
        return count if share is None else math.ceil(round(share * self.steps, 6))


@dataclass(frozen=True, kw_only=True)
class StepSettings(OptimizerSettings, ModelSettings):
    """Everything that a training step is made of."""


@dataclass(frozen=True, kw_only=True)
class Settings(OutputSettings, StepSettings, DataSettings):
    """All settings of `train.finetune`; each can be a key of the TOML file."""

    def __post_init__(self):
        # zenflow itself checks its arguments of the same names.
        for name in _ABOVE_ZERO + _AT_LEAST_ZERO:
            value, above = getattr(self, name), name in _ABOVE_ZERO
            fits = value is None or (math.isfinite(value) and (value > 0 if above else value >= 0))
            self._check(name, fits, f"a finite number {'above' if above else 'of at least'} 0")
        for name, value in vars(self).items():
            # A command line has surrogates in place of bytes that are no UTF-8.
            is_text = not isinstance(value, str) or not re.search(r"[\ud800-\udfff]", value)
            self._check(name, is_text, "text in UTF-8, as settings.toml keeps it")
        self._check("seed", self.seed < 2**32, "a number below 2**32")
        is_share = 0 < self.validation_share < 1 or (self.validation_share, self.steps) == (1, 0)
        self._check(
            "validation_share",
            is_share,
            "a share above 0 and below 1, such as 0.001, as every run validates (1 with --steps 0 "
            "alone)",
        )
        for name in ("b1", "b2", "full_warm_up_share", "warmup_share"):
            self._check(name, 0 <= (getattr(self, name) or 0) < 1, "a share from 0 to below 1")
        self._check_one("full_warm_up_share", "full_warm_up_rounds")
        self._check_one("warmup_share", "warmup_steps")
        is_name = self.run is None or (self.run.strip(".") and re.fullmatch(r"[\w.-]+", self.run))
        folder = "the name of a folder in output_dir (letters, digits, . _ -)"
        self._check("run", bool(is_name), folder)
        divisor = f"a number that divides batch_size, {self.batch_size}"
        self._check("micro_batches", self.batch_size % self.micro_batches == 0, divisor)
        if self.early_stopping_patience is not None:
            wanted = "{}, as early_stopping_patience is set"
            self._check("keep_best", self.keep_best, wanted.format("True"))
            self._check("save_every", self.save_every > 0, wanted.format("a number above 0"))
        for name, expected in _OF_STREAMS.items() if self.stream != "none" else ():
            allowed = f"{expected!r}, as stream is {self.stream!r}"
            self._check(name, getattr(self, name) == expected, allowed)
        # Each head turns pairs of numbers.
        multiple = f"a multiple of {2 * self.heads}, twice the number of heads"
        self._check("width", self.width % (2 * self.heads) == 0, multiple)

    def _check(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise SettingsError(impossible(name, expected, getattr(self, name)))

    def _check_one(self, share: str, count: str) -> None:
        values = getattr(self, share), getattr(self, count)
        if values[0] is not None and values[1]:
            raise SettingsError(
                f"`{share}`: expected it or `{count}`, got both: {values[0]} and {values[1]}."
            )

    def check_task(self) -> None:
        """Checks that the task has the paths that it needs, and no option that it does not read.

        A config file alone need not have the paths.
        """
        own = self.task == "standard_library"
        for name in ("model", "data"):
            wanted = f"none for {self.task}" if own else f"a path, for {self.task}"
            self._check(name, own == (getattr(self, name) is None), wanted)
        for names, tasks in _READ_BY.items():
            for name in [] if self.task in tasks.split() else names.split():
                default = getattr(Settings, name)
                wanted = f"{default}, as {self.task} does not read it (read by: {tasks})"
                self._check(name, getattr(self, name) == default, wanted)


_ABOVE_ZERO = (
    "corpus_megabytes sequence_length length_buckets batch_size micro_batches width layers heads "
    "ffn epochs learning_rate eps "
    "max_grad_norm threads log_every eval_batches keep max_skipped early_stopping_patience"
).split()

# Options that not all tasks read, and the tasks that do.
_READ_BY = {
    "width layers heads ffn corpus_megabytes": "standard_library",
    "text_column": "language classification",
    "second_text_column label_column": "classification",
    "chat_template": "chat",
    "packing": "language",
    "token_cache": "language alpaca chat",
    "test_data": "language alpaca chat classification",
    "validation_share": "standard_library language alpaca chat classification",
}

# Of runs whose layers stream.
_OF_STREAMS = {
    "optimizer": "zenflow",
    "scan_layers": True,
    "micro_batches": 1,
    "send_gradients": "during_step",
}


def may_stream(settings: StepSettings) -> bool:
    return all(getattr(settings, name) == value for name, value in _OF_STREAMS.items())


_AT_LEAST_ZERO = (
    "seed steps warmup_steps weight_decay save_every evaluate_every export_every"
).split()


def impossible(name: str, expected: str, got: object) -> str:
    got = repr(got) if got == "" else got
    remedy = f"Change it in the config or pass {flag_of(name)}."
    return f"`{name}`: expected {expected}, got {got}. {remedy}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def option_words(name: str, value: object) -> list[str]:
    """The words of a command line that give a setting this value."""
    if isinstance(value, bool):
        return [flag_of(name if value else f"no_{name}")]
    return [flag_of(name), str(value)]
