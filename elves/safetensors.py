"""Writes the header of a safetensors file, plain or packed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int], int]],
    metadata: Mapping[str, str] | None = None,
    *,
    multiple: int = 8,
    length: int | None = None,
) -> bytes:
    """Returns the bytes before the tensors, which follow without gaps in this order.

    Args:
        tensors: Name, dtype, shape and size in bytes of each tensor.
        metadata: The file's metadata, if any.
        multiple: Alignment of the tensors: the header's length is a multiple of this.
        length: Length to pad to instead.
    """
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, dtype, shape, nbytes in tensors:
        begin, end = end, end + nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    padding = -(8 + len(text)) % multiple if length is None else length - 8 - len(text)
    assert padding >= 0, f"{length} bytes reserved for a header of {8 + len(text)}"
    text += b" " * padding
    return len(text).to_bytes(8, "little") + text
