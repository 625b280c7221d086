"""Writes and reads a packed file's header, which describes the contents and reveals any change.

    8 bytes                      the length of the header, as in every safetensors file
    __metadata__["elves"]        JSON: version; the original tensors; their codecs and blocks
    __metadata__["elves_crc32"]  the CRC-32 of that text
    NAME                         U8: the blocks of the tensor NAME, without gaps
    spaces                       padding to the reserved length

So any safetensors reader can open the file, and finds tensors of bytes; reading it cannot run code.
The reader in this module encodes the parsed header again and compares the result with the file: a
header that differs in any byte is damaged.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from elves.blocks import BLOCK, CODECS, HEAD
from elves.safetensors import encode_header

VERSION = 1
SAFETENSORS, BYTES = "safetensors", "bytes"
#: The codec for a tensor without blocks.
DUPLICATE = "duplicate"
#: Bytes per word. Unlisted safetensors dtypes have words of one byte.
WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
WIDTHS |= {"F16": 2, "BF16": 2, "I16": 2, "U16": 2}
#: Dtypes with sign, exponent and fraction.
FLOATS = ("F64", "F32", "F16", "BF16")
#: NumPy dtypes.
NUMPY = {f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}") for kind in "IU" for n in (8, 4, 2, 1)}
NUMPY |= {f"F{8 * n}": np.dtype(f"f{n}") for n in (8, 4, 2)}
NUMPY |= {"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(np.bool_)}
NUMPY |= {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
# No header is longer: it takes 12 bytes per MiB and about 200 per tensor.
_MAX_BYTES = 2**30
REMEDY = "Copy the file again, or use another copy."


class ElvesError(Exception):
    """A file could not be packed or read; the message can be shown to the user as it is."""


@dataclass(frozen=True)
class Reference:
    """Refers to a tensor that another tensor equals or is close to."""

    # "file" means this file. Otherwise, the folder that contains `file`: "base", or "folder" in
    # files that 0.2 wrote.
    where: str
    file: str  # "" for this file
    tensor: str
    crc32: int  # of its bytes, after restoring if it is packed


@dataclass(frozen=True)
class Tensor:
    """The original tensor, and how it is packed."""

    name: str
    dtype: str  # its name in safetensors
    shape: tuple[int, ...]
    bytes: int
    codec: str  # the codec of most blocks, for information only: each block names its own
    bound: float | None  # the maximum allowed error
    error: float  # the maximum actual error
    crc32: int  # of the restored bytes
    of: Reference | None  # the tensor that it duplicates or differs from
    blocks: tuple[int, ...]  # the packed size of each block

    @property
    def width(self) -> int:
        return WIDTHS.get(self.dtype, 1)

    @property
    def packed_bytes(self) -> int:
        return sum(self.blocks)


@dataclass(frozen=True)
class Header:
    """Describes a packed file and its original."""

    kind: str  # "safetensors", or "bytes", which 0.2 wrote for pieces of other files
    head: bytes  # the bytes before the original tensors, compressed by zlib
    bytes: int
    crc32: int  # of the whole restored file
    base: str | None  # the folder of tensors with `of.where` "base"
    tensors: Mapping[str, Tensor]  # in their original order

    def unpacked_head(self) -> bytes:
        """Returns the header of the original file."""
        return zlib.decompress(self.head) if self.head else b""


def max_header_size(header: Header) -> int:
    """Returns the largest possible size of the header."""
    tensors = {
        name: dataclasses.replace(
            t,
            codec=max([*CODECS, DUPLICATE], key=len),
            error=1.2345678901234567e-300,
            crc32=2**32 - 1,
            of=t.of and dataclasses.replace(t.of, crc32=2**32 - 1),
            blocks=tuple(min(BLOCK, t.bytes - i) + HEAD for i in range(0, t.bytes, BLOCK)),
        )
        for name, t in header.tensors.items()
    }
    return len(encoded(dataclasses.replace(header, crc32=2**32 - 1, tensors=tensors)))


def encoded(header: Header, length: int | None = None) -> bytes:
    """Returns the header as bytes, padded to `length` if given."""
    description = {
        "version": VERSION,
        "block_bytes": BLOCK,
        "kind": header.kind,
        "head": base64.b64encode(header.head).decode(),
        "bytes": header.bytes,
        "crc32": header.crc32,
        "base": header.base,
        "tensors": {},
    }
    for t in header.tensors.values():
        fields = vars(t) | {"of": None if t.of is None else list(vars(t.of).values())}
        del fields["name"]
        description["tensors"][t.name] = fields
    text = json.dumps(description, separators=(",", ":"), allow_nan=False)
    metadata = {"elves": text, "elves_crc32": f"{zlib.crc32(text.encode()):08x}"}
    sizes = {t.name: t.packed_bytes for t in header.tensors.values()}
    tensors = [(name, "U8", [size], size) for name, size in sizes.items()]
    return encode_header(tensors, metadata, multiple=64, length=length)


def is_packed(path: Path) -> bool:
    """Returns whether a file begins like a packed file; it may be damaged."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            # The metadata comes first, and begins like this.
            return length < _MAX_BYTES and file.read(26).startswith(b'{"__metadata__":{"elves":"')
    except OSError:
        return False


def read_header(path: Path) -> tuple[Header, int]:
    """Returns the header of a packed file, and the position of its blocks."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= _MAX_BYTES:
                raise ValueError(f"its stated length is {length} bytes")
            raw = file.read(length)
            size = file.seek(0, 2)
        outer = json.loads(raw)["__metadata__"]
        if zlib.crc32(outer["elves"].encode()) != int(outer["elves_crc32"], 16):
            raise ValueError("its description does not match the checksum")
        description = json.loads(outer["elves"])
        if description["version"] != VERSION:
            raise ElvesError(
                f"{path} has version {description['version']}, but this program reads version "
                f"{VERSION}. Read it with the program that wrote it, or with a newer one."
            )
        header = _header(description)
        if encoded(header, 8 + length) != len(raw).to_bytes(8, "little") + raw:
            raise ValueError("it was changed")
        end = 8 + length + sum(t.packed_bytes for t in header.tensors.values())
        if size != end:
            raise ValueError(f"the file has {size} bytes instead of {end}")
    except OSError as error:
        raise ElvesError(f"The packed file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise ElvesError(
            f"The header of {path} is damaged: {str(error)[:200]}. No part of the file was read. "
            f"{REMEDY}"
        ) from error
    return header, 8 + length


def _header(fields: Mapping[str, Any]) -> Header:
    """Parses and checks the description. Raises ValueError, or other errors for invalid types."""
    if fields["block_bytes"] != BLOCK or fields["kind"] not in (SAFETENSORS, BYTES):
        raise ValueError(
            f"this program cannot read kind {fields['kind']} with {fields['block_bytes']}-byte "
            "blocks"
        )
    head = base64.b64decode(fields["head"], validate=True)
    tensors = {name: _tensor(name, fields) for name, fields in fields["tensors"].items()}
    size, checksum = _count(fields["bytes"]), _count(fields["crc32"])
    header = Header(fields["kind"], head, size, checksum, fields["base"], tensors)
    if size != len(header.unpacked_head()) + sum(t.bytes for t in tensors.values()):
        raise ValueError(f"its tensors do not add up to {size} bytes")
    return header


def _tensor(name: str, fields: Mapping[str, Any]) -> Tensor:
    shape = tuple(_count(n) for n in fields["shape"])
    size, dtype, codec = _count(fields["bytes"]), fields["dtype"], fields["codec"]
    if codec not in (*CODECS, DUPLICATE) or not isinstance(dtype, str):
        raise ValueError(f"`{name}` has the dtype {dtype} and codec {codec}")
    if dtype in WIDTHS and math.prod(shape) * WIDTHS[dtype] != size:
        raise ValueError(f"`{name}`, {dtype} {shape}, cannot have {size} bytes")
    of = None if fields["of"] is None else Reference(*fields["of"])
    blocks = tuple(_count(n) for n in fields["blocks"])
    # The file's size limits the restored size, so a small file cannot request much memory.
    expected = 0 if codec == DUPLICATE else -(-size // BLOCK)
    if len(blocks) != expected or (codec == DUPLICATE and of is None):
        raise ValueError(f"`{name}` has {len(blocks)} blocks instead of {expected}")
    if not all(HEAD < n <= BLOCK + HEAD for n in blocks):
        raise ValueError(f"`{name}` has a block of impossible size")
    checksum = _count(fields["crc32"])
    bound, error = fields["bound"], fields["error"]
    return Tensor(name, dtype, shape, size, codec, bound, error, checksum, of, blocks)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r} is not a valid integer")
    return value
