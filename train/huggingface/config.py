"""Reads a Hugging Face folder's config.json: the kind of model, and its sizes.

A setting raises an error if it requires a feature that this project's models do not have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from train import Failure
from train.model.decoder import DecoderConfig, LinearRope, Llama3Rope
from train.model.encoder import EncoderConfig

CONFIG = "config.json"
TASK = "zenflow_task"  # the key for the task that a run trained

# The supported models: `model_type` in the config, and the class in `transformers`.
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "bert": "BertForSequenceClassification",
}
ARCHITECTURES: Mapping[str, Literal["decoder", "encoder"]] = {
    kind: "decoder" if name.endswith("CausalLM") else "encoder" for kind, name in CLASSES.items()
}

# Sizes that both architectures have.
SIZES = {
    "vocabulary": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "positions": "max_position_embeddings",
}

QWEN = ("qwen2", "qwen3")  # only they may have attention windows in some layers alone

# Values that a key must have if it is present, because the project's models support no other value.
FIXED: Mapping[str, Mapping[str, Any]] = {
    "decoder": {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}
    | {"attention_bias": False, "mlp_bias": False},
    "encoder": {"hidden_act": "gelu", "position_embedding_type": "absolute"}
    | {"is_decoder": False, "add_cross_attention": False, "quantization_config": None},
}

ROPE_BASE = 10_000.0  # the default in `transformers`


class ModelError(Failure):
    """A folder does not contain the requested model."""


def read_config(path: Path, raw: Mapping[str, Any]) -> DecoderConfig | EncoderConfig:
    """Returns the model's sizes and options, from `raw`, the content of the file `path`."""
    kind = raw.get("model_type")
    if kind not in [*ARCHITECTURES]:  # also a kind that is not text
        kinds = ", ".join(ARCHITECTURES)
        raise ModelError(f"`model_type` in {path}: must be one of {kinds}, but is {kind!r}.")
    keys = _Keys(path, raw)
    for key, value in FIXED[ARCHITECTURES[kind]].items():
        keys.check(key, raw.get(key) in (None, value), f"{value!r}, the only supported value")
    sizes = {name: keys.count(key) for name, key in SIZES.items()}
    if ARCHITECTURES[kind] == "decoder":
        return _decoder(keys, kind, **sizes)
    width, heads = sizes["width"], sizes["heads"]
    keys.check("num_attention_heads", width % heads == 0, f"a divisor of `hidden_size`, {width}")
    types, norm_eps = keys.count("type_vocab_size", 2), keys.positive("layer_norm_eps", 1e-12)
    return EncoderConfig(**sizes, types=types, norm_eps=norm_eps)


def _decoder(keys: _Keys, kind: str, **sizes: int) -> DecoderConfig:
    width, heads = sizes["width"], sizes["heads"]
    kv_heads = keys.count("num_key_value_heads", heads)
    divisor = f"a divisor of `num_attention_heads`, {heads}"
    keys.check("num_key_value_heads", heads % kv_heads == 0, divisor)
    if kind == "qwen3":
        head_width = keys.count("head_dim", 128)  # the default in `transformers`
    else:
        divides = keys.raw.get("head_dim") is not None or width % heads == 0
        keys.check("num_attention_heads", divides, f"a divisor of `hidden_size`, {width}")
        head_width = keys.count("head_dim", width // heads)
    keys.check("head_dim", head_width % 2 == 0, "an even number, for rotary positions")
    rope_base, rope_scaling = _rope(keys)
    return DecoderConfig(
        **sizes,
        kv_heads=kv_heads,
        head_width=head_width,
        norm_eps=keys.positive("rms_norm_eps", 1e-6),
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=keys.flag("tie_word_embeddings"),
        window=_window(keys, kind, sizes["layers"]),
    )


def _rope(keys: _Keys) -> tuple[float, LinearRope | Llama3Rope | None]:
    """Returns the rotations' base and scaling, from the keys of old and new configs."""
    # transformers 5 has `rope_parameters`, with the base inside; earlier versions have
    # `rope_scaling` and `rope_theta`, which all versions read if both exist; null means none.
    name = "rope_scaling" if keys.raw.get("rope_scaling") else "rope_parameters"
    scaling = keys.raw.get(name)
    outer_base = keys.positive("rope_theta", ROPE_BASE)
    if scaling is None:
        return outer_base, None
    keys.check(name, isinstance(scaling, dict), "an object")
    inner = _Keys(keys.path, scaling, name + ".")
    base = inner.positive("rope_theta", outer_base)
    inner.check("partial_rotary_factor", scaling.get("partial_rotary_factor", 1.0) == 1.0, "1.0")
    kind_key = "type" if "rope_type" not in scaling and "type" in scaling else "rope_type"
    match scaling.get(kind_key):
        case "default":
            return base, None
        case "linear":
            return base, LinearRope(inner.positive("factor"))
        case "llama3":
            low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
            inner.check("high_freq_factor", low < high, f"more than the low factor, {low}")
            positions = inner.count("original_max_position_embeddings")
            return base, Llama3Rope(inner.positive("factor"), low, high, positions)
    raise inner.error(kind_key, "'default', 'linear' or 'llama3'")


def _window(keys: _Keys, kind: str, layers: int) -> int | None:
    raw, types, window = keys.raw, keys.raw.get("layer_types"), None
    reads = keys.flag("use_sliding_window") if kind in QWEN else kind != "llama"
    if reads and raw.get("sliding_window") is not None:
        window = keys.count("sliding_window")
    first = raw.get("max_window_layers", 28) if kind in QWEN else 0
    sliding = [window is not None and layer >= first for layer in range(layers)]
    if isinstance(types, list):
        named = [name == "sliding_attention" for name in types]
        # Qwen's classes use the window in these layers. Other classes ignore the key, but other
        # programs do not.
        same = named == sliding or (kind in QWEN and window is not None)
        keys.check("layer_types", same, f"consistent with `sliding_window`, {window}")
        sliding = named
    # All layers must be alike, because they may be scanned.
    alike = all(sliding) or not any(sliding)
    keys.check("use_sliding_window", alike, "a value that gives all layers the same attention")
    return window if any(sliding) else None


class _Keys:
    """Reads a config's keys by type; errors name the key and the file."""

    def __init__(self, path: Path, raw: Mapping[str, Any], prefix: str = ""):
        self.path, self.raw, self.prefix = path, raw, prefix

    def count(self, key: str, default: int | None = None) -> int:
        return self._read(key, default, "a whole number above 0", int)

    def positive(self, key: str, default: float | None = None) -> float:
        return float(self._read(key, default, "a number above 0", int, float))

    def flag(self, key: str) -> bool:
        return self._read(key, False, "true or false", bool)

    def check(self, key: str, fits: bool, expected: str) -> None:
        if not fits:
            raise self.error(key, expected)

    def error(self, key: str, expected: str) -> ModelError:
        got = repr(self.raw[key]) if key in self.raw else "missing"
        return ModelError(f"`{self.prefix}{key}` in {self.path}: must be {expected}, but is {got}.")

    def _read(self, key: str, default: Any, expected: str, *kinds: type) -> Any:
        value = default if self.raw.get(key) is None else self.raw[key]
        fits = type(value) in kinds and (bool in kinds or 0 < value < math.inf)
        self.check(key, fits, expected)
        return value
