"""Loads models from Hugging Face folders: `config.json` and safetensors, without torch."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from train.huggingface.config import ARCHITECTURES, CONFIG, ModelError, read_config
from train.huggingface.hub import model_folder
from train.huggingface.json_files import read_object
from train.huggingface.tensors import (
    DTYPES,
    Reader,
    Tensor,
    first_of,
    leaf_name,
    read_headers,
    source,
)
from train.model.blocks import INIT_STD
from train.model.decoder import Decoder, DecoderConfig
from train.model.encoder import BertClassifier, EncoderConfig

# Modules that a folder may lack; their weights are then randomly initialized.
OPTIONAL = ("pooler", "classifier")

# Tensors that can safely be ignored.
UNUSED = {
    "decoder": r"(^|\.)rotary_emb\.inv_freq$",  # follows from the config
    # Positions, which can be recomputed; heads for other purposes.
    "encoder": r"(^|\.)position_ids$|^cls\.|^qa_outputs\.",
}


class Pretrained(NamedTuple):
    """A folder whose config and headers are consistent."""

    folder: Path
    architecture: Literal["decoder", "encoder"]
    config: DecoderConfig | EncoderConfig
    tensors: Mapping[str, Tensor]  # by name without prefix; only usable tensors
    labels: int | None  # number of labels in the folder's classification head, if any
    raw: Mapping[str, Any]  # the content of config.json

    @property
    def class_names(self) -> tuple[str, ...]:
        """Returns the names of the head's classes; LABEL_0 and so on if the config has none."""
        named = self.raw.get("id2label") or {}
        return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(self.labels or 0))


def read_folder(model: str | Path) -> Pretrained:
    """Reads and checks `config.json` and the safetensors headers, without the weights."""
    folder = model_folder(model)
    if not folder.is_dir():
        problem = "is a file" if folder.is_file() else f"does not exist (in {Path.cwd()})"
        raise ModelError(f"{folder} {problem}. Pass a Hugging Face folder, or org/name on the Hub.")
    raw = read_object(folder / CONFIG, ModelError)
    config = read_config(folder / CONFIG, raw)
    architecture = ARCHITECTURES[raw["model_type"]]
    headers = read_headers(folder, architecture)
    unused = UNUSED[architecture]
    if isinstance(config, DecoderConfig) and config.tied:
        if _has_own_head(headers):
            config = config._replace(tied=False)  # like transformers 5 and vLLM
        else:
            unused += r"|^lm_head\.weight$"  # a copy of the embedding
    classes = raw.get("architectures") or "BertForSequenceClassification"
    if architecture == "encoder" and "BertForSequenceClassification" not in str(classes):
        unused += r"|^classifier\."  # a token-classification or multiple-choice head
    tensors = {name: tensor for name, tensor in headers.items() if not re.search(unused, name)}
    head = tensors.get("classifier.bias")
    labels = head.shape[0] if head and len(head.shape) == 1 else None
    pretrained = Pretrained(folder, architecture, config, tensors, labels, raw)
    _check_tensors(pretrained)
    return pretrained


def _has_own_head(headers: Mapping[str, Tensor]) -> bool:
    """Returns whether the folder has a head that differs from the embedding."""
    both = [headers.get(name) for name in ("lm_head.weight", "embed_tokens.weight")]
    with Reader() as reader:
        return None not in both and not reader.same(*both)


def make_model(
    config: DecoderConfig | EncoderConfig, *, labels: int, **options: Any
) -> Decoder | BertClassifier:
    """Makes a config's model with random weights; `labels` is the size of an encoder's head."""
    if isinstance(config, DecoderConfig):
        return Decoder(config, **options)
    return BertClassifier(config, labels=labels, **options)


def load_weights(
    pretrained: Pretrained,
    shapes: Any,
    shardings: Any = None,
    *,
    anew: Collection[str] = (),
    seed: int = 0,
) -> Any:
    """Reads the folder's weights into a tree of model parameters with these `shapes`.

    Reads leaf by leaf, and only the shards on this process's devices, so that host memory needs
    room only for the largest leaf. If `shardings` is None, everything is on the first device.
    `anew` lists modules that are initialized even if the folder contains them. Initial values
    depend only on `seed`.
    """
    if shardings is None:
        first = SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: first, shapes)
    drawn = set(newly_drawn(pretrained, shapes, anew=anew))

    with Reader() as reader:

        def load(path, leaf, sharding):
            name, dtype = leaf_name(path), np.dtype(leaf.dtype)
            if name in drawn:
                value = _draw(name, leaf.shape, dtype, seed)
                return jax.make_array_from_callback(leaf.shape, sharding, lambda i: value[i])
            layout = source(pretrained.architecture, name, leaf.shape)
            tensors = [pretrained.tensors[name] for name in layout.names]
            assert all(tensor.shape == layout.shape for tensor in tensors), name
            return jax.make_array_from_callback(
                leaf.shape, sharding, lambda index: reader.read(tensors, layout, dtype, index)
            )

        return jax.tree_util.tree_map_with_path(load, shapes, shardings)


def newly_drawn(
    pretrained: Pretrained, shapes: Any, *, anew: Collection[str] = ()
) -> tuple[str, ...]:
    """Returns the names of the leaves that `load_weights` initializes instead of reading."""
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    modules = {name.rpartition("/")[0] for name in names} & set(OPTIONAL)
    missing = {m for m in modules if not _has(pretrained, m)} | (modules & set(anew))
    return tuple(name for name in names if name.rpartition("/")[0] in missing)


def _has(pretrained: Pretrained, module: str) -> bool:
    kernel = source(pretrained.architecture, f"{module}/kernel", (1, 1)).names[0]
    return kernel in pretrained.tensors


def _draw(name: str, shape: tuple[int, ...], dtype: np.dtype, seed: int) -> np.ndarray:
    if name.endswith("/bias"):
        return np.zeros(shape, dtype)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return rng.normal(scale=INIT_STD, size=shape).astype(np.float32).astype(dtype)


def _check_tensors(pretrained: Pretrained) -> None:
    """Compares the headers with the tensors that the config's model needs."""
    expected = {}
    shapes = shapes_of(pretrained.config, pretrained.labels or 1)
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = leaf_name(path)
        layout = source(pretrained.architecture, name, leaf.shape)
        if name.split("/")[0] not in OPTIONAL or _has(pretrained, name.split("/")[0]):
            expected |= dict.fromkeys(layout.names, layout.shape)
    folder, tensors = pretrained.folder, pretrained.tensors
    if missing := expected.keys() - tensors.keys():
        names = first_of(missing)
        raise ModelError(f"{folder} lacks {names}, which the model in its config.json needs.")
    if extra := tensors.keys() - expected.keys():
        names, file = first_of(tensors[name].name for name in extra), tensors[min(extra)].file
        raise ModelError(f"{file} also contains {names}, which config.json's model lacks.")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tensor.shape != shape or tensor.dtype not in DTYPES:
            expected, got = f"{shape} of {', '.join(DTYPES)}", f"{tensor.shape} of {tensor.dtype}"
            raise ModelError(f"`{tensor.name}` in {tensor.file}: must be {expected}, but is {got}.")


@functools.lru_cache(maxsize=16)
def shapes_of(config: DecoderConfig | EncoderConfig, labels: int) -> Any:
    """Returns the shapes of a model's parameters. Blocks are scanned, so only one is traced."""

    def params():
        dtypes = {"weight_dtype": jnp.float32, "compute_dtype": jnp.float32}
        model = make_model(config, labels=labels, scan_layers=True, rngs=nnx.Rngs(0), **dtypes)
        return nnx.as_pure(nnx.split(model)[1])

    return jax.eval_shape(params)
