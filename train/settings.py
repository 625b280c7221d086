"""The settings of a training run, with defaults and limits; `command_line.py` reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from train import Failure


class SettingsError(Failure):
    """A mistake in the settings."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of `train.finetune`; every one can be a key of the TOML file."""

    seed: int = 0
    """Fixes the split, the initial weights and the order of the batches."""

    # Task.
    task: Literal[
        "standard_library",
        "language",
        "alpaca",
        "chat",
        "cola",
        "sst2",
        "mrpc",
        "qqp",
        "mnli",
        "qnli",
        "rte",
        "classification",
    ] = "standard_library"
    """standard_library: the next byte of the running Python's own source files, by a small model.
    language: the next token of text. alpaca: to follow instructions. chat: to answer in
    conversations. classification: the classes of a file of one's own. The others: GLUE."""
    model: str | None = None
    """Folder of the model to fine-tune, as Hugging Face has it.
    Left out with standard_library, whose model is made from the sizes below."""
    data: str | None = None
    """File or folder of the task's data. Left out with standard_library."""
    sequence_length: int = 128
    """Tokens in one sequence (bytes, of standard_library)."""
    length_buckets: int = 4
    """Lengths that a batch of alpaca, chat or classes may have, parts of sequence_length: the
    shortest that holds its longest example. Each is compiled once. 1: all are filled up to
    sequence_length."""
    text_column: str = "text"
    """language, classification: name of the field or column with the text."""
    second_text_column: str | None = None
    """classification: that of the second text, where classes are those of pairs."""
    label_column: str = "label"
    """classification: that of the labels."""
    chat_template: str | None = None
    """chat: file with the template that makes text of messages (Jinja).
    Left out: that of the model's folder."""
    packing: Literal["separate", "joined"] = "separate"
    """language: separate: texts in one sequence do not see each other. joined: each sees those
    before it in its sequence, as if they were one text."""
    validation_share: float = 0.1
    """Share of the data that is kept for validation, where the data has no part for that.
    With steps 0 it may be 1: all of it."""
    corpus_megabytes: float = 4.0
    """standard_library: size of the text, training and validation together."""

    # Model.
    width: int = 256
    """standard_library: size of the residual stream."""
    layers: int = 4
    """standard_library: number of transformer blocks."""
    heads: int = 4
    """standard_library: attention heads; width / heads must be an even whole number."""
    ffn: int = 640
    """standard_library: inner width of the SwiGLU layers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype in which matrices are multiplied; with zenflow and offload also of those that the
    device keeps. adamw keeps float32 and rounds at every step."""
    scan_layers: bool = False
    """Stack the blocks and loop over them: compiles faster, but gradients then leave the device
    only after the backward pass."""
    remat: bool = False
    """Compute the inside of the blocks again in the backward pass instead of keeping it."""

    # Training.
    steps: int | None = None
    """Optimizer steps. Left out: as many as `epochs` takes.
    0: shows the figures of the validation, and writes nothing."""
    epochs: float = 1.0
    """Passes over the training data; without meaning where `steps` is given."""
    batch_size: int = 8
    """Sequences in one step, all devices together."""
    micro_batches: int = 1
    """Parts of a batch whose gradients are computed one after the other and summed in float32."""
    optimizer: Literal["zenflow", "adamw", "offload"] = "zenflow"
    """zenflow: zenflow_jax.zenflow with a HostEngine. adamw: optax.adamw, float32 master weights,
    all on the device. offload: every channel on the host and every step waits for it, which is what
    ZeRO-Offload does (zenflow with update_interval 1, topk_ratio 0 and staleness 0)."""
    deepspeed: str | None = None
    """A DeepSpeed JSON config that overrides these settings: optimizer, schedule, clipping, batch
    size, dtype, zenflow. Its "auto" means what is set here. Keys that are not followed are listed
    (docs/deepspeed.md)."""
    learning_rate: float = 1e-3
    """Peak of the schedule: linear warm-up, then a cosine down to a tenth of the peak."""
    warmup_steps: int = 0
    """Steps of the linear warm-up of the learning rate."""
    warmup_share: float | None = None
    """The same as a share of the steps, rounded up.
    Left out: warmup_steps counts, which must be 0 otherwise."""
    b1: float = 0.9
    """Adam's decay of the mean of the gradients."""
    b2: float = 0.999
    """Adam's decay of the mean of their squares."""
    eps: float = 1e-8
    """Adam's smallest divisor."""
    weight_decay: float = 0.01
    """Decay of the matrices; biases and the scales of the norms do not decay."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm to this. Left out: no clipping."""
    max_skipped: int = 10
    """Steps in a row whose gradient is not finite, which are skipped, after which the run stops."""

    # zenflow; without meaning for the other two, but for `host_kernel`, `host_state` and
    # `threads` of offload.
    topk_ratio: float = 0.1
    """Share of the channels that is updated on the device at every step."""
    # Lines end where sentences do: `--help` breaks them there.
    update_interval: int | Literal["auto"] = 4
    """Steps in a window, after which the host updates the deferred channels.
    auto: as many as pile up what weighs as much as one important step (zenflow_jax.AutoWindow)."""
    select_interval: int | Literal["auto", "epoch"] | None = None
    """Steps between two selections, a multiple of update_interval if that is a number.
    Left out: 16 windows, of the longest if they adapt.
    auto: when the selected channels are no longer those that matter (zenflow_jax.AutoSelect).
    epoch: at the end of each pass over the text; a shorter run selects only at its start."""
    full_warm_up_rounds: int = 0
    """Steps at the start in which every channel is updated at every step."""
    full_warm_up_share: float | None = None
    """The same as a share of the steps, rounded up; the paper recommends 0.05.
    Left out: full_warm_up_rounds counts, which must be 0 otherwise."""
    rolling: bool = True
    """Let leaves take turns: at every step a few of them close their windows, not all at every few
    steps."""
    staleness: int | None = None
    """Steps that an update may take before it reaches the parameters; each step waits for it if 0.
    Left out: 1 if leaves take turns, else as many as a window has."""
    window_scaling: float | Literal["auto", "none"] = "auto"
    """Scale a deferred channel's step to the steps in its window: the exponent for the learning
    rate, 0.5 for the rule of the square root. "auto": 0.5 if leaves take turns, else "none"."""
    provisional_share: float = 0.5
    """Share of the learning rate that deferred weights move by at each step, until their update."""
    send_gradients: Literal["during_step", "after_step", "per_window"] = "during_step"
    """When gradients leave the device: during the backward pass; for scanned layers, while the next
    step runs; or as one sum per window, which needs room on the device. For offload micro_batches
    do the same as the last."""
    stream: Literal["none", "gradients"] = "none"
    """gradients: those of scanned layers leave inside the backward pass, one layer after the other,
    so that those of all layers never lie on the device together."""
    transfer_dtype: Literal["bfloat16"] | None = None
    """Send the gradients of float32 weights in half the bytes, rounded."""
    host_kernel: Literal["numba", "numpy"] = "numba"
    """The implementation of the host update."""
    host_state: Literal["float32", "compact"] = "float32"
    """How the host keeps Adam's moments. compact: in 8 bits, 2.1875 bytes per parameter in place of
    8, rounded at each host update."""
    threads: int | None = None
    """Threads of the host update. Left out: the library chooses."""
    prefetch_bytes: int | None = None
    """Memory of each device that an update may take before its boundary. Left out: all it needs."""

    # Devices.
    mesh: str | None = None
    """All devices of all processes as axis=size pairs of the axes data, fsdp and tensor, such as
    data=2,fsdp=4 for eight (train/sharding.py). Left out: one device."""

    # Reporting.
    log_every: int = 10
    """Steps between two rows of the metrics."""
    evaluate_every: int = 0
    """Steps between two validations. 0: before and after the training only."""
    report_to: Literal["none", "tensorboard", "trackio", "wandb"] = "none"
    """What else takes the figures of metrics.csv and validation.csv; its package must be there."""
    eval_batches: int | None = None
    """Batches of a validation at most, always the same ones. Left out: all there are."""
    output_dir: str = "runs"
    """Each run has a folder in here and never touches those of other runs."""
    progress: bool = True
    """Show a progress bar on a terminal; plain lines otherwise."""
    run: str | None = None
    """Name of the run's folder in output_dir. Left out: a new numbered one.
    If it holds checkpoints, the run goes on from the newest that is whole."""

    # Checkpoints.
    save_every: int = 100
    """Steps between two checkpoints, written beside the training.
    0: only at the end, and when SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) asks the run to stop."""
    keep: int = 2
    """How many of the newest checkpoints are kept."""
    keep_best: bool = False
    """Also keep the one that does best in the validation, which is then made at every save: by the
    task's own metric (GLUE), or the loss."""

    def __post_init__(self):
        # zenflow itself checks its arguments of the same names.
        for name in _ABOVE_ZERO + _AT_LEAST_ZERO:
            value, above = getattr(self, name), name in _ABOVE_ZERO
            fits = value is None or (math.isfinite(value) and (value > 0 if above else value >= 0))
            self._check(name, fits, f"a finite number {'above' if above else 'of at least'} 0")
        self._check("seed", self.seed < 2**32, "a number below 2**32")
        is_share = 0 < self.validation_share < 1 or (self.validation_share, self.steps) == (1, 0)
        self._check("validation_share", is_share, "a share below 1 (1 with --steps 0 alone)")
        for name in ("b1", "b2", "full_warm_up_share", "warmup_share"):
            self._check(name, 0 <= (getattr(self, name) or 0) < 1, "a share from 0 to below 1")
        self._check_one("full_warm_up_share", "full_warm_up_rounds")
        self._check_one("warmup_share", "warmup_steps")
        is_name = self.run is None or (self.run.strip(".") and re.fullmatch(r"[\w.-]+", self.run))
        folder = "the name of a folder in output_dir (letters, digits, . _ -)"
        self._check("run", bool(is_name), folder)
        divisor = f"a number that divides batch_size, {self.batch_size}"
        self._check("micro_batches", self.batch_size % self.micro_batches == 0, divisor)
        if self.stream == "gradients":
            for name, expected in _OF_STREAMS.items():
                allowed = f"{expected!r}, as stream is 'gradients'"
                self._check(name, getattr(self, name) in (expected, None), allowed)
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

    def check_paths(self) -> None:
        """Checks that the task has the paths that it needs, which a file alone need not have."""
        own = self.task == "standard_library"
        for name in ("model", "data"):
            wanted = f"none for {self.task}" if own else f"a path, for {self.task}"
            self._check(name, own == (getattr(self, name) is None), wanted)
        wanted = f"none for {self.task}: the task with a template is chat"
        self._check("chat_template", self.chat_template is None or self.task == "chat", wanted)

    def subset(self, names: Iterable[str]) -> dict[str, Any]:
        """The settings of these names."""
        return {name: getattr(self, name) for name in names}

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


_ABOVE_ZERO = (
    "corpus_megabytes sequence_length length_buckets batch_size micro_batches width layers heads "
    "ffn epochs learning_rate eps "
    "max_grad_norm threads log_every eval_batches keep max_skipped"
).split()

_OF_STREAMS = {
    "optimizer": "zenflow",
    "scan_layers": True,
    "micro_batches": 1,
    "send_gradients": "during_step",
}

_AT_LEAST_ZERO = "seed steps warmup_steps weight_decay save_every evaluate_every".split()


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
