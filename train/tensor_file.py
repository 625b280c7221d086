"""Writes a file of safetensors, one tensor after the other, so that memory holds one of them.

The format makes that easy: a file is the length of its header (8 bytes, little-endian), the header
(JSON: dtype, shape and place of each tensor) and the bytes of all tensors.

References:
    https://huggingface.co/docs/safetensors (the format)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.hf_tensors import DTYPES


class Entry(NamedTuple):
    """A tensor that is to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def write_file(path: Path, entries: Sequence[Entry], tensors: Iterator[np.ndarray]) -> None:
    """Writes one file, taking as many of `tensors` as there are `entries`."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    # `transformers` loads no file without this.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.bytes
        header[entry.name] = {
            "dtype": names[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for entry in entries:
            value = next(tensors)
            assert (value.dtype, value.shape) == (entry.dtype, entry.shape)
            file.write(value.reshape(-1).view(np.uint8).data)
