"""Writes a trained model as a Hugging Face folder, in the original folder's layout.

Tensors are gathered and written one by one, so that host memory holds only one leaf at a time.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from elves.atomic import atomic_path, exchange, sync_all
from elves.safetensors import encode_header
from train.distributed import processes
from train.huggingface.config import CLASSES, CONFIG, TASK, ModelError
from train.huggingface.end_tokens import complete_folder
from train.huggingface.loading import Pretrained
from train.huggingface.tensors import (
    DTYPES,
    HEADS,
    INDEX,
    PREFIXES,
    SINGLE,
    Source,
    leaf_name,
    source,
    transpose,
)
from train.model.decoder import DecoderConfig

# Files that are copied unchanged: the tokenizer's, and the settings for text generation.
COPIED = tuple(
    "tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json "
    "added_tokens.json vocab.txt vocab.json merges.txt chat_template.jinja chat_template.json "
    "generation_config.json".split()
)


class Entry(NamedTuple):
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_file(path: Path, entries: Sequence[Entry], tensors: Iterator[np.ndarray]) -> None:
    """Writes a safetensors file tensor by tensor, so that memory holds only one at a time."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    described = ((e.name, names[e.dtype], e.shape, e.bytes) for e in entries)
    with open(path, "wb") as file:
        file.write(encode_header(described, {"format": "pt"}))  # `transformers` requires it
        for entry in entries:
            value = next(tensors)
            assert (value.dtype, value.shape) == (entry.dtype, entry.shape)
            file.write(value.reshape(-1).view(np.uint8).data)


def write_by_first(path: Path, write: Callable[[], None], tensors: Iterator[np.ndarray]) -> None:
    """Calls `write` in the first process; all processes gather the tensors."""
    try:
        if processes.is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            write()
    except OSError as error:
        problem = f"the model cannot be written to {path}: {error}"
        raise ModelError(f"{problem}. Free disk space, and resume the run.") from error
    finally:
        # All processes must gather; otherwise the rest would wait for a process that has failed.
        for _ in tensors:
            pass


def save_folder(
    path: Path,
    pretrained: Pretrained,
    params: Any,
    *,
    labels: Sequence[str] = (),
    values: Iterator[Any] | None = None,
    texts: Mapping[str, str] | None = None,
    task: str | None = None,
) -> None:
    """Writes a folder that `read_folder` and `transformers` can load.

    All processes must call it; the first process writes atomically. Each tensor keeps its dtype
    from the original folder; a new tensor gets the most frequent dtype.

    Args:
        path: A new folder, or a folder that contains only a model, which is replaced.
        pretrained: The original folder of the model.
        params: The model's parameters, scanned or not, as jax arrays or complete NumPy arrays.
        labels: Class names by id; () keeps the folder's own names.
        values: Arrays that replace the leaves of `params`; each is requested when it is written.
        texts: Contents of files in the new folder, by name; they replace copies.
        task: The trained task, which the config records.
    """
    leaves = [(leaf_name(p), x) for p, x in jax.tree_util.tree_leaves_with_path(params)]
    sources = [source(pretrained.architecture, name, x.shape) for name, x in leaves]
    read, usual = pretrained.tensors, dtype_of(pretrained)
    dtypes = [[DTYPES[read[n].dtype] if n in read else usual for n in x.names] for x in sources]
    tensors = _gathered(iter([x for _, x in leaves]) if values is None else values, sources, dtypes)

    def write() -> None:
        _check_replaceable(path, pretrained.folder)
        head, prefix = HEADS[pretrained.architecture], PREFIXES[pretrained.architecture]
        entries = [
            Entry(name if name.startswith(head) else prefix + name, dtype, layout.shape)
            for layout, each in zip(sources, dtypes, strict=True)
            for name, dtype in zip(layout.names, each, strict=True)
        ]
        content = _config(pretrained, entries, labels) | ({TASK: task} if task else {})
        config = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        with atomic_path(path, folder=True) as part:
            write_file(part / SINGLE, entries, tensors)
            for name in COPIED:
                if (pretrained.folder / name).is_file():
                    shutil.copyfile(pretrained.folder / name, part / name)
            for name, text in {CONFIG: config, **(texts or {})}.items():
                (part / name).write_text(text, encoding="utf-8")
            if task and isinstance(pretrained.config, DecoderConfig):
                complete_folder(part, pretrained.config.vocabulary, task)
            if path.exists():
                sync_all(part)  # if this fails, the old model is kept
                exchange(part, path)
                shutil.rmtree(part)

    write_by_first(path, write, tensors)


def dtype_of(pretrained: Pretrained) -> np.dtype:
    """Returns the most frequent dtype of a folder's tensors."""
    dtypes = Counter(tensor.dtype for tensor in pretrained.tensors.values())
    return DTYPES[dtypes.most_common(1)[0][0]]


def _gathered(
    leaves: Iterable[jax.Array | np.ndarray],
    sources: Iterable[Source],
    dtypes: Iterable[Sequence[np.dtype]],
) -> Iterator[np.ndarray]:
    for x, layout, each in zip(leaves, sources, dtypes, strict=True):
        value = processes.gather(x)
        value = value if layout.stacked else value[None]
        entries = value.reshape(-1, layout.parts, *value.shape[1:])
        for parts, dtype in zip(entries, each, strict=True):
            parts = np.ascontiguousarray(parts, dtype)
            if layout.transposed:
                saved = np.empty((layout.parts, *layout.entry), dtype)
                for part, place in zip(parts, saved, strict=True):
                    transpose(part, place)
                parts = saved
            yield parts.reshape(layout.shape)


def _config(
    pretrained: Pretrained, entries: Sequence[Entry], labels: Sequence[str]
) -> dict[str, Any]:
    """Returns the original folder's config, updated."""
    config = dict(pretrained.raw)
    config["architectures"] = [CLASSES[config["model_type"]]]
    widest = max(entries, key=lambda entry: entry.bytes)
    # The old key, which all versions of `transformers` read, unless the folder has the new key.
    config["dtype" if "dtype" in config else "torch_dtype"] = widest.dtype.name
    if config.get("tie_word_embeddings") and "lm_head.weight" in pretrained.tensors:
        config["tie_word_embeddings"] = False
    if pretrained.architecture == "encoder":
        if labels:
            config["id2label"] = {str(i): name for i, name in enumerate(labels)}
            config["label2id"] = {name: i for i, name in enumerate(labels)}
        # This key is the previous head's; without it, the number of labels decides.
        config.pop("problem_type", None)
    return config


def _check_replaceable(path: Path, origin: Path) -> None:
    """Raises an error if `path` is the original folder, or contains anything but a model."""
    if path.resolve() == origin.resolve():
        raise ModelError(f"{origin} is the folder that the model was read from. Pass another.")
    names = {file.name for file in path.iterdir()} if path.exists() else set()
    extra = sorted(names - {*COPIED, CONFIG, SINGLE, INDEX})
    extra = [x for x in extra if not re.fullmatch(r"model-.*\.safetensors", x)]
    if extra:
        listed = ", ".join(extra[:3])
        raise ModelError(
            f"{path} has files that are not part of a model: {listed}. Pass a new one."
        )
