"""Finds the tensors in a Hugging Face folder, and reads parts of them.

    leaf of the model                tensor, after its prefix `model.` or `bert.`
    blocks/3/query/kernel (in, out)  layers.3.self_attn.q_proj.weight (out, in)
    blocks/query/kernel (n, in, out) the same for all n layers
    head/kernel (n, in, words)       lm_head.weight (n words, in), part by part; `embed` likewise

Only safetensors are read, never pickles. Files are mapped into memory, so that only requested parts
are read. Files that `train.compress` has packed are decoded as they are read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

import elves
from train.huggingface.config import ModelError
from train.huggingface.json_files import foreign, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Supported dtypes, by their names in safetensors.
DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Modules of the supported models, and their tensors. `{}` is the layer number.
MODULES: Mapping[str, Mapping[str, str]] = {
    "decoder": {
        "embed": "embed_tokens",
        "blocks/attention_norm": "layers.{}.input_layernorm",
        "blocks/query": "layers.{}.self_attn.q_proj",
        "blocks/key": "layers.{}.self_attn.k_proj",
        "blocks/value": "layers.{}.self_attn.v_proj",
        "blocks/query_norm": "layers.{}.self_attn.q_norm",
        "blocks/key_norm": "layers.{}.self_attn.k_norm",
        "blocks/attention_out": "layers.{}.self_attn.o_proj",
        "blocks/ffn_norm": "layers.{}.post_attention_layernorm",
        "blocks/gate": "layers.{}.mlp.gate_proj",
        "blocks/up": "layers.{}.mlp.up_proj",
        "blocks/down": "layers.{}.mlp.down_proj",
        "norm": "norm",
        "head": "lm_head",
    },
    "encoder": {
        "embed": "embeddings.word_embeddings",
        "positions": "embeddings.position_embeddings",
        "types": "embeddings.token_type_embeddings",
        "embed_norm": "embeddings.LayerNorm",
        "blocks/query": "encoder.layer.{}.attention.self.query",
        "blocks/key": "encoder.layer.{}.attention.self.key",
        "blocks/value": "encoder.layer.{}.attention.self.value",
        "blocks/attention_out": "encoder.layer.{}.attention.output.dense",
        "blocks/attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
        "blocks/up": "encoder.layer.{}.intermediate.dense",
        "blocks/down": "encoder.layer.{}.output.dense",
        "blocks/ffn_norm": "encoder.layer.{}.output.LayerNorm",
        "pooler": "pooler.dense",
        "classifier": "classifier",
    },
}

# The prefix of all tensors except the head's, if the model has a head.
PREFIXES = {"decoder": "model.", "encoder": "bert."}
HEADS = {"decoder": "lm_head.", "encoder": "classifier."}


class Tensor(NamedTuple):
    """A tensor's location, from its file's header."""

    file: Path
    name: str  # in the file
    dtype: str  # a key of DTYPES, or another dtype in safetensors
    shape: tuple[int, ...]


class Source(NamedTuple):
    """The tensors that a leaf consists of."""

    names: tuple[str, ...]  # one name, or one per layer, without prefix
    shape: tuple[int, ...]  # of each tensor
    stacked: bool  # whether the leaf has an axis over tensors, or over one tensor's parts
    transposed: bool
    parts: int = 1  # number of parts that a vocabulary's rows are divided into

    @property
    def entry(self) -> tuple[int, ...]:
        """Returns the shape of one entry in a stack."""
        return (self.shape[0] // self.parts, *self.shape[1:])


def leaf_name(path: Any) -> str:
    """Returns a leaf's path in the tree, such as `blocks/3/query/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def source(architecture: str, leaf: str, shape: tuple[int, ...]) -> Source:
    """Returns the tensors of a leaf with this name (see `leaf_name`) and shape.

    Examples:
        >>> source("decoder", "blocks/gate/kernel", (2, 4, 8))[:2]
        (('layers.0.mlp.gate_proj.weight', 'layers.1.mlp.gate_proj.weight'), (8, 4))
    """
    layer = re.match(r"blocks/(\d+)/", leaf)
    module, _, part = re.sub(r"^blocks/\d+/", "blocks/", leaf).rpartition("/")
    name = f"{MODULES[architecture][module]}.{'bias' if part == 'bias' else 'weight'}"
    one_per_layer = module.startswith("blocks/") and layer is None
    rank, transposed = len(shape), part == "kernel"
    stacked = one_per_layer or rank > 2
    layers: Iterable[Any] = range(shape[0]) if one_per_layer else [layer and layer[1]]
    names = tuple(name.format(i) for i in layers)
    parts = shape[0] if stacked and not one_per_layer else 1
    entry = shape[1:] if stacked else shape
    entry = entry[::-1] if transposed else entry
    return Source(names, (parts * entry[0], *entry[1:]), stacked, transposed, parts)


def read_headers(folder: Path, architecture: str) -> dict[str, Tensor]:
    """Returns a folder's tensors, by their names without prefix, from the files' headers."""
    single, index = folder / SINGLE, folder / INDEX
    tensors = _read_header(single) if single.exists() else _read_index(folder, index)
    named: dict[str, Tensor] = {}
    for tensor in tensors:
        name = tensor.name.removeprefix(PREFIXES[architecture])
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))
        named[name] = tensor
    return named


def transpose(x: np.ndarray, out: np.ndarray) -> None:
    """Writes the transpose of `x` to `out` in tiles, about five times as fast as NumPy alone."""
    # Copies the elements as integers, because NumPy is slower with other dtypes, such as bfloat16.
    kind = f"u{x.dtype.itemsize}"
    rows, columns = out.view(kind), x.view(kind)
    for i in range(0, rows.shape[0], 64):
        for j in range(0, rows.shape[1], 256):
            rows[i : i + 64, j : j + 256] = columns[j : j + 256, i : i + 64].T


class Reader(contextlib.ExitStack):
    """Reads parts of leaves. Use it in a `with` block, which closes the files."""

    def __init__(self):
        super().__init__()
        self._files: dict[Path, Any] = {}

    def read(
        self, tensors: Sequence[Tensor], layout: Source, dtype: np.dtype, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Returns the part `index` (no strides) of a leaf, rounded to `dtype`."""
        entries = [(tensor, i * layout.entry[0]) for tensor in tensors for i in range(layout.parts)]
        if layout.stacked:
            entries, index = entries[index[0]], index[1:]
        index = index[::-1] if layout.transposed else index
        rows, *columns = (slice(*s.indices(n)) for s, n in zip(index, layout.entry, strict=True))
        shape = [s.stop - s.start for s in (rows, *columns)]
        out = np.empty((len(entries), *(shape[::-1] if layout.transposed else shape)), dtype)
        for row, (tensor, start) in zip(out, entries, strict=True):
            value = self._cut(tensor, (slice(start + rows.start, start + rows.stop), *columns))
            value = value.astype(dtype, copy=False)
            if layout.transposed:
                transpose(value, row)
            else:
                row[...] = value
        return out if layout.stacked else out[0]

    def same(self, a: Tensor, b: Tensor) -> bool:
        """Returns whether two matrices have equal values; reads a few rows at a time."""
        rows = a.shape[0]
        parts = (slice(i, min(i + 4096, rows)) for i in range(0, rows, 4096))
        pairs = ([self._cut(x, (part,)).astype(np.float32) for x in (a, b)] for part in parts)
        return a.shape == b.shape and all(np.array_equal(*pair) for pair in pairs)

    def _cut(self, tensor: Tensor, index: tuple[slice, ...]) -> np.ndarray:
        if tensor.file not in self._files:
            self._files[tensor.file] = self.enter_context(_opened(tensor.file))
        try:
            return self._files[tensor.file].get_slice(tensor.name)[index]
        except elves.ElvesError as error:
            raise ModelError(str(error)) from error


def _opened(path: Path) -> Any:
    """Opens a tensor file, plain or packed by `train.compress`, for a `with` block."""
    if elves.is_packed(path):
        return elves.open(path, threads=len(os.sched_getaffinity(0)))
    return safe_open(path, "numpy")


def _read_header(path: Path) -> list[Tensor]:
    try:
        with _opened(path) as file:
            cuts = {name: file.get_slice(name) for name in file.keys()}
            return [
                Tensor(path, name, cut.get_dtype(), tuple(cut.get_shape()))
                for name, cut in cuts.items()
            ]
    except elves.ElvesError as error:
        raise ModelError(str(error)) from error
    except (OSError, SafetensorError) as error:
        if not path.is_file():
            raise ModelError(f"the safetensors file {path} is missing. Copy it again.") from error
        problem = f"({path.stat().st_size} bytes) is damaged ({error})"
        raise ModelError(f"the safetensors file {path} {problem}. {foreign(path)}") from error


def _read_index(folder: Path, index: Path) -> list[Tensor]:
    if not index.exists():
        present = ", ".join(sorted(p.name for p in folder.iterdir())[:12])
        remedy = "Pass a folder written by transformers' `save_pretrained`"
        raise ModelError(f"{folder} has no {SINGLE} or {INDEX}, only {present}. {remedy}.")
    files = read_object(index, ModelError).get("weight_map")
    if not isinstance(files, dict) or not all(type(file) is str for file in files.values()):
        raise ModelError(f"`weight_map` in {index}: must name files, but is {files!s:.90}.")
    tensors = []
    for file in sorted(set(files.values())):
        tensors += [tensor for tensor in _read_header(folder / file) if tensor.name in files]
    return tensors


def first_of(names: Iterable[str]) -> str:
    """Returns a phrase with the first of several tensors, and the number of the rest."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 1} more" if len(ordered) > 1 else ""
    return f"the tensor `{ordered[0]}`{more}"
